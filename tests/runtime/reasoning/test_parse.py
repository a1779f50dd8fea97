"""Whatever a model writes becomes a value or a reason, never an exception."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hoverlens.runtime.boxes import format_box
from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning.parse import (
    Valid,
    match_option,
    match_options,
    parse_box,
    parse_boxes,
    parse_json,
    valid_answer,
)

B = (0.1, 0.2, 0.3, 0.4)

# text, box, a word that must be in the repairs ("" for none)
BOXES = [
    ("<0.100><0.200><0.300><0.400>", B, ""),
    (" <0.100> <0.200> <0.300> <0.400>\n", B, ""),
    ("<0.1>, <0.2>, <0.3>, <0.4>", B, ""),
    ("<0.1,0.2,0.3,0.4>", B, ""),
    ("<.1><.2><.3><.4>", B, ""),
    ("<0.1 0.2 0.3 0.4>", B, ""),
    ("<0.1<0.2<0.3<0.4", B, "ends inside"),
    ("0.1><0.2><0.3><0.4", B, "ends inside"),
    ("0.1, 0.2, 0.3, 0.4", B, "ends inside"),
    ("The car is at <0.1><0.2><0.3><0.4>.", B, ""),
    ("1. <0.1><0.2><0.3><0.4>", B, "ignored"),
    ("[0.1, 0.2, 0.3, 0.4]", B, ""),
    ("[100, 200, 300, 400]", B, "grid"),
    ("1. [100, 200, 300, 400]", B, "grid"),
    ("[100.0, 200.0, 300.0, 400.0]", B, "grid"),
    ("[[100, 200], [300, 400]]", B, "grid"),
    ("[[100, 200, 300, 400]]", B, "grid"),
    ("(100,200),(300,400)", B, "grid"),
    ("(100, 200) to (300, 400)", B, "grid"),
    ("from (0.1, 0.2) and (0.3, 0.4)", B, ""),
    ("<box>100 200 300 400</box>", B, "grid"),
    ("<box>(100,200),(300,400)</box>", B, "grid"),
    ("<|box_start|>(100,200),(300,400)<|box_end|>", B, "grid"),
    ('{"bbox_2d": [100, 200, 300, 400], "label": "car 2"}', B, "grid"),
    ('```json\n[\n\t{"bbox_2d": [100, 200, 300, 400], "label": "car"}\n]\n```', B, "grid"),
    ('{"box": "<0.1><0.2><0.3><0.4>"}', B, ""),
    ("{'box': (0.1, 0.2, 0.3, 0.4)}", B, ""),
    ('{"bbox_2d": [100, 200, 300, 400', B, "ends inside"),
    ('{"x1": 0.1, "y1": 0.2, "x2": 0.3, "y2": 0.4}', B, ""),
    ('{"y2": 0.4, "x2": 0.3, "y1": 0.2, "x1": 0.1}', B, ""),
    ("x_min=100 y_min=200 x_max=300 y_max=400", B, "grid"),
    ("left: 10%, top: 20%, right: 30%, bottom: 40%", B, "percent"),
    ("10%, 20%, 30%, 40%", B, "percent"),
    ("<0.3><0.4><0.1><0.2>", B, "swapped"),
    ("<0.3><0.2><0.1><0.4>", B, "swapped"),
    ("<-0.02><0.2><0.3><1.03>", (0.0, 0.2, 0.3, 1.0), "cut at the edge"),
    ("[-20, 200, 300, 1020]", (0.0, 0.2, 0.3, 1.0), "cut at the edge"),
    ("[0, 0, 1, 1]", (0.0, 0.0, 1.0, 1.0), ""),
    ("[0, 0, 1000, 1000]", (0.0, 0.0, 1.0, 1.0), "grid"),
    ("[0.1, 0.2, 0.3, 0.4] or [0.5, 0.6, 0.7, 0.8]", B, "first"),
    ("first <0.5><0.5><0.6><0.6>, the answer is <0.1><0.2><0.3><0.4>", B, ""),
    ("<0.1><0.2><0.3><0.4> is my answer: yes", B, ""),
    ("<think>maybe [1, 2, 3, 4]</think><0.1><0.2><0.3><0.4>", B, ""),
    ("[1e-1, 2e-1, 3E-1, 4e-1]", B, ""),
    ("[+0.1, +0.2, +0.3, +0.4]", B, ""),
    ("<0.1><0.2><0.3><0.4><0.1><0.2><0.3", B, "ignored"),
]

# text, part of the reason
NO_BOX = [
    ("", "no box"),
    ("a car on the left", "no box"),
    ("[]", "no box"),
    ("none", "no box"),
    ("[0.1, 0.2, 0.3]", "no box"),
    ('{"bbox_2d": [100, 200, 3', "no box"),
    ("[0.1, 0.2, nan, 0.4]", "not finite"),
    ("[0.1, 0.2, inf, 0.4]", "not finite"),
    ("[0.1, 0.2, -Infinity, 0.4]", "not finite"),
    ("[0.1, 0.2, 1e999, 0.4]", "not finite"),
    ("<0.1><0.2><0.1><0.4>", "without area"),
    ("<0.1><0.2><0.3><0.2>", "without area"),
    ("[0, 0, 0, 0]", "without area"),
    ("[1, 2, 1, 2]", "without area"),
    ("[1020, 1, 1030, 5]", "without area"),
    ("[100, 200, 1920, 1080]", "neither"),
    ("[-400, 200, 300, 400]", "too far outside"),
    ("[0.1, 0.2, 0.3, 1.4]", "too far outside"),
    ("[-0.5, 0.2, 0.3, 0.4]", "too far outside"),
    ("[0.12, 0.3, 450, 600]", "mixed"),
    ("10%, 20, 30%, 40%", "mixed"),
    ('{"x": 100, "y": 200, "width": 50, "height": 60}', "two corners"),
    ("x=0.1, y=0.2, w=0.3, h=0.4", "two corners"),
    ('{"bbox_xywh": [1, 2, 3, 4]}', "two corners"),
    ("10px 20px 30px 40px", "no box"),
    ("<think>it may be [0.1, 0.2, 0.3, 0.4]", "no box"),
    ("<x1><y1><x2><y2>", "no box"),
]


@pytest.mark.parametrize(("text", "box", "repair"), BOXES)
def test_a_box_in_any_dress_is_read(text: str, box: tuple[float, ...], repair: str) -> None:
    parsed = parse_box(text)
    assert parsed.value == pytest.approx(box), parsed
    assert parsed.reason is None
    assert repair in " ".join(parsed.repairs)
    if not repair:
        assert parsed.repairs == ()


@pytest.mark.parametrize(("text", "reason"), NO_BOX)
def test_what_is_no_box_gets_a_reason(text: str, reason: str) -> None:
    parsed = parse_box(text)
    assert parsed.value is None
    assert parsed.reason is not None
    assert reason in parsed.reason


def test_boxes_keep_the_order_of_the_text_and_say_what_was_dropped() -> None:
    parsed = parse_boxes('[{"bbox_2d": [500, 500, 600, 600]}, {"bbox_2d": [7, 7, 7, 7]}, {"bbox_2d": [1, 0, 2, 1]}]')
    assert parsed.value == [(0.5, 0.5, 0.6, 0.6), (0.001, 0.0, 0.002, 0.001)]
    assert any("box 2" in r for r in parsed.repairs)


def test_zeros_and_ones_follow_the_other_boxes_of_their_text() -> None:
    assert parse_boxes("[0, 0, 1, 1]\n[10, 20, 500, 600]").value == [(0, 0, 0.001, 0.001), (0.01, 0.02, 0.5, 0.6)]


@pytest.mark.parametrize("text", ["[]", " none ", "None.", "```json\n[]\n```", "null", "{}"])
def test_saying_that_there_is_nothing_is_an_empty_list(text: str) -> None:
    assert parse_boxes(text).value == []


def test_a_list_without_brackets_is_cut_into_fours() -> None:
    assert parse_boxes("<0.1><0.2><0.3><0.4><0.5><0.6><0.7><0.8>").value == [B, (0.5, 0.6, 0.7, 0.8)]
    assert parse_boxes("0.1 0.2 0.3 0.4\n0.5 0.6 0.7 0.8").value == [B, (0.5, 0.6, 0.7, 0.8)]


corner = st.integers(0, 1000)


@given(corner, corner, corner, corner)
def test_a_formatted_box_comes_back(a: int, b: int, c: int, d: int) -> None:
    x1, x2, y1, y2 = min(a, b) / 1000, max(a, b) / 1000, min(c, d) / 1000, max(c, d) / 1000
    parsed = parse_box(format_box((x1, y1, x2, y2)))
    if a == b or c == d:
        assert parsed.value is None
        return
    assert parsed.value == (x1, y1, x2, y2)
    assert parsed.repairs == ()


JSONS: list[tuple[str, Any, str]] = [
    ('{"a": 1}', {"a": 1}, ""),
    ("[1, 2]", [1, 2], ""),
    ('```json\n{"a": 1}\n```', {"a": 1}, "fence"),
    ('Sure! {"a": 1} Hope it helps.', {"a": 1}, "around"),
    ('{"a": 1,}', {"a": 1}, "trailing"),
    ("[1, 2,]", [1, 2], "trailing"),
    ("{'a': 'it''s'}", {"a": "it''s"}, "quotes"),
    ("{'a': 'it\\'s'}", {"a": "it's"}, "quotes"),
    ("{'a': 'the car's roof'}", {"a": "the car's roof"}, "inside a string"),
    ('{"a": "the "red" car"}', {"a": 'the "red" car'}, "inside a string"),
    ("{\u201ca\u201d: \u201cb\u201d}", {"a": "b"}, "quotes"),
    ("{a: 1, b: zoom}", {"a": 1, "b": "zoom"}, "quotes added"),
    ('{"a": True, "b": None, "c": False}', {"a": True, "b": None, "c": False}, "Python"),
    ('{"a": 1 "b": 2}', {"a": 1, "b": 2}, "comma"),
    ('{"a": "x" "b": 2}', {"a": "x", "b": 2}, "comma"),
    ('{"a": "x"\n"b": 2}', {"a": "x", "b": 2}, "comma"),
    ('{"a": "unfini', {"a": "unfini"}, "cut off"),
    ('{"a": [1, 2', {"a": [1, 2]}, "cut off"),
    ('{"a": {"b": "c"', {"a": {"b": "c"}}, "cut off"),
    ('{"a": 1, "b"', {"a": 1}, "cut off"),
    ('{"a": 1, "b":', {"a": 1}, "cut off"),
    ('{"a": 1, ', {"a": 1}, "cut off"),
    ('{"a": tr', {"a": True}, "cut off"),
    ('{"a": [1, 2}', {"a": [1, 2]}, "left open"),
    ('{"a": "line one\nline two"}', {"a": "line one\nline two"}, ""),
    ('{"a": "\\u00e9\\n\\q"}', {"a": "\u00e9\nq"}, ""),
    ('{"a": (1, 2)}', {"a": [1, 2]}, ""),
    ('[see below] {"a": 1}', {"a": 1}, "around"),
    ('[1] says {"action": "zoom"}', {"action": "zoom"}, "around"),
    ('{"t": {"a": 1}, "action": "zo', {"t": {"a": 1}, "action": "zo"}, "cut off"),
    ("{}", {}, ""),
    ("[]", [], ""),
    ('<think>{"a": 2}</think>{"a": 1}', {"a": 1}, ""),
    ('{"a" = 1; "b" = 2}', {"a": 1, "b": 2}, ""),
    ('{"a": -1.5e2, "b": 007}', {"a": -150.0, "b": 7}, ""),
]


@pytest.mark.parametrize(("text", "value", "repair"), JSONS)
def test_json_is_read_and_repairs_are_said(text: str, value: Any, repair: str) -> None:
    parsed = parse_json(text)
    assert parsed.value == value
    assert repair in " ".join(parsed.repairs)


@pytest.mark.parametrize("text", ["", "no", "42", '"a"', "}{"[:1], "<think>{}", "(1, 2)"])
def test_text_without_json_gets_a_reason(text: str) -> None:
    parsed = parse_json(text)
    assert parsed.value is None
    assert parsed.reason


HOSTILE = [
    "[" * 100_000,
    "{" * 100_000,
    '{"a":' * 50_000,
    "[[" + "1," * 50_000 + "[" * 50,
    '"' * 100_000,
    "{" + '"' * 100_000,
    "{'" + "' " * 50_000,
    "\\" * 100_000,
    "{" + "\\" * 100_000,
    "1" * 100_000,
    "0." * 50_000,
    "<0.1" * 50_000,
    "1 " * 100_000,
    "car " * 50_000,
    "not car " * 50_000,
    "answer is " * 20_000,
    " " * 100_000,
    "a " * 50_000,
    "A, " * 50_000,
    "-" * 100_000,
    "x1=" * 50_000,
    "```" * 50_000,
    "<think>" * 20_000,
    "(" * 50_000 + ")" * 50_000,
    "[1," + "a:" * 50_000,
    "[\n" * 50_000,
    ("[1," + "x" * 900 + "[" * 40) * 60,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda t: t[:8].strip() or "spaces")
def test_no_text_takes_long(text: str) -> None:
    options = ["car", "red car", "not", "answer"]
    start = time.perf_counter()
    parse_box(text)
    parse_json(text)
    match_option(text, options)
    match_options(text, options)
    assert time.perf_counter() - start < 5


TOKENS = [
    *("{", "}", "[", "]", "(", ")", "<", ">", '"', "'", ",", ":", "\\", "\\u", "```", "json", " ", "\n", "%"),
    *("0.1", "1", "999", "1e5", "nan", "-", "x1", "=", "w", "answer", "is", "A", "b.", "two", "car", "not"),
    *("true", "None", "</think>", "<think>", "<box>", "\ud800", "\x00", "\u0663", "\u00b2"),
]
pieces = st.lists(st.sampled_from(TOKENS), max_size=40).map("".join)


@settings(max_examples=400)
@given(st.one_of(pieces, st.text(max_size=200)), st.lists(st.one_of(pieces, st.text(max_size=12)), max_size=4))
@example("[\u0663, \u0663, \u0663, \u0663]", ["\u0663"])
def test_no_text_raises(text: str, options: list[str]) -> None:
    box = parse_box(text)
    assert (box.value is None) == (box.reason is not None)
    if box.value is not None:
        x1, y1, x2, y2 = box.value
        assert 0 <= x1 < x2 <= 1
        assert 0 <= y1 < y2 <= 1
    parsed = parse_json(text)
    assert (parsed.value is None) == (parsed.reason is not None)
    index = match_option(text, options)
    assert index is None or 0 <= index < len(options)
    assert all(0 <= i < len(options) for i in match_options(text, options))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_correct_json_comes_back_unchanged(value: dict[str, Any]) -> None:
    import json

    text = json.dumps(value)
    if "```" in text or "<think>" in text or "</think>" in text:
        return
    parsed = parse_json(text)
    assert parsed.value == value
    assert parsed.repairs == ()


COLOURS = ["Red", "Blue", "Dark blue", "Green"]
YES_NO = ["Yes", "No"]
COUNTS = ["1", "2", "3", "10"]
BOX_OPTIONS = ["<0.100><0.200><0.300><0.400>", "<0.500><0.600><0.700><0.800>"]
LETTERS = ["A", "B", "C"]

OPTIONS: list[tuple[str, list[str], int | None]] = [
    ("Red", COLOURS, 0),
    ("red", COLOURS, 0),
    ("  RED. ", COLOURS, 0),
    ("**Red**", COLOURS, 0),
    ('"dark-blue"', COLOURS, 2),
    ("The answer is red.", COLOURS, 0),
    ("Answer: Dark blue", COLOURS, 2),
    ("Final answer: **Green**", COLOURS, 3),
    ("It could be red or blue, but the answer is blue.", COLOURS, 1),
    ("It is a dark blue car.", COLOURS, 2),
    ("The car is red, not green.", COLOURS, 0),
    ("red or blue", COLOURS, None),
    ("not red", COLOURS, None),
    ("reddish", COLOURS, None),
    ("", COLOURS, None),
    ("purple", COLOURS, None),
    ("B", COLOURS, 1),
    ("(b)", COLOURS, 1),
    ("b.", COLOURS, 1),
    ("Option C", COLOURS, 2),
    ("The answer is D", COLOURS, 3),
    ("A. Red", COLOURS, 0),
    ("B) Blue", COLOURS, 1),
    ("A. Blue", COLOURS, None),
    ("E", COLOURS, None),
    ("a car", COLOURS, None),
    ('{"answer": "Blue"}', COLOURS, 1),
    ('{"answer": "Blue", "why": "red is gone"', COLOURS, 1),
    ("<think>red</think>Blue", COLOURS, 1),
    ("<think>red", COLOURS, None),
    ("yes", YES_NO, 0),
    ("No, there is no bus.", YES_NO, 1),
    ("Yes, there is no doubt.", YES_NO, None),
    ("There are 2 cars", COUNTS, 1),
    ("two", COUNTS, 1),
    ("ten", COUNTS, 3),
    ("There are ten.", COUNTS, 3),
    ("2 of 10", COUNTS, None),
    ("12", COUNTS, None),
    ("2.5", COUNTS, None),
    ("3", ["One", "Two", "Three"], 2),
    ("-1", ["1", "-1"], 1),
    ("<0.101><0.199><0.300><0.402>", BOX_OPTIONS, 0),
    ("[500, 600, 700, 800]", BOX_OPTIONS, 1),
    ("<0.2><0.2><0.3><0.4>", BOX_OPTIONS, None),
    ("A", LETTERS, 0),
    ("(B)", LETTERS, 1),
    ("a car", LETTERS, None),
    ("The answer is C.", LETTERS, 2),
    ("Both A and B", LETTERS, None),
    ("3 o'clock", ["3 o'clock", "9 o'clock"], 0),
    ("at three o\u2019clock", ["3 o'clock", "9 o'clock"], 0),
    ("x", [], None),
    ("?", ["?", "!"], 0),
    ("Car", ["car", "CAR"], None),
    ("car", ["car", "CAR"], 0),
]


@pytest.mark.parametrize(("text", "options", "index"), OPTIONS)
def test_a_named_option_is_found_and_a_doubtful_one_is_not(text: str, options: list[str], index: int | None) -> None:
    assert match_option(text, options) == index


KINDS = ["Human", "Car", "Truck", "Bus", "Police car"]


@pytest.mark.parametrize(
    ("text", "options", "indices"),
    [
        ("Car, Bus", KINDS, (1, 3)),
        ("Bus and car", KINDS, (1, 3)),
        ('["Car", "Bus"]', KINDS, (1, 3)),
        ('{"answer": ["Car", "Human"]}', KINDS, (0, 1)),
        ('{"answer": "Car, Human"}', KINDS, (0, 1)),
        ("The answer is: car and truck", KINDS, (1, 2)),
        ("A, C", KINDS, (0, 2)),
        ("A and C", KINDS, (0, 2)),
        ("(D)", KINDS, (3,)),
        ("police car", KINDS, (4,)),
        ("police car and car", KINDS, (1, 4)),
        ("cars but not bus", KINDS, ()),
        ("none", KINDS, ()),
        ("[]", KINDS, ()),
        ("", KINDS, ()),
        ("A, B", LETTERS, (0, 1)),
        ("<0.1><0.2><0.3><0.4> and <0.5><0.6><0.7><0.8>", BOX_OPTIONS, (0, 1)),
    ],
)
def test_several_options_are_found(text: str, options: list[str], indices: tuple[int, ...]) -> None:
    assert match_options(text, options) == indices


def test_every_option_names_itself() -> None:
    for options in (COLOURS, YES_NO, COUNTS, BOX_OPTIONS, LETTERS, KINDS):
        assert [match_option(o, options) for o in options] == list(range(len(options)))
        assert [match_options(o, options) for o in options] == [(i,) for i in range(len(options))]


def test_validity_follows_the_kind_of_question() -> None:
    option = Question.make("Which colour?", COLOURS)
    assert valid_answer(option, "red").value == Valid("Red", ("Red",))
    assert valid_answer(option, "red").repairs
    assert valid_answer(option, "Red").repairs == ()
    assert valid_answer(option, "red or blue").value is None
    options = Question.make("Which ones?", KINDS, "options")
    assert valid_answer(options, "bus, car").value == Valid("Car, Bus", ("Car", "Bus"))
    assert valid_answer(options, "none of them").value is None
    box = Question.make("Where?", kind="box")
    answer = valid_answer(box, "[100, 200, 300, 400]").value
    assert answer is not None
    assert answer.text == "<0.100><0.200><0.300><0.400>"
    assert answer.box == pytest.approx(B)
    assert valid_answer(box, "<0.1001><0.2><0.1003><0.4>").value is None
    assert valid_answer(box, "there").value is None
    text = Question.make("What is it?")
    assert valid_answer(text, " A car. ").value == Valid("A car.")
    assert valid_answer(text, " \n").value is None


def test_a_valid_answer_stays_the_same_when_read_again() -> None:
    for question, text in [
        (Question.make("q", COLOURS), "it is dark blue"),
        (Question.make("q", KINDS, "options"), "bus and police car"),
        (Question.make("q", kind="box"), "[99, 200, 333, 400]"),
        (Question.make("q"), " text "),
    ]:
        first = valid_answer(question, text).value
        assert first is not None
        assert valid_answer(question, first.text).value == first


def test_numbers_of_json_may_be_nan() -> None:
    parsed = parse_json('{"a": NaN}')
    assert isinstance(parsed.value, dict)
    assert math.isnan(parsed.value["a"])
