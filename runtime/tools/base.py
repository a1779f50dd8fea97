"""What a perception tool is (the DSPE of arXiv 2608.11738, section IV-A).

A tool runs as a generator: where it needs the MLLM it yields requests and receives the results, so that the
calls of sibling branches go through the model as one batch.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..mllm.base import Choice, ChooseRequest, GenerateRequest, Generation, ImageFeatures

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..perception.depth import DepthMap
    from ..reasoning.session import Session

Ask = ChooseRequest | GenerateRequest
Told = Choice | Generation
ToolRun = Generator[list[Ask], list[Told], "Feedback"]
Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 normalised by the width and height of the original frame."""


class ToolError(Exception):
    """A tool cannot do what it was asked to; the message becomes its feedback."""


@dataclass(frozen=True)
class Feedback:
    """What a tool reports.

    Attributes:
        text: For the agents, one or a few short lines.
        image: Features of a picture that stands in the history behind the text (a zoom's crop), or None.
        boxes: What was found, normalised, original frame; for the trace and the overlay.
        details: More, for the trace.
        ok: False where the tool failed or had nothing to work on.
    """

    text: str
    image: ImageFeatures | None = None
    boxes: tuple[Box, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    ok: bool = True


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool.

    Attributes:
        name: Key in the action.
        kind: ``text``, ``box`` or ``boxes``.
        about: For the prompt, a few words.
        required: Whether the tool can run without it.
        max_tokens: Most tokens that the model may spend on it.
    """

    name: str
    kind: str
    about: str
    required: bool = True
    max_tokens: int = 24


class Perception(Protocol):
    """The compiled models, loaded when first used; each result is computed once for a frame."""

    def detections(self, sliced: bool = False) -> Boxes | None:
        """All objects of the frame by the compiled detector, original pixels; None without a detector."""

    def depth_map(self) -> DepthMap | None:
        """The frame's depth; None without a depth model."""

    def knows(self, category: str) -> tuple[str, ...]:
        """The detector's class names that a category in words stands for; () where it knows none."""


class NoPerception:
    """No compiled models: every tool falls back to the MLLM, or fails in words."""

    def detections(self, sliced: bool = False) -> Boxes | None:
        return None

    def depth_map(self) -> DepthMap | None:
        return None

    def knows(self, category: str) -> tuple[str, ...]:
        return ()


NO_PERCEPTION = NoPerception()


class Tool(Protocol):
    """A perception tool. Stateless; everything about the question comes with the session."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]

    def run(
        self, session: Session, perception: Perception, arguments: Mapping[str, Any]
    ) -> ToolRun:
        """Does the work; ``return``s the feedback.

        Args:
            session: The question; requests fork from ``session.shared`` only.
            perception: The compiled models.
            arguments: Parsed values: ``str`` for text, a :data:`Box` for box, a list of them for boxes.

        Raises:
            ToolError: It cannot be done.
        """
