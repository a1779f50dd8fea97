"""Pictures reach a model as it was trained, and boxes come back to where they were."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.boxes import Boxes
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.perception.preprocess import Preprocessing, resize

RED = np.zeros((20, 40, 3), np.uint8)
RED[..., 0] = 200


def test_topleft_pads_right_and_below_with_114_in_bgr() -> None:
    p = Preprocessing((64, 64), mode="topleft", order="bgr", scale=1.0)
    t, box = p.tensor(RED)
    assert t.shape == (3, 64, 64)
    assert t.dtype == np.float32
    assert box.resized == (64, 32)
    assert t[:, 0, 0].tolist() == [0, 0, 200]
    assert t[:, 31, 63].tolist() == [0, 0, 200]
    assert (t[:, 32:] == 114).all()


def test_center_pads_both_sides() -> None:
    t, box = Preprocessing((64, 64)).tensor(RED)
    assert (box.pad_left, box.pad_top) == (0, 16)
    assert t[0, 16, 0] == pytest.approx(200 / 255)
    assert (t[:, :16] == np.float32(114) * np.float32(1 / 255)).all()
    assert (t[:, 48:] == t[0, 0, 0]).all()


def test_stretch_fills_and_normalises() -> None:
    p = Preprocessing((32, 32), mode="stretch", mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0))
    t, _ = p.tensor(RED)
    assert t[0].mean() == pytest.approx((200 / 255 - 0.5) / 0.5, abs=1e-6)
    assert t[1].mean() == pytest.approx(-1)
    assert t[2].mean() == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_tensor_has_the_engines_type_and_layout(dtype: str, layout: Any) -> None:
    t, _ = Preprocessing((64, 32), layout=layout).tensor(RED, dtype)
    assert t.dtype == np.dtype(dtype)
    assert t.shape == ((3, 32, 64) if layout == "NCHW" else (32, 64, 3))
    assert t.flags.c_contiguous
    assert t.max() == (200 if dtype == "uint8" else pytest.approx(200 / 255, abs=1e-3))


def test_shrinking_averages_and_enlarging_interpolates() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::4] = 255
    assert abs(int(resize(stripes, 16, 16).mean()) - 64) <= 1
    assert resize(stripes, 16, 16).std() < 1
    assert resize(stripes[:2, :2], 4, 4).shape == (4, 4, 3)


@pytest.mark.parametrize("mode", ["topleft", "center", "stretch"])
@given(w=st.integers(1, 5000), h=st.integers(1, 5000))
def test_boxes_return_within_half_a_pixel(mode: Any, w: int, h: int) -> None:
    letterbox = Preprocessing((416, 320), mode=mode).letterbox(w, h)
    boxes = Boxes([[0, 0, w, h], [w / 3, h / 3, w / 2, h / 2]], "pixel", (w, h))
    there = letterbox.forward(boxes)
    back = letterbox.backward(there.xyxy)
    assert np.abs(back.xyxy - boxes.xyxy).max() < 0.5
    assert there.xyxy.min() >= -1e-3
    assert (there.xyxy <= np.array([416, 320, 416, 320]) + 1e-3).all()


def test_the_manifest_form_round_trips() -> None:
    p = Preprocessing((64, 32), "topleft", 0, "bgr", 1.0, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "NHWC")
    assert Preprocessing.from_dict(json.loads(json.dumps(p.to_dict()))) == p
    assert Preprocessing.from_dict({"order": "rgb"}, defaults=p).order == "rgb"
    assert Preprocessing.from_dict({"order": "rgb"}, defaults=p).std == p.std


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no size"),
        ({"size": [64, 64], "colour": 1}, "unknown key 'colour'"),
        ({"size": "large"}, "size is 'large'"),
        ({"size": [64]}, "size"),
        ({"size": [64, 0]}, "size"),
        ({"size": [64, 100000]}, "size"),
        ({"size": [64, 64], "mode": "fit"}, "mode is 'fit'"),
        ({"size": [64, 64], "order": "rbg"}, "order"),
        ({"size": [64, 64], "pad": 256}, "pad"),
        ({"size": [64, 64], "scale": "nan"}, "scale"),
        ({"size": [64, 64], "std": [1, 0, 1]}, "std"),
        ({"size": [64, 64], "mean": [1, 1]}, "mean"),
        ({"size": [64, 64], "mean": None}, "mean"),
        ({"size": [64, 64], "layout": "CHW"}, "layout"),
    ],
)
def test_a_bad_manifest_entry_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as e:
        Preprocessing.from_dict(values)
    assert words in str(e.value)


@pytest.mark.parametrize("picture", [RED[..., 0], RED.astype(np.float32), RED[:0], np.zeros((4, 4, 4), np.uint8)])
def test_what_is_no_rgb_picture_is_refused(picture: Any) -> None:
    with pytest.raises(BadInput, match="needed uint8 HxWx3"):
        Preprocessing((32, 32)).tensor(picture)


def test_an_unknown_input_type_is_refused() -> None:
    with pytest.raises(BadInput, match="int64"):
        Preprocessing((32, 32)).tensor(RED, "int64")
