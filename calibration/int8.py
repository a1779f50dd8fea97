"""INT8 for perception models: ranges from real frames, Q/DQ pairs, and a gate.

Symmetric int8, weights a scale a channel, biases and what stays float in float32: the form that TensorRT 10 and 11
take. Layers whose quantisation the outputs suffer from stay float; whether the rest is good enough is for a gate
to say, which compares accuracy on labelled pictures with the float model's.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..runtime.digest import sha256_file
from ..runtime.errors import BadInput, Cancelled, HoverlensError
from ..runtime.files import atomic_write_bytes, check_writable
from .frames import USUAL_FRAMES, Feeds, FrameSet, PerceptionModel, read_frames
from .onnx_source import QUANTISE, import_onnx, load_source, quantised_as
from .ranges import METHODS, PERCENTILE, Histogram, Method, collect

Layout = Literal["tensorrt", "onnxruntime"]
LAYOUTS: tuple[Layout, ...] = ("tensorrt", "onnxruntime")
"""Where pairs go: at the inputs of heavy layers, which TensorRT fuses with what lies between; or around every
operator that has an integer kernel, which ONNX Runtime needs on a CPU."""

HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")
OPSET = 19
METADATA_KEY = "hoverlens.int8"
GROUPS = 12
REFINED = 2
"""Groups whose layers are looked at one by one, besides the outliers."""
PROBES = 4
OUTLIER = 3.0
"""What alone costs more than this many times the median group stays float."""
DEFAULT_DROP = 0.02
DEFAULT_BUDGET_S = 600.0
HIGHER_IS_BETTER = ("AP50", "AP50_small")
LOWER_IS_BETTER = ("abs_rel",)

Measure = Callable[[Path, str], Mapping[str, Any]]
"""Given a model file and its kind (``detector``, ``depth``), returns some of the figures above."""
Progress = Callable[[str, int, int], None]


@dataclass
class Plan:
    """A model that is ready to be quantised in one way or another.

    Attributes:
        model: The float model, an ``onnx.ModelProto`` whose nodes all have names.
        ranges: Lowest and highest number of every tensor that may get a pair.
        layers: Names of heavy nodes that may be quantised, in the order of the graph.
        layout: Where pairs go.
    """

    model: Any
    ranges: dict[str, tuple[float, float]]
    layers: list[str]
    layout: Layout
    cache: dict[frozenset[str], bytes] = field(default_factory=dict)


def calibrate_int8(
    source: str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    method: Method = "percentile",
    layout: Layout = "tensorrt",
    kind: str | None = None,
    measure: Measure | None = None,
    max_drop: float = DEFAULT_DROP,
    keep_float: Sequence[str] = (),
    limit: int | None = None,
    allow_small: bool = False,
    allow_noise: bool = False,
    percentile: float = PERCENTILE,
    budget_s: float = DEFAULT_BUDGET_S,
    threads: int | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Quantises a detector or depth model.

    Args:
        source: The float ONNX model.
        images: Folders of frames as the camera gives them.
        output: The ONNX file to write.
        method: How ranges are taken, see :meth:`~.ranges.Histogram.range`.
        layout: Where pairs go, see :data:`LAYOUTS`.
        kind: ``detector`` or ``depth``; by default found from the model.
        measure: The gate's measure; None leaves the gate out.
        max_drop: Most that AP50 and AP50_small may fall, or the relative depth error may rise, absolute.
        keep_float: Parts of names of layers to leave in float anyway.
        limit: At most so many pictures.
        allow_small, allow_noise: Take a set that would be refused.
        percentile: For that method.
        budget_s: Seconds after which the sweep and the gate try nothing new.
        threads: CPU threads of a run.
        progress: Told what is done.
        cancelled: Asked between runs whether to stop.

    Returns:
        The record that the file carries too: set, method, layers left in float and why, errors, gate.

    Raises:
        BadInput: Model or pictures cannot be used.
        HoverlensError: The gate was missed; no file is written.
    """
    if method not in METHODS or layout not in LAYOUTS:
        raise BadInput(f"unknown method {method!r} or layout {layout!r}; needed {METHODS} and {LAYOUTS}")
    tell = _stoppable(progress or (lambda stage, done, total: None), cancelled or (lambda: False))
    target = check_writable(output, "the quantised model")
    if target.exists() and os.path.exists(source) and os.path.samefile(target, source):
        raise BadInput(f"the quantised model would overwrite {source}; name another file")
    start = time.monotonic()
    model = load_source(source)
    if quantised_as(model) or any(n.op_type in QUANTISE for n in model.graph.node):
        raise BadInput(f"{source} is quantised already, needed the float model; name that")
    tell("looking at pictures", 0, 1)
    frames = read_frames(images, limit, allow_small, allow_noise)
    with PerceptionModel(source, kind, threads) as opened:
        kind = opened.kind
        plan = _plan(source, model, opened, frames, method, layout, percentile, threads, tell)
        probes = list(opened.runs(_spread(frames.paths, PROBES)))
    kept = {name for name in plan.layers if any(part in name for part in keep_float)}
    unknown = [part for part in keep_float if not any(part in name for name in plan.layers)]
    if unknown:
        raise BadInput(f"--keep-float {unknown[0]}: no such layer; the first are {', '.join(plan.layers[:6])}")
    deadline = start + budget_s
    by_harm, typical = sensitivity(plan, probes, kept, deadline, threads, tell)
    for group in by_harm:
        if group["error"] > OUTLIER * typical and len(kept) + len(group["layers"]) <= len(plan.layers) // 2:
            kept |= set(group["layers"])
    record: dict[str, Any] = {
        "source": {"file": Path(source).name, "bytes": Path(source).stat().st_size, "sha256": sha256_file(source)},
        "kind": kind,
        "method": method,
        "layout": layout,
        "calibration_set": frames.record(),
        "layers": len(plan.layers),
        "sweep": [{k: v for k, v in g.items() if k != "layers"} for g in by_harm],
    }
    if method == "percentile":
        record["percentile"] = percentile
    gate = None
    if measure is not None:
        kept, gate = _gate(source, plan, kept, by_harm, measure, kind, max_drop, deadline, tell)
    data = quantise(plan, kept)
    record["kept_float"] = sorted(kept, key=plan.layers.index)
    record["output_error"] = round(_output_error(data, probes, threads), 5)
    record["gate"] = gate
    warnings = []
    if len(frames.paths) < USUAL_FRAMES:
        warnings.append(f"{len(frames.paths)} calibration pictures; {USUAL_FRAMES} or more are usual")
    if gate is None:
        warnings.append("no gate: nobody checked what INT8 costs in accuracy; give labelled pictures")
    if gate is not None and not gate["passed"]:
        raise HoverlensError(f"INT8 misses the gate: {gate_text(gate)}; nothing was written; {_advice(gate, method)}")
    data = _with_metadata(data, record)
    atomic_write_bytes(target, data)
    record.update(output=str(target), bytes=len(data), seconds=round(time.monotonic() - start, 1), warnings=warnings)
    return record


def _stoppable(tell: Progress, cancelled: Callable[[], bool]) -> Progress:
    def told(stage: str, done: int, total: int) -> None:
        if cancelled():
            raise Cancelled("interrupted")
        tell(stage, done, total)

    return told


def _spread(paths: Sequence[Path], count: int) -> list[Path]:
    return [paths[i * len(paths) // count] for i in range(count)] if len(paths) > count else list(paths)


def _plan(
    source: str | os.PathLike[str],
    model: Any,
    opened: PerceptionModel,
    frames: FrameSet,
    method: Method,
    layout: Layout,
    percentile: float,
    threads: int | None,
    tell: Progress,
) -> Plan:
    onnx = import_onnx()
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset < OPSET:
        try:
            model = onnx.version_converter.convert_version(model, OPSET)
        except Exception as e:
            raise BadInput(
                f"cannot bring {source} from opset {opset} to {OPSET} ({str(e)[:160]}); export it with opset {OPSET}"
            ) from None
    model = onnx.shape_inference.infer_shapes(model)
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    weights = {i.name for i in model.graph.initializer}
    layers = [
        n.name for n in model.graph.node if (n.op_type in HEAVY and n.op_type != "MatMul") or _by_weight(n, weights)
    ]
    if not layers:
        raise BadInput(f"{source} has no convolutions or matrix products with weights; there is nothing to quantise")
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)}
    types |= {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    chosen = set(layers)
    wanted: dict[str, None] = {}
    for node in model.graph.node:
        everywhere = layout == "onnxruntime"
        if node.name in chosen or everywhere:
            for name in (*node.input, *(node.output if everywhere else ())):
                if name and name not in weights and types.get(name) == onnx.TensorProto.FLOAT:
                    wanted[name] = None
    total = len(frames.paths)
    histograms: dict[str, Histogram] = collect(
        model.SerializeToString(),
        list(wanted),
        (feeds for feeds, _ in opened.runs(frames.paths)),
        threads,
        lambda done: tell("ranges", done, total),
    )
    ranges = {}
    for name, histogram in histograms.items():
        top = histogram.range(method, percentile)
        # ONNX Runtime's kernels are fast for unsigned activations, which need not be symmetric.
        ranges[name] = (max(histogram.lowest, -top) if layout == "onnxruntime" else -top, top)
    return Plan(model, ranges, layers, layout)


def _by_weight(node: Any, weights: set[str]) -> bool:
    """A product of two activations (attention scores) is left alone."""
    return node.op_type == "MatMul" and any(name in weights for name in node.input)


def quantise(plan: Plan, kept: set[str] | frozenset[str] = frozenset()) -> bytes:
    """The model with Q/DQ pairs at every layer but the kept ones, serialised."""
    key = frozenset(kept)
    if key not in plan.cache:
        plan.cache.clear()
        plan.cache[key] = _quantise(plan, key)
    return plan.cache[key]


def _quantise(plan: Plan, kept: frozenset[str]) -> bytes:
    import logging

    onnx = import_onnx()
    # Its advice on preparing models goes to the root logger.
    logging.getLogger().setLevel(logging.ERROR)
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.registry import QDQRegistry

    copy = onnx.ModelProto()
    copy.CopyFrom(plan.model)
    everywhere = plan.layout == "onnxruntime"
    heavy = set(plan.layers)
    types = set(HEAVY) | (set(QDQRegistry) if everywhere else set())
    # Next to a layer that stays float its neighbours' pairs would bring the loss back: its own outputs have none.
    chosen = [
        n.name
        for n in copy.graph.node
        if n.op_type in types and n.name not in kept and (n.name in heavy or (everywhere and n.op_type not in HEAVY))
    ]
    data = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high)) for name, (low, high) in plan.ranges.items()
    }
    quantizer = QDQQuantizer(
        copy,
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8 if everywhere else QuantType.QInt8,
        tensors_range=TensorsData(CalibrationMethod.MinMax, data),
        nodes_to_quantize=chosen,
        nodes_to_exclude=[],
        op_types_to_quantize=sorted(types),
        extra_options={
            "ActivationSymmetric": not everywhere,
            "WeightSymmetric": True,
            # TensorRT takes no int32 behind a DequantizeLinear.
            "QuantizeBias": everywhere,
            "OpTypesToExcludeOutputQuantization": [] if everywhere else list(HEAVY),
        },
    )
    if chosen:
        quantizer.quantize_model()
        # Its new nodes come last.
        quantizer.model.topological_sort()
    return bytes(quantizer.model.model.SerializeToString())


def sensitivity(
    plan: Plan,
    probes: Sequence[tuple[Feeds, Mapping[str, NDArray[Any]]]],
    kept: set[str],
    deadline: float,
    threads: int | None,
    tell: Progress,
) -> tuple[list[dict[str, Any]], float]:
    """What quantising some layers, and nothing else, does to the outputs.

    First groups of neighbouring layers; then, of the groups that harm most, every layer by itself, since often one of
    them is to blame: a depthwise convolution, whose channels differ a hundredfold in range and share one scale.

    Returns:
        The parts by falling harm, each with ``first``, ``last``, ``layers`` and ``error`` (:func:`output_error`), and
        the median error of the groups. What the deadline left out is missing.
    """
    free = [name for name in plan.layers if name not in kept]
    groups = [list(g) for g in np.array_split(np.array(free, object), min(GROUPS, max(1, len(free)))) if len(g)]

    def measured(parts: Sequence[list[str]], stage: str) -> list[dict[str, Any]]:
        out = []
        for index, layers in enumerate(parts):
            if time.monotonic() > deadline:
                break
            tell(stage, index, len(parts))
            error = _output_error(_quantise(plan, frozenset(set(plan.layers) - set(layers))), probes, threads)
            out.append({"first": layers[0], "last": layers[-1], "layers": layers, "error": round(error, 5)})
        tell(stage, len(parts), len(parts))
        return out

    coarse = measured(groups, "sensitivity of groups")
    typical = float(np.median([g["error"] for g in coarse])) if coarse else 0.0
    coarse.sort(key=lambda g: -g["error"])
    split = [
        g for i, g in enumerate(coarse) if len(g["layers"]) > 1 and (i < REFINED or g["error"] > OUTLIER * typical)
    ]
    fine = measured([[name] for g in split for name in g["layers"]], "sensitivity of layers")
    alone = {g["first"] for g in fine}
    # A group of which some layers were not reached stays a group.
    whole = [g for g in coarse if g not in split or not set(g["layers"]) <= alone]
    covered = {name for g in whole for name in g["layers"]}
    parts = whole + [g for g in fine if g["first"] not in covered]
    return sorted(parts, key=lambda g: -g["error"]), typical


def _output_error(
    model: bytes, probes: Sequence[tuple[Feeds, Mapping[str, NDArray[Any]]]], threads: int | None
) -> float:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    errors = [
        output_error(truth[name], value)
        for feeds, truth in probes
        for name, value in zip(names, session.run(names, dict(feeds)), strict=True)
        if np.issubdtype(value.dtype, np.floating)
    ]
    return float(np.mean(errors)) if errors else 0.0


def output_error(truth: NDArray[Any], value: NDArray[Any]) -> float:
    """How far an output is off, with every channel counting alike.

    A detector's output has boxes in hundreds of pixels beside scores that are nearly all zero: the error of a channel
    is its root mean square over the channel's standard deviation, and channels are the shortest axis but the batch.
    """
    if truth.shape != value.shape:
        return 1.0
    t, v = (np.nan_to_num(a.astype(np.float64)) for a in (truth, value))
    axes = [i for i in range(1, t.ndim) if t.shape[i] > 1]
    if len(axes) > 1:
        channel = min(axes, key=lambda i: t.shape[i])
        t, v = (np.moveaxis(a, channel, 0).reshape(a.shape[channel], -1) for a in (t, v))
    else:
        t, v = t.reshape(1, -1), v.reshape(1, -1)
    spread = t.std(1)
    some = spread > 1e-9
    if not some.any():
        return 0.0
    return float(np.mean(np.sqrt(((t - v) ** 2).mean(1))[some] / spread[some]))


def _gate(
    source: str | os.PathLike[str],
    plan: Plan,
    kept: set[str],
    by_harm: Sequence[Mapping[str, Any]],
    measure: Measure,
    kind: str,
    max_drop: float,
    deadline: float,
    tell: Progress,
) -> tuple[set[str], dict[str, Any]]:
    """Measures the quantised model; leaves the worst layers in float and tries again while it misses."""
    tell("gate: the float model", 0, 1)
    before = _figures(measure(Path(source), kind))
    if not before:
        raise BadInput(
            "the gate's pictures have nothing to measure with this model (no truth, or none of its classes); "
            "give others, or leave the gate out"
        )
    tried: list[tuple[set[str], dict[str, Any]]] = []
    order: Iterator[Mapping[str, Any]] = iter(g for g in by_harm if not set(g["layers"]) <= kept)
    while True:
        tell("gate: the quantised model", len(tried), len(tried) + 1)
        with tempfile.TemporaryDirectory(prefix="hoverlens-int8-") as folder:
            # Under its own name: what a model is may be read from it.
            file = Path(folder) / Path(source).name
            file.write_bytes(quantise(plan, kept))
            after = _figures(measure(file, kind))
        drops = {k: round(_drop(k, before[k], after.get(k)), 4) for k in before}
        passed = all(d <= max_drop for d in drops.values())
        result = {"float": before, "int8": after, "drop": drops, "max_drop": max_drop, "passed": passed}
        tried.append((set(kept), result))
        if passed or time.monotonic() > deadline:
            break
        more: set[str] = set()
        # Measuring takes long: a share of the layers at a time, however the sweep divided them.
        while len(more) * GROUPS < len(plan.layers) and (following := next(order, None)) is not None:
            more |= set(following["layers"])
        # With more than half of them in float there is no point.
        if not more or len(kept | more) > len(plan.layers) // 2:
            break
        kept = kept | more
    best = next((t for t in tried if t[1]["passed"]), None) or min(tried, key=lambda t: max(t[1]["drop"].values()))
    return best[0], {**best[1], "tries": len(tried)}


def _figures(measured: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(measured[k]) for k in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER) if measured.get(k) is not None}


def _drop(key: str, before: float, after: float | None) -> float:
    if after is None:
        return float("inf")
    return before - after if key in HIGHER_IS_BETTER else after - before


def gate_text(gate: Mapping[str, Any]) -> str:
    """``AP50 0.412 -> 0.380 (drop 0.032, at most 0.02)``, for each figure."""
    return ", ".join(
        f"{k} {gate['float'][k]:.3f} -> {gate['int8'].get(k, float('nan')):.3f} "
        f"(worse by {gate['drop'][k]:.3f}, at most {gate['max_drop']:g})"
        for k in gate["float"]
    )


def calibration_text(record: Mapping[str, Any]) -> str:
    """What was done, for people."""
    source, images = record["source"], record["calibration_set"]
    lines = [
        f"{record['output']}: {record['bytes'] / 1e6:.1f} MB ({source['file']} has {source['bytes'] / 1e6:.1f} MB)",
        f"{record['layers'] - len(record['kept_float'])} of {record['layers']} layers INT8, by {record['method']} over "
        f"{images['images']} pictures ({images['sha256'][:12]})",
    ]
    if record["gate"] is not None:
        lines.append(f"gate passed: {gate_text(record['gate'])}")
    return "\n".join(lines)


def _advice(gate: Mapping[str, Any], method: Method) -> str:
    others = " or ".join(m for m in METHODS if m != method)
    return f"try --method {others}, more pictures, or stay with FP16"


def _with_metadata(data: bytes, record: Mapping[str, Any]) -> bytes:
    """The model with its record: an engine built of it carries that on."""
    onnx = import_onnx()
    model = onnx.ModelProto.FromString(data)
    entry = next((p for p in model.metadata_props if p.key == METADATA_KEY), None) or model.metadata_props.add()
    entry.key = METADATA_KEY
    entry.value = json.dumps({k: v for k, v in record.items() if k != "sweep"}, allow_nan=False)
    return bytes(model.SerializeToString())
