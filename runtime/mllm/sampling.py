"""Drawing tokens from logits, one stream of random numbers for each request."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .base import Sampling


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural log of the softmax of float32 (n_vocab,) logits at one token (temperature 1)."""
    top = logits.max()
    total = np.exp(logits - top).sum(dtype=np.float64)
    return float(logits[token]) - float(top) - math.log(total)


class Sampler:
    """Draws from logits by :class:`Sampling`; the stream depends on the seed alone."""

    def __init__(self, sampling: Sampling) -> None:
        self._s = sampling
        self._rng = np.random.Generator(np.random.PCG64(sampling.seed))

    def draw(self, logits: NDArray[np.float32]) -> int:
        """One token id from float32 (n_vocab,) logits; forbidden tokens are -inf.

        Exactly one number of the stream is used, whatever the logits are, so that two runs that agree so
        far stay in step.
        """
        u = float(self._rng.random())
        s = self._s
        best = int(np.argmax(logits))
        if s.temperature <= 0.0:
            return best
        # Weights relative to the best token, in vocabulary order: sorting 150,000 of them for each
        # token would cost more than a small model's decode step.
        w = np.exp((logits.astype(np.float64) - float(logits[best])) / s.temperature)
        if 0 < s.top_k < np.count_nonzero(w):
            w[w < np.partition(w, -s.top_k)[-s.top_k]] = 0.0
        if s.min_p > 0.0:
            w[w < s.min_p] = 0.0
        if s.top_p < 1.0:
            ids = np.flatnonzero(w > 0.0)
            ids = ids[np.argsort(-w[ids], kind="stable")]
            mass = np.cumsum(w[ids])
            keep = int(np.searchsorted(mass, s.top_p * mass[-1])) + 1
            w[ids[keep:]] = 0.0
        mass = np.cumsum(w)
        i = int(np.searchsorted(mass, u * mass[-1], side="right"))
        if i >= len(w) or w[i] == 0.0:  # u * total may round up to the total itself
            i = int(np.flatnonzero(w)[-1])
        return i
