"""Where hoverlens keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import HoverlensError


def cache_dir() -> Path:
    """``$HOVERLENS_CACHE``, else ``$XDG_CACHE_HOME/hoverlens``, else ``~/.cache/hoverlens``; not created."""
    own = os.environ.get("HOVERLENS_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path("~/.cache").expanduser()
    return base / "hoverlens"


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
