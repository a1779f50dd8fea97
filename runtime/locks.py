"""Keeping two processes from making the same thing at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from .paths import make_cache_dir

try:
    import fcntl
except ImportError:  # Not a POSIX system: callers still rename whole files and folders into place.
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def path_lock(target: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a lock that stands for ``target`` while the body runs; others wait.

    The lock file lies in the cache folder, so nothing is left beside ``target``. The system frees the lock
    when a process dies, so a crash never blocks the next one. The empty file stays: removing it could let two
    processes lock two different files of the same name.

    Raises:
        HoverlensError: The cache folder is not writable.
    """
    name = hashlib.sha256(os.fsencode(Path(target).absolute())).hexdigest()[:32]
    with (make_cache_dir("locks") / f"{name}.lock").open("a") as f:
        if fcntl is not None:
            fcntl.flock(f, fcntl.LOCK_EX)
        yield
