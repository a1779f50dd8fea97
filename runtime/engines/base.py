"""What an inference engine is: named tensors in, named tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput

MAX_FIXED_BATCH = 256
ENGINE_SUFFIXES = (".engine", ".plan")
TENSORRT_NAMES = {"tensorrt", "trt", "tensorrtexecutionprovider"}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output as the model file declares it.

    Attributes:
        name: The tensor's name in the graph.
        dtype: NumPy's name of the element type, for example ``"float32"``.
        shape: One entry an axis: a number, the name of a dynamic axis, or None where the file says nothing.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def fixed(self, axis: int) -> int | None:
        """The size of one axis, or None where it is dynamic or the axis does not exist."""
        if not -self.rank <= axis < self.rank:
            return None
        size = self.shape[axis]
        return size if isinstance(size, int) and size > 0 else None

    def describe(self) -> str:
        """For messages: ``images float32 1x3x640x640``, dynamic axes by name or as ``?``."""
        shape = "x".join("?" if s is None else str(s) for s in self.shape) or "scalar"
        return f"{self.name} {self.dtype} {shape}"


@runtime_checkable
class Engine(Protocol):
    """A compiled model.

    Attributes:
        name: Short name for reports (the file's stem).
        provider: What runs it, for example ``"CPUExecutionProvider"``.
        inputs: In the file's order.
        outputs: In the file's order.
        metadata: Free key-value text the file carries.
    """

    name: str
    provider: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Runs the model once on a complete set of inputs."""
        ...

    def close(self) -> None:
        """Frees the engine. May be called more than once."""
        ...


def check_batch(engine: Engine, image: TensorSpec) -> None:
    """Refuses a model whose fixed batch would only waste memory: each run must fill it.

    Raises:
        BadInput: It takes more than :data:`MAX_FIXED_BATCH` pictures at once.
    """
    views = image.fixed(1) if image.rank == 5 else None
    pictures = (image.fixed(0) or 1) * (views or 1)
    if pictures > MAX_FIXED_BATCH:
        raise BadInput(
            f"{engine.name} takes {pictures} pictures in each run ({image.describe()}); at most {MAX_FIXED_BATCH} "
            "are given, so export it again with a batch of 1"
        )


def check_feeds(name: str, inputs: tuple[TensorSpec, ...], feeds: Mapping[str, NDArray[Any]]) -> None:
    """Compares what is fed with what the model declares.

    Raises:
        BadInput: A name, dtype, rank or fixed size differs; the message names the first difference.
    """
    known = {spec.name for spec in inputs}
    missing = [spec.name for spec in inputs if spec.name not in feeds]
    extra = [key for key in feeds if key not in known]
    if missing or extra:
        raise BadInput(
            f"{name}: got inputs {sorted(feeds) or 'none'}, needed {sorted(known)}; feed every input by its name"
        )
    for spec in inputs:
        value = feeds[spec.name]
        if value.dtype != np.dtype(spec.dtype):
            raise BadInput(f"{name}: input {spec.name} is {value.dtype}, needed {spec.dtype}; convert it with astype")
        matches = value.ndim == spec.rank and all(
            not isinstance(want, int) or want <= 0 or want == got
            for want, got in zip(spec.shape, value.shape, strict=True)
        )
        if not matches:
            got = "x".join(map(str, value.shape))
            raise BadInput(f"{name}: input has shape {got}, needed {spec.describe()}; resize or batch it to fit")


def open_engine(
    path: str | object, providers: list[str] | tuple[str, ...] | None = None, threads: int | None = None
) -> Engine:
    """Opens a compiled model, choosing the engine by the file's suffix.

    Args:
        path: The model file.
        providers: Execution providers in order of preference, short ("cpu", "cuda", "tensorrt") or full names;
            by default whatever this machine has, fastest first.
        threads: CPU threads for one run; by default the library decides.

    Raises:
        BadInput: There is no such file, nothing here reads its format, or it is damaged.
    """
    from pathlib import Path

    file = Path(str(path))
    suffix = file.suffix.lower()
    if suffix == ".onnx":
        from .onnx import OnnxEngine

        return OnnxEngine(file, providers=providers, threads=threads)
    if suffix in ENGINE_SUFFIXES:
        if providers is not None and not {p.lower() for p in providers} & TENSORRT_NAMES:
            raise BadInput(
                f"{file} is a TensorRT engine, asked for {', '.join(providers)}; open the ONNX model instead"
            )
        from .tensorrt import TensorRtEngine

        return TensorRtEngine(file)
    found = f"suffix {suffix}" if suffix else "no suffix"
    raise BadInput(f"cannot open {file} as a model: {found}, needed .onnx, .engine or .plan; export it to ONNX first")
