"""Checks on a Hugging Face folder: each damage is one line that says what was found and what to do."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hoverlens.export import qwen3vl
from hoverlens.export.checkpoint import check_supported, open_checkpoint, supported
from hoverlens.export.converter import Converter, ensure_converter
from hoverlens.export.mllm import export_mllm
from hoverlens.export.random_mllm import PRESETS
from hoverlens.export.random_weights import write_safetensors
from hoverlens.export.safetensors_header import read_header
from hoverlens.runtime.errors import BadInput, HoverlensError

SIZES = replace(PRESETS["tiny"].sizes, layers=2, vision_depth=2, deepstack=(1,), vocabulary=64, positions=16)
IDS = {
    name: i
    for i, name in enumerate(
        ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>", "<|im_end|>")
    )
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(qwen3vl.config(SIZES, IDS)))
    (folder / "preprocessor_config.json").write_text(json.dumps(qwen3vl.preprocessor_config()))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", qwen3vl.shapes(SIZES), 0)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(whole, copy)
    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def shard(folder: Path) -> None:
    """Splits the weights into two files with an index."""
    shapes = qwen3vl.shapes(SIZES)
    names = list(shapes)
    (folder / "model.safetensors").unlink()
    listed = {}
    for i, part in enumerate((names[:20], names[20:])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        write_safetensors(folder / file, {n: shapes[n] for n in part}, 0)
        listed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def test_a_whole_folder_passes(folder: Path) -> None:
    found = open_checkpoint(folder)
    assert found.architecture == "Qwen3VLForConditionalGeneration"
    assert found.dtype == "F16"
    assert found.n_bytes == 2 * found.n_params
    assert set(found.files) == {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"}


def test_shards_are_put_together(folder: Path) -> None:
    before = open_checkpoint(folder).n_params
    shard(folder)
    assert open_checkpoint(folder).n_params == before


def test_code_and_pickles_beside_the_weights_are_kept_from_the_converter(folder: Path) -> None:
    for name in ("modeling_evil.py", "extra.bin", "optimizer.pt", "README.md", ".hidden.json"):
        (folder / name).write_bytes(b"x")
    files = open_checkpoint(folder).files
    assert not {"modeling_evil.py", "extra.bin", "optimizer.pt", ".hidden.json"} & set(files)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def _cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1000])


def _lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _lost_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _lost_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def _lost_tensor(folder: Path) -> None:
    shard(folder)
    edit(
        folder / "model.safetensors.index.json",
        lambda d: d["weight_map"].update({"model.new": "model-00001-of-00002.safetensors"}),
    )


def _outside(folder: Path) -> None:
    shard(folder)
    edit(folder / "model.safetensors.index.json", lambda d: d["weight_map"].update({"x": "../a.safetensors"}))


def _config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", change)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"is no Hugging Face model folder: it has no config\.json"),
    "adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        "it is an adapter: merge it into its base model first",
    ),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json is no JSON object"),
    "no architecture": (_config(lambda d: d.pop("architectures")), "names no architectures"),
    "pickled": (_pickled, r"holds pickled weights \(pytorch_model\.bin\), which can run code and are never read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "cut short": (_cut, r"has \d+ bytes, needed \d+: it is cut short; download it again"),
    "header only": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 16), "is no whole safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is no whole safetensors file"),
    "LFS pointer": (_lfs, "is a Git LFS pointer, not the weights; run 'git lfs pull'"),
    "lost shard": (_lost_shard, r"lacks model-00002-of-00002\.safetensors of 2 shards"),
    "lost index": (_lost_index, r"holds shards but no model\.safetensors\.index\.json"),
    "lost tensor": (_lost_tensor, r"lacks the tensor model\.new that"),
    "outside": (_outside, "names files outside the folder"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "no preprocessor": (lambda f: (f / "preprocessor_config.json").unlink(), "has no image preprocessor"),
    "wider": (
        _config(lambda d: d["text_config"].update(hidden_size=256)),
        r"config\.json needs .* of \[\d+, \d+\], model\.safetensors has \[\d+, \d+\]; use files of one checkpoint",
    ),
    "deeper": (_config(lambda d: d["text_config"].update(num_hidden_layers=3)), "has no weights for .*layers.2"),
    "shallower": (
        _config(lambda d: d["text_config"].update(num_hidden_layers=1)),
        r"has weights that its config\.json leaves out \(.*layers\.1",
    ),
    "absurd": (_config(lambda d: d["text_config"].update(num_hidden_layers=10**9)), "num_hidden_layers 1000000000"),
    "no sizes": (_config(lambda d: d.pop("vision_config")), "lacks or garbles a size of Qwen3-VL"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line_and_nothing_is_written(folder: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(BadInput, match=message) as e:
        export_mllm(folder, tmp_path / "out")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "does not exist; give the folder of a downloaded checkpoint"),
        ("m.gguf", "already converted; give it to 'hoverlens bundle assemble --mllm'"),
        ("m.pt", "a file of pickled weights, which can run code"),
        ("m.txt", "is a file; give the folder"),
    ],
)
def test_what_is_no_folder_is_named(tmp_path: Path, name: str, message: str) -> None:
    if name != "nowhere":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInput, match=message):
        open_checkpoint(tmp_path / name)


def test_other_families_are_judged_by_their_layers_and_widths(folder: Path) -> None:
    edit(folder / "config.json", lambda d: d.update(architectures=["InternVLForConditionalGeneration"]))
    open_checkpoint(folder)
    edit(folder / "config.json", lambda d: d["text_config"].update(num_hidden_layers=3))
    with pytest.raises(BadInput, match="num_hidden_layers 3, but there are weights of 2 layers"):
        open_checkpoint(folder)
    edit(folder / "config.json", lambda d: d["text_config"].update(num_hidden_layers=2, intermediate_size=999))
    with pytest.raises(BadInput, match=r"intermediate_size 999, but there are .*down_proj"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 3]}}',
        b'{"a": {"dtype": "F16", "shape": [2], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F16", "shape": [-1, -2], "data_offsets": [0, 4]}}',
        b'{"a": {"shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": 1}',
        b"\xff\xfe",
        b'{"a":' * 50_000,
    ],
)
def test_a_hostile_header_is_one_line(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    with pytest.raises(BadInput, match=r"damaged safetensors header|longer than its header says"):
        read_header(path)


def converter(tmp_path: Path, text: tuple[str, ...], vision: tuple[str, ...]) -> Converter:
    (tmp_path / "conversion").mkdir(parents=True)
    lines = ["raise SystemExit('never run')"]
    for table, names in (("TEXT_MODEL_MAP", text), ("MMPROJ_MODEL_MAP", vision)):
        lines.append(f"{table}: dict[str, str] = {dict.fromkeys(names, 'x')!r}")
    (tmp_path / "conversion" / "__init__.py").write_text("\n".join(lines))
    return Converter(tmp_path, "0", "0", False)


def test_an_architecture_that_the_converter_does_not_know_is_refused_with_what_it_knows(
    folder: Path, tmp_path: Path
) -> None:
    edit(folder / "config.json", lambda d: d.update(architectures=["NewVLModel"]))
    found = open_checkpoint(folder)
    known = converter(tmp_path / "c", ("Qwen3VLForConditionalGeneration",), ("Qwen3VLForConditionalGeneration",))
    with pytest.raises(BadInput, match=r"is a NewVLModel, whose text model .* it knows 1 models that see, .* Q"):
        check_supported(found, known)


def test_a_text_model_without_vision_is_refused(folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", lambda d: d.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(BadInput, match="whose vision encoder"):
        check_supported(open_checkpoint(folder), converter(tmp_path / "c", ("LlamaForCausalLM",), ("Other",)))


def test_the_inner_architectures_count_where_the_outer_one_is_not_listed(folder: Path, tmp_path: Path) -> None:
    """InternVL's older configs are like that."""

    def change(d: dict[str, Any]) -> None:
        d["architectures"] = ["InternVLChatModel"]
        d["vision_config"]["architectures"] = ["InternVisionModel"]
        d["text_config"]["architectures"] = ["Qwen3ForCausalLM"]

    edit(folder / "config.json", change)
    check_supported(open_checkpoint(folder), converter(tmp_path / "c", ("Qwen3ForCausalLM",), ("InternVisionModel",)))


def test_the_installed_converter_knows_the_families_that_we_promise() -> None:
    try:
        text, vision = supported(ensure_converter())
    except HoverlensError as e:
        pytest.skip(f"no converter: {e}")
    for name in (
        "Qwen3VLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Glm4vForConditionalGeneration",
    ):
        assert name in text, name
        assert name in vision, name
    # These two name text model and encoder inside their config.
    assert {"SmolVLMForConditionalGeneration", "InternVisionModel"} <= vision
    assert {"VLlama3ForCausalLM", "Qwen3ForCausalLM"} <= text
