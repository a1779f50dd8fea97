"""A crop with a soft boundary: the region sharp, its surroundings ever less so towards the rim.

A hard crop of a few pixels shows an object without the road that it stands on. Here the region is enlarged by
a margin on every side, and the picture's own blurred version is mixed in with a weight that rises smoothly from
nothing at the region's edge to all at the rim. What is around stays recognisable as what it is (a road, a roof)
but carries no detail that competes with the region, and no edge is drawn that is not there: a frame or a dark
vignette would be an object of its own to the model.

weight of the sharp picture at distance d outside the region, in margins: ``1 - d^2 (3 - 2 d)``, 1 inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..boxes import Region

MARGIN = 0.5
MIN_MARGIN_PIXELS = 8.0
MAX_ASPECT = 3.0
BLUR = 0.02
"""Radius (standard deviation) of the blur at the rim, as a share of the crop's longer side."""


@dataclass(frozen=True)
class CropMapping:
    """Where a crop lies in its frame. Both directions are exact: one multiplication and one addition.

    Attributes:
        region: What the crop shows, in whole pixels of the frame.
        size: The crop's own (width, height), resampled.
        origin_size: The frame's (width, height).
    """

    region: Region
    size: tuple[int, int]
    origin_size: tuple[int, int]

    @property
    def norm(self) -> tuple[float, float, float, float]:
        """The region as a normalised box of the frame."""
        w, h = self.origin_size
        x1, y1, x2, y2 = self.region.xyxy
        return x1 / w, y1 / h, x2 / w, y2 / h

    def to_original(self, xyxy_norm_crop: ArrayLike) -> NDArray[np.float64]:
        """Boxes normalised by the crop (... x 4), as boxes normalised by the frame."""
        scale, shift = self._affine()
        return np.asarray(xyxy_norm_crop, np.float64) * scale + shift

    def to_crop(self, xyxy_norm: ArrayLike) -> NDArray[np.float64]:
        """The inverse of :meth:`to_original`; boxes may reach past the crop."""
        scale, shift = self._affine()
        return np.asarray((np.asarray(xyxy_norm, np.float64) - shift) / scale)

    def _affine(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        w, h = self.origin_size
        r = self.region
        return np.array([r.width / w, r.height / h] * 2), np.array([r.x / w, r.y / h] * 2)


def soft_crop(
    rgb: NDArray[np.uint8],
    box: tuple[float, float, float, float],
    margin: float = MARGIN,
    out_size: int = 448,
    soft: bool = True,
) -> tuple[NDArray[np.uint8], CropMapping]:
    """Cuts a region with its surroundings and resamples it.

    Args:
        rgb: The frame, H x W x 3 uint8.
        box: The region, normalised, ``x1 < x2`` and ``y1 < y2``.
        margin: What is added on each side, as a share of the region's longer side; at least
            :data:`MIN_MARGIN_PIXELS` if above 0. More is added to the shorter side of what would be longer than
            :data:`MAX_ASPECT` to one. Nothing is added past the frame's edge.
        out_size: Longer side of the crop in pixels; the other keeps the aspect.
        soft: Lower the sharpness towards the rim; without it this is a plain crop.

    Returns:
        The crop, uint8 RGB, C-contiguous, and how it maps to the frame.

    Raises:
        ValueError: No such box, or out_size is not positive.
    """
    x1, y1, x2, y2 = (float(v) for v in box)
    if not (0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1):
        raise ValueError(f"the region is {box}; a normalised box with x1 < x2 and y1 < y2 is needed")
    if out_size < 1:
        raise ValueError(f"out_size is {out_size}; 1 or more is needed")
    height, width = rgb.shape[:2]
    core = np.array([x1 * width, y1 * height, x2 * width, y2 * height])
    sides = core[2:] - core[:2]
    pad = np.full(2, max(margin * sides.max(), MIN_MARGIN_PIXELS) if margin > 0 else 0.0)
    if margin > 0:
        pad = np.maximum(pad, ((sides + 2 * pad).max() / MAX_ASPECT - sides) / 2)
    left, right = _span(core[0] - pad[0], core[2] + pad[0], width)
    top, bottom = _span(core[1] - pad[1], core[3] + pad[1], height)
    crop = rgb[top:bottom, left:right]
    scale = out_size / max(crop.shape[:2])
    size = (max(1, round(crop.shape[1] * scale)), max(1, round(crop.shape[0] * scale)))
    mapping = CropMapping(Region(left, top, right - left, bottom - top), size, (width, height))
    out = _resample(crop, size)
    if soft and margin > 0:
        # Pixel centres of the crop, in frame pixels, as margins outside of the region.
        away_x = _outside(left, right, size[0], core[0], core[2]) / pad[0]
        away_y = _outside(top, bottom, size[1], core[1], core[3]) / pad[1]
        d = np.minimum(np.hypot(away_x[None, :], away_y[:, None]), 1.0).astype(np.float32)
        blurred = (d * d * (3 - 2 * d))[..., None]
        far = _blur(out, BLUR * max(size))
        out = np.rint(out * (1 - blurred) + far * blurred).astype(np.uint8)
    return np.ascontiguousarray(out), mapping


def _span(low: float, high: float, limit: int) -> tuple[int, int]:
    """Whole pixels around a stretch, at least one, within 0..limit."""
    # A coordinate with three decimals may miss a pixel's edge by rounding; that is no reason for one more.
    first = min(max(math.floor(low + 1e-6), 0), limit - 1)
    return first, max(min(math.ceil(high - 1e-6), limit), first + 1)


def _outside(first: int, last: int, n: int, low: float, high: float) -> NDArray[np.float64]:
    at = first + (np.arange(n) + 0.5) * (last - first) / n
    return np.asarray(np.maximum(np.maximum(low - at, at - high), 0.0))


def _resample(rgb: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    shrinks = size[0] <= rgb.shape[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
    return cast("NDArray[np.uint8]", cv2.resize(np.ascontiguousarray(rgb), size, interpolation=method))


def _blur(rgb: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    return cast("NDArray[np.uint8]", cv2.GaussianBlur(rgb, (0, 0), max(sigma, 0.5), borderType=cv2.BORDER_REPLICATE))
