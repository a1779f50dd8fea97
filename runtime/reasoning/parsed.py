"""What the parsers of model output share: the result, and where in a text the answer stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CHARS = 32_768
"""More text than this is not read: no answer is that long, but a model that repeats itself is."""


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """A value, or why there is none.

    Attributes:
        value: None where the text holds none.
        repairs: What had to be put right, for the trace.
        reason: Set exactly when the value is None.
    """

    value: T | None
    repairs: tuple[str, ...] = ()
    reason: str | None = None

    @classmethod
    def none(cls, reason: str, repairs: Sequence[str] = ()) -> Parsed[T]:
        return cls(None, tuple(repairs), reason)


def visible(text: str) -> str:
    """What a thinking model says once it has thought; nothing if it never stopped thinking.

    At most :data:`MAX_CHARS` characters of it.
    """
    _, mark, tail = text.rpartition("</think>")
    if not mark and "<think>" in text:
        return ""
    return (tail if mark else text)[:MAX_CHARS]


_ANSWER = re.compile(r"\banswer\b[\"'*\s]{0,4}(?:is\b|:|=)[:\"'*\s]{0,4}", re.IGNORECASE)


def after_answer(text: str) -> str | None:
    """What follows the last "answer is" or "answer:"; None where nothing does."""
    end = None
    for match in _ANSWER.finditer(text):
        end = match.end()
    return None if end is None or not text[end:].strip() else text[end:]
