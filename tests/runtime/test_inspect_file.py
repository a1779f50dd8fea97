"""Files are recognised by their content, and what is unknown is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hoverlens.cli import cli
from hoverlens.runtime.answer import Answer
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.inspect_file import inspect_file, inspection_text, onnx_header
from hoverlens.runtime.trace import Trace

GPS = {1: "S", 2: (33.0, 30.0, 0.0), 3: "E", 4: (151.0, 0.0, 36.0), 5: b"\x00", 6: 120.5}


def test_a_photo_with_orientation_and_position(tmp_path: Path) -> None:
    path = tmp_path / "photo.bin"
    image = Image.new("RGB", (40, 20), "red")
    exif = image.getexif()
    exif[0x0112] = 6
    exif.get_ifd(0x8825).update(GPS)
    image.save(path, "JPEG", exif=exif)
    found = inspect_file(path)
    assert found["kind"] == "picture"
    assert (found["width"], found["height"]) == (20, 40)
    assert found["stored_size"] == [40, 20]
    assert found["orientation"] == 6
    assert found["digest"] == Frame.from_file(path).digest
    assert found["gps"] == {"latitude": -33.5, "longitude": 151.01, "altitude_m": 120.5}


def test_the_pose_in_a_drones_photo(shared_data: Path) -> None:
    photo = sorted((shared_data / "images" / "brighton").glob("*.JPG"))[0]
    found = inspect_file(photo)
    assert found["pose"]["GimbalPitchDegree"] == pytest.approx(-90, abs=5)
    assert found["pose"]["RelativeAltitude"] == pytest.approx(40, abs=2)
    assert found["gps"]["latitude"] == pytest.approx(46.84, abs=0.01)


@pytest.mark.parametrize(("mode", "bits"), [("RGB", 8), ("L", 8), ("I;16", 16), ("1", 1), ("P", 8)])
def test_bit_depths(tmp_path: Path, mode: str, bits: int) -> None:
    path = tmp_path / "x.png"
    Image.new(mode, (4, 4)).save(path)
    assert inspect_file(path)["bits"] == bits


def test_a_video(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "clip.dat.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    if not writer.isOpened():
        pytest.skip("this OpenCV writes no video")
    for i in range(20):
        writer.write(np.full((48, 64, 3), i * 10, np.uint8))
    writer.release()
    found = inspect_file(path)
    assert found["kind"] == "video"
    assert (found["width"], found["height"], found["fps"], found["frames"]) == (64, 48, 10, 20)
    assert found["seconds"] == 2


def test_a_trace_and_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with Trace(path) as trace:
        trace.emit("question", text="x")
    assert inspect_file(path)["events"] == {"trace": 1, "question": 1}
    path.write_text(path.read_text() + '{"cut')
    assert inspect_file(path)["damaged_lines"] == 1


def test_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(Answer("3", "option", ("3",), bundle={"name": "nano"}).to_json(indent=2))
    found = inspect_file(path)
    assert found["kind"] == "answer"
    assert found["answer_kind"] == "option"
    assert found["answer"] == "3"


def test_detectors_and_depth_models(shared_data: Path) -> None:
    models = shared_data / "models"
    yolox = inspect_file(models / "yolox_nano.onnx")
    assert (yolox["kind"], yolox["use"], yolox["family"], yolox["classes"]) == ("onnx", "detector", "yolox", 80)
    assert yolox["opset"] == {"ai.onnx": 11}
    assert yolox["inputs"] == ["images float32 1x3x416x416"]
    depth = inspect_file(models / "rtmonodepth_s_ms_256x448.onnx")
    assert depth["use"] == "depth"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jpg", b"", "empty"),
        ("a.jpg", b"plain text", "nothing that hoverlens reads"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 20, "damaged"),
        ("a.onnx", b"plain text", "ONNX"),
        ("a.onnx", b"\x08\x07" + b"\0" * 100, "ONNX"),
        ("a.gguf", b"GGUF\x03\0\0\0", "damaged"),
        ("a.json", b'{"a": 1}', "did not write"),
        ("a.json", b'{"a": 1', "cannot be parsed"),
        ("a.json", b'{"a": "\xff"}', "not UTF-8"),
        ("a.json", b"{" * 100_000, "cannot be parsed"),
        ("a.mp4", b"\0\0\0\x18ftypmp42" + b"\0" * 64, "no frame"),
        ("a.pt", b"PK\x03\x04" + b"\0" * 64, "PyTorch"),
        ("a.bin", b"\xff" * 1000, "nothing that hoverlens reads"),
    ],
)
def test_unknown_and_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        inspect_file(path)
    result = CliRunner().invoke(cli, ["inspect", str(path)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["missing", "", "/dev/null"])
def test_things_that_are_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput):
        inspect_file(tmp_path / name)


def test_onnx_headers_of_junk(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for junk in (b"\x08", b"\x08\x80", b"\xff" * 20, b"\x3a\xff\xff\xff\xff\x0f", b"\x08\x07"):
        path.write_bytes(junk)
        with pytest.raises(ValueError, match=r"cut short|no protobuf|no ONNX"):
            onnx_header(path)


@pytest.mark.parametrize("as_json", [True, False])
def test_the_verb(tmp_path: Path, as_json: bool) -> None:
    path = tmp_path / "x.png"
    Image.new("RGB", (4, 3)).save(path)
    result = CliRunner().invoke(cli, ["inspect", str(path), *(["--json"] if as_json else [])])
    assert result.exit_code == 0
    if as_json:
        assert json.loads(result.stdout)["width"] == 4
    else:
        assert "width: 4\n" in result.stdout


def test_text_form() -> None:
    info: dict[str, Any] = {"a": None, "b": True, "c": [1, 2], "d": {"e": 1.5}, "f": [{"g": 1, "h": 2}], "i": []}
    assert inspection_text(info).splitlines() == [
        "a: none",
        "b: yes",
        "c: 1, 2",
        "d:",
        "  e: 1.5",
        "f:",
        "  - g: 1",
        "    h: 2",
        "i: none",
    ]
