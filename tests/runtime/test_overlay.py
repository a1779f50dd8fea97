"""The overlay shows what was found on any picture, and lands on disk whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoverlens.runtime.answer import Answer
from hoverlens.runtime.boxes import Boxes, Region, Space
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.overlay import check_image_path, draw_overlay, save_image

GREY = Frame.from_array(np.full((360, 640, 3), 100, np.uint8))


def changed(overlay: np.ndarray) -> np.ndarray:
    mask: np.ndarray = (overlay[: GREY.height, : GREY.width] != GREY.rgb).any(axis=2)
    return mask


class TestDrawing:
    def test_without_findings_the_photo_stays_as_it_is(self) -> None:
        np.testing.assert_array_equal(draw_overlay(GREY), GREY.rgb)
        np.testing.assert_array_equal(draw_overlay(GREY.rgb), GREY.rgb)

    def test_a_box_is_drawn_where_it_is(self) -> None:
        boxes = Boxes([[100, 200, 300, 320]], Space.PIXEL, GREY.size)
        mask = changed(draw_overlay(GREY, boxes))
        assert mask[200:320, 100].all()
        assert mask[200:320, 299].all()
        assert mask[319, 100:300].all()
        assert not mask[330:, :].any()
        assert not mask[:, 310:].any()
        assert not mask[240:300, 120:280].any()

    def test_boxes_of_a_tile_are_drawn_on_the_original(self) -> None:
        boxes = Boxes([[0, 0, 1, 1]], Space.NORM, (64, 64), Region(100, 200, 200, 120), GREY.size)
        on_original = Boxes([[100, 200, 300, 320]], Space.PIXEL, GREY.size)
        np.testing.assert_array_equal(draw_overlay(GREY, boxes), draw_overlay(GREY, on_original))

    def test_boxes_of_another_picture_are_refused(self) -> None:
        with pytest.raises(ValueError, match="belong to a picture"):
            draw_overlay(GREY, Boxes.empty((640, 640)))

    def test_classes_have_their_own_stable_colours(self) -> None:
        def colour(k: int, n: int) -> tuple[int, ...]:
            box = [[100, 200, 300, 320]] * n
            boxes = Boxes(box, Space.PIXEL, GREY.size, classes=[k] * n)
            return tuple(draw_overlay(GREY, boxes)[319, 200])

        colours = [colour(k, 1) for k in range(10)]
        assert len(set(colours)) == 10
        assert colour(3, 2) == colours[3]

    def test_the_answer_box_stands_out(self) -> None:
        answer = Answer("here", "box", box=(0.25, 0.25, 0.75, 0.75))
        overlay = draw_overlay(GREY, answer=answer)
        magenta = (overlay == (255, 0, 200)).all(axis=2)
        rows, columns = np.nonzero(magenta[: GREY.height])
        assert abs(columns.min() - 160) < 8
        assert abs(columns.max() - 480) < 8
        assert abs(rows.max() - 270) < 8
        assert overlay.shape[0] > GREY.height

    def test_the_depth_inset_shows_near_red_and_far_blue(self) -> None:
        depth = np.repeat(np.linspace(50, 2, 40, dtype=np.float32)[:, None], 60, axis=1)
        overlay = draw_overlay(GREY, depth=depth).astype(int)
        rows, columns = np.nonzero(changed(overlay))
        inset = overlay[rows.min() : rows.max(), columns.min() : columns.max()]
        top, bottom = inset[len(inset) // 5, 40], inset[len(inset) * 3 // 4, 40]
        assert top[2] > top[0] + 50
        assert bottom[0] > bottom[2] + 50

    def test_the_depth_inset_avoids_the_boxes(self) -> None:
        boxes = Boxes([[450, 0, 640, 150], [0, 0, 200, 150]], Space.PIXEL, GREY.size)
        only = draw_overlay(GREY, boxes)
        both = draw_overlay(GREY, boxes, depth=np.ones((4, 6)))
        np.testing.assert_array_equal(only[:150], both[:150])

    @pytest.mark.parametrize("depth", [np.zeros((0, 3)), np.zeros(3), np.zeros((2, 2, 2))])
    def test_depth_that_is_no_map_is_refused(self, depth: Any) -> None:
        with pytest.raises(ValueError, match="height x width"):
            draw_overlay(GREY, depth=depth)

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 1e30])
    def test_flat_or_unknown_depth_is_drawn(self, value: float) -> None:
        draw_overlay(GREY, depth=np.full((3, 3), value))

    @given(st.text(max_size=300), st.text(max_size=300))
    @settings(max_examples=30)
    def test_any_text_fits_the_width(self, question: str, text: str) -> None:
        overlay = draw_overlay(GREY, answer=Answer(text, "text"), question=question)
        assert overlay.shape[1] == GREY.width
        # The right margin stays empty: nothing ran over.
        assert (overlay[GREY.height :, -2:] == overlay[-1, -1]).all()

    def test_endless_text_is_cut(self) -> None:
        answer = Answer("W" * 100_000, "text", warnings=("w " * 5000,) * 50)
        overlay = draw_overlay(GREY, answer=answer, question="why " * 25_000)
        assert overlay.shape[0] < 4 * GREY.height

    @given(st.data())
    @settings(max_examples=40)
    def test_any_size_and_any_boxes(self, data: st.DataObject) -> None:
        w, h = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 700))
        number = st.floats(-1e6, 1e6, width=32)
        corners = np.array(data.draw(st.lists(st.tuples(number, number, number, number), max_size=6)))
        corners = np.sort(corners.reshape(-1, 2, 2), axis=1).reshape(-1, 4)
        n = len(corners)
        boxes = Boxes(corners, Space.PIXEL, (w, h), scores=[0.5] * n, classes=list(range(n)))
        answer = Answer("x", "box", box=data.draw(st.tuples(number, number, number, number)))
        frame = Frame.from_array(np.zeros((h, w), np.uint8))
        overlay = draw_overlay(frame, boxes, np.eye(5), answer, "where?")
        assert overlay.dtype == np.uint8
        assert overlay.shape[0] >= h
        assert overlay.shape[1] >= w

    @pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (4000, 2250)])
    def test_extreme_sizes(self, size: tuple[int, int]) -> None:
        frame = Frame.from_array(np.zeros((size[1], size[0]), np.uint8))
        boxes = Boxes([[0, 0, 1, 1]], Space.NORM, size, classes=[2])
        overlay = draw_overlay(frame, boxes, np.eye(3), Answer("yes", "option", confidence=0.5), "is it?")
        assert overlay.shape[0] * overlay.shape[1] < 4 * max(size[0] * size[1], 1_000_000)

    def test_a_real_photo_with_its_annotations(self, shared_data: Path) -> None:
        folder = shared_data / "images" / "auair"
        notes = json.loads((folder / "annotations.json").read_text())
        note = notes["annotations"][0]
        frame = Frame.from_file(folder / note["image_name"])
        corners = [[b["left"], b["top"], b["left"] + b["width"], b["top"] + b["height"]] for b in note["bbox"]]
        boxes = Boxes(
            corners,
            Space.PIXEL,
            frame.size,
            classes=[b["class"] for b in note["bbox"]],
            names=notes["categories"],
        )
        overlay = draw_overlay(frame, boxes, question="What is this?", answer=Answer("a road", "text"))
        assert overlay.shape[1] == frame.width


class TestSaving:
    @pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG", ".webp", ".bmp", ".tif"])
    def test_the_extension_decides_the_format(self, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"overlay{suffix}"
        save_image(GREY.rgb, path)
        np.testing.assert_allclose(Frame.from_file(path).rgb, GREY.rgb, atol=2)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("a.txt", "'.txt'; use one of .jpg"),
            ("a", "extension ''"),
            ("missing/a.png", "no folder"),
            ("folder.png", "is a folder"),
        ],
    )
    def test_a_bad_target_is_one_line_and_nothing_is_written(self, name: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "folder.png").mkdir()
        for check in (check_image_path, lambda p: save_image(GREY.rgb, p)):
            with pytest.raises(BadInput) as caught:
                check(tmp_path / name)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
        assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]

    def test_a_picture_too_large_for_its_format(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"70000 x 1 pixels as JPEG .* use \.png"):
            save_image(np.zeros((1, 70_000, 3), np.uint8), tmp_path / "a.jpg")
        assert not list(tmp_path.iterdir())
