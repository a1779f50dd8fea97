"""TensorRT engines, run with memory that is allocated once.

Not run on a GPU yet: its logic is tested against stand-ins for TensorRT and pycuda that compute with ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput, HoverlensError
from .base import TensorSpec, check_feeds
from .compat import MODULES, PRODUCTS, Here, check_engine, rebuild_command
from .cuda import Cuda, OnDevice, Pinned, open_cuda


@dataclass
class _Slot:
    """One input or output and its memory.

    Attributes:
        spec: As the engine declares it.
        smallest, largest: The profile's limits; of an output only ``largest`` counts.
        host: Pinned, room for ``largest``.
        device: None where the GPU works on ``host`` itself.
    """

    spec: TensorSpec
    smallest: tuple[int, ...]
    largest: tuple[int, ...]
    host: Pinned
    device: OnDevice | None = None

    @property
    def address(self) -> int:
        if self.device is not None:
            return self.device.address
        assert self.host.address is not None
        return self.host.address

    def view(self, shape: Sequence[int]) -> NDArray[Any]:
        """The host memory as an array of a shape up to ``largest``."""
        kind = np.dtype(self.spec.dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self.host.array[:size].view(kind).reshape(tuple(shape))


@dataclass
class _State:
    """What :meth:`TensorRtEngine.close` frees, in the order of its making."""

    cuda: Cuda
    runtime: Any = None
    engine: Any = None
    context: Any = None
    stream: Any = None
    slots: dict[str, _Slot] = field(default_factory=dict)


class TensorRtEngine:
    """A TensorRT engine, ready to run. See :class:`~hoverlens.runtime.engines.base.Engine`.

    Runs may come from several threads; they take turns. A batch larger than the engine's profile goes in parts.
    Not run on a GPU yet.

    Raises:
        BadInput: The file is missing or damaged.
        HoverlensError: It is for another TensorRT or GPU, or does not load; the message has the command that
            builds it anew.
    """

    def __init__(self, path: str | os.PathLike[str], here: Here | None = None) -> None:
        self.path = Path(path)
        here = here or Here.look()
        sidecar = check_engine(self.path, here)
        self.name = self.path.stem
        self.provider: str = f"{PRODUCTS[sidecar['flavour']]} {sidecar['version']}"
        self.metadata: Mapping[str, str] = {str(k): str(v) for k, v in (sidecar.get("metadata") or {}).items()}
        self._lock = threading.Lock()
        self._failed: list[str] = []
        self._rebuild = rebuild_command(self.path, sidecar, here)
        self._trt = importlib.import_module(MODULES[sidecar["flavour"]])
        # On Tegra CPU and GPU share memory, and a copy is a waste.
        self._mapped = here.device is not None and here.device.integrated
        self._state: _State | None = _State(open_cuda())
        try:
            with self._state.cuda.active():
                self._load(self._state)
        except BaseException:
            self.close()
            raise

    def _load(self, state: _State) -> None:
        trt = self._trt
        state.runtime = trt.Runtime(_logger(trt, self._failed))
        state.engine = state.runtime.deserialize_cuda_engine(self.path.read_bytes())
        if state.engine is None:
            raise HoverlensError(f"{self.name} does not load: {self._reason()}; rebuild it: {self._rebuild}")
        state.context = state.engine.create_execution_context()
        if state.context is None:
            raise HoverlensError(
                f"{self.name} does not start: {self._reason()}; close other programs, or rebuild it with smaller "
                f"shapes: {self._rebuild}"
            )
        state.stream = state.cuda.stream()
        inputs: list[tuple[str, tuple[int, ...]]] = []
        outputs: list[tuple[str, tuple[int, ...]]] = []
        for i in range(state.engine.num_io_tensors):
            name = state.engine.get_tensor_name(i)
            is_input = state.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            shape = tuple(state.engine.get_tensor_shape(name))
            (inputs if is_input else outputs).append((name, shape))
        self.inputs = tuple(self._spec(state, *t) for t in inputs)
        self.outputs = tuple(self._spec(state, *t) for t in outputs)
        for spec in self.inputs:
            low, _, high = (tuple(s) for s in state.engine.get_tensor_profile_shape(spec.name, 0))
            self._set_shape(state, spec.name, high)
            state.slots[spec.name] = self._slot(state, spec, low, high)
        for spec in self.outputs:
            high = tuple(state.context.get_tensor_shape(spec.name))
            if any(n < 0 for n in high):
                raise BadInput(
                    f"{self.name}: output {spec.describe()} has a size that depends on what is seen; cut the model "
                    "before its suppression and rebuild"
                )
            state.slots[spec.name] = self._slot(state, spec, high, high)
        for name, slot in state.slots.items():
            state.context.set_tensor_address(name, slot.address)

    def _spec(self, state: _State, name: str, shape: tuple[int, ...]) -> TensorSpec:
        kind = state.engine.get_tensor_dtype(name)
        try:
            dtype = np.dtype(self._trt.nptype(kind)).name
        except TypeError:
            raise BadInput(
                f"{self.name}: {name} is {kind}, which NumPy has no type for; rebuild the engine from a model with "
                "float32 inputs and outputs"
            ) from None
        return TensorSpec(name, dtype, tuple(None if n < 0 else int(n) for n in shape))

    def _slot(self, state: _State, spec: TensorSpec, low: tuple[int, ...], high: tuple[int, ...]) -> _Slot:
        size = max(1, int(np.prod(high, dtype=np.int64)) * np.dtype(spec.dtype).itemsize)
        slot = _Slot(spec, low, high, state.cuda.pinned(size, self._mapped))
        # Known before the second allocation, so that its failure does not leak the first.
        state.slots[spec.name] = slot
        if not self._mapped:
            slot.device = state.cuda.allocate(size)
        return slot

    def _set_shape(self, state: _State, name: str, shape: tuple[int, ...]) -> None:
        if not state.context.set_input_shape(name, shape):
            got = "x".join(map(str, shape))
            raise BadInput(f"{self.name}: input {name} cannot be {got} ({self._reason()}); see its profile")

    def _reason(self) -> str:
        return " ".join(self._failed[-1].split())[:200] if self._failed else "TensorRT gave no reason"

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Runs the model once, or in parts where the batch is larger than the engine's.

        Args:
            feeds: Every input by name, with the dtype and rank that the engine declares.

        Returns:
            Every output by name, in memory of its own.

        Raises:
            BadInput: The feeds do not fit the engine or its profile.
            HoverlensError: The engine is closed, or the run itself failed.
        """
        check_feeds(self.name, self.inputs, feeds)
        with self._lock:
            if self._state is None:
                raise HoverlensError(f"{self.name}: the engine is closed; open it again")
            with self._state.cuda.active():
                return self._parts(self._state, feeds)

    def _parts(self, state: _State, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        batched = [s for s in self.inputs if s.rank and s.shape[0] is None]
        whole = all(o.rank and o.shape[0] is None for o in self.outputs)
        sizes = {feeds[s.name].shape[0] for s in batched}
        if len(sizes) != 1 or not whole or 0 in sizes:
            return self._once(state, feeds)
        total = sizes.pop()
        most = min(state.slots[s.name].largest[0] for s in batched)
        least = max(state.slots[s.name].smallest[0] for s in batched)
        names = {s.name for s in batched}
        parts = []
        for start in range(0, total, most):
            count = min(most, total - start)
            part = {k: v[start : start + count] if k in names else v for k, v in feeds.items()}
            for name in names if count < least else ():
                part[name] = np.concatenate([part[name], np.repeat(part[name][-1:], least - count, axis=0)])
            parts.append({k: v[:count] for k, v in self._once(state, part).items()})
        if len(parts) == 1:
            return parts[0]
        return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}

    def _once(self, state: _State, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        for spec in self.inputs:
            slot, value = state.slots[spec.name], feeds[spec.name]
            fits = all(a <= n <= b for a, n, b in zip(slot.smallest, value.shape, slot.largest, strict=True))
            if not fits:
                low, got, high = ("x".join(map(str, s)) for s in (slot.smallest, value.shape, slot.largest))
                raise BadInput(
                    f"{self.name}: input {spec.name} is {got}, needed {low} to {high}; resize it, or rebuild the "
                    "engine with another --profile"
                )
            if None in spec.shape:
                self._set_shape(state, spec.name, value.shape)
            np.copyto(slot.view(value.shape), value)
            if slot.device is not None:
                state.cuda.to_device(slot.device.address, slot.host.array[: value.nbytes], state.stream)
        if not state.context.execute_async_v3(state.cuda.handle(state.stream)):
            raise HoverlensError(f"{self.name}: the run failed ({self._reason()})")
        views = {}
        for spec in self.outputs:
            slot = state.slots[spec.name]
            views[spec.name] = view = slot.view(tuple(state.context.get_tensor_shape(spec.name)))
            if slot.device is not None:
                state.cuda.to_host(slot.host.array[: view.nbytes], slot.device.address, state.stream)
        state.cuda.wait(state.stream)
        # Copies: the next run overwrites the buffers.
        return {name: view.copy() for name, view in views.items()}

    def close(self) -> None:
        """Frees the engine and its memory. May be called more than once."""
        with self._lock:
            state, self._state = self._state, None
            if state is None:
                return
            with state.cuda.active():
                if state.stream is not None:
                    # Freeing what a kernel still works on is an error.
                    with contextlib.suppress(Exception):
                        state.cuda.wait(state.stream)
                # TensorRT wants its objects freed in this order.
                state.context = None
                state.engine = None
                state.runtime = None
                for slot in state.slots.values():
                    slot.host.free()
                    if slot.device is not None:
                        slot.device.free()
                state.slots.clear()
                if state.stream is not None:
                    state.cuda.close_stream(state.stream)
                    state.stream = None


def _logger(trt: Any, failed: list[str]) -> Any:
    """Keeps errors for the message and prints nothing."""
    worst = {str(trt.ILogger.ERROR), str(trt.ILogger.INTERNAL_ERROR)}

    class Quiet(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if str(severity) in worst:
                failed.append(message)

    return Quiet()
