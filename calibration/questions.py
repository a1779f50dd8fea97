"""Calibration sets for the MLLM: pictures and questions about them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import BadInput
from ..runtime.frame import Frame
from ..runtime.question import Question

#: Below this many different pictures a matrix describes the pictures more than the model.
LEAST_IMAGES = 16

#: Neighbouring pixels of photos correlate by 0.9 and more, of white noise by 0.
_LEAST_CORRELATION = 0.5

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")

#: Asked about pictures that come without questions, in turn.
GENERIC = (
    Question("How many vehicles are in the image?", ("0", "1", "2", "3", "4 or more"), "option"),
    Question("Describe what the drone sees.", (), "text"),
    Question("Is there a person in the image?", ("yes", "no"), "option"),
    Question("Where is the largest object?", (), "box"),
    Question("Which of these are in the image?", ("car", "person", "building", "tree", "water"), "options"),
    Question("Is the object nearest to the drone moving?", ("yes", "no"), "option"),
)


@dataclass(frozen=True)
class Item:
    """One question about one picture file."""

    image: Path
    question: Question


def read_questions(path: str | os.PathLike[str]) -> list[Item]:
    """Reads JSON lines: ``{"image": FILE, "question": TEXT, "options": [..], "kind": ..}``.

    Image paths are relative to the file's folder; options and kind may be left out.

    Raises:
        BadInput: It cannot be read, a line is no question, or a picture is missing.
    """
    source = Path(path)
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is no UTF-8 text"
        raise BadInput(f"cannot read questions {source}: {reason}; check the path") from None
    items: list[Item] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source} line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
            raise BadInput(f'{where} is no question; needed {{"image": "a.jpg", "question": "..", "options": [..]}}')
        items.append(Item(_existing(source.parent / entry["image"], where), _question(entry, where)))
    if not items:
        raise BadInput(f"{source} holds no questions; give one JSON object a line")
    return items


def generic_questions(folder: str | os.PathLike[str]) -> list[Item]:
    """One question of :data:`GENERIC` about each picture below a folder, in the order of names.

    Raises:
        BadInput: No such folder, or no pictures in it.
    """
    source = Path(folder)
    if not source.is_dir():
        raise BadInput(f"{source} is no folder; give a folder of photos")
    found = sorted(p for p in source.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    if not found:
        raise BadInput(f"{source} holds no pictures ({', '.join(_SUFFIXES)}); give a folder of photos")
    return [Item(path, GENERIC[i % len(GENERIC)]) for i, path in enumerate(found)]


@dataclass(frozen=True)
class CheckedSet:
    """A set whose pictures were all opened.

    Attributes:
        items: The questions.
        n_images: Different pictures, by content.
        n_noise: Pictures that are noise or blank.
        sha256: Over pictures and questions, in order.
    """

    items: tuple[Item, ...]
    n_images: int
    n_noise: int
    sha256: str


def check_set(items: Sequence[Item], *, allow_small: bool = False, allow_noise: bool = False) -> CheckedSet:
    """Opens every picture and refuses a set that would calibrate to nothing.

    Raises:
        BadInput: A picture cannot be read; too few different pictures without ``allow_small``; noise or blank
            pictures without ``allow_noise``.
    """
    digest = hashlib.sha256()
    pictures: dict[str, bool] = {}
    first_noise: Path | None = None
    for item in items:
        frame = Frame.from_file(item.image)
        if frame.digest not in pictures:
            pictures[frame.digest] = looks_like_noise(frame.rgb)
            if pictures[frame.digest]:
                first_noise = first_noise or item.image
        q = item.question
        digest.update(json.dumps([frame.digest, q.text, list(q.options), q.kind]).encode() + b"\n")
    noise = sum(pictures.values())
    if first_noise is not None and not allow_noise:
        raise BadInput(
            f"{noise} of {len(pictures)} calibration pictures are noise or blank (the first: {first_noise}); give "
            "photos from the drone, or --allow-noise"
        )
    if len(pictures) < LEAST_IMAGES and not allow_small:
        raise BadInput(
            f"the calibration set has {len(pictures)} different pictures, needed {LEAST_IMAGES}; give more, or "
            "--allow-small"
        )
    return CheckedSet(tuple(items), len(pictures), noise, digest.hexdigest())


def looks_like_noise(rgb: NDArray[np.uint8]) -> bool:
    """Whether a picture, uint8 (H, W, 3), is blank, or its neighbouring pixels have nothing to do with each other."""
    grey = rgb[:, :, 1].astype(np.float32)
    if grey.shape[0] < 2 or grey.shape[1] < 2 or float(grey.std()) < 2.0:
        return True
    pairs = ((grey[:, :-1], grey[:, 1:]), (grey[:-1], grey[1:]))
    return max(_correlation(a, b) for a, b in pairs) < _LEAST_CORRELATION


def _correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).mean() * (b * b).mean()))
    return float((a * b).mean()) / scale if scale > 0 else 1.0


def _existing(path: Path, where: str) -> Path:
    if not path.is_file():
        raise BadInput(f"{where}: no picture {path}; paths are relative to the question file")
    return path


def _question(entry: dict[str, Any], where: str) -> Question:
    try:
        return Question.make(entry.get("question"), entry.get("options"), entry.get("kind"))  # type: ignore[arg-type]
    except BadInput as e:
        raise BadInput(f"{where}: {e}") from None


def frames(items: Sequence[Item]) -> Iterator[tuple[Frame, Question]]:
    """The pictures one after the other; only one is in memory."""
    for item in items:
        yield Frame.from_file(item.image), item.question
