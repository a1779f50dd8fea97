"""The trace of one question: what every agent saw and said, as JSON lines."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from .errors import BadInput

TRACE_VERSION = 1


class Trace:
    """Collects events in memory and, with a path, streams them to a file.

    The file appears under its final name only when :meth:`close` runs, and the runtime closes it whatever
    happens, so a reader never sees half a line. Each line is one JSON object with ``t`` (seconds since the
    start) and ``event``.

    Raises:
        BadInput: The folder of ``path`` is missing or not writable.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.path = Path(path) if path is not None else None
        self._start = time.perf_counter()
        self._file: IO[str] | None = None
        self._temporary: str | None = None
        if self.path is not None:
            folder = self.path.parent
            if not folder.is_dir():
                raise BadInput(f"cannot write the trace {self.path}: no folder {folder}; make it first")
            if self.path.is_dir():
                raise BadInput(f"cannot write the trace {self.path}: it is a folder; name a file")
            try:
                handle, self._temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".part", dir=folder)
            except OSError as e:
                raise BadInput(f"cannot write the trace {self.path}: {e.strerror}") from None
            self._file = os.fdopen(handle, "w", encoding="utf-8")
        self.emit("trace", version=TRACE_VERSION)

    def emit(self, event: str, **fields: Any) -> None:
        """Adds one event. ``fields`` must be JSON values."""
        entry = {"t": round(time.perf_counter() - self._start, 6), "event": event, **fields}
        self.events.append(entry)
        if self._file is not None:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Puts the file in place. May be called more than once."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        assert self._temporary is not None and self.path is not None
        # mkstemp makes files private; a trace is an ordinary output.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(self._temporary, 0o666 & ~umask)
        os.replace(self._temporary, self.path)
        self._temporary = None

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
