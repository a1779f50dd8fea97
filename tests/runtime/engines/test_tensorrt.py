"""The TensorRT engine's own logic, over stand-ins that compute with ONNX Runtime."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hoverlens.runtime.engines.base import Engine
from hoverlens.runtime.engines.compat import Here
from hoverlens.runtime.engines.onnx import OnnxEngine
from hoverlens.runtime.engines.tensorrt import TensorRtEngine
from hoverlens.runtime.errors import BadInput, HoverlensError

Make = Callable[..., Path]
PROFILE = {"x": [[2, 3, 8, 8], [2, 3, 8, 8], [3, 3, 8, 8]]}


def model(batch: int | str = 1, profile: Any = None, output: int = TensorProto.FLOAT) -> bytes:
    """A convolution and a cast: one float and one other output."""
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["y"]),
            helper.make_node("Cast", ["y"], ["z"], to=output),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 8, 8])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 4, 6, 6]),
            helper.make_tensor_value_info("z", output, [batch, 4, 6, 6]),
        ],
        [numpy_helper.from_array(weights, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if profile is not None:
        made.metadata_props.add(key="profile", value=json.dumps(profile))
    return bytes(made.SerializeToString())


def reference(data: bytes, tmp_path: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    file = tmp_path / "reference.onnx"
    file.write_bytes(data)
    return OnnxEngine(file, ["cpu"]).run({"x": x})


def pictures(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 3, 8, 8)).astype(np.float32)


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("output", [TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT16])
def test_numbers_are_those_of_the_onnx_model(
    gpu: Any, engine_file: Make, desktop: Here, tmp_path: Path, output: int
) -> None:
    data = model(output=output)
    engine = TensorRtEngine(engine_file(data, metadata={"names": "{0: 'car'}"}), desktop)
    assert isinstance(engine, Engine)
    assert [i.describe() for i in engine.inputs] == ["x float32 1x3x8x8"]
    assert [o.name for o in engine.outputs] == ["y", "z"]
    assert engine.metadata == {"names": "{0: 'car'}"}
    assert engine.provider == "TensorRT 10.3.0"
    for seed in range(3):
        x = pictures(1, seed)
        assert_same(engine.run({"x": x}), reference(data, tmp_path, x))
    assert gpu.copies == 3 * 3
    engine.close()


def test_a_board_that_shares_memory_copies_nothing(gpu: Any, engine_file: Make, board: Here, tmp_path: Path) -> None:
    data = model()
    engine = TensorRtEngine(engine_file(data), board)
    x = pictures(1)
    assert_same(engine.run({"x": x}), reference(data, tmp_path, x))
    assert gpu.copies == 0
    engine.close()
    assert not gpu.memory


def test_memory_is_allocated_once(gpu: Any, engine_file: Make, desktop: Here) -> None:
    engine = TensorRtEngine(engine_file(model("n", PROFILE)), desktop)
    before = set(gpu.memory)
    for n in (2, 3, 2, 5):
        engine.run({"x": pictures(n)})
    assert set(gpu.memory) == before
    engine.close()


@pytest.mark.parametrize("n", range(1, 9))
def test_any_batch_goes_through_a_narrow_profile(
    gpu: Any, engine_file: Make, desktop: Here, tmp_path: Path, n: int
) -> None:
    data = model("n", PROFILE)
    engine = TensorRtEngine(engine_file(data), desktop)
    assert engine.inputs[0].shape == (None, 3, 8, 8)
    x = pictures(n)
    assert_same(engine.run({"x": x}), reference(data, tmp_path, x))
    engine.close()


def test_a_size_outside_the_profile_is_bad_input(gpu: Any, engine_file: Make, desktop: Here) -> None:
    engine = TensorRtEngine(engine_file(model("n", PROFILE)), desktop)
    with pytest.raises(BadInput, match="needed x float32"):
        engine.run({"x": np.zeros((2, 3, 9, 9), np.float32)})
    with pytest.raises(BadInput, match="is 0x3x8x8, needed 2x3x8x8 to 3x3x8x8"):
        engine.run({"x": np.zeros((0, 3, 8, 8), np.float32)})
    with pytest.raises(BadInput, match="float64"):
        engine.run({"x": np.zeros((2, 3, 8, 8))})
    with pytest.raises(BadInput, match="feed every input"):
        engine.run({})
    engine.close()


def test_strided_input_is_taken_as_what_it_shows(gpu: Any, engine_file: Make, desktop: Here, tmp_path: Path) -> None:
    data = model()
    engine = TensorRtEngine(engine_file(data), desktop)
    x = pictures(1)[:, ::-1, :, ::-1]
    assert_same(engine.run({"x": x}), reference(data, tmp_path, np.ascontiguousarray(x)))
    engine.close()


def test_a_result_outlives_the_next_run_and_the_engine(gpu: Any, engine_file: Make, board: Here) -> None:
    engine = TensorRtEngine(engine_file(model()), board)
    first = engine.run({"x": pictures(1, 1)})["y"]
    held = first.copy()
    engine.run({"x": pictures(1, 2)})
    engine.close()
    np.testing.assert_array_equal(first, held)


def test_closing_frees_all_and_may_be_repeated(gpu: Any, engine_file: Make, desktop: Here) -> None:
    engine = TensorRtEngine(engine_file(model()), desktop)
    assert gpu.memory
    assert gpu.streams
    engine.close()
    engine.close()
    assert not gpu.memory
    assert not gpu.streams
    with pytest.raises(HoverlensError, match="closed"):
        engine.run({"x": pictures(1)})


def test_an_engine_that_does_not_start_frees_what_it_took(gpu: Any, engine_file: Make, desktop: Here) -> None:
    gpu.fail_context = True
    with pytest.raises(HoverlensError, match=r"does not start.*hoverlens export engine"):
        TensorRtEngine(engine_file(model()), desktop)
    gpu.fail_context = False
    with pytest.raises(HoverlensError, match="does not load: magic tag does not match; rebuild it: hoverlens export"):
        TensorRtEngine(engine_file(b"not an engine", "other"), desktop)
    counting = onnx.ModelProto.FromString(model())
    counting.graph.node.append(helper.make_node("NonZero", ["y"], ["where"]))
    counting.graph.output.append(helper.make_tensor_value_info("where", TensorProto.INT64, [4, "found"]))
    with pytest.raises(BadInput, match="depends on what is seen"):
        TensorRtEngine(engine_file(bytes(counting.SerializeToString()), "third"), desktop)
    assert not gpu.memory
    assert not gpu.streams


def test_threads_take_turns(gpu: Any, engine_file: Make, desktop: Here, tmp_path: Path) -> None:
    data = model()
    engine = TensorRtEngine(engine_file(data), desktop)
    inputs = [pictures(1, seed) for seed in range(8)]
    wanted = [reference(data, tmp_path, x)["y"] for x in inputs]
    wrong: list[int] = []

    def ask(i: int) -> None:
        for _ in range(20):
            if not np.array_equal(engine.run({"x": inputs[i]})["y"], wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    engine.close()


def test_a_detector_sees_the_same_through_an_engine(
    gpu: Any, engine_file: Make, board: Here, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hoverlens.runtime.frame import Frame
    from hoverlens.runtime.perception.detector import Detector

    file = shared_data / "models" / "yolox_nano.onnx"
    monkeypatch.setattr(Here, "look", classmethod(lambda cls: board))
    frame = Frame.from_file(next((shared_data / "images" / "auair").glob("*.jpg")))
    with Detector.open(file) as plain, Detector.open(engine_file(file.read_bytes())) as compiled:
        a, b = plain.detect(frame, conf=0.1), compiled.detect(frame, conf=0.1)
        assert compiled.engine.provider == "TensorRT 10.3.0"
    assert len(a)
    np.testing.assert_array_equal(a.xyxy, b.xyxy)
    assert not gpu.memory
