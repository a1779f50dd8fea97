"""How good detections are: average precision, recall, precision.

Matching is COCO's: class by class, detections by falling score, each takes the best free true box
with at least the wanted IoU. AP is interpolated at COCO's 101 recall points. Regions to ignore make
a detection neither right nor wrong: one that matches an ignored box, or lies in it for half of its
own area or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SMALL_AREA = 32.0**2  # COCO's bound of a small object, square pixels of the original frame
RECALL_POINTS = np.linspace(0.0, 1.0, 101)
IGNORE_SHARE = 0.5


@dataclass(frozen=True)
class Truth:
    """True boxes of one picture.

    Attributes:
        xyxy: float, N x 4, pixels of the picture.
        classes: int, N.
        ignore: bool, N: boxes that count neither as found nor as missed. For detections of any
            class if their own class is negative.
    """

    xyxy: NDArray[np.float64]
    classes: NDArray[np.int64]
    ignore: NDArray[np.bool_]


@dataclass(frozen=True)
class Found:
    """Detections of one picture: xyxy N x 4 in pixels of the picture, scores N, classes N."""

    xyxy: NDArray[np.float64]
    scores: NDArray[np.float64]
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class DetectionScores:
    """Results over a set of pictures; None where nothing could be counted.

    Attributes:
        ap: Mean over the classes that have true boxes, at the IoU asked for.
        ap_small: The same for true boxes under :data:`SMALL_AREA`.
        recall: Share of all true boxes found at the confidence asked for, classes pooled.
        precision: Share of right ones among all detections at that confidence that count.
        ap_by_class: AP of each class that has true boxes.
        truths: Number of true boxes that count.
        detections: Number of detections at the confidence that count.
    """

    ap: float | None
    ap_small: float | None
    recall: float | None
    precision: float | None
    ap_by_class: dict[int, float] = field(default_factory=dict)
    truths: int = 0
    detections: int = 0


def average_precision(hits: NDArray[np.bool_], truths: int) -> float:
    """AP of one class.

    Args:
        hits: For each detection by falling score, whether it is right.
        truths: Number of true boxes, 1 or more.

    Returns:
        The mean over 101 recall points 0, 0.01 .. 1 of the best precision at that recall or more.

    Example:
        >>> average_precision(np.array([True, False, True]), 2)
        0.834983498349835
    """
    right = np.cumsum(hits)
    recall = right / truths
    precision = right / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    # A hair of slack: 0.3 as a sum of thirds must reach the recall point 0.3.
    at = np.searchsorted(recall, RECALL_POINTS - 1e-9, side="left")
    return float(np.mean(np.where(at < len(hits), np.append(envelope, 0.0)[at], 0.0)))


def match(
    found: NDArray[np.float64],
    truth: NDArray[np.float64],
    ignore: NDArray[np.bool_],
    regions: NDArray[np.float64],
    iou: float,
) -> NDArray[np.int8]:
    """Matches detections of one class in one picture, which must be by falling score.

    Args:
        found: N x 4.
        truth: M x 4.
        ignore: M.
        regions: K x 4, ignored for this class whatever they hold.
        iou: Least overlap.

    Returns:
        For each detection 1 right, 0 wrong, -1 does not count.
    """
    out = np.zeros(len(found), np.int8)
    overlap = box_iou(found, truth)
    free = ~ignore
    for i in range(len(found)):
        best = np.where(free, overlap[i], -1.0)
        if best.size and best.max() >= iou:
            free[best.argmax()] = False
            out[i] = 1
        elif (overlap[i][ignore] >= iou).any():
            out[i] = -1
    masks = np.concatenate([truth[ignore], regions]) if len(regions) else truth[ignore]
    if len(masks):
        inside = (_intersection(found, masks) / np.maximum(_area(found), 1e-9)[:, None]).max(1)
        out[(out == 0) & (inside >= IGNORE_SHARE)] = -1
    return out


def evaluate(
    found: Sequence[Found],
    truth: Sequence[Truth],
    iou: float = 0.5,
    conf: float = 0.25,
    small_area: float = SMALL_AREA,
) -> DetectionScores:
    """Scores detections of a set of pictures.

    Args:
        found: One entry a picture; all detections above a low score, for AP.
        truth: One entry a picture, in the same order.
        iou: Least overlap of a right detection.
        conf: Confidence at which recall and precision are taken.
        small_area: Bound of a small object, square pixels.
    """
    if len(found) != len(truth):
        raise ValueError(f"detections of {len(found)} pictures, truth of {len(truth)}")
    classes = sorted({int(c) for t in truth for c in t.classes[~t.ignore]})
    seen = sorted({int(c) for f in found for c in f.classes} | set(classes))
    ap: dict[int, float] = {}
    ap_small: dict[int, float] = {}
    right = counted = total = 0
    for c in seen:
        marks, scores = _marks(found, truth, c, iou, None)
        n = sum(int(((t.classes == c) & ~t.ignore).sum()) for t in truth)
        sure = scores >= conf
        right += int((marks[sure] == 1).sum())
        counted += int((marks[sure] >= 0).sum())
        total += n
        if n:
            ap[c] = average_precision(marks[marks >= 0] == 1, n)
        small, _ = _marks(found, truth, c, iou, small_area)
        n_small = sum(int(((t.classes == c) & ~t.ignore & (_area(t.xyxy) < small_area)).sum()) for t in truth)
        if n_small:
            ap_small[c] = average_precision(small[small >= 0] == 1, n_small)
    return DetectionScores(
        ap=float(np.mean(list(ap.values()))) if ap else None,
        ap_small=float(np.mean(list(ap_small.values()))) if ap_small else None,
        recall=right / total if total else None,
        precision=right / counted if counted else None,
        ap_by_class=ap,
        truths=total,
        detections=counted,
    )


def _marks(
    found: Sequence[Found], truth: Sequence[Truth], c: int, iou: float, small: float | None
) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Matches of one class over all pictures by falling score, and those scores."""
    marks, scores = [np.zeros(0, np.int8)], [np.zeros(0)]
    for f, t in zip(found, truth, strict=True):
        mine = np.flatnonzero(f.classes == c)
        mine = mine[np.argsort(-f.scores[mine], kind="stable")]
        of_class = t.classes == c
        boxes, ignore = t.xyxy[of_class], t.ignore[of_class].copy()
        regions = t.xyxy[t.ignore & (t.classes < 0)]
        if small is not None:
            large = _area(boxes) >= small
            m = _match_sized(f.xyxy[mine], boxes, ignore, regions, iou, large, small)
        else:
            m = match(f.xyxy[mine], boxes, ignore, regions, iou)
        marks.append(m)
        scores.append(f.scores[mine])
    joined, values = np.concatenate(marks), np.concatenate(scores)
    order = np.argsort(-values, kind="stable")
    return joined[order], values[order]


def _match_sized(
    found: NDArray[np.float64],
    boxes: NDArray[np.float64],
    ignore: NDArray[np.bool_],
    regions: NDArray[np.float64],
    iou: float,
    large: NDArray[np.bool_],
    small: float,
) -> NDArray[np.int8]:
    """Counts small true boxes only: what matches a large one, or is large itself, drops out."""
    marks = match(found, boxes, ignore, regions, iou)
    # Match again with large boxes ignored: a detection must not lose its small box to a large one.
    small_marks = match(found, boxes[~large], ignore[~large], regions, iou)
    on_large = (marks == 1) & (small_marks == 0)
    out: NDArray[np.int8] = small_marks.copy()
    out[on_large] = -1
    out[(out == 0) & (_area(found) >= small)] = -1
    return out


def box_iou(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union, N x M; 0 for boxes without area."""
    inter = _intersection(a, b)
    union = _area(a)[:, None] + _area(b)[None] - inter
    return np.asarray(np.divide(inter, union, out=np.zeros_like(inter), where=union > 0))


def _intersection(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    return np.asarray(np.clip(high - low, 0, None).prod(-1), np.float64)


def _area(b: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.clip(b[:, 2:] - b[:, :2], 0, None).prod(-1), np.float64)
