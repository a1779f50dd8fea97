"""Accuracy and time of a depth model on a folder of photos."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..runtime.metrics.depth import (
    abs_rel,
    delta,
    disparity_fitted,
    median_scaled,
    order_accuracy,
)
from ..runtime.perception.depth import DepthMap, DepthModel
from ..runtime.perception.preprocess import Preprocessing
from .datasets import open_dataset

Progress = Callable[[int, int], None]


def bench_depth(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    kind: str | None = None,
    meaning: str | None = None,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    limit: int | None = None,
    threads: int = 1,
    providers: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures a depth model.

    Estimates are brought to the truth's grid. A relative map is first aligned to the truth of each
    picture, by one factor (``alignment`` is ``"median"``) or, from a disparity, by scale and shift
    (``"disparity"``); a metric map is taken as it is (``"none"``), and its error after median
    scaling is added.

    Args:
        model: An ONNX depth model.
        dataset: A folder, see :mod:`.datasets`.
        kind, meaning, preprocessing, providers: See :meth:`DepthModel.open`.
        limit: Only the first so many pictures.
        threads: CPU threads, one for comparable times.
        progress: Called with (done, total); by default a bar on standard error where that is a
            terminal.

    Returns:
        The ``depth`` object of the benchmark contract: ``model``, ``dataset``, ``abs_rel``,
        ``order_accuracy`` (pairs of pixels at least 5 % apart; 0.5 is chance), ``ms_per_image``
        (median), means over the pictures, and what helps to read them. None without truth.

    Raises:
        BadInput: Model or folder cannot be used.
    """
    data = open_dataset(dataset, limit)
    times: list[float] = []
    rows: list[dict[str, float | None]] = []
    alignment = None
    with DepthModel.open(model, kind, meaning, preprocessing, providers, threads) as estimator:
        total = len(data.samples)
        bar = tqdm(total=total, desc="pictures", leave=False, disable=None if progress is None else True)
        with bar:
            for index, sample in enumerate(data.samples):
                frame = sample.frame()
                if index == 0:
                    estimator.estimate(frame)
                start = time.perf_counter()
                found = estimator.estimate(frame)
                times.append(time.perf_counter() - start)
                if sample.depth is not None:
                    alignment, row = _score(found, sample.depth)
                    rows.append(row)
                bar.update()
                if progress is not None:
                    progress(index + 1, total)
        info = {
            "kind": estimator.kind,
            "input": list(estimator.preprocessing.size),
            "provider": estimator.engine.provider,
        }
    return {
        "model": Path(model).name,
        "dataset": data.name,
        "abs_rel": _mean(rows, "abs_rel"),
        "order_accuracy": _mean(rows, "order_accuracy"),
        "ms_per_image": round(1e3 * float(np.median(times)), 2),
        "images": total,
        "abs_rel_median_scaled": _mean(rows, "abs_rel_median_scaled"),
        "delta_1_25": _mean(rows, "delta_1_25"),
        "abs_rel_flat": _mean(rows, "abs_rel_flat"),
        "alignment": alignment,
        "threads": threads,
        **info,
    }


def _score(found: DepthMap, truth: NDArray[np.float32]) -> tuple[str, dict[str, float | None]]:
    h, w = truth.shape
    shrinks = found.depth.shape[0] >= h and found.depth.shape[1] >= w
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    estimate = np.asarray(cv2.resize(found.depth, (w, h), interpolation=method), np.float32)
    order = order_accuracy(estimate, truth)
    if found.kind == "metric":
        alignment, aligned = "none", np.asarray(estimate, np.float64)
    elif found.inverse:
        alignment, aligned = "disparity", disparity_fitted(1.0 - estimate, truth)
    else:
        alignment, aligned = "median", median_scaled(estimate, truth)
    known = truth[truth > 0]
    flat = np.full(truth.shape, np.median(known) if known.size else 1.0)
    return alignment, {
        "abs_rel": abs_rel(aligned, truth),
        "abs_rel_median_scaled": abs_rel(median_scaled(aligned, truth), truth),
        "delta_1_25": delta(aligned, truth),
        # What a map without any structure would get: on flat ground very little.
        "abs_rel_flat": abs_rel(flat, truth),
        "order_accuracy": order,
    }


def _mean(rows: Sequence[Mapping[str, float | None]], key: str) -> float | None:
    values = [v for r in rows if (v := r[key]) is not None]
    return round(float(np.mean(values)), 4) if values else None
