"""Sliced inference: tiles over a large frame, and their boxes made one again.

A tile shows small objects at a size the network can see. Three things then go wrong, and are put right here:

* An object in the overlap of two tiles is found twice: suppression per class over all passes, by intersection
  over the smaller box, so that a part loses to the whole.
* An object cut by a tile's inner edge is found as a part. Where the part lies within the overlap, the
  neighbour sees all of it and more, so the part is dropped. A longer part is kept at a lower rank
  (:data:`CUT_PENALTY`), in case nothing else found the object.
* Objects larger than a tile are found by nobody: one more pass sees the full frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput

CUT_PENALTY = 0.3
EDGE_TOLERANCE = 2.0  # network pixels: how close to a tile's edge a box counts as cut there
MAX_TILES = 1024

Tile = tuple[int, int, int, int]
"""x, y, width, height in whole pixels of the frame."""


@dataclass(frozen=True)
class SliceOptions:
    """How to cut a frame.

    Attributes:
        rows, cols: A grid of this many tiles; both or neither.
        size: Tile (width, height) in frame pixels. With neither grid nor size, tiles are as large as the
            network's input, so that one frame pixel is one network pixel.
        overlap: Share of a tile's side that neighbours have in common, 0 to 0.9 (exclusive).
        full_frame: Also look at the whole frame once.
        merge: Overlap (intersection over the smaller box) above which two boxes of a class are one object.
        max_batch: Tiles in one run, where the model's batch is dynamic.
    """

    rows: int | None = None
    cols: int | None = None
    size: tuple[int, int] | None = None
    overlap: float = 0.2
    full_frame: bool = True
    merge: float = 0.5
    max_batch: int = 8

    def __post_init__(self) -> None:
        if (self.rows is None) != (self.cols is None):
            raise BadInput("slicing: rows and cols belong together; give both")
        if self.rows is not None and self.size is not None:
            raise BadInput("slicing: a grid and a tile size were both given; give one of them")
        if self.rows is not None and self.cols is not None and (self.rows < 1 or self.cols < 1):
            raise BadInput(f"slicing: grid of {self.rows}x{self.cols}, needed 1x1 or more")
        if self.size is not None and min(self.size) < 1:
            raise BadInput(f"slicing: tiles of {self.size[0]}x{self.size[1]}, needed 1 pixel or more")
        if not 0 <= self.overlap < 0.9:
            raise BadInput(f"slicing: overlap {self.overlap}, needed 0 or more and under 0.9")
        if not 0 < self.merge <= 1:
            raise BadInput(f"slicing: merge {self.merge}, needed a number above 0 and up to 1")
        if self.max_batch < 1:
            raise BadInput(f"slicing: max_batch {self.max_batch}, needed 1 or more")

    def tiles(self, frame: tuple[int, int], network: tuple[int, int]) -> list[Tile]:
        """Cuts a frame, row by row.

        All tiles have one size and none reaches past the frame: the last of a row moves inwards instead.

        Args:
            frame: (width, height) of the frame.
            network: (width, height) of the network input.

        Raises:
            BadInput: More than :data:`MAX_TILES` tiles.
        """
        if self.rows is not None and self.cols is not None:
            w, nx = _side(frame[0], self.cols, self.overlap)
            h, ny = _side(frame[1], self.rows, self.overlap)
        else:
            size = self.size or network
            w, h = min(size[0], frame[0]), min(size[1], frame[1])
            nx, ny = _count(frame[0], w, self.overlap), _count(frame[1], h, self.overlap)
        if nx * ny > MAX_TILES:
            raise BadInput(
                f"slicing: {nx * ny} tiles of {w}x{h} for a {frame[0]}x{frame[1]} frame, at most {MAX_TILES}; "
                "give a larger size or fewer rows and cols"
            )
        return [(x, y, w, h) for y in _starts(frame[1], h, ny) for x in _starts(frame[0], w, nx)]


def _side(length: int, count: int, overlap: float) -> tuple[int, int]:
    count = min(count, length)
    return min(length, math.ceil(length / (count - (count - 1) * overlap))), count


def _count(length: int, side: int, overlap: float) -> int:
    if side >= length:
        return 1
    return 1 + math.ceil((length - side) / max(1.0, side * (1 - overlap)))


def _starts(length: int, side: int, count: int) -> list[int]:
    if count == 1:
        return [0]
    return [round(i * (length - side) / (count - 1)) for i in range(count)]


def rank_cut(
    xyxy: NDArray[np.float32],
    tile: Tile,
    tiles: list[Tile],
    frame: tuple[int, int],
    tolerance: float = EDGE_TOLERANCE,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Judges boxes that touch an inner edge of their tile.

    Args:
        xyxy: N x 4, frame pixels.
        tile: The tile that they were found in.
        tiles: All tiles of the frame, ``tile`` among them.
        frame: (width, height) of the frame.
        tolerance: In frame pixels.

    Returns:
        Two masks: boxes that are cut, and those of them that another tile sees whole and further than the cut,
        and which can be dropped.
    """
    x, y, w, h = tile
    edges = (
        (xyxy[:, 0] <= x + tolerance) & (x > 0),
        (xyxy[:, 1] <= y + tolerance) & (y > 0),
        (xyxy[:, 2] >= x + w - tolerance) & (x + w < frame[0]),
        (xyxy[:, 3] >= y + h - tolerance) & (y + h < frame[1]),
    )
    cut = np.logical_or.reduce(edges)
    seen = np.zeros_like(cut)
    for other in tiles:
        if other == tile:
            continue
        ox, oy, ow, oh = other
        # Further out than the box on every side where the box was cut, no less far elsewhere.
        margin = [np.where(edge, 2 * tolerance, 0.0) for edge in edges]
        seen |= (
            (xyxy[:, 0] - margin[0] >= ox)
            & (xyxy[:, 1] - margin[1] >= oy)
            & (xyxy[:, 2] + margin[2] <= ox + ow)
            & (xyxy[:, 3] + margin[3] <= oy + oh)
        )
    return cut, cut & seen
