"""Forms are filled as the model wants, within what is fixed, and the cache holds exactly the text."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.mllm.base import GREEDY, Sampling
from hoverlens.runtime.mllm.forms import Form, Free, Held, Literal, Pick, Piece, sequence
from hoverlens.runtime.mllm.sampling import log_probability
from hoverlens.runtime.mllm.slots import Filler

BYTES = [bytes([b]) for b in b'abcdefYesNo01 ",:{}\xc3\xa9\xa8</mrk>']
MERGED = [
    b"ab",
    b"abc",
    b"bc",
    b'",',
    b'c",',
    b'c"d',
    b'"}',
    b"10",
    b'1"',
    "é".encode(),
    b"Ye",
    b"Yes",
    b'No"',
    b"a\xc3",
]
EOG, CONTROL, MARK = b"<end>", b"<control>", b"</mark>"


class Words:
    """A vocabulary of single bytes and some longer tokens; it tokenises greedily, longest first."""

    def __init__(self, pieces: Sequence[bytes] = (*dict.fromkeys(BYTES), *MERGED)) -> None:
        self.pieces = [*pieces, EOG, CONTROL, MARK]
        self.eog = np.array([p == EOG for p in self.pieces])
        self.forbidden = np.array([p in (CONTROL, MARK) for p in self.pieces])
        self.longest = sorted(pieces, key=len, reverse=True)

    def tokenize(self, text: str, special: bool) -> tuple[int, ...]:
        """Greedily; a mark is one token where it counts, and letters elsewhere."""
        data, out = text.encode(), []
        known = [MARK, *self.longest] if special else self.longest
        while data:
            piece = next(p for p in known if data.startswith(p))
            out.append(self.pieces.index(piece))
            data = data[len(piece) :]
        return tuple(out)

    def piece(self, token: int) -> bytes:
        return b"" if self.pieces[token] in (EOG, CONTROL) else self.pieces[token]

    def tokens_spelling(self, data: bytes) -> list[int]:
        return [i for i, p in enumerate(self.pieces) if p == data and p not in (EOG, CONTROL, MARK)]

    def spell(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.piece(t) for t in tokens)


WORDS = Words()
Model = Callable[[bytes], NDArray[np.float32]]


class Digits:
    """A grammar of 0 and 1, up to three; then it ends, by the end token if ``by_token``, else with nothing left."""

    def __init__(self, words: Words, by_token: bool) -> None:
        self.words, self.by_token = words, by_token
        self.seen = 0
        self.closed = False

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        out = np.full(len(logits), -np.inf, np.float32)
        for i, piece in enumerate(self.words.pieces):
            fits = piece in (b"0", b"1") or (piece == b"10" and self.seen < 2)
            if (fits and self.seen < 3) or (piece == EOG and self.by_token and self.seen):
                out[i] = logits[i]
        return out

    def accept(self, token: int) -> None:
        self.seen += len(self.words.piece(token))

    def close(self) -> None:
        self.closed = True


def says(*pieces: bytes) -> Model:
    """A model that wants these tokens, one after the other, and whatever is allowed if they are not."""
    left = list(pieces)

    def logits(_: bytes) -> NDArray[np.float32]:
        out = np.linspace(0, 1, len(WORDS.pieces), dtype=np.float32)
        if left:
            out[WORDS.pieces.index(left.pop(0))] = 100
        return out

    return logits


def moody(seed: int, words: Words = WORDS, spread: float = 2.0) -> Model:
    """Random logits that depend on the text so far."""

    def logits(text: bytes) -> NDArray[np.float32]:
        rng = np.random.default_rng([seed, zlib.crc32(text)])
        return rng.normal(0, spread, len(words.pieces)).astype(np.float32)

    return logits


def fill(
    form: Form, model: Model, sampling: Sampling = GREEDY, words: Words = WORDS, by_token: bool = True
) -> tuple[Filler, list[int], list[Digits]]:
    """Fills a form; the filler, everything in the cache, and the grammars that were made."""
    grammars: list[Digits] = []

    def grammar(source: str) -> Digits:
        assert source == "digits"
        grammars.append(Digits(words, by_token))
        return grammars[-1]

    filler = Filler(form, words, words.forbidden, sampling, grammar)
    cache = filler.start()
    for _ in range(1000):
        if filler.done:
            break
        cache += filler.draw(model(words.spell(cache)))
    assert filler.done
    assert words.spell(cache) == bytes(filler.text)
    assert filler.forced <= len(cache)
    return filler, cache, grammars


def text_of(form: Form, slots: dict[str, str]) -> str:
    """What a form says with these values."""
    out, pieces = "", form()
    value: str | None = None
    while True:
        try:
            piece = next(pieces) if value is None else pieces.send(value)
        except StopIteration:
            return out
        value = piece.text if isinstance(piece, Literal) else slots[piece.name]
        out += value + (piece.end if isinstance(piece, (Pick, Free)) else "")


# -- fixed text --------------------------------------------------------------------------------------


def test_fixed_text_is_given_and_never_drawn() -> None:
    filler, cache, _ = fill(sequence(Literal("{"), Literal('"a":'), Literal("}")), says())
    assert (filler.drawn, filler.forced, len(cache)) == (0, 6, 6)
    assert filler.text == b'{"a":}'
    assert (filler.logprob, filler.slots, filler.probabilities) == (0.0, {}, {})


def test_an_empty_form_is_done_at_once() -> None:
    filler, cache, _ = fill(sequence(), says())
    assert cache == []
    assert filler.text == b""


def test_what_comes_next_may_depend_on_what_was_said() -> None:
    def form() -> Generator[Piece, str, None]:
        said = yield Pick("use", ("Yes", "No"))
        assert (yield Literal(":")) == ":"
        if said == "Yes":
            text = yield Free("why", 5)
            assert text == "ab"

    filler, *_ = fill(form, says(b"Yes", b"ab", b'"'))
    assert filler.slots == {"use": "Yes", "why": "ab"}
    assert filler.text == b'Yes":ab"'
    assert fill(form, says(b'No"'))[0].slots == {"use": "No"}


# -- Pick --------------------------------------------------------------------------------------------


def test_a_single_option_costs_no_decision() -> None:
    filler, *_ = fill(sequence(Pick("x", ("abc",)), Literal("}")), says())
    assert filler.drawn == 0
    assert filler.slots == {"x": "abc"}
    assert filler.probabilities == {"x": 1.0}
    assert filler.text == b'abc"}'


def test_a_pick_draws_only_where_options_part() -> None:
    # "ab1" and "abc1" part after "ab"; from there on the rest is given.
    filler, cache, _ = fill(sequence(Pick("x", ("ab0", "abc0"))), says(b"ab", b"c"))
    assert filler.slots == {"x": "abc0"}
    assert filler.drawn == 2
    assert [WORDS.piece(t) for t in cache] == [b"ab", b"c", b"0", b'"']


@pytest.mark.parametrize(
    ("wanted", "value"), [([b"1", b'"'], "1"), ([b"1", b"0"], "10"), ([b'1"'], "1"), ([b"10"], "10")]
)
def test_an_option_that_begins_another_can_win_and_lose(wanted: list[bytes], value: str) -> None:
    filler, *_ = fill(sequence(Pick("n", ("1", "10", "0"))), says(*wanted))
    assert filler.slots == {"n": value}
    assert filler.text == f'{value}"'.encode()


def test_what_is_no_option_cannot_be_picked() -> None:
    filler, *_ = fill(sequence(Pick("use", ("Yes", "No"))), says(EOG))
    assert filler.slots["use"] in ("Yes", "No")
    filler, *_ = fill(sequence(Pick("use", ("Yes", "No"))), says(CONTROL))
    assert filler.slots["use"] in ("Yes", "No")


def test_options_may_part_inside_a_character() -> None:
    # é is c3 a9, è is c3 a8; "aé" also begins with the token a-c3.
    for first in ([b"\xc3", b"\xa8"], [b"\xc3", b"\xa9"], ["é".encode()]):
        filler, *_ = fill(sequence(Pick("x", ("é", "è"))), says(*first))
        assert filler.slots == {"x": "é" if first[-1] != b"\xa8" else "è"}


def test_the_rest_of_a_character_is_given_byte_by_byte() -> None:
    filler, cache, _ = fill(sequence(Pick("x", ("aé", "b"))), says(b"a\xc3"))
    assert filler.slots == {"x": "aé"}
    assert [WORDS.piece(t) for t in cache] == [b"a\xc3", b"\xa9", b'"']
    assert (filler.drawn, filler.forced) == (1, 2)


@pytest.mark.parametrize("options", [(), ("a", "a")])
def test_a_pick_needs_distinct_options(options: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="distinct options"):
        fill(sequence(Pick("x", options)), says())


def constrained(options: Sequence[str], model: Model, words: Words, end: str = '"') -> dict[str, float]:
    """Probability of each option if decoding is held to them: a sum over every way to spell them."""
    whole = {o: (o + end).encode() for o in options}
    chances = dict.fromkeys(options, 0.0)

    def walk(text: bytes, p: float) -> None:
        for option, spelled in whole.items():
            if text == spelled:
                chances[option] += p
                return
        rests = [s[len(text) :] for s in whole.values() if s.startswith(text)]
        ids = [i for i, t in enumerate(words.pieces) if words.piece(i) and any(r.startswith(t) for r in rests)]
        weights = np.exp(model(text)[ids].astype(np.float64))
        for i, w in zip(ids, weights / weights.sum(), strict=True):
            walk(text + words.pieces[i], p * float(w))

    walk(b"", 1.0)
    return chances


ONLY_BYTES = Words(list(dict.fromkeys(BYTES)))
OPTIONS = st.lists(st.text("abc01", min_size=1, max_size=4), min_size=2, max_size=5, unique=True)


@given(OPTIONS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_probability_of_a_pick_is_that_of_constrained_decoding(options: list[str], seed: int, draw: int) -> None:
    model = moody(seed, ONLY_BYTES)
    filler, *_ = fill(sequence(Pick("x", tuple(options))), model, Sampling(1.0, seed=draw), ONLY_BYTES)
    chances = constrained(options, model, ONLY_BYTES)
    assert sum(chances.values()) == pytest.approx(1)
    assert filler.probabilities["x"] == pytest.approx(chances[filler.slots["x"]], rel=1e-5)


@given(
    st.sampled_from([("Yes", "No"), ("abc", "c0", "é"), ("10", "abca", "Ye")]),
    st.integers(0, 10**6),
    st.integers(0, 99),
)
def test_all_ways_to_spell_an_option_count(options: tuple[str, ...], seed: int, draw: int) -> None:
    # The options differ in their first byte, so one draw decides, however the option is cut into tokens.
    model = moody(seed)
    filler, *_ = fill(sequence(Pick("x", options)), model, Sampling(1.0, seed=draw))
    assert filler.drawn == 1
    assert filler.probabilities["x"] == pytest.approx(constrained(options, model, WORDS)[filler.slots["x"]], rel=1e-5)


@given(OPTIONS, st.integers(0, 10**6), st.integers(0, 99))
def test_every_pick_ends_with_an_option_and_a_probability(options: list[str], seed: int, draw: int) -> None:
    filler, *_ = fill(sequence(Pick("x", tuple(options)), Literal("}")), moody(seed), Sampling(1.0, seed=draw))
    assert filler.slots["x"] in options
    assert filler.text == f'{filler.slots["x"]}"}}'.encode()
    assert 0 < filler.probabilities["x"] <= 1 + 1e-9
    assert filler.logprob < 0


def test_draws_follow_the_probabilities() -> None:
    model = moody(5)
    options = ("Yes", "No", "abc")
    chances = constrained(options, model, WORDS)
    drawn = [fill(sequence(Pick("x", options)), model, Sampling(1.0, seed=s))[0].slots["x"] for s in range(2000)]
    for option in options:
        assert drawn.count(option) / len(drawn) == pytest.approx(chances[option], abs=0.04)


def test_the_log_probability_is_that_of_the_drawn_tokens() -> None:
    # Two draws, whose logits are known: of Pick the token that was taken, of Free the one that runs over its end too.
    flat = np.zeros(len(WORDS.pieces), np.float32)
    filler, *_ = fill(sequence(Pick("x", ("Yes", "No")), Free("t", 1)), lambda text: flat, Sampling(1.0, seed=1))
    assert filler.drawn == 2
    ended = filler.slots["t"] == "" and filler.text.endswith(b'""')
    assert filler.logprob == pytest.approx(-(1 if ended else 2) * math.log(len(WORDS.pieces)))
    model = says(b"Ye", b'c",')
    filler, *_ = fill(sequence(Pick("x", ("Yes", "No")), Free("t", 5)), model)
    expected = sum(log_probability(says(p)(b""), WORDS.pieces.index(p)) for p in (b"Ye", b'c",'))
    assert filler.logprob == pytest.approx(expected)


# -- Free --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "end", "value", "drawn"),
    [
        ([b"ab", b'"'], '"', "ab", 2),
        ([b'"'], '"', "", 1),
        # The end lies inside a token: what stands before it counts, what follows does not.
        ([b"ab", b'c"d'], '"', "abc", 2),
        ([b'c",'], '"', "c", 1),
        # An end of several bytes: in one token, over two, begun and broken off.
        ([b"ab", b'",'], '",', "ab", 2),
        ([b"ab", b'"', b","], '",', "ab", 3),
        ([b"ab", b'"', b"d", b'c",'], '",', 'ab"dc', 4),
        ([b'"', b'",'], '",', '"', 2),
        # The model's own end.
        ([EOG], '"', "", 1),
        ([b"ab", EOG], '",', "ab", 2),
        (["é".encode(), b'"'], '"', "é", 2),
        ([b"\xc3", b"\xa9", b'"'], '"', "é", 3),
    ],
)
def test_free_text_ends_where_its_end_begins(wanted: list[bytes], end: str, value: str, drawn: int) -> None:
    filler, *_ = fill(sequence(Free("t", 10, end), Literal("}")), says(*wanted))
    assert filler.slots == {"t": value}
    assert filler.text == f"{value}{end}}}".encode()
    assert filler.drawn == drawn


def test_free_text_is_cut_at_its_limit_and_closed() -> None:
    filler, cache, _ = fill(sequence(Free("t", 3), Literal("}")), says(b"a", b"ab", b"abc", b"a"))
    assert filler.slots == {"t": "aababc"}
    assert filler.text == b'aababc"}'
    assert filler.drawn == 3
    assert [WORDS.piece(t) for t in cache] == [b"a", b"ab", b"abc", b'"', b"}"]


def test_a_character_that_was_cut_is_marked_in_the_value() -> None:
    filler, *_ = fill(sequence(Free("t", 1)), says(b"\xc3"))
    assert filler.slots == {"t": "\ufffd"}
    assert filler.text == b'\xc3"'


def test_a_control_token_is_never_drawn() -> None:
    filler, *_ = fill(sequence(Free("t", 1)), says(CONTROL))
    assert CONTROL not in bytes(filler.text)


def marked(max_tokens: int, special: bool = True) -> Form:
    return sequence(Literal("{", special), Free("t", max_tokens, "</mark>", special), Literal("}"))


def test_a_mark_of_the_template_ends_its_slot_and_no_other() -> None:
    filler, cache, _ = fill(marked(9), says(b"ab", MARK, b"c"))
    assert filler.slots == {"t": "ab"}
    assert [WORDS.piece(t) for t in cache] == [b"{", b"ab", MARK, b"}"]
    # Where marks do not count, the token is forbidden, and its letters are letters.
    filler, cache, _ = fill(marked(2, special=False), says(b"ab", MARK))
    assert WORDS.pieces.index(MARK) not in cache
    filler, cache, _ = fill(sequence(Free("t", 9)), says(b"ab", MARK, b'"'))
    assert WORDS.pieces.index(MARK) not in cache


def test_a_slot_that_was_cut_gets_its_mark() -> None:
    filler, cache, _ = fill(marked(1), says(b"ab", b"c"))
    assert filler.slots == {"t": "ab"}
    assert [WORDS.piece(t) for t in cache] == [b"{", b"ab", MARK, b"}"]
    # The mark written letter by letter ends the slot too.
    filler, *_ = fill(marked(20), says(b"ab", *[bytes([b]) for b in MARK], b"c"))
    assert filler.slots == {"t": "ab"}
    assert filler.text == b"{ab</mark>}"


# -- Held --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "by_token", "value", "drawn"),
    [
        ([b"1", b"0", EOG], True, "10", 3),
        ([b"1", b"0", b"1", b"1"], True, "101", 4),  # nothing but the end is left
        ([b"1", b"0", b"1", b"1"], False, "101", 3),  # nothing at all is left: nothing is drawn
        ([b"a", b"b", b"c"], False, None, None),
        ([b"10", b"1"], False, "101", 2),
    ],
)
def test_held_text_ends_where_its_grammar_does(
    wanted: list[bytes], by_token: bool, value: str | None, drawn: int | None
) -> None:
    filler, _, (grammar,) = fill(sequence(Held("d", "digits", 9), Literal("}")), says(*wanted), by_token=by_token)
    if value is not None:
        assert filler.slots == {"d": value}
    assert set(filler.slots["d"]) <= {"0", "1"}
    assert filler.text == filler.slots["d"].encode() + b"}"
    assert drawn is None or filler.drawn == drawn
    assert grammar.closed


def test_held_text_is_cut_at_its_limit() -> None:
    filler, _, (grammar,) = fill(sequence(Held("d", "digits", 2), Literal("}")), says(b"1", b"0", b"1"))
    assert filler.slots == {"d": "10"}
    assert filler.text == b"10}"
    assert grammar.closed


def test_closing_early_frees_the_grammar() -> None:
    made: list[Digits] = []

    def grammar(source: str) -> Digits:
        made.append(Digits(WORDS, True))
        return made[-1]

    filler = Filler(sequence(Held("d", "digits", 9)), WORDS, WORDS.forbidden, GREEDY, grammar)
    filler.start()
    filler.close()
    filler.close()
    assert made[0].closed


# -- all together ------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.builds(Literal, st.sampled_from(["{", '"a":', ", ", "}", "é"])),
    st.builds(lambda o, e: (Pick, tuple(o), e), OPTIONS, st.sampled_from(['"', '",'])),
    st.builds(lambda n, e: (Free, n, e), st.integers(1, 6), st.sampled_from(['"', '",', "}"])),
    st.builds(lambda n: (Held, n), st.integers(1, 5)),
)


@given(st.lists(PIECES, max_size=6), st.integers(0, 10**6), st.sampled_from([0.0, 0.7, 1.5]), st.booleans())
def test_any_form_is_filled_and_says_what_its_slots_say(
    parts: list[object], seed: int, temperature: float, by_token: bool
) -> None:
    pieces: list[Piece] = []
    for i, part in enumerate(parts):
        if isinstance(part, Literal):
            pieces.append(part)
        elif part[0] is Pick:  # type: ignore[index]
            pieces.append(Pick(f"s{i}", part[1], part[2]))  # type: ignore[index]
        elif part[0] is Free:  # type: ignore[index]
            pieces.append(Free(f"s{i}", part[1], part[2]))  # type: ignore[index]
        else:
            pieces.append(Held(f"s{i}", "digits", part[1]))  # type: ignore[index]
    form = sequence(*pieces)
    filler, cache, _ = fill(form, moody(seed), Sampling(temperature, seed=seed), by_token=by_token)
    again, same, _ = fill(form, moody(seed), Sampling(temperature, seed=seed), by_token=by_token)
    assert (filler.slots, cache) == (again.slots, same)
    assert set(filler.slots) == {p.name for p in pieces if not isinstance(p, Literal)}
    if not any("\ufffd" in v for v in filler.slots.values()):
        assert bytes(filler.text).decode() == text_of(form, filler.slots)
    for piece in pieces:
        if isinstance(piece, Free):
            assert piece.end not in filler.slots[piece.name] or piece.end == '",'
        if isinstance(piece, Pick):
            assert filler.slots[piece.name] in piece.options
