"""Metrics agree with values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hoverlens.runtime.metrics.detection import (
    Found,
    Truth,
    average_precision,
    box_iou,
    evaluate,
)

A, B, C, D = ([0, 0, 100, 100], [200, 0, 300, 100], [400, 0, 500, 100], [600, 0, 700, 100])
SMALL = [0, 200, 20, 220]


def truth(*boxes: list[float], classes: list[int] | None = None, ignore: list[int] = ()) -> Truth:  # type: ignore[assignment]
    n = len(boxes)
    flags = np.zeros(n, bool)
    flags[list(ignore)] = True
    return Truth(np.array(boxes, float).reshape(-1, 4), np.array(classes or [0] * n, np.int64), flags)


def found(*rows: tuple[list[float], float], classes: list[int] | None = None) -> Found:
    return Found(
        np.array([r[0] for r in rows], float).reshape(-1, 4),
        np.array([r[1] for r in rows], float),
        np.array(classes or [0] * len(rows), np.int64),
    )


@pytest.mark.parametrize(
    ("hits", "truths", "ap"),
    [
        ([True], 1, 1.0),
        ([], 1, 0.0),
        ([False], 1, 0.0),
        # Precision 1 up to recall .5 (51 points), then 2/3 (50 points).
        ([True, False, True], 2, (51 + 50 * 2 / 3) / 101),
        # Precision 1 up to recall .25 (26 points), nothing after.
        ([True], 4, 26 / 101),
        # The envelope lifts the first step: best precision at recall >= 0 is 1/2.
        ([False, True], 1, 0.5),
        # 1/3 of the truths: recall points 0 .. .33.
        ([True], 3, 34 / 101),
    ],
)
def test_average_precision_by_hand(hits: list[bool], truths: int, ap: float) -> None:
    assert average_precision(np.array(hits, bool), truths) == pytest.approx(ap)


def test_iou_by_hand() -> None:
    a = np.array([[0, 0, 10, 10], [5, 5, 5, 5]], float)
    b = np.array([[5, 0, 15, 10], [20, 20, 30, 30], [0, 0, 10, 10]], float)
    assert box_iou(a, b) == pytest.approx(np.array([[1 / 3, 0, 1], [0, 0, 0]]))


def test_recall_and_precision_are_taken_at_the_confidence() -> None:
    scores = evaluate([found((A, 0.9), (B, 0.3), (D, 0.4), (C, 0.1))], [truth(A, B, C)], conf=0.25)
    assert scores.recall == pytest.approx(2 / 3)
    assert scores.precision == pytest.approx(2 / 3)
    assert (scores.truths, scores.detections) == (3, 3)
    # By score: right, wrong, right, right; precision 1, 1/2, 2/3, 3/4.
    assert scores.ap == pytest.approx((34 * 1 + 67 * 0.75) / 101)


def test_a_second_box_on_one_object_is_wrong() -> None:
    scores = evaluate([found((A, 0.9), (A, 0.8))], [truth(A)])
    assert (scores.recall, scores.precision) == (1, 0.5)


def test_the_better_score_takes_its_best_object_first() -> None:
    shifted = [20, 0, 120, 100]  # IoU 2/3 with A
    scores = evaluate([found((shifted, 0.9), (A, 0.8))], [truth(A)])
    assert scores.precision == 0.5
    scores = evaluate([found((shifted, 0.9), (A, 0.8))], [truth(A, shifted)])
    assert scores.precision == 1


def test_the_class_must_match() -> None:
    scores = evaluate([found((A, 0.9), (B, 0.9), classes=[0, 0])], [truth(A, B, classes=[0, 1])])
    assert (scores.recall, scores.precision) == (0.5, 0.5)
    assert scores.ap_by_class == {0: 1.0, 1: 0.0}
    assert scores.ap == 0.5


def test_the_overlap_must_reach_the_threshold() -> None:
    half = [0, 0, 100, 50]  # IoU exactly 0.5
    assert evaluate([found((half, 0.9))], [truth(A)], iou=0.5).recall == 1
    assert evaluate([found((half, 0.9))], [truth(A)], iou=0.51).recall == 0


def test_ignored_boxes_count_for_nothing() -> None:
    scores = evaluate([found((A, 0.9), (B, 0.8))], [truth(A, B, ignore=[1])])
    assert (scores.recall, scores.precision, scores.truths) == (1, 1, 1)
    # A region takes in what lies in it by half of its own area, of any class if it has none.
    region = truth(A, [190, 0, 390, 200], classes=[0, -1], ignore=[1])
    assert evaluate([found((A, 0.9), ([200, 0, 230, 30], 0.8))], [region]).precision == 1
    assert evaluate([found((A, 0.9), ([380, 0, 410, 30], 0.8))], [region]).precision == 0.5


def test_a_true_box_is_preferred_to_an_ignored_one() -> None:
    near = [0, 0, 100, 95]
    scores = evaluate([found((near, 0.9))], [truth(near, A, ignore=[0])])
    assert scores.recall == 1


def test_small_objects_are_judged_alone() -> None:
    scores = evaluate(
        [found((A, 0.9), (SMALL, 0.8), (B, 0.7), ([40, 200, 60, 220], 0.95))],
        [truth(A, SMALL)],
    )
    # Large detections drop out; the small wrong one comes first.
    assert scores.ap_small == pytest.approx(0.5)
    assert evaluate([found((A, 0.9))], [truth(A)]).ap_small is None


def test_pictures_are_pooled_by_score() -> None:
    scores = evaluate([found((A, 0.5)), found((D, 0.9), (B, 0.4)), found()], [truth(A), truth(B), truth()])
    # Wrong, right, right of two: precision 0, 1/2, 2/3.
    assert scores.ap == pytest.approx(2 / 3)


def test_nothing_to_count_is_none() -> None:
    scores = evaluate([], [])
    assert (scores.ap, scores.ap_small, scores.recall, scores.precision) == (None,) * 4
    scores = evaluate([found()], [truth(A)])
    assert (scores.recall, scores.precision, scores.ap) == (0, None, 0)
    scores = evaluate([found((A, 0.9))], [truth()])
    assert (scores.recall, scores.precision) == (None, 0)
    with pytest.raises(ValueError, match="1 pictures"):
        evaluate([found()], [])
