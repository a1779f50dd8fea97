"""The cache law, checked on the device at hand: a forked state answers as a full prompt does.

Integrated GPUs have been seen to contaminate cached image KV, silently. So the law is not only a test of the
project: ``hoverlens doctor`` runs it with the very bundle, backend and device that will answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import ChooseRequest, GenerateRequest, Part, Text
from .chat import ChatFormat
from .llamacpp import LlamaCppBackend

OPTIONS = ("yes", "no", "maybe a red car", "12")
TOLERANCE = 0.05
"""Largest difference of mean log-probabilities that rounding explains. Measured on CPUs with random weights:
0.002 for F16 and 0.02 for Q8_0; contaminated caches are off by 0.3 and more."""


@dataclass(frozen=True)
class LawResult:
    """What was found.

    Attributes:
        difference: Largest difference of scores between forked and full prompts.
        swapped: Largest difference of scores between the two pictures; a cache that freezes an image has 0.
        tokens_equal: Greedy continuations agree (a near tie may break them without a fault).
    """

    difference: float
    swapped: float
    tokens_equal: bool

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE


def check_cache_law(backend: LlamaCppBackend, chat: ChatFormat) -> LawResult:
    """Asks about two pictures forked and batched, then each from nothing, and compares.

    The backend must be idle; its features are forgotten.
    """
    pictures = [_picture(seed) for seed in (1, 2)]
    suffixes = [chat.close(Text(text)) for text in ("Is there a car?", "How many are there?")]

    def prompt(i: int) -> list[Part]:
        return chat.open("You see.", backend.encode(pictures[i]), Text("\nLook at the picture.\n"))

    states = [backend.prefix(prompt(i)) for i in range(2)]
    try:
        pairs = [(i, s) for i in range(2) for s in suffixes]
        forked = backend.choose([ChooseRequest(states[i], OPTIONS, s) for i, s in pairs])
        texts = backend.generate([GenerateRequest(states[i], s, max_tokens=8) for i, s in pairs])
    finally:
        for state in states:
            state.close()
    difference, equal = 0.0, True
    for (i, suffix), choice, text in zip(pairs, forked, texts, strict=True):
        backend.forget()
        with backend.prefix([*prompt(i), *suffix]) as whole:
            alone = backend.choose([ChooseRequest(whole, OPTIONS)])[0]
            again = backend.generate([GenerateRequest(whole, max_tokens=8)])[0]
        difference = max(difference, float(np.abs(alone.scores - choice.scores).max()))
        equal &= again.tokens == text.tokens
    swapped = float(np.abs(forked[0].scores - forked[2].scores).max())
    return LawResult(difference, swapped, equal)


def _picture(seed: int) -> NDArray[np.uint8]:
    """uint8 RGB (112, 160, 3): blocks of colour, another picture for each seed."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (7, 10, 3), dtype=np.uint8)
    return np.ascontiguousarray(np.kron(blocks, np.ones((16, 16, 1), dtype=np.uint8)))
