"""Forms: fixed parts are given, slots are filled, and what is in the cache is what was said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.mllm.base import GenerateRequest, Sampling, State, Text
from hoverlens.runtime.mllm.forms import Form, Free, Held, Literal, Pick, Piece, sequence
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend
from hoverlens.runtime.mllm.slots import Filler

END, CONTROL = 256, 257


class Bytes:
    """A vocabulary of all bytes, an end token, a control token, and some longer tokens."""

    def __init__(self, longer: Sequence[bytes] = ()) -> None:
        self._pieces = [bytes([i]) for i in range(256)] + [b"", b""] + sorted(set(longer))
        self.eog = np.arange(len(self._pieces)) == END
        self.forbidden = np.arange(len(self._pieces)) == CONTROL

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def tokenize(self, text: str, special: bool) -> tuple[int, ...]:
        data, out = text.encode(), []
        while data:
            token = max(
                (i for i, p in enumerate(self._pieces) if p and data.startswith(p)), key=lambda i: len(self._pieces[i])
            )
            out.append(token)
            data = data[len(self._pieces[token]) :]
        return tuple(out)

    def tokens_spelling(self, data: bytes) -> list[int]:
        return [i for i, p in enumerate(self._pieces) if p == data and i not in (END, CONTROL)]


class OneOf:
    """A grammar of some byte strings."""

    open = 0

    def __init__(self, source: str, vocabulary: Bytes) -> None:
        self._left = [s.encode() for s in source.split("|")]
        self._vocabulary = vocabulary
        OneOf.open += 1

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        allowed = [
            (t == END and b"" in self._left)
            or (bool(p := self._vocabulary.piece(t)) and any(s.startswith(p) for s in self._left))
            for t in range(len(logits))
        ]
        return np.where(allowed, logits, -np.inf).astype(np.float32)

    def accept(self, token: int) -> None:
        piece = self._vocabulary.piece(token)
        self._left = [s[len(piece) :] for s in self._left if s.startswith(piece)]

    def close(self) -> None:
        OneOf.open -= 1


def filler(form: Form, vocabulary: Bytes, sampling: Sampling = Sampling()) -> Filler:  # noqa: B008 - frozen
    return Filler(form, vocabulary, vocabulary.forbidden, sampling, lambda source: OneOf(source, vocabulary))


def fill(form: Form, vocabulary: Bytes, say: Callable[[bytes], NDArray[np.float32]], limit: int = 300) -> Filler:
    """Fills a form with what ``say`` wants after the text so far; the cache must always be the text."""
    one = filler(form, vocabulary)
    cache = one.start()
    for _ in range(limit):
        assert b"".join(map(vocabulary.piece, cache)) == bytes(one.text)
        if one.done:
            return one
        cache += one.draw(say(bytes(one.text)))
    one.close()
    pytest.fail("the form did not end")


def wants(vocabulary: Bytes, *script: bytes) -> Callable[[bytes], NDArray[np.float32]]:
    """A model that goes on with the first script that the text has begun, byte by byte, and then ends."""

    def say(text: bytes) -> NDArray[np.float32]:
        logits = np.zeros(len(vocabulary.eog), np.float32)
        logits[END] = 25.0
        for whole in script:
            if whole.startswith(text) and len(whole) > len(text):
                logits[whole[len(text)]] = 50.0
                break
        return logits

    return say


QUOTE = Free("said", 30)


def test_a_form_is_filled_in_order_and_its_values_are_read() -> None:
    vocabulary = Bytes()

    def form() -> Generator[Piece, str, None]:
        yield Literal('{"action": "')
        action = yield Pick("action", ("zoom", "finish"))
        if action == "zoom":
            yield Literal(', "where": "')
            yield Held("where", "left|right", 20)
            yield Literal('", "why": "')
            yield QUOTE
        yield Literal("}")

    text = '{"action": "zoom", "where": "right", "why": "to see"}'
    found = fill(form, vocabulary, wants(vocabulary, text.encode()))
    assert bytes(found.text).decode() == text
    assert found.slots == {"action": "zoom", "where": "right", "said": "to see"}
    short = fill(form, vocabulary, wants(vocabulary, b'{"action": "finish"}'))
    assert bytes(short.text) == b'{"action": "finish"}'
    assert short.slots == {"action": "finish"}


def test_given_tokens_are_not_drawn() -> None:
    vocabulary = Bytes([b'{"action": "', b"zoom", b'"}'])
    form = sequence(Literal('{"action": "'), Pick("action", ("zoom",)), Literal("}"))
    one = filler(form, vocabulary)
    assert len(one.start()) == one.forced == 4
    assert (one.done, one.drawn, one.slots, one.probabilities) == (True, 0, {"action": "zoom"}, {"action": 1.0})


def test_a_decided_pick_is_given_to_its_end() -> None:
    """After the first letter nothing is left to decide."""
    vocabulary = Bytes()
    one = filler(sequence(Pick("a", ("yes", "no", "maybe")), Literal("!")), vocabulary)
    assert one.start() == []
    logits = np.zeros(258, np.float32)
    logits[ord("m")] = 9.0
    assert bytes(one.draw(logits)) == b'maybe"!'
    assert (one.done, one.drawn, one.forced) == (True, 1, 6)


def test_the_probability_of_a_pick_is_that_of_its_decisions() -> None:
    vocabulary = Bytes([b"on", b"tw"])
    one = filler(sequence(Pick("a", ("one", "two", "ten"))), vocabulary)
    one.start()
    logits = np.full(len(vocabulary.eog), 5.0, np.float32)
    p = {"o": 0.1, "on": 0.2, "t": 0.6, "tw": 0.1}
    for text, probability in p.items():
        logits[vocabulary.tokens_spelling(text.encode())[0]] = np.log(probability)
    one.draw(logits)
    assert bytes(one.text) == b"t"
    logits[ord("w")], logits[ord("e")] = np.log(0.25), np.log(0.75)
    one.draw(logits)
    assert one.slots == {"a": "ten"}
    # "tw" begins with "t" too, so all of its mass went the same way at the first decision.
    assert one.probabilities["a"] == pytest.approx(0.7 * 0.75)


@pytest.mark.parametrize("first", ["1", "10"])
def test_an_option_that_begins_another_can_win_and_lose(first: str) -> None:
    vocabulary = Bytes([b"10"])
    found = fill(sequence(Pick("n", ("1", "10", "2"))), vocabulary, wants(vocabulary, f'{first}"'.encode()))
    assert found.slots == {"n": first}
    assert bytes(found.text).decode() == f'{first}"'


@pytest.mark.parametrize("options", [(), ("a", "a")])
def test_options_of_a_pick_must_differ(options: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="distinct"):
        filler(sequence(Pick("a", options)), Bytes()).start()


def test_free_text_ends_at_its_end_at_the_limit_or_with_the_model() -> None:
    vocabulary = Bytes()
    form = sequence(Free("a", 4), Literal("!"))
    assert fill(form, vocabulary, wants(vocabulary, b'ab"')).slots == {"a": "ab"}
    assert fill(form, vocabulary, wants(vocabulary, b"abcdefgh")).slots == {"a": "abcd"}
    for text in (b'ab"', b"abcdefgh", b"ab"):
        assert bytes(fill(form, vocabulary, wants(vocabulary, text)).text).endswith(b'"!')
    assert fill(form, vocabulary, wants(vocabulary, b"")).slots == {"a": ""}


def test_a_token_over_the_end_of_free_text_counts_only_up_to_it() -> None:
    vocabulary = Bytes([b'b"}x', b">>y"])

    def say(token: bytes) -> Callable[[bytes], NDArray[np.float32]]:
        def logits(text: bytes) -> NDArray[np.float32]:
            out = np.zeros(len(vocabulary.eog), np.float32)
            out[vocabulary.tokens_spelling(token)[0] if text.endswith(b"a") else ord("a")] = 9.0
            return out

        return logits

    found = fill(sequence(Free("s", 9), Literal("!")), vocabulary, say(b'b"}x'))
    assert (found.slots, bytes(found.text)) == ({"s": "ab"}, b'ab"!')
    found = fill(sequence(Free("s", 9, end="a>>"), Literal("!")), vocabulary, say(b">>y"))
    assert (found.slots, bytes(found.text)) == ({"s": ""}, b"a>>!")


def test_a_held_slot_ends_with_its_grammar_and_closes_it() -> None:
    vocabulary = Bytes()
    before = OneOf.open
    form = sequence(Held("a", "up|upper", 9), Held("b", "x", 9), Pick("c", ("l", "r")))
    found = fill(form, vocabulary, wants(vocabulary, b'upxr"'))
    assert (found.slots, bytes(found.text)) == ({"a": "up", "b": "x", "c": "r"}, b'upxr"')
    assert OneOf.open == before
    cut = filler(form, vocabulary)
    cut.start()
    cut.close()
    assert OneOf.open == before


TEXTS = st.text(st.sampled_from('ab"é🚁'), max_size=4)
NAMES = st.sampled_from("stuv")


@st.composite
def forms(draw: st.DrawFn) -> list[Piece]:
    pieces: list[Piece] = []
    for i in range(draw(st.integers(1, 5))):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            pieces.append(Literal(draw(TEXTS)))
        elif kind == 1:
            options = draw(st.lists(TEXTS.filter(bool), min_size=1, max_size=4, unique=True))
            pieces.append(Pick(f"p{i}", tuple(options), draw(st.sampled_from(['"', ",", "|>"]))))
        elif kind == 2:
            pieces.append(Free(f"f{i}", draw(st.integers(1, 6)), draw(st.sampled_from(['"', "ab", "é"]))))
        else:
            sources = draw(st.lists(TEXTS.filter(bool), min_size=1, max_size=3, unique=True))
            pieces.append(Held(f"h{i}", "|".join(sources), 40))
    return pieces


@given(
    forms(),
    st.lists(st.text(st.sampled_from('ab"é🚁,|>'), min_size=1, max_size=3).map(str.encode), max_size=6),
    st.integers(0, 2**32),
)
def test_any_form_is_filled_by_any_model(pieces: list[Piece], longer: list[bytes], seed: int) -> None:
    vocabulary = Bytes(longer)
    rng = np.random.default_rng(seed)
    likely = list(b'ab",|>') + list(range(258, len(vocabulary.eog))) + [END] + list("é🚁".encode())

    def say(_: bytes) -> NDArray[np.float32]:
        logits = rng.normal(size=len(vocabulary.eog)).astype(np.float32)
        logits[likely] += 8
        return logits

    found = fill(sequence(*pieces), vocabulary, say)
    rest = bytes(found.text).decode("utf-8", "replace")
    for piece in pieces:
        if isinstance(piece, Literal):
            assert rest.startswith(piece.text)
            rest = rest[len(piece.text) :]
            continue
        value = found.slots[piece.name]
        if isinstance(piece, Pick):
            assert value in piece.options
            assert 0 < found.probabilities[piece.name] <= 1.0000001
            value += piece.end
        elif isinstance(piece, Free):
            assert piece.end not in value
            value += piece.end
        else:
            assert any(s == value for s in piece.grammar.split("|"))
        assert rest.startswith(value)
        rest = rest[len(value) :]
    assert rest == ""


# -- on the model ----------------------------------------------------------------------------------------


def action() -> Generator[Piece, str, None]:
    yield Literal('{"action": "')
    chosen = yield Pick("action", ("zoom", "describe", "finish"))
    if chosen != "finish":
        yield Literal(', "box": "')
        yield Held("box", 'root ::= "<0." [0-9]{3} ">"', 20)
        yield Literal('"')
    yield Literal(', "thought": "')
    yield Free("thought", 8)
    yield Literal(', "score": ')
    yield Pick("score", tuple(str(i) for i in range(11)), "}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_fills_a_form_of_the_reasoner(
    backend: LlamaCppBackend, opened: State, ending: Text, temperature: float
) -> None:
    requests = [
        GenerateRequest(opened, (ending,), form=action, sampling=Sampling(temperature, seed=i), keep=True)
        for i in range(6)
    ]
    before = backend.counters.copy()
    results = backend.generate(requests)
    used = backend.counters - before
    for result in results:
        assert result.finish == "stop"
        assert re.match(r'\{"action": "(zoom|describe|finish)", "', result.text)
        assert result.slots["score"] in {str(i) for i in range(11)}
        if result.slots["action"] == "finish":
            assert "box" not in result.slots
        else:
            assert re.fullmatch(r"<0\.\d{3}>", result.slots["box"])
        assert result.text.endswith(f', "score": {result.slots["score"]}}}')
        assert b"".join(map(backend.model.piece, result.tokens)).decode("utf-8", "replace") == result.text
        assert 0 < result.forced_tokens < len(result.tokens)
        assert set(result.probabilities) == {"action", "score"}
        if "\\" not in result.text and "\ufffd" not in result.text:
            assert json.loads(re.sub(r"[\x00-\x1f]", " ", result.text))["action"] == result.slots["action"]
        assert result.state is not None
        result.state.close()
    assert used.forced_tokens == sum(r.forced_tokens for r in results)
    assert used.decoded_tokens >= sum(len(r.tokens) - r.forced_tokens for r in results)


def test_a_form_goes_on_like_the_whole_prompt(
    backend: LlamaCppBackend, reference: Any, opened: State, pictures: Any, prompt: Any, ending: Text, logits_after: Any
) -> None:
    """Given parts go into the cache in one batch, and stand there as if they had been read with the prompt."""
    result = backend.generate([GenerateRequest(opened, (ending,), form=action, keep=True)])[0]
    assert result.state is not None
    with result.state as state:
        found = logits_after(backend, state, (Text(" more"),))
    system, question = (p.text for p in prompt(None) if isinstance(p, Text))
    reference.start([system, pictures[0], question + ending.text])
    for token in (*result.tokens, *backend.model.tokenize(" more", False)):
        expected = reference.feed(token)
    assert np.abs(found - expected).max() < 0.015


def test_a_form_of_nothing_but_fixed_text_draws_nothing(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    before = backend.counters.copy()
    result = backend.generate([GenerateRequest(opened, (ending,), form=sequence(Literal("done")))])[0]
    assert (result.text, result.finish, result.slots) == ("done", "stop", {})
    assert (backend.counters - before).decoded_tokens == 0


def test_a_form_is_cut_at_the_limit(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    result = backend.generate([GenerateRequest(opened, (ending,), form=action, max_tokens=12)])[0]
    assert result.finish == "length"


def test_forms_and_plain_requests_share_a_batch(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    plain = GenerateRequest(opened, (Text(" a"), ending), max_tokens=12)
    held = GenerateRequest(opened, (ending,), grammar='root ::= "yes" | "no"')
    form = GenerateRequest(opened, (ending,), form=action)
    first, second, third = backend.generate([plain, form, held])
    assert len(first.tokens) <= 12
    assert second.slots.keys() >= {"action", "thought", "score"}
    assert third.text in ("yes", "no")


def test_slots_may_follow_each_other_without_fixed_text(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    """A slot that ends without a token leaves its logits to the next one."""
    form = sequence(Held("a", 'root ::= "xy"', 9), Held("b", 'root ::= "z"', 9), Pick("c", ("l", "r")))
    result = backend.generate([GenerateRequest(opened, (ending,), form=form)])[0]
    assert result.text in ('xyzl"', 'xyzr"')
    assert result.finish == "stop"
