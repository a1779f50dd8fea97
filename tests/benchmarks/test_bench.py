"""Benchmarks give the keys that scripts read, and null where there is nothing to say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hoverlens.benchmarks.depth import bench_depth
from hoverlens.benchmarks.detector import bench_detector
from hoverlens.runtime.errors import BadInput

DETECTOR_KEYS = {
    "model",
    "dataset",
    "AP50",
    "AP50_small",
    "recall",
    "precision",
    "sliced",
    "ms_per_image",
}
DEPTH_KEYS = {"model", "dataset", "abs_rel", "order_accuracy", "ms_per_image"}


def constant_model(path: Path, name: str, value: np.ndarray, names: str | None = None) -> Path:
    """A model of a 64 x 64 picture with a constant answer."""
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    value = value.astype(np.float32)[None]
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0),
            helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
            helper.make_node("Add", ["value", "nothing"], [name]),
        ],
        "g",
        [helper.make_tensor_value_info("images", floats, [1, 3, 64, 64])],
        [helper.make_tensor_value_info(name, floats, value.shape)],
        [
            onnx.numpy_helper.from_array(value, "value"),
            onnx.numpy_helper.from_array(np.float32(0), "zero"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
    if names:
        helper.set_model_props(model, {"names": names})
    onnx.save(model, str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One picture with a car, a van and a bus."""
    folder = tmp_path / "set"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "x.png")
    (folder / "x.val.txt").write_text("0 0.25 0.25 0.25 0.25\n1 0.75 0.25 0.25 0.25\n3 0.75 0.75 0.25 0.25\n")
    return folder


def rows() -> np.ndarray:
    out = np.zeros((10, 6))
    out[0] = [8, 8, 24, 24, 0.9, 0]  # the car
    out[1] = [40, 8, 56, 24, 0.8, 0]  # the van, called a car
    out[2] = [8, 40, 24, 56, 0.7, 0]  # nothing there
    out[3] = [40, 40, 56, 56, 0.1, 1]  # the bus, unsure
    return out


def test_a_detector_by_hand(tmp_path: Path, folder: Path) -> None:
    model = constant_model(tmp_path / "m.onnx", "out", rows(), "['car', 'bus']")
    seen: list[tuple[int, int]] = []
    result = bench_detector(model, folder, progress=lambda *a: seen.append(a))
    assert result.keys() >= DETECTOR_KEYS
    # The van counts for nothing, since this model has no vans.
    assert (result["recall"], result["precision"]) == (0.5, 0.5)
    assert result["AP50"] == 1.0
    assert result["AP50_small"] == 1.0
    assert result["AP50_by_class"] == {"car": 1.0, "bus": 1.0}
    assert (result["model"], result["dataset"], result["sliced"]) == ("m.onnx", "set", False)
    assert result["ms_per_image"] > 0
    assert seen == [(1, 1)]
    json.dumps(result, allow_nan=False)


def test_without_a_common_class_there_is_no_number(tmp_path: Path, folder: Path) -> None:
    model = constant_model(tmp_path / "m.onnx", "out", rows()[:, :6], "['boat', 'plane']")
    result = bench_detector(model, folder, sliced=True)
    assert [result[k] for k in ("AP50", "AP50_small", "recall", "precision")] == [None] * 4
    assert result["sliced"] is True
    json.dumps(result, allow_nan=False)


def test_a_depth_model_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "x.png")
    truth = np.repeat(np.linspace(10, 40, 64)[:, None], 64, 1)
    np.save(folder / "x_depth.npy", truth.astype(np.float32))
    model = constant_model(tmp_path / "metric.onnx", "depth", truth[None] * 1.5)
    result = bench_depth(model, folder)
    assert result.keys() >= DEPTH_KEYS
    assert result["abs_rel"] == pytest.approx(0.5)
    assert result["abs_rel_median_scaled"] == 0
    assert result["order_accuracy"] == 1
    assert result["alignment"] == "none"
    relative = bench_depth(model, folder, kind="relative", meaning="depth")
    assert (relative["abs_rel"], relative["alignment"]) == (0, "median")
    inverse = constant_model(tmp_path / "inverse.onnx", "disp", 1 / truth[None])
    fitted = bench_depth(inverse, folder)
    assert (fitted["abs_rel"], fitted["alignment"]) == (pytest.approx(0, abs=1e-3), "disparity")
    assert fitted["order_accuracy"] == 1
    json.dumps([result, relative, fitted], allow_nan=False)


def test_photos_without_truth_give_times_only(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "x.png")
    depth = constant_model(tmp_path / "depth.onnx", "depth", np.ones((1, 64, 64)))
    assert bench_depth(depth, folder)["abs_rel"] is None
    detector = constant_model(tmp_path / "m.onnx", "out", rows())
    assert bench_detector(detector, folder)["recall"] is None
    assert bench_detector(detector, folder)["ms_per_image"] > 0


def test_bad_models_and_folders_are_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no")
    with pytest.raises(BadInput):
        bench_detector(tmp_path / "bad.onnx", folder)
    with pytest.raises(BadInput):
        bench_depth(tmp_path / "bad.onnx", folder)
    with pytest.raises(BadInput):
        bench_detector(tmp_path / "bad.onnx", tmp_path / "none")


# -- real models: figures measured with the code as it stands, one CPU thread, fixed photos -----------


@pytest.mark.parametrize(
    ("model", "dataset", "recall", "precision"),
    [
        ("yolox_nano.onnx", "auair", 0.19, 0.31),
        ("yolov5su_visdrone_640.onnx", "visdrone", 0.58, 0.66),
    ],
)
def test_accuracy_on_real_photos_holds(
    shared_data: Path, model: str, dataset: str, recall: float, precision: float
) -> None:
    result = bench_detector(shared_data / "models" / model, shared_data / "images" / dataset)
    assert result["recall"] == pytest.approx(recall, abs=0.02)
    assert result["precision"] == pytest.approx(precision, abs=0.03)


def test_slicing_finds_more_on_real_photos(shared_data: Path) -> None:
    model, folder = shared_data / "models/yolox_nano.onnx", shared_data / "images/visdrone"
    whole, sliced = bench_detector(model, folder), bench_detector(model, folder, sliced=True)
    assert sliced["recall"] > whole["recall"] + 0.1
    assert sliced["AP50"] > whole["AP50"] + 0.05
    assert sliced["AP50_small"] > whole["AP50_small"] + 0.1
