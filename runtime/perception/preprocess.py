"""From an RGB image to a model's input tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput
from ..geometry import Letterbox

Mode = Literal["topleft", "center", "stretch"]
Order = Literal["rgb", "bgr"]
Layout = Literal["NCHW", "NHWC"]

MAX_SIDE = 8192


@dataclass(frozen=True)
class Preprocessing:
    """How a model wants its pictures. The manifest of a bundle stores it (:meth:`to_dict`).

    Attributes:
        size: Network input (width, height) in pixels.
        mode: ``"stretch"`` fills the input whatever the aspect; ``"topleft"`` and ``"center"`` keep the aspect
            and pad what is left, with the image at the top left or in the middle.
        pad: Grey value 0..255 of the padding.
        order: Channel order the model was trained with.
        scale: Multiplies the 0..255 values first.
        mean, std: Then ``(x - mean) / std``, in the model's channel order.
        layout: ``"NCHW"`` or ``"NHWC"``.
    """

    size: tuple[int, int]
    mode: Mode = "center"
    pad: int = 114
    order: Order = "rgb"
    scale: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    layout: Layout = "NCHW"

    def __post_init__(self) -> None:
        def need(ok: bool, key: str, wanted: str) -> None:
            if not ok:
                raise BadInput(f"preprocessing: {key} is {getattr(self, key)!r}, needed {wanted}")

        need(
            len(self.size) == 2 and all(isinstance(s, int) and 1 <= s <= MAX_SIDE for s in self.size),
            "size",
            f"[width, height] of 1 to {MAX_SIDE} pixels",
        )
        need(self.mode in get_args(Mode), "mode", "one of topleft, center, stretch")
        need(isinstance(self.pad, int) and 0 <= self.pad <= 255, "pad", "a number 0 to 255")
        need(self.order in get_args(Order), "order", "rgb or bgr")
        need(self.layout in get_args(Layout), "layout", "NCHW or NHWC")
        need(math.isfinite(self.scale) and self.scale > 0, "scale", "a number above 0")
        need(len(self.mean) == 3 and all(map(math.isfinite, self.mean)), "mean", "three numbers")
        need(len(self.std) == 3 and all(math.isfinite(s) and s > 0 for s in self.std), "std", "three numbers above 0")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` reads them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], defaults: Preprocessing | None = None) -> Preprocessing:
        """Reads what :meth:`to_dict` wrote, or a part of it over ``defaults``.

        Raises:
            BadInput: A key is unknown, a value has the wrong type or range, or ``size`` is missing.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise BadInput(f"preprocessing: unknown key {unknown[0]!r}, needed some of {', '.join(sorted(known))}")
        read: dict[str, Any] = {}
        for key, value in values.items():
            try:
                if key == "size":
                    read[key] = tuple(int(v) for v in value)
                elif key in ("mean", "std"):
                    read[key] = tuple(float(v) for v in value)
                elif key == "pad":
                    read[key] = int(value)
                elif key == "scale":
                    read[key] = float(value)
                else:
                    read[key] = str(value)
            except (TypeError, ValueError):
                raise BadInput(f"preprocessing: {key} is {value!r}, which has the wrong type") from None
        if defaults is not None:
            return replace(defaults, **read)
        if "size" not in read:
            raise BadInput("preprocessing: no size, needed [width, height] of the network input")
        return cls(**read)

    def letterbox(self, width: int, height: int) -> Letterbox:
        """How an image of this size lies inside the network input."""
        if self.mode == "stretch":
            return Letterbox.stretch((width, height), self.size)
        return Letterbox.fit((width, height), self.size, center=self.mode == "center")

    def tensor(self, rgb: NDArray[np.uint8], dtype: str = "float32") -> tuple[NDArray[Any], Letterbox]:
        """Makes one model input.

        Args:
            rgb: H x W x 3 uint8 RGB.
            dtype: The engine's input type: ``float32``, ``float16``, ``float64`` or ``uint8``. For ``uint8`` the
                pixels go in as they are: such a model carries its own normalisation.

        Returns:
            The tensor, 3 x H x W (NCHW) or H x W x 3 (NHWC) of the input size, and how the image lies in it.

        Raises:
            BadInput: The image is no H x W x 3 uint8 array with at least one pixel, or the dtype is another.
        """
        if rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.dtype != np.uint8 or rgb.size == 0:
            got = "x".join(map(str, rgb.shape))
            raise BadInput(f"image is {rgb.dtype} {got}, needed uint8 HxWx3 RGB")
        if dtype not in ("float32", "float16", "float64", "uint8"):
            raise BadInput(f"model input is {dtype}, needed float32, float16, float64 or uint8")
        letterbox = self.letterbox(rgb.shape[1], rgb.shape[0])
        new_w, new_h = letterbox.resized
        image = resize(rgb, new_w, new_h)
        if (new_w, new_h) != self.size:
            left, top = letterbox.pad_left, letterbox.pad_top
            canvas = np.full((self.size[1], self.size[0], 3), self.pad, np.uint8)
            canvas[top : top + new_h, left : left + new_w] = image
            image = canvas
        if self.order == "bgr":
            image = image[:, :, ::-1]
        if self.layout == "NCHW":
            image = image.transpose(2, 0, 1)
        if dtype == "uint8":
            return np.ascontiguousarray(image), letterbox
        out = image.astype(np.float32)
        if self.scale != 1.0:
            out *= np.float32(self.scale)
        if any(self.mean) or any(s != 1.0 for s in self.std):
            shape = (3, 1, 1) if self.layout == "NCHW" else (1, 1, 3)
            out -= np.asarray(self.mean, np.float32).reshape(shape)
            out /= np.asarray(self.std, np.float32).reshape(shape)
        return np.ascontiguousarray(out, dtype=np.dtype(dtype)), letterbox


def resize(rgb: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Resizes an image: area averaging when both sides shrink, bilinear otherwise.

    Averaging keeps small objects in a picture that is shrunk several times; bilinear would skip pixels.
    """
    if rgb.shape[1] == width and rgb.shape[0] == height:
        return rgb
    shrinks = width <= rgb.shape[1] and height <= rgb.shape[0]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return cast("NDArray[np.uint8]", cv2.resize(rgb, (width, height), interpolation=method))
