"""Distance estimation: what is near, what is far, and what stands out from the ground around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np

from ..boxes import Boxes, Space, format_box
from .arguments import Arguments, boxes_in_question
from .base import Box, Feedback, Parameter, Perception, ToolError, ToolRun

if TYPE_CHECKING:
    from ..perception.depth import DepthMap
    from ..reasoning.session import Session

ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
ALIKE = 0.01
"""Differences up to this share of the map's spread are not told apart."""


@dataclass
class Distance:
    """Reads the frame's depth at boxes: those given, else those of the question, else a 3 x 3 grid.

    Depth is in metres where the depth model is metric, else from 0 (near) to 1 (far) within this frame. Height
    is that of the object above the ground around it, from the jump in depth at its outline: metres, or a share
    of the frame's depth range, which only compares objects.

    Attributes:
        ranks: Also say heights and the order of the boxes. Off, this gives the plain depth values.
    """

    ranks: bool = True
    name: str = "distance"
    about: str = "says how far boxes are, which is nearer, and how high they stand above the ground."
    parameters: tuple[Parameter, ...] = (
        Parameter("boxes", "boxes", "what to compare; empty for the boxes of the question", required=False),
    )

    def run(self, session: Session, perception: Perception, arguments: Mapping[str, Any]) -> ToolRun:
        yield from ()  # asks the MLLM for nothing
        given = Arguments(self.name, self.parameters, arguments)
        boxes = given.boxes("boxes") or boxes_in_question(session.question)
        depth = perception.depth_map()
        if depth is None:
            raise ToolError("there is no depth model here; go by the image")
        scale = _Scale.of(depth)
        if boxes:
            text, details = self._boxes(depth, scale, boxes)
        else:
            text, details = _grid(depth, scale)
        return Feedback(text, boxes=tuple(boxes), details={**details, "repairs": given.repairs})

    def _boxes(self, depth: DepthMap, scale: _Scale, boxes: Sequence[Box]) -> tuple[str, dict[str, Any]]:
        placed = Boxes(np.array(boxes), Space.NORM, depth.size)
        far = [float(v) for v in depth.at(placed)]
        high = [float(v) for v in depth.height_above_ground(placed)] if self.ranks else [math.nan] * len(boxes)
        lines = []
        for letter, box, d, h in zip(ascii_uppercase, boxes, far, high, strict=False):
            height = f", {scale.height(h)}" if math.isfinite(h) else ""
            lines.append(f"{letter} {format_box(box)}: {scale.depth(d) if math.isfinite(d) else 'unknown'}{height}")
        text = f"{scale.legend}\n" + "\n".join(lines)
        if self.ranks and len(boxes) > 1:
            text += f"\nNear to far: {_ranked(far, scale.spread * ALIKE)}."
            if sum(map(math.isfinite, high)) > 1 and any(scale.stands_out(h) for h in high):
                # What seems to lie below its ground is the model's noise, and no order.
                rising = [-max(h, 0.0) if math.isfinite(h) else h for h in high]
                text += f"\nHigh to low: {_ranked(rising, scale.spread * ALIKE)}."
        return text, {"depth": [_or_none(v) for v in far], "height": [_or_none(v) for v in high], "kind": depth.kind}


@dataclass(frozen=True)
class _Scale:
    """How depths of one map are said.

    Attributes:
        low: What counts as 0 in a map without a unit (its 2nd percentile).
        spread: From there to the 98th percentile.
    """

    metric: bool
    low: float
    spread: float

    @classmethod
    def of(cls, depth: DepthMap) -> _Scale:
        known = depth.depth[np.isfinite(depth.depth)]
        if not known.size:
            raise ToolError("the depth of this frame is unknown; go by the image")
        low, high = (float(v) for v in np.percentile(known, [2, 98]))
        return cls(depth.kind == "metric", low, max(high - low, 1e-9))

    @property
    def legend(self) -> str:
        return "Distance from the camera:" if self.metric else "Relative depth (0 near, 1 far):"

    def depth(self, value: float) -> str:
        if self.metric:
            return f"{value:.1f} m"
        return f"{min(max((value - self.low) / self.spread, 0.0), 1.0):.2f}"

    def stands_out(self, height: float) -> bool:
        """Whether a height is one at the precision that it is said with; False for an unknown one."""
        return height > (0.05 if self.metric else 0.005 * self.spread)

    def height(self, value: float) -> str:
        if not self.stands_out(value):
            return "at ground level"
        return f"{value:.1f} m above the ground around it" if self.metric else f"stands out {value / self.spread:.2f}"


def _ranked(values: Sequence[float], alike: float) -> str:
    """Letters by rising value; ``~`` joins those that are not told apart, unknown ones are left out."""
    order = sorted((i for i, v in enumerate(values) if math.isfinite(v)), key=lambda i: (values[i], i))
    text = ""
    for before, i in zip([None, *order], order, strict=False):
        joint = "" if before is None else " ~ " if values[i] - values[before] <= alike else ", "
        text += joint + ascii_uppercase[i]
    return text or "unknown"


def _grid(depth: DepthMap, scale: _Scale) -> tuple[str, dict[str, Any]]:
    cells = [(c / 3, r / 3, (c + 1) / 3, (r + 1) / 3) for r in range(3) for c in range(3)]
    values = [float(v) for v in depth.at(Boxes(np.array(cells), Space.NORM, depth.size))]
    rows = []
    for r, row in enumerate(ROWS):
        said = (scale.depth(v) if math.isfinite(v) else "unknown" for v in values[3 * r : 3 * r + 3])
        rows.append(f"{row}: {', '.join(said)}")
    text = f"{scale.legend} {', '.join(COLUMNS)}\n" + "\n".join(rows)
    return text, {"grid": [_or_none(v) for v in values], "kind": depth.kind}


def _or_none(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
