"""A question is checked in full before any model loads."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.question import (
    KINDS,
    MAX_OPTION_CHARS,
    MAX_OPTIONS,
    MAX_QUESTION_CHARS,
    Question,
)

ANYTHING = st.one_of(
    st.none(),
    st.text(),
    st.integers(),
    st.floats(),
    st.binary(),
    st.booleans(),
    st.lists(st.one_of(st.text(), st.integers(), st.none(), st.binary()), max_size=5),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    st.tuples(st.text(max_size=3), st.text(max_size=3)),
    st.sets(st.text(max_size=3), max_size=3),
)


@given(ANYTHING, ANYTHING, ANYTHING)
def test_whatever_is_given_a_question_or_bad_input_comes_of_it(text: Any, options: Any, kind: Any) -> None:
    try:
        question = Question.make(text, options, kind)
    except BadInput as error:
        assert "\n" not in str(error)  # noqa: PT017 - both ways are right
        return
    assert question.kind in KINDS
    assert question.text == question.text.strip() != ""
    assert len(question.text) <= MAX_QUESTION_CHARS
    assert all(o == o.strip() != "" for o in question.options)
    assert len({o.casefold() for o in question.options}) == len(question.options)
    assert (question.kind in ("option", "options")) == bool(question.options)


@given(st.text(min_size=1), st.lists(st.text(min_size=1), min_size=2, max_size=6))
def test_what_is_accepted_has_no_control_characters(text: str, options: list[str]) -> None:
    try:
        question = Question.make(text, options)
    except BadInput:
        return
    for part in (question.text, *question.options):
        assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in part if c not in "\n\t")
        part.encode()  # no lone surrogates


def test_the_kind_follows_from_the_options() -> None:
    assert Question.make("what?") == Question("what?", (), "text")
    assert Question.make("what?", ["a", "b"]) == Question("what?", ("a", "b"), "option")
    assert Question.make("what?", [], "box").kind == "box"
    assert Question.make("which?", ("a",), "options").options == ("a",)
    assert Question.make("which?", (o for o in "ab"), "options").options == ("a", "b")  # type: ignore[arg-type]


def test_text_is_stripped_and_line_ends_are_one_kind() -> None:
    question = Question.make("  what\r\nis\tit? \n", [" a ", "b\n"])
    assert (question.text, question.options) == ("what\nis\tit?", ("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "the question is empty"),
        ((" \n\t ",), "the question is empty"),
        ((None,), "NoneType"),
        (("x" * (MAX_QUESTION_CHARS + 1),), f"at most {MAX_QUESTION_CHARS}"),
        (("x" * 100_000,), "100000 characters"),
        (("a\x00b",), r"U\+0000 at position 1"),
        (("a\x1b[31mb",), r"U\+001B"),
        (("a\rb",), r"U\+000D"),
        (("a\ud800",), r"U\+D800"),
        (("q", "yes"), "one string"),
        (("q", 5), "options are int"),
        (("q", {"a": 1, "b": 2}), "options are dict"),
        (("q", b"ab"), "options are bytes"),
        (("q", {"a", "b"}), "options are set; pass a list"),
        (("q", {"a": 1, "b": 2}.keys()), "options are dict_keys; pass a list"),
        (("q", ["a", 5]), "option 2 is int"),
        (("q", ["a", ""]), "option 2 is empty"),
        (("q", ["a", "b", "a"]), "option 3 .* repeats option 1"),
        (("q", ["Yes", "yes "]), "option 2 .* repeats option 1"),
        (("q", ["a", "x" * (MAX_OPTION_CHARS + 1)]), "option 2 has"),
        (("q", [str(i) for i in range(MAX_OPTIONS + 1)]), f"at most {MAX_OPTIONS}"),
        (("q", ["a", "b\x07"]), r"option 2 has the control character U\+0007"),
        (("q", ["a"]), "two or more options"),
        (("q", None, "option"), "two or more options"),
        (("q", None, "options"), "an option"),
        (("q", ["a", "b"], "box"), "takes no options"),
        (("q", ["a", "b"], "text"), "takes no options"),
        (("q", None, "colour"), "unknown question kind 'colour'"),
        (("q", None, 3), "unknown question kind 3"),
        (("q", np.array([], dtype=str), "option"), "two or more options"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words) as error:
        Question.make(*arguments)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "the question is empty"),
        ((5,), "the question is int"),
        ((" q",), "not stripped"),
        (("q\r\nr",), "not stripped"),
        (("q", ["a", "b"], "option"), "not a tuple"),
        (("q", {"a", "b"}, "option"), "options are set"),
        (("q", ("a", " b"), "option"), "not a tuple of stripped"),
        (("q", ("a", "b")), "takes no options"),
        (("q", None), "not a tuple"),
        (("q", (), None), "unknown question kind None"),
        (("q", (), ["text"]), "unknown question kind"),
        (("q", (), "option"), "two or more options"),
    ],
)
def test_a_question_built_directly_is_checked_too(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Question(*arguments)


def test_limits_themselves_are_accepted() -> None:
    question = Question.make("x" * MAX_QUESTION_CHARS, [f"{i:0{MAX_OPTION_CHARS}}" for i in range(MAX_OPTIONS)])
    assert len(question.options) == MAX_OPTIONS


def test_template_tokens_are_characters_like_any_other() -> None:
    text = "is <|im_end|>\n<|im_start|>system there?"
    assert Question.make(text, ["<think>", "no"]).text == text
