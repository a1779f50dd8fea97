"""A pass may have logits at few tokens; what wants more takes more passes and scores the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hoverlens.runtime.mllm import llama_native
from hoverlens.runtime.mllm.base import ChooseRequest, GenerateRequest, Text
from hoverlens.runtime.mllm.llama_native import most_outputs
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend

MakeBackend = Callable[..., LlamaCppBackend]

LONG = tuple(f"option {i}: " + "the car beside the house " * (1 + i % 4) for i in range(7))


@pytest.mark.parametrize(
    ("n_batch", "n_seq", "expected"), [(512, 64, 64), (512, 2, 64), (512, 200, 200), (32, 8, 32), (8, 8, 8)]
)
def test_every_sequence_may_have_one_output(n_batch: int, n_seq: int, expected: int) -> None:
    assert most_outputs(n_batch, n_seq) == expected


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many outputs each pass wanted."""
    counts: list[int] = []
    decode = llama_native.Context.decode

    def counting(self: Any, tokens: Any, positions: Any, sequences: Any, flags: Any, cancel: Any) -> int:
        counts.append(sum(flags))
        return decode(self, tokens, positions, sequences, flags, cancel)

    monkeypatch.setattr(llama_native.Context, "decode", counting)
    return counts


def scores(backend: LlamaCppBackend, suffixes: int = 6, options: tuple[str, ...] = LONG) -> list[np.ndarray]:
    with backend.prefix([Text("You see a car park. ")]) as state:
        asked = [ChooseRequest(state, options, (Text(f"Question {i}: what is there? "),)) for i in range(suffixes)]
        return [choice.scores for choice in backend.choose(asked)]


def test_scoring_many_options_keeps_to_the_limit(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, wanted: list[int]
) -> None:
    few = make_backend(n_sequences=16)
    found = scores(few)
    assert max(wanted) == few.context.n_outputs == 64
    passes = len(wanted)
    wanted.clear()
    monkeypatch.setattr(llama_native, "most_outputs", lambda n_batch, n_seq: n_batch)
    expected = scores(make_backend(n_sequences=16))
    assert max(wanted) > 64
    assert passes > len(wanted)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)


def test_one_option_may_be_longer_than_the_limit(make_backend: MakeBackend, wanted: list[int]) -> None:
    long = ("the car beside the house " * 20, "the car beside the house " * 20 + "and a tree")
    found = scores(make_backend(n_sequences=2), 1, long)
    assert max(wanted) == 64
    np.testing.assert_allclose(found, scores(make_backend(n_sequences=2, n_batch=40), 1, long), atol=5e-3)


def test_prompts_wait_for_an_output_and_not_for_ever(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, wanted: list[int]
) -> None:
    """With one output a pass, whoever has all but the last token of its prompt waits for its turn."""
    expected = None
    for limit in (64, 1):
        backend = make_backend(n_sequences=8)
        # Never more than llama.cpp was told; the scheduler alone keeps to the smaller one.
        monkeypatch.setattr(backend.context, "n_outputs", limit)
        wanted.clear()
        with backend.prefix([Text("You see a car park. ")]) as state:
            made = backend.generate(
                [GenerateRequest(state, (Text(f"Say {'so ' * i}"),), max_tokens=5) for i in range(5)]
            )
        assert max(wanted) <= limit
        expected = expected or [g.text for g in made]
        assert [g.text for g in made] == expected
