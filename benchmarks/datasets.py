"""Folders of photos with truth, told apart by what lies in them.

=========== ========================== =========================================================
kind        recognised by              truth
=========== ========================== =========================================================
auair       ``annotations.json``       boxes in pixels (left, top, width, height); every vehicle
                                       class as one, Human ignored
visdrone    ``*.val.txt``              YOLO rows: class, centre and size in 0..1; car van truck
                                       bus motor
dota        ``*.txt`` of polygons      the box around each polygon
deepforest  ``*.csv`` of crowns        boxes in pixels, one class: tree
brighton    ``*_depth.npy``            metres, 0 = unknown
photos      nothing of the above       none: only times can be measured
=========== ========================== =========================================================
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import BadInput
from ..runtime.frame import Frame
from ..runtime.metrics.detection import Truth
from .classes import VEHICLE

AUAIR_HUMAN = 0
VISDRONE_NAMES = ("car", "van", "truck", "bus", "motor")
DOTA_NAMES = ("small-vehicle", "large-vehicle")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")
MAX_TRUTH_BYTES = 200_000_000


@dataclass(frozen=True)
class Sample:
    """One picture and what is true of it.

    Attributes:
        path: The picture.
        truth: Boxes in pixels; None where the set has none.
        depth: float32, metres, 0 = unknown, any size; None where the set has none.
    """

    path: Path
    truth: Truth | None = None
    depth: NDArray[np.float32] | None = None

    def frame(self) -> Frame:
        return Frame.from_file(self.path)


@dataclass(frozen=True)
class Dataset:
    """A folder of samples, in the order of their names.

    Attributes:
        name: The folder's name.
        kind: A row of the table above.
        names: Class names of the truth, empty without boxes.
    """

    name: str
    kind: str
    samples: tuple[Sample, ...]
    names: tuple[str, ...] = field(default=())


def open_dataset(folder: str | os.PathLike[str], limit: int | None = None) -> Dataset:
    """Finds out what a folder is and reads its truth; pictures are read later, one by one.

    Args:
        folder: With pictures and truth side by side.
        limit: Only the first so many samples.

    Raises:
        BadInput: No such folder, no pictures, or truth that cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise BadInput(f"cannot use the data set {path}: {what}; name a folder with pictures")
    # The folder's name, also for "." and for a path with a slash at its end.
    name = path.resolve().name
    try:
        samples, kind, names = _read(path)
    except (OSError, KeyError, ValueError, TypeError, IndexError, AttributeError) as e:
        raise BadInput(
            f"cannot read the truth of {path}: {type(e).__name__} {e}; see benchmarks/datasets.py for the formats"
        ) from None
    samples = [s for s in samples if s.path.is_file()]
    if not samples:
        raise BadInput(f"cannot use the data set {path}: no pictures in it; name a folder with some")
    return Dataset(name, kind, tuple(samples[:limit]), names)


def _read(folder: Path) -> tuple[list[Sample], str, tuple[str, ...]]:
    if (folder / "annotations.json").is_file():
        return _auair(folder), "auair", (VEHICLE,)
    if any(folder.glob("*.val.txt")):
        return _visdrone(folder), "visdrone", VISDRONE_NAMES
    if any(folder.glob("*_depth.npy")):
        return _brighton(folder), "brighton", ()
    crowns = [p for p in sorted(folder.glob("*.csv")) if _is_crowns(p)]
    if crowns:
        return _deepforest(folder, crowns), "deepforest", ("tree",)
    polygons = [p for p in sorted(folder.glob("*.txt")) if _is_dota(p)]
    if polygons:
        return _dota(polygons), "dota", DOTA_NAMES
    return [Sample(p) for p in _images(folder)], "photos", ()


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)


def _image_of(folder: Path, stem: str) -> Path:
    for suffix in IMAGE_SUFFIXES:
        for path in (folder / f"{stem}{suffix}", folder / f"{stem}{suffix.upper()}"):
            if path.is_file():
                return path
    return folder / stem


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_TRUTH_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_TRUTH_BYTES} bytes")
    return path.read_text(encoding="utf-8-sig")


def _truth(rows: Iterable[tuple[float, float, float, float, int, bool]]) -> Truth:
    listed = list(rows)
    boxes = np.array([r[:4] for r in listed], np.float64).reshape(-1, 4)
    if not np.isfinite(boxes).all():
        raise ValueError("a box that is not finite")
    return Truth(
        boxes,
        np.array([r[4] for r in listed], np.int64),
        np.array([r[5] for r in listed], np.bool_),
    )


def _auair(folder: Path) -> list[Sample]:
    samples = []
    for entry in json.loads(_text(folder / "annotations.json"))["annotations"]:
        rows = []
        for b in entry["bbox"]:
            x, y, w, h = (float(b[k]) for k in ("left", "top", "width", "height"))
            human = int(b["class"]) == AUAIR_HUMAN
            rows.append((x, y, x + w, y + h, -1 if human else 0, human))
        # Only the last part of the name: a data set must not point outside its folder.
        samples.append(Sample(folder / Path(str(entry["image_name"])).name, _truth(rows)))
    return sorted(samples, key=lambda s: s.path.name)


def _visdrone(folder: Path) -> list[Sample]:
    samples = []
    for file in sorted(folder.glob("*.val.txt")):
        path = _image_of(folder, file.name.removesuffix(".val.txt"))
        width, height = Frame.from_file(path).size
        rows = []
        for line in _text(file).splitlines():
            if line.strip():
                c, x, y, w, h = (float(v) for v in line.split()[:5])
                if not 0 <= int(c) < len(VISDRONE_NAMES):
                    raise ValueError(f"{file.name}: class {int(c)}")
                half_w, half_h = w / 2, h / 2
                rows.append(
                    (
                        (x - half_w) * width,
                        (y - half_h) * height,
                        (x + half_w) * width,
                        (y + half_h) * height,
                        int(c),
                        False,
                    )
                )
        samples.append(Sample(path, _truth(rows)))
    return samples


def _is_dota(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith("imagesource")


def _dota(files: list[Path]) -> list[Sample]:
    samples = []
    for file in files:
        rows = []
        for line in _text(file).splitlines():
            parts = line.split()
            if len(parts) < 9:
                continue
            corners = np.array(parts[:8], np.float64).reshape(4, 2)
            (x1, y1), (x2, y2) = corners.min(0), corners.max(0)
            known = parts[8] in DOTA_NAMES
            # The tenth column marks objects that the annotators found hard to tell.
            hard = len(parts) > 9 and parts[9] not in ("0", "")
            c = DOTA_NAMES.index(parts[8]) if known else -1
            rows.append((float(x1), float(y1), float(x2), float(y2), c, hard or not known))
        samples.append(Sample(_image_of(file.parent, file.stem), _truth(rows)))
    return samples


def _is_crowns(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return {"image_path", "xmin", "ymin", "xmax", "ymax"} <= set(file.readline().strip().split(","))


def _deepforest(folder: Path, files: list[Path]) -> list[Sample]:
    rows: dict[str, list[tuple[float, float, float, float, int, bool]]] = {}
    for file in files:
        for r in csv.DictReader(_text(file).splitlines()):
            box = [float(r[k]) for k in ("xmin", "ymin", "xmax", "ymax")]
            rows.setdefault(Path(r["image_path"]).name, []).append((box[0], box[1], box[2], box[3], 0, False))
    return [Sample(folder / name, _truth(r)) for name, r in sorted(rows.items())]


def _brighton(folder: Path) -> list[Sample]:
    samples = []
    for file in sorted(folder.glob("*_depth.npy")):
        # Object arrays would be unpickled, so they are refused.
        depth = np.load(file, allow_pickle=False).astype(np.float32)
        if depth.ndim != 2:
            raise ValueError(f"{file.name} has shape {depth.shape}")
        samples.append(Sample(_image_of(folder, file.name.removesuffix("_depth.npy")), depth=depth))
    return samples
