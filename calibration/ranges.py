"""Ranges of activations: how large the numbers in a tensor get, and where to cut.

Quantisation is symmetric, so a tensor's range is one number: what 127 stands for. Cutting large values off makes
the steps finer for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .frames import Feeds

Method = Literal["minmax", "entropy", "percentile"]
METHODS: tuple[Method, ...] = ("minmax", "entropy", "percentile")
BINS = 2048
LEVELS = 128
"""Magnitudes that a symmetric int8 can tell apart, zero included."""
ENTROPY_STEP = 16
PERCENTILE = 99.99


class Histogram:
    """Magnitudes of one tensor over many runs, in :data:`BINS` equal bins from 0 to :attr:`top`.

    Memory does not grow with the number of runs: when a larger value comes, bins are joined in pairs.
    """

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(BINS, np.int64)
        self.top = 0.0
        self.largest = 0.0
        self.lowest = 0.0

    def add(self, values: NDArray[Any]) -> None:
        flat = values.reshape(-1).astype(np.float32, copy=False)
        flat = flat[np.isfinite(flat)]
        if not flat.size:
            return
        self.lowest = min(self.lowest, float(flat.min()))
        magnitudes = np.abs(flat)
        largest = float(magnitudes.max())
        self.largest = max(self.largest, largest)
        if self.top == 0.0:
            if largest == 0.0:
                return
            self.top = largest
        while largest > self.top:
            half = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([half, np.zeros(BINS // 2, np.int64)])
            self.top *= 2
        places = (magnitudes * np.float32(BINS / self.top)).astype(np.int32)
        self.counts += np.bincount(np.minimum(places, BINS - 1), minlength=BINS)

    def range(self, method: Method, percentile: float = PERCENTILE) -> float:
        """The magnitude that becomes 127.

        ``minmax`` takes the largest seen, ``percentile`` leaves out the largest few, ``entropy`` cuts where the
        quantised distribution says most about the original one (least Kullback-Leibler divergence).

        Returns:
            0 for a tensor that was always 0.
        """
        if method == "minmax" or not self.counts.any():
            return self.largest
        if method == "percentile":
            below = np.cumsum(self.counts) / self.counts.sum()
            index = int(np.searchsorted(below, percentile / 100.0))
        else:
            index = best_cut(self.counts)
        return min(self.largest, (min(index, BINS - 1) + 1) * self.top / BINS)


def best_cut(counts: NDArray[np.int64]) -> int:
    """The last bin to keep, by least Kullback-Leibler divergence between the kept counts and their quantised form."""
    occupied = np.flatnonzero(counts)
    last = int(occupied[-1]) + 1 if occupied.size else BINS
    # Zeros are exact at any range, so they must not decide.
    weights = counts.astype(np.float64)
    weights[0] = 0.0
    best, choice = np.inf, last
    for kept in sorted({*range(min(LEVELS, last), last, ENTROPY_STEP), last}):
        outside = weights[kept:].sum()
        reference = weights[:kept].copy()
        reference[-1] += outside
        if not reference.any():
            continue
        divergence = _divergence(reference, _coarsened(weights[:kept]))
        if divergence < best:
            best, choice = divergence, kept
    return choice - 1


def _coarsened(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The counts as :data:`LEVELS` steps see them: the mean of a step's occupied bins in each of them."""
    step = np.minimum(np.arange(len(counts)) * LEVELS // len(counts), LEVELS - 1)
    occupied = counts > 0
    sums = np.bincount(step, weights=counts, minlength=LEVELS)
    number = np.bincount(step, weights=occupied, minlength=LEVELS)
    mean = np.divide(sums, number, out=np.zeros(LEVELS), where=number > 0)
    return np.where(occupied, mean[step], 0.0)


def _divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    p, q = p / p.sum(), q / max(q.sum(), 1e-12)
    # A cut that puts mass where the quantised form has none costs much, not infinitely much.
    q = np.maximum(q, 1e-9)
    some = p > 0
    return float(np.sum(p[some] * np.log(p[some] / q[some])))


def collect(
    model: bytes,
    tensors: Sequence[str],
    feeds: Iterable[Feeds],
    threads: int | None = None,
    tell: Callable[[int], None] | None = None,
) -> dict[str, Histogram]:
    """Runs a model and looks at tensors inside it.

    Args:
        model: A serialised ONNX model.
        tensors: Names of float tensors.
        feeds: Inputs of each run.
        tell: Called with the number of runs done.
    """
    import onnx
    import onnxruntime as ort

    proto = onnx.ModelProto.FromString(model)
    have = {o.name for o in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in have)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = {name: Histogram() for name in tensors}
    inputs = {i.name for i in session.get_inputs()}
    # An input is no output of a run.
    wanted = [name for name in tensors if name not in inputs]
    for done, values in enumerate(feeds, 1):
        for name, value in zip(wanted, session.run(wanted, dict(values)), strict=True):
            if np.issubdtype(value.dtype, np.floating):
                found[name].add(value)
        for name in inputs & set(tensors):
            found[name].add(values[name])
        if tell is not None:
            tell(done)
    return found
