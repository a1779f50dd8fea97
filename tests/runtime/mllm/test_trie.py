"""Options as a tree of tokens: their probabilities are those of decoding held to them."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.mllm.trie import Trie

END = 99
RUNS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8, unique=True)


def logits(seed: int, path: tuple[int, ...]) -> NDArray[np.float32]:
    """float32 (100,) random logits that depend on the tokens so far."""
    return np.random.default_rng([seed, zlib.crc32(repr(path).encode())]).normal(0, 3, 100).astype(np.float32)


def evaluate(trie: Trie, seed: int) -> NDArray[np.float64]:
    """What a backend does: evaluates each run, and hands over the logits that are wanted along it."""
    collected = {}
    for path, wanted in trie.runs():
        assert wanted
        assert all(0 <= n <= len(path) for n in wanted)
        collected[path] = {n: logits(seed, path[:n])[list(ids)] for n, ids in wanted.items()}
    return trie.scores(collected)


def brute_force(runs: list[tuple[int, ...]], seed: int) -> NDArray[np.float64]:
    """Log-probability of each run, one token after the other, among the runs that are still possible."""
    ended = [(*r, END) if any(o != r and o[: len(r)] == r for o in runs) else r for r in runs]
    out = []
    for run in ended:
        total = 0.0
        for n, token in enumerate(run):
            possible = sorted({o[n] for o in ended if o[:n] == run[:n] and len(o) > n})
            x = logits(seed, run[:n])[possible].astype(np.float64)
            total += float(x[possible.index(token)] - np.logaddexp.reduce(x))
        out.append(total)
    return np.array(out)


@given(RUNS, st.integers(0, 10**6))
@example([(1,), (1, 0)], 0)  # "1" and "10"
@example([(1,), (1, 0), (1, 0, 2), (3, 1)], 1)
@example([(0, 1, 2)], 2)
def test_scores_are_those_of_constrained_decoding(runs: list[tuple[int, ...]], seed: int) -> None:
    scores = evaluate(Trie(runs, END), seed)
    np.testing.assert_allclose(scores, brute_force(runs, seed), atol=1e-9)
    assert np.exp(scores).sum() == pytest.approx(1)


@given(RUNS, st.integers(0, 5))
def test_the_order_of_options_does_not_matter(runs: list[tuple[int, ...]], seed: int) -> None:
    forward = evaluate(Trie(runs, END), seed)
    backward = evaluate(Trie(runs[::-1], END), seed)
    np.testing.assert_allclose(forward, backward[::-1], atol=1e-12)


def test_scores_of_zero_to_ten_need_two_places_only() -> None:
    # "10" begins like "1": the first token, and then whether a zero or the end follows.
    runs = [(n,) for n in range(10)] + [(1, 0)]
    assert Trie(runs, END).runs() == [((1,), {0: tuple(range(10)), 1: (END, 0)})]


def test_one_run_serves_the_places_on_its_way() -> None:
    runs = [(0, 0, 0), (0, 0, 1), (0, 1), (2,)]
    assert Trie(runs, END).runs() == [((0, 0), {0: (0, 2), 1: (0, 1), 2: (0, 1)})]
    # Two branches that part further down need a run each.
    runs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [path for path, _ in Trie(runs, END).runs()] == [(0,), (1,)]


def test_a_single_option_is_certain_and_still_evaluates_the_prompt() -> None:
    trie = Trie([(5, 6)], END)
    assert trie.runs() == [((), {0: (5,)})]
    assert evaluate(trie, 0).tolist() == [0.0]


@pytest.mark.parametrize("runs", [[], [(1, 2), (1, 2)]])
def test_options_must_differ(runs: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="differ"):
        Trie(runs, END)


def test_forbidden_tokens_have_no_probability() -> None:
    trie = Trie([(0,), (1,)], END)
    scores = trie.scores({(): {0: np.array([0.0, -np.inf], np.float32)}})
    assert np.exp(scores).tolist() == [1.0, 0.0]
