"""INT8: the form that TensorRT takes, layers that stay float, and a gate that is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from hoverlens.calibration.int8 import METADATA_KEY, calibrate_int8, output_error
from hoverlens.calibration.onnx_source import load_source, quantised_as
from hoverlens.cli import cli
from hoverlens.runtime.errors import BadInput, Cancelled, HoverlensError

from .test_frames import write_photos

LAYERS = 6


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", 12)


@pytest.fixture
def depth_model(tmp_path: Path) -> Path:
    """A small convolutional network that looks like a depth model, without node names and of an old opset."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "image"
    for i in range(LAYERS):
        channels, out = (3 if i == 0 else 8), (1 if i == LAYERS - 1 else 8)
        w = rng.standard_normal((out, channels, 3, 3)).astype(np.float32) * (2 / (9 * channels)) ** 0.5
        weights += [
            numpy_helper.from_array(w, f"w{i}"),
            numpy_helper.from_array(np.full(out, 0.1, np.float32), f"b{i}"),
        ]
        nodes.append(helper.make_node("Conv", [last, f"w{i}", f"b{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        last = f"a{i}"
        nodes.append(helper.make_node("Sigmoid" if i == LAYERS - 1 else "Relu", [f"c{i}"], [last]))
    graph = helper.make_graph(
        nodes,
        "depth",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 32, 32])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [1, 1, 32, 32])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    model.metadata_props.add(key="licence", value="test")
    path = tmp_path / "depth.onnx"
    onnx.save(model, path)
    return path


def outputs(path: Path, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def quantised_layers(path: Path) -> int:
    model = onnx.load(path)
    dequantised = {n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
    return sum(n.op_type == "Conv" and n.input[1] in dequantised for n in model.graph.node)


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_pairs_have_the_form_that_tensorrt_takes(depth_model: Path, photos: Path, tmp_path: Path, method: Any) -> None:
    out = tmp_path / "int8.onnx"
    record = calibrate_int8(depth_model, [photos], out, method, threads=1)
    assert record["kind"] == "depth"
    model = load_source(out)
    assert quantised_as(model) == {"int8"}
    weights = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    pairs = [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert pairs
    for node in pairs:
        assert weights[node.input[2]].dtype == np.int8
        assert not weights[node.input[2]].any(), "zero points are zero"
        if node.input[0] in weights and weights[node.input[0]].ndim == 4:
            assert weights[node.input[1]].shape == (weights[node.input[0]].shape[0],), "a scale a channel"
    assert not any(v.dtype == np.int32 for v in weights.values()), "biases stay float"
    assert quantised_layers(out) == LAYERS - len(record["kept_float"])
    x = np.random.default_rng(1).random((1, 3, 32, 32)).astype(np.float32)
    assert output_error(outputs(depth_model, x), outputs(out, x)) < 0.3
    assert any("no gate" in w for w in record["warnings"])
    assert any("12 calibration pictures; 300" in w for w in record["warnings"])


def test_the_set_is_recorded_in_the_file(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    record = calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", threads=1)
    metadata = {p.key: p.value for p in onnx.load(tmp_path / "int8.onnx").metadata_props}
    held = json.loads(metadata[METADATA_KEY])
    assert held["calibration_set"] == record["calibration_set"]
    assert held["calibration_set"]["images"] == 12
    assert held["method"] == "percentile"
    assert metadata["licence"] == "test"


def test_the_same_work_gives_the_same_file(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        calibrate_int8(depth_model, [photos], tmp_path / name, threads=1)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_passed_gate_is_recorded(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def measure(path: Path, kind: str) -> Mapping[str, Any]:
        asked.append((path.name, kind))
        return {"abs_rel": 0.2 if quantised_as(load_source(path)) else 0.19, "order_accuracy": None}

    record = calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", measure=measure, threads=1)
    assert record["gate"]["passed"]
    assert record["gate"]["drop"] == {"abs_rel": 0.01}
    assert asked == [("depth.onnx", "depth")] * 2, "a model keeps its name"


@pytest.mark.parametrize("missed", ["AP50", "AP50_small"])
def test_a_missed_gate_fails_and_writes_nothing(depth_model: Path, photos: Path, tmp_path: Path, missed: str) -> None:
    def measure(path: Path, kind: str) -> Mapping[str, Any]:
        figures = {"AP50": 0.5, "AP50_small": 0.3, "recall": 0.6}
        return figures | ({missed: figures[missed] - 0.03} if quantised_as(load_source(path)) else {})

    with pytest.raises(HoverlensError, match=rf"misses the gate.*{missed} .*worse by 0.030, at most 0.02") as e:
        calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", measure=measure, threads=1)
    assert e.value.exit_status == 1
    assert not (tmp_path / "int8.onnx").exists()


def test_figures_that_vanish_miss_the_gate_and_none_at_all_is_bad_input(
    depth_model: Path, photos: Path, tmp_path: Path
) -> None:
    def vanishing(path: Path, kind: str) -> Mapping[str, Any]:
        return {"AP50": None if quantised_as(load_source(path)) else 0.5}

    with pytest.raises(HoverlensError, match="worse by inf"):
        calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", measure=vanishing, threads=1)
    with pytest.raises(BadInput, match="nothing to measure"):
        calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", measure=lambda p, k: {"AP50": None}, threads=1)


def test_layers_go_back_to_float_until_the_gate_is_passed(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    def measure(path: Path, kind: str) -> Mapping[str, Any]:
        return {"AP50": 0.5 - (0.1 if quantised_layers(path) > LAYERS - 2 else 0.0)}

    record = calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", measure=measure, threads=1)
    assert record["gate"]["passed"]
    assert len(record["kept_float"]) == 2
    assert quantised_layers(tmp_path / "int8.onnx") == LAYERS - 2


def test_layers_can_be_kept_by_name(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    record = calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", keep_float=["Conv_0"], threads=1)
    assert "Conv_0" in record["kept_float"]
    with pytest.raises(BadInput, match="no such layer; the first are Conv_0"):
        calibrate_int8(depth_model, [photos], tmp_path / "int8.onnx", keep_float=["head"], threads=1)


def test_the_other_layout_has_pairs_around_every_operator(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    calibrate_int8(depth_model, [photos], tmp_path / "a.onnx", layout="tensorrt", threads=1)
    calibrate_int8(depth_model, [photos], tmp_path / "b.onnx", layout="onnxruntime", threads=1)
    count = [
        sum(n.op_type == "QuantizeLinear" for n in onnx.load(tmp_path / f).graph.node) for f in ("a.onnx", "b.onnx")
    ]
    assert count[0] < count[1]
    x = np.random.default_rng(1).random((1, 3, 32, 32)).astype(np.float32)
    assert output_error(outputs(depth_model, x), outputs(tmp_path / "b.onnx", x)) < 0.5


def test_bad_input(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "int8.onnx"
    with pytest.raises(BadInput, match="would overwrite"):
        calibrate_int8(depth_model, [photos], depth_model)
    with pytest.raises(BadInput, match="no folder"):
        calibrate_int8(depth_model, [photos], tmp_path / "none" / "int8.onnx")
    with pytest.raises(BadInput, match="no pictures"):
        calibrate_int8(depth_model, [tmp_path], out)
    with pytest.raises(BadInput, match="--allow-small"):
        calibrate_int8(depth_model, [photos], out, limit=4)
    with pytest.raises(BadInput):
        calibrate_int8(depth_model, [photos], out, kind="detector")
    calibrate_int8(depth_model, [photos], out, threads=1)
    with pytest.raises(BadInput, match="quantised already"):
        calibrate_int8(out, [photos], tmp_path / "again.onnx")
    with pytest.raises(BadInput, match="no such file"):
        calibrate_int8(tmp_path / "none.onnx", [photos], out)


def test_it_can_be_stopped(depth_model: Path, photos: Path, tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(Cancelled):
        calibrate_int8(
            depth_model,
            [photos],
            tmp_path / "int8.onnx",
            threads=1,
            progress=lambda stage, done, total: told.append(stage),
            cancelled=lambda: "ranges" in told,
        )
    assert not (tmp_path / "int8.onnx").exists()


def test_an_engine_is_built_of_it_and_carries_the_record(
    depth_model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hoverlens.export.engine import build_engine
    from hoverlens.runtime.engines.compat import installed_version

    if installed_version("rtx") is None:
        pytest.skip("TensorRT for RTX is not installed: pip install 'hoverlens[tensorrt]' (x86_64 Linux)")
    monkeypatch.setenv("HOVERLENS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "int8.onnx"
    calibrate_int8(depth_model, [photos], out, threads=1)
    made = build_engine(out, tmp_path / "engines", "int8", target="rtx-sm86")
    assert "_int8_rtx" in made["path"]
    assert json.loads(made["metadata"][METADATA_KEY])["calibration_set"]["images"] == 12
    with pytest.raises(BadInput, match="use --precision int8"):
        build_engine(out, tmp_path / "engines", "fp16", target="rtx-sm86")


def test_channels_count_alike_in_the_output_error() -> None:
    truth = np.zeros((1, 3, 100))
    truth[0, 0] = np.linspace(0, 640, 100)
    truth[0, 1] = np.linspace(0, 0.01, 100)
    boxes, scores = truth.copy(), truth.copy()
    boxes[0, 0] += truth[0, 0].std()
    scores[0, 1] += truth[0, 1].std()
    assert output_error(truth, truth) == 0
    assert output_error(truth, boxes) == pytest.approx(output_error(truth, scores)) == pytest.approx(0.5)


def test_the_verb_gates_a_real_detector(shared_data: Path, tmp_path: Path) -> None:
    args = [
        "calibrate",
        "int8",
        str(shared_data / "models" / "yolox_nano.onnx"),
        "--images",
        str(shared_data / "images" / "auair"),
        "-o",
        str(tmp_path / "int8.onnx"),
        *("--limit", "8", "--threads", "1", "--budget", "0"),
        *("--gate-dataset", str(shared_data / "images" / "visdrone")),
    ]
    missed = CliRunner().invoke(cli, [*args, "--max-drop", "-1"])
    assert missed.exit_code == 1
    assert "INT8 misses the gate: AP50 " in missed.stderr
    assert not (tmp_path / "int8.onnx").exists()
    passed = CliRunner().invoke(cli, [*args, "--max-drop", "1", "--json"])
    assert passed.exit_code == 0
    record = json.loads(passed.stdout)
    assert record["gate"]["passed"]
    assert record["bytes"] < 0.4 * record["source"]["bytes"]
