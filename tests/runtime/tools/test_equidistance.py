"""Boxes made up at regular intervals go, real rows stay."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.tools.equidistance import DELTA, RUN, equidistant

Row = list[tuple[float, float, float, float]]


def reference(boxes: Row, delta: float, run: int) -> list[bool]:
    """The rule, box by box."""
    centres = [((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in boxes]
    even = [False] * len(boxes)
    for i in range(1, len(boxes) - 1):
        bend = [centres[i + 1][k] - 2 * centres[i][k] + centres[i - 1][k] for k in (0, 1)]
        even[i] = np.hypot(*bend) < delta
    out = [False] * len(boxes)
    for i in range(len(boxes)):
        first = last = i
        while first > 0 and even[first - 1]:
            first -= 1
        while last + 1 < len(boxes) and even[last + 1]:
            last += 1
        out[i] = even[i] and last - first + 1 >= run
    return out


def row(n: int, step: tuple[float, float] = (0.0373, 0.0041), size: float = 0.03) -> Row:
    """Boxes moved on by one step each, written in thousandths."""
    out = []
    for i in range(n):
        x, y = 0.05 + i * step[0], 0.3 + i * step[1]
        out.append(tuple(round(v, 3) for v in (x, y, x + size, y + size)))
    return out  # type: ignore[return-value]


coordinate = st.integers(0, 12).map(lambda v: v / 10)


@given(
    st.lists(st.tuples(coordinate, coordinate, coordinate, coordinate), max_size=30),
    st.sampled_from([0.001, 0.06, 0.3]),
    st.integers(1, 5),
)
def test_same_as_the_rule_box_by_box(boxes: Row, delta: float, run: int) -> None:
    assert equidistant(boxes, delta, run).tolist() == reference(boxes, delta, run)


@pytest.mark.parametrize("step", [(0.0373, 0.0041), (0.05, 0.0), (0.0, 0.02), (-0.01, 0.0133), (0.0, 0.0)])
@pytest.mark.parametrize("n", [6, 7, 20])
def test_a_made_up_series_loses_all_but_its_ends(n: int, step: tuple[float, float]) -> None:
    assert equidistant(row(n, step)).tolist() == [False, *[True] * (n - 2), False]


@given(
    st.tuples(*[st.floats(0, 0.3)] * 2),
    st.tuples(*[st.floats(-0.03, 0.03)] * 2),
    st.floats(0.005, 0.1),
    st.integers(6, 24),
)
def test_an_even_series_is_found_whatever_its_step(
    at: tuple[float, float], step: tuple[float, float], size: float, n: int
) -> None:
    corner = np.array(at) + np.array(step) * np.arange(n)[:, None]
    found = equidistant(np.round(np.hstack([corner, corner + round(size, 3)]), 3))
    assert found.tolist() == [False, *[True] * (n - 2), False]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5])
def test_too_short_a_series_stays(n: int) -> None:
    assert not equidistant(row(n)).any()


def test_real_boxes_before_and_behind_a_series_stay() -> None:
    rng = np.random.default_rng(3)
    x = rng.uniform(0, 0.9, (8, 2))
    real: Row = [tuple(r) for r in np.hstack([x, x + 0.04])]  # type: ignore[misc]
    found = equidistant(real[:4] + row(9) + real[4:])
    assert found.tolist() == [False] * 5 + [True] * 7 + [False] * 5


def test_a_parked_row_that_is_a_little_uneven_stays() -> None:
    rng = np.random.default_rng(0)
    dropped = 0
    for _ in range(200):
        x = 0.05 + 0.035 * (np.arange(20) + rng.normal(0, 0.06, 20))
        y = 0.4 + 0.002 * np.arange(20) + 0.035 * rng.normal(0, 0.03, 20)
        boxes = np.round(np.stack([x, y, x + 0.03, y + 0.02], 1), 3)
        dropped += int(equidistant(boxes).sum())
    assert dropped <= 200 * 20 * 0.005


def orders(boxes: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Orders in which a model may list what it sees."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    chain, left = [], list(range(len(boxes)))
    while left:
        at = centres[chain[-1]] if chain else np.zeros(2)
        chain.append(left.pop(int(np.linalg.norm(centres[left] - at, axis=1).argmin())))
    return {
        "annotated": boxes,
        "rows": boxes[np.lexsort((centres[:, 0], np.round(centres[:, 1] / 0.03)))],
        "x": boxes[np.argsort(centres[:, 0], kind="stable")],
        "y": boxes[np.argsort(centres[:, 1], kind="stable")],
        "nearest": boxes[chain],
    }


def annotated(shared_data: Path) -> list[NDArray[np.float64]]:
    """Vehicles of the annotated photos, normalised."""
    sets = []
    for item in json.loads((shared_data / "images/auair/annotations.json").read_text())["annotations"]:
        w, h = item["image_width"], item["image_height"]
        sets.append(
            np.array(
                [
                    [b["left"] / w, b["top"] / h, (b["left"] + b["width"]) / w, (b["top"] + b["height"]) / h]
                    for b in item["bbox"]
                    if b["class"] != 0
                ]
            ).reshape(-1, 4)
        )
    for path in sorted((shared_data / "images/visdrone").glob("*.val.txt")):
        _, x, y, w, h = np.loadtxt(path, ndmin=2).T
        sets.append(np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1))
    return sets


def test_no_annotated_vehicle_is_dropped_in_any_order(shared_data: Path) -> None:
    checked = 0
    for boxes in annotated(shared_data):
        for name, ordered in orders(boxes).items():
            checked += len(ordered)
            assert not equidistant(np.round(ordered, 3)).any(), name
    assert checked > 1500


def test_a_real_row_with_a_made_up_tail_keeps_the_real_row(shared_data: Path) -> None:
    for boxes in annotated(shared_data):
        if len(boxes) < 10:
            continue
        # As it happens: the model goes on from the last real box with the last step.
        written = np.round(orders(boxes)["rows"], 3)
        step = np.array([0.021, 0.0, 0.021, 0.0])
        tail = np.round(written[-1] + step * np.arange(1, 13)[:, None], 3)
        found = equidistant(np.concatenate([written, tail]))
        # The last real box is the first of the series.
        assert not found[: len(written) - 1].any()
        assert found[len(written) :].sum() >= 10


def test_bad_input_is_refused() -> None:
    for boxes in ([[0, 0, 1]], [[0, 0, 1, np.nan]], [0.1, 0.2, 0.3, 0.4]):
        with pytest.raises(ValueError, match="N x 4"):
            equidistant(boxes)
    with pytest.raises(ValueError, match="run"):
        equidistant(row(4), run=0)


def test_many_boxes_take_little_time() -> None:
    boxes = np.tile(np.array(row(20)), (10_000, 1))
    start = time.perf_counter()
    equidistant(boxes, DELTA, RUN)
    assert time.perf_counter() - start < 2
