"""Eq. 4 of arXiv 2608.11738: what a draft does to the answer and its clues."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning.state import Belief, Draft, update
from hoverlens.runtime.reasoning.value import Value, iou, of_options

ONE, TWO = Value("one", ("one",)), Value("two", ("two",))
IOU = 0.7


def box(x1: float, y1: float, x2: float, y2: float) -> Value:
    return Value("box", box=(x1, y1, x2, y2))


def test_trusted_and_different_replaces_answer_and_clues() -> None:
    before = Belief(ONE, ("a", "b"), 0.4, confirmed=3)
    after = update(before, Draft(TWO, "c", 0.8), trusted=True, box_iou=IOU)
    assert after == Belief(TWO, ("c",), 0.8, confirmed=1)


def test_trusted_and_equal_keeps_the_answer_and_adds_the_clue() -> None:
    before = Belief(ONE, ("a",), 0.4, confirmed=1)
    after = update(before, Draft(ONE, "c", 0.8), trusted=True, box_iou=IOU)
    assert after == Belief(ONE, ("a", "c"), 0.4, confirmed=2)


def test_confirmations_are_counted_one_by_one() -> None:
    belief, counts = Belief(ONE), []
    for _ in range(4):
        belief = update(belief, Draft(ONE), trusted=True, box_iou=IOU)
        counts.append(belief.confirmed)
    assert counts == [1, 2, 3, 4]


@pytest.mark.parametrize("draft", [ONE, TWO])
def test_not_trusted_changes_nothing_but_ends_the_run_of_confirmations(draft: Value) -> None:
    before = Belief(ONE, ("a",), 0.4, confirmed=2)
    after = update(before, Draft(draft, "c", 0.8), trusted=False, box_iou=IOU)
    assert after == Belief(ONE, ("a",), 0.4, confirmed=0)


def test_an_invalid_draft_is_never_taken() -> None:
    before = Belief(ONE, ("a",), 0.4, confirmed=2)
    assert update(before, Draft(None, "c"), trusted=True, box_iou=IOU) == Belief(ONE, ("a",), 0.4, 0)
    assert update(Belief(None), Draft(None, "c"), trusted=True, box_iou=IOU) == Belief(None)


def test_the_first_answer_replaces_none() -> None:
    assert update(Belief(None, ("a",)), Draft(ONE, "c", 0.5), True, IOU) == Belief(ONE, ("c",), 0.5, 1)


@pytest.mark.parametrize("before", [Belief(ONE, ("a",)), Belief(TWO, ("a",))])
def test_a_draft_without_evidence_adds_no_empty_clue(before: Belief) -> None:
    after = update(before, Draft(ONE, ""), trusted=True, box_iou=IOU)
    assert after.answer == ONE
    assert after.clues == (("a",) if before.answer == ONE else ())


def test_boxes_are_one_answer_from_the_overlap_on() -> None:
    # Height 1: widths .5 and .35 of which .35 are common: IoU = .35 / .5 = .7 exactly at the threshold.
    whole, part = box(0, 0, 0.5, 1), box(0, 0, 0.35, 1)
    assert iou((0, 0, 0.5, 1), (0, 0, 0.35, 1)) == pytest.approx(0.7)
    kept = update(Belief(whole), Draft(part, "c"), True, 0.7 - 1e-9)
    assert (kept.answer, kept.clues) == (whole, ("c",))
    moved = update(Belief(whole), Draft(part, "c"), True, 0.7 + 1e-9)
    assert (moved.answer, moved.clues) == (part, ("c",))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7),  # 1 of 4 + 4 - 1
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 1, 1), (2, 2, 3, 3), 0.0),  # apart on both axes: never counted as common
        ((0, 0, 1, 1), (2, 0, 3, 1), 0.0),
        ((0, 0, 1, 1), (0, 2, 1, 3), 0.0),
        ((0, 0, 4, 2), (1, 0, 2, 2), 2 / 8),
        ((0, 0, 2, 4), (0, 1, 2, 2), 2 / 8),
        ((1, 1, 1, 1), (1, 1, 1, 1), 0.0),
    ],
)
def test_iou(a: tuple[float, ...], b: tuple[float, ...], expected: float) -> None:
    assert iou(a, b) == pytest.approx(expected)  # type: ignore[arg-type]
    assert iou(b, a) == pytest.approx(expected)  # type: ignore[arg-type]


def test_what_counts_as_the_same_answer() -> None:
    assert Value("A red car.").same(Value("a  RED car."), IOU)
    assert not Value("a red car").same(Value("a blue car"), IOU)
    assert Value("x", ("car", "bus")).same(Value("y", ("car", "bus")), IOU)
    assert not Value("car", ("car",)).same(Value("car, bus", ("car", "bus")), IOU)
    assert not Value("car", ("car",)).same(Value("car"), IOU)
    assert not Value("car").same(Value("car", ("car",)), IOU)
    assert not box(0, 0, 1, 1).same(Value("x"), IOU)
    assert not Value("x").same(box(0, 0, 1, 1), IOU)
    # Half of the larger one: exactly at the threshold is enough.
    assert box(0, 0, 1, 1).same(box(0, 0, 0.5, 1), 0.5)


@pytest.mark.parametrize("state", [Belief(ONE), Draft(ONE), ONE], ids=lambda s: type(s).__name__)
def test_no_branch_can_change_what_another_holds(state: object) -> None:
    with pytest.raises(FrozenInstanceError):
        state.text = state.answer = "other"  # type: ignore[attr-defined]


def test_options_keep_the_order_of_the_question() -> None:
    question = Question.make("Which?", ["car", "bus", "tram"], "options")
    assert of_options(question, ("tram", "car")) == Value("car, tram", ("car", "tram"))


def test_an_answer_without_words_or_area_is_not_valid() -> None:
    assert Value("x").valid
    assert not Value("").valid
    assert not Value(" \n").valid
    assert box(0.1, 0.1, 0.2, 0.2).valid
    assert not box(0.1, 0.1, 0.1, 0.2).valid
    assert not box(0.1, 0.1, 0.2, 0.1).valid
    assert not box(0.9, 0.1, 0.8, 0.2).valid
    assert not box(0.1, 0.9, 0.2, 0.8).valid
    assert box(0.7, 0.1, 0.9, 0.3).valid
    assert box(0.1, 0.7, 0.3, 0.9).valid


ANSWERS = st.sampled_from([None, ONE, TWO])


@given(st.lists(st.tuples(ANSWERS, st.booleans(), st.sampled_from(["", "e"])), max_size=12))
def test_clues_always_belong_to_the_answer_that_stands(drafts: list[tuple[Value | None, bool, str]]) -> None:
    belief = Belief(ONE)
    expected: list[str] = []
    held: Value | None = ONE
    for i, (answer, trusted, evidence) in enumerate(drafts):
        text = f"{answer.text if answer else 'none'}-{i}" if evidence else ""
        belief = update(belief, Draft(answer, text), trusted, IOU)
        if trusted and answer is not None:
            expected = [*expected, text] if answer == held else [text]
            held = answer
        assert belief.answer == held
        assert list(belief.clues) == [c for c in expected if c]
        assert all(held is not None and c.startswith(held.text) for c in belief.clues)
