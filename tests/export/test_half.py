"""Half precision goes where it does no harm, and the model keeps its face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from hoverlens.calibration.onnx_source import load_source
from hoverlens.export.half import compare, to_half
from hoverlens.runtime.errors import BadInput

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def graph_of(
    nodes: Sequence[Any], weights: dict[str, np.ndarray], output: str, shape: list[Any], opset: int = 17
) -> Any:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info(output, FLOAT, shape)],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


W = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)


def types_of(model: Any) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    return {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}


def run(model: Any) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": X})[0])


def test_inputs_and_outputs_stay_float32_and_convolutions_do_not() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["y"]),
    ]
    v = np.random.default_rng(2).standard_normal((2, 4, 1, 1)).astype(np.float32)
    model = graph_of(nodes, {"w": W, "v": v}, "y", [1, 2, 6, 6])
    before = model.SerializeToString()
    half = to_half(model)
    assert model.SerializeToString() == before
    assert [v.type.tensor_type.elem_type for v in (*half.graph.input, *half.graph.output)] == [FLOAT, FLOAT]
    assert [v.name for v in half.graph.output] == ["y"]
    types = types_of(half)
    assert types["a"] == types["b"] == HALF
    assert all(i.data_type == HALF for i in half.graph.initializer)
    np.testing.assert_allclose(run(half), run(model), rtol=0.02, atol=0.02)


def test_what_follows_the_last_convolution_stays_float32() -> None:
    """1000 + 0.25 has no half: the nearest is 1000 or 1000.5."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Mul", ["a", "zero"], ["b"]),
        helper.make_node("Add", ["b", "centre"], ["y"]),
    ]
    weights = {"w": W, "zero": np.zeros(1, np.float32), "centre": np.full(1, 1000.25, np.float32)}
    assert np.all(run(to_half(graph_of(nodes, weights, "y", [1, 4, 6, 6]))) == 1000.25)


def test_the_mean_of_distances_counts_as_the_tail() -> None:
    counting = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Softmax", ["a"], ["s"], axis=1),
        helper.make_node("Conv", ["s", "d"], ["y"]),
    ]
    half = to_half(graph_of(nodes, {"w": W, "d": counting}, "y", [1, 1, 6, 6]))
    types = types_of(half)
    assert (types["a"], types["s"]) == (HALF, FLOAT)
    assert {i.name: i.data_type for i in half.graph.initializer} == {"d": FLOAT, "w_half": HALF}


@pytest.mark.parametrize("op", ["Exp", "ReduceMean"])
def test_sensitive_operators_stay_float32_between_convolutions(op: str) -> None:
    attributes: dict[str, Any] = {"axes": [1], "keepdims": 1} if op == "ReduceMean" else {}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node(op, ["a"], ["b"], **attributes),
        helper.make_node("Conv", ["b", "v"], ["y"]),
    ]
    v = np.full((1, 1 if attributes else 4, 1, 1), 0.01, np.float32)
    model = graph_of(nodes, {"w": W, "v": v}, "y", [1, 1, 6, 6])
    half = to_half(model)
    assert (types_of(half)["a"], types_of(half)["b"]) == (HALF, FLOAT)
    np.testing.assert_allclose(run(half), run(model), rtol=0.05, atol=0.05)


def test_weights_beyond_half_stay_float32() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "large"], ["l"]),
        helper.make_node("Mul", ["l", "small"], ["s"]),
        helper.make_node("Conv", ["s", "w"], ["y"]),
    ]
    weights = {"w": W, "large": np.full(1, 1e6, np.float32), "small": np.full(1, 1e-3, np.float32)}
    half = to_half(graph_of(nodes, weights, "y", [1, 4, 6, 6]))
    assert next(i for i in half.graph.initializer if i.name == "large").data_type == FLOAT
    assert np.isfinite(run(half)).all()


def test_sampling_factors_stay_float32_and_one_weight_may_have_both_types() -> None:
    nodes = [
        helper.make_node("Resize", ["x", "", "f"], ["r"], mode="nearest"),
        helper.make_node("Mul", ["r", "k"], ["m"]),
        helper.make_node("Conv", ["m", "w"], ["c"]),
        helper.make_node("Mul", ["c", "k"], ["y"]),
    ]
    weights = {"w": W, "f": np.array([1, 1, 2, 2], np.float32), "k": np.full(1, 0.5, np.float32)}
    model = graph_of(nodes, weights, "y", [1, 4, 14, 14])
    half = to_half(model)
    assert {i.name: i.data_type for i in half.graph.initializer} == {
        "f": FLOAT,
        "k": FLOAT,
        "k_half": HALF,
        "w_half": HALF,
    }
    np.testing.assert_allclose(run(half), run(model), rtol=0.02, atol=0.02)


def test_an_output_that_others_read_keeps_its_name() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"]), helper.make_node("Conv", ["y", "v"], ["z"])]
    v = np.full((1, 4, 1, 1), 0.1, np.float32)
    model = graph_of(nodes, {"w": W, "v": v}, "y", [1, 4, 6, 6])
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, [1, 1, 6, 6]))
    half = to_half(model)
    assert [o.name for o in half.graph.output] == ["y", "z"]
    np.testing.assert_allclose(run(half), run(model), rtol=0.02, atol=0.02)


def test_control_flow_is_refused() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["o"])], "b", [], [helper.make_tensor_value_info("o", FLOAT, None)]
    )
    node = helper.make_node("If", ["c"], ["y"], name="if0", then_branch=body, else_branch=body)
    with pytest.raises(BadInput, match="control flow"):
        to_half(graph_of([node], {"c": np.array(True)}, "y", [1, 3, 8, 8]))


def test_numbers_that_overflow_are_refused_by_the_comparison() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Conv", ["a", "v"], ["y"])]
    v = np.full((1, 4, 1, 1), 1.0, np.float32)
    model = graph_of(nodes, {"w": np.full((4, 3, 3, 3), 60000, np.float32), "v": v}, "y", [1, 1, 6, 6])
    # Computed in float32 throughout, as CPUs do, these numbers would be fine.
    with pytest.raises(BadInput, match="not finite"):
        compare(model, to_half(model), {"x": np.abs(X)})


@pytest.mark.parametrize("name", ["yolox_nano", "yolov5su_visdrone_640", "rtmonodepth_s_ms_256x448", "FastestDet"])
def test_real_models_keep_their_outputs(shared_data: Path, name: str) -> None:
    model = load_source(shared_data / "models" / f"{name}.onnx")
    image = model.graph.input[0]
    shape = [d.dim_value for d in image.type.tensor_type.shape.dim]
    top = 255 if name == "yolox_nano" else 1
    feeds = {image.name: (top * np.random.default_rng(0).random(shape)).astype(np.float32)}
    half = to_half(model)
    types_of(half)
    assert compare(model, half, feeds)["relative_error"] < 0.01
    assert half.ByteSize() < 0.6 * model.ByteSize()
