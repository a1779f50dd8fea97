"""Boxes with an explicit coordinate frame: the one container for every box in hoverlens.

A box is meaningless without the image that it was measured on, so each :class:`Boxes` carries its
space (pixels, 0..1, or the 0..1000 grid that Qwen3-VL writes), the size of that image and, for a
crop, tile or letterboxed network input, which part of the original frame that image shows.
Conversions are methods, and boxes of different images never meet: that raises instead of rescaling
in silence.

Coordinates are continuous: pixel ``i`` covers ``[i, i + 1)``, so a box around the whole image is
``(0, 0, width, height)``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Size = tuple[int, int]
"""Width and height, in pixels."""


class Space(str, Enum):
    """What a coordinate counts: pixels, the fraction of the image side, or thousandths of it."""

    PIXEL = "pixel"
    NORM = "norm"
    GRID1000 = "grid1000"


@dataclass(frozen=True)
class Region:
    """A rectangle of the original frame, in its pixels; it may reach past the frame's edges.

    Raises:
        ValueError: A value is not finite, or a side is not positive.
    """

    x: float
    y: float
    width: float
    height: float

    def __post_init__(self) -> None:
        for name in ("x", "y", "width", "height"):
            value = float(getattr(self, name))
            if not math.isfinite(value):
                raise ValueError(f"region {name} is {value}; a finite number is needed")
            object.__setattr__(self, name, value)
        if self.width <= 0 or self.height <= 0:
            raise ValueError(f"region is {self.width} x {self.height}; both sides must be positive")

    @property
    def xyxy(self) -> tuple[float, float, float, float]:
        """Corners ``(x1, y1, x2, y2)`` in pixels of the original frame."""
        return self.x, self.y, self.x + self.width, self.y + self.height


@dataclass(frozen=True, eq=False)
class Boxes:
    """N axis-aligned boxes on one image.

    Example:
        >>> answer = Boxes([[250, 500, 500, 1000]], Space.GRID1000, size=(1920, 1080))
        >>> answer.to(Space.PIXEL).xyxy.tolist()
        [[480.0, 540.0, 960.0, 1080.0]]

    Attributes:
        xyxy: float32, N x 4, rows ``x1 y1 x2 y2`` with ``x1 <= x2`` and ``y1 <= y2``; read-only.
            Boxes may reach past the image until :meth:`clip`.
        space: What the coordinates count.
        size: ``(width, height)`` in pixels of the image that the boxes live on.
        region: None on the original frame; else the part of it that this image shows. ``size`` is
            then the image's own size, which may be resampled.
        origin_size: ``(width, height)`` of the original frame; set exactly when ``region`` is.
        scores: float32, N, or None.
        classes: int64, N, zero or more, or None.
        names: Class index to name, or None.

    Raises:
        ValueError: Wrong shapes, a value that is not finite, an upside-down box, a size that is not
            a pair of positive integers, a negative class.
    """

    xyxy: NDArray[np.float32]
    space: Space
    size: Size
    region: Region | None = None
    origin_size: Size | None = None
    scores: NDArray[np.float32] | None = None
    classes: NDArray[np.int64] | None = None
    names: tuple[str, ...] | None = None

    def __init__(
        self,
        xyxy: ArrayLike,
        space: Space | str,
        size: Sequence[int],
        region: Region | None = None,
        origin_size: Sequence[int] | None = None,
        scores: ArrayLike | None = None,
        classes: ArrayLike | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        put = object.__setattr__
        box = _box_array(xyxy)
        put(self, "xyxy", box)
        put(self, "space", Space(space))
        put(self, "size", _size(size, "size"))
        if (region is None) != (origin_size is None):
            raise ValueError("region and origin_size belong together: give both or neither")
        put(self, "region", region)
        put(self, "origin_size", None if origin_size is None else _size(origin_size, "origin_size"))
        put(self, "scores", None if scores is None else _score_array(scores, len(box)))
        put(self, "classes", None if classes is None else _class_array(classes, len(box)))
        if isinstance(names, str):
            raise ValueError("names is one string; a sequence of class names is needed")
        put(self, "names", None if names is None else tuple(str(n) for n in names))

    @classmethod
    def empty(
        cls,
        size: Sequence[int],
        space: Space | str = Space.PIXEL,
        region: Region | None = None,
        origin_size: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Boxes:
        """No boxes on an image of ``size``; scores and classes are there, with length 0."""
        none = np.empty((0, 4), np.float32)
        return cls(none, space, size, region, origin_size, none[:, 0], none[:, 0].astype(np.int64), names)

    @classmethod
    def concat(cls, parts: Sequence[Boxes]) -> Boxes:
        """Joins boxes of the SAME image, in order; spaces are converted to the first part's.

        Raises:
            ValueError: Nothing to join, parts of different images, class names that differ, or
                scores or classes that only some parts have.
        """
        if not parts:
            raise ValueError("nothing to join; use Boxes.empty(size)")
        first = parts[0]
        for part in parts[1:]:
            first._check_same_image(part, "join")
        known = {p.names for p in parts if p.names is not None}
        if len(known) > 1:
            raise ValueError("cannot join boxes with different class names; map the classes first")
        filled = [p.to(first.space) for p in parts if len(p)] or [first]
        columns: dict[str, Any] = {}
        for column in ("scores", "classes"):
            values = [getattr(p, column) for p in filled]
            missing = sum(v is None for v in values)
            if missing and missing < len(values):
                raise ValueError(f"cannot join: {missing} of {len(values)} parts have no {column}")
            columns[column] = None if missing else np.concatenate(values)
        return replace(
            first,
            xyxy=np.concatenate([p.xyxy for p in filled]),
            names=known.pop() if known else None,
            **columns,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Boxes:
        """The inverse of :meth:`to_dict`."""
        region = data.get("region")
        return cls(
            data["xyxy"],
            data["space"],
            data["size"],
            None if region is None else Region(*region),
            data.get("origin_size"),
            data.get("scores"),
            data.get("classes"),
            data.get("names"),
        )

    @staticmethod
    def usable_rows(xyxy: ArrayLike) -> NDArray[np.bool_]:
        """Which rows of a raw N x 4 output can become boxes: finite in float32, not upside down.

        For decoders: a bad export or random weights must lose such rows, not crash.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            a = np.asarray(xyxy).astype(np.float32).reshape(-1, 4)
        ordered: NDArray[np.bool_] = (a[:, 0] <= a[:, 2]) & (a[:, 1] <= a[:, 3])
        return ordered & np.isfinite(a).all(axis=1)

    def to(self, space: Space | str) -> Boxes:
        """The same boxes on the same image, counted in another space."""
        space = Space(space)
        if space is self.space:
            return self
        factor = _units(space, self.size) / _units(self.space, self.size)
        return replace(self, xyxy=_f32(self.xyxy.astype(np.float64) * factor), space=space)

    def to_original(self) -> Boxes:
        """The same boxes on the original frame, in the same kind of space (not clipped)."""
        if self.region is None or self.origin_size is None:
            return self
        r = self.region
        norm = self.xyxy.astype(np.float64) / _units(self.space, self.size)
        pixels = norm * (r.width, r.height, r.width, r.height) + (r.x, r.y, r.x, r.y)
        scale = _units(self.space, self.origin_size) / _units(Space.PIXEL, self.origin_size)
        return replace(self, xyxy=_f32(pixels * scale), size=self.origin_size, region=None, origin_size=None)

    def in_region(self, region: Region, size: Sequence[int]) -> Boxes:
        """The same boxes on an image of ``size`` that shows ``region`` of the original frame.

        Not clipped.

        Args:
            region: In pixels of the original frame, also when these boxes live on a crop already.
            size: ``(width, height)`` of the new image, in its own pixels.
        """
        if self.region is not None:
            return self.to_original().in_region(region, size)
        size = _size(size, "size")
        pixels = self.xyxy.astype(np.float64) * (_units(Space.PIXEL, self.size) / _units(self.space, self.size))
        norm = (pixels - (region.x, region.y, region.x, region.y)) / (
            region.width,
            region.height,
            region.width,
            region.height,
        )
        return replace(
            self,
            xyxy=_f32(norm * _units(self.space, size)),
            size=size,
            region=region,
            origin_size=self.size,
        )

    def clip(self) -> Boxes:
        """The same boxes cut at the edges of their image; a box outside it keeps no area."""
        return replace(self, xyxy=_f32(np.clip(self.xyxy, 0, _units(self.space, self.size))))

    def same_image(self, other: Boxes) -> bool:
        """Whether both live on the same image, as far as size and region tell."""
        return (self.size, self.region, self.origin_size) == (
            other.size,
            other.region,
            other.origin_size,
        )

    def area(self) -> NDArray[np.float64]:
        """Areas, N, in square units of the space."""
        b = self.xyxy.astype(np.float64)
        return np.asarray((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]))

    def iou(self, other: Boxes) -> NDArray[np.float64]:
        """Intersection over union, N x M, 0 for boxes without area.

        Raises:
            ValueError: The boxes live on different images.
        """
        inter, a, b = self._overlap(other)
        return _ratio(inter, a[:, None] + b[None, :] - inter)

    def ios(self, other: Boxes) -> NDArray[np.float64]:
        """Intersection over the smaller box, N x M: 1 where one box holds the other.

        Raises:
            ValueError: The boxes live on different images.
        """
        inter, a, b = self._overlap(other)
        return _ratio(inter, np.minimum(a[:, None], b[None, :]))

    def _overlap(self, other: Boxes) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        self._check_same_image(other, "compare")
        one, two = self.to(Space.PIXEL), other.to(Space.PIXEL)
        a, b = one.xyxy.astype(np.float64)[:, None], two.xyxy.astype(np.float64)[None]
        low = np.maximum(a[..., :2], b[..., :2])
        high = np.minimum(a[..., 2:], b[..., 2:])
        return np.prod(np.clip(high - low, 0, None), axis=-1), one.area(), two.area()

    def _check_same_image(self, other: Boxes, verb: str) -> None:
        if not self.same_image(other):
            raise ValueError(
                f"cannot {verb} boxes on {self._where()} with boxes on {other._where()}; "
                "bring both to one image with to_original() or in_region()"
            )

    def _where(self) -> str:
        image = f"a {self.size[0]}x{self.size[1]} image"
        return image if self.region is None else f"{image} of {self.region} of {self.origin_size}"

    def select(self, which: ArrayLike | slice) -> Boxes:
        """Some rows: a boolean mask of length N, integer indices (their order is kept), or a slice.

        Raises:
            ValueError: A mask of another length, or an index that is neither boolean nor integer.
            IndexError: An index out of range.
        """
        index: Any = which
        if not isinstance(which, slice):
            index = np.atleast_1d(np.asarray(which))
            if index.size == 0 and index.dtype != np.bool_:
                index = index.astype(np.int64)
            if index.ndim != 1 or index.dtype.kind not in "biu":
                raise ValueError(f"cannot select by {index.dtype} of shape {index.shape}")
            if index.dtype == np.bool_ and len(index) != len(self):
                raise ValueError(f"the mask has {len(index)} entries for {len(self)} boxes")
        return replace(
            self,
            xyxy=self.xyxy[index],
            scores=None if self.scores is None else self.scores[index],
            classes=None if self.classes is None else self.classes[index],
        )

    def label(self, i: int) -> str:
        """The class name of box ``i``: ``class_<k>`` without a name, ``object`` without a class."""
        operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"no box {i}: there are {len(self)}")
        if self.classes is None:
            return "object"
        k = int(self.classes[i])
        return self.names[k] if self.names is not None and k < len(self.names) else f"class_{k}"

    def __len__(self) -> int:
        return len(self.xyxy)

    def __iter__(self) -> Iterator[Boxes]:
        """Each box as a :class:`Boxes` of length 1."""
        return (self.select(slice(i, i + 1)) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Boxes) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, all fields; :meth:`from_dict` gives the same boxes back."""
        r = self.region
        return {
            "space": self.space.value,
            "size": list(self.size),
            "xyxy": self.xyxy.tolist(),
            "scores": None if self.scores is None else self.scores.tolist(),
            "classes": None if self.classes is None else self.classes.tolist(),
            "names": None if self.names is None else list(self.names),
            "region": None if r is None else [r.x, r.y, r.width, r.height],
            "origin_size": None if self.origin_size is None else list(self.origin_size),
        }


def format_box(xyxy_norm: ArrayLike) -> str:
    """A normalised box as text, the form that answers use.

    Example:
        >>> format_box([0.1234, 0.456, 0.789, 1.0])
        '<0.123><0.456><0.789><1.000>'

    Args:
        xyxy_norm: Four numbers 0..1, fractions of the width and height of the original frame.

    Raises:
        ValueError: Not four finite numbers in 0..1, or upside down.
    """
    box = np.asarray(xyxy_norm, np.float64)
    if box.shape != (4,) or not np.isfinite(box).all():
        raise ValueError(f"a box is four finite numbers, found {box.tolist()}")
    # float32 conversions land a hair outside 0..1; anything more is another coordinate space.
    if box.min() < -1e-4 or box.max() > 1 + 1e-4:
        raise ValueError(f"a normalised box lies in 0..1, found {box.tolist()}")
    if box[0] > box[2] or box[1] > box[3]:
        raise ValueError(f"the box is upside down: {box.tolist()}")
    return "".join(f"<{v:.3f}>" for v in np.clip(box, 0.0, 1.0))


def _units(space: Space, size: Size) -> NDArray[np.float64]:
    """How much of ``space`` spans the whole image, as ``(x, y, x, y)``."""
    w, h = {Space.PIXEL: size, Space.NORM: (1, 1), Space.GRID1000: (1000, 1000)}[space]
    return np.array([w, h, w, h], np.float64)


def _size(value: Sequence[int], what: str) -> Size:
    try:
        w, h = (operator.index(v) for v in value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {value!r}; (width, height) in whole pixels is needed") from None
    if w <= 0 or h <= 0:
        raise ValueError(f"{what} is {w} x {h}; both sides must be positive")
    return w, h


def _box_array(xyxy: ArrayLike) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        box = np.array(xyxy, np.float32, order="C")
    if box.shape == (0,):
        box = box.reshape(0, 4)
    if box.ndim != 2 or box.shape[1] != 4:
        raise ValueError(f"boxes have shape {box.shape}; N x 4 is needed")
    if not np.isfinite(box).all():
        raise ValueError("a box has a coordinate that is not finite")
    upside_down = (box[:, 0] > box[:, 2]) | (box[:, 1] > box[:, 3])
    if upside_down.any():
        i = int(np.flatnonzero(upside_down)[0])
        raise ValueError(f"box {i} is upside down: {box[i].tolist()}; x1 <= x2 and y1 <= y2 is needed")
    box.flags.writeable = False
    return box


def _score_array(scores: ArrayLike, n: int) -> NDArray[np.float32]:
    s = np.array(scores, np.float32)
    if s.shape != (n,):
        raise ValueError(f"scores have shape {s.shape} for {n} boxes; ({n},) is needed")
    if not np.isfinite(s).all():
        raise ValueError("a score is not finite")
    s.flags.writeable = False
    return s


def _class_array(classes: ArrayLike, n: int) -> NDArray[np.int64]:
    raw = np.asarray(classes)
    if raw.shape != (n,):
        raise ValueError(f"classes have shape {raw.shape} for {n} boxes; ({n},) is needed")
    if n and raw.dtype.kind not in "iu":
        raise ValueError(f"classes are {raw.dtype}; integers are needed")
    c = raw.astype(np.int64)
    if n and c.min() < 0:
        raise ValueError(f"class {int(c.min())} is negative")
    c.flags.writeable = False
    return c


def _f32(values: NDArray[Any]) -> NDArray[np.float32]:
    # Overflow becomes infinite, which the constructor reports.
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
