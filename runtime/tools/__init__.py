"""The perception tools of DSPE (arXiv 2608.11738, section IV-A) and what runs them."""

from __future__ import annotations

from ..errors import BadInput
from .base import Feedback, Parameter, Perception, Tool, ToolError
from .describe import Describe
from .detect import Detect
from .distance import Distance
from .ground import Ground
from .perception import PerceptionCache, Timed
from .running import run_tools
from .zoom import Zoom

__all__ = [
    "GENERAL",
    "TOOLS",
    "Describe",
    "Detect",
    "Distance",
    "Feedback",
    "Ground",
    "Parameter",
    "Perception",
    "PerceptionCache",
    "Timed",
    "Tool",
    "ToolError",
    "Zoom",
    "run_tools",
    "toolset",
]

TOOLS: dict[str, Tool] = {t.name: t for t in (Zoom(), Describe(), Distance(), Ground(), Detect())}
"""The five, in the paper's order."""

GENERAL: dict[str, Tool] = {
    t.name: t
    for t in (
        Zoom(margin=0.0, soft=False),
        Distance(ranks=False, about="says how far boxes are."),
        Detect(confirm_existence="never", equidistance=False),
    )
}
"""What a general agent has: a plain crop, plain depth values, detection without checks."""


def toolset(name: str = "domain") -> tuple[Tool, ...]:
    """The tools of that name: ``domain`` (the five) or ``general``.

    Raises:
        BadInput: No such set.
    """
    sets = {"domain": TOOLS, "general": GENERAL}
    if name not in sets:
        raise BadInput(f"unknown toolset {name!r}; use one of {', '.join(sets)}")
    return tuple(sets[name].values())
