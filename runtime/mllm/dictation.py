"""Outputs that are dictated: the model does the work of an answer whose words are given.

For timing. Random or small weights say things of any length; to compare two ways of running the same
question, both must decode the same tokens. A dictated form costs what a real one would: fixed parts are
given at once, every token of a slot takes a decode step.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import numpy as np
from numpy.typing import NDArray

from .forms import Form, Free, Literal, Pick, Piece
from .slots import Vocabulary


class Dictation:
    """Stands in for :class:`~hoverlens.runtime.mllm.slots.Filler`; slots get the values of a script.

    Args:
        form: The form to fill.
        script: Slot to value; a slot that is missing gets its first option, or nothing.
    """

    def __init__(self, form: Form, vocabulary: Vocabulary, script: Mapping[str, str]) -> None:
        self._pieces: Generator[Piece, str, None] = form()
        self._vocabulary = vocabulary
        self._script = script
        self._queue: list[int] = []
        self._after = b""
        self._value: str | None = None
        self.slots: dict[str, str] = {}
        self.probabilities: dict[str, float] = {}
        self.text = bytearray()
        self.done = False
        self.drawn = 0
        self.forced = 0
        self.logprob = 0.0

    def start(self) -> list[int]:
        """Tokens that are given before the first slot."""
        return self._continue()

    def draw(self, logits: NDArray[np.float32]) -> list[int]:
        """The next token of the slot, whatever the logits say, and what is given after the slot's last."""
        self.drawn += 1
        token = self._queue.pop(0)
        self.text += self._vocabulary.piece(token)
        tokens = [token]
        if not self._queue:
            tokens += self._give(self._after)
            tokens += self._continue()
        return tokens

    def close(self) -> None:
        """Nothing is held."""

    def _continue(self) -> list[int]:
        tokens: list[int] = []
        while True:
            try:
                piece = next(self._pieces) if self._value is None else self._pieces.send(self._value)
            except StopIteration:
                self.done = True
                return tokens
            if isinstance(piece, Literal):
                tokens += self._give(piece.text.encode(), piece.special)
                self._value = piece.text
                continue
            value = self._value_of(piece)
            self._value = self.slots[piece.name] = value
            end = piece.end.encode() if isinstance(piece, (Pick, Free)) else b""
            if isinstance(piece, Pick) and len(piece.options) == 1:
                tokens += self._give(value.encode() + end)
                continue
            spelled = list(self._vocabulary.tokenize(value, False))
            if isinstance(piece, Pick):
                # One decision, and the rest follows.
                self._queue, rest = spelled[:1], spelled[1:]
                self._after = b"".join(map(self._vocabulary.piece, rest)) + end
            else:
                self._queue, self._after = spelled, end
            if self._queue:
                return tokens
            tokens += self._give(self._after)

    def _value_of(self, piece: Piece) -> str:
        assert not isinstance(piece, Literal)
        if isinstance(piece, Pick):
            self.probabilities[piece.name] = 1.0
            value = self._script.get(piece.name, piece.options[0])
            if value not in piece.options:
                raise ValueError(f"slot {piece.name!r}: the script's {value!r} is none of {piece.options}")
            return value
        return self._script.get(piece.name, "")

    def _give(self, data: bytes, special: bool = False) -> list[int]:
        if not data:
            return []
        self.text += data
        tokens = list(self._vocabulary.tokenize(data.decode("utf-8", "replace"), special))
        self.forced += len(tokens)
        return tokens
