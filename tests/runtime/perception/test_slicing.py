"""An object across a tile border is found once and whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.perception.detector import Detector
from hoverlens.runtime.perception.slicing import SliceOptions, rank_cut

NETWORK = (64, 64)


def picture(*boxes: tuple[int, int, int, int], size: tuple[int, int] = (192, 128)) -> np.ndarray:
    rgb = np.zeros((size[1], size[0], 3), np.uint8)
    for x1, y1, x2, y2 in boxes:
        rgb[y1:y2, x1:x2] = 255
    return rgb


@given(
    w=st.integers(1, 3000),
    h=st.integers(1, 3000),
    overlap=st.floats(0, 0.6),
    grid=st.one_of(st.none(), st.tuples(st.integers(1, 6), st.integers(1, 6))),
)
def test_tiles_cover_the_frame_and_stay_inside(w: int, h: int, overlap: float, grid: tuple[int, int] | None) -> None:
    options = (
        SliceOptions(size=(320, 320), overlap=overlap)
        if grid is None
        else SliceOptions(rows=grid[0], cols=grid[1], overlap=overlap)
    )
    tiles = options.tiles((w, h), NETWORK)
    columns, rows = np.zeros(w, bool), np.zeros(h, bool)
    for x, y, tw, th in tiles:
        assert x >= 0 and y >= 0 and tw >= 1 and th >= 1  # noqa: PT018
        assert x + tw <= w and y + th <= h  # noqa: PT018
        columns[x : x + tw] = True
        rows[y : y + th] = True
    assert columns.all()
    assert rows.all()
    assert len({t[2:] for t in tiles}) == 1


def test_neighbours_share_at_least_the_overlap() -> None:
    tiles = SliceOptions(overlap=0.25).tiles((1000, 64), NETWORK)
    starts = [t[0] for t in tiles]
    assert max(np.diff(starts)) <= 64 * 0.75 + 1
    assert starts[-1] + 64 == 1000


def test_a_grid_has_that_many_tiles() -> None:
    tiles = SliceOptions(rows=2, cols=3).tiles((1920, 1080), NETWORK)
    assert len(tiles) == 6
    assert SliceOptions(rows=2, cols=2, overlap=0).tiles((100, 60), NETWORK) == [
        (0, 0, 50, 30),
        (50, 0, 50, 30),
        (0, 30, 50, 30),
        (50, 30, 50, 30),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"rows": 2},
        {"rows": 0, "cols": 2},
        {"rows": 2, "cols": 2, "size": (64, 64)},
        {"size": (0, 64)},
        {"overlap": 0.95},
        {"overlap": -0.1},
        {"overlap": float("nan")},
        {"merge": 0.0},
        {"max_batch": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="slicing"):
        SliceOptions(**bad)


def test_a_flood_of_tiles_is_refused() -> None:
    with pytest.raises(BadInput, match="at most"):
        SliceOptions(size=(4, 4)).tiles((4000, 3000), NETWORK)


@pytest.mark.parametrize("full_frame", [True, False])
@pytest.mark.parametrize("x", range(20, 120, 7))
def test_an_object_across_a_border_is_found_once_and_whole(blobs: Detector, x: int, full_frame: bool) -> None:
    """Objects up to the overlap (a quarter of 64 pixels) in size, anywhere."""
    box = (x, 50, x + 14, 62)
    options = SliceOptions(overlap=0.25, full_frame=full_frame)
    found = blobs.detect(picture(box), sliced=options)
    assert len(found) == 1
    # The full-frame pass sees it at a third of the size, hence some slack.
    assert found.xyxy[0] == pytest.approx(box, abs=3 if full_frame else 0.5)


def test_an_object_larger_than_a_tile_comes_from_the_full_frame(blobs: Detector) -> None:
    box = (30, 20, 150, 100)
    found = blobs.detect(picture(box), sliced=True)
    assert found.xyxy == pytest.approx(np.array([box]), abs=3)
    assert len(found) == 1


def test_two_close_objects_stay_two(blobs: Detector) -> None:
    found = blobs.detect(picture((56, 40, 64, 48), (66, 40, 74, 48)), sliced=True)
    assert len(found) == 2


def test_slices_show_what_the_whole_frame_loses(blobs: Detector) -> None:
    small = picture((100, 60, 101, 61), (300, 200, 303, 203), size=(640, 480))
    assert len(blobs.detect(small)) == 0
    found = blobs.detect(small, sliced=True)
    assert sorted(found.xyxy.tolist()) == [[100, 60, 101, 61], [300, 200, 303, 203]]


def test_batched_and_looped_slices_agree(blobs: Detector, blobs_one_by_one: Detector) -> None:
    rng = np.random.default_rng(3)
    boxes = [(int(x), int(y), int(x) + 9, int(y) + 7) for x, y in rng.integers(0, 110, (12, 2))]
    rgb = picture(*boxes)
    options = SliceOptions(max_batch=3)
    batched = blobs.detect(rgb, sliced=options)
    assert len(batched)
    assert batched == blobs_one_by_one.detect(rgb, sliced=options)
    assert max(blobs.engine.batches) == 3  # type: ignore[attr-defined]
    assert set(blobs_one_by_one.engine.batches) == {1}  # type: ignore[attr-defined]


def test_a_frame_smaller_than_a_tile_is_one_pass(blobs: Detector) -> None:
    blobs.engine.batches.clear()  # type: ignore[attr-defined]
    found = blobs.detect(picture((4, 4, 12, 12), size=(40, 30)), sliced=True)
    assert len(found) == 1
    assert blobs.engine.batches == [1]  # type: ignore[attr-defined]


def test_only_boxes_at_inner_edges_count_as_cut() -> None:
    tiles = [(0, 0, 60, 60), (40, 0, 60, 60)]
    boxes = np.array(
        [
            [0, 0, 10, 10],  # at the frame's own edge
            [45, 20, 60, 30],  # cut, and inside the overlap
            [20, 20, 60, 30],  # cut, longer than the overlap
            [20, 20, 30, 30],  # whole
        ],
        np.float32,
    )
    cut, seen = rank_cut(boxes, tiles[0], tiles, (100, 60), tolerance=1)
    assert cut.tolist() == [False, True, True, False]
    assert seen.tolist() == [False, True, False, False]
