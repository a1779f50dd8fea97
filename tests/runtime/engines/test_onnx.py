"""An engine says what its file declares, and refuses in one line what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hoverlens.runtime.engines import TensorSpec, open_engine
from hoverlens.runtime.engines import onnx as onnx_engine
from hoverlens.runtime.engines.base import Engine
from hoverlens.runtime.errors import BadInput, HoverlensError

MakeModel = Callable[..., Path]
X = np.zeros((1, 3, 64, 64), np.float32)


def test_names_shapes_and_metadata_are_those_of_the_file(make_model: MakeModel) -> None:
    path = make_model({"out": np.ones((4, 5))}, metadata={"names": "a"}, dynamic=True)
    engine = open_engine(path, providers=["cpu"], threads=1)
    assert isinstance(engine, Engine)
    assert engine.inputs == (TensorSpec("images", "float32", ("batch", 3, 64, 64)),)
    assert engine.outputs == (TensorSpec("out", "float32", ("batch", 4, 5)),)
    assert engine.metadata == {"names": "a"}
    assert engine.name == "model"
    assert engine.provider == "CPUExecutionProvider"
    assert engine.run({"images": np.repeat(X, 3, 0)})["out"].shape == (3, 4, 5)


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({}, "needed ['images']"),
        ({"image": X}, "got inputs ['image']"),
        ({"images": X, "more": X}, "['images', 'more']"),
        ({"images": X.astype(np.float64)}, "float64, needed float32"),
        ({"images": X[0]}, "shape 3x64x64"),
        ({"images": X[:, :, :32]}, "needed images float32 1x3x64x64"),
    ],
)
def test_feeds_that_do_not_fit_are_named(make_model: MakeModel, feeds: dict[str, np.ndarray], words: str) -> None:
    engine = open_engine(make_model({"out": np.ones((4, 5))}))
    with pytest.raises(BadInput) as e:
        engine.run(feeds)
    assert words in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"hello, this is text", b"\x08\x08garbage" * 9])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(BadInput) as e:
        open_engine(path)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 500 + len(str(path))
    assert capfd.readouterr() == ("", "")


def test_a_cut_file_is_refused(make_model: MakeModel) -> None:
    path = make_model({"out": np.ones((40, 50))})
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(BadInput, match="cannot open"):
        open_engine(path)


def test_missing_external_weights_are_named(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 64])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 64])],
            [weight],
        ),
        opset_imports=[helper.make_opsetid("", 12)],
        ir_version=8,
    )
    path = tmp_path / "split.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="split.bin", size_threshold=0)
    assert open_engine(path).run({"x": np.ones((1, 64), np.float32)})["y"][0, 0] == 64
    (tmp_path / "split.bin").unlink()
    with pytest.raises(BadInput, match="separate file"):
        open_engine(path)


@pytest.mark.parametrize("name", ["model.pt", "model.tflite", "model", "model.txt"])
def test_other_formats_are_refused_with_what_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInput, match=r"needed \.onnx"):
        open_engine(tmp_path / name)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        open_engine(tmp_path / "none.onnx")
    (tmp_path / "dir.onnx").mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        open_engine(tmp_path / "dir.onnx")


def test_providers_are_the_fastest_available_and_overridable(monkeypatch: pytest.MonkeyPatch) -> None:
    have = ["CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"]
    monkeypatch.setattr(onnx_engine.ort, "get_available_providers", lambda: have)
    assert onnx_engine.choose_providers() == have[::-1]
    assert onnx_engine.choose_providers(["cuda", "cpu"]) == have[1::-1]
    monkeypatch.setattr(onnx_engine.ort, "get_available_providers", lambda: have[:1])
    assert onnx_engine.choose_providers() == have[:1]
    with pytest.raises(BadInput, match="CUDAExecutionProvider"):
        onnx_engine.choose_providers(["cuda"])
    with pytest.raises(BadInput):
        onnx_engine.choose_providers([])


def test_a_closed_engine_says_so(make_model: MakeModel) -> None:
    engine = open_engine(make_model({"out": np.ones((4, 5))}))
    engine.close()
    engine.close()
    with pytest.raises(HoverlensError, match="closed"):
        engine.run({"images": X})


def test_threads_below_one_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(BadInput, match="threads"):
        open_engine(make_model({"out": np.ones((4, 5))}), threads=0)
