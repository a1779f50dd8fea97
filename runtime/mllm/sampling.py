"""Drawing tokens from logits, one stream of random numbers for each request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Sampling


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural log of the softmax of float32 (n_vocab,) logits at one token (temperature 1)."""
    top = logits.max()
    total = np.exp(logits - top).sum(dtype=np.float64)
    return float(logits[token]) - float(top) - math.log(total)


_NEGLIGIBLE = 40.0
"""Tokens this far below the best (in units of the temperature) are never drawn: probability below e-40."""


class Sampler:
    """Draws from logits by :class:`Sampling`.

    By the Gumbel maximum: every token has noise of its own, and the largest sum of logit and noise wins. The
    noise depends on the seed, the number of the draw and the token alone. So a draw changes only where two
    sums are closer than the rounding of the logits, which differs a little with what else is in a batch;
    drawing by cumulative probabilities would let the rounding of all tokens add up.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._s = sampling
        self._draws = 0

    def draw(self, logits: NDArray[np.float32]) -> int:
        """One token id from float32 (n_vocab,) logits; forbidden tokens are -inf."""
        s = self._s
        best = int(np.argmax(logits))
        self._draws += 1
        if s.temperature <= 0.0:
            return best
        floor = logits[best] - np.float32(_NEGLIGIBLE * s.temperature)
        ids = np.flatnonzero(logits >= floor)
        x = (logits[ids].astype(np.float64) - float(logits[best])) / s.temperature
        if s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0:
            order = np.argsort(-x, kind="stable")
            ids, x = ids[order], x[order]
            keep = self._kept(np.exp(x))
            ids, x = ids[:keep], x[:keep]
        return int(ids[np.argmax(x + self._noise(ids))])

    def _kept(self, weights: NDArray[np.float64]) -> int:
        """How many of the falling weights top_k, min_p and top_p leave; at least one."""
        s = self._s
        keep = len(weights)
        if s.top_k > 0:
            keep = min(keep, s.top_k)
        if s.min_p > 0.0:
            keep = min(keep, int(np.count_nonzero(weights >= s.min_p * weights[0])))
        if s.top_p < 1.0:
            mass = np.cumsum(weights[:keep])
            keep = min(keep, int(np.searchsorted(mass, s.top_p * mass[-1])) + 1)
        return max(keep, 1)

    def _noise(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Standard Gumbel noise for token ids at this draw: a hash of (seed, draw, token)."""
        start = _mix(np.uint64(self._s.seed & _MASK))
        stream = _mix(start ^ np.uint64(self._draws))
        # 52 bits: with 53 the half would be rounded away, and the largest become 1, whose noise is infinite.
        u = (_mix(stream ^ ids.astype(np.uint64)) >> np.uint64(12)).astype(np.float64)
        return np.asarray(-np.log(-np.log((u + 0.5) * 2.0**-52)))


_MASK = (1 << 64) - 1


def _mix(x: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on uint64 values, after its increment."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
