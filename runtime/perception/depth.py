"""How far things are, from one frame, by a compiled monocular depth model.

Models differ in what their numbers mean, and files do not say. These are the rules, each of which
arguments of :meth:`DepthModel.open` or the metadata entry ``hoverlens.depth`` override:

* The output is the one map of depth or disparity in the file: one channel, the input's aspect. With
  several, the one named depth wins.
* It is **disparity** (larger = nearer) if its name has ``disp`` or ``inv`` in it, or if it is the
  only map of a model that is neither metric nor of Depth Anything 3: Depth Anything V1 and V2 and
  MiDaS call their inverse depth ``depth``. Otherwise it is **depth** (larger = farther).
* It is **metric** (metres) if the file's name says ``metric``, ``hypersim``, ``vkitti`` or
  ``zoe``. RT-MonoDepth is relative: its scale belongs to the cars it was trained on.
* Pictures are RGB, stretched to the input, normalised with ImageNet's constants; for models with a
  disparity output or ``monodepth`` in their name (RT-MonoDepth) plain 0..1.
* Where the input's size is open, the long side becomes 518 pixels and both sides multiples of 14
  (the patch of Depth Anything), or 448 and 32 for the others.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from ..boxes import Boxes, Space
from ..engines import Engine, TensorSpec, open_engine
from ..engines.base import check_batch
from ..errors import BadInput
from ..frame import Frame
from .preprocess import Preprocessing

Kind = Literal["metric", "relative"]
Meaning = Literal["depth", "disparity"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
METADATA_KEY = "hoverlens.depth"

# The rim of a box mostly shows what is behind the object.
RIM = 0.15
RING = 0.5  # width of the ground ring around a box, as a share of the box's sides
MIN_RING_PIXELS = 8


@dataclass(frozen=True)
class DepthMap:
    """Depth of one frame.

    Attributes:
        depth: float32, H x W, at the model's resolution; LARGER = FARTHER; NaN where unknown.
        kind: ``"metric"``: metres. ``"relative"``: no unit.
        size: (width, height) of the original frame, which the map covers whole.
        inverse: Relative maps only. True: ``1 - depth`` lies in 0..1 and is an affine function of
            inverse depth (from a disparity), so that ratios of ``depth`` mean nothing. False:
            ``depth`` is true up to one factor.
    """

    depth: NDArray[np.float32]
    kind: Kind
    size: tuple[int, int]
    inverse: bool = False

    def resized(self) -> NDArray[np.float32]:
        """The map at the size of the original frame, float32, bilinear."""
        if self.depth.shape == (self.size[1], self.size[0]):
            return self.depth
        full = cv2.resize(self.depth, self.size, interpolation=cv2.INTER_LINEAR)
        return cast("NDArray[np.float32]", full)

    def at(self, boxes: Boxes, percentile: float = 50.0) -> NDArray[np.float32]:
        """Depth of each box: a percentile over its inner part.

        Args:
            boxes: On the frame or on a crop of it, in any space.
            percentile: 50 is the median; lower ones favour what is nearest in the box.

        Returns:
            float32, N; NaN for a box outside the frame or without a known depth. A box smaller than
            a pixel of the map takes the pixel it lies in.

        Raises:
            BadInput: The boxes belong to a frame of another size; the percentile is not 0 to 100.
        """
        if not 0 <= percentile <= 100:
            raise BadInput(f"depth: percentile is {percentile}, needed a number from 0 to 100")
        out = np.full(len(boxes), np.nan, np.float32)
        for i, box in enumerate(self._in_map(boxes)):
            window = self._window(box, RIM)
            if window is not None:
                known = window[np.isfinite(window)]
                if known.size:
                    out[i] = np.percentile(known, percentile)
        return out

    def order(self, boxes: Boxes, percentile: float = 50.0) -> NDArray[np.int64]:
        """Indices of the boxes from near to far; unknown ones last, equal ones in their order."""
        depth = self.at(boxes, percentile)
        return np.argsort(np.where(np.isnan(depth), np.inf, depth), kind="stable").astype(np.int64)

    def nearer(self, a: Boxes, b: Boxes, margin: float = 0.0) -> bool | None:
        """Whether box ``a`` is nearer to the camera than box ``b``.

        Args:
            a, b: One box each.
            margin: Differences up to this share of the map's spread (5th to 95th percentile) are
                not told apart.

        Returns:
            None where a depth is unknown or the difference is within the margin.

        Raises:
            BadInput: Not one box each.
        """
        if len(a) != 1 or len(b) != 1:
            raise BadInput(f"depth: got {len(a)} and {len(b)} boxes to compare, needed one each")
        difference = float(self.at(b)[0]) - float(self.at(a)[0])
        if math.isnan(difference):
            return None
        known = self.depth[np.isfinite(self.depth)]
        low, high = np.percentile(known, [5, 95])
        if abs(difference) <= margin * float(high - low) or difference == 0:
            return None
        return difference > 0

    def height_above_ground(
        self, boxes: Boxes, depression_deg: float = 90.0, altitude: float | None = None
    ) -> NDArray[np.float32]:
        """How far each object stands out from the ground around it, by the jump in depth.

        The ground is a plane fitted to a ring around the box (half a box wide, other boxes left
        out, what stands out itself is trimmed away). In a pinhole view a plane is affine in inverse
        depth, so the fit holds for nadir and oblique views alike. At a pixel of the object the ray
        would have met that plane further on. With the altitude known, the height is altitude times
        the missing share of the ray, exact for any pitch and any unit of depth. Without, it is the
        missing piece times the sine of ``depression_deg``: exact where the view's angle is the
        ray's, some 20 % off at the rim of a shallow view. The 80th percentile over the box is
        returned: near the top of the object, without its outliers.

        Args:
            boxes: On the frame or on a crop of it.
            depression_deg: Angle of the view below the horizon, 90 looking straight down; only
                used without ``altitude``, and not for ``inverse`` maps.
            altitude: Height of the camera above this ground; not used for ``inverse`` maps.

        Returns:
            float32, N: in the unit of ``altitude``; without it metres for a metric map and the
            map's own unit for one true up to a factor. An ``inverse`` map gives the jump in
            disparity: good for comparing boxes of this map at similar distance, no length. NaN
            where box or ring hold too little. Around 0 for what lies on the ground.

        Raises:
            BadInput: The boxes belong to a frame of another size, the angle is not above 0 and up
                to 90 degrees, or the altitude is not above 0.
        """
        if not 0 < depression_deg <= 90:
            raise BadInput(f"depth: depression is {depression_deg}, needed degrees above 0 and up to 90")
        if altitude is not None and not 0 < altitude < math.inf:
            raise BadInput(f"depth: altitude is {altitude}, needed a number above 0")
        with np.errstate(all="ignore"):
            field = 1.0 - self.depth if self.inverse else 1.0 / self.depth
        known = np.isfinite(field)
        field64: NDArray[np.float64] = np.where(known, field, np.nan).astype(np.float64)
        placed = self._in_map(boxes)
        taken = np.zeros(self.depth.shape, np.bool_)
        for box in placed:
            if (span := self._span(box)) is not None:
                taken[span[1] : span[3], span[0] : span[2]] = True
        out = np.full(len(boxes), np.nan, np.float32)
        sine = math.sin(math.radians(depression_deg))
        for i, box in enumerate(placed):
            inner = self._span(_shrunk(box, RIM))
            if inner is None:
                continue
            plane = self._ground(field64, taken, box)
            if plane is None:
                continue
            ys, xs = np.mgrid[inner[1] : inner[3], inner[0] : inner[2]]
            here = field64[inner[1] : inner[3], inner[0] : inner[2]]
            ground = plane[0] * xs + plane[1] * ys + plane[2]
            with np.errstate(all="ignore"):
                if self.inverse:
                    height = here - ground
                elif altitude is not None:
                    height = altitude * (1 - ground / here)
                else:
                    height = (1 / ground - 1 / here) * sine
            usable = np.isfinite(height) if self.inverse else np.isfinite(height) & (ground > 0)
            if usable.any():
                out[i] = np.percentile(height[usable], 80)
        return out

    def _ground(
        self, field: NDArray[np.float64], taken: NDArray[np.bool_], box: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Coefficients (x, y, 1) of the ground's inverse depth around a box, in map pixels."""
        margin = np.maximum(RING * (box[2:] - box[:2]), 3.0)
        span = self._span(np.concatenate([box[:2] - margin, box[2:] + margin]))
        if span is None:
            return None
        ys, xs = np.mgrid[span[1] : span[3], span[0] : span[2]]
        values = field[span[1] : span[3], span[0] : span[2]]
        use = np.isfinite(values) & ~taken[span[1] : span[3], span[0] : span[2]]
        xs, ys, values = xs[use], ys[use], values[use]
        if values.size < MIN_RING_PIXELS:
            return None
        design = np.stack([xs, ys, np.ones_like(xs)], 1).astype(np.float64)
        keep = np.ones(values.size, np.bool_)
        plane = np.array([0.0, 0.0, float(np.median(values))])
        for _ in range(4):
            plane = np.linalg.lstsq(design[keep], values[keep], rcond=None)[0]
            residual = values - design @ plane
            spread = 1.4826 * np.median(np.abs(residual - np.median(residual)))
            # Neighbours stand out towards the camera only, so nearer residuals are trimmed harder.
            better = (residual <= 1.0 * spread) & (residual >= -2.5 * spread)
            if spread == 0 or better.sum() < MIN_RING_PIXELS or (better == keep).all():
                break
            keep = better
        return np.asarray(plane)

    def _in_map(self, boxes: Boxes) -> NDArray[np.float64]:
        """Boxes in pixels of the map, N x 4."""
        original = boxes.to_original().to(Space.PIXEL)
        if tuple(original.size) != tuple(self.size):
            raise BadInput(
                f"depth: boxes of a {original.size[0]}x{original.size[1]} frame, but the map is of "
                f"a {self.size[0]}x{self.size[1]} one; use boxes of the same frame"
            )
        h, w = self.depth.shape
        factor = np.array([w / self.size[0], h / self.size[1]] * 2)
        return np.asarray(original.xyxy * factor, np.float64)

    def _span(self, box: NDArray[np.float64]) -> tuple[int, int, int, int] | None:
        """Whole map pixels that a box touches, at least one; None outside the map."""
        h, w = self.depth.shape
        if box[2] < 0 or box[3] < 0 or box[0] >= w or box[1] >= h:
            return None
        x1 = min(max(math.floor(box[0]), 0), w - 1)
        y1 = min(max(math.floor(box[1]), 0), h - 1)
        x2 = max(min(math.ceil(box[2]), w), x1 + 1)
        y2 = max(min(math.ceil(box[3]), h), y1 + 1)
        return x1, y1, x2, y2

    def _window(self, box: NDArray[np.float64], rim: float) -> NDArray[np.float32] | None:
        span = self._span(_shrunk(box, rim))
        return None if span is None else self.depth[span[1] : span[3], span[0] : span[2]]


def _shrunk(box: NDArray[np.float64], rim: float) -> NDArray[np.float64]:
    cut = rim * (box[2:] - box[:2])
    return np.concatenate([box[:2] + cut, box[2:] - cut])


def relative_depth(disparity: NDArray[Any]) -> NDArray[np.float32]:
    """Turns disparity (larger = nearer) into relative depth: 0 the nearest pixel, 1 the farthest.

    A flat map becomes 0.5 everywhere; values that are not finite become NaN.
    """
    d = np.where(np.isfinite(disparity), disparity, np.nan).astype(np.float32)
    if np.isnan(d).all():
        return d
    low, high = float(np.nanmin(d)), float(np.nanmax(d))
    if high - low <= 1e-12:
        return np.where(np.isnan(d), np.nan, 0.5).astype(np.float32)
    return (1.0 - (d - low) / (high - low)).astype(np.float32)


class DepthModel:
    """A depth model, ready to run.

    Attributes:
        engine: What runs the model.
        output: Name of the output that is read.
        kind: ``"metric"`` or ``"relative"``.
        meaning: What the output's numbers are, ``"depth"`` or ``"disparity"``.
        preprocessing: How pictures go in; its size is that of a square frame where the input's
            size is open.
    """

    def __init__(
        self,
        engine: Engine,
        output: str,
        kind: Kind,
        meaning: Meaning,
        preprocessing: Preprocessing,
        multiple: int | None = None,
    ) -> None:
        self.engine = engine
        self.output = output
        self.kind: Kind = kind
        self.meaning: Meaning = meaning
        self.preprocessing = preprocessing
        self._input = _image_input(engine)
        self._multiple = multiple

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        kind: str | None = None,
        meaning: str | None = None,
        preprocessing: Preprocessing | Mapping[str, Any] | None = None,
        providers: Sequence[str] | None = None,
        threads: int | None = None,
    ) -> DepthModel:
        """Opens a model file and finds out how to use it, with one run on a blank picture.

        Args:
            path: An ONNX depth model.
            kind: Overrides the rules above: ``"metric"`` or ``"relative"``.
            meaning: Overrides the rules above: ``"depth"`` or ``"disparity"``.
            preprocessing: Overrides the usual preprocessing, as a whole or by a dict of some keys.
                A size fixes the input of a model that leaves it open.
            providers: See :func:`~hoverlens.runtime.engines.open_engine`.
            threads: CPU threads of one run.

        Raises:
            BadInput: The file cannot be read, is no depth model known here, or an argument is bad.
        """
        engine = open_engine(path, list(providers) if providers is not None else None, threads)
        try:
            return cls._from_engine(engine, kind, meaning, preprocessing)
        except BaseException:
            engine.close()
            raise

    @classmethod
    def _from_engine(
        cls,
        engine: Engine,
        kind: str | None,
        meaning: str | None,
        preprocessing: Preprocessing | Mapping[str, Any] | None,
    ) -> DepthModel:
        own = _own_settings(engine.metadata)
        kind = kind or own.get("kind")
        meaning = meaning or own.get("meaning")
        for key, value, allowed in (("kind", kind, Kind), ("meaning", meaning, Meaning)):
            if value is not None and value not in get_args(allowed):
                raise BadInput(f"depth: {key} is {value!r}, needed one of {', '.join(get_args(allowed))}")
        image = _image_input(engine)
        check_batch(engine, image)
        plain = _is_monodepth(engine)
        size, multiple = _input_size(image, plain)
        usual = (
            Preprocessing(size, mode="stretch")
            if plain
            else Preprocessing(size, mode="stretch", mean=IMAGENET_MEAN, std=IMAGENET_STD)
        )
        if image.shape[-1] == 3 and image.shape[-3] != 3:
            usual = replace(usual, layout="NHWC")
        given = preprocessing if preprocessing is not None else own.get("preprocessing")
        if not isinstance(given, Preprocessing):
            given = Preprocessing.from_dict(given or {}, defaults=usual)
        chosen = given
        if chosen.size != size:
            multiple = None
        output = own.get("output") or _depth_output(engine, image, chosen)
        if output not in {o.name for o in engine.outputs}:
            raise BadInput(f"depth: {engine.name} has no output {output!r}")
        file = engine.name.lower()
        if kind is None:
            metric = any(w in file for w in ("metric", "hypersim", "vkitti", "zoe"))
            kind = "metric" if metric else "relative"
        if meaning is None:
            named = any(w in output.lower() for w in ("disp", "inv"))
            third = any(w in file.replace("-", "").replace("_", "") for w in ("da3", "depthanything3"))
            known = kind == "metric" or third or _is_monodepth(engine)
            meaning = "depth" if known and not named else "disparity"
        return cls(engine, output, cast("Kind", kind), cast("Meaning", meaning), chosen, multiple)

    def estimate(self, frame: Frame | NDArray[np.uint8]) -> DepthMap:
        """Estimates the depth of one frame.

        Args:
            frame: A frame, or H x W x 3 uint8 RGB.

        Returns:
            The map at the model's resolution.

        Raises:
            BadInput: No RGB image was given.
        """
        rgb = frame.rgb if isinstance(frame, Frame) else frame
        preprocessing = self.preprocessing
        if self._multiple is not None and rgb.ndim == 3 and rgb.size:
            size = _open_size(rgb.shape[1], rgb.shape[0], self._multiple)
            preprocessing = replace(preprocessing, size=size)
        raw, letterbox = _predict(self.engine, self._input, preprocessing, rgb, self.output)
        if preprocessing.mode != "stretch":
            # Padding shows nothing: cut it off, at the output's own scale.
            fy, fx = raw.shape[0] / letterbox.network[1], raw.shape[1] / letterbox.network[0]
            left, top = round(letterbox.pad_left * fx), round(letterbox.pad_top * fy)
            w = max(1, round(letterbox.resized[0] * fx))
            h = max(1, round(letterbox.resized[1] * fy))
            raw = raw[top : top + h, left : left + w]
        size = (rgb.shape[1], rgb.shape[0])
        if self.meaning == "disparity":
            if self.kind == "metric":
                with np.errstate(all="ignore"):
                    raw = np.where(raw > 0, 1.0 / raw, np.nan)
                return DepthMap(raw.astype(np.float32), "metric", size)
            return DepthMap(relative_depth(raw), "relative", size, inverse=True)
        # A distance of zero or less is no distance.
        depth = np.where(np.isfinite(raw) & (raw > 0), raw, np.nan).astype(np.float32)
        return DepthMap(depth, self.kind, size)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> DepthModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _image_input(engine: Engine) -> TensorSpec:
    """The one picture input, rank 4, or rank 5 with a view axis (Depth Anything 3)."""
    if len(engine.inputs) == 1 and engine.inputs[0].rank in (4, 5):
        return engine.inputs[0]
    found = ", ".join(i.describe() for i in engine.inputs[:6]) or "none"
    raise BadInput(f"{engine.name} is no depth model known here: inputs {found}; needed one picture of rank 4")


def _is_monodepth(engine: Engine) -> bool:
    return "monodepth" in engine.name.lower() or any("disp" in o.name.lower() for o in engine.outputs)


def _input_size(image: TensorSpec, plain: bool) -> tuple[tuple[int, int], int | None]:
    """Width and height of the input; and, where both are open, what sides must be multiples of."""
    axes = (-2, -3) if image.shape[-1] == 3 and image.shape[-3] != 3 else (-1, -2)
    w, h = (image.fixed(a) for a in axes)
    multiple = 32 if plain else 14
    square = _open_size(1, 1, multiple)
    if w is None and h is None:
        return square, multiple
    return (w or square[0], h or square[1]), None


def _open_size(width: int, height: int, multiple: int) -> tuple[int, int]:
    long = 518 if multiple == 14 else 448
    scale = long / max(width, height)
    w, h = (max(1, round(s * scale / multiple)) * multiple for s in (width, height))
    return w, h


def _predict(
    engine: Engine,
    image: TensorSpec,
    preprocessing: Preprocessing,
    rgb: NDArray[np.uint8],
    output: str,
) -> tuple[NDArray[np.float32], Any]:
    outputs, letterbox = _run(engine, image, preprocessing, rgb)
    value = outputs[output][0].astype(np.float32)
    return value.reshape(value.shape[-2:]), letterbox


def _run(
    engine: Engine, image: TensorSpec, preprocessing: Preprocessing, rgb: NDArray[np.uint8]
) -> tuple[dict[str, NDArray[Any]], Any]:
    tensor, letterbox = preprocessing.tensor(rgb, image.dtype)
    batch = np.repeat(tensor[None], image.fixed(0) or 1, axis=0)
    if image.rank == 5:
        batch = np.repeat(batch[:, None], image.fixed(1) or 1, axis=1)
    return engine.run({image.name: batch}), letterbox


def _depth_output(engine: Engine, image: TensorSpec, preprocessing: Preprocessing) -> str:
    w, h = preprocessing.size
    blank = np.full((h, w, 3), 114, np.uint8)
    outputs, _ = _run(engine, image, preprocessing, blank)

    def is_map(value: NDArray[Any]) -> bool:
        if value.ndim not in (3, 4, 5) or math.prod(value.shape[1:-2]) != 1:
            return False
        oh, ow = value.shape[-2:]
        same_aspect = abs(ow * h / (oh * w) - 1) < 0.05 if oh and ow else False
        return value.dtype.kind == "f" and same_aspect and oh * 16 >= h

    maps = [k for k, v in outputs.items() if is_map(v)]
    for word in ("depth", "disp", "inv"):
        named = [k for k in maps if word in k.lower() and "conf" not in k.lower()]
        if named:
            return named[0]
    if len(maps) == 1:
        return maps[0]
    shapes = [f"{k} {'x'.join(map(str, v.shape))}" for k, v in list(outputs.items())[:6]]
    raise BadInput(
        f"{engine.name} is no depth model: outputs {', '.join(shapes) or 'none'} for an input of "
        f"{w}x{h}; needed one map of one channel with the input's aspect"
    )


def _own_settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What our exporter wrote into the file: output, kind, meaning, preprocessing."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("preprocessing", {}), dict):
        raise BadInput(f"the model's metadata {METADATA_KEY} is unusable; export it again, or remove that entry")
    return dict(value)
