"""Which option the model prefers: every score by hand from whole forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.mllm.base import ChooseRequest, Part, State, Text
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend
from hoverlens.runtime.mllm.trie import Trie

Pictures = Sequence[NDArray[np.uint8]]
Prompt = Callable[..., list[Part]]
ByHand = Callable[[Sequence[str], bool], list[list[float]]]

TOLERANCE = 0.015


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    return np.asarray(x - np.logaddexp.reduce(x))


@pytest.fixture
def by_hand(backend: LlamaCppBackend, reference: Any, pictures: Pictures, prompt: Prompt, ending: Text) -> ByHand:
    """The log-probability of every token of every option, the prompt read anew for each option."""

    def score(options: Sequence[str], end: bool) -> list[list[float]]:
        system, question = (p.text for p in prompt(None) if isinstance(p, Text))
        out = []
        for option in options:
            run = list(backend.model.tokenize(option, special=False))
            if end:
                run += backend.model.tokenize("<|im_end|>", special=True)
            reference.start([system, pictures[0], question + ending.text])
            logits, scores = reference.logits(), []
            for token in run:
                scores.append(float(log_softmax(logits)[token]))
                logits = reference.feed(token)
            out.append(scores)
        return out

    return score


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (("yes", "no"), False),
        (("a red car", "no", "two trucks on the road"), False),
        (("1", "12"), True),
        (("12", "1", "3"), True),
        (("a", "a car", "a car park"), True),
    ],
)
def test_a_score_is_the_mean_log_probability_of_the_options_tokens(
    backend: LlamaCppBackend, opened: State, ending: Text, by_hand: ByHand, options: tuple[str, ...], end: bool
) -> None:
    choice = backend.choose([ChooseRequest(opened, options, (ending,))])[0]
    expected = np.array([np.mean(s) for s in by_hand(options, end)])
    np.testing.assert_allclose(choice.scores, expected, atol=TOLERANCE)
    weights = np.exp(choice.scores)
    np.testing.assert_allclose(choice.probabilities, weights / weights.sum(), rtol=1e-9)
    assert choice.probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert choice.index == int(np.argmax(choice.scores))
    ranked = sorted(choice.scores)
    assert choice.logits_gap == pytest.approx(ranked[-1] - ranked[-2])


@pytest.mark.parametrize(
    "options", [("yes", "no"), ("1", "12", "13", "2"), tuple(str(i) for i in range(11)), ("a", "a car", "a car park")]
)
def test_a_tree_score_is_the_probability_among_the_options(
    backend: LlamaCppBackend, opened: State, ending: Text, by_hand: ByHand, options: tuple[str, ...]
) -> None:
    """At every place where options part, the softmax over the tokens that go on."""
    choice = backend.choose([ChooseRequest(opened, options, (ending,), scoring="tree")])[0]
    (end,) = backend.model.tokenize("<|im_end|>", special=True)
    runs = [backend.model.tokenize(o, special=False) for o in options]
    runs = [(*r, end) if any(o[: len(r)] == r and o != r for o in runs) else r for r in runs]
    probabilities = by_hand(options, True)  # log-probabilities over the whole vocabulary: differences are logits'
    table = {
        (*run[:n],): {r[n]: probabilities[i][n] for i, r in enumerate(runs) if r[:n] == run[:n] and len(r) > n}
        for run in runs
        for n in range(len(run))
    }
    expected = [
        sum(table[run[:n]][token] - np.logaddexp.reduce(list(table[run[:n]].values())) for n, token in enumerate(run))
        for run in runs
    ]
    np.testing.assert_allclose(choice.scores, expected, atol=len(runs) * TOLERANCE)
    assert np.exp(choice.scores).sum() == pytest.approx(1.0)
    np.testing.assert_allclose(choice.probabilities, np.exp(choice.scores), atol=1e-9)


def test_options_of_one_token_need_no_pass_of_their_own(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    options = tuple(o for o in ("yes", "no", "a", "b", "7") if len(backend.model.tokenize(o, special=False)) == 1)
    assert len(options) >= 3
    for scoring in ("mean", "tree"):
        before = backend.counters.copy()
        choice = backend.choose([ChooseRequest(opened, options, (Text(f" {scoring}"), ending), scoring=scoring)])[0]
        used = backend.counters - before
        assert used.batches == 1
        assert used.forced_tokens == used.decoded_tokens == 0
        assert choice.prefill_tokens == backend.count_tokens((Text(f" {scoring}"), ending))


def test_a_tree_evaluates_only_up_to_where_options_part(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    options = tuple(str(i) for i in range(11))  # "1" and "10" part behind the first token
    before = backend.counters.copy()
    backend.choose([ChooseRequest(opened, options, (Text(" t"), ending), scoring="tree")])
    assert (backend.counters - before).forced_tokens == 1
    before = backend.counters.copy()
    backend.choose([ChooseRequest(opened, options, (Text(" m"), ending))])
    assert (backend.counters - before).forced_tokens > 10


def test_one_option_is_certain(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    for scoring in ("mean", "tree"):
        choice = backend.choose([ChooseRequest(opened, ("a red car",), (ending,), scoring=scoring)])[0]
        assert (choice.index, list(choice.probabilities)) == (0, [1.0])
        assert choice.logits_gap == float("inf")


def test_the_first_of_equals_is_taken() -> None:
    trie = Trie([(1,), (2,)], end=9)
    scores = trie.scores({(): {0: np.zeros(2, np.float32)}})
    assert int(np.argmax(scores)) == 0


@pytest.mark.parametrize("scoring", ["mean", "tree"])
@pytest.mark.parametrize("options", [(), ("yes", "yes"), ("yes", ""), ("",)])
def test_options_that_are_missing_empty_or_equal_are_refused(
    backend: LlamaCppBackend, opened: State, ending: Text, options: tuple[str, ...], scoring: str
) -> None:
    with pytest.raises(ValueError, match="option"):
        backend.choose([ChooseRequest(opened, options, (ending,), scoring=scoring)])
    assert backend.sequences_in_use() == 1


def test_an_unknown_way_of_scoring_is_refused(backend: LlamaCppBackend, opened: State) -> None:
    with pytest.raises(ValueError, match="scoring"):
        backend.choose([ChooseRequest(opened, ("a", "b"), (Text("."),), scoring="median")])


def test_choices_in_one_batch_are_those_made_alone(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    states = [backend.prefix(prompt(backend.encode(p))) for p in pictures[:3]]
    requests = [
        ChooseRequest(state, options, (Text(f" {i}"), ending), scoring=scoring)
        for i, state in enumerate(states)
        for options in (("yes", "no"), ("1", "12", "three cars"))
        for scoring in ("mean", "tree")
    ]
    for together, request in zip(backend.choose(requests), requests, strict=True):
        alone = backend.choose([request])[0]
        np.testing.assert_allclose(together.scores, alone.scores, atol=2 * TOLERANCE)
    for state in states:
        state.close()


@pytest.mark.parametrize("scoring", ["mean", "tree"])
def test_a_choice_without_a_suffix_continues_the_state(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, ending: Text, scoring: str
) -> None:
    with backend.prefix([*prompt(backend.encode(pictures[0])), ending]) as whole:
        found = backend.choose([ChooseRequest(whole, ("yes", "no, not"), scoring=scoring)])[0]
    with backend.prefix(prompt(backend.encode(pictures[0]))) as state:
        expected = backend.choose([ChooseRequest(state, ("yes", "no, not"), (ending,), scoring=scoring)])[0]
    np.testing.assert_allclose(found.scores, expected.scores, atol=TOLERANCE)


# -- the tree alone --------------------------------------------------------------------------------------

RUNS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=7, unique=True)
END = 9


@given(RUNS, st.integers(0, 1000))
def test_a_tree_gives_every_option_its_share(runs: list[tuple[int, ...]], seed: int) -> None:
    """Against a model whose logits are a table: the product of the choices on the way, which sum to one."""

    def logits(path: tuple[int, ...]) -> NDArray[np.float32]:
        return np.random.default_rng([seed, len(path), *path]).normal(size=10).astype(np.float32)

    trie = Trie(runs, END)
    collected = {path: {n: logits(path[:n])[list(wanted)] for n, wanted in want.items()} for path, want in trie.runs()}
    scores = trie.scores(collected)
    ended = [(*r, END) if any(o[: len(r)] == r and o != r for o in runs) else r for r in runs]
    expected = []
    for run in ended:
        total = 0.0
        for n, token in enumerate(run):
            others = sorted({o[n] for o in ended if o[:n] == run[:n]})
            x = logits(run[:n]).astype(np.float64)
            total += x[token] - np.logaddexp.reduce(x[others])
        expected.append(total)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert np.exp(scores).sum() == pytest.approx(1.0)


@given(RUNS)
def test_a_tree_asks_for_nothing_twice_and_for_no_token_too_many(runs: list[tuple[int, ...]]) -> None:
    paths = [path for path, _ in Trie(runs, END).runs()]
    assert len(set(paths)) == len(paths) >= 1
    for path in paths:
        assert not any(other != path and other[: len(path)] == path for other in paths)
    assert sum(map(len, paths)) <= sum(map(len, runs))
