"""A cache that is too small makes answers slower, never different, and what cannot fit is said in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.mllm.base import (
    Choice,
    ChooseRequest,
    GenerateRequest,
    Generation,
    Part,
    Sampling,
    State,
    Text,
)
from hoverlens.runtime.mllm.llama_native import Context, Projector
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaState

Pictures = Sequence[NDArray[np.uint8]]
Prompt = Callable[..., list[Part]]
MakeBackend = Callable[..., LlamaCppBackend]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pool's count is exact: llama.cpp never finds the cache fuller than we think."""
    statuses: set[int] = set()
    for owner, name in ((Context, "decode"), (Projector, "decode_chunk")):
        plain = getattr(owner, name)

        def seen(*arguments: Any, plain: Any = plain) -> int:
            status = plain(*arguments)
            statuses.add(status)
            return int(status)

        monkeypatch.setattr(owner, name, seen)
    yield
    assert statuses <= {0}


OPTIONS = ("yes", "no", "a red car", "1", "12")


def open_states(backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt) -> list[State]:
    return [backend.prefix(prompt(backend.encode(p))) for p in pictures]


def close(states: Sequence[State]) -> None:
    for state in states:
        state.close()


def requests(states: Sequence[State], end: Text, each: int = 2, tokens: int = 8) -> list[GenerateRequest]:
    """Round robin over the states, every request different."""
    return [
        GenerateRequest(
            state, (Text(f" role {i} {k}"), end), max_tokens=tokens, sampling=Sampling(0.7, seed=10 * i + k)
        )
        for k in range(each)
        for i, state in enumerate(states)
    ]


def assert_same(found: Sequence[Generation], expected: Sequence[Generation]) -> None:
    """Tokens may part where the draw was close; then the sums of log-probabilities up to there say nothing."""
    agreeing = 0
    for a, b in zip(found, expected, strict=True):
        assert min(a.prefill_tokens, a.reused_tokens) >= 0
        assert a.prefill_tokens + a.reused_tokens == b.prefill_tokens + b.reused_tokens
        if a.tokens == b.tokens:
            agreeing += 1
            assert (a.finish, a.text) == (b.finish, b.text)
            assert a.logprob == pytest.approx(b.logprob, abs=0.02 * max(1, len(a.tokens)))
    assert agreeing > 0.8 * len(found)


def assert_same_choices(found: Sequence[Choice], expected: Sequence[Choice]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.index == b.index
        np.testing.assert_allclose(a.scores, b.scores, atol=0.02)


@pytest.mark.parametrize("n_sequences", [2, 3, 4])
def test_more_states_and_requests_than_sequences_give_the_same_answers(
    backend: LlamaCppBackend,
    make_backend: MakeBackend,
    pictures: Pictures,
    prompt: Prompt,
    ending: Text,
    n_sequences: int,
) -> None:
    results: list[Any] = []
    for b in (backend, make_backend(n_sequences=n_sequences)):
        states = open_states(b, pictures, prompt)
        before = b.counters.copy()
        results.append(b.generate(requests(states, ending)))
        results.append(b.choose([ChooseRequest(s, OPTIONS, (ending,)) for s in states]))
        results.append(b.counters - before)
        close(states)
    assert_same(results[3], results[0])
    assert_same_choices(results[4], results[1])
    assert results[5].evictions > 0
    assert results[2].evictions == results[2].recomputed_tokens == 0


def test_waves_evaluate_each_state_once(
    make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    """Six states, of which four sequences can hold two beside the requests: three waves, not twelve prompts."""
    backend = make_backend(n_sequences=4)
    states = open_states(backend, pictures, prompt)
    before = backend.counters.copy()
    results = backend.generate(requests(states, ending))
    used = backend.counters - before
    lost = sum(s.n_tokens for s in states)
    assert used.recomputed_tokens <= lost
    assert used.prefill_tokens == used.recomputed_tokens + sum(r.prefill_tokens for r in results)
    close(states)


def test_a_state_outlives_more_requests_than_there_are_sequences(
    make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    backend = make_backend(n_sequences=4)
    with backend.prefix(prompt(backend.encode(pictures[0]))) as state:
        before = backend.counters.copy()
        for _ in range(2):
            backend.generate(requests([state], ending, each=9, tokens=3))
        used = backend.counters - before
        assert used.recomputed_tokens == used.evictions == 0


@pytest.mark.parametrize("n_batch", [512, 24])
def test_running_requests_that_do_not_fit_together_take_turns(
    backend: LlamaCppBackend, make_backend: MakeBackend, prompt: Prompt, ending: Text, n_batch: int
) -> None:
    """One state of some 100 tokens and six answers of 50: 256 cells hold three of them."""
    results = []
    small = make_backend(n_ctx=256, n_batch=n_batch, n_sequences=8)
    assert small.capabilities.context_tokens == 256
    for b in (backend, small):
        with b.prefix(prompt(None, "\nQuestion:" + " a" * 90)) as state:
            # The end token would make some answers short.
            asked = [
                GenerateRequest(r.state, r.suffix, 50, r.sampling, grammar="root ::= [a-z ]{600}")
                for r in requests([state], ending, each=6)
            ]
            before = b.counters.copy()
            results.append(b.generate(asked))
            used = b.counters - before
    assert all(len(r.tokens) == 50 for r in results[0])
    assert used.evictions > 0
    assert used.recomputed_tokens > 0
    assert_same(results[1], results[0])


def test_where_the_end_is_known_nothing_is_put_back(make_backend: MakeBackend, prompt: Prompt, ending: Text) -> None:
    """Twenty choices of some 45 tokens beside a state of 100: they start as others end."""
    backend = make_backend(n_ctx=256)
    with backend.prefix(prompt(None, "\nQuestion:" + " a" * 80)) as state:
        asked = [ChooseRequest(state, OPTIONS, (Text(f" {i}" + " b" * 30), ending)) for i in range(20)]
        before = backend.counters.copy()
        backend.choose(asked)
        used = backend.counters - before
        assert used.evictions == used.recomputed_tokens == 0
        assert used.prefill_tokens == sum(backend.count_tokens(r.suffix) for r in asked)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_small_cache_gives_the_answers_of_a_large_one(
    backend: LlamaCppBackend, make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text, data: Any
) -> None:
    sizes = {
        "n_sequences": data.draw(st.integers(2, 6), "sequences"),
        "n_batch": data.draw(st.sampled_from([8, 30, 100, 512]), "batch"),
        "n_ctx": data.draw(st.sampled_from([256, 512]), "context"),
    }
    asked = [
        (
            data.draw(st.integers(0, 2), "state"),
            " b" * data.draw(st.integers(1, 70), "suffix"),
            data.draw(st.one_of(st.integers(1, 25), st.just(OPTIONS), st.just((" c" * 40, " d" * 30, "e"))), "what"),
        )
        for _ in range(data.draw(st.integers(1, 8), "requests"))
    ]
    keep = data.draw(st.booleans(), "keep")
    results: list[Any] = []
    for b in (backend, make_backend(**sizes)):
        states = [b.prefix(prompt(b.encode(pictures[i]), " a" * 20 * (i + 1))) for i in range(3)]
        answers = b.generate(
            [
                GenerateRequest(states[i], (Text(text), ending), max_tokens=what, keep=keep)
                for i, text, what in asked
                if isinstance(what, int)
            ]
        )
        choices = b.choose(
            [ChooseRequest(states[i], what, (Text(text), ending)) for i, text, what in asked if isinstance(what, tuple)]
        )
        results.append((answers, choices))
        close([*states, *(r.state for r in answers if r.state is not None)])
        assert (b.sequences_in_use(), b._pool.cells, b._pool.extra_cells) == (0, 0, 0)
    assert_same_choices(results[1][1], results[0][1])
    for x, y in zip(results[1][0], results[0][0], strict=True):
        assert x.prefill_tokens + x.reused_tokens == y.prefill_tokens + y.reused_tokens
        assert min(x.prefill_tokens, x.reused_tokens) >= 0
        event("tokens equal" if x.tokens == y.tokens else "tokens part")


def test_a_prompt_that_others_wait_for_may_give_its_sequence_to_another(
    backend: LlamaCppBackend, make_backend: MakeBackend, prompt: Prompt, ending: Text
) -> None:
    """Two sequences, three choices, the first and the last with one prompt: it is given up for the second's."""
    results = []
    for b in (backend, make_backend(n_sequences=2, n_ctx=256)):
        others = [b.prefix(prompt(None, f" other {i}")) for i in range(2)]
        with b.prefix(prompt(None)) as state:
            asked = [ChooseRequest(state, OPTIONS, (Text(" b" * n), ending)) for n in (1, 2, 1)]
            results.append(b.choose(asked))
        close(others)
    assert_same_choices(results[1], results[0])


def test_states_that_do_not_fit_together_are_evaluated_again(
    make_backend: MakeBackend, reference: Any, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    backend = make_backend(n_ctx=256)
    question = "\nQuestion:" + " a" * 40
    states = [backend.prefix(prompt(backend.encode(p), question)) for p in pictures]
    assert sum(s.n_tokens for s in states) > 256
    before = backend.counters.copy()
    asked = requests(states, ending, each=2, tokens=20)
    found = backend.generate(asked)
    used = backend.counters - before
    close(states)
    assert used.evictions > 0
    assert used.recomputed_tokens > 0
    compared = 0
    for i, (request, result) in enumerate(zip(asked, found, strict=True)):
        texts = [p.text for p in (*prompt(None, question), *request.suffix) if isinstance(p, Text)]
        reference.start([texts[0], pictures[i % 6], "".join(texts[1:])])
        compared += reference.follow(result.tokens, request.sampling, 0.015)
    assert compared > 0.7 * sum(len(r.tokens) for r in found)


def test_the_same_crop_in_many_suffixes_is_counted_as_often_as_it_is_there(
    backend: LlamaCppBackend, make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    """Evaluated side by side, equal content takes cells of its own; later requests share one of them."""
    results = []
    for b in (backend, make_backend(n_ctx=256, n_batch=16, n_sequences=16)):
        crop = b.encode(pictures[1])
        with b.prefix(prompt(b.encode(pictures[0]))) as state:
            asked = [
                GenerateRequest(state, (crop, Text(f" then {i}"), ending), max_tokens=4, sampling=Sampling(0.5, seed=i))
                for i in range(12)
            ]
            before = b.counters.copy()
            results.append(b.generate(asked))
            used = b.counters - before
    assert used.prefill_tokens >= 2 * crop.n_tokens
    assert used.prefill_tokens < sum(b.count_tokens(r.suffix) for r in asked)
    assert_same(results[1], results[0])


def test_kept_states_may_outnumber_the_sequences(
    backend: LlamaCppBackend, make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    results = []
    for b in (backend, make_backend(n_sequences=3)):
        with b.prefix(prompt(b.encode(pictures[0]))) as state:
            asked = [GenerateRequest(r.state, r.suffix, 5, r.sampling, keep=True) for r in requests([state], ending, 7)]
            kept = b.generate(asked)
            states = [r.state for r in kept if r.state is not None]
            assert len(states) == 7
            results.append(b.generate([GenerateRequest(s, (Text(" more"), ending), max_tokens=5) for s in states]))
            close(states)
    assert_same(results[1], results[0])


def assert_one_line(error: pytest.ExceptionInfo[HoverlensError], *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_prompt_longer_than_the_context_is_bad_input(
    make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    backend = make_backend(n_ctx=256)
    long = Text(" a" * 300)
    with pytest.raises(BadInput) as error:
        backend.prefix([long])
    assert_one_line(error, "300 tokens", "256", "n_ctx")
    with backend.prefix(prompt(None)) as state:
        fine = GenerateRequest(state, (ending,), max_tokens=2)
        expected = backend.generate([fine])
        with pytest.raises(BadInput):
            backend.generate([fine, GenerateRequest(state, (long, ending), max_tokens=2)])
        with pytest.raises(BadInput):
            backend.generate([fine, GenerateRequest(state, (long, ending), max_tokens=2, keep=True)])
        with pytest.raises(BadInput):
            backend.choose([ChooseRequest(state, ("yes", "no"), (long, ending))])
        state.append(long)
        with pytest.raises(BadInput):
            backend.generate([fine])
    with backend.prefix(prompt(None)) as state:
        assert_same(backend.generate([GenerateRequest(state, (ending,), max_tokens=2)]), expected)


def test_a_picture_larger_than_the_context_is_bad_input(make_backend: MakeBackend, prompt: Prompt) -> None:
    backend = make_backend(n_ctx=256, image_max_tokens=400)
    with pytest.raises(BadInput) as error:
        backend.prefix(prompt(backend.encode(np.zeros((640, 640, 3), np.uint8))))
    assert_one_line(error, "n_ctx")


def test_an_option_that_does_not_fit_behind_the_prompt_is_an_error(make_backend: MakeBackend, prompt: Prompt) -> None:
    backend = make_backend(n_ctx=256)
    with backend.prefix(prompt(None, " a" * 200)) as state:
        with pytest.raises(HoverlensError) as error:
            backend.choose([ChooseRequest(state, ("yes", " a" * 100), (Text(":"),))])
        assert_one_line(error, "256", "n_ctx")


def test_an_answer_ends_where_the_context_does(make_backend: MakeBackend, prompt: Prompt) -> None:
    backend = make_backend(n_ctx=256)
    with backend.prefix(prompt(None, " a" * 200)) as state:
        result = backend.generate([GenerateRequest(state, (Text(":"),), 500, grammar="root ::= [a-z ]{1500}")])[0]
        assert result.finish == "length"
        assert state.n_tokens + 1 + len(result.tokens) == 256


def test_the_longest_prompt_that_fits_is_answered(make_backend: MakeBackend) -> None:
    backend = make_backend(n_ctx=256, n_batch=64, n_sequences=2)
    with backend.prefix([Text(" a" * 254)]) as state:
        assert state.n_tokens == 254
        result = backend.generate([GenerateRequest(state, (Text("."),), max_tokens=9)])[0]
        assert result.finish in ("length", "stop")


@pytest.mark.parametrize("n_batch", [8, 13, 512])
def test_the_batch_size_changes_no_answer(
    backend: LlamaCppBackend,
    make_backend: MakeBackend,
    pictures: Pictures,
    prompt: Prompt,
    ending: Text,
    n_batch: int,
) -> None:
    results = []
    for b in (backend, make_backend(n_batch=n_batch, n_sequences=8)):
        states = open_states(b, pictures[:2], prompt)
        results.append(b.generate(requests(states, ending)))
        close(states)
    assert_same(results[1], results[0])


def test_an_evicted_state_answers_as_before(
    make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    backend = make_backend(n_sequences=2)
    first = backend.prefix(prompt(backend.encode(pictures[0])))
    request = GenerateRequest(first, (ending,), max_tokens=6)
    expected = backend.generate([request])
    with backend.prefix(prompt(backend.encode(pictures[1]))) as second:
        backend.generate([GenerateRequest(second, (ending,), max_tokens=2)])
        assert isinstance(first, LlamaState)
        assert first.seq is None
        before = backend.counters.copy()
        assert_same(backend.generate([request]), expected)
        # The system text is held by the second state too.
        shared = backend.count_tokens(prompt(None)[:1])
        assert shared <= first.n_tokens - (backend.counters - before).recomputed_tokens <= shared + 1
    first.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_ctx", 0), ("n_batch", 0), ("threads", 0), ("n_sequences", 1), ("n_sequences", 257), ("image_max_tokens", 0)],
)
def test_an_impossible_setting_is_named(make_backend: MakeBackend, name: str, value: int) -> None:
    with pytest.raises(BadInput, match=f"{name} is {value}"):
        make_backend(**{name: value})


@pytest.mark.parametrize(("n_sequences", "n_batch", "n_ctx"), [(64, 1, 4096), (256, 24, 100), (3, 7, 1)])
def test_unequal_sizes_are_made_to_fit(make_backend: MakeBackend, n_sequences: int, n_batch: int, n_ctx: int) -> None:
    """llama.cpp ends the process for a batch of fewer tokens than sequences."""
    backend = make_backend(n_sequences=n_sequences, n_batch=n_batch, n_ctx=n_ctx)
    assert backend.capabilities.context_tokens % 256 == 0
    with backend.prefix([Text("word " * 20)]) as state:
        assert state.n_tokens > 0
