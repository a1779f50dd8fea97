"""llama.cpp failing, models of other kinds, and the end of a process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.errors import HoverlensError
from hoverlens.runtime.mllm.base import ChooseRequest, GenerateRequest, Part, Sampling, State, Text
from hoverlens.runtime.mllm.llama_native import DECODE_NO_SLOT, Context, Projector
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend

Pictures = Sequence[NDArray[np.uint8]]
Prompt = Callable[..., list[Part]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, int, Sequence[int]], None]:
    """Makes a native call return a status at its calls of the given numbers, without running it."""

    def fail(owner: Any, name: str, status: int, at: Sequence[int]) -> None:
        plain, calls = getattr(owner, name), [0]

        def call(*arguments: Any) -> int:
            calls[0] += 1
            return status if calls[0] in at else int(plain(*arguments))

        monkeypatch.setattr(owner, name, call)

    return fail


@pytest.mark.parametrize("status", [-1, -2, -3, 7])
@pytest.mark.parametrize("call", [1, 2])
def test_a_pass_that_fails_is_an_error_in_one_line(
    backend: LlamaCppBackend, opened: State, ending: Text, failing: Any, status: int, call: int
) -> None:
    requests = [GenerateRequest(opened, (Text(f" {i}"), ending), max_tokens=4, keep=True) for i in range(3)]
    failing(Context, "decode", status, [call])
    with pytest.raises(HoverlensError, match="failed to decode") as error:
        backend.generate(requests)
    assert "\n" not in str(error.value)
    assert backend.sequences_in_use() == 1
    assert all(r.tokens for r in backend.generate([GenerateRequest(opened, (ending,), max_tokens=3)]))


def test_a_picture_that_cannot_be_taken_is_an_error_in_one_line(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, failing: Any
) -> None:
    failing(Projector, "decode_chunk", -1, [1])
    with pytest.raises(HoverlensError, match="failed to take the image") as error:
        backend.prefix(prompt(backend.encode(pictures[0])))
    assert "\n" not in str(error.value)


def test_a_vision_encoder_that_fails_is_an_error_and_nothing_is_kept(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hoverlens.runtime.mllm import llama_native

    _, mtmd = llama_native.libraries()
    picture = np.full((64, 64, 3), 99, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(mtmd, "mtmd_encode_chunk", lambda *_: 1)
        with pytest.raises(HoverlensError, match="vision encoder failed"):
            backend.encode(picture)
    before = backend.counters.copy()
    backend.encode(picture)
    assert (backend.counters - before).encode_hits == 0


@pytest.mark.parametrize("at", [[1], [2, 3], [1, 2, 3, 4]])
def test_a_cache_that_is_full_before_its_time_changes_no_answer(
    backend: LlamaCppBackend, opened: State, ending: Text, failing: Any, at: list[int]
) -> None:
    """llama.cpp may find no room where the count says there is: one step towards room, and again."""
    requests = [GenerateRequest(opened, (Text(f" {i}"), ending), max_tokens=3) for i in range(6)]
    expected = backend.generate(requests)
    failing(Context, "decode", DECODE_NO_SLOT, at)
    found = backend.generate(requests)
    assert [r.finish for r in found] == [r.finish for r in expected]
    for a, b in zip(found, expected, strict=True):
        if a.tokens == b.tokens:
            assert a.logprob == pytest.approx(b.logprob, abs=0.05)
    assert sum(a.tokens == b.tokens for a, b in zip(found, expected, strict=True)) >= 5


def test_requests_that_never_fit_together_run_one_after_another(
    backend: LlamaCppBackend, opened: State, ending: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back, a request waits for another's end: it must not push that one out in turn, for ever."""
    requests = [GenerateRequest(opened, (Text(f" {i}"), ending), max_tokens=4) for i in range(4)]
    expected = backend.generate(requests)
    plain = Context.decode

    def decode(self: Context, tokens: Any, positions: Any, sequences: Any, *rest: Any) -> int:
        return plain(self, tokens, positions, sequences, *rest) if len(set(sequences)) == 1 else DECODE_NO_SLOT

    monkeypatch.setattr(Context, "decode", decode)
    before = backend.counters.copy()
    found = backend.generate(requests)
    used = backend.counters - before
    assert sum(a.tokens == b.tokens for a, b in zip(found, expected, strict=True)) >= 3
    assert used.batches <= 4 * 5
    assert used.evictions <= 12


@pytest.mark.parametrize("at", [[3], [4], [5], [6], [4, 5, 6], [8, 9]])
def test_what_is_put_back_is_counted_and_scored_once(
    make_backend: Callable[..., LlamaCppBackend], prompt: Prompt, ending: Text, failing: Any, at: list[int]
) -> None:
    """Long suffixes and options in small passes, so that some are put back half way."""
    backend = make_backend(n_batch=24, n_sequences=12)
    with backend.prefix(prompt(None)) as state:
        options = tuple(f"{c} " * 14 for c in "abc")
        requests = [ChooseRequest(state, options, (Text(f" {i}" + " word" * 12), ending)) for i in range(3)]
        expected = backend.choose(requests)
        failing(Context, "decode", DECODE_NO_SLOT, at)
        before = backend.counters.copy()
        found = backend.choose(requests)
        used = backend.counters - before
    assert used.evictions >= 1
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, atol=0.015)
        assert (a.prefill_tokens, a.reused_tokens) == (b.prefill_tokens, b.reused_tokens)
    assert used.forced_tokens == 3 * sum(len(backend.model.tokenize(o, special=False)) - 1 for o in options)


def test_a_prompt_that_is_put_back_half_way_is_counted_once(
    make_backend: Callable[..., LlamaCppBackend], prompt: Prompt, ending: Text, failing: Any
) -> None:
    """Two prompts of more than 24 tokens: after the second pass the second one is in the cache in part."""
    backend = make_backend(n_batch=24, n_sequences=8)
    with backend.prefix(prompt(None)) as state:
        requests = [GenerateRequest(state, (Text(f" {i}" + " a" * 30), ending), max_tokens=2) for i in range(2)]
        sizes = [backend.count_tokens(r.suffix) for r in requests]
        failing(Context, "decode", DECODE_NO_SLOT, [3])
        before = backend.counters.copy()
        found = backend.generate(requests)
        used = backend.counters - before
    assert used.evictions == 1
    assert [r.prefill_tokens for r in found] == sizes
    assert [r.reused_tokens for r in found] == [state.n_tokens] * 2
    assert used.prefill_tokens > sum(sizes)


def test_tokens_that_are_fed_again_are_counted_as_such(
    backend: LlamaCppBackend, opened: State, ending: Text, failing: Any
) -> None:
    grammar = "root ::= [a-z ]{99}"
    requests = [GenerateRequest(opened, (Text(f" {i}"), ending), max_tokens=8, grammar=grammar) for i in range(3)]
    failing(Context, "decode", DECODE_NO_SLOT, [5])
    before = backend.counters.copy()
    found = backend.generate(requests)
    used = backend.counters - before
    assert [len(r.tokens) for r in found] == [8, 8, 8]
    assert used.evictions == 1
    # The prompt's pass and three of decoding are done: three tokens are fed again, and the prompt once more.
    assert used.recomputed_tokens == 3 + backend.count_tokens(requests[2].suffix)
    assert used.decoded_tokens == 24


def test_a_picture_that_finds_no_room_is_taken_later(
    backend: LlamaCppBackend, opened: State, pictures: Pictures, ending: Text, failing: Any
) -> None:
    crop = backend.encode(pictures[1])
    requests = [ChooseRequest(opened, ("yes", "no"), (crop, Text(f" {i}"), ending)) for i in range(2)]
    expected = backend.choose(requests)
    failing(Projector, "decode_chunk", DECODE_NO_SLOT, [2])
    for a, b in zip(backend.choose(requests), expected, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, atol=0.015)


def test_a_cache_without_any_room_is_an_error_in_one_line(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, failing: Any
) -> None:
    failing(Context, "decode", DECODE_NO_SLOT, range(1, 100))
    with pytest.raises(HoverlensError, match="do not fit the KV cache") as error:
        backend.prefix(prompt(backend.encode(pictures[0])))
    assert "\n" not in str(error.value)


def test_a_model_whose_state_cannot_be_cut_gives_the_same_answers(
    backend: LlamaCppBackend,
    reference: Any,
    pictures: Pictures,
    prompt: Prompt,
    ending: Text,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recurrent models fork only from where a sequence ends; here the rule is tried on another model."""
    monkeypatch.setattr(backend.model, "recurrent", True)
    monkeypatch.setattr(backend.context, "truncate", lambda *_: False)
    copied: list[tuple[int, int]] = []
    plain = backend.context.copy_sequence

    def copy(source: int, target: int, end: int) -> None:
        tip = backend._pool.tip(source)
        assert tip is not None
        copied.append((tip.end_position, end))
        plain(source, target, end)

    monkeypatch.setattr(backend.context, "copy_sequence", copy)
    system, question = (p.text for p in prompt(None) if isinstance(p, Text))
    with backend.prefix(prompt(backend.encode(pictures[0]))) as state:
        samplings = [Sampling(0.9, seed=i) for i in range(4)]
        requests = [GenerateRequest(state, (Text(" a"), ending), max_tokens=6, sampling=s) for s in samplings]
        for sampling, result in zip(samplings, backend.generate(requests), strict=True):
            reference.start([system, pictures[0], question + " a" + ending.text])
            reference.follow(result.tokens, sampling, 0.015)
        choice = backend.choose([ChooseRequest(state, ("yes", "no, not", "12", "1"), (ending,))])[0]
        assert choice.probabilities.sum() == pytest.approx(1.0)
        alone = backend.generate([GenerateRequest(state, max_tokens=2)])[0]
        assert len(alone.tokens) <= 2
    assert copied
    assert all(tip == end for tip, end in copied)


def test_a_model_that_begins_with_a_token_of_its_own_gets_it_once(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bos,) = backend.model.tokenize("<|endoftext|>", special=True)
    monkeypatch.setattr(backend.model, "add_bos", True)
    monkeypatch.setattr(backend.model, "bos", bos)

    def read(*parts: Part) -> list[int]:
        node = backend.extend(backend._root, parts)
        return [t for n in node.path() for t in n.item.tokens]  # type: ignore[union-attr]

    plain = list(backend.model.tokenize("text", special=False))
    assert read(Text("text")) == [bos, *plain]
    assert read(Text("<|endoftext|>text", trusted=True)) == [bos, *plain]
    assert read(Text("<|endoftext|>text"))[0] == bos
    assert bos not in read(Text("<|endoftext|>text"))[1:]
    assert read() == []
    with backend.prefix([Text("text")]) as state:
        assert state.n_tokens == 1 + len(plain)
        with state.fork() as branch:
            branch.append(Text("text"))
            assert branch.n_tokens == 1 + 2 * len(plain)


def test_a_process_ends_quietly_with_everything_open(tiny_bundle: Any) -> None:
    program = f"""
        from hoverlens.runtime.mllm.base import GenerateRequest, Text
        from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions

        backend = LlamaCppBackend({str(tiny_bundle.need("mllm"))!r}, None, LlamaOptions(n_ctx=256, threads=1), "x")
        states = [backend.prefix([Text("text")])]
        states += [states[0].fork() for _ in range(3)]
        for state in states:
            state.append(Text(" more"))
        kept = backend.generate([GenerateRequest(s, (Text("."),), max_tokens=2, keep=True) for s in states])
        print(backend.sequences_in_use() > 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")
