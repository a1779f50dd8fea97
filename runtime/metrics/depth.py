"""How good a depth map is: relative error, inliers, near/far order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


def usable(estimate: Array, truth: Array) -> NDArray[np.bool_]:
    """Pixels that count: truth known (above 0) and estimate finite and above 0."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.isfinite(truth) & (truth > 0) & np.isfinite(estimate) & (estimate > 0))


def median_scaled(estimate: Array, truth: Array) -> NDArray[np.float64]:
    """The estimate times one factor, so that its median over the usable pixels is the truth's."""
    use = usable(estimate, truth)
    if not use.any():
        return np.asarray(estimate, np.float64)
    return np.asarray(estimate, np.float64) * float(np.median(truth[use]) / np.median(estimate[use]))


def disparity_fitted(disparity: Array, truth: Array) -> NDArray[np.float64]:
    """Depth from a disparity known up to scale and shift, both fitted to the truth.

    Least squares in inverse depth, the usual protocol for such models. Pixels whose fitted inverse
    depth is not above 0 become NaN.
    """
    d = np.asarray(disparity, np.float64)
    with np.errstate(invalid="ignore"):
        use = np.isfinite(truth) & (truth > 0) & np.isfinite(d)
    if use.sum() < 2:
        return np.full(d.shape, np.nan)
    design = np.stack([d[use], np.ones(int(use.sum()))], 1)
    scale, shift = np.linalg.lstsq(design, 1.0 / np.asarray(truth, np.float64)[use], rcond=None)[0]
    inverse = scale * d + shift
    with np.errstate(all="ignore"):
        return np.asarray(np.where(inverse > 0, 1.0 / inverse, np.nan))


def abs_rel(estimate: Array, truth: Array) -> float | None:
    """Mean of |estimate - truth| / truth over the usable pixels; None without any."""
    use = usable(estimate, truth)
    if not use.any():
        return None
    e, t = np.asarray(estimate, np.float64)[use], np.asarray(truth, np.float64)[use]
    return float(np.mean(np.abs(e - t) / t))


def delta(estimate: Array, truth: Array, threshold: float = 1.25) -> float | None:
    """Share of usable pixels with max(estimate / truth, truth / estimate) under the threshold."""
    use = usable(estimate, truth)
    if not use.any():
        return None
    e, t = np.asarray(estimate, np.float64)[use], np.asarray(truth, np.float64)[use]
    return float(np.mean(np.maximum(e / t, t / e) < threshold))


def order_accuracy(estimate: Array, truth: Array, pairs: int = 5000, gap: float = 0.05, seed: int = 0) -> float | None:
    """Share of pixel pairs whose near/far order is right.

    Args:
        estimate: Larger = farther; any unit.
        truth: Metres, 0 or NaN where unknown.
        pairs: Pairs drawn at random, with a fixed seed.
        gap: Only pairs whose true depths differ by this share of the nearer one, or more, count.
        seed: Of the draw.

    Returns:
        0.5 is chance; equal estimates count half. None if no pair counts.
    """
    with np.errstate(invalid="ignore"):
        use = np.isfinite(truth) & (truth > 0) & np.isfinite(estimate)
    e, t = np.asarray(estimate, np.float64)[use], np.asarray(truth, np.float64)[use]
    if t.size < 2:
        return None
    first, second = np.random.default_rng(seed).integers(0, t.size, (2, pairs))
    far_enough = np.abs(t[first] - t[second]) >= gap * np.minimum(t[first], t[second])
    first, second = first[far_enough], second[far_enough]
    if not first.size:
        return None
    wanted, got = np.sign(t[first] - t[second]), np.sign(e[first] - e[second])
    return float(np.mean(np.where(got == 0, 0.5, wanted == got)))
