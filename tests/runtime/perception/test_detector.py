"""Detections are pixels of the original frame, whatever the model and its input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoverlens.runtime.boxes import Space
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.perception.decoders import grid
from hoverlens.runtime.perception.detector import Detector
from hoverlens.runtime.perception.preprocess import Preprocessing

MakeModel = Callable[..., Path]
SIZE = (96, 64)
SHAPE = (1, 3, 64, 96)
FRAME = np.full((640, 960, 3), 90, np.uint8)  # ten times the network input: no padding
BOX = np.array([20.0, 12.0, 52.0, 44.0])


def yolox_rows(nc: int = 4) -> np.ndarray:
    cells, steps = grid(SIZE, (8, 16, 32))
    rows = np.zeros((len(cells), 5 + nc), np.float32)
    centre = np.array([36.0, 28.0])
    for i, score in ((50, 0.9), (51, 0.8), (100, 0.7)):  # neighbours that see the same object
        rows[i, :2] = centre / steps[i] - cells[i]
        rows[i, 2:4] = np.log(32 / steps[i])
        rows[i, 4] = score
        rows[i, 5 + 2] = 1
    return rows


def yolov8_columns(nc: int = 4) -> np.ndarray:
    cells, steps = grid(SIZE, (8, 16, 32))
    out = np.zeros((4 + nc, len(cells)), np.float32)
    out[:2] = ((cells + 0.5) * steps[:, None]).T
    out[:4, 50] = [36, 28, 32, 32]
    out[6, 50] = 0.9
    return out


def e2e_rows() -> np.ndarray:
    rows = np.zeros((10, 6), np.float32)
    rows[0] = [*BOX, 0.9, 2]
    return rows


def detr_outputs(softmax: bool = False) -> dict[str, np.ndarray]:
    logits = np.full((7, 5 if softmax else 4), -9, np.float32)
    if softmax:
        logits[:, -1] = 9
        logits[3, -1] = -9
    logits[3, 2] = 4
    boxes = np.full((7, 4), 0.5, np.float32)
    boxes[3] = np.array([36, 28, 32, 32]) / np.array(SIZE * 2)
    return {"logits": logits, "pred_boxes": boxes}


FAMILIES: dict[str, dict[str, Any]] = {
    "yolox": {"outputs": {"output": yolox_rows()}},
    "yolov8": {"outputs": {"output0": yolov8_columns()}},
    "yolov8 transposed": {"outputs": {"output0": yolov8_columns().T}},
    "end2end": {"outputs": {"output0": e2e_rows()}},
    "detr": {"outputs": detr_outputs()},
    "detr softmax": {"outputs": detr_outputs(softmax=True)},
    "end2end three": {
        "outputs": {
            "labels": np.array([2, 0]),
            "boxes": np.stack([BOX, BOX]) / np.array(SIZE * 2),
            "scores": np.array([0.9, 0.01]),
        },
        "sizes_input": True,
    },
}
LABELS = ["a", "b", "c", "d"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_gives_pixels_of_the_frame(make_model: MakeModel, family: str, dynamic: bool) -> None:
    path = make_model(**FAMILIES[family], input_shape=SHAPE, dynamic=dynamic)
    with Detector.open(path, labels=LABELS, threads=1) as detector:
        assert detector.family.name == family.split()[0]
        assert detector.named
        assert detector.batch == (None if dynamic else 1)
        found = detector.detect(Frame.from_array(FRAME))
        assert found.space is Space.PIXEL
        assert found.size == (960, 640)
        assert found.xyxy == pytest.approx(BOX[None] * 10, abs=0.1)
        assert found.label(0) == "c"
        assert found.scores is not None
        assert 0.85 < found.scores[0] <= 1
        pair = detector.detect_batch([FRAME, FRAME])
        assert pair == [found, found]


def test_each_family_gets_its_usual_preprocessing(make_model: MakeModel) -> None:
    def usual(family: str) -> Preprocessing:
        return Detector.open(make_model(**FAMILIES[family], input_shape=SHAPE), LABELS).preprocessing

    assert usual("yolox") == Preprocessing(SIZE, "topleft", 114, "bgr", 1.0)
    assert usual("yolov8") == Preprocessing(SIZE, "center", 114, "rgb", 1 / 255)
    assert usual("detr") == Preprocessing(SIZE, "stretch")
    assert usual("detr softmax").mean == (0.485, 0.456, 0.406)
    assert usual("end2end three").mode == "stretch"


def test_preprocessing_can_be_given_whole_in_part_or_in_the_file(make_model: MakeModel) -> None:
    own = {"hoverlens.detector": json.dumps({"preprocessing": {"order": "rgb", "pad": 7}})}
    path = make_model(**FAMILIES["yolox"], input_shape=SHAPE, metadata=own)
    assert Detector.open(path).preprocessing == Preprocessing(SIZE, "topleft", 7, "rgb", 1.0)
    part = Detector.open(path, preprocessing={"mode": "stretch"}).preprocessing
    assert part == Preprocessing(SIZE, "stretch", 114, "bgr", 1.0)
    whole = Preprocessing(SIZE, "center", 3)
    assert Detector.open(path, preprocessing=whole).preprocessing == whole
    with pytest.raises(BadInput, match="96x96"):
        Detector.open(path, preprocessing=Preprocessing((96, 96)))
    with pytest.raises(BadInput, match="unknown key"):
        Detector.open(path, preprocessing={"modes": "stretch"})


@pytest.mark.parametrize("text", ["{", "[]", '{"preprocessing": 3}', '{"activation": "relu"}'])
def test_unusable_settings_in_the_file_are_refused(make_model: MakeModel, text: str) -> None:
    path = make_model(**FAMILIES["yolox"], input_shape=SHAPE, metadata={"hoverlens.detector": text})
    with pytest.raises(BadInput, match="metadata"):
        Detector.open(path)


def test_padding_is_undone(make_model: MakeModel) -> None:
    path = make_model(**FAMILIES["yolov8"], input_shape=SHAPE)
    tall = np.zeros((640, 480, 3), np.uint8)  # 48 of 96 columns, 24 of padding on each side
    found = Detector.open(path, LABELS).detect(tall)
    assert found.xyxy == pytest.approx(np.array([[0, 120, 280, 440]]), abs=0.1)
    found = Detector.open(path, LABELS, preprocessing={"mode": "topleft"}).detect(tall)
    assert found.xyxy == pytest.approx(np.array([[200, 120, 480, 440]]), abs=0.1)


def test_names_come_from_labels_then_metadata_then_coco(make_model: MakeModel, tmp_path: Path) -> None:
    path = make_model(**FAMILIES["yolov8"], input_shape=SHAPE, metadata={"names": "{0: 'w', 1: 'x', 2: 'y', 3: 'z'}"})
    assert Detector.open(path).names == ("w", "x", "y", "z")
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\nd\n")
    assert Detector.open(path, labels).names == tuple(LABELS)
    nameless = Detector.open(make_model(**FAMILIES["yolov8"], input_shape=SHAPE))
    assert nameless.names == ("class_0", "class_1", "class_2", "class_3")
    assert not nameless.named
    coco = Detector.open(make_model({"output": yolox_rows(80)}, input_shape=SHAPE))
    assert coco.detect(FRAME).label(0) == "car"


def test_the_input_size_of_an_open_model_is_its_imgsz(make_model: MakeModel) -> None:
    path = make_model(**FAMILIES["yolov8"], input_shape=SHAPE, open_size=True, metadata={"imgsz": "[64, 96]"})
    assert Detector.open(path).size == SIZE
    path = make_model(**FAMILIES["end2end"], input_shape=SHAPE, open_size=True)
    assert Detector.open(path).size == (640, 640)
    assert Detector.open(path, preprocessing={"size": [320, 256]}).size == (320, 256)


def test_a_channels_last_byte_model(make_model: MakeModel) -> None:
    path = make_model(**FAMILIES["yolov8"], input_shape=(1, 64, 96, 3), dtype="uint8")
    detector = Detector.open(path, LABELS)
    assert detector.preprocessing.layout == "NHWC"
    assert detector.detect(FRAME).xyxy == pytest.approx(BOX[None] * 10, abs=0.1)


def test_a_fixed_batch_is_filled_up(make_model: MakeModel) -> None:
    path = make_model(
        {"output0": yolov8_columns()},
        input_shape=(4, 3, 64, 96),
    )
    # A constant output has a batch of one, so this model answers for the first picture only.
    detector = Detector.open(path, LABELS)
    assert detector.batch == 4
    assert len(detector.detect(FRAME)) == 1


def test_pictures_of_one_batch_do_not_mix(make_model: MakeModel) -> None:
    gain = np.zeros_like(e2e_rows())
    gain[0, 4] = 1.0  # the score grows with the picture's brightness
    rows = e2e_rows()
    rows[0, 4] = 0
    path = make_model({"output0": rows}, SHAPE, gain={"output0": gain}, dynamic=True)
    detector = Detector.open(path, LABELS)
    dark, grey, bright = (np.full((64, 96, 3), v, np.uint8) for v in (10, 128, 250))
    batch = detector.detect_batch([bright, dark, grey])
    assert [len(b) for b in batch] == [1, 0, 1]
    assert batch == [detector.detect(p) for p in (bright, dark, grey)]
    assert batch[0].scores == pytest.approx([250 / 255], abs=1e-3)


def test_boxes_are_sorted_clipped_and_thresholded(make_model: MakeModel) -> None:
    rows = np.zeros((10, 6), np.float32)
    rows[0] = [-20, -20, 30, 30, 0.3, 0]
    rows[1] = [50, 20, 200, 200, 0.8, 1]
    rows[2] = [100, 0, 120, 20, 0.9, 1]  # right of the frame
    rows[3] = [10, 10, 20, 20, 0.1, 2]
    rows[4] = [30, 10, 20, 20, 0.9, 2]  # upside down
    rows[5] = [np.nan, 10, 20, 20, 0.9, 2]
    detector = Detector.open(make_model({"output0": rows}, SHAPE), LABELS)
    found = detector.detect(np.zeros((64, 96, 3), np.uint8))
    assert found.xyxy.tolist() == [[50, 20, 96, 64], [0, 0, 30, 30]]
    assert len(detector.detect(np.zeros((64, 96, 3), np.uint8), conf=0.05)) == 3
    assert len(detector.detect(np.zeros((64, 96, 3), np.uint8), max_detections=1)) == 1


def test_classes_can_be_chosen_by_name_or_index(make_model: MakeModel) -> None:
    detector = Detector.open(make_model(**FAMILIES["yolox"], input_shape=SHAPE), LABELS)
    assert len(detector.detect(FRAME, classes=["c"])) == 1
    assert len(detector.detect(FRAME, classes=[2, "a"])) == 1
    assert len(detector.detect(FRAME, classes=["a"])) == 0
    assert len(detector.detect(FRAME, classes=[])) == 0
    with pytest.raises(BadInput, match="no class 'boat'"):
        detector.detect(FRAME, classes=["boat"])
    with pytest.raises(BadInput, match="no class 9"):
        detector.detect(FRAME, classes=[9])


def test_overlapping_rows_become_one_box(make_model: MakeModel) -> None:
    detector = Detector.open(make_model(**FAMILIES["yolox"], input_shape=SHAPE), LABELS)
    assert len(detector.detect(FRAME)) == 1
    assert len(detector.detect(FRAME, iou=1.0)) == 3


@pytest.mark.parametrize("bad", [{"conf": -0.1}, {"conf": 1.5}, {"iou": 2}, {"conf": float("nan")}])
def test_thresholds_outside_0_to_1_are_refused(make_model: MakeModel, bad: dict[str, float]) -> None:
    detector = Detector.open(make_model(**FAMILIES["yolox"], input_shape=SHAPE), LABELS)
    with pytest.raises(BadInput, match="0 to 1"):
        detector.detect(FRAME, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("sliced", [False, True])
def test_what_is_no_picture_is_refused(make_model: MakeModel, sliced: bool) -> None:
    detector = Detector.open(make_model(**FAMILIES["yolox"], input_shape=SHAPE), LABELS)
    for bad in (FRAME[..., 0], FRAME.astype(np.float32), FRAME[:0]):
        with pytest.raises(BadInput, match="needed uint8 HxWx3"):
            detector.detect(bad, sliced=sliced)  # type: ignore[arg-type]


@pytest.mark.parametrize("sliced", [False, True])
def test_one_pixel_is_a_frame(make_model: MakeModel, sliced: bool) -> None:
    detector = Detector.open(make_model(**FAMILIES["yolox"], input_shape=SHAPE), LABELS)
    found = detector.detect(np.zeros((1, 1, 3), np.uint8), sliced=sliced)
    assert found.size == (1, 1)


def test_a_model_with_other_inputs_is_refused(make_model: MakeModel) -> None:
    flat = make_model({"y": np.zeros((10, 6))}, input_shape=(1, 8))
    with pytest.raises(BadInput, match="inputs images float32 1x8"):
        Detector.open(flat)
    with pytest.raises(BadInput, match="no detector"):
        Detector.open(make_model({"depth": np.zeros((1, 64, 64))}))


# -- real models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[true, true]", "[64]", "[1e400, 2]", "[[1], 2]"])
def test_an_imgsz_that_is_no_size_is_left_out(make_model: MakeModel, text: str) -> None:
    path = make_model(**FAMILIES["end2end"], input_shape=SHAPE, open_size=True, metadata={"imgsz": text})
    assert Detector.open(path).size == (640, 640)


def test_outputs_of_fewer_pictures_than_were_given_are_told(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Detector.open(make_model(**FAMILIES["end2end"], input_shape=SHAPE, dynamic=True)) as detector:
        run = detector.engine.run
        monkeypatch.setattr(detector.engine, "run", lambda feeds: {k: v[:1] for k, v in run(feeds).items()})
        assert len(detector.detect(FRAME)) == 1
        with pytest.raises(BadInput, match="of 1 pictures for 2"):
            detector.detect_batch([FRAME, FRAME])


def test_a_huge_fixed_batch_is_refused_before_it_is_filled(make_model: MakeModel) -> None:
    with pytest.raises(BadInput, match="takes 100000 pictures"):
        Detector.open(make_model(**FAMILIES["end2end"], input_shape=(100_000, *SHAPE[1:])))


@pytest.fixture(scope="session")
def model(shared_data: Path) -> Callable[[str], Detector]:
    return lambda name: Detector.open(shared_data / "models" / name, threads=1)


@pytest.mark.parametrize(
    ("name", "family", "side"),
    [
        ("yolox_nano.onnx", "yolox", 416),
        ("FastestDet.onnx", "fastestdet", 352),
        ("yolov5su_visdrone_640.onnx", "yolov8", 640),
    ],
)
def test_real_models_are_recognised_and_see_cars(
    shared_data: Path, model: Callable[[str], Detector], name: str, family: str, side: int
) -> None:
    detector = model(name)
    assert detector.family.name == family
    assert detector.size == (side, side)
    if family == "yolox":
        assert detector.family.coordinates == "grid"
    photo = Frame.from_file(shared_data / "images/visdrone/0000001_02999_d_0000005.jpg")
    first = detector.detect(photo)
    assert "car" in {first.label(i) for i in range(len(first))}
    assert first == detector.detect(photo)


def test_a_real_depth_model_is_no_detector(shared_data: Path) -> None:
    with pytest.raises(BadInput, match="no detector"):
        Detector.open(shared_data / "models" / "rtmonodepth_s_ms_256x448.onnx")
