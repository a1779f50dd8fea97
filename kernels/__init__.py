"""Native hot loops with a Python face. Imports nothing else of hoverlens."""

from __future__ import annotations

try:
    from . import _native  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"hoverlens.kernels: the native extension is missing or unusable ({error}); "
        "build it with `make venv` in a checkout, or `pip install .`"
    ) from None

from ._nms import nms

__all__ = ["nms"]
