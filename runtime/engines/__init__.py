"""Engines that run compiled models: ONNX Runtime and TensorRT."""

from __future__ import annotations

from .base import Engine, TensorSpec, open_engine

__all__ = ["Engine", "TensorSpec", "open_engine"]
