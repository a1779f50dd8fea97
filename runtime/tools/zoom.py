"""Context-aware zoom: a region enlarged, with its surroundings fading towards the rim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..boxes import format_box
from .arguments import Arguments
from .base import Feedback, Parameter, Perception, ToolRun
from .soft_crop import MARGIN, soft_crop

if TYPE_CHECKING:
    from ..reasoning.session import Session


@dataclass
class Zoom:
    """Shows a region in a picture of its own.

    Attributes:
        margin: Surroundings on each side, as a share of the region's longer side.
        soft: Fade them. Off and without a margin this is a plain crop.
        out_size: Longer side of the crop, in pixels.
    """

    margin: float = MARGIN
    soft: bool = True
    out_size: int = 448
    name: str = "zoom"
    about: str = "shows a region enlarged."
    parameters: tuple[Parameter, ...] = (Parameter("region", "box", "the region to enlarge"),)

    def run(self, session: Session, perception: Perception, arguments: Mapping[str, Any]) -> ToolRun:
        yield from ()  # asks the MLLM for nothing
        given = Arguments(self.name, self.parameters, arguments)
        region = given.box("region")
        crop, mapping = soft_crop(session.frame.rgb, region, self.margin, self.out_size, self.soft)
        image = session.encode(crop)
        shown = mapping.norm
        x, y, w, h = shown[0], shown[1], shown[2] - shown[0], shown[3] - shown[1]
        sharp = f", sharp in {format_box(region)}" if self.soft and self.margin > 0 else ""
        # One digit more than a box has: the width multiplies what is read off the crop.
        text = (
            f"This crop shows {format_box(shown)}{sharp}. "
            f"A point (x, y) of the crop is ({x:.3f} + {w:.4f} x, {y:.3f} + {h:.4f} y) of the image."
        )
        details = {
            "region": list(region),
            "shown": list(shown),
            "size": list(mapping.size),
            "repairs": given.repairs,
        }
        return Feedback(text, image=image, boxes=(region,), details=details)
