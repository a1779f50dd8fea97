"""Small ONNX models, built on the spot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a model whose outputs are constants, plus ``gain`` times the mean of the input.

    ``outputs`` are without the batch axis. ``dynamic`` makes the batch free; ``open_size`` makes
    height and width free too.
    """
    onnx = pytest.importorskip("onnx")

    def make(
        outputs: Mapping[str, NDArray[Any]],
        input_shape: Sequence[int] = (1, 3, 64, 64),
        gain: Mapping[str, NDArray[Any]] | None = None,
        metadata: Mapping[str, str] | None = None,
        dynamic: bool = False,
        open_size: bool = False,
        sizes_input: bool = False,
        dtype: str = "float32",
        name: str = "model.onnx",
    ) -> Path:
        helper, types = onnx.helper, onnx.TensorProto
        kinds = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}
        shape: list[int | str] = list(input_shape)
        if dynamic:
            shape[0] = "batch"
        if open_size:
            shape[2:] = ["height", "width"]
        inputs = [helper.make_tensor_value_info("images", kinds[dtype], shape)]
        nodes = [
            helper.make_node("Cast", ["images"], ["x"], to=types.FLOAT),
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=list(range(1, len(shape))), keepdims=0),
        ]
        if sizes_input:
            inputs.append(helper.make_tensor_value_info("orig_target_sizes", types.INT64, ["n", 2]))
            nodes += [
                helper.make_node("Cast", ["orig_target_sizes"], ["sizes"], to=types.FLOAT),
                helper.make_node("Concat", ["sizes", "sizes"], ["scale2"], axis=1),
                helper.make_node("Unsqueeze", ["scale2"], ["scale"], axes=[1]),
            ]
        consts, outs = [], []
        for key, value in outputs.items():
            value = np.asarray(value)
            weight = np.asarray((gain or {}).get(key, np.zeros_like(value)), np.float32)
            consts += [
                onnx.numpy_helper.from_array(value.astype(np.float32)[None], f"{key}_value"),
                onnx.numpy_helper.from_array(weight[None], f"{key}_gain"),
                onnx.numpy_helper.from_array(np.array([-1] + [1] * value.ndim, np.int64), f"{key}_shape"),
            ]
            integer = value.dtype.kind == "i"
            scaled = sizes_input and key == "boxes"
            nodes += [
                helper.make_node("Reshape", ["mean", f"{key}_shape"], [f"{key}_m"]),
                helper.make_node("Mul", [f"{key}_m", f"{key}_gain"], [f"{key}_g"]),
                helper.make_node("Add", [f"{key}_value", f"{key}_g"], [f"{key}_raw" if integer or scaled else key]),
            ]
            if integer:
                nodes.append(helper.make_node("Cast", [f"{key}_raw"], [key], to=types.INT64))
            if scaled:
                nodes.append(helper.make_node("Mul", [f"{key}_raw", "scale"], [key]))
            kind = types.INT64 if integer else types.FLOAT
            outs.append(helper.make_tensor_value_info(key, kind, ["batch" if dynamic else shape[0], *value.shape]))
        graph = helper.make_graph(nodes, "g", inputs, outs, consts)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
        helper.set_model_props(model, dict(metadata or {}))
        path = tmp_path / name
        onnx.save(model, str(path))
        return path

    return make
