"""A box carries its image: conversions are exact, and boxes of different images never meet."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.boxes import Boxes, Region, Space, format_box
from hoverlens.runtime.geometry import Letterbox

SIZE = (1920, 1080)
HALF_A_PIXEL = 0.5

sides = st.integers(1, 8192)
sizes = st.tuples(sides, sides)
fractions = st.floats(0, 1, width=32)


@st.composite
def boxes_on(draw: st.DrawFn, size: tuple[int, int], space: Space = Space.PIXEL) -> Boxes:
    n = draw(st.integers(0, 5))
    corners = np.array(draw(st.lists(fractions, min_size=4 * n, max_size=4 * n))).reshape(n, 2, 2)
    corners.sort(axis=1)
    return Boxes(corners.reshape(n, 4), Space.NORM, size).to(space)


@st.composite
def sized_boxes(draw: st.DrawFn) -> Boxes:
    return draw(boxes_on(draw(sizes), draw(st.sampled_from(Space))))


@st.composite
def regions_of(draw: st.DrawFn, size: tuple[int, int]) -> Region:
    w, h = draw(st.integers(1, size[0])), draw(st.integers(1, size[1]))
    x, y = draw(st.integers(0, size[0] - w)), draw(st.integers(0, size[1] - h))
    return Region(x, y, w, h)


def pixel_error(a: Boxes, b: Boxes) -> float:
    assert a.same_image(b)
    difference = np.abs(a.to(Space.PIXEL).xyxy - b.to(Space.PIXEL).xyxy)
    return float(difference.max(initial=0.0))


class TestConversions:
    def test_thousandths_are_of_the_image_the_boxes_live_on(self) -> None:
        boxes = Boxes([[0, 500, 1000, 1000]], Space.GRID1000, SIZE)
        assert boxes.to(Space.PIXEL).xyxy.tolist() == [[0, 540, 1920, 1080]]
        assert boxes.to(Space.NORM).xyxy.tolist() == [[0, 0.5, 1, 1]]

    @pytest.mark.parametrize(
        ("corner", "expected"),
        [((0, 0, 10, 10), (100, 50, 105, 70)), ((630, 310, 640, 320), (415, 670, 420, 690))],
    )
    def test_corners_of_a_non_square_crop_map_to_the_region_s_corners(
        self, corner: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        crop = Boxes([corner], Space.PIXEL, (640, 320), Region(100, 50, 320, 640), SIZE)
        back = crop.to_original()
        assert back.size == SIZE
        assert back.region is None
        np.testing.assert_allclose(back.xyxy, [expected])

    def test_a_crop_s_normalised_boxes_become_normalised_boxes_of_the_original(self) -> None:
        crop = Boxes([[0, 0, 1, 1]], Space.NORM, (99, 77), Region(480, 540, 960, 540), SIZE)
        np.testing.assert_allclose(crop.to_original().xyxy, [[0.25, 0.5, 0.75, 1.0]])

    def test_boxes_of_the_original_are_their_own_original(self) -> None:
        boxes = Boxes([[1, 2, 3, 4]], Space.PIXEL, SIZE)
        assert boxes.to_original() is boxes

    @given(sized_boxes(), st.sampled_from(Space))
    def test_round_trip_through_a_space(self, boxes: Boxes, space: Space) -> None:
        assert pixel_error(boxes.to(space).to(boxes.space), boxes) < 0.01

    @given(st.data())
    def test_round_trip_through_a_resampled_crop(self, data: st.DataObject) -> None:
        boxes = data.draw(sized_boxes())
        region = data.draw(regions_of(boxes.size))
        crop = boxes.in_region(region, data.draw(sizes))
        assert crop.space is boxes.space
        assert pixel_error(crop.to_original(), boxes) < HALF_A_PIXEL

    @given(st.data())
    def test_crop_of_a_crop_counts_in_the_original(self, data: st.DataObject) -> None:
        boxes = data.draw(sized_boxes())
        one, two = data.draw(regions_of(boxes.size)), data.draw(regions_of(boxes.size))
        size = data.draw(sizes)
        through = boxes.in_region(one, data.draw(sizes)).in_region(two, size)
        assert through.same_image(boxes.in_region(two, size))
        assert pixel_error(through.to_original(), boxes) < HALF_A_PIXEL

    @given(st.data(), st.booleans(), st.booleans(), st.booleans())
    def test_round_trip_through_a_letterbox(
        self, data: st.DataObject, center: bool, enlarge: bool, stretch: bool
    ) -> None:
        source, network = data.draw(sizes), data.draw(sizes)
        box = Letterbox.stretch(source, network) if stretch else Letterbox.fit(source, network, center, enlarge)
        boxes = data.draw(boxes_on(source))
        inside = box.forward(boxes)
        assert inside.size == network
        assert pixel_error(inside.to_original(), boxes) < HALF_A_PIXEL
        assert pixel_error(box.backward(inside.xyxy), boxes) < HALF_A_PIXEL

    @given(st.data())
    def test_round_trip_through_a_letterboxed_tile(self, data: st.DataObject) -> None:
        size = data.draw(sizes)
        region = data.draw(regions_of(size))
        tile_size = (int(region.width), int(region.height))
        letterbox = Letterbox.fit(tile_size, (640, 640), region=region, origin_size=size)
        boxes = data.draw(boxes_on(size))
        inside = letterbox.forward(boxes.in_region(region, tile_size))
        assert pixel_error(letterbox.backward(inside.xyxy), boxes) < HALF_A_PIXEL
        assert pixel_error(inside.to_original(), boxes) < HALF_A_PIXEL

    def test_letterbox_uses_the_scale_that_rounding_left(self) -> None:
        # 1001 x 1000 into 10 x 10: the nominal scale would put the lower edge at 1001.
        letterbox = Letterbox.fit((1001, 1000), (10, 10))
        whole = letterbox.backward([[0, 0, 10, 10]])
        np.testing.assert_allclose(whole.xyxy, [[0, 0, 1001, 1000]])

    @given(sizes, sizes, st.booleans())
    def test_letterbox_puts_the_image_inside_the_input(
        self, source: tuple[int, int], network: tuple[int, int], center: bool
    ) -> None:
        letterbox = Letterbox.fit(source, network, center)
        whole = letterbox.forward(Boxes([[0, 0, *source]], Space.PIXEL, source)).xyxy[0]
        w, h = letterbox.resized
        expected = np.array([0, 0, w, h]) + [letterbox.pad_left, letterbox.pad_top] * 2
        np.testing.assert_allclose(whole, expected, atol=0.01)
        assert w == network[0] or h == network[1]

    def test_letterbox_refuses_boxes_of_another_image(self) -> None:
        with pytest.raises(ValueError, match=r"different|cannot letterbox"):
            Letterbox.fit(SIZE, (640, 640)).forward(Boxes.empty((640, 640)))

    @pytest.mark.parametrize(
        "arguments",
        [
            ((10, 10), (5, 5), (6, 5), 0, 0),
            ((10, 10), (5, 5), (5, 4), 0, 2),
            ((10, 10), (5, 5), (5, 4), 0, -1),
            ((0, 10), (5, 5), (5, 5)),
            ((10, 10), (5, 5), (5, 5), 0, 0, Region(0, 0, 1, 1)),
        ],
    )
    def test_letterbox_that_does_not_fit_is_refused(self, arguments: Any) -> None:
        with pytest.raises(ValueError, match=r"leaves|positive|belong together"):
            Letterbox(*arguments)


class TestMeasures:
    def test_iou_and_ios_by_hand(self) -> None:
        a = Boxes([[0, 0, 10, 10]], Space.PIXEL, SIZE)
        b = Boxes([[5, 0, 15, 10], [2, 2, 4, 4], [10, 0, 20, 10], [3, 3, 3, 9]], Space.PIXEL, SIZE)
        np.testing.assert_allclose(a.iou(b), [[1 / 3, 0.04, 0, 0]])
        np.testing.assert_allclose(a.ios(b), [[0.5, 1, 0, 0]])
        np.testing.assert_allclose(b.area(), [100, 4, 100, 0])

    @given(st.data())
    def test_iou_is_symmetric_bounded_and_blind_to_space(self, data: st.DataObject) -> None:
        size = data.draw(sizes)
        a, b = data.draw(boxes_on(size)), data.draw(boxes_on(size))
        iou = a.iou(b)
        assert iou.shape == (len(a), len(b))
        assert ((iou >= 0) & (iou <= 1 + 1e-9)).all()
        np.testing.assert_array_equal(iou, b.iou(a).T)
        own = np.diag(a.iou(a))
        np.testing.assert_allclose(own, (a.area() > 0).astype(float))
        assert (a.ios(b) >= iou - 1e-12).all()

    def test_boxes_of_different_images_never_meet(self) -> None:
        original = Boxes([[0, 0, 1, 1]], Space.NORM, SIZE)
        resized = Boxes([[0, 0, 1, 1]], Space.NORM, (960, 540))
        tile = Boxes([[0, 0, 1, 1]], Space.NORM, SIZE, Region(0, 0, 640, 640), SIZE)
        for other in (resized, tile):
            with pytest.raises(ValueError, match="cannot compare boxes"):
                original.iou(other)
            with pytest.raises(ValueError, match="cannot join boxes"):
                Boxes.concat([original, other])

    @given(sized_boxes(), st.floats(-3, 3), st.floats(-3, 3))
    def test_clip_stays_inside_and_is_idempotent(self, boxes: Boxes, dx: float, dy: float) -> None:
        w, h = boxes.size
        moved = Boxes(
            boxes.to(Space.PIXEL).xyxy + np.array([dx * w, dy * h] * 2, np.float32), Space.PIXEL, boxes.size
        ).to(boxes.space)
        clipped = moved.clip()
        pixels = clipped.to(Space.PIXEL).xyxy
        assert ((pixels >= 0) & (pixels <= np.array([w, h, w, h], np.float32) * (1 + 1e-6))).all()
        assert clipped.clip() == clipped


class TestRows:
    boxes = Boxes(
        [[0, 0, 1, 1], [1, 1, 2, 2], [2, 2, 3, 3]],
        Space.PIXEL,
        SIZE,
        scores=[0.9, 0.5, 0.1],
        classes=[1, 0, 7],
        names=("car", "van"),
    )

    @pytest.mark.parametrize(
        ("which", "scores"),
        [
            ([2, 0], [0.1, 0.9]),
            ([True, False, True], [0.9, 0.1]),
            (slice(1, None), [0.5, 0.1]),
            (1, [0.5]),
            ([], []),
            ([-1], [0.1]),
            (np.zeros(3, bool), []),
        ],
    )
    def test_select(self, which: Any, scores: list[float]) -> None:
        chosen = self.boxes.select(which)
        assert chosen.scores is not None
        np.testing.assert_allclose(chosen.scores, scores)
        assert len(chosen) == len(scores)
        assert chosen.names == self.boxes.names

    @pytest.mark.parametrize("which", [[True, False], [0.5], [[0, 1]], ["a"]])
    def test_select_refuses(self, which: Any) -> None:
        with pytest.raises(ValueError, match=r"cannot select|the mask has"):
            self.boxes.select(which)

    def test_label(self) -> None:
        assert [self.boxes.label(i) for i in range(3)] == ["van", "car", "class_7"]
        assert Boxes([[0, 0, 1, 1]], Space.NORM, SIZE).label(0) == "object"
        with pytest.raises(IndexError):
            self.boxes.label(3)

    def test_concat_keeps_order_and_columns(self) -> None:
        joined = Boxes.concat([self.boxes.select([2]), Boxes.empty(SIZE), self.boxes.select([0])])
        assert joined == self.boxes.select([2, 0])

    def test_concat_converts_spaces(self) -> None:
        joined = Boxes.concat([self.boxes, self.boxes.to(Space.GRID1000)])
        assert joined.space is Space.PIXEL
        assert pixel_error(joined.select(slice(3, 6)), self.boxes) < 0.01

    def test_concat_refuses_what_would_lose_something(self) -> None:
        plain = Boxes([[0, 0, 1, 1]], Space.PIXEL, SIZE)
        with pytest.raises(ValueError, match="have no scores"):
            Boxes.concat([self.boxes, plain])
        with pytest.raises(ValueError, match="class names"):
            Boxes.concat([self.boxes, Boxes.empty(SIZE, names=("x",))])
        with pytest.raises(ValueError, match="nothing to join"):
            Boxes.concat([])

    def test_iteration_gives_single_boxes(self) -> None:
        assert [b.label(0) for b in self.boxes] == ["van", "car", "class_7"]

    @given(sized_boxes())
    def test_json_round_trip_is_exact(self, boxes: Boxes) -> None:
        assert Boxes.from_dict(json.loads(json.dumps(boxes.to_dict()))) == boxes

    def test_json_round_trip_of_every_field(self) -> None:
        crop = self.boxes.in_region(Region(0.5, 1, 20, 30), (7, 9))
        assert Boxes.from_dict(json.loads(json.dumps(crop.to_dict(), allow_nan=False))) == crop

    def test_boxes_hold_their_own_read_only_copy(self) -> None:
        buffer = np.zeros((1, 4), np.float32)
        boxes = Boxes(buffer, Space.PIXEL, SIZE)
        buffer += 5
        assert boxes.xyxy.tolist() == [[0, 0, 0, 0]]
        with pytest.raises(ValueError, match="read-only"):
            boxes.xyxy[0, 0] = 1


class TestValidation:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"xyxy": [0, 0, 1, 1]}, "N x 4"),
            ({"xyxy": [[0, 0, 1]]}, "N x 4"),
            ({"xyxy": np.zeros((4, 0))}, "N x 4"),
            ({"xyxy": np.zeros((1, 4, 1))}, "N x 4"),
            ({"xyxy": [[0, 0, math.nan, 1]]}, "finite"),
            ({"xyxy": [[0, 0, math.inf, 1]]}, "finite"),
            ({"xyxy": [[0, 0, 1e39, 1]]}, "finite"),
            ({"xyxy": [[2, 0, 1, 1]]}, "upside down"),
            ({"xyxy": [[0, 2, 1, 1]]}, "upside down"),
            ({"space": "inches"}, "inches"),
            ({"size": (0, 5)}, "positive"),
            ({"size": (5, -1)}, "positive"),
            ({"size": (5.5, 5)}, "whole pixels"),
            ({"size": (5,)}, "whole pixels"),
            ({"size": 5}, "whole pixels"),
            ({"region": Region(0, 0, 1, 1)}, "belong together"),
            ({"origin_size": (5, 5)}, "belong together"),
            ({"scores": [0.1, 0.2]}, "scores have shape"),
            ({"scores": 0.1}, "scores have shape"),
            ({"scores": [math.nan]}, "score is not finite"),
            ({"classes": [1, 2]}, "classes have shape"),
            ({"classes": [0.5]}, "integers"),
            ({"classes": [-1]}, "negative"),
            ({"names": "car"}, "one string"),
        ],
    )
    def test_nonsense_is_refused(self, changes: dict[str, Any], message: str) -> None:
        good: dict[str, Any] = {"xyxy": [[0, 0, 1, 1]], "space": Space.PIXEL, "size": SIZE}
        Boxes(**good)
        with pytest.raises(ValueError, match=message):
            Boxes(**{**good, **changes})

    @pytest.mark.parametrize("values", [(0, 0, 0, 1), (0, 0, 1, -1), (math.nan, 0, 1, 1)])
    def test_a_region_has_an_area(self, values: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match=r"positive|finite"):
            Region(*values)

    def test_no_boxes_is_fine(self) -> None:
        none = Boxes.empty(SIZE)
        assert len(none) == 0
        assert none.to(Space.NORM).clip().iou(none).shape == (0, 0)
        assert len(Boxes([], Space.PIXEL, SIZE)) == 0

    def test_usable_rows_names_the_rows_that_the_constructor_takes(self) -> None:
        raw = np.array([[0, 0, 1, 1], [1, 0, 0, 1], [0, np.nan, 1, 1], [0, 0, 1e39, 1]])
        usable = Boxes.usable_rows(raw)
        assert usable.tolist() == [True, False, False, False]
        Boxes(raw[usable], Space.PIXEL, SIZE)


class TestText:
    def test_format(self) -> None:
        assert format_box([0.1234, 0.456, 0.789, 0.9994]) == "<0.123><0.456><0.789><0.999>"
        assert format_box(np.array([0, 0, 1, 1.00001], np.float32)) == "<0.000><0.000><1.000><1.000>"

    @pytest.mark.parametrize("box", [[0, 0, 1], [0, 0, 1, 2], [-1, 0, 1, 1], [0, 0, math.nan, 1], [0.5, 0, 0.4, 1]])
    def test_format_refuses(self, box: list[float]) -> None:
        with pytest.raises(ValueError, match="box"):
            format_box(box)
