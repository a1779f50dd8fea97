"""Writing results so that a reader finds the whole file or none."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .errors import BadInput


def check_writable(path: str | os.PathLike[str], what: str) -> Path:
    """Checks that a file can be written before any work is spent on its content.

    Args:
        path: The file to write; it may exist.
        what: What it will hold, for the message (``the trace``).

    Raises:
        BadInput: The folder is missing or not writable, or ``path`` is a folder.
    """
    target = Path(path)
    folder = target.parent
    if not str(path) or target.is_dir():
        raise BadInput(f"cannot write {what} {str(path)!r}: it is a folder; name a file")
    if is_special(target):
        if not os.access(target, os.W_OK):
            raise BadInput(f"cannot write {what} {target}: it is not writable; choose another")
        return target
    if not folder.is_dir():
        raise BadInput(f"cannot write {what} {target}: no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write {what} {target}: folder {folder} is not writable; choose another")
    return target


def is_special(path: Path) -> bool:
    """Whether this is a device or pipe: written into, never replaced (``/dev/null``)."""
    return path.exists() and not path.is_file()


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a temporary file beside ``path`` and renames it into place.

    A link keeps pointing where it did. Devices and pipes are written into.

    Raises:
        BadInput: The folder is missing or not writable.
    """
    target = Path(path)
    if is_special(target):
        try:
            with target.open("wb") as special:
                special.write(data)
        except OSError as e:
            raise BadInput(f"cannot write {target}: {e.strerror}; choose another place") from None
        return
    target = Path(os.path.realpath(target))
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as e:
        raise BadInput(f"cannot write {target}: {e.strerror}; choose another folder") from None
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        # mkstemp makes files private; these are ordinary outputs.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException as e:
        os.unlink(temporary)
        if isinstance(e, OSError):
            raise BadInput(f"cannot write {target}: {e.strerror}; choose another place") from None
        raise


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """:func:`atomic_write_bytes` of UTF-8 text.

    Half characters, as file names may hold, become escapes; in JSON these stay valid.
    """
    atomic_write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a JSON document; ``-`` is standard output, where it stands alone."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        atomic_write_text(path, text)
