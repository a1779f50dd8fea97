"""Measures of accuracy, shared by benchmarks and by calibration's gates."""

from __future__ import annotations
