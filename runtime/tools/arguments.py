"""A tool's arguments, checked: lenient in form, strict in geometry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..question import Question
from ..reasoning.parse_boxes import parse_box, parse_boxes
from .base import Box, Parameter, ToolError

MAX_TEXT = 200
MAX_BOXES = 12


class Arguments:
    """The arguments of one run of a tool.

    Attributes:
        repairs: What had to be put right so far.
    """

    def __init__(self, tool: str, parameters: Sequence[Parameter], given: Mapping[str, Any]) -> None:
        self.usage = f"{tool}({', '.join(p.name if p.required else f'{p.name}?' for p in parameters)})"
        self.about = {p.name: p.about for p in parameters}
        self.given = given
        self.repairs: list[str] = []

    def text(self, name: str) -> str:
        """A text on one line, at most :data:`MAX_TEXT` characters.

        Raises:
            ToolError: It is missing, empty or no text.
        """
        value = self.given.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self._missing(name)
        text = " ".join(value.split())
        if len(text) > MAX_TEXT:
            self.repairs.append(f"{name} cut to {MAX_TEXT} characters")
            text = text[:MAX_TEXT].rstrip()
        return text

    def box(self, name: str) -> Box:
        """A box.

        Raises:
            ToolError: It is missing, or no box.
        """
        value = self.given.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise self._missing(name)
        parsed = parse_box(_written(value))
        if parsed.value is None:
            raise ToolError(f"{name} is no box ({parsed.reason}); use {self.usage}")
        self.repairs += parsed.repairs
        return parsed.value

    def boxes(self, name: str) -> list[Box]:
        """Boxes, none if the argument is missing; at most :data:`MAX_BOXES`.

        Raises:
            ToolError: There is something, but no box in it.
        """
        value = self.given.get(name)
        if value is None or (isinstance(value, (str, Sequence)) and not len(value)):
            return []
        parsed = parse_boxes(_written(value))
        if parsed.value is None:
            raise ToolError(f"{name} holds no box ({parsed.reason}); use {self.usage}")
        self.repairs += parsed.repairs
        if len(parsed.value) > MAX_BOXES:
            self.repairs.append(f"the first {MAX_BOXES} of {len(parsed.value)} boxes are taken")
        return parsed.value[:MAX_BOXES]

    def _missing(self, name: str) -> ToolError:
        return ToolError(f"{name} is missing ({self.about.get(name, 'needed')}); use {self.usage}")


def boxes_in_question(question: Question) -> list[Box]:
    """Boxes that the question and its options name, in order, each once."""
    found: list[Box] = []
    for text in (question.text, *question.options):
        found += parse_boxes(text).value or []
    return list(dict.fromkeys(found))[:MAX_BOXES]


def _written(value: Any) -> str:
    """Numbers as text that the parser reads, so that values and words follow one set of rules."""
    if isinstance(value, str):
        return value
    try:
        flat = [v for item in value for v in (item if isinstance(item, Sequence) else [item])]
        numbers = [float(v) for v in flat]
    except (TypeError, ValueError, OverflowError):
        return ""
    # Whole floats keep their point: 1.0 is a fraction, not a thousandth.
    return "".join(f"[{', '.join(repr(v) for v in numbers[i : i + 4])}] " for i in range(0, len(numbers), 4))
