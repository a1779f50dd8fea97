"""Accuracy and time of a detector on a folder of photos."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..runtime.boxes import Boxes
from ..runtime.metrics.detection import Found, Truth, evaluate
from ..runtime.perception.detector import Detector
from ..runtime.perception.preprocess import Preprocessing
from ..runtime.perception.slicing import SliceOptions
from .classes import class_map
from .datasets import open_dataset

CONF = 0.25
LOW_CONF = 0.001  # AP looks at all detections, also unlikely ones
IOU = 0.5

Progress = Callable[[int, int], None]


def bench_detector(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    sliced: bool | SliceOptions = False,
    labels: str | os.PathLike[str] | Sequence[str] | None = None,
    family: str | None = None,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    limit: int | None = None,
    threads: int = 1,
    providers: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures a detector.

    Each picture is run twice: at confidence .25, timed, for recall and precision; at .001 for AP
    (101-point interpolation). IoU .5 throughout.

    Args:
        model: An ONNX detector.
        dataset: A folder, see :mod:`.datasets`.
        sliced: Also look through tiles.
        labels, family, preprocessing, providers: See :meth:`Detector.open`.
        limit: Only the first so many pictures.
        threads: CPU threads, one for comparable times.
        progress: Called with (done, total); by default a bar on standard error where that is a
            terminal.

    Returns:
        The ``detector`` object of the benchmark contract: ``model``, ``dataset``, ``AP50``,
        ``AP50_small``, ``recall``, ``precision``, ``sliced``, ``ms_per_image`` (median, from pixels
        in memory to boxes), and what helps to read them. None where a number cannot be computed:
        recall and AP where no class of the model is one of the data set's.

    Raises:
        BadInput: Model or folder cannot be used.
    """
    data = open_dataset(dataset, limit)
    times: list[float] = []
    sure: list[Found] = []
    all_found: list[Found] = []
    truths: list[Truth] = []
    with Detector.open(model, labels, family, preprocessing, providers, threads) as detector:
        mapping = class_map(detector.names, data.names, data.kind)
        known = sorted({c for c in mapping if c is not None})
        total = len(data.samples)
        bar = tqdm(total=total, desc="pictures", leave=False, disable=None if progress is None else True)
        with bar:
            for index, sample in enumerate(data.samples):
                frame = sample.frame()
                if index == 0:
                    detector.detect(frame, conf=CONF, sliced=sliced)
                start = time.perf_counter()
                boxes = detector.detect(frame, conf=CONF, sliced=sliced)
                times.append(time.perf_counter() - start)
                if sample.truth is not None and known:
                    sure.append(_mapped(boxes, mapping))
                    low = detector.detect(frame, conf=LOW_CONF, sliced=sliced)
                    all_found.append(_mapped(low, mapping))
                    truths.append(_ignore_unknown(sample.truth, known))
                bar.update()
                if progress is not None:
                    progress(index + 1, total)
        info = {
            "family": detector.family.name,
            "input": list(detector.size),
            "provider": detector.engine.provider,
        }
    at_conf = evaluate(sure, truths, IOU, CONF)
    over_all = evaluate(all_found, truths, IOU, CONF)
    return {
        "model": Path(model).name,
        "dataset": data.name,
        "AP50": _rounded(over_all.ap),
        "AP50_small": _rounded(over_all.ap_small),
        "recall": _rounded(at_conf.recall),
        "precision": _rounded(at_conf.precision),
        "sliced": bool(sliced),
        "ms_per_image": round(1e3 * float(np.median(times)), 2),
        "images": total,
        "classes": [data.names[c] for c in known],
        "AP50_by_class": {data.names[c]: _rounded(v) for c, v in over_all.ap_by_class.items()},
        "truths": at_conf.truths,
        "detections": at_conf.detections,
        "conf": CONF,
        "iou": IOU,
        "threads": threads,
        **info,
    }


def _mapped(boxes: Boxes, mapping: Sequence[int | None]) -> Found:
    """Detections under the data set's classes; those of other classes are left out."""
    assert boxes.classes is not None
    assert boxes.scores is not None
    table = np.array([-1 if c is None else c for c in mapping], np.int64)
    inside = boxes.classes < len(table)
    classes = np.where(inside, table[np.minimum(boxes.classes, len(table) - 1)], -1)
    keep = classes >= 0
    return Found(boxes.xyxy[keep].astype(np.float64), boxes.scores[keep].astype(np.float64), classes[keep])


def _ignore_unknown(truth: Truth, known: Sequence[int]) -> Truth:
    """True boxes of classes that the model has no name for become regions to ignore."""
    unknown = ~np.isin(truth.classes, known)
    classes = np.where(unknown, -1, truth.classes)
    return Truth(truth.xyxy, classes, truth.ignore | unknown)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
