"""What a request for text gives back: where it ends, what it may not contain, how it goes on."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.mllm.base import Backend, ChooseRequest, GenerateRequest, Part, Sampling, State, Text
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, whole_characters

Pictures = Sequence[NDArray[np.uint8]]
Prompt = Callable[..., list[Part]]
Bias = Callable[[Mapping[int, float]], None]


@pytest.fixture
def bias(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> Bias:
    """Adds to the model's logits, so that it wants what a test says."""

    def add(extra: Mapping[int, float]) -> None:
        plain = backend.context.logits

        def logits(index: int) -> NDArray[np.float32]:
            out = plain(index)
            for token, value in extra.items():
                out[token] += value
            return out

        monkeypatch.setattr(backend.context, "logits", logits)

    return add


def special(backend: LlamaCppBackend, text: str) -> int:
    (token,) = backend.model.tokenize(text, special=True)
    return token


def one(backend: Backend, state: State, **request: Any) -> Any:
    return backend.generate([GenerateRequest(state, **request)])[0]


# -- going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_kept_state_goes_on_like_the_whole_prompt(
    backend: LlamaCppBackend,
    reference: Any,
    opened: State,
    pictures: Pictures,
    prompt: Prompt,
    ending: Text,
    logits_after: Any,
    max_tokens: int,
) -> None:
    result = one(backend, opened, suffix=(ending,), max_tokens=max_tokens, keep=True)
    before = backend.counters.copy()
    with result.state as state:
        assert state.n_tokens == opened.n_tokens + backend.count_tokens((ending,)) + len(result.tokens)
        found = logits_after(backend, state, (Text(" more"), ending))
    # Only the token drawn last was not in the cache.
    new = backend.count_tokens((Text(" more"), ending)) + 1
    assert (backend.counters - before).prefill_tokens == new
    system, question = (p.text for p in prompt(None) if isinstance(p, Text))
    reference.start([system, pictures[0], question + ending.text])
    model = backend.model
    for token in (*result.tokens, *model.tokenize(" more", False), *model.tokenize(ending.text, True)):
        expected = reference.feed(token)
    assert np.abs(found - expected).max() < 0.015


def test_a_kept_state_after_no_tokens_is_the_prompt(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    result = one(backend, opened, suffix=(ending,), max_tokens=0, keep=True)
    assert (result.text, result.tokens, result.finish, result.logprob) == ("", (), "length", 0.0)
    with result.state as state:
        assert state.n_tokens == opened.n_tokens + backend.count_tokens((ending,))
        again = one(backend, state, max_tokens=3)
    assert again.tokens == one(backend, opened, suffix=(ending,), max_tokens=3).tokens


def test_siblings_that_are_kept_go_on_by_themselves(
    backend: LlamaCppBackend, reference: Any, opened: State, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    kept = backend.generate(
        [GenerateRequest(opened, (ending,), max_tokens=4, sampling=Sampling(1.0, seed=i), keep=True) for i in range(4)]
    )
    states = [r.state for r in kept if r.state is not None]
    assert len({r.tokens for r in kept}) > 1
    suffix = (Text(" more"), ending)
    together = backend.generate([GenerateRequest(s, suffix, max_tokens=4) for s in states])
    for state in states:
        state.close()
    model = backend.model
    system, question = (p.text for p in prompt(None) if isinstance(p, Text))
    compared = 0
    for first, result in zip(kept, together, strict=True):
        reference.start([system, pictures[0], question + ending.text])
        for token in (*first.tokens, *model.tokenize(" more", False), *model.tokenize(ending.text, True)):
            reference.feed(token)
        compared += reference.follow(result.tokens, Sampling(), 0.015)
    assert compared > 8


def test_a_state_is_not_changed_by_what_is_asked_of_it(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    before = opened.key, opened.n_tokens
    first = one(backend, opened, suffix=(ending,), max_tokens=5)
    backend.choose([ChooseRequest(opened, ("yes", "no"), (ending,))])
    assert (opened.key, opened.n_tokens) == before
    assert one(backend, opened, suffix=(ending,), max_tokens=5) == first


def test_nothing_asked_nothing_answered(backend: LlamaCppBackend) -> None:
    assert backend.generate([]) == []
    assert backend.choose([]) == []


# -- where it ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [-1, 0, 1, 2, 7])
def test_the_text_is_cut_at_the_limit(backend: LlamaCppBackend, opened: State, ending: Text, max_tokens: int) -> None:
    result = one(backend, opened, suffix=(ending,), max_tokens=max_tokens, grammar="root ::= [a-z ]{200}")
    assert len(result.tokens) == max(0, max_tokens)
    assert result.finish == "length"
    assert result.text == b"".join(map(backend.model.piece, result.tokens)).decode()


def test_the_end_token_stops_and_is_no_part_of_the_answer(
    backend: LlamaCppBackend, opened: State, ending: Text, bias: Bias
) -> None:
    bias({special(backend, "<|im_end|>"): 1000.0})
    before = backend.counters.copy()
    result = one(backend, opened, suffix=(ending,))
    assert (result.text, result.tokens, result.finish, result.logprob) == ("", (), "stop", 0.0)
    assert (backend.counters - before).decoded_tokens == 1


def test_a_stop_string_is_found_across_tokens_and_cut(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    grammar = "root ::= [a-z ]{200}"
    whole = one(backend, opened, suffix=(ending,), max_tokens=30, grammar=grammar)
    pieces = [backend.model.piece(t).decode() for t in whole.tokens]
    spans = [
        (i, stop)
        for i in range(1, len(pieces))
        if len(stop := pieces[i - 1][-2:] + pieces[i][:2]) >= 3 and whole.text.count(stop) == 1
    ]
    assert spans, "the text must have a string over two tokens that comes once"
    i, stop = spans[0]
    result = one(backend, opened, suffix=(ending,), max_tokens=30, grammar=grammar, stop=("never seen", stop))
    assert result.text == whole.text[: whole.text.index(stop)]
    assert (result.finish, len(result.tokens)) == ("stop", i + 1)


def test_of_two_stop_strings_the_earlier_cuts(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    grammar = 'root ::= "abcdefghij"'
    for stop in (("ef", "cdefg", "h"), ("cdefg", "ef"), ("h", "cdefg", "ef")):
        result = one(backend, opened, suffix=(ending,), grammar=grammar, stop=stop)
        assert result.finish == "stop"
        cuts = [i for s in stop if (i := "abcdefghij".find(s)) >= 0]
        assert result.text in {"abcdefghij"[:i] for i in cuts}
        assert not any(s in result.text for s in stop)


def test_an_empty_stop_string_is_refused(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    with pytest.raises(ValueError, match="stop"):
        one(backend, opened, suffix=(ending,), stop=("",))


# -- what it may contain -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_grammar_is_kept_to_its_end(
    backend: LlamaCppBackend, opened: State, ending: Text, temperature: float
) -> None:
    grammar = 'root ::= "<0." [0-9]{3} ">" ("yes" | "no")'
    for seed in range(4):
        result = one(
            backend, opened, suffix=(ending,), grammar=grammar, sampling=Sampling(temperature, seed=seed), max_tokens=40
        )
        assert re.fullmatch(r"<0\.\d{3}>(yes|no)", result.text)
        assert result.finish == "stop"


def test_a_grammar_holds_a_model_that_wants_to_end_at_once(
    backend: LlamaCppBackend, opened: State, ending: Text, bias: Bias
) -> None:
    bias({special(backend, "<|im_end|>"): 1000.0, special(backend, "<|endoftext|>"): 900.0})
    result = one(backend, opened, suffix=(ending,), grammar='root ::= "{" [a-z]+ "}"')
    assert re.fullmatch(r"\{[a-z]+\}", result.text)
    assert result.finish == "stop"


def test_a_complete_grammar_stops_a_model_that_has_no_end_token(
    backend: LlamaCppBackend, opened: State, ending: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend._engine, "forbidden", backend._engine.forbidden | backend.model.eog)
    result = one(backend, opened, suffix=(ending,), grammar='root ::= "done"')
    assert (result.text, result.finish) == ("done", "stop")


def test_a_grammar_that_ends_with_the_limit_is_cut(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    result = one(backend, opened, suffix=(ending,), grammar='root ::= "abcdefghijklmnop"', max_tokens=2)
    assert (result.finish, len(result.tokens)) == ("length", 2)
    assert "abcdefghijklmnop".startswith(result.text)


@pytest.mark.parametrize(
    "grammar",
    ["root ::= missing", 'other ::= "x"', "root ::= (", "root", " ", "root ::= root 'x'", "\x00"],
)
def test_a_grammar_that_does_not_parse_is_bad_input(
    backend: LlamaCppBackend, opened: State, ending: Text, grammar: str
) -> None:
    fine = GenerateRequest(opened, (ending,), max_tokens=2, keep=True)
    with pytest.raises(BadInput, match="grammar") as error:
        backend.generate([fine, GenerateRequest(opened, (ending,), grammar=grammar)])
    assert "\n" not in str(error.value)
    assert backend.sequences_in_use() == 1


def test_log_probabilities_are_the_models_own_whatever_a_grammar_forbids(
    backend: LlamaCppBackend, opened: State, ending: Text, logits_after: Any
) -> None:
    result = one(backend, opened, suffix=(ending,), grammar='root ::= "x"', max_tokens=1)
    logits = logits_after(backend, opened, (ending,)).astype(np.float64)
    assert result.logprob == pytest.approx(logits[result.tokens[0]] - np.logaddexp.reduce(logits), abs=1e-3)


def test_control_tokens_are_never_drawn(backend: LlamaCppBackend, opened: State, ending: Text, bias: Bias) -> None:
    wanted = [t for t in np.flatnonzero(backend.model.control) if not backend.model.eog[t]]
    assert len(wanted) >= 10
    bias({int(t): 1000.0 for t in wanted})
    for sampling in (Sampling(), Sampling(1.0, seed=1)):
        result = one(backend, opened, suffix=(ending,), max_tokens=5, sampling=sampling)
        assert not any(backend.model.control[t] for t in result.tokens)
        assert "<|" not in result.text


def test_characters_of_several_tokens_come_out_whole(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    text = "é漢🚁ß"
    result = one(backend, opened, suffix=(ending,), grammar=f'root ::= "{text}"')
    assert len(result.tokens) > len(text)
    assert result.text == text
    for n in range(1, len(result.tokens)):
        cut = one(backend, opened, suffix=(ending,), grammar=f'root ::= "{text}"', max_tokens=n)
        assert text.startswith(cut.text), "a character that is cut short is left out"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        ("plain é漢".encode(), "plain é漢"),
        ("x漢".encode()[:-1], "x"),
        ("x🚁".encode()[:-3], "x"),
        (b"\xffx", "\ufffdx"),
        (b"\xe6\xbcx", "\ufffdx"),
    ],
)
def test_bytes_become_whole_characters(data: bytes, text: str) -> None:
    assert whole_characters(data) == text


# -- what cannot be answered ---------------------------------------------------------------------------


def test_numbers_that_are_none_are_an_error(
    backend: LlamaCppBackend, opened: State, ending: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hoverlens.runtime.mllm import llama_native

    broken = np.full(backend.model.n_vocab, np.nan, np.float32)
    lib, _ = llama_native.libraries()
    pointer = broken.ctypes.data_as(type(lib.llama_get_logits_ith(backend.context.ptr, 0)))
    for call in (
        lambda: one(backend, opened, suffix=(Text(" x"), ending), max_tokens=2, keep=True),
        lambda: backend.choose([ChooseRequest(opened, ("yes", "no, not"), (Text(" x"), ending))]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(lib, "llama_get_logits_ith", lambda *_: pointer)
            with pytest.raises(HoverlensError, match="no numbers") as error:
                call()
            assert "\n" not in str(error.value)
        assert backend.sequences_in_use() == 1
    assert one(backend, opened, suffix=(Text(" x"), ending), max_tokens=2).tokens


def test_features_that_are_no_numbers_are_an_error(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoverlens.runtime.mllm import llama_native

    _, mtmd = llama_native.libraries()
    broken = np.full(1 << 20, np.inf, np.float32)
    monkeypatch.setattr(mtmd, "mtmd_get_output_embd", lambda _: ctypes.c_void_p(broken.ctypes.data))
    kept = len(backend._features)
    with pytest.raises(HoverlensError, match="no numbers"):
        backend.encode(np.full((64, 64, 3), 77, np.uint8))
    assert len(backend._features) == kept


def test_an_empty_prompt_and_one_that_ends_with_an_image_are_refused(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt
) -> None:
    with backend.prefix([]) as empty, pytest.raises(ValueError, match="empty"):
        one(backend, empty)
    with backend.prefix([Text("")]) as empty, pytest.raises(ValueError, match="empty"):
        one(backend, empty, suffix=(Text(""),))
    features = backend.encode(pictures[0])
    inner = prompt(features)[:-1]
    with backend.prefix([*inner, Text(".")]) as state:
        with pytest.raises(ValueError, match="end with text"):
            one(backend, state, suffix=(dataless(features),))
        assert one(backend, state, suffix=(dataless(features), Text(".")), max_tokens=1).finish


def dataless(features: Any) -> Any:
    """Features whose layout ends with the image itself, as some models have it."""
    from dataclasses import replace

    return replace(features, handle=[c for c in features.handle if c.tokens is None])


def test_states_of_others_and_closed_ones_are_refused(
    backend: LlamaCppBackend, naive: LlamaCppBackend, ending: Text
) -> None:
    with naive.prefix([Text("text")]) as foreign, pytest.raises(ValueError, match="another backend"):
        one(backend, foreign, suffix=(ending,))
    state = backend.prefix([Text("text")])
    state.close()
    state.close()
    with pytest.raises(ValueError, match="closed"):
        one(backend, state, suffix=(ending,))
    with pytest.raises(ValueError, match="closed"):
        state.fork()
    with pytest.raises(ValueError, match="closed"):
        state.append(Text("more"))


def test_a_closed_backend_says_so(make_backend: Callable[..., LlamaCppBackend], pictures: Pictures) -> None:
    backend = make_backend(n_ctx=256)
    state = backend.prefix([Text("text")])
    backend.close()
    backend.close()
    with pytest.raises(HoverlensError, match="closed"):
        backend.prefix([Text("text")])
    with pytest.raises(HoverlensError, match="closed"):
        one(backend, state, suffix=(Text("x"),))
    with pytest.raises(HoverlensError, match="closed"):
        backend.encode(pictures[0])
    state.close()


def test_a_model_without_a_projector_reads_text_and_says_that_it_cannot_see(
    tiny_bundle: Any, pictures: Pictures
) -> None:
    from hoverlens.runtime.mllm.llamacpp import LlamaOptions

    with LlamaCppBackend(tiny_bundle.need("mllm"), None, LlamaOptions(n_ctx=256, threads=1), "x") as backend:
        with backend.prefix([Text("text")]) as state:
            assert len(one(backend, state, suffix=(Text("x"),), max_tokens=2, grammar="root ::= [a-z]{9}").tokens) == 2
        with pytest.raises(BadInput, match="mmproj"):
            backend.encode(pictures[0])


@pytest.mark.parametrize("role", ["mllm", "mmproj"])
def test_a_file_that_is_missing_or_no_model_is_bad_input(tiny_bundle: Any, tmp_path: Any, role: str) -> None:
    good = {"mllm": tiny_bundle.need("mllm"), "mmproj": tiny_bundle.need("mmproj")}
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + b"\xff" * 64)
    swapped = good["mmproj" if role == "mllm" else "mllm"]
    for path, words in ((tmp_path / "none.gguf", "no such"), (junk, "junk.gguf"), (swapped, swapped.name)):
        with pytest.raises(BadInput, match=words) as error:
            LlamaCppBackend(**{**good, role: path}, identity="x")
        assert "\n" not in str(error.value)
