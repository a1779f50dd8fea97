"""Models are opened when they are needed, and look at a frame once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoverlens.runtime.boxes import Boxes
from hoverlens.runtime.errors import HoverlensError
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.perception.depth import DepthMap, DepthModel
from hoverlens.runtime.perception.detector import Detector
from hoverlens.runtime.tools import Detect, Distance, PerceptionCache, Timed, ToolError, Zoom, run_tools

FRAME = Frame.from_array(np.zeros((8, 8, 3), np.uint8))


class FakeDetector:
    names = ("car", "van")

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def detect(self, frame: Frame, sliced: bool = False) -> Boxes:
        self.calls.append(sliced)
        return Boxes.empty(frame.size, names=self.names)


class FakeDepth:
    def __init__(self) -> None:
        self.calls = 0

    def estimate(self, frame: Frame) -> DepthMap:
        self.calls += 1
        return DepthMap(np.ones((2, 2), np.float32), "relative", frame.size)


def test_each_model_is_opened_once_and_runs_once() -> None:
    opened: list[str] = []
    detector, depth = FakeDetector(), FakeDepth()

    def open_detector() -> Any:
        opened.append("detector")
        return detector

    def open_depth() -> Any:
        opened.append("depth")
        return depth

    cache = PerceptionCache(FRAME, open_detector, open_depth)
    assert opened == []
    assert cache.knows("vehicles") == ("car", "van")
    assert opened == ["detector"]
    assert cache.detections() is cache.detections()
    cache.detections(sliced=True)
    cache.detections(sliced=True)
    assert detector.calls == [False, True]
    assert cache.depth_map() is cache.depth_map()
    assert depth.calls == 1
    assert opened == ["detector", "depth"]


@pytest.mark.parametrize("opener", [None, lambda: None])
def test_a_model_that_is_not_there_is_none(opener: Any) -> None:
    cache = PerceptionCache(FRAME, opener, opener)
    assert cache.detections() is None
    assert cache.depth_map() is None
    assert cache.knows("car") == ()


def test_a_model_that_does_not_open_is_tried_again() -> None:
    tries: list[int] = []

    def open_depth() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise HoverlensError("the file is locked")
        return FakeDepth()

    cache = PerceptionCache(FRAME, None, open_depth)
    with pytest.raises(HoverlensError, match="locked"):
        cache.depth_map()
    assert cache.depth_map() is not None


def test_a_run_that_was_given_up_on_is_kept_and_never_doubled() -> None:
    go = threading.Event()
    depth = FakeDepth()

    class Slow(FakeDepth):
        def estimate(self, frame: Frame) -> DepthMap:
            go.wait(20)
            return depth.estimate(frame)

    cache = PerceptionCache(FRAME, None, Slow)  # type: ignore[arg-type]
    timed = Timed(cache, 0.1)
    for _ in range(2):
        with pytest.raises(ToolError, match=r"depth took more than 0\.1 s"):
            timed.depth_map()
    go.set()
    assert Timed(cache, 20).depth_map() is not None
    assert depth.calls == 1


def test_tools_on_a_real_photo(shared_data: Path, make_session: Any) -> None:
    frame = Frame.from_file(next(iter(sorted((shared_data / "images/visdrone").glob("*.jpg")))))
    session = make_session("How many cars are there?")
    session.frame = frame
    models = shared_data / "models"
    detector = Detector.open(models / "yolov5su_visdrone_640.onnx")
    depth = DepthModel.open(models / "rtmonodepth_s_ms_256x448.onnx")
    with detector, depth:
        cache = PerceptionCache(frame, lambda: detector, lambda: depth)
        found = run_tools(session, cache, [(Detect(), {"category": "cars"})], timeout_s=120)[0]
        assert found.ok, found.text
        assert len(found.boxes) > 5
        boxes = list(found.boxes[:3])
        ranked, zoomed = run_tools(session, cache, [(Distance(), {"boxes": boxes}), (Zoom(), {"region": boxes[0]})])
    assert "Near to far: " in ranked.text
    assert "ground level" in ranked.text or "stands out" in ranked.text
    assert zoomed.image is not None
    assert max(zoomed.image.size) == 448
