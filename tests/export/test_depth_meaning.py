"""A depth model means the same inside a bundle as under its own name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from hoverlens.export.assemble import assemble
from hoverlens.runtime.perception.depth import DepthModel


def test_a_bundle_keeps_whether_the_output_is_depth_or_disparity(tmp_path: Path) -> None:
    # Named like a model of relative depth, whose output alone does not tell depth from disparity.
    source = tmp_path / "depth_anything_3_small.onnx"
    node = helper.make_node("ReduceMean", ["image"], ["predicted"], axes=[1], keepdims=0)
    graph = helper.make_graph(
        [node],
        "depth",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 28, 42])],
        [helper.make_tensor_value_info("predicted", TensorProto.FLOAT, [1, 28, 42])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), source)
    rgb = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    with DepthModel.open(source) as model:
        meaning, direct = model.meaning, model.estimate(rgb).depth
    bundle = assemble(tmp_path / "bundle", depth=source)
    entry = bundle.entry("depth")
    assert entry is not None
    assert entry.meaning == meaning == "depth"
    with DepthModel.open(
        bundle.need("depth"), kind=entry.kind, meaning=entry.meaning, preprocessing=entry.preprocessing
    ) as model:
        np.testing.assert_array_equal(model.estimate(rgb).depth, direct)
