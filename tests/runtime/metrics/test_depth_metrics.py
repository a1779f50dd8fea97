"""Depth metrics agree with values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hoverlens.runtime.metrics.depth import (
    abs_rel,
    delta,
    disparity_fitted,
    median_scaled,
    order_accuracy,
)

TRUTH = np.array([[1.0, 2.0], [4.0, 0.0]])


def test_absolute_relative_error() -> None:
    assert abs_rel(np.array([[1.1, 1.0], [4.0, 9.0]]), TRUTH) == pytest.approx((0.1 + 0.5) / 3)
    assert abs_rel(np.array([[np.nan, 1.0], [-4.0, 9.0]]), TRUTH) == pytest.approx(0.5)


def test_share_of_inliers() -> None:
    assert delta(np.array([[1.2, 1.0], [5.0, 9.0]]), TRUTH) == pytest.approx(1 / 3)


def test_median_scaling_takes_one_factor() -> None:
    assert median_scaled(TRUTH * 3, TRUTH) == pytest.approx(TRUTH)
    assert abs_rel(median_scaled(TRUTH * 0.01, TRUTH), TRUTH) == pytest.approx(0)


def test_a_disparity_is_fitted_in_scale_and_shift() -> None:
    truth = np.array([[1.0, 2.0], [4.0, 8.0]])
    assert disparity_fitted(5 / truth - 3, truth) == pytest.approx(truth)
    assert np.isnan(disparity_fitted(truth, np.zeros((2, 2)))).all()


def test_order_of_pairs() -> None:
    truth = np.arange(1, 101, dtype=float).reshape(10, 10)
    assert order_accuracy(truth**3, truth) == 1
    assert order_accuracy(-truth, truth) == 0
    assert order_accuracy(np.ones((10, 10)), truth) == 0.5
    noise = np.random.default_rng(0).normal(size=(10, 10))
    assert order_accuracy(noise, truth) == pytest.approx(0.5, abs=0.1)
    assert order_accuracy(noise, truth) == order_accuracy(noise, truth)


def test_pairs_closer_than_the_gap_do_not_count() -> None:
    truth = np.linspace(40, 41, 100).reshape(10, 10)
    assert order_accuracy(truth, truth, gap=0.05) is None
    assert order_accuracy(truth, truth, gap=0.01) == 1


def test_without_truth_there_is_no_number() -> None:
    none = np.zeros((2, 2))
    assert abs_rel(TRUTH, none) is None
    assert delta(TRUTH, none) is None
    assert order_accuracy(TRUTH, none) is None
    assert median_scaled(TRUTH, none) == pytest.approx(TRUTH)
