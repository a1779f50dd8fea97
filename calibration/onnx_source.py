"""Reading an ONNX model that is to become an engine, and refusing what cannot become one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..runtime.errors import BadInput, HoverlensError

INT8_TYPES = ("INT8", "UINT8")
FP8_TYPES = ("FLOAT8E4M3FN", "FLOAT8E5M2")
QUANTISE = ("QuantizeLinear", "DequantizeLinear")


def import_onnx() -> Any:
    """The ``onnx`` package, which only making models needs.

    Raises:
        HoverlensError: It is not installed.
    """
    try:
        import onnx
        import onnx.version_converter
    except ImportError:
        raise HoverlensError(
            "the onnx package is missing, needed to read models; pip install 'hoverlens[export]'"
        ) from None
    return onnx


def load_source(path: str | os.PathLike[str]) -> Any:
    """Reads an ONNX file with all its weights.

    Weights that the file also lists as inputs, as old exporters did, are taken off the inputs: nobody feeds them.

    Returns:
        An ``onnx.ModelProto`` whose constants are all initializers.

    Raises:
        BadInput: No file, no ONNX, a damaged one, or one whose separate weights are missing.
    """
    onnx = import_onnx()
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "no such file"
        raise BadInput(f"cannot read the model {file}: {what}; name an .onnx file")
    try:
        model = onnx.load(str(file), load_external_data=False)
        nodes = len(model.graph.node)
    except MemoryError:
        raise
    except Exception:
        nodes = 0
    if not nodes:
        raise BadInput(f"cannot read the model {file}: not an ONNX file, or a damaged one; copy or export it again")
    _load_weights(onnx, model, file)
    try:
        onnx.checker.check_model(model)
    except Exception as e:
        # Operators of other domains pass this check: TensorRT may have a plugin for them.
        raise BadInput(
            f"cannot use the model {file}: it is not valid ONNX ({_first_line(e)}); export it again"
        ) from None
    weights = {i.name for i in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in weights]
    if not inputs:
        raise BadInput(f"cannot use the model {file}: it has no inputs besides its weights; export it again")
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    _lift_constants(onnx, model)
    return model


def _load_weights(onnx: Any, model: Any, file: Path) -> None:
    from onnx import external_data_helper as external

    for tensor in (t for t in model.graph.initializer if external.uses_external_data(t)):
        location = external.ExternalDataInfo(tensor).location
        if not (file.parent / location).is_file():
            raise BadInput(
                f"cannot read the model {file}: its weights are in {location}, which is not there; "
                "put that file beside the model"
            )
    try:
        external.load_external_data_for_model(model, str(file.parent))
    except MemoryError:
        raise
    except Exception as e:
        raise BadInput(
            f"cannot read the model {file}: its separate weights cannot be read ({_first_line(e)}); export it again"
        ) from None


def _lift_constants(onnx: Any, model: Any) -> None:
    """Makes initializers of Constant nodes, so that weights have one form."""
    kept = []
    for node in model.graph.node:
        value = next((a for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and value is not None:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(value.t)
            tensor.name = node.output[0]
            model.graph.initializer.append(tensor)
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)


def quantised_as(model: Any) -> set[str]:
    """Which of ``int8`` and ``fp8`` the model's Q/DQ pairs are in."""
    onnx = import_onnx()
    kinds = {i.name: i.data_type for i in model.graph.initializer}
    found = set()
    for node in model.graph.node:
        if node.op_type in QUANTISE and len(node.input) > 2 and node.input[2] in kinds:
            name = onnx.TensorProto.DataType.Name(kinds[node.input[2]])
            found |= {"int8"} if name in INT8_TYPES else {"fp8"} if name in FP8_TYPES else set()
    return found


def metadata_of(model: Any) -> dict[str, str]:
    """The model's free key-value text: labels, preprocessing, licence."""
    return {p.key: p.value for p in model.metadata_props}


def shape_of(value: Any) -> tuple[int | str | None, ...]:
    """The shape of a ``ValueInfoProto``: a number, the name of a dynamic axis, or None."""
    return tuple(
        int(d.dim_value) if d.HasField("dim_value") else (d.dim_param or None) for d in value.type.tensor_type.shape.dim
    )


def float_inputs(model: Any) -> Iterator[Any]:
    onnx = import_onnx()
    return (i for i in model.graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.FLOAT)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
