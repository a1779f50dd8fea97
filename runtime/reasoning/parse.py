"""Turns what a model writes into values, whatever it writes: nothing here raises.

Every repair is said, for the trace. The parsers live in modules of their own and are all to be had here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..boxes import format_box
from ..question import Question
from .parse_boxes import SLACK, Box, parse_box, parse_boxes
from .parse_json import Json, parse_json
from .parse_options import BOX_TOLERANCE, match_option, match_options
from .parsed import MAX_CHARS, Parsed, visible

__all__ = [
    "BOX_TOLERANCE",
    "MAX_CHARS",
    "SLACK",
    "Box",
    "Json",
    "Parsed",
    "Valid",
    "match_option",
    "match_options",
    "parse_box",
    "parse_boxes",
    "parse_json",
    "valid_answer",
    "visible",
]


@dataclass(frozen=True)
class Valid:
    """An answer that a question accepts.

    Attributes:
        text: In the one form that answers are compared in.
        options: The chosen options, for the kinds that have some; in the question's order.
        box: For the kind ``box``.
    """

    text: str
    options: tuple[str, ...] = ()
    box: Box | None = None


def valid_answer(question: Question, text: str) -> Parsed[Valid]:
    """The answer that a text gives to a question, if it gives a valid one.

    Valid is: for ``option`` one of the options, for ``options`` at least one of them, for ``box`` a box that has
    an area at three decimals, for ``text`` anything but nothing.
    """
    if question.kind == "option":
        index = match_option(text, question.options)
        if index is None:
            return Parsed.none("names none of the options, or more than one")
        option = question.options[index]
        return Parsed(Valid(option, (option,)), _unless_same(text, option))
    if question.kind == "options":
        indices = match_options(text, question.options)
        if not indices:
            return Parsed.none("names none of the options")
        chosen = tuple(question.options[i] for i in indices)
        return Parsed(Valid(", ".join(chosen), chosen), _unless_same(text, ", ".join(chosen)))
    if question.kind == "box":
        parsed = parse_box(text)
        if parsed.value is None:
            return Parsed.none(parsed.reason or "no box in the text", parsed.repairs)
        x1, y1, x2, y2 = (round(v, 3) for v in parsed.value)
        if x1 >= x2 or y1 >= y2:
            return Parsed.none("a box without area at three decimals", parsed.repairs)
        box = (x1, y1, x2, y2)
        return Parsed(Valid(format_box(box), box=box), parsed.repairs)
    stripped = visible(text).strip()
    return Parsed(Valid(stripped)) if stripped else Parsed.none("the text is empty")


def _unless_same(text: str, value: str) -> tuple[str, ...]:
    return () if text.strip() == value else (f"read as {value!r}",)
