"""Each family is recognised by its shapes, and one object comes out where it was put in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.perception.decoders import (
    FAMILIES,
    Family,
    detect_family,
    grid,
    grid_count,
    grid_reading,
    sigmoid,
)

SIZE = (96, 64)
G = 126  # 12x8 + 6x4 + 3x2
BOX = np.array([20.0, 12.0, 52.0, 44.0])
CXCYWH = np.array([36.0, 28.0, 32.0, 32.0])
CLASS = 2
ROW = 50  # an anchor: any would do

Arrays = dict[str, NDArray[Any]]


def yolox(nc: int = 4, reading: str = "grid", strides: tuple[int, ...] = (8, 16, 32)) -> Arrays:
    cells, steps = grid(SIZE, strides)
    out = np.zeros((1, len(cells), 5 + nc), np.float32)
    centre = (cells + 0.5) * steps[:, None]
    wh = np.repeat(steps[:, None], 2, 1)
    out[0, :, :4] = np.concatenate([centre, wh], 1)
    out[0, ROW, :4] = CXCYWH
    if reading == "grid":
        out[0, :, :2] = out[0, :, :2] / steps[:, None] - cells
        out[0, :, 2:4] = np.log(out[0, :, 2:4] / steps[:, None])
    elif reading == "unit":
        out[0, :, :4] /= np.array(SIZE * 2)
    out[0, ROW, 4] = 0.9
    out[0, ROW, 5 + CLASS] = 0.8
    return {"output": out}


def yolov8(nc: int = 4, transposed: bool = False, unit: bool = False, extra: int = 0) -> Arrays:
    rows = yolox(nc, "unit" if unit else "pixel")["output"]
    out = np.concatenate([rows[..., :4], rows[..., 5:], np.zeros((1, G, extra))], 2).astype(np.float32)
    out[0, ROW, 4 + CLASS] = 0.72
    return {"output0": out if transposed else np.ascontiguousarray(out.transpose(0, 2, 1))}


def end2end(n: int = 10, unit: bool = False) -> Arrays:
    out = np.zeros((1, n, 6), np.float32)
    out[0, 0] = [*(BOX / (np.array(SIZE * 2) if unit else 1)), 0.72, CLASS]
    return {"output0": out}


def detr(nc: int = 4, softmax: bool = False, q: int = 7) -> Arrays:
    logits = np.full((1, q, nc + softmax), -8.0, np.float32)
    if softmax:
        logits[0, :, -1] = 8
        logits[0, 3, -1] = -8
    logits[0, 3, CLASS] = 4
    boxes = np.full((1, q, 4), 0.5, np.float32)
    boxes[0, 3] = CXCYWH / np.array(SIZE * 2)
    return {"logits": logits, "pred_boxes": boxes}


def names(n: int) -> list[str]:
    return [f"n{i}" for i in range(n)]


def found_in(outputs: Arrays, family: Family, low: float = 0.3) -> tuple[NDArray[Any], int, float]:
    (raw,) = family.decode(outputs, SIZE, low)
    assert len(raw.scores) == 1
    assert raw.xyxy.dtype == np.float32
    assert raw.classes.dtype == np.int64
    return raw.xyxy[0], int(raw.classes[0]), float(raw.scores[0])


CASES: list[tuple[str, Arrays, int | None, dict[str, Any]]] = [
    ("yolox raw", yolox(), 4, {"name": "yolox", "coordinates": "grid", "classes": 4}),
    ("yolox raw without names", yolox(), None, {"name": "yolox", "coordinates": "grid"}),
    ("yolox decoded", yolox(reading="pixel"), 4, {"name": "yolox", "coordinates": "pixel"}),
    ("yolox fractions", yolox(reading="unit"), 4, {"name": "yolox", "coordinates": "unit"}),
    ("yolox stride 64", yolox(strides=(8, 16, 32, 64)), 4, {"strides": (8, 16, 32, 64)}),
    ("yolox coco", yolox(80), None, {"name": "yolox", "classes": 80}),
    ("yolov8", yolov8(), 4, {"name": "yolov8", "classes": 4, "transposed": False}),
    ("yolov8 without names", yolov8(), None, {"name": "yolov8", "classes": 4}),
    ("yolov8 fractions", yolov8(unit=True), 4, {"name": "yolov8", "coordinates": "unit"}),
    ("yolov8 transposed", yolov8(transposed=True), 4, {"name": "yolov8", "transposed": True}),
    ("yolov8 transposed coco", yolov8(80, True), None, {"name": "yolov8", "transposed": True}),
    ("end2end", end2end(), None, {"name": "end2end"}),
    ("end2end fractions", end2end(unit=True), 4, {"name": "end2end"}),
    ("detr sigmoid", detr(), 4, {"name": "detr", "activation": "sigmoid"}),
    ("detr softmax", detr(softmax=True), 4, {"name": "detr", "activation": "softmax", "classes": 4}),
    ("detr coco softmax", detr(80, True), None, {"activation": "softmax", "classes": 80}),
    ("detr coco sigmoid", detr(80), None, {"activation": "sigmoid", "classes": 80}),
]


@pytest.mark.parametrize(("outputs", "nc", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_family_is_recognised_and_read(outputs: Arrays, nc: int | None, wanted: dict[str, Any]) -> None:
    family = detect_family(outputs, SIZE, names(nc) if nc else None)
    assert {k: getattr(family, k) for k in wanted} == wanted
    box, label, score = found_in(outputs, family)
    assert box == pytest.approx(BOX, abs=0.01)
    assert label == CLASS
    assert 0.7 < score <= 1


def test_two_class_yolov8_is_no_end2end_list() -> None:
    """1 x 6 x N and 1 x N x 6 with N a grid count: the grid decides, then the number of names."""
    flat = yolov8(3)["output0"]
    flat = np.concatenate([flat[:, :4], flat[:, 5:]], 1)
    assert flat.shape == (1, 6, G)
    assert detect_family({"o": flat}, SIZE).name == "yolov8"
    rows = np.ascontiguousarray(flat.transpose(0, 2, 1))
    assert detect_family({"o": rows}, SIZE, names(2)).transposed
    assert detect_family({"o": rows}, SIZE, names(1)).name == "yolox"
    assert detect_family({"o": rows}, SIZE).name == "yolox"
    assert detect_family({"o": rows}, SIZE, family="end2end").name == "end2end"
    assert detect_family({"o": rows[:, :-1]}, SIZE).name == "end2end"


def test_three_anchors_a_cell_are_yolov5() -> None:
    rows = np.repeat(yolox(reading="pixel")["output"], 3, 1)
    family = detect_family({"o": rows}, SIZE)
    assert (family.name, family.classes, family.needs_nms) == ("yolov5", 4, True)
    raw = family.decode({"o": rows}, SIZE, 0.3)[0]
    assert len(raw.scores) == 3
    assert raw.xyxy == pytest.approx(np.repeat(BOX[None], 3, 0))


def test_masks_beside_the_boxes_are_left_out() -> None:
    outputs = yolov8(extra=32) | {"output1": np.zeros((1, 32, 16, 24), np.float32)}
    family = detect_family(outputs, SIZE, names(4))
    assert (family.classes, family.extra) == (4, 32)
    assert found_in(outputs, family)[1] == CLASS


def test_a_rotated_box_becomes_the_box_around_it() -> None:
    outputs = yolov8(extra=1)
    columns = outputs["output0"][0]
    columns[2:4, ROW] = 32, 8
    columns[-1, ROW] = np.pi / 2
    family = detect_family(outputs, SIZE, names(4), {"task": "obb"})
    box, _, _ = found_in(outputs, family)
    assert box == pytest.approx([32, 12, 40, 44], abs=1e-3)


def test_deployed_detr_graphs_with_three_outputs() -> None:
    outputs = {
        "labels": np.array([[CLASS, 0]]),
        "boxes": np.array([[BOX, BOX]], np.float32),
        "scores": np.array([[0.72, 0.1]], np.float32),
    }
    family = detect_family(outputs, SIZE, names(4))
    assert (family.name, family.outputs) == ("end2end", ("labels", "boxes", "scores"))
    assert found_in(outputs, family)[0] == pytest.approx(BOX)


def test_a_fused_detr_output() -> None:
    d = detr()
    fused = {"o": np.concatenate([d["pred_boxes"], sigmoid(d["logits"])], 2)}
    family = detect_family(fused, SIZE, names(4))
    assert (family.name, family.activation) == ("detr", "none")
    assert found_in(fused, family)[0] == pytest.approx(BOX, abs=0.01)


def test_detr_boxes_and_logits_with_four_classes_are_told_apart_by_name() -> None:
    d = detr(4)
    family = detect_family({"boxes": d["pred_boxes"], "logits": d["logits"]}, SIZE, names(4))
    assert family.outputs == ("logits", "boxes")


def test_grid_cells_with_objectness_are_fastestdet() -> None:
    out = np.zeros((1, 85, 4, 6), np.float32)
    out[0, 1:5] = -9.0
    out[0, :, 1, 2] = 0
    out[0, 0, 1, 2] = 0.9
    out[0, 5 + CLASS, 1, 2] = 0.8
    out[0, 3:5, 1, 2] = np.log(np.array([1 / 3, 0.5]) / (1 - np.array([1 / 3, 0.5])))
    family = detect_family({"758": out}, SIZE)
    box, label, score = found_in({"758": out}, family)
    assert box == pytest.approx([16, 0, 48, 32], abs=1e-3)
    assert (label, score) == (CLASS, pytest.approx(0.9**0.6 * 0.8**0.4))


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"y": np.zeros((1, 1000))},
        {"depth": np.zeros((1, 1, 64, 96))},
        {"features": np.zeros((1, 256, 4, 6))},
        {"y": np.zeros((1, 50, 7))},
        {"a": np.zeros((1, 50, 3)), "b": np.zeros((1, 60, 5))},
        {"y": np.zeros((1, G, 4))},
        {"y": np.float32(1)},
        {"y": np.zeros((1, 4, G))},
    ],
)
def test_what_is_no_detector_is_refused_with_what_was_found(outputs: Arrays) -> None:
    with pytest.raises(BadInput) as e:
        detect_family({k: np.asarray(v) for k, v in outputs.items()}, SIZE)
    message = str(e.value)
    assert "\n" not in message
    assert all(f in message for f in FAMILIES)
    assert all(k in message for k in outputs)


def test_a_family_can_be_named_but_must_fit() -> None:
    assert detect_family(yolox(), SIZE, family="yolov8").transposed
    with pytest.raises(BadInput, match="detr"):
        detect_family(yolox(), SIZE, family="detr")
    with pytest.raises(BadInput, match="unknown detector family 'ssd'"):
        detect_family(yolox(), SIZE, family="ssd")


def test_a_wrong_number_of_names_is_refused() -> None:
    with pytest.raises(BadInput, match="7 names"):
        detect_family(yolov8(4), SIZE, names(7))
    with pytest.raises(BadInput, match="names"):
        detect_family(yolox(4), SIZE, names(7))


@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_values_that_are_not_finite_are_dropped(case: tuple[str, Arrays, int | None, Any]) -> None:
    family = detect_family(case[1], SIZE, names(case[2]) if case[2] else None)
    for bad in (np.nan, np.inf, -np.inf):
        for raw in family.decode({k: np.full_like(v, bad) for k, v in case[1].items()}, SIZE, 0.0):
            assert np.isfinite(raw.xyxy).all()
            assert np.isfinite(raw.scores).all()
            assert ((raw.scores >= 0) & (raw.scores <= 1)).all()


def test_the_reading_of_a_grid_does_not_need_objects() -> None:
    for reading in ("grid", "pixel", "unit"):
        rows = yolox(reading=reading)["output"][0]
        noise = np.random.default_rng(0).normal(0, 0.3, (G, 2))
        steps = grid(SIZE, (8, 16, 32))[1]
        scale = {"grid": 1.0, "pixel": steps[:, None], "unit": steps[:, None] / np.array(SIZE)}[reading]
        rows[:, :2] += noise * scale
        assert grid_reading(rows, SIZE, (8, 16, 32)) == reading
        rows[:30] = np.nan
        assert grid_reading(rows, SIZE, (8, 16, 32)) == reading


def test_the_grid_is_row_by_row() -> None:
    cells, steps = grid((16, 24), (8, 16))
    assert cells.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2], [0, 0], [0, 1]]
    assert steps.tolist() == [8] * 6 + [16] * 2
    assert grid_count((640, 640), (8, 16, 32)) == 8400
    assert grid_count((416, 416), (8, 16, 32)) == 3549


def test_a_batch_is_read_picture_by_picture() -> None:
    one = yolox()["output"]
    two = one.copy()
    two[0, ROW, 4] = 0
    family = detect_family({"output": one}, SIZE)
    raws = family.decode({"output": np.concatenate([one, two])}, SIZE, 0.3)
    assert [len(r.scores) for r in raws] == [1, 0]
