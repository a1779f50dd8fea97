"""Objects in a frame, by a compiled detector of any known family."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels import nms
from ..boxes import Boxes, Space
from ..engines import Engine, TensorSpec, open_engine
from ..engines.base import check_batch
from ..errors import BadInput
from ..frame import Frame
from ..geometry import Letterbox
from .decoders import Family, Raw, detect_family
from .labels import default_names, load_labels, names_from_metadata
from .preprocess import Preprocessing
from .slicing import CUT_PENALTY, EDGE_TOLERANCE, SliceOptions, rank_cut

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
DEFAULT_SIDE = 640
METADATA_KEY = "hoverlens.detector"
# More candidates than this only cost time: the best ones hold every object.
MAX_CANDIDATES = 30_000
MAX_DETECTIONS = 1000


class Detector:
    """A detector, ready to run.

    Example:
        >>> detector = Detector.open("yolox_nano.onnx")          # doctest: +SKIP
        >>> boxes = detector.detect(Frame.from_file("a.jpg"))    # doctest: +SKIP

    Attributes:
        engine: What runs the model.
        family: How its outputs are read.
        preprocessing: How pictures go in.
        names: Class names by index.
        named: Whether the names come from a labels file or the model, not from :func:`default_names`.
    """

    def __init__(
        self,
        engine: Engine,
        family: Family,
        preprocessing: Preprocessing,
        names: tuple[str, ...],
        named: bool = True,
    ) -> None:
        self.engine = engine
        self.family = family
        self.preprocessing = preprocessing
        self.names = names
        self.named = named
        self._image, self._sizes = _inputs(engine)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        labels: str | os.PathLike[str] | Sequence[str] | None = None,
        family: str | None = None,
        preprocessing: Preprocessing | Mapping[str, Any] | None = None,
        providers: Sequence[str] | None = None,
        threads: int | None = None,
    ) -> Detector:
        """Opens a model file and finds out how to use it, with one run on a blank picture.

        Args:
            path: An ONNX detector.
            labels: A labels file or the names; by default the model's metadata, else COCO's for 80 classes.
            family: Overrides the family found from the outputs.
            preprocessing: Overrides the family's usual preprocessing, as a whole or by a dict of some keys.
            providers: See :func:`~hoverlens.runtime.engines.open_engine`.
            threads: CPU threads of one run.

        Raises:
            BadInput: The file cannot be read or is no detector known here; labels or preprocessing do not fit.
        """
        engine = open_engine(path, list(providers) if providers is not None else None, threads)
        try:
            return cls._from_engine(engine, labels, family, preprocessing)
        except BaseException:
            engine.close()
            raise

    @classmethod
    def _from_engine(
        cls,
        engine: Engine,
        labels: str | os.PathLike[str] | Sequence[str] | None,
        family: str | None,
        preprocessing: Preprocessing | Mapping[str, Any] | None,
    ) -> Detector:
        own = _own_settings(engine.metadata)
        names = load_labels(labels) or names_from_metadata(engine.metadata)
        given = preprocessing if preprocessing is not None else own.get("preprocessing")
        image, _ = _inputs(engine)
        check_batch(engine, image)
        size, layout = _input_size(image, engine.metadata)
        if isinstance(given, Preprocessing):
            size = given.size
        elif given is not None and "size" in given:
            size = Preprocessing.from_dict({"size": given["size"]}).size
        _check_size(image, size, layout)
        blank = Preprocessing(size, layout=layout)
        outputs = _run(engine, np.full((size[1], size[0], 3), 114, np.uint8), blank)
        found = detect_family(outputs, size, names, engine.metadata, family or own.get("family"))
        for key in ("coordinates", "activation"):
            if key in own:
                found = replace(found, **{key: own[key]})
        usual = replace(usual_preprocessing(found, size), layout=layout)
        if isinstance(given, Preprocessing):
            chosen = given
        elif given is not None:
            chosen = Preprocessing.from_dict(given, defaults=usual)
        else:
            chosen = usual
        return cls(engine, found, chosen, names or default_names(found.classes), names is not None)

    @property
    def size(self) -> tuple[int, int]:
        """Network input (width, height)."""
        return self.preprocessing.size

    @property
    def batch(self) -> int | None:
        """The model's fixed batch, or None where it takes any."""
        return self._image.fixed(0)

    def detect(
        self,
        frame: Frame | NDArray[np.uint8],
        conf: float = 0.25,
        iou: float = 0.5,
        sliced: bool | SliceOptions = False,
        classes: Collection[str | int] | None = None,
        max_detections: int = MAX_DETECTIONS,
    ) -> Boxes:
        """Finds objects in one frame.

        Args:
            frame: A frame, or H x W x 3 uint8 RGB.
            conf: Lowest score that is returned, 0 to 1.
            iou: Overlap above which the lower of two boxes of a class is dropped, for families that need it.
            sliced: Also look through tiles (:class:`SliceOptions`; True takes its defaults).
            classes: Names or indices to keep; None keeps all. Others are left out before suppression.
            max_detections: At most so many, the best.

        Returns:
            Boxes in pixels of the original frame, clipped to it, by falling score, with scores, classes and
            names.

        Raises:
            BadInput: A threshold is outside 0..1, a class is not one of the model's, or no RGB image was given.
        """
        return self.detect_batch([frame], conf, iou, sliced, classes, max_detections)[0]

    def detect_batch(
        self,
        frames: Sequence[Frame | NDArray[np.uint8]],
        conf: float = 0.25,
        iou: float = 0.5,
        sliced: bool | SliceOptions = False,
        classes: Collection[str | int] | None = None,
        max_detections: int = MAX_DETECTIONS,
    ) -> list[Boxes]:
        """:meth:`detect` for several frames; they share runs where the model's batch allows it."""
        for key, value in (("conf", conf), ("iou", iou)):
            if not 0 <= value <= 1:
                raise BadInput(f"detect: {key} is {value}, needed a number from 0 to 1")
        wanted = self._class_indices(classes)
        options = sliced if isinstance(sliced, SliceOptions) else SliceOptions() if sliced else None
        pictures = [f.rgb if isinstance(f, Frame) else f for f in frames]
        if options is None:
            found = [
                self._suppress(_keep_classes(raw, wanted), iou, "iou")
                for raw in self._raw(pictures, conf, SliceOptions().max_batch)
            ]
        else:
            found = [self._sliced(p, conf, iou, options, wanted) for p in pictures]
        return [self._boxes(raw, p, max_detections) for raw, p in zip(found, pictures, strict=True)]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- passes ------------------------------------------------------------------------------------

    def _raw(self, pictures: Sequence[NDArray[np.uint8]], low: float, max_batch: int) -> list[Raw]:
        """Candidates of each picture, in pixels of that picture."""
        step = self.batch or max_batch
        out: list[Raw] = []
        for start in range(0, len(pictures), step):
            part = pictures[start : start + step]
            made = [self.preprocessing.tensor(p, self._image.dtype) for p in part]
            tensors = [t for t, _ in made]
            letterboxes = [b for _, b in made]
            batch = np.stack(tensors)
            if self.batch and len(part) < self.batch:
                missing = np.zeros((self.batch - len(part), *batch.shape[1:]), batch.dtype)
                batch = np.concatenate([batch, missing])
            outputs = _feed(self.engine, batch, self._image, self._sizes, self.size)
            raws = self.family.decode(outputs, self.size, low)
            if len(raws) < len(part):
                raise BadInput(
                    f"{self.engine.name} gives detections of {len(raws)} pictures for {len(batch)}; export it again "
                    "with a batch of 1"
                )
            out += [_place(r, b) for r, b in zip(raws[: len(part)], letterboxes, strict=True)]
        return out

    def _sliced(
        self,
        picture: NDArray[np.uint8],
        conf: float,
        iou: float,
        options: SliceOptions,
        wanted: NDArray[np.int64] | None,
    ) -> Raw:
        if picture.ndim != 3 or picture.size == 0:
            self.preprocessing.tensor(picture)  # says what is wrong with it
        frame = (picture.shape[1], picture.shape[0])
        tiles = options.tiles(frame, self.size)
        whole = [(0, 0, *frame)] if options.full_frame and len(tiles) > 1 else []
        passes = whole + tiles
        crops = [picture[y : y + h, x : x + w] for x, y, w, h in passes]
        parts: list[Raw] = []
        ranks: list[NDArray[np.float32]] = []
        for index, raw in enumerate(self._raw(crops, conf, options.max_batch)):
            tile = passes[index]
            raw = self._suppress(_keep_classes(raw, wanted), iou, "iou")
            xyxy = np.clip(raw.xyxy, 0, np.array([tile[2], tile[3]] * 2, np.float32))
            xyxy += np.array([tile[0], tile[1]] * 2, np.float32)
            raw = Raw(xyxy, raw.scores, raw.classes)
            if index >= len(whole):
                tolerance = EDGE_TOLERANCE * max(tile[2] / self.size[0], tile[3] / self.size[1])
                cut, seen = rank_cut(xyxy, tile, tiles, frame, tolerance)
                raw, cut = _select(raw, ~seen), cut[~seen]
                ranks.append(np.where(cut, raw.scores * CUT_PENALTY, raw.scores))
            else:
                ranks.append(raw.scores)
            parts.append(raw)
        joined = Raw(
            np.concatenate([p.xyxy for p in parts]),
            np.concatenate([p.scores for p in parts]),
            np.concatenate([p.classes for p in parts]),
        )
        return self._suppress(joined, options.merge, "ios", np.concatenate(ranks), always=True)

    def _suppress(
        self,
        raw: Raw,
        threshold: float,
        metric: str,
        ranks: NDArray[np.float32] | None = None,
        always: bool = False,
    ) -> Raw:
        if not always and not self.family.needs_nms:
            return raw
        order = raw.scores if ranks is None else ranks
        if len(order) > MAX_CANDIDATES:
            best = np.argpartition(-order, MAX_CANDIDATES)[:MAX_CANDIDATES]
            raw, order = _select(raw, best), order[best]
        kept = nms(
            raw.xyxy,
            np.asarray(order, np.float32),
            raw.classes,
            threshold,
            metric="ios" if metric == "ios" else "iou",
        )
        return _select(raw, kept)

    def _boxes(self, raw: Raw, picture: NDArray[np.uint8], limit: int) -> Boxes:
        size = (picture.shape[1], picture.shape[0])
        xyxy = np.clip(raw.xyxy, 0, np.array(size * 2, np.float32))
        inside = np.flatnonzero((xyxy[:, 2] > xyxy[:, 0]) & (xyxy[:, 3] > xyxy[:, 1]))
        # Stable: equal scores keep the model's order, so one frame always gives one answer.
        order = inside[np.argsort(-raw.scores[inside], kind="stable")][:limit]
        return Boxes(
            xyxy[order], Space.PIXEL, size, scores=raw.scores[order], classes=raw.classes[order], names=self.names
        )

    def _class_indices(self, classes: Collection[str | int] | None) -> NDArray[np.int64] | None:
        if classes is None:
            return None
        indices = []
        for c in classes:
            if isinstance(c, str) and c in self.names:
                indices.append(self.names.index(c))
            elif not isinstance(c, str) and 0 <= c < len(self.names):
                indices.append(int(c))
            else:
                some = ", ".join(self.names[:12]) + (", ..." if len(self.names) > 12 else "")
                raise BadInput(f"detect: no class {c!r} in this model, which has {some}")
        return np.array(sorted(indices), np.int64)


def usual_preprocessing(family: Family, size: tuple[int, int]) -> Preprocessing:
    """What models of a family are usually trained with. A manifest or metadata may say otherwise."""
    if family.name == "yolox":
        return Preprocessing(size, mode="topleft", order="bgr", scale=1.0)
    if family.name == "fastestdet":
        return Preprocessing(size, mode="stretch", order="bgr")
    if family.name == "detr":
        if family.activation == "softmax":  # DETR and YOLOS; RT-DETR and D-FINE do not normalise
            return Preprocessing(size, mode="stretch", mean=IMAGENET_MEAN, std=IMAGENET_STD)
        return Preprocessing(size, mode="stretch")
    if len(family.outputs) == 3:
        return Preprocessing(size, mode="stretch")
    return Preprocessing(size, mode="center")


def _inputs(engine: Engine) -> tuple[TensorSpec, TensorSpec | None]:
    """The image input, and the input that takes sizes, if there is one."""
    images = [i for i in engine.inputs if i.rank == 4]
    others = [i for i in engine.inputs if i.rank != 4]
    if len(images) == 1 and len(others) == 0:
        return images[0], None
    if len(images) == 1 and len(others) == 1 and others[0].rank == 2 and "size" in others[0].name.lower():
        return images[0], others[0]
    found = ", ".join(i.describe() for i in engine.inputs[:6]) or "none"
    raise BadInput(
        f"{engine.name} is no detector known here: inputs {found}; needed one picture of rank 4, "
        "and at most one input of sizes"
    )


def _input_size(image: TensorSpec, metadata: Mapping[str, str]) -> tuple[tuple[int, int], Any]:
    """Width and height where the file fixes them, else from ``imgsz``, else 640; and the layout."""
    layout = "NHWC" if image.shape[3] == 3 and image.shape[1] != 3 else "NCHW"
    h, w = (image.fixed(1), image.fixed(2)) if layout == "NHWC" else (image.fixed(2), image.fixed(3))
    try:
        imgsz = json.loads(metadata.get("imgsz", "null"))
    except ValueError:
        imgsz = None
    if not (isinstance(imgsz, list) and len(imgsz) == 2 and all(type(v) is int and v > 0 for v in imgsz)):
        imgsz = [DEFAULT_SIDE, DEFAULT_SIDE]
    return (w or imgsz[1], h or imgsz[0]), layout


def _check_size(image: TensorSpec, size: tuple[int, int], layout: str) -> None:
    axes = (2, 1) if layout == "NHWC" else (3, 2)
    fixed = [image.fixed(a) for a in axes]
    if any(f is not None and f != s for f, s in zip(fixed, size, strict=True)):
        raise BadInput(
            f"preprocessing: size is {size[0]}x{size[1]}, but the model's input is {image.describe()}; "
            "leave the size out or export the model for it"
        )


def _run(engine: Engine, rgb: NDArray[np.uint8], preprocessing: Preprocessing) -> dict[str, NDArray[Any]]:
    image, sizes = _inputs(engine)
    tensor, _ = preprocessing.tensor(rgb, image.dtype)
    batch = np.repeat(tensor[None], image.fixed(0) or 1, axis=0)
    return _feed(engine, batch, image, sizes, preprocessing.size)


def _feed(
    engine: Engine,
    batch: NDArray[Any],
    image: TensorSpec,
    sizes: TensorSpec | None,
    size: tuple[int, int],
) -> dict[str, NDArray[Any]]:
    feeds: dict[str, NDArray[Any]] = {image.name: batch}
    if sizes is not None:
        # The network's own size, so that boxes come back in its pixels like everyone else's.
        feeds[sizes.name] = np.tile(np.array(size, sizes.dtype), (len(batch), 1))
    return engine.run(feeds)


def _own_settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What our exporter wrote into the file: family, coordinates, activation, preprocessing."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    allowed = {"coordinates": ("grid", "pixel", "unit"), "activation": ("sigmoid", "softmax", "none")}
    good = isinstance(value, dict) and isinstance(value.get("preprocessing", {}), dict)
    if not good or any(value[k] not in v for k, v in allowed.items() if k in value):
        raise BadInput(f"the model's metadata {METADATA_KEY} is unusable; export it again, or remove that entry")
    return dict(value)


def _place(raw: Raw, letterbox: Letterbox) -> Raw:
    """From pixels of the network input to pixels of the picture."""
    return Raw(letterbox.backward(raw.xyxy).xyxy, raw.scores, raw.classes)


def _select(raw: Raw, which: NDArray[Any]) -> Raw:
    return Raw(raw.xyxy[which], raw.scores[which], raw.classes[which])


def _keep_classes(raw: Raw, wanted: NDArray[np.int64] | None) -> Raw:
    return raw if wanted is None else _select(raw, np.isin(raw.classes, wanted))
