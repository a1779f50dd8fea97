"""Output folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..runtime.errors import BadInput, HoverlensError
from ..runtime.locks import path_lock
from ..runtime.paths import full_path


def check_output(out: str | os.PathLike[str], marker: str, what: str) -> Path:
    """The absolute path of an output folder that may be made or replaced.

    Args:
        out: The folder.
        marker: A file by which an earlier output is known.
        what: Its kind, for messages.

    Raises:
        BadInput: It holds something else, or cannot be written.
    """
    target = full_path(out)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BadInput(f"{target} exists and is no folder; name another with -o")
    if target.is_dir() and not (target / marker).is_file() and any(target.iterdir()):
        raise BadInput(f"{target} exists and is no {what}, so it is left alone; name another folder with -o")
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write {what} {target}: {parent} is not writable; choose another folder with -o")
    return target


@contextlib.contextmanager
def staged(target: Path, marker: str, what: str, keep: str) -> Iterator[tuple[Path, Path]]:
    """Yields (work, fresh): a scratch folder and the folder in it that takes ``target``'s place.

    One process works on a target at a time. After a kill the scratch folder of the same ``keep`` is found again,
    finished intermediates included; any other is removed. An error removes it.

    Args:
        target: From :func:`check_output`.
        marker: As there.
        what: As there.
        keep: Stands for what goes into the scratch folder.

    Raises:
        BadInput: The folder cannot be made.
        HoverlensError: Writing failed.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make {target.parent}: {e.strerror}; choose another folder with -o") from None
    with path_lock(target):
        check_output(target, marker, what)
        work = target.parent / f".{target.name}.{keep[:16]}.part"
        for left in target.parent.glob(f".{target.name}.*.part"):
            if left != work:
                shutil.rmtree(left, ignore_errors=True)
        try:
            fresh = work / "new"
            if fresh.exists():
                shutil.rmtree(fresh)
            if (work / "old").exists():
                _put_back(work / "old", target)
            fresh.mkdir(parents=True)
            yield work, fresh
            if target.exists():
                os.replace(target, work / "old")
            os.replace(fresh, target)
        except OSError as e:
            raise HoverlensError(
                f"cannot write {what} {target}: {e.strerror or e}; nothing was changed there, free space or choose "
                "another folder"
            ) from None
        finally:
            if (work / "old").exists() and not target.exists():
                os.replace(work / "old", target)
            shutil.rmtree(work, ignore_errors=True)


def _put_back(old: Path, target: Path) -> None:
    """Killed between two renames: the earlier output is still whole."""
    if target.exists():
        shutil.rmtree(old)
    else:
        os.replace(old, target)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Refuses to start what the disk cannot hold.

    Raises:
        HoverlensError: Less than ``needed`` bytes are free.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HoverlensError(
            f"{what} needs {needed / 1e9:.1f} GB on the disk of {folder}, and {free / 1e9:.1f} GB are free; free some "
            "or choose another folder with -o"
        )
