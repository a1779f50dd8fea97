"""Prompt templates: text files, one for each role, in a folder for each version.

Placeholders are ``{name}``. What fills them is data: it is given to the model as plain text, never as
template text. A bundle's model may have been trained on one version, so a version never changes once it is
released; a change makes a new folder.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources

from ..errors import BadInput

VERSION = "v1"

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@lru_cache(maxsize=64)
def template(name: str, version: str = VERSION) -> str:
    """The text of a template, without its final newline.

    Raises:
        BadInput: No such version or template.
    """
    path = resources.files(__package__) / version / f"{name}.txt"
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except OSError:
        raise BadInput(f"no prompt template {name!r} of version {version!r}; known: {versions()}") from None


def versions() -> list[str]:
    """Every version in this installation."""
    folder = resources.files(__package__)
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and re.fullmatch(r"v\d+", p.name))


def fill(name: str, version: str = VERSION, **values: str) -> str:
    """A template with its placeholders filled; each must be given, and no other.

    Values are put in as they are: braces inside them are not placeholders.
    """
    source = template(name, version)
    wanted = set(_PLACEHOLDER.findall(source))
    if wanted != set(values):
        raise ValueError(f"template {name!r} needs {sorted(wanted)}, found {sorted(values)}")
    return _PLACEHOLDER.sub(lambda m: values[m.group(1)], source)
