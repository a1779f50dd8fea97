"""The trace of one question: what every agent saw and said, as JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from .files import atomic_write_text, check_writable

TRACE_VERSION = 1


class Trace:
    """Collects events; with a path, :meth:`close` writes them there.

    Each event has ``t`` (seconds since the start) and ``event``; the file has one JSON object a line. It
    appears whole or not at all, also for a question that failed.

    Raises:
        BadInput: ``path`` cannot be written, told before any work is done.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.path: Path | None = None if path is None else check_writable(path, "the trace")
        self._start = time.perf_counter()
        self.emit("trace", version=TRACE_VERSION)

    def emit(self, event: str, **fields: Any) -> None:
        """Adds one event. ``fields`` must be JSON values."""
        self.events.append({"t": round(time.perf_counter() - self._start, 6), "event": event, **fields})

    def to_text(self) -> str:
        """The file's text."""
        return "".join(_line(event) + "\n" for event in self.events)

    def close(self) -> None:
        """Writes the file, if there is to be one. May be called more than once; the last call counts."""
        if self.path is not None:
            atomic_write_text(self.path, self.to_text())

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _line(event: dict[str, Any]) -> str:
    try:
        return json.dumps(event, ensure_ascii=False, allow_nan=False)
    except ValueError:  # JSON knows no infinity
        return json.dumps(_finite(event), ensure_ascii=False)


def _finite(value: Any) -> Any:
    """The same with null for every number that is none."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
