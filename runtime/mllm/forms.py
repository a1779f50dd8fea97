"""Forms: outputs whose fixed parts are given and whose slots the model fills.

A form is a generator: it yields pieces and receives the text that each one became, so that what comes next
may depend on what the model said (a tool's parameters on the tool). Fixed parts are put into the cache in
one batch and never decoded token by token; a slot with a few possible values takes as many decode steps as
there are decisions in it.

Example::

    def form():
        yield Literal('{"action": "')
        action = yield Pick("action", ("zoom", "finish"))
        if action == "zoom":
            yield Literal(', "region": "')
            yield Held("region", BOX_GRAMMAR, max_tokens=48)
            yield Literal('"')
        yield Literal("}")
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass


@dataclass(frozen=True)
class Literal:
    """Fixed text. What it becomes is itself.

    Attributes:
        special: Our own template text, in which marks such as ``<think>`` count; never a user's or a model's.
    """

    text: str
    special: bool = False


@dataclass(frozen=True)
class Pick:
    """One of several strings. With a single option nothing is decoded.

    Attributes:
        name: The slot.
        options: Distinct, non-empty strings.
        end: Fixed text behind the chosen one; it also tells "1" from the beginning of "10". It is not part
            of the value.
    """

    name: str
    options: tuple[str, ...]
    end: str = '"'


@dataclass(frozen=True)
class Free:
    """Any text up to ``end``, which is not part of it.

    Attributes:
        name: The slot.
        max_tokens: Most tokens of the slot.
        end: What ends it; it is put there too where the model was cut off.
        special: ``end`` is a mark of the model's template (``</think>``).
    """

    name: str
    max_tokens: int
    end: str = '"'
    special: bool = False


@dataclass(frozen=True)
class Held:
    """Text held to a GBNF grammar with a rule ``root``; it ends where the grammar does.

    Attributes:
        name: The slot.
        grammar: GBNF.
        max_tokens: Most tokens of the slot.
    """

    name: str
    grammar: str
    max_tokens: int


Piece = Literal | Pick | Free | Held
Form = Callable[[], Generator[Piece, str, None]]


def sequence(*pieces: Piece) -> Form:
    """A form whose pieces do not depend on each other."""

    def form() -> Generator[Piece, str, None]:
        for piece in pieces:  # noqa: UP028 - a tuple takes nothing of what is sent
            yield piece

    return form
