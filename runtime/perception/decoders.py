"""What a detector's output tensors mean: one of a few families, told apart by their shapes.

Let G be the number of grid cells of the network input at strides 8, 16 and 32 (or 8 to 64), 8400 for 640x640.

========== ======================================= ============================================================
family     outputs                                 meaning of a row
========== ======================================= ============================================================
yolox      1 x G x (5+nc)                          x y w h objectness class-scores; raw grid or decoded
yolov5     1 x 3G x (5+nc)                         the same, decoded, three anchors a cell
yolov8     1 x (4+nc) x G, or 1 x G x (4+nc)       centre x y, w h in input pixels, class scores (v5u, v8, v9, 11)
end2end    1 x N x 6, N not a grid count;          x1 y1 x2 y2 score class, no suppression needed; or three
           or ``labels``, ``boxes``, ``scores``    outputs of a graph that takes ``orig_target_sizes``
detr       1 x Q x nc and 1 x Q x 4;               logits and centre x y w h in 0..1 (RT-DETR, D-FINE, DETR,
           or 1 x Q x (4+nc)                       YOLOS); fused: scores after a sigmoid
fastestdet 1 x (5+nc) x H x W                      objectness, box, class scores of each cell
========== ======================================= ============================================================

Shapes leave three things open, and these are the rules:

* 1 x G x K is yolox with nc = K-5 or a transposed yolov8 with nc = K-4. The number of class names decides if
  it fits one of them; else K = 84 is yolov8 (COCO has 80 classes); else it is yolox, whose layout this is.
* yolox boxes are raw offsets, decoded pixels or decoded fractions. Anchors come in grid order, so under the
  right reading each centre lies near its own cell. The reading with the smallest median distance wins, found
  on one blank picture when the model is opened: it differs by a factor of about half the grid's width, 10 or
  more, between right and wrong.
* detr logits have one more class than there are names if trained with a softmax over a no-object class. Without
  names 81 and 92 columns are taken as softmax, all others as sigmoid.

Each can be overridden (:class:`Family`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput

Coordinates = Literal["grid", "pixel", "unit"]
Activation = Literal["sigmoid", "softmax", "none"]

FAMILIES = ("yolox", "yolov5", "yolov8", "end2end", "detr", "fastestdet")
STRIDES = ((8, 16, 32), (8, 16, 32, 64))
# Under this a coordinate is a fraction of the input: an exporter writes 0..1, and boxes reach a little past.
UNIT_LIMIT = 2.0


@dataclass(frozen=True)
class Raw:
    """Candidates of one picture, before any suppression.

    Attributes:
        xyxy: float32, N x 4, pixels of the network input.
        scores: float32, N, 0..1.
        classes: int64, N.
    """

    xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class Family:
    """How to read a model's outputs.

    Attributes:
        name: One of :data:`FAMILIES`.
        classes: Number of classes nc.
        outputs: Names of the outputs to read, in the order the family needs: one tensor; or logits, boxes; or
            labels, boxes, scores.
        coordinates: ``"grid"`` raw offsets (yolox), ``"pixel"`` input pixels, ``"unit"`` 0..1 of the input;
            None where it is decided from the values of each run.
        activation: What detr logits still need.
        transposed: yolov8: rows are anchors (1 x G x K) instead of columns.
        strides: Strides of the grid, where there is one.
        extra: Columns after the classes that are not read (mask coefficients, key points).
        angle: yolov8: the column after the classes is a rotation in radians; the box around the rotated one is
            returned.
    """

    name: str
    classes: int
    outputs: tuple[str, ...]
    coordinates: Coordinates | None = None
    activation: Activation = "none"
    transposed: bool = False
    strides: tuple[int, ...] = STRIDES[0]
    extra: int = 0
    angle: bool = False

    @property
    def needs_nms(self) -> bool:
        return self.name not in ("end2end", "detr")

    def decode(self, outputs: Mapping[str, NDArray[Any]], size: tuple[int, int], low: float = 0.0) -> list[Raw]:
        """Reads the outputs of one run.

        Args:
            outputs: What the engine returned, batch first.
            size: Network input (width, height).
            low: Rows that score below are left out.

        Returns:
            One entry a picture of the batch. Rows with a value that is not finite are dropped.
        """
        tensors = [outputs[name] for name in self.outputs]
        batch = tensors[0].shape[0]
        return [self._decode_one([t[i] for t in tensors], size, low) for i in range(batch)]

    def _decode_one(self, tensors: list[NDArray[Any]], size: tuple[int, int], low: float) -> Raw:
        reader = {
            "yolox": self._objectness,
            "yolov5": self._objectness,
            "yolov8": self._yolov8,
            "end2end": self._end2end,
            "detr": self._detr,
            "fastestdet": self._fastestdet,
        }[self.name]
        # Random weights and bad exports overflow here; such rows are dropped below.
        with np.errstate(all="ignore"):
            xyxy, scores, classes = reader([t.astype(np.float32, copy=False) for t in tensors], size, low)
        good = np.isfinite(xyxy).all(1) & np.isfinite(scores) & (scores >= low) & (classes >= 0)
        good &= (xyxy[:, 2] > xyxy[:, 0]) & (xyxy[:, 3] > xyxy[:, 1])
        return Raw(
            np.ascontiguousarray(xyxy[good], np.float32),
            np.clip(scores[good], 0.0, 1.0).astype(np.float32),
            classes[good].astype(np.int64),
        )

    def _objectness(self, t: list[NDArray[Any]], size: tuple[int, int], low: float) -> _Rows:
        rows = t[0]
        best = rows[:, 5 : 5 + self.classes].argmax(1)
        scores = rows[:, 4] * np.take_along_axis(rows[:, 5:], best[:, None], 1)[:, 0]
        boxes = rows[:, :4]
        keep = scores >= low
        if self.coordinates == "grid":
            cells, strides = grid(size, self.strides)
            boxes = np.concatenate(
                [(boxes[:, :2] + cells) * strides[:, None], np.exp(boxes[:, 2:4]) * strides[:, None]], 1
            )
        elif self._is_unit(boxes):
            boxes = boxes * _scale(size)
        return _corners(boxes[keep]), scores[keep], best[keep]

    def _yolov8(self, t: list[NDArray[Any]], size: tuple[int, int], low: float) -> _Rows:
        columns = t[0].T if self.transposed else t[0]
        classes = columns[4 : 4 + self.classes]
        scores = classes.max(0)
        keep = np.flatnonzero(scores >= low)
        boxes = columns[:4]
        unit = self._is_unit(boxes)
        boxes = np.ascontiguousarray(boxes[:, keep].T)
        if unit:
            boxes = boxes * _scale(size)
        if self.angle:
            angle = columns[4 + self.classes, keep]
            c, s = np.abs(np.cos(angle)), np.abs(np.sin(angle))
            w, h = boxes[:, 2].copy(), boxes[:, 3].copy()
            boxes[:, 2], boxes[:, 3] = w * c + h * s, w * s + h * c
        return _corners(boxes), scores[keep], classes[:, keep].argmax(0)

    def _end2end(self, t: list[NDArray[Any]], size: tuple[int, int], low: float) -> _Rows:
        if len(t) == 3:
            labels, boxes, scores = (t[0].reshape(-1), t[1].reshape(-1, 4), t[2].reshape(-1))
        else:
            boxes, scores, labels = t[0][:, :4], t[0][:, 4], t[0][:, 5]
        labels = np.where(np.isfinite(labels), labels, -1).round().astype(np.int64)
        # Empty places of the fixed-length list are zeros or -1: they must not decide the unit.
        filled = scores > 0
        if self._is_unit(boxes[filled]):
            boxes = boxes * _scale(size)
        return boxes, scores, labels

    def _detr(self, t: list[NDArray[Any]], size: tuple[int, int], low: float) -> _Rows:
        if len(t) == 1:
            boxes, logits = t[0][:, :4], t[0][:, 4:]
        else:
            logits, boxes = t
        if self.activation == "softmax":
            e = np.exp(logits - logits.max(1, keepdims=True))
            probabilities = (e / e.sum(1, keepdims=True))[:, : self.classes]
        elif self.activation == "sigmoid":
            probabilities = sigmoid(logits[:, : self.classes])
        else:
            probabilities = logits[:, : self.classes]
        best = probabilities.argmax(1)
        scores = np.take_along_axis(probabilities, best[:, None], 1)[:, 0]
        if self.coordinates != "pixel":
            boxes = boxes * _scale(size)
        return _corners(boxes), scores, best

    def _fastestdet(self, t: list[NDArray[Any]], size: tuple[int, int], low: float) -> _Rows:
        cells = t[0]
        h, w = cells.shape[1:]
        best = cells[5 : 5 + self.classes].argmax(0)
        top = cells[5 : 5 + self.classes].max(0)
        # The geometric weighting that the model was trained and evaluated with.
        scores = np.clip(cells[0], 0, 1) ** 0.6 * np.clip(top, 0, 1) ** 0.4
        ys, xs = np.mgrid[0:h, 0:w].astype(np.float32)
        cx, cy = (xs + np.tanh(cells[1])) / w, (ys + np.tanh(cells[2])) / h
        boxes = np.stack([cx, cy, sigmoid(cells[3]), sigmoid(cells[4])], -1).reshape(-1, 4) * _scale(size)
        return _corners(boxes), scores.reshape(-1), best.reshape(-1)

    def _is_unit(self, boxes: NDArray[Any]) -> bool:
        if self.coordinates is not None:
            return self.coordinates == "unit"
        finite = boxes[np.isfinite(boxes)]
        return bool(finite.size) and float(finite.max()) <= UNIT_LIMIT


_Rows = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def _scale(size: tuple[int, int]) -> NDArray[np.float32]:
    return np.array([size[0], size[1]] * 2, np.float32)


def _corners(cxcywh: NDArray[Any]) -> NDArray[Any]:
    half = cxcywh[:, 2:4] / 2
    return np.concatenate([cxcywh[:, :2] - half, cxcywh[:, :2] + half], 1)


def grid(size: tuple[int, int], strides: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cells of every level, row by row.

    Returns:
        G x 2 cell indices (x, y), and G strides in input pixels.
    """
    cells, steps = [], []
    for stride in strides:
        w, h = math.ceil(size[0] / stride), math.ceil(size[1] / stride)
        ys, xs = np.divmod(np.arange(w * h), w)
        cells.append(np.stack([xs, ys], 1))
        steps.append(np.full(w * h, stride))
    return np.concatenate(cells).astype(np.float32), np.concatenate(steps).astype(np.float32)


def grid_count(size: tuple[int, int], strides: Sequence[int]) -> int:
    """The number G of cells of a network input (width, height)."""
    return sum(math.ceil(size[0] / s) * math.ceil(size[1] / s) for s in strides)


def grid_reading(xywh: NDArray[np.float32], size: tuple[int, int], strides: Sequence[int]) -> Coordinates:
    """Whether boxes in grid order are raw offsets, decoded pixels or decoded fractions.

    Under the right reading a box's centre lies near its own cell.

    Args:
        xywh: G x 4 or more columns, in grid order.
        size: Network input (width, height).
        strides: Strides of the grid.
    """
    cells, steps = grid(size, strides)
    centre = (cells + 0.5) * steps[:, None]
    xy = xywh[:, :2].astype(np.float64)
    readings: dict[Coordinates, NDArray[np.float64]] = {
        "grid": (cells + xy) * steps[:, None],
        "pixel": xy,
        "unit": xy * np.asarray(size, np.float64),
    }
    with np.errstate(all="ignore"):
        distance = {k: np.abs(v - centre) / steps[:, None] for k, v in readings.items()}
        medians = {k: float(np.median(d[np.isfinite(d)])) for k, d in distance.items() if np.isfinite(d).any()}
    return min(medians, key=lambda k: medians[k]) if medians else "grid"


def detect_family(
    outputs: Mapping[str, NDArray[Any]],
    size: tuple[int, int],
    names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    family: str | None = None,
) -> Family:
    """Finds out how to read a model, from the outputs of one run on a blank picture.

    A run instead of the declared shapes, since those may be dynamic.

    Args:
        outputs: By name, batch first.
        size: Network input (width, height) of that run.
        names: Class names if known; their number settles ambiguous layouts.
        metadata: Of the model file; ultralytics' ``task`` is read.
        family: Take this one of :data:`FAMILIES`; its shapes must still fit.

    Raises:
        BadInput: The outputs fit no family (or not the wanted one): the model is no detector known here.
    """
    if family is not None and family not in FAMILIES:
        raise BadInput(f"unknown detector family {family!r}; needed one of {', '.join(FAMILIES)}")
    nc = len(names) if names else None
    task = (metadata or {}).get("task", "detect")
    if task == "detect" and any(v.ndim == 4 for v in outputs.values()):
        task = "segment"  # mask prototypes beside the rows
    found = None
    for reader in (_match_named, _match_detr, _match_rows, _match_cells):
        found = reader(outputs, size, nc, task, family)
        if found is not None:
            break
    if found is None or found.classes < 1:
        shapes = ", ".join(f"{k} {'x'.join(map(str, v.shape))}" for k, v in list(outputs.items())[:6]) or "none"
        wanted = f"family {family}" if family else f"one of {', '.join(FAMILIES)}"
        raise BadInput(
            f"no detector: outputs {shapes} for an input of {size[0]}x{size[1]} fit none of the layouts of {wanted}; "
            "export a detection model, or name its family"
        )
    if nc is not None and nc != found.classes and not (nc > found.classes and found.name == "end2end"):
        raise BadInput(f"the model has {found.classes} classes, {nc} names were given; use its own labels file")
    return found


def _find(outputs: Mapping[str, NDArray[Any]], *parts: str) -> str | None:
    for part in parts:
        for name in outputs:
            if part in name.lower():
                return name
    return None


def _match_named(
    outputs: Mapping[str, NDArray[Any]], size: tuple[int, int], nc: int | None, task: str, family: str | None
) -> Family | None:
    """``labels``, ``boxes``, ``scores``: RT-DETR's and D-FINE's deployed graphs."""
    labels, boxes, scores = _find(outputs, "labels"), _find(outputs, "boxes"), _find(outputs, "scores")
    if family not in (None, "end2end") or len(outputs) != 3 or not (labels and boxes and scores):
        return None
    shape = outputs[boxes].shape
    if len(shape) != 3 or shape[2] != 4 or outputs[labels].shape != shape[:2] or outputs[scores].shape != shape[:2]:
        return None
    # Such a graph does not say how many classes it has; 80 is what nearly all of them have.
    return Family("end2end", nc or 80, (labels, boxes, scores))


def _match_detr(
    outputs: Mapping[str, NDArray[Any]], size: tuple[int, int], nc: int | None, task: str, family: str | None
) -> Family | None:
    if family not in (None, "detr"):
        return None
    flat = {k: v for k, v in outputs.items() if v.ndim == 3}
    pair = _detr_pair(flat)
    if pair is not None:
        logits, boxes = pair
        columns = flat[logits].shape[2]
        softmax = columns == nc + 1 if nc is not None else columns in (81, 92)
        return Family(
            "detr",
            columns - 1 if softmax else columns,
            (logits, boxes),
            coordinates="unit",
            activation="softmax" if softmax else "sigmoid",
        )
    if len(flat) == 1:
        name, value = next(iter(flat.items()))
        queries, columns = value.shape[1:]
        counts = {grid_count(size, s) * k for s in STRIDES for k in (1, 3)}
        # Six columns are an end-to-end list, also where there are two names.
        plausible = columns != 6 and (columns - 4 == nc if nc is not None else columns == 84)
        if queries not in counts and columns not in counts and (plausible or family) and columns > 4:
            inside = value[..., 4:][np.isfinite(value[..., 4:])]
            scores = bool(inside.size) and inside.min() >= 0 and inside.max() <= 1
            return Family("detr", columns - 4, (name,), coordinates="unit", activation="none" if scores else "sigmoid")
    return None


def _detr_pair(flat: Mapping[str, NDArray[Any]]) -> tuple[str, str] | None:
    """Names of (logits, boxes), preferring the names that exporters use, then the shapes."""
    boxes = [k for k, v in flat.items() if v.shape[2] == 4]
    boxes.sort(key=lambda k: ("box" not in k.lower(), "aux" in k.lower() or "enc" in k.lower()))
    for box in boxes:
        others = [k for k, v in flat.items() if k != box and v.shape[:2] == flat[box].shape[:2]]
        named = [k for k in others if "logit" in k.lower() or "class" in k.lower() or "score" in k.lower()]
        if named:
            return named[0], box
        if len(others) == 1 and len(flat) == 2:
            return others[0], box
    return None


def _match_rows(
    outputs: Mapping[str, NDArray[Any]], size: tuple[int, int], nc: int | None, task: str, family: str | None
) -> Family | None:
    """One 1 x A x B tensor: yolox, yolov5, yolov8 or end2end."""
    flat = [(k, v) for k, v in outputs.items() if v.ndim == 3]
    if not flat or (len(flat) > 1 and family is None):
        return None
    name, value = flat[0]
    a, b = value.shape[1:]
    for strides in STRIDES:
        count = grid_count(size, strides)
        base = Family("", 0, (name,), strides=strides)
        if b == count and a > 4 and family in (None, "yolov8"):
            return _yolov8(base, value[0].T, a - 4, nc, task, transposed=False)
        if a == 3 * count and b > 5 and family in (None, "yolov5"):
            return replace(base, name="yolov5", classes=b - 5)
        if a == count and b > 4:
            as_v8 = b - 4 == nc if nc in (b - 4, b - 5) else b == 84
            if family == "yolov8" or (family is None and as_v8):
                return _yolov8(base, value[0], b - 4, nc, task, transposed=True)
            if b > 5 and family in (None, "yolox"):
                return replace(base, name="yolox", classes=b - 5, coordinates=grid_reading(value[0], size, strides))
    if b == 6 and family in (None, "end2end"):
        # The class column is data: without names the count is unknown, and COCO is the likeliest.
        return Family("end2end", nc or 80, (name,))
    return None


def _yolov8(base: Family, rows: NDArray[Any], columns: int, nc: int | None, task: str, transposed: bool) -> Family:
    classes, angle = columns, False
    if task == "obb":
        classes, angle = columns - 1, True
    elif nc is not None and nc < columns and task in ("segment", "pose"):
        classes = nc
    boxes = rows[:, :4]
    finite = boxes[np.isfinite(boxes)]
    # Every anchor reports, so the centres of a real grid reach across the whole input.
    unit = bool(finite.size) and float(finite.max()) <= UNIT_LIMIT
    return replace(
        base,
        name="yolov8",
        classes=classes,
        coordinates="unit" if unit else "pixel",
        transposed=transposed,
        extra=columns - classes,
        angle=angle,
    )


def _match_cells(
    outputs: Mapping[str, NDArray[Any]], size: tuple[int, int], nc: int | None, task: str, family: str | None
) -> Family | None:
    """One 1 x C x H x W tensor of grid cells."""
    if family not in (None, "fastestdet") or len(outputs) != 1:
        return None
    name, value = next(iter(outputs.items()))
    if value.ndim != 4:
        return None
    channels, h, w = value.shape[1:]
    stride = size[0] / w
    whole = stride == size[1] / h and stride in (8, 16, 32)
    # Any feature map has this rank: without names only COCO's count is taken as a detector.
    plausible = channels - 5 == nc if nc is not None else channels == 85
    if whole and channels > 5 and (plausible or family):
        return Family("fastestdet", channels - 5, (name,), coordinates="unit")
    return None
