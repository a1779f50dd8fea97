"""A detector that really looks: it finds white rectangles on black."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.engines import TensorSpec
from hoverlens.runtime.perception.detector import Detector

SIDE = 64


class BlobEngine:
    """An end-to-end detector of white areas; the score grows with the area. Counts its runs."""

    def __init__(self, batch: int | str = "batch", rows: int = 32) -> None:
        self.name, self.provider = "blobs", "CPUExecutionProvider"
        self.inputs = (TensorSpec("images", "float32", (batch, 3, SIDE, SIDE)),)
        self.outputs = (TensorSpec("output0", "float32", (batch, rows, 6)),)
        self.metadata: Mapping[str, str] = {"names": "{0: 'blob', 1: 'rock'}"}
        self.rows = rows
        self.batches: list[int] = []
        self.closed = False

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        x = feeds["images"]
        self.batches.append(len(x))
        out = np.zeros((len(x), self.rows, 6), np.float32)
        for b, picture in enumerate(x):
            mask = (picture[0] > 0.6).astype(np.uint8)
            _, _, stats, _ = cv2.connectedComponentsWithStats(mask)
            for k, (x1, y1, w, h, area) in enumerate(stats[1 : self.rows + 1]):
                out[b, k] = [x1, y1, x1 + w, y1 + h, min(0.99, 0.5 + area / 2000), 0]
        return {"output0": out}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def blob_engine() -> BlobEngine:
    return BlobEngine()


def blob_detector(engine: BlobEngine) -> Detector:
    return Detector._from_engine(engine, None, None, {"pad": 0})


@pytest.fixture
def blobs(blob_engine: BlobEngine) -> Detector:
    return blob_detector(blob_engine)


@pytest.fixture
def blobs_one_by_one() -> Detector:
    return blob_detector(BlobEngine(batch=1))
