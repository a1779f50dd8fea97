"""Ranges: what histograms remember, and where the three methods cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hoverlens.calibration.ranges import BINS, METHODS, Histogram, best_cut

values = arrays(np.float32, st.integers(1, 50), elements=st.floats(-1e6, 1e6, width=32))


@given(st.lists(values, min_size=1, max_size=5))
def test_nothing_is_lost_when_larger_values_come(parts: list[np.ndarray]) -> None:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    everything = np.abs(np.concatenate(parts))
    assert histogram.largest == everything.max()
    assert histogram.range("minmax") == histogram.largest
    # Zeros that came before any other number say nothing about a range and are not counted.
    assert np.count_nonzero(everything) <= histogram.counts.sum() <= everything.size
    assert histogram.top >= histogram.largest
    for method in METHODS:
        assert 0 <= histogram.range(method) <= histogram.largest


def test_counts_are_those_of_one_histogram_over_all() -> None:
    rng = np.random.default_rng(0)
    parts = [np.array([1.0], np.float32), *(rng.random(1000).astype(np.float32) * s for s in (0.9, 3.9, 1.9, 4.0))]
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    assert histogram.top == 4.0
    # Bins that were joined stay exact, since edges fall on edges.
    expected, _ = np.histogram(np.concatenate(parts), BINS, (0, 4.0))
    coarse = histogram.counts.reshape(-1, 4).sum(1)
    assert np.abs(coarse - expected.reshape(-1, 4).sum(1)).sum() <= 4


def test_numbers_that_are_not_finite_do_not_count() -> None:
    histogram = Histogram()
    histogram.add(np.array([1.0, np.nan, np.inf, -2.0], np.float32))
    assert histogram.largest == 2.0


def test_a_tensor_of_zeros_has_no_range() -> None:
    histogram = Histogram()
    histogram.add(np.zeros(10, np.float32))
    histogram.add(np.zeros(0, np.float32))
    assert [histogram.range(m) for m in METHODS] == [0.0, 0.0, 0.0]


def test_a_single_outlier_is_cut_off_by_percentile_and_entropy_only() -> None:
    rng = np.random.default_rng(0)
    histogram = Histogram()
    histogram.add(np.append(rng.normal(0, 1, 1_000_000), 200.0).astype(np.float32))
    assert histogram.range("minmax") == 200.0
    assert 3.0 < histogram.range("percentile") < 6.0
    assert histogram.range("percentile", 100.0) == 200.0
    assert 3.0 < histogram.range("entropy") < 60.0


def test_entropy_keeps_a_uniform_distribution_whole() -> None:
    assert best_cut(np.full(BINS, 100)) > 0.9 * BINS


@pytest.mark.parametrize("bins", [[0], [1], [BINS - 1], [0, BINS - 1]])
def test_entropy_copes_with_few_occupied_bins(bins: list[int]) -> None:
    counts = np.zeros(BINS, np.int64)
    counts[bins] = 5
    assert 0 <= best_cut(counts) <= max(bins)
