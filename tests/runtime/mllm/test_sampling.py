"""Draws follow the softmax, and depend on the seed, the number of the draw and the token alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.mllm.base import Sampling
from hoverlens.runtime.mllm.sampling import Sampler, log_probability

LOGITS = np.array([1.0, 2.0, 0.5, -1.0, 2.5, -np.inf], np.float32)


def softmax(x: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    p = np.exp((x.astype(np.float64) - x.max()) / temperature)
    return np.asarray(p / p.sum())


def frequencies(logits: NDArray[np.float32], n: int = 8_000, **sampling: float) -> NDArray[np.float64]:
    """Of draws by as many seeds, as siblings have them."""
    drawn = [Sampler(Sampling(seed=s, **sampling)).draw(logits) for s in range(n)]  # type: ignore[arg-type]
    return np.bincount(drawn, minlength=len(logits)) / n


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 2.0])
def test_draws_follow_the_softmax_over_seeds(temperature: float) -> None:
    # Five standard deviations of a share p over n draws are at most 5 * sqrt(.25 / 8000) = .028.
    np.testing.assert_allclose(frequencies(LOGITS, temperature=temperature), softmax(LOGITS, temperature), atol=0.028)


def test_draws_follow_the_softmax_over_one_stream() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=7))
    drawn = np.bincount([sampler.draw(LOGITS) for _ in range(8_000)], minlength=6) / 8_000
    np.testing.assert_allclose(drawn, softmax(LOGITS, 1.0), atol=0.028)


def test_successive_draws_are_independent() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=7))
    even = np.zeros(2, np.float32)
    drawn = np.array([sampler.draw(even) for _ in range(8_000)])
    pairs = np.bincount(2 * drawn[:-1] + drawn[1:], minlength=4) / (len(drawn) - 1)
    np.testing.assert_allclose(pairs, 0.25, atol=0.028)


def test_temperature_zero_takes_the_best_and_the_first_of_equals() -> None:
    assert Sampler(Sampling()).draw(LOGITS) == 4
    assert Sampler(Sampling(temperature=-1.0)).draw(LOGITS) == 4
    assert Sampler(Sampling()).draw(np.array([1, 3, 3], np.float32)) == 1


def test_a_seed_repeats_its_stream() -> None:
    a, b, c = (Sampler(Sampling(temperature=1.0, seed=s)) for s in (5, 5, 6))
    first = [a.draw(LOGITS) for _ in range(50)]
    assert first == [b.draw(LOGITS) for _ in range(50)]
    assert first != [c.draw(LOGITS) for _ in range(50)]


def test_the_stream_is_frozen() -> None:
    # Answers of one seed may change on purpose only.
    sampler = Sampler(Sampling(temperature=1.0, seed=12345))
    assert [sampler.draw(np.zeros(1000, np.float32)) for _ in range(6)] == [561, 630, 376, 513, 396, 525]


@given(st.integers(0, 2**64 - 1), st.integers(1, 9), st.sets(st.integers(0, 5)))
def test_forbidding_what_was_not_drawn_changes_nothing(seed: int, draws: int, forbidden: set[int]) -> None:
    """A token's noise is its own: masks, and what is batched with it, do not shift the draws of the others."""
    plain, masked = Sampler(Sampling(temperature=0.7, seed=seed)), Sampler(Sampling(temperature=0.7, seed=seed))
    for _ in range(draws):
        token = plain.draw(LOGITS)
        less = LOGITS.copy()
        less[list(forbidden - {token})] = -np.inf
        assert masked.draw(less) == token


def test_rounding_of_logits_changes_next_to_no_draw() -> None:
    rng = np.random.default_rng(1)
    changed = 0
    for seed in range(2000):
        noisy = (LOGITS + rng.uniform(-1e-4, 1e-4, len(LOGITS))).astype(np.float32)
        draws = [Sampler(Sampling(temperature=0.7, seed=seed)).draw(x) for x in (LOGITS, noisy)]
        changed += draws[0] != draws[1]
    # Two sums are closer than 1e-4 / 0.7 in about one draw of ten thousand.
    assert changed <= 3


def test_what_is_forbidden_is_never_drawn() -> None:
    assert frequencies(LOGITS, 3000, temperature=5.0)[5] == 0


def test_tokens_forty_temperatures_below_the_best_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    # With noise that favours later tokens, the last that takes part is drawn: 40 * 0.7 = 28.
    monkeypatch.setattr(Sampler, "_noise", lambda self, ids: 1000.0 * ids)
    assert Sampler(Sampling(temperature=0.7)).draw(np.array([0.0, -27.9, -28.1], np.float32)) == 1


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 1}, [4]),
        ({"top_k": 2}, [4, 1]),
        ({"top_k": 99}, [4, 1, 0, 2, 3]),
        # Probabilities at temperature 1: 4 .480, 1 .291, 0 .107, 2 .065, 3 .014 of .957.
        ({"top_p": 0.3}, [4]),
        ({"top_p": 0.6}, [4, 1]),
        ({"top_p": 0.85}, [4, 1, 0]),
        ({"min_p": 0.5}, [4, 1]),
        ({"min_p": 0.2}, [4, 1, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4]),
        ({"top_k": 3, "min_p": 0.5}, [4, 1]),
        ({"min_p": 2.0}, [4]),
    ],
    ids=str,
)
def test_truncation(sampling: dict[str, float], kept: list[int]) -> None:
    found = frequencies(LOGITS, 4000, temperature=1.0, **sampling)
    assert set(np.flatnonzero(found)) == set(kept)
    p = softmax(LOGITS, 1.0)[kept]
    np.testing.assert_allclose(found[kept], p / p.sum(), atol=0.04)


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20), st.data())
def test_log_probability_is_the_log_of_the_softmax(values: list[float], data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    token = data.draw(st.integers(0, len(values) - 1))
    exact = float(logits[token]) - math.log(math.fsum(math.exp(float(v) - float(logits.max())) for v in logits))
    assert log_probability(logits, token) == pytest.approx(exact - float(logits.max()), abs=1e-4)


def test_log_probability_of_large_logits_does_not_overflow() -> None:
    assert log_probability(np.array([1e30, 0.0], np.float32), 0) == 0.0
    assert log_probability(np.array([3e38, 3e38], np.float32), 1) == pytest.approx(-math.log(2))
