"""Half precision in an ONNX graph, with the parts that need more left in float32.

A strongly typed network runs in the types that its graph names, so precision is decided here and not by the
compiler. Inputs and outputs stay float32: whoever feeds the model need not know.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calibration.onnx_source import QUANTISE, import_onnx
from ..runtime.errors import BadInput

HEAVY = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

SENSITIVE = frozenset(
    {
        "CumSum",
        "Exp",
        "GroupNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "Log",
        "Pow",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceMean",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
    }
)
"""Their sums or exponents leave the range of half precision on ordinary inputs."""

FLOAT_ONLY = frozenset({"ConstantOfShape", "EyeLike", "NonMaxSuppression", "RandomNormal", "RandomUniform", "Range"})

ALWAYS_FLOAT_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}
"""Sampling factors: float32 by the standard."""

HALF_MAX = 65504.0
SCALES_OPSET = 19
"""From here on Q/DQ pairs may have scales in half precision."""


def to_half(model: Any) -> Any:
    """Returns the model in half precision.

    Left in float32: what follows the last convolution or matrix product on the way to an output (a box's centre of
    1000 pixels would move by half a pixel), operators whose range is not half's, and weights beyond it.

    Args:
        model: As :func:`~hoverlens.calibration.onnx_source.load_source` returns it; not changed.

    Raises:
        BadInput: The graph has control flow, or its types cannot be inferred.
    """
    onnx = import_onnx()
    model = _with_half_scales(onnx, model)
    try:
        model = onnx.shape_inference.infer_shapes(model, strict_mode=False)
    except Exception as e:
        raise BadInput(f"cannot infer the types of the model's tensors ({e}); export it again") from None
    graph = model.graph
    for node in graph.node:
        if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
            raise BadInput(
                f"the model has control flow ({node.op_type} {node.name}), which cannot be put in half precision; "
                "simplify the model, or take --precision fp32"
            )
    float32 = onnx.TensorProto.FLOAT
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    weights = {i.name: i for i in graph.initializer}
    types.update({name: i.data_type for name, i in weights.items()})
    keep = _kept(onnx, graph, weights)
    half: set[str] = set()  # tensors that are float16 from here on
    nodes: list[Any] = []
    copies: dict[tuple[str, int], str] = {}

    def as_type(name: str, wanted: int) -> str:
        """The name under which a float tensor is to be had in a type."""
        now = onnx.TensorProto.FLOAT16 if name in half else float32
        if now == wanted:
            return name
        key = (name, wanted)
        if key not in copies:
            copies[key] = f"{name}_{'half' if wanted != float32 else 'float'}"
            if name in weights:
                values = onnx.numpy_helper.to_array(weights[name]).astype(np.float16)
                graph.initializer.append(onnx.numpy_helper.from_array(values, copies[key]))
            else:
                nodes.append(
                    onnx.helper.make_node("Cast", [name], [copies[key]], name=f"{copies[key]}_cast", to=wanted)
                )
        return copies[key]

    for index, node in enumerate(graph.node):
        kept = index in keep
        target = float32 if kept else onnx.TensorProto.FLOAT16
        always = ALWAYS_FLOAT_INPUTS.get(node.op_type, ())
        for position, name in enumerate(node.input):
            if name and (types.get(name) == float32):
                node.input[position] = as_type(name, float32 if position in always else target)
        for attribute in node.attribute:
            names_type = attribute.name == "dtype" or (attribute.name == "to" and node.op_type == "Cast")
            if names_type and attribute.i == float32:
                attribute.i = target
        if not kept:
            half |= {name for name in node.output if types.get(name) == float32}
        nodes.append(node)
    _float_outputs(onnx, graph, nodes, half)
    used = {name for node in nodes for name in node.input} | {o.name for o in graph.output}
    left = [i for i in graph.initializer if i.name in used]
    for field, values in (("node", nodes), ("initializer", left), ("value_info", [])):
        # Copies, since clearing the field frees what the list still points to.
        fresh = [type(v).FromString(v.SerializeToString()) for v in values]
        del getattr(graph, field)[:]
        getattr(graph, field).extend(fresh)
    return model


def _with_half_scales(onnx: Any, model: Any) -> Any:
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset < SCALES_OPSET and any(n.op_type in QUANTISE for n in model.graph.node):
        try:
            return onnx.version_converter.convert_version(model, SCALES_OPSET)
        except Exception as e:
            raise BadInput(
                f"cannot bring the quantised model from opset {opset} to {SCALES_OPSET} ({str(e)[:160]}); "
                f"export it with opset {SCALES_OPSET} or later"
            ) from None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _float_outputs(onnx: Any, graph: Any, nodes: list[Any], half: set[str]) -> None:
    """Renames half-precision tensors that are outputs, and casts them back under the old name."""
    outputs = {o.name for o in graph.output if o.name in half}
    inner = {name: f"{name}_half_output" for name in outputs}
    for node in nodes:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name in inner:
                    names[i] = inner[name]
    for name in sorted(outputs):
        cast = onnx.helper.make_node("Cast", [inner[name]], [name], name=f"{name}_cast", to=onnx.TensorProto.FLOAT)
        nodes.append(cast)


def _kept(onnx: Any, graph: Any, weights: dict[str, Any]) -> set[int]:
    """Indices of the nodes that stay in float32."""
    keep = set(tail(onnx, graph, weights))
    large = set()
    for name, tensor in weights.items():
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor)
            if values.size and not np.abs(values).max() <= HALF_MAX:
                large.add(name)
    for index, node in enumerate(graph.node):
        if node.op_type in SENSITIVE or node.op_type in FLOAT_ONLY or any(name in large for name in node.input):
            keep.add(index)
    return keep


def tail(onnx: Any, graph: Any, weights: dict[str, Any]) -> list[int]:
    """Indices of the nodes from which no convolution or matrix product can be reached.

    One that only takes a weighted mean of 0, 1, 2 .. (the distances of an anchor-free box) does not count.
    """
    before_heavy: set[str] = set()
    out = []
    for index in range(len(graph.node) - 1, -1, -1):
        node = graph.node[index]
        heavy = node.op_type in HEAVY and not _counts(onnx, node, weights)
        if heavy or any(name in before_heavy for name in node.output):
            before_heavy.update(name for name in node.input if name)
        else:
            out.append(index)
    return out[::-1]


def _counts(onnx: Any, node: Any, weights: dict[str, Any]) -> bool:
    tensor = weights.get(node.input[1]) if len(node.input) > 1 else None
    if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT:
        return False
    values = onnx.numpy_helper.to_array(tensor).reshape(-1)
    return values.size > 1 and bool(np.array_equal(values, np.arange(values.size)))


def emulated(model: Any) -> Any:
    """A float32 model that rounds where a half-precision one does.

    ONNX Runtime has no half-precision kernels on CPUs: it computes in float32 and leaves roundings out where it can,
    so overflow would go unseen. Casts that the graph itself holds are kept.
    """
    onnx = import_onnx()
    float32, float16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    typed = onnx.shape_inference.infer_shapes(model)
    halves = {v.name for v in typed.graph.value_info if v.type.tensor_type.elem_type == float16}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = []
    for tensor in copy.graph.initializer:
        if tensor.data_type == float16:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for node in copy.graph.node:
        for attribute in node.attribute:
            if attribute.i == float16 and (
                attribute.name == "dtype" or (attribute.name, node.op_type) == ("to", "Cast")
            ):
                attribute.i = float32
        nodes.append(node)
        for i, name in enumerate(node.output):
            if name in halves:
                node.output[i] = f"{name}_exact"
                for before, after, kind in (
                    (f"{name}_exact", f"{name}_rounded", float16),
                    (f"{name}_rounded", name, float32),
                ):
                    nodes.append(onnx.helper.make_node("Cast", [before], [after], name=f"{after}_emulated", to=kind))
    fresh = [type(n).FromString(n.SerializeToString()) for n in nodes]
    del copy.graph.node[:]
    del copy.graph.value_info[:]
    copy.graph.node.extend(fresh)
    return copy


def compare(source: Any, half: Any, feeds: dict[str, Any]) -> dict[str, float]:
    """Runs a model and its half-precision form here and says how far apart their outputs are.

    Args:
        source: The ``onnx.ModelProto`` that :func:`to_half` was given.
        half: What it returned.
        feeds: Every input by name.

    Returns:
        ``max_abs_error``, and ``relative_error``: the worst output's error norm over its norm.

    Raises:
        BadInput: The half-precision form gives no finite numbers where the source does.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    sides = []
    for model in (source, emulated(half)):
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        sides.append(session.run(None, feeds))
    worst = relative = 0.0
    for a, b in zip(*sides, strict=True):
        if not np.issubdtype(a.dtype, np.floating):
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        fine = np.isfinite(a)
        if not np.isfinite(b[fine]).all():
            raise BadInput(
                "in half precision the model's outputs are not finite; take --precision fp32, "
                "or keep its weights and activations under 65504"
            )
        if fine.any():
            difference = a[fine] - b[fine]
            worst = max(worst, float(np.abs(difference).max()))
            relative = max(relative, float(np.linalg.norm(difference) / max(np.linalg.norm(a[fine]), 1e-12)))
    return {"max_abs_error": worst, "relative_error": relative}
