"""Where hoverlens keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import BadInput, HoverlensError


def full_path(path: str | os.PathLike[str]) -> Path:
    """An absolute path, ``~`` written out.

    Raises:
        BadInput: There is no such home folder, or the working directory was deleted.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise BadInput(f"no home folder is known for {str(path)!r}; write the path out") from None
    except OSError:
        raise BadInput(f"{str(path)!r} starts at the working directory, which was deleted; change to another") from None


def cache_dir() -> Path:
    """``$HOVERLENS_CACHE``, else ``$XDG_CACHE_HOME/hoverlens``, else ``~/.cache/hoverlens``; not created.

    Raises:
        HoverlensError: There is no such home folder, as for a user id without an account.
    """
    own = os.environ.get("HOVERLENS_CACHE")
    if own:
        try:
            return full_path(own)
        except BadInput as e:
            raise BadInput(f"HOVERLENS_CACHE cannot be used: {e}") from None
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "hoverlens"
    try:
        return Path("~/.cache/hoverlens").expanduser()
    except RuntimeError:
        raise HoverlensError("no home folder for the cache is known; set HOVERLENS_CACHE to a folder") from None


def make_cache_dir(*parts: str) -> Path:
    """Creates a folder below :func:`cache_dir`.

    Raises:
        HoverlensError: It cannot be created or written.
    """
    folder = cache_dir().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise HoverlensError(f"cache folder {folder} is not writable; set HOVERLENS_CACHE to a folder that is")
    return folder


def random_bundle_dir() -> Path:
    """Where the random-weight bundle lies, whether or not it has been made."""
    return cache_dir() / "bundles" / "random"


def nano_bundle_dir() -> Path:
    """Where a shipped nano bundle lies, whether or not this installation has one."""
    return Path(__file__).resolve().parent.parent / "export" / "nano" / "bundle"
