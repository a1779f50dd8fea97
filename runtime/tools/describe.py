"""Fine-grained description: what a region shows, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..boxes import format_box
from ..mllm.base import GenerateRequest, Generation
from .arguments import Arguments
from .asking import sampling
from .base import Feedback, Parameter, Perception, ToolError, ToolRun

if TYPE_CHECKING:
    from ..reasoning.session import Session


@dataclass
class Describe:
    """Lets the MLLM put a region into words, from image and question alone.

    Attributes:
        max_tokens: Most tokens of the description.
    """

    max_tokens: int = 60
    name: str = "describe"
    about: str = "says what a region looks like: colour, texture, posture, behaviour."
    parameters: tuple[Parameter, ...] = (Parameter("region", "box", "the region to describe"),)

    def run(self, session: Session, perception: Perception, arguments: Mapping[str, Any]) -> ToolRun:
        given = Arguments(self.name, self.parameters, arguments)
        region = given.box("region")
        shown = format_box(region)
        request = GenerateRequest(
            session.shared,
            suffix=session.suffix("tool_describe", region=shown),
            max_tokens=self.max_tokens,
            sampling=sampling(session, self.name, shown),
            label="tool describe",
        )
        (told,) = yield [request]
        assert isinstance(told, Generation)
        words = " ".join(told.text.split())
        if not words:
            raise ToolError(f"the model says nothing about {shown}")
        if told.finish == "length":
            words = _whole(words)
        return Feedback(f"{shown}: {words}", boxes=(region,), details={"repairs": given.repairs})


def _whole(text: str) -> str:
    """A text that was cut off, up to its last whole sentence, else word."""
    end = max(text.rfind(mark) for mark in (". ", "; ")) + 1
    return text[:end].rstrip("; ") if end > 0 else f"{text.rsplit(' ', 1)[0]} ..."
