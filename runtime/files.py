"""Writing results so that a reader finds the whole file or none."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .errors import BadInput, HoverlensError

# Not the choice of the place: the work failed.
_BROKEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def check_writable(path: str | os.PathLike[str], what: str) -> Path:
    """Checks that a file can be written before any work is spent on its content.

    Args:
        path: The file to write; it may exist.
        what: What it will hold, for the message (``the trace``).

    Raises:
        BadInput: The folder is missing or not writable, or ``path`` is a folder or cannot be a file's.
    """
    target = Path(path)
    folder = target.parent
    try:
        os.stat(target)
        gone = False
    except (FileNotFoundError, NotADirectoryError):
        # A deleted folder can still be stood in.
        gone = folder.is_dir() and folder.stat().st_nlink == 0
    except OSError as e:  # a loop of links, a name that is too long
        raise BadInput(f"cannot write {what} {str(path)!r}: {e.strerror}; name another file") from None
    except ValueError:
        raise BadInput(f"cannot write {what} {str(path)!r}: that is no file name; name another file") from None
    if gone:
        raise BadInput(f"cannot write {what} {target}: folder {folder} was deleted; choose another")
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
        BadInput: The folder is missing or not writable, or ``path`` is a loop of links.
        HoverlensError: The disk is full or broken.
    """
    target = Path(path)
    try:
        if is_special(target):
            with target.open("wb") as special:
                special.write(data)
            return
        target = Path(os.path.realpath(target))
        if target.is_symlink():  # realpath gives up on a loop
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        # Cut, or the longest names that a file may have would not fit.
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:40]}.", suffix=".part", dir=target.parent)
    except OSError as e:
        raise _not_written(target, e) from None
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
            raise _not_written(target, e) from None
        raise


def _not_written(target: Path, error: OSError) -> HoverlensError:
    if error.errno in _BROKEN:
        return HoverlensError(f"cannot write {target}: {error.strerror}; free some space or choose another disk")
    return BadInput(f"cannot write {target}: {error.strerror}; choose another place")


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
