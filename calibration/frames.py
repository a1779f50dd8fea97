"""Frames that a perception model is calibrated with, and what the model is fed for each."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..runtime.engines import Engine
from ..runtime.errors import BadInput
from ..runtime.frame import Frame
from ..runtime.perception.depth import DepthModel
from ..runtime.perception.detector import Detector
from .questions import looks_like_noise

LEAST_FRAMES = 8
"""Below this a range is the range of a few pictures."""
USUAL_FRAMES = 300
"""What others recommend; fewer are taken with a warning."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class FrameSet:
    """Pictures that were found fit for calibration.

    Attributes:
        paths: By name.
        sha256: Over the pixels of all of them, in order.
        noise: How many of them are noise or blank.
    """

    paths: tuple[Path, ...]
    sha256: str
    noise: int

    def record(self) -> dict[str, Any]:
        """What a manifest says of the set."""
        return {"images": len(self.paths), "sha256": self.sha256, "noise": self.noise}


def read_frames(
    folders: Sequence[str | os.PathLike[str]],
    limit: int | None = None,
    allow_small: bool = False,
    allow_noise: bool = False,
) -> FrameSet:
    """Finds the pictures in folders and looks at every one.

    Args:
        folders: Each with pictures; what lies deeper is not looked at.
        limit: At most so many, spread evenly over all.
        allow_small: Take fewer than :data:`LEAST_FRAMES`.
        allow_noise: Take pictures that show nothing.

    Raises:
        BadInput: A folder is missing, a picture cannot be read, or the set would calibrate to nothing.
    """
    paths: list[Path] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "no such folder"
            raise BadInput(f"cannot calibrate with {folder}: {what}; name a folder of pictures")
        paths += sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if limit is not None and len(paths) > limit:
        # Evenly: the first ones of a flight may all show the take-off.
        paths = [paths[i * len(paths) // limit] for i in range(limit)]
    if not paths:
        raise BadInput(f"no pictures in {', '.join(map(str, folders))}; name a folder with frames of the camera")
    digest = hashlib.sha256()
    seen: set[str] = set()
    noisy: list[Path] = []
    for path in paths:
        frame = Frame.from_file(path)
        digest.update(frame.digest.encode())
        seen.add(frame.digest)
        if looks_like_noise(frame.rgb):
            noisy.append(path)
    if noisy and not allow_noise:
        raise BadInput(
            f"{len(noisy)} of {len(paths)} calibration pictures are noise or blank (the first: {noisy[0].name}); "
            "give frames of the camera, or --allow-noise"
        )
    if len(seen) < LEAST_FRAMES and not allow_small:
        raise BadInput(
            f"the calibration set has {len(seen)} different pictures, needed {LEAST_FRAMES}; give more or --allow-small"
        )
    return FrameSet(tuple(paths), digest.hexdigest(), len(noisy))


class _Recorder:
    """An engine that keeps what it was last fed and gave."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.feeds: list[dict[str, NDArray[Any]]] = []
        self.results: list[dict[str, NDArray[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        result = self._engine.run(feeds)
        self.feeds.append(dict(feeds))
        self.results.append(result)
        return result


class PerceptionModel:
    """A detector or depth model, seen as what goes into its graph and comes out of it.

    Attributes:
        kind: ``detector`` or ``depth``.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str | None = None, threads: int | None = None) -> None:
        """Opens a model.

        Args:
            path: An ONNX file.
            kind: ``detector`` or ``depth``; by default the first that it can be read as.

        Raises:
            BadInput: It is neither.
        """
        self._model: Detector | DepthModel
        try:
            if kind == "depth":
                raise BadInput("")
            self._model, self.kind = Detector.open(path, providers=["cpu"], threads=threads), "detector"
        except BadInput as as_detector:
            if kind == "detector":
                raise
            try:
                self._model, self.kind = DepthModel.open(path, providers=["cpu"], threads=threads), "depth"
            except BadInput as as_depth:
                raise (as_depth if kind == "depth" else as_detector) from None
        self._recorder = _Recorder(self._model.engine)
        self._model.engine = self._recorder

    def runs(self, paths: Sequence[Path]) -> Iterator[tuple[Feeds, dict[str, NDArray[Any]]]]:
        """What the graph is fed for each picture, preprocessed as everywhere else, and what it gives."""
        for path in paths:
            self._recorder.feeds.clear()
            self._recorder.results.clear()
            frame = Frame.from_file(path)
            if isinstance(self._model, Detector):
                self._model.detect(frame)
            else:
                self._model.estimate(frame)
            yield from zip(list(self._recorder.feeds), list(self._recorder.results), strict=True)

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> PerceptionModel:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(Exception):
            self.close()
