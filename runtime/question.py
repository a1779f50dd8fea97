"""The question: its text, its options, and the kind of answer that it asks for."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import BadInput

Kind = Literal["option", "options", "box", "text"]
KINDS: tuple[str, ...] = get_args(Kind)

MAX_QUESTION_CHARS = 4000
"""Longest question text. The longest question of UAVQA-Bench has about 70 tokens (arXiv 2608.11738, Fig. 3d)."""
MAX_OPTIONS = 64
MAX_OPTION_CHARS = 400


@dataclass(frozen=True)
class Question:
    """A question about one image.

    Text and options are data: a backend tokenises them as plain text, so a chat-template token written
    inside them (``<|im_end|>``) reaches the model as ordinary characters.

    Attributes:
        text: The question, stripped, 1 to :data:`MAX_QUESTION_CHARS` characters, no control characters
            but tab and newline.
        options: Distinct, non-empty candidate answers; empty for kinds ``box`` and ``text``.
        kind: ``option`` (one of the options), ``options`` (any number of them), ``box`` (one normalised
            box) or ``text`` (free text).
    """

    text: str
    options: tuple[str, ...] = ()
    kind: Kind = "text"

    def __post_init__(self) -> None:
        """Refuses what :meth:`make` would refuse or change: whoever holds a question holds a good one."""
        if self.kind is None:
            raise BadInput(f"unknown question kind None; use one of {', '.join(KINDS)}")
        text, options, _ = _checked(self.text, self.options, self.kind)
        if not isinstance(self.options, tuple) or self.options != options:
            raise BadInput("options are not a tuple of stripped strings; use Question.make, which makes them so")
        if self.text != text:
            raise BadInput("the question is not stripped or has line ends of another kind; use Question.make")

    @classmethod
    def make(cls, text: str, options: Sequence[str] | None = None, kind: str | None = None) -> Question:
        """Checks and builds a question.

        Args:
            text: Question text.
            options: Candidate answers, or None.
            kind: One of :data:`KINDS`; None means ``option`` with options and ``text`` without.

        Raises:
            BadInput: Empty or over-long text, control characters, empty or repeated options, an unknown
                kind, or a kind that does not fit the options.
        """
        text, cleaned, kind = _checked(text, options, kind)
        return cls(text=text, options=cleaned, kind=kind)  # type: ignore[arg-type]


def _checked(text: object, options: object, kind: object) -> tuple[str, tuple[str, ...], str]:
    """The three as a question holds them."""
    text = _clean(text, "the question", MAX_QUESTION_CHARS)
    given = [] if options is None else _listed(options)
    if len(given) > MAX_OPTIONS:
        raise BadInput(f"{len(given)} options given; at most {MAX_OPTIONS} are taken")
    cleaned = [_clean(o, f"option {i}", MAX_OPTION_CHARS) for i, o in enumerate(given, 1)]
    seen: dict[str, int] = {}
    for i, option in enumerate(cleaned, 1):
        key = option.casefold()
        if key in seen:
            raise BadInput(f"option {i} ({option!r}) repeats option {seen[key]}; options must differ")
        seen[key] = i
    if kind is None:
        kind = "option" if cleaned else "text"
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadInput(f"unknown question kind {kind!r}; use one of {', '.join(KINDS)}")
    if kind in ("option", "options") and len(cleaned) < (2 if kind == "option" else 1):
        raise BadInput(
            f"kind {kind!r} needs {'two or more options' if kind == 'option' else 'an option'}, "
            f"found {len(cleaned)}; add --option A --option B"
        )
    if kind in ("box", "text") and cleaned:
        raise BadInput(f"kind {kind!r} takes no options, found {len(cleaned)}; leave them out")
    return text, tuple(cleaned), kind


def _listed(options: object) -> list[object]:
    if isinstance(options, str):
        raise BadInput("options are one string; pass a list of strings, one for each option")
    if not isinstance(options, Iterable) or isinstance(options, (bytes, bytearray, Mapping, Set)):
        raise BadInput(f"options are {type(options).__name__}; pass a list of strings, one for each option")
    return list(options)


def _clean(text: object, what: str, limit: int) -> str:
    if not isinstance(text, str):
        raise BadInput(f"{what} is {type(text).__name__}; a string is needed")
    if len(text) > limit:
        raise BadInput(f"{what} has {len(text)} characters; at most {limit} are taken")
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise BadInput(f"{what} is empty; write it out")
    for i, ch in enumerate(text):
        # Cc: control; Cs: lone surrogates, which no tokenizer can encode.
        if ch not in "\n\t" and unicodedata.category(ch) in ("Cc", "Cs"):
            raise BadInput(f"{what} has the control character U+{ord(ch):04X} at position {i}; remove it")
    return text
