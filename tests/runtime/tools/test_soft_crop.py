"""A crop shows where it is from, exactly, and is sharp where it was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hoverlens.runtime.frame import Frame
from hoverlens.runtime.tools.soft_crop import MAX_ASPECT, soft_crop


def noise(width: int, height: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


thousandths = st.integers(0, 1000).map(lambda v: v / 1000)


@st.composite
def regions(draw: st.DrawFn) -> tuple[float, float, float, float]:
    x = sorted((draw(thousandths), draw(thousandths)))
    y = sorted((draw(thousandths), draw(thousandths)))
    return x[0], y[0], max(x[1], x[0] + 1e-3), max(y[1], y[0] + 1e-3)


SIZES = [(64, 48), (200, 31), (7, 90), (1, 1)]


@given(regions(), st.sampled_from(SIZES), st.floats(0, 2), st.integers(1, 96))
def test_coordinates_map_back_exactly(
    region: tuple[float, float, float, float], size: tuple[int, int], margin: float, out: int
) -> None:
    if region[2] > 1 or region[3] > 1:
        return
    crop, mapping = soft_crop(noise(*size), region, margin, out)
    assert crop.dtype == np.uint8
    assert crop.shape == (mapping.size[1], mapping.size[0], 3)
    assert max(mapping.size) == out
    assert crop.flags.c_contiguous
    r = mapping.region
    assert r.x >= 0
    assert r.y >= 0
    assert r.x + r.width <= size[0]
    assert r.y + r.height <= size[1]
    np.testing.assert_allclose(mapping.to_original([0, 0, 1, 1]), mapping.norm, atol=1e-12)
    back = mapping.to_original(mapping.to_crop(region))
    np.testing.assert_allclose(back, region, atol=1e-9)
    # What was asked for is all in there.
    inside = mapping.to_crop(region)
    assert inside.min() >= -1e-4 * max(size)
    assert inside.max() <= 1 + 1e-4 * max(size)


def test_a_pixel_is_found_where_the_mapping_says() -> None:
    rgb = np.zeros((400, 600, 3), np.uint8)
    rgb[200:204, 300:304] = 255
    target = np.array([300 / 600, 200 / 400, 304 / 600, 204 / 400])
    crop, mapping = soft_crop(rgb, (0.48, 0.48, 0.53, 0.54), out_size=448)
    ys, xs = np.nonzero(crop[..., 0] > 127)
    w, h = mapping.size
    seen = mapping.to_original([xs.min() / w, ys.min() / h, (xs.max() + 1) / w, (ys.max() + 1) / h])
    np.testing.assert_allclose(seen, target, atol=0.5 / 400)


def test_a_plain_crop_is_the_region_and_nothing_else() -> None:
    rgb = noise(100, 80)
    crop, mapping = soft_crop(rgb, (0.1, 0.25, 0.3, 0.5), margin=0, out_size=20, soft=False)
    np.testing.assert_array_equal(crop, rgb[20:40, 10:30])
    assert mapping.norm == (0.1, 0.25, 0.3, 0.5)


def test_the_region_is_untouched_and_the_rim_is_smooth() -> None:
    rgb = noise(300, 300)
    region = (0.4, 0.4, 0.6, 0.6)
    soft, mapping = soft_crop(rgb, region, 0.5, 240)
    hard, _ = soft_crop(rgb, region, 0.5, 240, soft=False)
    x1, y1, x2, y2 = (np.array(mapping.to_crop(region)) * 240).round().astype(int)
    np.testing.assert_array_equal(soft[y1:y2, x1:x2], hard[y1:y2, x1:x2])

    def detail(image: NDArray[np.uint8], at: slice) -> float:
        return float(np.abs(np.diff(image[100:140, at].astype(float), axis=1)).mean())

    # Ever less detail from the region's edge to the rim, and the mean stays: nothing is darkened.
    bands = [slice(x1 - 12 * (i + 1), x1 - 12 * i) for i in range(x1 // 12)]
    kept = [detail(soft, b) / detail(hard, b) for b in bands]
    assert (np.diff(kept) < 0).all(), kept
    assert kept[-1] < 0.2
    assert abs(float(soft.mean()) - float(hard.mean())) < 3


def test_no_edge_appears_where_there_is_none() -> None:
    flat = np.full((200, 200, 3), (90, 120, 60), np.uint8)
    crop, _ = soft_crop(flat, (0.4, 0.4, 0.6, 0.6))
    assert np.ptp(crop.reshape(-1, 3), axis=0).max() <= 1


def test_a_thin_region_gets_more_surroundings() -> None:
    _, mapping = soft_crop(noise(1000, 1000), (0.1, 0.5, 0.9, 0.505))
    assert mapping.size[0] / mapping.size[1] <= MAX_ASPECT * 1.02


def test_a_region_at_the_edge_shows_no_pixels_that_are_not_there() -> None:
    rgb = noise(120, 90)
    _, mapping = soft_crop(rgb, (0, 0, 0.1, 0.1))
    assert (mapping.region.x, mapping.region.y) == (0, 0)
    _, mapping = soft_crop(rgb, (0.9, 0.9, 1, 1))
    assert mapping.region.xyxy[2:] == (120, 90)
    _, mapping = soft_crop(rgb, (0, 0, 1, 1))
    assert mapping.norm == (0, 0, 1, 1)


@pytest.mark.parametrize("box", [(0.5, 0.5, 0.5, 0.6), (0.6, 0.1, 0.5, 0.2), (-0.1, 0, 1, 1), (0, 0, 1, float("nan"))])
def test_what_is_no_region_is_refused(box: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="normalised box"):
        soft_crop(noise(10, 10), box)


def test_a_real_car_comes_out_enlarged(shared_data: Path) -> None:
    folder = shared_data / "images/auair"
    cars = 0
    for item in json.loads((folder / "annotations.json").read_text())["annotations"][:6]:
        frame = Frame.from_file(folder / item["image_name"])
        for b in item["bbox"]:
            x, y = max(b["left"], 0), max(b["top"], 0)
            box = (
                x / frame.width,
                y / frame.height,
                min((x + b["width"]) / frame.width, 1.0),
                min((y + b["height"]) / frame.height, 1.0),
            )
            crop, mapping = soft_crop(frame.rgb, box)
            assert max(crop.shape[:2]) == 448
            # The crop's middle colours are those of the object.
            u = (mapping.to_crop(box).reshape(2, 2) * mapping.size).round().astype(int)
            inner = crop[u[0, 1] : u[1, 1], u[0, 0] : u[1, 0]].reshape(-1, 3).mean(0)
            true = frame.rgb[y : y + b["height"], x : x + b["width"]].reshape(-1, 3).mean(0)
            np.testing.assert_allclose(inner, true, atol=6)
            cars += 1
    assert cars > 10
