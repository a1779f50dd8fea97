"""Exporting an MLLM for real: random weights of Qwen3-VL's architecture, with the head sizes of real models."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hoverlens.calibration.imatrix import calibrate_imatrix
from hoverlens.calibration.imatrix_file import read_imatrix
from hoverlens.export import edgellm as edgellm_module
from hoverlens.export import mllm as module
from hoverlens.export import random_mllm
from hoverlens.export.edgellm import export_edgellm, find_environment
from hoverlens.export.mllm import Exported, export_mllm
from hoverlens.export.quantise import check_imatrix, quant_named
from hoverlens.export.vocabulary import PRE_TOKENIZER
from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.gguf import read_gguf_header
from hoverlens.runtime.mllm.base import GenerateRequest, Text
from hoverlens.runtime.mllm.chat import ChatFormat
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions

#: Rows of 256, as K-quants take them; heads of 128 and 64, as Qwen3-VL-2B has them.
SIZES: dict[str, Any] = {
    "hidden": 256,
    "head_dim": 128,
    "intermediate": 768,
    "vision_hidden": 256,
    "vision_heads": 4,
    "vision_intermediate": 512,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: 4 text layers, 4 vision layers with deepstack."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf") / "random-blocks"
    preset = random_mllm.Preset(replace(random_mllm.PRESETS["tiny"].sizes, **SIZES), False, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_mllm.PRESETS, "blocks", preset)
        random_mllm.write_checkpoint(folder, "blocks", 3)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(16):
        generator = np.random.default_rng(seed)
        y, x = np.mgrid[0:128, 0:192]
        picture = np.stack([x, 60 + y, 40 + (x + y) // 2], -1).astype(np.uint8)
        for _ in range(6):
            left, top = generator.integers(0, 150), generator.integers(0, 90)
            picture[top : top + 30, left : left + 30] = generator.integers(0, 256, 3)
        Image.fromarray(picture).save(folder / f"{seed}.png")
    return folder


class Shelf:
    """Exports made once for all tests."""

    def __init__(self, checkpoint: Path, photos: Path, folder: Path) -> None:
        self.checkpoint, self.photos, self.folder = checkpoint, photos, folder
        self._made: dict[str, Exported] = {}

    def get(self, name: str) -> Exported:
        if name not in self._made:
            quant, _, with_imatrix = name.partition("+")
            self._made[name] = export_mllm(
                self.checkpoint,
                self.folder / name,
                quant=quant,
                imatrix=self.imatrix() if with_imatrix else None,
                pre_tokenizer=PRE_TOKENIZER,
                self_test=True,
            )
        return self._made[name]

    def imatrix(self) -> Path:
        path = self.folder / "imatrix.gguf"
        if not path.exists():
            plain = self.get("F16").path
            calibrate_imatrix(
                path,
                mllm=str(plain / "mllm.gguf"),
                mmproj=str(plain / "mmproj.gguf"),
                images=[str(self.photos)],
                image_max_tokens=64,
                threads=1,
                allow_small=True,
            )
        return path


@pytest.fixture(scope="session")
def shelf(checkpoint: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(checkpoint, photos, tmp_path_factory.mktemp("exports"))


ALL = ("F16", "Q8_0", "Q4_K_M", "Q4_K_M+imatrix")

#: Least share of equal tokens and largest error of logits. Random weights have flat distributions, so many tokens are
#: near ties; a wrong conversion agrees on next to nothing.
BOUNDS = {
    "F16": (0.98, 0.01),
    "Q8_0": (0.85, 0.1),
    "Q4_K_M": (0.5, 0.4),
    "Q4_K_M+imatrix": (0.5, 0.4),
}


@pytest.mark.parametrize("name", ALL)
def test_every_type_agrees_with_the_source_as_far_as_its_bits_go(shelf: Shelf, name: str) -> None:
    found = shelf.get(name).document["self_test"]
    agreement, error = BOUNDS[name]
    assert found["token_agreement"] >= agreement
    assert found["logit_error"] <= error
    assert found["cosine"] >= 0.999
    assert found["tokens_equal"]
    assert found["positions"] == 64


@pytest.mark.parametrize("name", ALL)
def test_every_type_loads_in_the_runtime_and_answers(shelf: Shelf, name: str) -> None:
    folder = shelf.get(name).path
    options = LlamaOptions(n_ctx=1024, n_sequences=4, threads=1, image_max_tokens=64)
    with LlamaCppBackend(folder / "mllm.gguf", folder / "mmproj.gguf", options) as backend:
        chat = ChatFormat.from_template(backend.info.chat_template)
        features = backend.encode(np.asarray(Image.open(shelf.photos / "0.png")))
        with backend.prefix(chat.open("You see.", features, Text("\nWhat is it?"))) as state:
            out = backend.generate([GenerateRequest(state, chat.close(), max_tokens=4)])
    assert len(out[0].tokens) == 4


def test_rows_of_256_get_k_quants_and_sizes_fall(shelf: Shelf) -> None:
    types = {t.name: t.type for t in read_gguf_header(shelf.get("Q4_K_M").path / "mllm.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    sizes = [shelf.get(name).document["files"]["mllm"]["size"] for name in ("F16", "Q8_0", "Q4_K_M")]
    assert sizes[0] > 1.5 * sizes[1] > 2 * sizes[2] * 0.9


def test_the_importance_matrix_changes_the_weights_and_lowers_the_error_where_it_counts(shelf: Shelf) -> None:
    plain, weighted = (shelf.get(n).path / "mllm.gguf" for n in ("Q4_K_M", "Q4_K_M+imatrix"))
    assert plain.read_bytes() != weighted.read_bytes()
    record = shelf.get("Q4_K_M+imatrix").document["imatrix"]
    matrix = read_imatrix(shelf.imatrix())
    assert record["images"] == 16
    assert record["set_sha256"] == matrix.facts["set_sha256"]
    assert record["sha256"] == module.sha256_file(shelf.imatrix())


def test_the_sidecar_says_what_the_files_are(shelf: Shelf) -> None:
    exported = shelf.get("Q8_0")
    document = json.loads((exported.path / "export.json").read_text())
    assert document == exported.document
    for role in ("mllm", "mmproj"):
        entry = document["files"][role]
        path = exported.path / entry["path"]
        assert entry["sha256"] == module.sha256_file(path)
        assert entry["size"] == path.stat().st_size
    assert document["files"]["mllm"]["precision"] == "Q8_0"
    assert document["files"]["mmproj"]["precision"] == "F16"
    assert document["recipe"]["converter"]


def test_the_same_command_again_does_nothing_and_a_change_is_named(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(shelf.get("Q8_0").path, out)
    again = export_mllm(shelf.checkpoint, out, pre_tokenizer=PRE_TOKENIZER)
    assert not again.made
    (out / "mmproj.gguf").write_bytes(b"x")
    made = export_mllm(shelf.checkpoint, out, pre_tokenizer=PRE_TOKENIZER, self_test=False)
    assert made.reason == "mmproj.gguf is missing or has changed since"
    made = export_mllm(shelf.checkpoint, out, quant="Q6_K", pre_tokenizer=PRE_TOKENIZER, self_test=False)
    assert made.reason == "quant was Q8_0, now Q6_K"
    assert made.document["self_test"] is None
    assert "left out" in made.document["self_test_skipped"]
    (out / "export.json").write_text("{")
    made = export_mllm(shelf.checkpoint, out, quant="Q6_K", pre_tokenizer=PRE_TOKENIZER, self_test=False)
    assert made.reason == "its export.json is damaged"


def test_a_missed_agreement_is_an_error_and_writes_nothing(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(HoverlensError, match=r"agrees with its source on .*, needed 100\.0%; take a finer --quant"):
        export_mllm(shelf.checkpoint, tmp_path / "out", quant="Q3_K_S", pre_tokenizer=PRE_TOKENIZER, min_agreement=1.0)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_does_not_suffice_is_the_said_reason(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoverlens.export.selftest.available_bytes", lambda: 1_000_000)
    made = export_mllm(shelf.checkpoint, tmp_path / "out", quant="F16", pre_tokenizer=PRE_TOKENIZER)
    assert "GB of memory, 0.0 GB are available" in made.document["self_test_skipped"]


def test_a_disk_that_is_full_is_said_before_any_work(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("hoverlens.export.staging.shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(HoverlensError, match=r"needs 0\.1 GB on the disk .* 0\.0 GB are free; free some or choose"):
        export_mllm(shelf.checkpoint, tmp_path / "out", pre_tokenizer=PRE_TOKENIZER)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_vocabulary_says_how_to_name_it(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(HoverlensError, match=r"does not know the vocabulary of .*random-blocks; .* --pre-tokenizer"):
        export_mllm(shelf.checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_importance_matrix_of_another_model_is_refused(shelf: Shelf, tiny_bundle: Any) -> None:
    with pytest.raises(BadInput, match=r"is of another model: blk\.0\.\w+\.weight has \d+ columns, found 1x\d+"):
        check_imatrix(read_imatrix(shelf.imatrix()), tiny_bundle.need("mllm"), "m.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quant": "Q9"}, "unknown quantisation 'Q9'; choose one of F32"),
        ({"quant": "IQ2_XS"}, "IQ2_XS needs an importance matrix"),
        ({"mmproj_quant": "Q4_0"}, "the projector cannot be Q4_0"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        export_mllm(tmp_path, tmp_path / "out", **arguments)


def test_types_may_be_written_in_lower_case() -> None:
    assert quant_named("q4_k_m") == quant_named("Q4-K-M") == "Q4_K_M"


def test_other_folders_are_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(BadInput, match="is no exported model, so it is left alone"):
        export_mllm(shelf.checkpoint, tmp_path / "mine")
    with pytest.raises(BadInput, match="exists and is no exported model"):
        export_mllm(shelf.checkpoint, shelf.checkpoint)


def test_a_read_only_place_is_named(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoverlens.export.staging.os.access", lambda *_: False)
    with pytest.raises(BadInput, match="is not writable; choose another folder with -o"):
        export_mllm(shelf.checkpoint, tmp_path / "out")


def test_killed_at_any_moment_the_same_command_then_succeeds_and_leaves_no_debris(shelf: Shelf, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "hoverlens.cli", "export", "mllm", str(shelf.checkpoint), "--quant", "Q4_K_M"]
    command += ["--no-self-test", "--pre-tokenizer", PRE_TOKENIZER, "-o", str(work / "out")]
    for delay in (1.5, 4.0, 8.0):
        child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not (work / "out").exists() or (work / "out" / "export.json").is_file()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in work.iterdir()) == ["out"]
    assert sorted(p.name for p in (work / "out").iterdir()) == ["export.json", "mllm.gguf", "mmproj.gguf"]
    expected = shelf.get("Q4_K_M").path / "mllm.gguf"
    assert (work / "out" / "mllm.gguf").read_bytes() == expected.read_bytes()


def test_without_edge_llm_the_error_says_how_to_get_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edgellm_module, "cache_dir", lambda: tmp_path / "cache")
    with pytest.raises(HoverlensError, match=r"exporter is not installed; --install puts it into .*edgellm/venv"):
        export_edgellm(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_edge_llm_refuses_heads_that_its_plugins_do_not_have(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    preset = random_mllm.Preset(replace(random_mllm.PRESETS["tiny"].sizes, head_dim=96), False, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_mllm.PRESETS, "odd", preset)
        random_mllm.write_checkpoint(folder, "odd", 0)
    with pytest.raises(BadInput, match=r"takes heads of \(64, 128\), found 96"):
        export_edgellm(folder, tmp_path / "out")


def test_edge_llm_exports_language_model_and_visual_encoder(checkpoint: Path, tmp_path: Path) -> None:
    if find_environment() is None:
        pytest.skip("TensorRT Edge-LLM's exporter is not installed; hoverlens export mllm --to edgellm --install")
    made = export_edgellm(checkpoint, tmp_path / "out")
    assert made["made"]
    for name in ("llm/model.onnx", "visual/model.onnx", "llm/tokenizer.json"):
        assert (tmp_path / "out" / name).is_file()
        assert name in made["files"]
    assert made["board"]["commands"][0].startswith("llm_build --onnxDir llm")
    assert not export_edgellm(checkpoint, tmp_path / "out")["made"]
