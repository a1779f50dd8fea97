"""Assembling a bundle: what is refused, what the manifest says, nothing half-written."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoverlens.export import assemble as module
from hoverlens.export.assemble import assemble
from hoverlens.runtime.bundle import Bundle, bundle_info, verify_bundle
from hoverlens.runtime.errors import BadInput, HoverlensError

onnx = pytest.importorskip("onnx")

TEXT: dict[str, Any] = {
    "general.architecture": "qwen3vl",
    "general.name": "Some model",
    "general.license": "apache-2.0",
    "qwen3vl.block_count": 2,
    "qwen3vl.embedding_length": 64,
    "qwen3vl.n_deepstack_layers": 1,
    "tokenizer.ggml.model": "gpt2",
}
VISION: dict[str, Any] = {
    "general.architecture": "clip",
    "clip.has_vision_encoder": True,
    "clip.projector_type": "qwen3vl_merger",
    "clip.vision.projection_dim": 64,
    "clip.vision.is_deepstack_layers": [False, True],
}


def write_gguf(path: Path, metadata: dict[str, Any], cut: int = 0) -> Path:
    """A GGUF file with one float32 tensor of 8 values."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata))
    for key, value in metadata.items():
        out += text(key)
        if isinstance(value, bool):
            out += struct.pack("<I?", 7, value)
        elif isinstance(value, int):
            out += struct.pack("<II", 4, value)
        elif isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif value and isinstance(value[0], str):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            out += struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
    out += text("weights") + struct.pack("<IQIQ", 1, 8, 0, 0)
    out += bytes(-len(out) % 32) + bytes(32)
    path.write_bytes(out[: len(out) - cut])
    return path


def write_detector(path: Path, classes: int = 3, external: bool = False) -> Path:
    """A YOLOv8-shaped graph: 1 x (4 + classes) x 21 for a 32 x 32 picture."""
    from onnx import TensorProto, helper, numpy_helper

    make = helper.make_tensor_value_info
    rows = numpy_helper.from_array(np.full((1, 4 + classes, 21), 0.5, "float32"), "rows")
    zero = numpy_helper.from_array(np.zeros((1,), "float32"), "zero")
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0),
            helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
            helper.make_node("Add", ["rows", "nothing"], ["output0"]),
        ],
        "detector",
        [make("images", TensorProto.FLOAT, [1, 3, 32, 32])],
        [make("output0", TensorProto.FLOAT, [1, 4 + classes, 21])],
        [rows, zero],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    if external:
        onnx.save(
            model,
            str(path),
            save_as_external_data=True,
            location="weights.bin",
            size_threshold=0,
            convert_attribute=True,
        )
    else:
        onnx.save(model, str(path))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOVERLENS_CACHE", str(tmp_path_factory.mktemp("cache")))
    # The models here are headers without weights; loading real ones is tested with llama.cpp's tests.
    monkeypatch.setattr(module, "try_load", lambda *_: None)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "models"
    folder.mkdir()
    return {
        "mllm": write_gguf(folder / "model.gguf", TEXT),
        "mmproj": write_gguf(folder / "projector.gguf", VISION),
    }


def refused(out: Path, **files: Any) -> str:
    with pytest.raises(BadInput) as e:
        assemble(out, **files)
    message = str(e.value)
    assert "\n" not in message
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}.*"))
    return message


def test_a_pair_becomes_a_bundle(pair: dict[str, Any], tmp_path: Path) -> None:
    bundle = assemble(tmp_path / "b", **pair, name="mine", prompt_template="3")
    assert verify_bundle(bundle.path) == []
    assert bundle.name == "mine"
    assert bundle.need("mllm").read_bytes() == pair["mllm"].read_bytes()
    entry = bundle.manifest.files["mllm"]
    assert (entry.source, entry.licence, entry.precision) == ("Some model", "apache-2.0", "F32")
    assert entry.weights == "unknown"
    assert bundle.manifest.image_min_tokens == 1024
    assert bundle.manifest.prompt_template == "3"
    assert "llama-cpp-python" in bundle.manifest.tools


def test_random_weights_are_carried_over(tmp_path: Path, pair: dict[str, Any]) -> None:
    write_gguf(pair["mllm"], {**TEXT, "general.tags": ["random-weights"]})
    bundle = assemble(tmp_path / "b", **pair)
    assert bundle.random_roles == ("mllm",)
    assert bundle.manifest.image_min_tokens is None
    assert json.loads((bundle.path / "manifest.json").read_text())["image_max_tokens"] == 256


def test_a_detector_is_described(tmp_path: Path) -> None:
    detector = write_detector(tmp_path / "d.onnx")
    bundle = assemble(
        tmp_path / "b",
        detector=detector,
        labels=["car", "van", "bus"],
        licences={"detector": "MIT"},
        sources={"detector": "drawn by a test"},
    )
    entry = bundle.manifest.files["detector"]
    assert entry.family == "yolov8"
    assert entry.labels == ["car", "van", "bus"]
    assert entry.inputs == {"images": [1, 3, 32, 32]}
    assert entry.preprocessing is not None
    assert entry.preprocessing["size"] == [32, 32]
    assert (entry.licence, entry.source, entry.precision) == ("MIT", "drawn by a test", "fp32")


def test_labels_of_another_count_are_refused(tmp_path: Path) -> None:
    detector = write_detector(tmp_path / "d.onnx")
    assert "2 names were given" in refused(tmp_path / "b", detector=detector, labels=["a", "b"])


def test_an_onnx_that_is_no_detector_is_refused(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    make = helper.make_tensor_value_info
    node = helper.make_node("Relu", ["x"], ["y"])
    shape = [1, 3, 8, 8]
    graph = helper.make_graph([node], "g", [make("x", TensorProto.FLOAT, shape)], [make("y", TensorProto.FLOAT, shape)])
    path = tmp_path / "relu.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    assert "relu.onnx" in refused(tmp_path / "b", detector=path)


def test_weights_beside_the_onnx_file_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    detector = write_detector(folder / "d.onnx", external=True)
    assert "save it as one .onnx file" in refused(tmp_path / "b", detector=detector)


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08\x07" * 100])
def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    assert "x.onnx" in refused(tmp_path / "b", detector=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip.vision.projection_dim": 128}, "found an output of 128, needed the text model's 64"),
        ({"clip.vision.is_deepstack_layers": [True, True]}, "found 2 deepstack layers, needed the text model's 1"),
        ({"clip.projector_type": "gemma3"}, "found a gemma3 projector, needed qwen3vl_merger for qwen3vl"),
        ({"clip.has_vision_encoder": False}, "has no vision encoder"),
        ({"general.architecture": "llama"}, "is a llama without vision, needed a projector"),
    ],
)
def test_an_mmproj_of_another_model_is_refused(
    pair: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_gguf(pair["mmproj"], {**VISION, **change})
    assert message in refused(tmp_path / "b", **pair)


def test_swapped_files_are_told(pair: dict[str, Any], tmp_path: Path) -> None:
    assert "is a projector (mmproj), needed a text model" in refused(
        tmp_path / "b", mllm=pair["mmproj"], mmproj=pair["mllm"]
    )


@pytest.mark.parametrize("key", ["qwen3vl.block_count", "qwen3vl.embedding_length", "tokenizer.ggml.model"])
def test_a_text_model_without_what_llama_cpp_needs_is_refused(pair: dict[str, Any], tmp_path: Path, key: str) -> None:
    write_gguf(pair["mllm"], {k: v for k, v in TEXT.items() if k != key})
    assert f"has no {key}" in refused(tmp_path / "b", **pair)


def test_one_part_of_several_is_refused(pair: dict[str, Any], tmp_path: Path) -> None:
    write_gguf(pair["mllm"], {**TEXT, "split.count": 3})
    assert "llama-gguf-split --merge" in refused(tmp_path / "b", **pair)


def test_a_cut_gguf_is_refused(pair: dict[str, Any], tmp_path: Path) -> None:
    write_gguf(pair["mllm"], TEXT, cut=1)
    assert "it is cut short" in refused(tmp_path / "b", **pair)


def test_a_file_that_is_no_gguf_is_refused(pair: dict[str, Any], tmp_path: Path) -> None:
    pair["mmproj"].write_text("hello")
    assert "is not a GGUF file" in refused(tmp_path / "b", **pair)


def test_a_thinking_model_has_to_fit_the_projector(pair: dict[str, Any], tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "models" / "t.gguf", {**TEXT, "qwen3vl.embedding_length": 96})
    assert "needed the text model's 96" in refused(tmp_path / "b", **pair, mllm_thinking=other)
    good = write_gguf(tmp_path / "models" / "t.gguf", TEXT)
    assert assemble(tmp_path / "b", **pair, mllm_thinking=good).file("mllm_thinking") is not None


def test_roles_that_need_each_other(pair: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "b"
    assert "nothing to assemble" in refused(out)
    assert "give --mmproj as well" in refused(out, mllm=pair["mllm"])
    assert "give --mllm as well" in refused(out, mmproj=pair["mmproj"])
    assert "labels without a detector" in refused(out, **pair, labels=["a"])
    assert "mllm_thinking without mllm" in refused(out, mllm_thinking=pair["mllm"])
    assert "licence or source for 'depth'" in refused(out, **pair, licences={"depth": "MIT"})
    assert "does not exist" in refused(out, mllm=tmp_path / "no.gguf", mmproj=pair["mmproj"])
    assert "is a folder" in refused(out, mllm=tmp_path, mmproj=pair["mmproj"])


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_calibration_that_is_no_object_is_refused(pair: dict[str, Any], tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    assert "is no JSON object" in refused(tmp_path / "b", **pair, calibration=path)


def test_a_folder_that_is_no_bundle_is_left_alone(pair: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.txt").write_text("dear")
    with pytest.raises(BadInput, match="is no bundle, so it is left alone"):
        assemble(out, **pair)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    with pytest.raises(BadInput, match="is no folder"):
        assemble(out / "thesis.txt", **pair)


def test_an_older_bundle_is_replaced_whole(pair: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "b"
    assemble(out, detector=write_detector(tmp_path / "d.onnx"))
    bundle = assemble(out, **pair)
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "mllm.gguf", "mmproj.gguf"]
    assert set(bundle.manifest.files) == {"mllm", "mmproj"}


def test_a_bundle_can_be_rebuilt_from_its_own_files(pair: dict[str, Any], tmp_path: Path) -> None:
    first = assemble(tmp_path / "b", **pair)
    again = assemble(tmp_path / "b", mllm=first.need("mllm"), mmproj=first.need("mmproj"))
    assert again.sha256 == first.sha256


def test_a_failure_half_way_leaves_the_old_bundle(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = assemble(tmp_path / "b", **pair)

    def full(*arguments: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_copy", full)
    with pytest.raises(HoverlensError, match=r"No space left on device; nothing was changed there"):
        assemble(tmp_path / "b", **pair)
    assert Bundle.open(tmp_path / "b").sha256 == first.sha256
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "models"]


def test_what_a_killed_run_left_is_swept(pair: dict[str, Any], tmp_path: Path) -> None:
    left = tmp_path / ".b.abcd.part"
    left.mkdir()
    (left / "half.gguf").write_bytes(b"x")
    assemble(tmp_path / "b", **pair)
    assert not left.exists()


def test_the_digest_does_not_depend_on_place_and_time(pair: dict[str, Any], tmp_path: Path) -> None:
    first = assemble(tmp_path / "one", **pair)
    second = assemble(tmp_path / "deep" / "er" / "two", **pair, name="x", note="y")
    assert first.sha256 == second.sha256
    shutil.move(second.path, tmp_path / "three")
    assert Bundle.open(tmp_path / "three").sha256 == first.sha256


def test_licence_texts_are_copied(pair: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "APACHE.txt"
    text.write_text("terms")
    bundle = assemble(tmp_path / "b", **pair, licence_files=[text])
    assert (bundle.path / "licences" / "APACHE.txt").read_text() == "terms"


def test_progress_reaches_the_whole(pair: dict[str, Any], tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    assemble(tmp_path / "b", **pair, progress=lambda *step: steps.append(step))
    assert steps[-1][1] == steps[-1][2] == sum(p.stat().st_size for p in pair.values())


def test_info_of_an_assembled_bundle_is_json(pair: dict[str, Any], tmp_path: Path) -> None:
    info = json.loads(json.dumps(bundle_info(assemble(tmp_path / "b", **pair))))
    assert info["files"]["mmproj"]["path"] == "mmproj.gguf"


def test_real_files_make_a_bundle(shared_data: Path, tmp_path: Path) -> None:
    models = shared_data / "models"
    bundle = assemble(tmp_path / "b", detector=models / "yolov5su_visdrone_640.onnx")
    assert bundle.manifest.files["detector"].family == "yolov8"
    assert len(bundle.manifest.files["detector"].labels or []) == 10


def test_an_onnx_files_own_licence_is_kept(tmp_path: Path) -> None:
    source = tmp_path / "depth.onnx"
    node = onnx.helper.make_node("ReduceMean", ["image"], ["depth"], axes=[1], keepdims=0)
    graph = onnx.helper.make_graph(
        [node],
        "depth",
        [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, 28, 42])],
        [onnx.helper.make_tensor_value_info("depth", onnx.TensorProto.FLOAT, [1, 28, 42])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    onnx.helper.set_model_props(model, {"license": "AGPL-3.0 (see its\npage)"})
    onnx.save(model, source)
    entry = assemble(tmp_path / "bundle", depth=source).entry("depth")
    assert entry is not None
    assert entry.licence == "AGPL-3.0 (see its page)"


@pytest.mark.parametrize(
    "words", [{"name": "a\u202eb"}, {"name": "a\x9b"}, {"name": "x" * 201}, {"prompt_template": "a\0b"}]
)
def test_words_that_no_manifest_can_hold_are_refused_before_the_work(tmp_path: Path, words: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=r"cannot be called|prompt version"):
        assemble(tmp_path / "b", mllm=tmp_path / "missing.gguf", **words)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
