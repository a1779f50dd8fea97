"""Drawing tokens: the right distribution, the right tokens left out, and the same draw for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.mllm import sampling as module
from hoverlens.runtime.mllm.base import Sampling
from hoverlens.runtime.mllm.sampling import Sampler, log_probability

LOGITS = np.array([2.0, -1.0, 0.5, 1.5, -np.inf, 0.0, 2.5], np.float32)


def softmax(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    x = logits.astype(np.float64) / temperature
    w = np.exp(x - x.max())
    return np.asarray(w / w.sum())


def frequencies(sampling: Sampling, logits: NDArray[np.float32], n: int) -> NDArray[np.float64]:
    sampler = Sampler(sampling)
    return np.bincount([sampler.draw(logits) for _ in range(n)], minlength=len(logits)) / n


def chi_square(found: NDArray[np.float64], expected: NDArray[np.float64], n: int) -> float:
    used = expected > 0
    assert not found[~used].any()
    return float(n * ((found - expected)[used] ** 2 / expected[used]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_draws_follow_the_softmax(temperature: float, seed: int) -> None:
    n = 8000
    found = frequencies(Sampling(temperature, seed=seed), LOGITS, n)
    # 5 degrees of freedom: above 25.7 once in 10,000.
    assert chi_square(found, softmax(LOGITS, temperature), n) < 25.7


def test_first_draws_of_different_seeds_follow_the_softmax_too() -> None:
    n = 8000
    first = [Sampler(Sampling(1.0, seed=seed)).draw(LOGITS) for seed in range(n)]
    found = np.bincount(first, minlength=len(LOGITS)) / n
    assert chi_square(found, softmax(LOGITS), n) < 25.7


def test_consecutive_draws_are_independent() -> None:
    n = 10000
    sampler = Sampler(Sampling(1.0, seed=4))
    flat = np.zeros(4, np.float32)
    drawn = np.array([sampler.draw(flat) for _ in range(n)])
    pairs = np.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16) / (n - 1)
    assert chi_square(pairs, np.full(16, 1 / 16), n - 1) < 44.3  # 15 degrees of freedom, once in 10,000


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(1.0, top_k=1), {6}),
        (Sampling(1.0, top_k=3), {6, 0, 3}),
        (Sampling(1.0, top_k=99), {0, 1, 2, 3, 5, 6}),
        (Sampling(1.0, top_p=0.0), {6}),
        (Sampling(1.0, top_p=0.40), {6}),
        (Sampling(1.0, top_p=0.46), {6, 0}),
        (Sampling(1.0, top_p=0.999), {0, 1, 2, 3, 5, 6}),
        (Sampling(1.0, min_p=1.0), {6}),
        (Sampling(1.0, min_p=0.3), {6, 0, 3}),
        (Sampling(1.0, min_p=0.9, top_k=5, top_p=0.99), {6}),
        (Sampling(1.0, top_k=2, top_p=0.99), {6, 0}),
    ],
)
def test_only_what_the_limits_leave_is_drawn(sampling: Sampling, left: set[int]) -> None:
    """Falling probabilities: 6: .45, 0: .27, 3: .17, 2: .06, 5: .04, 1: .01."""
    assert set(np.flatnonzero(frequencies(sampling, LOGITS, 3000))) == left


def test_what_is_left_keeps_its_proportions() -> None:
    n = 8000
    kept = np.where(np.isin(np.arange(7), (6, 0, 3)), LOGITS, -np.inf).astype(np.float32)
    assert chi_square(frequencies(Sampling(1.0, top_k=3, seed=8), LOGITS, n), softmax(kept), n) < 18.4


def test_of_equal_tokens_exactly_k_are_left() -> None:
    flat = np.zeros(10, np.float32)
    assert set(np.flatnonzero(frequencies(Sampling(1.0, top_k=3), flat, 2000))) == {0, 1, 2}


def test_temperature_zero_is_the_best_token_and_the_first_of_equals() -> None:
    assert Sampler(Sampling()).draw(LOGITS) == 6
    assert Sampler(Sampling(temperature=-1.0)).draw(LOGITS) == 6
    assert Sampler(Sampling()).draw(np.array([1, 3, 3], np.float32)) == 1


FLOATS = st.floats(-50, 50, width=32)


@given(
    st.lists(st.one_of(FLOATS, st.just(-np.inf)), min_size=1, max_size=30),
    st.floats(0, 5, allow_subnormal=False),
    st.integers(0, 10),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(-(2**63), 2**64),
)
def test_a_forbidden_token_is_never_drawn(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.array([*values, 0.0], np.float32)
    sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, seed))
    for _ in range(5):
        assert np.isfinite(logits[sampler.draw(logits)])


@given(st.integers(0, 2**64 - 1), st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_draw_depends_on_its_number_and_not_on_earlier_logits(seed: int, earlier: list[list[float]]) -> None:
    """Two runs stay in step whatever they drew before, and however."""
    a, b = Sampler(Sampling(1.0, seed=seed)), Sampler(Sampling(1.0, seed=seed))
    for logits in earlier:
        a.draw(np.array(logits, np.float32))
        b.draw(np.zeros(5, np.float32))
    final = np.zeros(40, np.float32)
    assert a.draw(final) == b.draw(final)


def test_the_same_seed_repeats_and_another_does_not() -> None:
    flat = np.zeros(1000, np.float32)

    def run(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler.draw(flat) for _ in range(8)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert len(set(run(5))) > 6


def test_draws_change_only_on_purpose() -> None:
    """Frozen, since a seed stands for an answer that somebody may have written down."""
    sampler = Sampler(Sampling(1.0, seed=1))
    assert [sampler.draw(np.zeros(1000, np.float32)) for _ in range(5)] == [969, 626, 777, 428, 672]


def test_rounding_of_the_logits_rarely_changes_a_draw() -> None:
    rng = np.random.default_rng(3)
    changed = 0
    for seed in range(300):
        logits = rng.normal(scale=2.5, size=2000).astype(np.float32)
        other = logits + rng.normal(scale=1e-3, size=2000).astype(np.float32)
        sampling = Sampling(0.8, seed=seed)
        changed += Sampler(sampling).draw(logits) != Sampler(sampling).draw(other)
    assert changed <= 3


def test_noise_is_finite_at_the_ends_of_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(module, "_mix", lambda x, bits=bits: np.full(np.shape(x), bits, np.uint64))
        assert np.isfinite(Sampler(Sampling(1.0))._noise(np.arange(3))).all()


@given(st.lists(FLOATS, min_size=1, max_size=20), st.data())
def test_log_probability_is_the_log_of_the_softmax(values: list[float], data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    token = data.draw(st.integers(0, len(values) - 1))
    x = logits.astype(np.float64)
    assert log_probability(logits, token) == pytest.approx(x[token] - np.logaddexp.reduce(x), abs=1e-4)
