"""Larger is farther, whatever the model says; boxes get depths, an order and heights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoverlens.runtime.boxes import Boxes, Region, Space
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.perception.depth import DepthMap, DepthModel, relative_depth

MakeModel = Callable[..., Path]
RAMP = np.repeat(np.linspace(1, 5, 64, dtype=np.float32)[:, None], 64, 1)
PHOTO = np.zeros((128, 256, 3), np.uint8)


def at(*boxes: tuple[float, float, float, float], size: tuple[int, int] = (100, 80)) -> Boxes:
    return Boxes(np.array(boxes, np.float32).reshape(-1, 4), Space.PIXEL, size)


def nadir(height: float = 40.0, car: float = 2.0) -> DepthMap:
    """Flat ground straight below, with one box-shaped object."""
    depth = np.full((80, 100), height, np.float32)
    depth[30:40, 50:70] = height - car
    return DepthMap(depth, "metric", (100, 80))


def oblique(up: float = 0.0, pitch: float = 40.0, height: float = 20.0) -> DepthMap:
    """Range along each ray to a ground plane, and to a plane ``up`` metres above it in a box."""
    ys = np.mgrid[0:80, 0:100][0]
    y = (ys + 0.5 - 40) / 100
    down = math.sin(math.radians(pitch)) + y * math.cos(math.radians(pitch))
    depth = height / down  # z-depth
    top = (height - up) / down
    depth[30:40, 50:70] = top[30:40, 50:70]
    return DepthMap(depth.astype(np.float32), "metric", (100, 80))


# -- models ----------------------------------------------------------------------------------------


def test_disparity_is_turned_round(make_model: MakeModel) -> None:
    with DepthModel.open(make_model({"disparity": RAMP[None]})) as model:
        assert (model.kind, model.meaning) == ("relative", "disparity")
        found = model.estimate(PHOTO)
    assert found.size == (256, 128)
    assert found.inverse
    assert found.depth.dtype == np.float32
    assert found.depth[0, 0] == 1
    assert found.depth[-1, 0] == 0
    assert found.resized().shape == (128, 256)


@pytest.mark.parametrize(
    ("name", "outputs", "kind", "meaning"),
    [
        ("depth_anything_v2_vits.onnx", ["predicted_depth"], "relative", "disparity"),
        ("depth_anything_v2_metric_vkitti_vits.onnx", ["depth"], "metric", "depth"),
        ("DA3-SMALL.onnx", ["depth"], "relative", "depth"),
        ("depth-anything-3-metric.onnx", ["depth"], "metric", "depth"),
        ("rtmonodepth_s.onnx", ["disp", "depth"], "relative", "depth"),
        ("rtmonodepth_s.onnx", ["disp"], "relative", "disparity"),
        ("midas.onnx", ["output"], "relative", "disparity"),
    ],
)
def test_what_the_numbers_mean_follows_the_rules(
    make_model: MakeModel, name: str, outputs: list[str], kind: str, meaning: str
) -> None:
    model = DepthModel.open(make_model(dict.fromkeys(outputs, RAMP[None]), name=name))
    assert (model.kind, model.meaning, model.output) == (kind, meaning, outputs[-1])
    imagenet = "disp" not in outputs
    assert (model.preprocessing.mean[0] != 0) is imagenet
    assert model.preprocessing.mode == "stretch"


def test_arguments_and_the_files_own_entry_override(make_model: MakeModel) -> None:
    path = make_model({"out": RAMP})
    model = DepthModel.open(path, kind="metric", preprocessing={"mean": [0, 0, 0]})
    assert (model.kind, model.meaning, model.preprocessing.mean) == ("metric", "depth", (0, 0, 0))
    assert model.estimate(PHOTO).depth == pytest.approx(RAMP)
    assert DepthModel.open(path, meaning="depth").estimate(PHOTO).depth == pytest.approx(RAMP)
    inverse = DepthModel.open(path, kind="metric", meaning="disparity").estimate(PHOTO)
    assert inverse.depth == pytest.approx(1 / RAMP)
    own = {"hoverlens.depth": json.dumps({"kind": "metric", "meaning": "depth", "output": "b"})}
    path = make_model({"a_depth": RAMP, "b": RAMP * 2}, metadata=own)
    assert DepthModel.open(path).estimate(PHOTO).depth == pytest.approx(RAMP * 2)
    with pytest.raises(BadInput, match="kind is 'far'"):
        DepthModel.open(path, kind="far")
    with pytest.raises(BadInput, match="metadata"):
        DepthModel.open(make_model({"out": RAMP}, metadata={"hoverlens.depth": "3"}))
    with pytest.raises(BadInput, match="no output 'c'"):
        DepthModel.open(make_model({"out": RAMP}, metadata={"hoverlens.depth": '{"output": "c"}'}))


def test_an_open_input_keeps_the_aspect_in_multiples_of_the_patch(make_model: MakeModel) -> None:
    path = make_model({"depth": np.ones((1, 518, 518))}, open_size=True)
    model = DepthModel.open(path)
    assert model.preprocessing.size == (518, 518)
    seen: list[tuple[int, ...]] = []
    run = model.engine.run

    def spy(feeds: Any) -> Any:
        seen.append(feeds["images"].shape)
        return run(feeds)

    model.engine.run = spy  # type: ignore[method-assign]
    model.estimate(np.zeros((1080, 1920, 3), np.uint8))
    model.estimate(np.zeros((3000, 100, 3), np.uint8))
    assert seen == [(1, 3, 294, 518), (1, 3, 518, 14)]


def test_padding_of_a_letterboxed_model_is_cut_off(make_model: MakeModel) -> None:
    depth = np.full((64, 64), 9, np.float32)
    depth[16:48] = 3
    model = DepthModel.open(make_model({"depth": depth}), kind="metric", preprocessing={"mode": "center"})
    assert (model.estimate(PHOTO).depth == 3).all()
    assert model.estimate(PHOTO).depth.shape == (32, 64)


@pytest.mark.parametrize(
    "outputs",
    [
        {"output0": np.zeros((14, 84))},
        {"y": np.zeros((85, 8, 8))},
        {"y": np.zeros(10)},
        {"a": RAMP, "b": RAMP},
        {"y": np.zeros((1, 2, 2))},
    ],
)
def test_what_is_no_depth_model_is_refused(make_model: MakeModel, outputs: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as e:
        DepthModel.open(make_model(outputs))
    assert "no depth model" in str(e.value)
    assert "\n" not in str(e.value)


def test_values_that_are_no_distance_become_unknown(make_model: MakeModel) -> None:
    depth = RAMP.copy()
    depth[0, :4] = [np.nan, np.inf, 0, -1]
    path = make_model({"depth": depth}, name="metric.onnx")
    assert np.isnan(DepthModel.open(path).estimate(PHOTO).depth[0, :4]).all()


def test_relative_depth_of_odd_maps() -> None:
    assert relative_depth(np.ones((2, 2))).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert np.isnan(relative_depth(np.full((2, 2), np.nan))).all()
    mixed = relative_depth(np.array([[0.0, 1.0, np.inf, np.nan]]))
    assert mixed[0, :2].tolist() == [1, 0]
    assert np.isnan(mixed[0, 2:]).all()


# -- boxes -----------------------------------------------------------------------------------------


def test_a_box_gets_the_median_of_its_inner_part() -> None:
    m = nadir()
    assert m.at(at((50, 30, 70, 40), (0, 0, 20, 20))).tolist() == [38, 40]
    # A rim of background around the object does not matter.
    assert m.at(at((48, 29, 72, 41))).tolist() == [38]


def test_boxes_of_any_size_or_place() -> None:
    m = nadir()
    found = m.at(
        at(
            (60, 35, 60.2, 35.2),  # under a pixel
            (60, 35, 60, 35),  # no area
            (-50, -50, -10, -10),  # outside
            (200, 10, 220, 30),
            (-20, -20, 10, 10),  # partly outside
            (0, 0, 100, 80),
        )
    )
    assert found.tolist() == pytest.approx([38, 38, math.nan, math.nan, 40, 40], nan_ok=True)
    assert m.at(at()).shape == (0,)


def test_boxes_in_other_spaces_and_on_crops_are_the_same_boxes() -> None:
    m = nadir()
    norm = Boxes([[0.5, 0.375, 0.7, 0.5]], Space.NORM, (100, 80))
    crop = Boxes([[0, 0, 200, 100]], Space.PIXEL, (200, 100), Region(50, 30, 20, 10), (100, 80))
    assert m.at(norm).tolist() == m.at(crop).tolist() == [38]
    with pytest.raises(BadInput, match="50x40"):
        m.at(at((0, 0, 1, 1), size=(50, 40)))


def test_unknown_pixels_do_not_spoil_a_box() -> None:
    m = nadir()
    m.depth[30:40, 50:58] = np.nan
    assert m.at(at((50, 30, 70, 40))).tolist() == [38]
    m.depth[30:40, 50:70] = np.nan
    assert np.isnan(m.at(at((50, 30, 70, 40)))).all()
    assert np.isnan(m.height_above_ground(at((50, 30, 70, 40)))).all()


def test_order_is_near_to_far_with_unknown_last() -> None:
    m = DepthMap(np.repeat(np.arange(1, 101, dtype=np.float32)[None], 80, 0), "metric", (100, 80))
    boxes = at((200, 0, 210, 9), (80, 0, 90, 9), (10, 0, 20, 9), (40, 0, 50, 9), (40, 9, 50, 18))
    assert m.order(boxes).tolist() == [2, 3, 4, 1, 0]
    a, b = boxes.select([2]), boxes.select([1])
    assert m.nearer(a, b) is True
    assert m.nearer(b, a) is False
    assert m.nearer(a, a) is None
    assert m.nearer(a, boxes.select([0])) is None
    assert m.nearer(a, b, margin=0.9) is None
    with pytest.raises(BadInput, match="one each"):
        m.nearer(boxes, b)


@pytest.mark.parametrize("percentile", [-1, 101, math.nan])
def test_a_percentile_outside_0_to_100_is_refused(percentile: float) -> None:
    with pytest.raises(BadInput, match="percentile"):
        nadir().at(at((0, 0, 1, 1)), percentile)


def test_height_on_flat_ground() -> None:
    found = nadir().height_above_ground(at((50, 30, 70, 40), (10, 10, 20, 20)))
    assert found == pytest.approx([2, 0], abs=1e-3)


@pytest.mark.parametrize("pitch", [25.0, 40.0, 70.0])
@pytest.mark.parametrize("up", [0.0, 1.5, 4.0])
def test_height_in_an_oblique_view(up: float, pitch: float) -> None:
    m = oblique(up, pitch)
    box = at((50, 30, 70, 40))
    assert m.height_above_ground(box, altitude=20.0) == pytest.approx([up], abs=0.01)
    # The sine of the view's own angle is exact at the image centre only.
    found = m.height_above_ground(box, depression_deg=pitch)
    assert found == pytest.approx([up], abs=0.03 + 0.2 * up)


def test_with_the_altitude_the_unit_of_depth_does_not_matter() -> None:
    m = DepthMap(oblique(1.5).depth * 0.07, "relative", (100, 80))
    found = m.height_above_ground(at((50, 30, 70, 40)), altitude=20.0)
    assert found == pytest.approx([1.5], abs=0.01)


def test_a_wall_is_not_taken_for_the_ground() -> None:
    m = nadir()
    m.depth[:, 72:] = 25.0  # a tall building beside the car
    assert m.height_above_ground(at((50, 30, 70, 40))) == pytest.approx([2], abs=0.05)


def test_other_boxes_are_no_ground() -> None:
    m = nadir()
    m.depth[30:40, 28:48] = 38
    both = at((50, 30, 70, 40), (28, 30, 48, 40))
    assert m.height_above_ground(both) == pytest.approx([2, 2], abs=0.05)


def test_height_of_a_disparity_is_relative_and_ordered() -> None:
    depth = np.full((80, 100), 0.8, np.float32)
    depth[30:40, 50:70] = 0.5
    depth[10:20, 10:30] = 0.7
    m = DepthMap(depth, "relative", (100, 80), inverse=True)
    found = m.height_above_ground(at((50, 30, 70, 40), (10, 10, 30, 20)))
    assert found == pytest.approx([0.3, 0.1], abs=1e-3)


def test_height_needs_ground_to_be_seen() -> None:
    m = nadir()
    assert np.isnan(m.height_above_ground(at((0, 0, 100, 80)))).all()
    assert np.isnan(m.height_above_ground(at((300, 0, 310, 8)))).all()
    assert m.height_above_ground(at((60, 35, 60.1, 35.1))).shape == (1,)
    with pytest.raises(BadInput, match="depression"):
        m.height_above_ground(at((0, 0, 1, 1)), depression_deg=0)
    with pytest.raises(BadInput, match="altitude"):
        m.height_above_ground(at((0, 0, 1, 1)), altitude=-1)


def test_a_huge_fixed_batch_is_refused_before_it_is_filled(make_model: Callable[..., Path]) -> None:
    path = make_model({"depth": np.ones((1, 64, 64), np.float32)}, input_shape=(100_000, 3, 64, 64))
    with pytest.raises(BadInput, match="takes 100000 pictures"):
        DepthModel.open(path)


# -- real photos -----------------------------------------------------------------------------------


def test_on_oblique_photos_the_bottom_is_nearer_than_the_top(shared_data: Path) -> None:
    """True of a level camera over ground; a model that is read upside down fails it."""
    entries = json.loads((shared_data / "images/auair/annotations.json").read_text())["annotations"]
    level = [e for e in entries if abs(e["angle_theta"]) < 0.2][:12]
    with DepthModel.open(shared_data / "models" / "rtmonodepth_s_ms_256x448.onnx", threads=1) as model:
        assert (model.kind, model.meaning) == ("relative", "depth")
        right = 0
        for entry in level:
            found = model.estimate(Frame.from_file(shared_data / "images/auair" / entry["image_name"]))
            w, h = found.size
            top = Boxes([[0, 0, w, h / 4]], Space.PIXEL, (w, h))
            bottom = Boxes([[0, 3 * h / 4, w, h]], Space.PIXEL, (w, h))
            right += found.nearer(bottom, top) is True
    assert right >= 0.75 * len(level)
