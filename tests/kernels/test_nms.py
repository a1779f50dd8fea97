"""NMS keeps what a plain float64 NumPy version keeps, index for index."""

from __future__ import annotations

import importlib
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hoverlens.kernels
from hoverlens.kernels import nms

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
F32_MAX = float(np.finfo(np.float32).max)


def reference(
    boxes: Floats,
    scores: Floats,
    classes: Labels | None,
    threshold: float,
    max_keep: int | None = None,
    metric: str = "iou",
) -> list[int]:
    """Greedy suppression the textbook way: take the best, strike out what it covers, repeat."""
    b = boxes.astype(np.float64).reshape(-1, 4)
    labels = np.zeros(len(b), np.int64) if classes is None else classes
    usable = np.isfinite(b).all(axis=1) & ~np.isnan(scores)
    b = np.where(np.isfinite(b), b, 0.0)
    pending = [i for i in np.argsort(-scores, kind="stable") if usable[i]]
    sizes = np.maximum(b[:, 2] - b[:, 0], 0) * np.maximum(b[:, 3] - b[:, 1], 0)
    # Upside-down in both directions has a positive product but no area.
    sizes[(b[:, 2] <= b[:, 0]) | (b[:, 3] <= b[:, 1])] = 0
    kept: list[int] = []
    while pending and (max_keep is None or len(kept) < max_keep):
        best = int(pending.pop(0))
        kept.append(best)
        rest = np.asarray(pending, dtype=np.int64)
        width = np.minimum(b[rest, 2], b[best, 2]) - np.maximum(b[rest, 0], b[best, 0])
        height = np.minimum(b[rest, 3], b[best, 3]) - np.maximum(b[rest, 1], b[best, 1])
        shared = np.maximum(width, 0) * np.maximum(height, 0)
        union = sizes[rest] + sizes[best] - shared
        whole = union if metric == "iou" else np.minimum(sizes[rest], sizes[best])
        real = (sizes[rest] > 0) & (sizes[best] > 0)
        overlap = np.divide(shared, whole, out=np.zeros(len(rest)), where=real)
        strike = (overlap > threshold) & (labels[rest] == labels[best])
        pending = [i for i, gone in zip(pending, strike, strict=True) if not gone]
    return kept


def scene(
    rng: np.random.Generator, count: int, classes: int, side: float, size: float
) -> tuple[Floats, Floats, Labels]:
    corner = rng.random((count, 2)) * side
    extent = rng.random((count, 2)) * size + 1
    boxes = np.concatenate([corner, corner + extent], axis=1).astype(np.float32)
    return boxes, rng.random(count, dtype=np.float32), rng.integers(0, classes, count)


# A coarse grid makes equal scores, equal boxes and overlaps exactly on a threshold common.
coordinates = st.one_of(
    st.integers(-4, 12).map(float),
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), F32_MAX, -F32_MAX, 1e-45, -0.0]),
)
score_values = st.one_of(
    st.sampled_from([0.0, -0.0, 0.25, 0.5, 0.75, 1.0, -1.0, float("nan"), float("inf")]),
    st.floats(0, 1, width=32),
)
rows = st.lists(
    st.tuples(st.tuples(*[coordinates] * 4), score_values, st.sampled_from([-7, 0, 1, 2**40])),
    max_size=40,
)
thresholds = st.one_of(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 1.0]), st.floats(0, 1, allow_nan=False))


@settings(max_examples=400, deadline=None)
@given(
    rows=rows,
    threshold=thresholds,
    per_class=st.booleans(),
    max_keep=st.one_of(st.none(), st.integers(0, 10)),
    metric=st.sampled_from(["iou", "ios"]),
)
def test_keeps_what_the_reference_keeps(
    rows: list[tuple[tuple[float, ...], float, int]],
    threshold: float,
    per_class: bool,
    max_keep: int | None,
    metric: str,
) -> None:
    boxes = np.array([r[0] for r in rows], np.float32).reshape(-1, 4)
    scores = np.array([r[1] for r in rows], np.float32)
    classes = np.array([r[2] for r in rows], np.int64) if per_class else None
    got = nms(boxes, scores, classes, threshold, max_keep, metric)  # type: ignore[arg-type]
    assert got.dtype == np.int64
    assert got.tolist() == reference(boxes, scores, classes, threshold, max_keep, metric)


@pytest.mark.parametrize("metric", ["iou", "ios"])
@pytest.mark.parametrize("per_class", [True, False])
@pytest.mark.parametrize("size", [10.0, 60.0, 400.0])
def test_keeps_what_the_reference_keeps_in_crowded_scenes(metric: str, per_class: bool, size: float) -> None:
    boxes, scores, labels = scene(np.random.default_rng(5), 3000, 7, 640, size)
    scores = np.round(scores, 2)
    classes = labels if per_class else None
    got = nms(boxes, scores, classes, 0.5, metric=metric)  # type: ignore[arg-type]
    assert got.tolist() == reference(boxes, scores, classes, 0.5, None, metric)


def test_no_boxes_give_no_indices() -> None:
    empty = nms(np.empty((0, 4), np.float32), np.empty(0, np.float32), None, 0.5)
    assert empty.shape == (0,)
    assert empty.dtype == np.int64
    assert nms(np.empty((0, 4)), [], [], 0.5).shape == (0,)


def test_one_box_is_kept() -> None:
    assert nms([[1, 2, 3, 4]], [0.1], [3], 0.0).tolist() == [0]


def test_equal_scores_keep_the_lower_index_first() -> None:
    boxes = [[0, 0, 8, 8], [50, 0, 58, 8], [0, 0, 8, 8], [90, 0, 98, 8]]
    assert nms(boxes, [0.5, 0.5, 0.5, 0.5], None, 0.5).tolist() == [0, 1, 3]


def test_positive_and_negative_zero_are_one_score() -> None:
    boxes = [[0, 0, 1, 1], [5, 0, 6, 1], [9, 0, 10, 1]]
    assert nms(boxes, [-0.0, 0.0, -0.0], None, 0.5).tolist() == [0, 1, 2]


def test_an_overlap_equal_to_the_threshold_is_kept() -> None:
    boxes = [[0, 0, 10, 10], [0, 0, 10, 5]]
    assert nms(boxes, [0.9, 0.8], None, 0.5).tolist() == [0, 1]
    assert nms(boxes, [0.9, 0.8], None, np.nextafter(0.5, 0)).tolist() == [0]


def test_classes_do_not_suppress_each_other() -> None:
    boxes = [[0, 0, 9, 9]] * 3
    assert nms(boxes, [0.1, 0.9, 0.5], [1, 2, 1], 0.5).tolist() == [1, 2]
    assert nms(boxes, [0.1, 0.9, 0.5], None, 0.5).tolist() == [1]


def test_a_slice_half_is_merged_by_ios_and_not_by_iou() -> None:
    boxes = [[0, 0, 100, 40], [60, 0, 100, 40]]
    assert nms(boxes, [0.9, 0.8], None, 0.5, metric="iou").tolist() == [0, 1]
    assert nms(boxes, [0.9, 0.8], None, 0.5, metric="ios").tolist() == [0]


def test_a_suppressed_box_does_not_suppress() -> None:
    boxes = [[0, 0, 10, 1], [3, 0, 13, 1], [6, 0, 16, 1]]
    assert nms(boxes, [0.9, 0.8, 0.7], None, 0.3).tolist() == [0, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", range(4))
def test_boxes_that_are_not_finite_are_never_kept(bad: float, column: int) -> None:
    boxes = np.array([[0, 0, 9, 9], [0, 0, 9, 9]], np.float32)
    boxes[0, column] = bad
    assert nms(boxes, [0.9, 0.1], None, 0.5).tolist() == [1]


def test_boxes_with_a_nan_score_are_never_kept() -> None:
    boxes = [[0, 0, 9, 9], [50, 50, 60, 60]]
    assert nms(boxes, [np.nan, 0.1], None, 0.5).tolist() == [1]
    assert nms(boxes, [np.nan, np.nan], None, 0.5).tolist() == []


@pytest.mark.parametrize("flat", [[4, 4, 4, 4], [4, 0, 4, 9], [0, 4, 9, 4], [9, 9, 0, 0], [9, 0, 0, 9]])
@pytest.mark.parametrize("metric", ["iou", "ios"])
def test_boxes_without_area_neither_suppress_nor_are_suppressed(flat: list[int], metric: str) -> None:
    boxes = [flat, [0, 0, 9, 9], flat]
    got = nms(boxes, [0.9, 0.8, 0.7], None, 0.0, metric=metric)  # type: ignore[arg-type]
    assert got.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("limit", "want"), [(0, []), (1, [2]), (2, [2, 1]), (99, [2, 1, 0])])
def test_max_keep_keeps_the_best(limit: int, want: list[int]) -> None:
    boxes = [[0, 0, 1, 1], [5, 0, 6, 1], [9, 0, 10, 1]]
    assert nms(boxes, [0.1, 0.2, 0.3], None, 0.5, limit).tolist() == want


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"boxes": np.zeros((2, 5))}, ValueError, "boxes have shape (2, 5), needed N x 4"),
        ({"boxes": np.zeros(4)}, ValueError, "boxes have shape (4,)"),
        ({"boxes": np.zeros((1, 2, 4))}, ValueError, "boxes have shape (1, 2, 4)"),
        ({"scores": np.zeros(3)}, ValueError, "scores have shape (3,), needed (2,)"),
        ({"scores": np.zeros((2, 1))}, ValueError, "scores have shape (2, 1)"),
        ({"classes": np.zeros(1, int)}, ValueError, "classes have shape (1,)"),
        ({"classes": np.zeros(2, float)}, TypeError, "classes are float64, needed integers"),
        ({"iou_threshold": -0.1}, ValueError, "iou_threshold is -0.1, needed 0 to 1"),
        ({"iou_threshold": 1.5}, ValueError, "iou_threshold is 1.5"),
        ({"iou_threshold": float("nan")}, ValueError, "iou_threshold is nan"),
        ({"max_keep": -1}, ValueError, "max_keep is -1"),
        ({"metric": "giou"}, ValueError, "metric is 'giou', needed one of iou, ios"),
    ],
)
def test_bad_arguments_say_what_was_found_and_needed(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments: dict[str, object] = {
        "boxes": np.zeros((2, 4)),
        "scores": np.zeros(2),
        "classes": None,
        "iou_threshold": 0.5,
    }
    with pytest.raises(error) as caught:
        nms(**{**arguments, **change})  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_takes_views_read_only_arrays_and_other_dtypes() -> None:
    boxes, scores, classes = scene(np.random.default_rng(1), 200, 3, 100, 30)
    want = nms(boxes, scores, classes, 0.4).tolist()
    wide = np.zeros((200, 9), np.float64)
    wide[:, 2:6] = boxes
    assert nms(wide[:, 2:6], scores.astype(np.float64), classes, 0.4).tolist() == want
    assert nms(np.asfortranarray(boxes), scores, classes.astype(np.uint8), 0.4).tolist() == want
    for array in (boxes, scores, classes):
        array.setflags(write=False)
    assert nms(boxes, scores, classes, 0.4).tolist() == want


def test_arguments_are_left_unchanged() -> None:
    arrays = scene(np.random.default_rng(2), 500, 3, 100, 30)
    before = [a.copy() for a in arrays]
    nms(*arrays, 0.4)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_one_hundred_thousand_boxes() -> None:
    boxes, scores, classes = scene(np.random.default_rng(3), 100_000, 10, 4000, 60)
    started = time.perf_counter()
    kept = nms(boxes, scores, classes, 0.5)
    elapsed = time.perf_counter() - started
    assert len(set(kept.tolist())) == len(kept)
    assert np.all(np.diff(scores[kept]) <= 0)
    # Keeping is final: running it again on what it kept keeps everything.
    again = nms(boxes[kept], scores[kept], classes[kept], 0.5)
    assert again.tolist() == list(range(len(kept)))
    # Generous: about a second on a slow core; a quadratic Python loop would take hours.
    assert elapsed < 60


def test_other_threads_run_meanwhile() -> None:
    boxes, scores, _ = scene(np.random.default_rng(4), 60_000, 1, 60_000, 10)
    worker = threading.Thread(target=nms, args=(boxes, scores, None, 0.5))
    switch = sys.getswitchinterval()
    ticks = 0
    worker.start()
    while worker.is_alive():
        ticks += 1
        time.sleep(switch / 10)
    worker.join()
    # Holding the lock for the whole call would leave one or two turns.
    assert ticks > 10


def test_threads_get_equal_results() -> None:
    arrays = scene(np.random.default_rng(6), 5000, 5, 300, 40)
    want = nms(*arrays, 0.5).tolist()
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(nms(*arrays, 0.5).tolist())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want] * 8


def test_a_missing_extension_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hoverlens.kernels._native", None)
    monkeypatch.delattr(hoverlens.kernels, "_native", raising=False)
    try:
        with pytest.raises(ImportError, match=r"make venv.*pip install \.") as caught:
            importlib.reload(hoverlens.kernels)
    finally:
        monkeypatch.undo()
        importlib.reload(hoverlens.kernels)
    assert "\n" not in str(caught.value)
