"""A frame shows the right pixels for every kind of picture file, and says what is wrong with the rest."""

from __future__ import annotations

import io
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.frame import Frame, Intrinsics

# Pillow warns about some damaged files before it refuses or repairs them.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

Pixels = NDArray[Any]

RNG = np.random.default_rng(7)
RGB8: Pixels = RNG.integers(0, 256, (5, 7, 3), np.uint8)
RGB16: Pixels = RNG.integers(0, 65536, (5, 7, 3), np.uint16)
GREY8: Pixels = np.arange(35, dtype=np.uint8).reshape(5, 7) * 7
GREY16: Pixels = np.linspace(0, 65535, 35).astype(np.uint16).reshape(5, 7)
ALPHA8: Pixels = RNG.integers(0, 256, (5, 7, 1), np.uint8)
CORNERS: Pixels = np.zeros((32, 48, 3), np.uint8)
CORNERS[:16, :16] = (255, 0, 0)
CORNERS[:16, 32:] = (0, 255, 0)
CORNERS[16:, :16] = (0, 0, 255)
CORNERS[16:, 32:] = (255, 255, 255)


def grey(a: Pixels) -> Pixels:
    return np.repeat(a[..., None], 3, axis=2)


def from_16(a: Pixels) -> Pixels:
    return np.round(a / 257.0).astype(np.uint8)


def on_white(colour: Pixels, alpha: Pixels) -> Pixels:
    a = alpha / 255.0
    return np.floor(colour * a + 255 * (1 - a) + 0.5).astype(np.uint8)


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(array: Pixels, colour_type: int, chunks: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """A PNG written here, since Pillow writes no 16-bit colour."""
    h, w = array.shape[:2]
    depth = array.dtype.itemsize * 8

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + r.astype(r.dtype.newbyteorder(">")).tobytes() for r in array)
    header = struct.pack(">IIBBBBB", w, h, depth, colour_type, 0, 0, 0)
    extra = b"".join(chunk(*c) for c in chunks)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def tiff(array: Pixels, orientation: int = 1, big_endian: bool = False) -> bytes:
    """An uncompressed TIFF written here, since Pillow writes no 16-bit colour."""
    e = ">" if big_endian else "<"
    h, w = array.shape[:2]
    channels = 1 if array.ndim == 2 else array.shape[2]
    data = array.astype(array.dtype.newbyteorder(e)).tobytes()  # type: ignore[arg-type]
    bits = array.dtype.itemsize * 8
    kind = {"u": 1, "i": 2, "f": 3}[array.dtype.kind]
    lists_at = 8 + len(data) + 2 + 12 * 11 + 4

    def short(tag: int, value: int) -> bytes:
        return struct.pack(e + "HHIHH", tag, 3, 1, value, 0)

    def long(tag: int, value: int) -> bytes:
        return struct.pack(e + "HHII", tag, 4, 1, value)

    def shorts(tag: int, value: int, at: int) -> bytes:
        return short(tag, value) if channels == 1 else struct.pack(e + "HHII", tag, 3, channels, at)

    tags = [
        long(256, w),
        long(257, h),
        shorts(258, bits, lists_at),
        short(259, 1),
        short(262, 1 if channels == 1 else 2),
        long(273, 8),
        short(274, orientation),
        short(277, channels),
        long(278, h),
        long(279, len(data)),
        shorts(339, kind, lists_at + 2 * channels),
    ]
    lists = struct.pack(f"{e}{channels}H", *[bits] * channels)
    lists += struct.pack(f"{e}{channels}H", *[kind] * channels)
    head = (b"MM\0*" if big_endian else b"II*\0") + struct.pack(e + "I", 8 + len(data))
    directory = struct.pack(e + "H", len(tags)) + b"".join(tags) + b"\0\0\0\0"
    return head + data + directory + lists


def oriented(array: Pixels, orientation: int) -> Pixels:
    """The stored array whose upright view is ``array``, written out case by case."""
    stored: dict[int, Callable[[Pixels], Pixels]] = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: np.transpose(a, (1, 0, 2)),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(np.transpose(a, (1, 0, 2)), 2),
        8: lambda a: np.rot90(a, -1),
    }
    return np.ascontiguousarray(stored[orientation](array))


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def palette_image(transparent: bool) -> bytes:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    return save(image, "PNG", **({"transparency": bytes([255, 128, 0])} if transparent else {}))


def two_frames(kind: str) -> bytes:
    first, second = Image.new("RGB", (4, 3), (255, 0, 0)), Image.new("RGB", (4, 3), (0, 0, 255))
    return save(first, kind, save_all=True, append_images=[second])


BIT = Image.fromarray(np.array([[0, 255, 0, 255, 255]], np.uint8)).convert("1")
RED43 = np.full((3, 4, 3), (255, 0, 0), np.uint8)

EXACT: dict[str, tuple[bytes, Pixels]] = {
    "png rgb": (save(Image.fromarray(RGB8), "PNG"), RGB8),
    "bmp": (save(Image.fromarray(RGB8), "BMP"), RGB8),
    "tiff rgb": (save(Image.fromarray(RGB8), "TIFF"), RGB8),
    "tiff lzw": (save(Image.fromarray(RGB8), "TIFF", compression="tiff_lzw"), RGB8),
    "ppm": (save(Image.fromarray(RGB8), "PPM"), RGB8),
    "webp lossless": (save(Image.fromarray(RGB8), "WEBP", lossless=True), RGB8),
    "jpeg 2000 lossless": (save(Image.fromarray(RGB8), "JPEG2000"), RGB8),
    "png grey": (save(Image.fromarray(GREY8), "PNG"), grey(GREY8)),
    "png 1-bit": (
        save(BIT, "PNG"),
        grey(np.array([[0, 255, 0, 255, 255]], np.uint8)),
    ),
    "png grey 16-bit": (png(GREY16, 0), grey(from_16(GREY16))),
    "tiff grey 16-bit": (tiff(GREY16), grey(from_16(GREY16))),
    "tiff grey 16-bit big-endian": (tiff(GREY16, big_endian=True), grey(from_16(GREY16))),
    "pgm 16-bit": (
        b"P5 7 5 65535\n" + GREY16.astype(">u2").tobytes(),
        grey(from_16(GREY16)),
    ),
    "ppm 16-bit": (b"P6 7 5 65535\n" + RGB16.astype(">u2").tobytes(), from_16(RGB16)),
    "png rgb 16-bit": (png(RGB16, 2), from_16(RGB16)),
    "tiff rgb 16-bit": (tiff(RGB16), from_16(RGB16)),
    "tiff rgb 16-bit big-endian": (tiff(RGB16, big_endian=True), from_16(RGB16)),
    "png rgba": (png(np.dstack([RGB8, ALPHA8]), 6), on_white(RGB8, ALPHA8)),
    "png rgba 16-bit": (
        png(np.dstack([RGB16, ALPHA8.astype(np.uint16) * 257]), 6),
        on_white(from_16(RGB16), ALPHA8),
    ),
    "png grey + alpha": (
        png(np.dstack([GREY8, ALPHA8]), 4),
        on_white(grey(GREY8), ALPHA8),
    ),
    "png grey + alpha 16-bit": (
        png(np.dstack([GREY16, ALPHA8.astype(np.uint16) * 257]), 4),
        on_white(grey(from_16(GREY16)), ALPHA8),
    ),
    "png transparent colour": (
        png(np.array([[[9, 8, 7], [1, 2, 3]]], np.uint8), 2, ((b"tRNS", b"\0\x09\0\x08\0\x07"),)),
        np.array([[[255, 255, 255], [1, 2, 3]]], np.uint8),
    ),
    "png transparent colour 16-bit": (
        png(RGB16[:1, :1].repeat(2, 1), 2, ((b"tRNS", RGB16[0, 0].astype(">u2").tobytes()),)),
        np.full((1, 2, 3), 255, np.uint8),
    ),
    "png transparent grey 16-bit": (
        png(np.array([[2570, 514]], np.uint16), 0, ((b"tRNS", struct.pack(">H", 2570)),)),
        grey(np.array([[255, 2]], np.uint8)),
    ),
    "png palette": (
        palette_image(False),
        np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8),
    ),
    "png palette with transparency": (
        palette_image(True),
        np.array([[[255, 0, 0], [127, 255, 127], [255, 255, 255]]], np.uint8),
    ),
    "gif, first picture": (two_frames("GIF"), RED43),
    "apng, first picture": (two_frames("PNG"), RED43),
    "multi-page tiff, first picture": (two_frames("TIFF"), RED43),
    "webp animation, first picture": (
        save(
            Image.new("RGB", (4, 3), (255, 0, 0)),
            "WEBP",
            save_all=True,
            append_images=[Image.new("RGB", (4, 3), (0, 0, 255))],
            lossless=True,
        ),
        RED43,
    ),
    "tiff cmyk": (
        save(Image.fromarray(np.array([[[0, 255, 255, 0], [0, 0, 0, 255]]], np.uint8), "CMYK"), "TIFF"),
        np.array([[[255, 0, 0], [0, 0, 0]]], np.uint8),
    ),
    "one pixel": (png(np.array([[[1, 2, 3]]], np.uint8), 2), np.array([[[1, 2, 3]]], np.uint8)),
    "one column": (png(RGB8[:, :1], 2), RGB8[:, :1]),
    "one row": (png(RGB8[:1], 2), RGB8[:1]),
}


class TestPixels:
    @pytest.mark.parametrize("kind", EXACT)
    def test_lossless_kinds_are_exact(self, kind: str, tmp_path: Path) -> None:
        data, expected = EXACT[kind]
        frame = Frame.from_bytes(data)
        np.testing.assert_array_equal(frame.rgb, expected)
        path = tmp_path / "picture.dat"
        path.write_bytes(data)
        again = Frame.from_file(path)
        assert again.digest == frame.digest
        assert again.source == str(path)
        assert frame.size == (expected.shape[1], expected.shape[0])

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
    def test_exif_orientation_is_applied(self, orientation: int, kind: str) -> None:
        stored = Image.fromarray(oriented(RGB8, orientation))
        options = {"lossless": True} if kind == "WEBP" else {}
        data = save(stored, kind, exif=exif(orientation), **options)
        np.testing.assert_array_equal(Frame.from_bytes(data).rgb, RGB8)

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_orientation_of_16_bit_colour_is_applied(self, orientation: int) -> None:
        stored = oriented(RGB16, orientation)
        expected = from_16(RGB16)
        chunk = (b"eXIf", exif(orientation).tobytes().removeprefix(b"Exif\0\0"))
        np.testing.assert_array_equal(Frame.from_bytes(png(stored, 2, (chunk,))).rgb, expected)
        np.testing.assert_array_equal(Frame.from_bytes(tiff(stored, orientation)).rgb, expected)

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("progressive", [False, True])
    def test_exif_orientation_of_jpeg(self, orientation: int, progressive: bool) -> None:
        stored = Image.fromarray(oriented(CORNERS, orientation))
        data = save(
            stored,
            "JPEG",
            quality=100,
            subsampling=0,
            exif=exif(orientation),
            progressive=progressive,
        )
        rgb = Frame.from_bytes(data).rgb
        assert rgb.shape == CORNERS.shape
        assert np.abs(rgb.astype(int) - CORNERS).max() <= 12

    def test_broken_exif_leaves_the_picture_as_stored(self) -> None:
        data = png(RGB8, 2, ((b"eXIf", b"II*\0\xff\xff\xff\xff junk"),))
        np.testing.assert_array_equal(Frame.from_bytes(data).rgb, RGB8)

    @pytest.mark.parametrize("value", [0, 9, 77])
    def test_unknown_orientation_leaves_the_picture_as_stored(self, value: int) -> None:
        data = save(Image.fromarray(RGB8), "PNG", exif=exif(value))
        np.testing.assert_array_equal(Frame.from_bytes(data).rgb, RGB8)

    @pytest.mark.parametrize("progressive", [False, True])
    def test_jpeg_has_every_pixel(self, progressive: bool) -> None:
        smooth = np.add.outer(np.arange(61), np.arange(83))[..., None] + np.array([0, 40, 80])
        expected = smooth.astype(np.uint8)
        data = save(Image.fromarray(expected), "JPEG", quality=95, progressive=progressive)
        rgb = Frame.from_bytes(data).rgb
        assert rgb.shape == (61, 83, 3)
        assert np.abs(rgb.astype(int) - expected).max() <= 6

    @pytest.mark.parametrize("transform", ["cmyk", "ycck"])
    def test_adobe_jpeg_has_the_right_colours(self, transform: str) -> None:
        # Ink: red = magenta + yellow, then cyan, black and paper.
        inks = [(0, 255, 255, 0), (255, 0, 0, 0), (0, 0, 0, 255), (0, 0, 0, 0)]
        cmyk = np.repeat(np.repeat(np.array([inks], np.uint8), 16, 0), 16, 1)
        if transform == "cmyk":
            data = save(Image.fromarray(cmyk, "CMYK"), "JPEG", quality=100)
            assert b"Adobe" in data
        else:
            data = ycck_jpeg(cmyk)
        rgb = Frame.from_bytes(data).rgb[8, 8::16].astype(int)
        expected = np.array([(255, 0, 0), (0, 255, 255), (0, 0, 0), (255, 255, 255)])
        assert np.abs(rgb - expected).max() <= 6

    def test_icc_profiles_are_ignored(self) -> None:
        from PIL import ImageCms

        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
        data = save(Image.fromarray(RGB8), "PNG", icc_profile=profile)
        np.testing.assert_array_equal(Frame.from_bytes(data).rgb, RGB8)

    def test_drone_photo_is_read_upright(self, shared_data: Path) -> None:
        path = shared_data / "images" / "brighton" / "DJI_0020.JPG"
        frame = Frame.from_file(path)
        assert frame.size == (4000, 2250)
        with Image.open(path) as image:
            np.testing.assert_array_equal(frame.rgb, np.asarray(image.convert("RGB")))


def ycck_jpeg(cmyk: Pixels) -> bytes:
    """Adobe's YCCK: inverted CMYK, of which R = 255 - C and so on are stored as YCbCr; flag 2.

    Two inversions cancel: the inks themselves go through RGB to YCbCr. Pillow cannot write it, but
    stores four raw channels as CMYK, so only the flag has to change.
    """
    ycc = Image.fromarray(cmyk[..., :3], "RGB").convert("YCbCr")
    stored = np.dstack([np.asarray(ycc), 255 - cmyk[..., 3]])
    # Pillow inverts on writing, so the raw samples go in inverted.
    data = bytearray(save(Image.fromarray(255 - stored, "CMYK"), "JPEG", quality=100))
    at = data.index(b"Adobe")
    assert data[at + 11] == 0
    data[at + 11] = 2
    return bytes(data)


class TestBadFiles:
    def refuse(self, path: Path, *needed: str, error: type[HoverlensError] = BadInput) -> str:
        with pytest.raises(error) as caught:
            Frame.from_file(path)
        message = str(caught.value)
        assert "\n" not in message
        assert path.name in message
        for text in needed:
            assert text in message
        return message

    def test_missing(self, tmp_path: Path) -> None:
        self.refuse(tmp_path / "nothing.jpg", "no such file")

    def test_folder(self, tmp_path: Path) -> None:
        self.refuse(tmp_path, "is a folder")

    def test_empty(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.jpg"
        path.touch()
        self.refuse(path, "0 bytes")

    def test_text_named_jpg(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.jpg"
        path.write_text("hello, this is no picture\n")
        self.refuse(path, "is not a picture", "hello")

    @pytest.mark.parametrize("name", ["a\nb.jpg", "a\x1b[31mb.jpg"])
    def test_odd_names_stay_on_one_line(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(BadInput) as caught:
            Frame.from_file(tmp_path / name)
        assert str(caught.value).isprintable()

    def test_null_byte_in_the_path(self) -> None:
        with pytest.raises(BadInput, match="null"):
            Frame.from_file("a\0b.jpg")

    def test_pipe(self, tmp_path: Path) -> None:
        path = tmp_path / "pipe.jpg"
        os.mkfifo(path)
        self.refuse(path, "not a regular file")

    def test_no_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "secret.png"
        path.write_bytes(EXACT["png rgb"][0])
        path.chmod(0)
        if os.access(path, os.R_OK):  # root reads everything

            def refuse(*_: object) -> None:
                raise PermissionError(13, "Permission denied")

            monkeypatch.setattr("builtins.open", refuse)
        self.refuse(path, "no permission", "ls -l")

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "progressive", "TIFF", "WEBP", "BMP", "JPEG2000"])
    @pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
    def test_cut_short(self, kind: str, part: float, tmp_path: Path) -> None:
        noise = Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8))
        whole = save(noise, "JPEG", progressive=True) if kind == "progressive" else save(noise, kind)
        path = tmp_path / f"cut.{kind}"
        path.write_bytes(whole[: int(len(whole) * part)])
        self.refuse(path)

    def test_corrupt_png(self, tmp_path: Path) -> None:
        data = bytearray(EXACT["png rgb"][0])
        data[60] ^= 0xFF
        path = tmp_path / "corrupt.png"
        path.write_bytes(data)
        self.refuse(path, "damaged")

    def test_corrupt_16_bit_png(self, tmp_path: Path) -> None:
        data = bytearray(EXACT["png rgb 16-bit"][0])
        data[60] ^= 0xFF
        path = tmp_path / "corrupt16.png"
        path.write_bytes(data)
        self.refuse(path, "damaged")

    @pytest.mark.parametrize("array", [np.zeros((2, 2), np.float32), np.zeros((2, 2), np.int32)])
    def test_pixels_without_a_known_white(self, array: Pixels, tmp_path: Path) -> None:
        path = tmp_path / "depth.tif"
        Image.fromarray(array).save(path)
        self.refuse(path, "white is not known", "convert it")

    @given(st.binary(max_size=200), st.sampled_from(["PNG", "JPEG", "TIFF", "GIF", "WEBP", "AVIF"]))
    def test_rubbish_behind_a_signature_is_one_line(self, tail: bytes, kind: str) -> None:
        head = {
            "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR",
            "JPEG": b"\xff\xd8\xff\xe0",
            "TIFF": b"II*\0\x08\0\0\0",
            "GIF": b"GIF89a",
            "WEBP": b"RIFF\0\0\0\0WEBPVP8 ",
            "AVIF": b"\0\0\0\x20ftypavif",
        }[kind]
        message = ""
        try:
            Frame.from_bytes(head + tail, max_pixels=1_000_000)
        except HoverlensError as e:
            message = str(e)
        assert "\n" not in message


class TestSizeLimit:
    @staticmethod
    def bomb(kind: str) -> bytes:
        side = 60_000
        if kind == "png":
            row = zlib.compress(b"\0" * 10_000)
            header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

            def chunk(name: bytes, data: bytes) -> bytes:
                crc = struct.pack(">I", zlib.crc32(name + data))
                return struct.pack(">I", len(data)) + name + data + crc

            return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", row)
        data = bytearray(save(Image.new("RGB", (16, 16)), "JPEG"))
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", side, side)
        return bytes(data)

    @pytest.mark.parametrize("kind", ["png", "jpeg"])
    def test_bomb_is_refused_before_any_pixel_is_decoded(self, kind: str, tmp_path: Path) -> None:
        import tracemalloc

        path = tmp_path / f"bomb.{kind}"
        path.write_bytes(self.bomb(kind))
        tracemalloc.start()
        try:
            with pytest.raises(BadInput, match=r"60000 x 60000 .* 200 megapixels"):
                Frame.from_file(path)
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()

    def test_webp_canvas_is_refused_before_it_is_allocated(self) -> None:
        pages = [Image.new("RGB", (16, 16), (n, n, n)) for n in (1, 9)]
        data = bytearray(save(pages[0], "WEBP", save_all=True, append_images=pages[1:]))
        assert data[12:16] == b"VP8X"
        data[24:30] = (16382).to_bytes(3, "little") * 2
        with pytest.raises(BadInput, match=r"larger than|megapixels"):
            Frame.from_bytes(bytes(data))

    def test_limit_by_argument_and_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = EXACT["png rgb"][0]
        assert Frame.from_bytes(data, max_pixels=35).size == (7, 5)
        with pytest.raises(BadInput, match="HOVERLENS_MAX_IMAGE_PIXELS"):
            Frame.from_bytes(data, max_pixels=34)
        monkeypatch.setenv("HOVERLENS_MAX_IMAGE_PIXELS", "34")
        with pytest.raises(BadInput, match="7 x 5"):
            Frame.from_bytes(data)
        monkeypatch.setenv("HOVERLENS_MAX_IMAGE_PIXELS", "many")
        with pytest.raises(BadInput, match="'many'"):
            Frame.from_bytes(data)

    def test_pillow_s_own_limit_is_neither_used_nor_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3)
        assert Frame.from_bytes(EXACT["png rgb"][0]).size == (7, 5)
        assert Image.MAX_IMAGE_PIXELS == 3


class TestArrays:
    def test_orders(self) -> None:
        np.testing.assert_array_equal(Frame.from_array(RGB8).rgb, RGB8)
        bgr = cv2.cvtColor(RGB8, cv2.COLOR_RGB2BGR)
        np.testing.assert_array_equal(Frame.from_array(bgr, "bgr").rgb, RGB8)
        with_alpha = np.dstack([bgr, ALPHA8])
        expected = on_white(RGB8, ALPHA8)
        np.testing.assert_array_equal(Frame.from_array(with_alpha, "bgr").rgb, expected)

    @pytest.mark.parametrize(
        ("array", "expected"),
        [
            (GREY8, grey(GREY8)),
            (GREY8[..., None], grey(GREY8)),
            (GREY16, grey(from_16(GREY16))),
            (RGB16, from_16(RGB16)),
            (RGB16.astype(">u2"), from_16(RGB16)),
            (RGB8[::-1, ::2], RGB8[::-1, ::2]),
            (np.asfortranarray(RGB8), RGB8),
            (np.broadcast_to(RGB8[:1], (3, 7, 3)), RGB8[[0, 0, 0]]),
        ],
    )
    def test_shapes_and_dtypes(self, array: Pixels, expected: Pixels) -> None:
        rgb = Frame.from_array(array).rgb
        np.testing.assert_array_equal(rgb, expected)
        assert rgb.flags.c_contiguous

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            (RGB8 / 255.0, "float64; uint8 or uint16 is needed; scale to 0..255"),
            (RGB8.astype(np.int64), "int64"),
            (RGB8 > 5, "bool"),
            (RGB8.astype(np.uint32), "uint32"),
            (RGB8.transpose(2, 0, 1), "3x5x7"),
            (RGB8[..., :2], "5x7x2"),
            (RGB8[None], "1x5x7x3"),
            (np.uint8(5)[None], "shape 1;"),
            (np.array(3, np.uint8), "shape ()"),
            (RGB8[:0], "no pixels"),
            (RGB8.tolist(), "list"),
        ],
    )
    def test_refused(self, array: Any, message: str) -> None:
        with pytest.raises(BadInput) as caught:
            Frame.from_array(array)
        assert message in str(caught.value)

    def test_unknown_order(self) -> None:
        with pytest.raises(BadInput, match="'gbr'"):
            Frame.from_array(RGB8, "gbr")

    @given(hnp.arrays(np.uint16, hnp.array_shapes(min_dims=2, max_dims=2, max_side=20)))
    def test_16_bit_scaling_is_exact(self, array: Pixels) -> None:
        np.testing.assert_array_equal(Frame.from_array(array).rgb, grey(from_16(array)))

    def test_every_8_bit_value_survives_16_bits(self) -> None:
        values = np.arange(256, dtype=np.uint16)[None]
        np.testing.assert_array_equal(Frame.from_array(values * 257).rgb[0, :, 0], values[0])

    def test_every_blend_with_white_is_the_nearest_value(self) -> None:
        c, a = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
        blended = Frame.from_array(np.dstack([c, c, c, a])).rgb[..., 0]
        exact = c * (a / 255.0) + 255 * (1 - a / 255.0)
        assert np.abs(blended - exact).max() <= 0.5 + 1e-9

    def test_a_band_of_a_tall_picture_is_converted_like_the_rest(self) -> None:
        tall = RNG.integers(0, 65536, (3000, 1000), np.uint16)
        np.testing.assert_array_equal(Frame.from_array(tall).rgb, grey(from_16(tall)))


class TestIdentity:
    def test_the_digest_of_known_pixels_is_frozen(self) -> None:
        """Caches and traces outlive a release: this changes only together with DIGEST_VERSION."""
        pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
        assert Frame.from_array(pixels).digest == "d01511436cf4c827fed34273f73b844a"

    def test_digest_depends_on_pixels_and_shape_only(self) -> None:
        one = Frame.from_array(RGB8, stamp=1.0, frame_id="cam", source="a")
        assert one.digest == Frame.from_array(RGB8, stamp=2.0).digest
        assert one.digest != Frame.from_array(RGB8.reshape(7, 5, 3)).digest
        changed = RGB8.copy()
        changed[-1, -1, -1] ^= 1
        assert one.digest != Frame.from_array(changed).digest

    def test_later_changes_of_the_buffer_do_not_reach_the_frame(self) -> None:
        buffer = RGB8.copy()
        frame = Frame.from_array(buffer)
        direct = Frame(buffer)
        buffer[:] = 0
        np.testing.assert_array_equal(frame.rgb, RGB8)
        np.testing.assert_array_equal(direct.rgb, RGB8)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Frame.from_array(RGB8),
            lambda: Frame.from_bytes(EXACT["png rgb"][0]),
            lambda: Frame(RGB8),
        ],
    )
    def test_pixels_are_read_only(self, make: Callable[[], Frame]) -> None:
        frame = make()
        with pytest.raises(ValueError, match="read-only"):
            frame.rgb[0, 0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            frame.rgb.setflags(write=True)

    def test_fields(self) -> None:
        camera = Intrinsics(500, 501, 320, 240, 640, 480, (0.1, 0, 0, 0, 0))
        frame = Frame.from_array(RGB8, stamp=12.5, frame_id="front", intrinsics=camera)
        assert (frame.width, frame.height, frame.size) == (7, 5, (7, 5))
        assert frame.to_dict() == {
            "digest": frame.digest,
            "width": 7,
            "height": 5,
            "stamp": 12.5,
        }
        assert frame.intrinsics is camera
        assert frame.pose is None
        assert len(frame.digest) == 32

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(BadInput, match="stamp"):
            Frame.from_array(RGB8, stamp=float("nan"))
        with pytest.raises(BadInput, match="from_array"):
            Frame(GREY8)
        with pytest.raises(BadInput, match="list"):
            Frame.from_bytes([1, 2])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="positive"):
            Intrinsics(0, 1, 0, 0, 5, 5)
        with pytest.raises(ValueError, match="finite"):
            Intrinsics(1, 1, float("inf"), 0, 5, 5)

    def test_many_threads_decode_the_same_pixels(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        path.write_bytes(EXACT["png rgba 16-bit"][0])
        digests: list[str] = []

        def work() -> None:
            digests.extend(Frame.from_file(path).digest for _ in range(20))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(digests) == 80
        assert len(set(digests)) == 1
