"""Our table of tensors is transformers' and its config is understood."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from hoverlens.export import qwen3vl
from hoverlens.export.random_mllm import PRESETS
from hoverlens.export.vocabulary import SPECIAL_TOKENS

# Its own process and folder: transformers looks for a package called "kernels" and would find ours.
PROGRAM = """
import json, sys
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
out = {}
for name, config in json.load(open(sys.argv[1])).items():
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config))
    out[name] = {k: list(v.shape) for k, v in model.state_dict().items()}
print(json.dumps(out))
"""


def test_tensors_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    ids = {name: 5 + i for i, (name, _) in enumerate(SPECIAL_TOKENS)}
    configs = {name: qwen3vl.config(preset.sizes, ids) for name, preset in PRESETS.items()}
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "configs.json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name, preset in PRESETS.items():
        ours = {k: list(v) for k, v in qwen3vl.shapes(preset.sizes).items()}
        # The output layer is tied to the embedding, so a checkpoint does not store it.
        assert theirs[name].pop("lm_head.weight") == ours["model.language_model.embed_tokens.weight"]
        assert ours == theirs[name]


@pytest.mark.parametrize(
    ("preset", "text", "vision"), [("10m", 5.2e6, 5.7e6), ("159m", 154.5e6, 8.03e6), ("2b", 1.72e9, 0.41e9)]
)
def test_presets_have_the_size_in_their_name(preset: str, text: float, vision: float) -> None:
    count = {"text": 0, "vision": 0}
    for name, shape in qwen3vl.shapes(PRESETS[preset].sizes).items():
        count["vision" if ".visual." in name else "text"] += math.prod(shape)
    assert count["text"] == pytest.approx(text, rel=0.02)
    assert count["vision"] == pytest.approx(vision, rel=0.02)


def test_rotary_sections_fill_the_head_in_qwens_proportions() -> None:
    assert qwen3vl.QWEN3_VL_2B.mrope_sections == [24, 20, 20]
    assert PRESETS["10m"].sizes.mrope_sections == [12, 10, 10]
