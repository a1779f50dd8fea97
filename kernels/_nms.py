"""Checks arguments, then calls the native kernel."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native

_METRICS = ("iou", "ios")


def nms(
    boxes: ArrayLike,
    scores: ArrayLike,
    classes: ArrayLike | None,
    iou_threshold: float,
    max_keep: int | None = None,
    metric: Literal["iou", "ios"] = "iou",
) -> NDArray[np.int64]:
    """Greedy non-maximum suppression, class by class.

    A box is dropped if a kept box of its class overlaps it by more than `iou_threshold`.
    Boxes with a NaN or infinite coordinate and boxes with a NaN score are never kept. Boxes
    without area (also upside-down ones) neither suppress nor are suppressed. Other threads run
    meanwhile.

    Args:
        boxes: N x 4, x1 y1 x2 y2 in any one coordinate frame, used as float32.
        scores: N, used as float32.
        classes: N integer labels; None treats all boxes as one class.
        iou_threshold: overlap from which on (exclusive) a box is dropped, 0 to 1.
        max_keep: at most so many indices, the best ones; None for all.
        metric: "iou" for intersection over union, "ios" for intersection over the smaller area,
            which merges parts of one object seen in neighbouring slices.

    Returns:
        int64 indices of the kept boxes, by falling score, equal scores by rising index.

    Raises:
        ValueError: shapes that do not fit, a threshold outside 0..1, a negative `max_keep`,
            an unknown metric.
        TypeError: labels that are not integers.

    Example:
        >>> nms([[0, 0, 9, 9], [0, 0, 9, 8], [20, 0, 29, 9]], [0.5, 0.9, 0.7], None, 0.5).tolist()
        [1, 2]
    """
    box_array = np.ascontiguousarray(boxes, dtype=np.float32)
    score_array = np.asarray(scores, dtype=np.float32)
    if box_array.ndim != 2 or box_array.shape[1] != 4:
        raise ValueError(f"nms: boxes have shape {box_array.shape}, needed N x 4")
    count = len(box_array)
    if score_array.shape != (count,):
        raise ValueError(f"nms: scores have shape {score_array.shape}, needed ({count},) as boxes")
    class_array: NDArray[np.int64] | None = None
    if classes is not None:
        given = np.asarray(classes)
        if given.shape != (count,):
            raise ValueError(f"nms: classes have shape {given.shape}, needed ({count},) as boxes")
        if count and not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"nms: classes are {given.dtype}, needed integers")
        class_array = np.ascontiguousarray(given, dtype=np.int64)
    if not 0.0 <= iou_threshold <= 1.0:
        raise ValueError(f"nms: iou_threshold is {iou_threshold}, needed 0 to 1")
    if max_keep is not None and max_keep < 0:
        raise ValueError(f"nms: max_keep is {max_keep}, needed 0 or more")
    if metric not in _METRICS:
        raise ValueError(f"nms: metric is {metric!r}, needed one of {', '.join(_METRICS)}")
    return _native.nms(
        box_array,
        np.ascontiguousarray(score_array),
        class_array,
        float(iou_threshold),
        count if max_keep is None else min(max_keep, count),
        metric == "ios",
    )
