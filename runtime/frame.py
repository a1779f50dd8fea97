"""The frame: one picture with its identity, time and camera.

What a picture file means is decided here once, so that the command line, the API, ROS and the
benchmarks see the same pixels:

* EXIF orientation is applied; of an animation or a multi-picture file the first picture counts.
* 16-bit samples become 8-bit by ``round(v / 257)``, the exact map of 0..65535 onto 0..255; never
  clipped, never cut to the high byte.
* Transparency is composited on white, as the Qwen-VL preprocessing does. Dropping alpha instead
  would show whatever colour lies under transparent pixels, which editors and map tilers leave
  undefined.
* CMYK is converted without its profile; JPEG stores it inverted by Adobe's convention, which is
  undone.
* ICC profiles are ignored: the detectors and MLLMs were trained on unconverted pixels, and the
  video path, which has no profiles, must agree with the file path.
* 32-bit integer and floating-point pictures are refused: nothing in the file says which value is
  white.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from .errors import BadInput, HoverlensError

DIGEST_VERSION = b"hoverlens-frame-1"
"""Part of every digest. Raise it when the pixels of the same file change on purpose."""

MAX_PIXELS = 200_000_000
MAX_PIXELS_VARIABLE = "HOVERLENS_MAX_IMAGE_PIXELS"

FORMATS = ("JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")
"""Formats that are opened. Pillow knows more, among them EPS, which would start Ghostscript."""

_ORIENTATION = 0x0112
_BITS_PER_SAMPLE = 258


@dataclass(frozen=True)
class Intrinsics:
    """A pinhole camera, in pixels of the frame.

    Attributes:
        fx: Focal length along x, pixels.
        fy: Focal length along y, pixels.
        cx: Principal point, pixels.
        cy: Principal point, pixels.
        width: Width of the image that this calibration holds for, pixels.
        height: Its height, pixels.
        distortion: Plumb-bob coefficients ``k1 k2 p1 p2 k3``, or empty for a rectified image.

    Raises:
        ValueError: A value is not finite, or a focal length or side is not positive.
    """

    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int
    distortion: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "distortion", tuple(float(d) for d in self.distortion))
        numbers = (self.fx, self.fy, self.cx, self.cy, *self.distortion)
        if not all(math.isfinite(v) for v in numbers):
            raise ValueError(f"intrinsics have a value that is not finite: {numbers}")
        if min(self.fx, self.fy, self.width, self.height) <= 0:
            raise ValueError("focal lengths and image sides must be positive")


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture. Immutable; compare two frames by :attr:`digest`.

    Make one with :meth:`from_file`, :meth:`from_bytes` or :meth:`from_array`.

    Attributes:
        rgb: uint8, height x width x 3, RGB, C-contiguous, read-only. A 1 x 1 picture is a valid
            frame.
        stamp: Seconds at which the picture was taken, in the clock of its source, or None.
        frame_id: Name of the camera's coordinate frame, or None.
        intrinsics: The camera, or None.
        pose: Reserved for the camera's pose; None.
        source: Where it came from, for messages: a path, a masked URL, or None.
    """

    rgb: NDArray[np.uint8]
    stamp: float | None = None
    frame_id: str | None = None
    intrinsics: Intrinsics | None = None
    pose: None = None
    source: str | None = None

    def __post_init__(self) -> None:
        a = self.rgb
        if not isinstance(a, np.ndarray) or a.dtype != np.uint8 or a.ndim != 3 or a.shape[2] != 3:
            raise BadInput("a frame needs uint8 pixels of shape height x width x 3; use Frame.from_array")
        if not a.size:
            raise BadInput(f"the picture is {a.shape[1]} x {a.shape[0]} pixels; it needs at least one")
        if a.flags.writeable or not a.flags.c_contiguous:
            a = np.array(a, order="C", copy=True)
            a.flags.writeable = False
        # A view of a read-only array cannot be made writeable again.
        object.__setattr__(self, "rgb", a.view())
        if self.stamp is not None and not math.isfinite(self.stamp):
            raise BadInput(f"the stamp is {self.stamp}; finite seconds are needed")

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        max_pixels: int | None = None,
        stamp: float | None = None,
        frame_id: str | None = None,
        intrinsics: Intrinsics | None = None,
    ) -> Frame:
        """Reads a picture file.

        Args:
            path: A file of one of :data:`FORMATS`.
            max_pixels: Largest width x height; None takes ``$HOVERLENS_MAX_IMAGE_PIXELS`` or 200
                million. The header is checked before any pixel is decoded.

        Raises:
            BadInput: No such file, not a picture, damaged, too large, or unreadable.
        """
        name = printable_name(os.fspath(path))
        limit = _pixel_limit(max_pixels)
        with _errors_name_file(name):
            # Before opening: opening a pipe would wait for its writer.
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise BadInput(f"{name} is not a regular file; a picture file is needed")
            with open(path, "rb") as file:
                rgb = _decode(file, name, limit)
        return cls._own(rgb, stamp, frame_id, intrinsics, name)

    @classmethod
    def from_bytes(
        cls,
        data: bytes | bytearray | memoryview,
        name: str = "<bytes>",
        *,
        max_pixels: int | None = None,
        stamp: float | None = None,
        frame_id: str | None = None,
        intrinsics: Intrinsics | None = None,
    ) -> Frame:
        """Decodes the contents of a picture file; the pixels are those of :meth:`from_file`.

        Args:
            data: The whole file.
            name: What messages call it.

        Raises:
            BadInput: Not a picture, damaged, or too large.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise BadInput(f"found {type(data).__name__}; the bytes of a picture file are needed")
        name = printable_name(name)
        limit = _pixel_limit(max_pixels)
        with _errors_name_file(name):
            rgb = _decode(io.BytesIO(data), name, limit)
        return cls._own(rgb, stamp, frame_id, intrinsics, name)

    @classmethod
    def from_array(
        cls,
        array: NDArray[Any],
        order: str = "rgb",
        *,
        stamp: float | None = None,
        frame_id: str | None = None,
        intrinsics: Intrinsics | None = None,
        source: str | None = None,
    ) -> Frame:
        """Copies pixels, so that the caller may reuse the buffer.

        Args:
            array: uint8 or uint16 (scaled by ``round(v / 257)``), height x width, or height x width
                x C with C = 1 (grey), 3 or 4 (alpha last, composited on white). Any strides.
            order: ``"rgb"``, or ``"bgr"`` as OpenCV has it.

        Raises:
            BadInput: Another dtype, shape or order.
        """
        if order not in ("rgb", "bgr"):
            raise BadInput(f"unknown channel order {order!r}; use 'rgb' or 'bgr'")
        if not isinstance(array, np.ndarray):
            raise BadInput(f"found {type(array).__name__}; a numpy array is needed (np.asarray)")
        if array.dtype.kind != "u" or array.dtype.itemsize > 2:
            cure = "; scale to 0..255 and use .astype(np.uint8)" if array.dtype.kind in "fbi" else ""
            raise BadInput(f"found pixels of dtype {array.dtype}; uint8 or uint16 is needed{cure}")
        shape = "x".join(str(n) for n in array.shape)
        if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
            raise BadInput(
                f"found an array of shape {shape or '()'}; height x width, or height x width x 1, 3 or 4 is needed"
            )
        if not array.size:
            raise BadInput(f"found an array of shape {shape}, which has no pixels")
        rgb = _to_rgb(array, swap=order == "bgr")
        return cls._own(rgb, stamp, frame_id, intrinsics, source)

    @classmethod
    def _own(
        cls,
        rgb: NDArray[np.uint8],
        stamp: float | None,
        frame_id: str | None,
        intrinsics: Intrinsics | None,
        source: str | None,
    ) -> Frame:
        """Wraps an array that nobody else holds, without a copy."""
        rgb.flags.writeable = False
        return cls(rgb, stamp, frame_id, intrinsics, None, source)

    @cached_property
    def digest(self) -> str:
        """Identity of the pixels: 128-bit blake2b in hex.

        It covers a version tag, shape, dtype and pixels; the source, stamp and file format do not
        count. Computed on first use.
        """
        h = hashlib.blake2b(digest_size=16)
        h.update(DIGEST_VERSION + b"\0")
        h.update(f"{self.rgb.shape}{self.rgb.dtype.str}".encode() + b"\0")
        h.update(self.rgb.data)
        return h.hexdigest()

    @property
    def width(self) -> int:
        return int(self.rgb.shape[1])

    @property
    def height(self) -> int:
        return int(self.rgb.shape[0])

    @property
    def size(self) -> tuple[int, int]:
        """``(width, height)`` in pixels."""
        return self.width, self.height

    def to_dict(self) -> dict[str, Any]:
        """The ``frame`` part of the Answer JSON."""
        return {
            "digest": self.digest,
            "width": self.width,
            "height": self.height,
            "stamp": self.stamp,
        }

    def __repr__(self) -> str:
        return f"Frame({self.width}x{self.height}, digest={self.digest[:8]}, source={self.source!r})"


@contextmanager
def _errors_name_file(name: str) -> Iterator[None]:
    """Turns whatever a decoder throws into one line about the file."""
    try:
        yield
    except HoverlensError:
        raise
    except FileNotFoundError:
        raise BadInput(f"no such file: {name}") from None
    except IsADirectoryError:
        raise BadInput(f"{name} is a folder; a picture file is needed") from None
    except PermissionError:
        raise BadInput(f"no permission to read {name}; check its owner and mode (ls -l)") from None
    except MemoryError:
        raise HoverlensError(
            f"not enough memory to decode {name}; use a smaller picture, or lower {MAX_PIXELS_VARIABLE}"
        ) from None
    except Image.DecompressionBombError:
        # Pillow's WebP and GIF readers keep its own, fixed limit whatever ours is.
        raise BadInput(f"{name} is larger than its format is decoded here; convert it to PNG or JPEG") from None
    except Exception as e:  # decoders raise nearly anything on damaged files
        if isinstance(e, OSError) and e.errno is not None:
            raise BadInput(f"cannot read {name}: {e.strerror or e}") from None
        why = " ".join(str(e).split()) or type(e).__name__
        raise BadInput(
            f"{name} cannot be decoded: it is damaged, cut short or of an unsupported kind ({why})"
        ) from None


def _decode(file: IO[bytes], name: str, limit: int) -> NDArray[np.uint8]:
    head = file.read(32)
    if not head:
        raise BadInput(f"{name} has 0 bytes; a picture file is needed")
    file.seek(0)
    image = _open(file, head, name)
    with image:
        w, h = image.size
        if w * h > limit:
            raise BadInput(
                f"{name} claims {w} x {h} pixels, over the limit of {limit / 1e6:g} megapixels; "
                f"set {MAX_PIXELS_VARIABLE} if it is meant"
            )
        deep = _has_16_bit_colour(image)
        image.load()
        # Pillow and OpenCV both turn a TIFF upright by themselves; Pillow then drops the tag.
        orientation = 1 if image.format == "TIFF" else _orientation(image)
        rgb = _decode_16_bit_colour(file) if deep else _pixels(image, name)
        return _oriented(rgb, orientation)


def _open(file: IO[bytes], head: bytes, name: str) -> ImageFile.ImageFile:
    """Opens by signature without ``Image.open``.

    Its size check depends on the process-wide ``Image.MAX_IMAGE_PIXELS``, which belongs to the
    caller of this library; ours comes before any pixel is decoded.
    """
    Image.init()
    for kind in FORMATS:
        if kind not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[kind]
        if accept is not None and accept(head) is True:
            file.seek(0)
            try:
                return factory(file, "")
            except SyntaxError as e:
                # Pillow's word for a bad header; without a text it would read "None".
                why = " ".join(str(e).split())
                raise BadInput(
                    f"{name} has a {kind} header that is damaged or of an unsupported kind ({why})"
                ) from None
    raise BadInput(
        f"{name} is not a picture that can be read: it starts with {head[:8]!r}; use one of {', '.join(FORMATS)}"
    )


def _has_16_bit_colour(image: ImageFile.ImageFile) -> bool:
    """Whether Pillow would cut 16-bit colour to the high byte instead of scaling it."""
    if image.format == "PNG":
        return len(image.tile) == 1 and ";16" in str(image.tile[0][3]) and image.mode != "I;16"
    if image.format == "TIFF":
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, ())
        return len(bits) >= 3 and max(bits) == 16
    return False


def _decode_16_bit_colour(file: IO[bytes]) -> NDArray[np.uint8]:
    import cv2  # only here: most programs never meet such a file

    file.seek(0)
    array = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    if array is None:
        raise ValueError("OpenCV cannot decode its 16-bit samples")
    return _to_rgb(array, swap=True)


def _pixels(image: Image.Image, name: str) -> NDArray[np.uint8]:
    """8-bit RGB of a loaded image, before orientation."""
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        grey = np.asarray(image).astype(np.uint16)
        rgb = _to_rgb(grey, swap=False)
        transparent = image.info.get("transparency")
        if isinstance(transparent, int):
            rgb[grey == transparent] = 255
        return rgb
    if mode in ("I", "F"):
        raise BadInput(
            f"{name} has {'32-bit integer' if mode == 'I' else 'floating-point'} pixels, "
            "whose white is not known; convert it to 8 or 16 bits first"
        )
    if image.has_transparency_data:
        return _to_rgb(np.asarray(image.convert("RGBA")), swap=False)
    return np.array(image if mode == "RGB" else image.convert("RGB"))


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block does not spoil the pixels
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _oriented(rgb: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undoes an EXIF orientation, the numbers of the EXIF standard (1 = upright)."""
    if orientation >= 5:
        rgb = rgb.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        rgb = rgb[:, ::-1]
    if orientation in (3, 4, 7, 8):
        rgb = rgb[::-1]
    return np.ascontiguousarray(rgb)


def _to_rgb(array: NDArray[Any], swap: bool) -> NDArray[np.uint8]:
    """A fresh 8-bit RGB array of 8- or 16-bit grey, colour or colour + alpha; ``swap`` for BGR."""
    if array.ndim == 2:
        array = array[..., None]
    h, w, channels = array.shape
    out = np.empty((h, w, 3), np.uint8)
    colour = slice(None, 1) if channels == 1 else slice(2, None, -1) if swap else slice(None, 3)
    step = max(1, (1 << 20) // w)  # in bands, so that the wide intermediates stay small
    for y in range(0, h, step):
        band = array[y : y + step]
        if band.dtype.itemsize == 2:
            band = ((band.astype(np.uint32) + 128) // 257).astype(np.uint8)
        rgb = band[..., colour]
        if channels == 4:
            alpha = band[..., 3:].astype(np.uint16)
            rgb = ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
        out[y : y + step] = rgb
    return out


def _pixel_limit(given: int | None) -> int:
    text = os.environ.get(MAX_PIXELS_VARIABLE) if given is None else str(given)
    if not text:
        return MAX_PIXELS
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if limit < 1:
        what = MAX_PIXELS_VARIABLE if given is None else "max_pixels"
        raise BadInput(f"{what} is {text!r}; a positive number of pixels is needed")
    return limit


def printable_name(name: str | bytes | Path) -> str:
    """A name that stays on one line, whatever characters are in it."""
    text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
