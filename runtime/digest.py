"""sha256 of files, with a memory so that a large file is read once and not at every start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from .errors import HoverlensError
from .files import atomic_write_text
from .paths import make_cache_dir

_CHUNK = 4 << 20


def sha256_file(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> str:
    """Reads the whole file and returns its sha256 in hex.

    Args:
        path: A readable file.
        progress: Called with the number of bytes read since the last call.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    with Path(path).open("rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def remembered_sha256(path: str | os.PathLike[str]) -> str:
    """Like :func:`sha256_file`, but trusts an earlier reading of the same unchanged file.

    Unchanged means: same resolved path, device, inode, size, modification and change time. The change time
    moves with every write and rename, so restoring the modification time does not hide an edit.

    Raises:
        OSError: It cannot be read.
    """
    real = Path(path).resolve(strict=True)
    before = _stamp(real)
    try:
        memory = make_cache_dir("digests") / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"
    except HoverlensError:
        return sha256_file(real)
    try:
        entry = json.loads(memory.read_text())
        if entry["stamp"] == before and isinstance(entry["sha256"], str):
            return str(entry["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = sha256_file(real)
    if _stamp(real) == before:
        # Failing to write loses only the memory: the next start reads the file again.
        with contextlib.suppress(HoverlensError):
            atomic_write_text(memory, json.dumps({"stamp": before, "sha256": digest}))
    return digest


def _stamp(path: Path) -> list[int]:
    s = path.stat()
    return [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]
