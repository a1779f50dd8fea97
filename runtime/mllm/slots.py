"""Fills a form's slots token by token, for any backend that hands over logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .base import Sampling
from .forms import Form, Free, Held, Literal, Pick, Piece
from .sampling import Sampler, log_probability


class Vocabulary(Protocol):
    """What filling needs of a tokenizer."""

    eog: NDArray[np.bool_]

    def tokenize(self, text: str, special: bool) -> tuple[int, ...]:
        """Token ids of text."""

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""

    def tokens_spelling(self, data: bytes) -> Sequence[int]:
        """Every ordinary token whose bytes are exactly ``data``."""


class Matcher(Protocol):
    """A grammar that follows one output."""

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits with forbidden tokens at -inf."""

    def accept(self, token: int) -> None:
        """The token was taken."""

    def close(self) -> None:
        """Frees it."""


class Filler:
    """One output being filled.

    Attributes:
        slots: Values so far.
        probabilities: Of each :class:`Pick`, the probability of what was picked, given that it had to be one
            of the options (temperature 1). Where options share their beginning and a token runs over the place
            at which they part, it counts as going there first; otherwise this is exact.
        text: Everything so far, fixed parts included.
        done: The form has ended.
        drawn: Tokens drawn.
        forced: Tokens given.
        logprob: Sum over the drawn tokens.
    """

    def __init__(
        self,
        form: Form,
        vocabulary: Vocabulary,
        forbidden: NDArray[np.bool_],
        sampling: Sampling,
        grammar: Callable[[str], Matcher],
    ) -> None:
        self._pieces: Generator[Piece, str, None] = form()
        self._vocabulary = vocabulary
        self._forbidden = forbidden
        self._sampler = Sampler(sampling)
        self._make_grammar = grammar
        self._piece: Piece | None = None
        self._remaining: list[tuple[bytes, str]] = []
        self._buffer = b""
        self._count = 0
        self._matcher: Matcher | None = None
        self._mark: int | None = None
        self.slots: dict[str, str] = {}
        self.probabilities: dict[str, float] = {}
        self.text = bytearray()
        self.done = False
        self.drawn = 0
        self.forced = 0
        self.logprob = 0.0

    def start(self) -> list[int]:
        """Tokens that are given before the first slot."""
        return self._continue(None)

    def draw(self, logits: NDArray[np.float32]) -> list[int]:
        """Draws for the current slot from float32 (n_vocab,) logits after everything so far.

        Returns:
            Tokens to put into the cache: the one drawn, and what is given after it. May be empty at the end.
        """
        piece = self._piece
        assert piece is not None
        if isinstance(piece, Pick):
            self.drawn += 1
            return self._draw_pick(piece, logits)
        masked = np.where(self._forbidden, np.float32(-np.inf), logits)
        if self._mark is not None:
            masked[self._mark] = logits[self._mark]
        if isinstance(piece, Held):
            assert self._matcher is not None
            masked = self._matcher.mask(masked)
            if not np.isfinite(masked).any():
                return self._end(piece.name)
        self.drawn += 1
        token = self._sampler.draw(masked)
        if self._vocabulary.eog[token] or token == self._mark:
            return self._close_slot(piece)
        data = self._vocabulary.piece(token)
        self._count += 1
        self.logprob += log_probability(logits, token)
        if isinstance(piece, Held):
            assert self._matcher is not None
            self._matcher.accept(token)
        elif isinstance(piece, Free):
            end = piece.end.encode()
            before = len(self._buffer)
            at = (self._buffer + data).find(end)
            if at >= 0:
                # The token runs over the end of the slot: only what stands before it counts.
                kept = data[: max(0, at - before)]
                self._buffer = (self._buffer + data)[:at]
                tokens = self._give(kept) if kept else []
                return tokens + self._close_slot(piece, overrun=max(0, before - at))
        self._buffer += data
        self.text += data
        tokens = [token]
        assert isinstance(piece, (Free, Held))
        if self._count >= piece.max_tokens:
            return tokens + self._close_slot(piece)
        return tokens

    def close(self) -> None:
        """Frees the grammar, if one is open."""
        if self._matcher is not None:
            self._matcher.close()
            self._matcher = None

    # -- one piece after the other -------------------------------------------------------------------

    def _continue(self, value: str | None) -> list[int]:
        """Runs the form to its next slot; the tokens given on the way."""
        tokens: list[int] = []
        while True:
            try:
                piece = next(self._pieces) if value is None else self._pieces.send(value)
            except StopIteration:
                self._piece = None
                self.done = True
                return tokens
            if isinstance(piece, Literal):
                tokens += self._give(piece.text.encode(), piece.special)
                value = piece.text
            elif isinstance(piece, Pick) and len(piece.options) == 1:
                tokens += self._give((piece.options[0] + piece.end).encode())
                value = self.slots[piece.name] = piece.options[0]
                self.probabilities[piece.name] = 1.0
            else:
                self._open(piece)
                return tokens

    def _open(self, piece: Piece) -> None:
        self._piece = piece
        self._buffer = b""
        self._count = 0
        self._mark = None
        if isinstance(piece, Free) and piece.special:
            marks = self._vocabulary.tokenize(piece.end, True)
            self._mark = marks[0] if len(marks) == 1 else None
        if isinstance(piece, Pick):
            if not piece.options or len(set(piece.options)) != len(piece.options):
                raise ValueError(f"slot {piece.name!r} needs distinct options, found {piece.options}")
            self._remaining = [((o + piece.end).encode(), o) for o in piece.options]
            self.probabilities[piece.name] = 1.0
        elif isinstance(piece, Held):
            self._matcher = self._make_grammar(piece.grammar)

    def _draw_pick(self, piece: Pick, logits: NDArray[np.float32]) -> list[int]:
        allowed: dict[int, None] = {}
        for rest, _ in self._remaining:
            for n in range(1, len(rest) + 1):
                for token in self._vocabulary.tokens_spelling(rest[:n]):
                    allowed[token] = None
        ids = np.fromiter(allowed, np.int64, len(allowed))
        masked = np.full(len(logits), -np.inf, dtype=np.float32)
        masked[ids] = logits[ids]
        token = self._sampler.draw(masked)
        data = self._vocabulary.piece(token)
        self.logprob += log_probability(logits, token)
        self.probabilities[piece.name] *= self._mass(logits, ids, data)
        self.text += data
        self._remaining = [(r[len(data) :], o) for r, o in self._remaining if r.startswith(data)]
        whole = [o for r, o in self._remaining if not r]
        if not whole and len(self._remaining) > 1:
            return [token]
        rest, option = (b"", whole[0]) if whole else self._remaining[0]
        tokens = [token]
        if rest:
            tokens += self._give(rest)
        self.slots[piece.name] = option
        return tokens + self._continue(option)

    def _mass(self, logits: NDArray[np.float32], ids: NDArray[np.int64], data: bytes) -> float:
        """Probability of going the way of ``data`` among the allowed tokens.

        Several tokens may begin the same options ("Y", "Ye", "Yes"): all that stay on the way count.
        """
        x = logits[ids].astype(np.float64)
        p = np.exp(x - x.max())
        same = [
            i
            for i, token in enumerate(ids)
            if (b := self._vocabulary.piece(int(token))).startswith(data) or data.startswith(b)
        ]
        return float(p[same].sum() / p.sum())

    def _close_slot(self, piece: Piece, overrun: int = 0) -> list[int]:
        """Ends a Free or Held slot: its delimiter is given, and what follows."""
        assert isinstance(piece, (Free, Held))
        tokens: list[int] = []
        if isinstance(piece, Free):
            # An end of several bytes may have begun in tokens that are already there.
            tokens = self._give(piece.end.encode()[overrun:], piece.special)
        return tokens + self._end(piece.name)

    def _end(self, name: str) -> list[int]:
        self.close()
        value = self.slots[name] = self._buffer.decode("utf-8", "replace")
        return self._continue(value)

    def _give(self, data: bytes, special: bool = False) -> list[int]:
        self.text += data
        tokens: list[int] = []
        # A drawn token may end inside a character: the rest of that is given byte by byte.
        for run in re.split(r"([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape")):
            raw = run.encode("utf-8", "surrogateescape")
            if not raw:
                continue
            try:
                tokens += self._vocabulary.tokenize(raw.decode(), special)
            except UnicodeDecodeError:
                for i in range(len(raw)):
                    tokens += self._vocabulary.tokens_spelling(raw[i : i + 1])[:1]
        self.forced += len(tokens)
        return tokens
