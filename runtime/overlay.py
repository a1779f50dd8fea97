"""The picture that a person looks at: the photo with boxes, a depth inset, the question and the answer."""

from __future__ import annotations

import colorsys
import io
import math
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from .boxes import Boxes, Space
from .errors import BadInput
from .files import atomic_write_bytes, check_writable
from .frame import Frame

if TYPE_CHECKING:
    from .answer import Answer
    from .perception.depth import DepthMap

Colour = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]
"""Pixels ``x1 y1 x2 y2`` of the canvas, x2 and y2 excluded."""

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
}

_ANSWER: Colour = (255, 0, 200)
_BAR: Colour = (22, 24, 28)
_TEXT: Colour = (240, 240, 240)
_FAINT: Colour = (165, 170, 178)
_NEUTRAL: Colour = (0, 200, 255)
_SMALLEST_CANVAS = 320
_CAPTION_LINES = 6
_CAPTION_CHARS = 2000


def draw_overlay(
    frame: Frame | NDArray[np.uint8],
    boxes: Boxes | None = None,
    depth: DepthMap | NDArray[Any] | None = None,
    answer: Answer | None = None,
    question: str | None = None,
) -> NDArray[np.uint8]:
    """Draws what was seen and said.

    The photo keeps its size (a small one grows by a whole factor, so that text is legible), and the caption
    stands below it, so that it hides nothing.

    Args:
        frame: The picture, or its uint8 RGB pixels, height x width x 3.
        boxes: Detections on the original frame, or on a crop that knows its region.
        depth: Depth of the whole frame, H x W of any size, LARGER = FARTHER, drawn near red and far blue;
            unknown where not finite.
        answer: Its box is marked in magenta, its text stands in the caption.
        question: Stands in the caption.

    Returns:
        uint8 RGB, height x width x 3, at least as large as the frame.

    Raises:
        ValueError: The boxes belong to a picture of another size, or the depth is not a map.
    """
    photo = frame if isinstance(frame, Frame) else Frame.from_array(frame)
    if boxes is not None:
        boxes = boxes.to_original()
        if boxes.size != photo.size:
            raise ValueError(f"the boxes belong to a picture of {boxes.size}, the frame is {photo.size}")
    grow = max(1, _SMALLEST_CANVAS // max(photo.size))
    image = Image.fromarray(photo.rgb)
    if grow > 1:
        image = image.resize((photo.width * grow, photo.height * grow), Image.Resampling.NEAREST)
    if min(image.size) < _SMALLEST_CANVAS // 2 or image.width < _SMALLEST_CANVAS:
        canvas = Image.new("RGB", (max(image.width, _SMALLEST_CANVAS), max(image.height, _SMALLEST_CANVAS // 2)), _BAR)
        canvas.paste(image, (0, 0))
    else:
        canvas = image.copy()
    text_size = max(12, round(0.022 * math.sqrt(canvas.width * min(canvas.height, canvas.width))))
    draw = ImageDraw.Draw(canvas)
    taken: list[Rectangle] = []
    shown = [] if boxes is None else _rectangles(boxes, photo.size, grow)
    if depth is not None:
        taken.append(_draw_depth(canvas, depth, [r for _, r in shown], text_size))
    if boxes is not None:
        _draw_boxes(draw, canvas.size, boxes, shown, text_size, taken)
    if answer is not None and answer.box is not None:
        _draw_answer_box(draw, canvas.size, answer.box, photo.size, grow, text_size, taken)
    lines = _caption(answer, question, canvas.width, text_size)
    return np.array(_with_caption(canvas, lines, text_size))


def check_image_path(path: str | os.PathLike[str]) -> Path:
    """Checks, before any work, that :func:`save_image` could write there.

    Raises:
        BadInput: An extension that names no picture format, or a folder that is missing or not writable.
    """
    target = check_writable(path, "the picture")
    if target.suffix.lower() not in FORMATS:
        raise BadInput(
            f"cannot write the picture {target}: found the extension {target.suffix!r}; use one of {', '.join(FORMATS)}"
        )
    return target


def save_image(rgb: NDArray[np.uint8], path: str | os.PathLike[str]) -> None:
    """Writes a picture; the file appears whole or not at all.

    Args:
        rgb: uint8, height x width x 3.
        path: Its extension decides the format (:data:`FORMATS`).

    Raises:
        BadInput: See :func:`check_image_path`; or the format cannot hold a picture of this size.
    """
    target = check_image_path(path)
    kind = FORMATS[target.suffix.lower()]
    out = io.BytesIO()
    options: dict[str, Any] = {"quality": 92} if kind in ("JPEG", "WEBP") else {}
    try:
        Image.fromarray(np.ascontiguousarray(rgb)).save(out, kind, **options)
    except (OSError, ValueError) as e:
        h, w = rgb.shape[:2]
        raise BadInput(f"cannot write {w} x {h} pixels as {kind} ({e}); use .png") from None
    atomic_write_bytes(target, out.getvalue())


def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(max(8.0, size))


def _text_box(text: str, font: Any) -> tuple[int, int]:
    """Width and line height in pixels; the height is the same for every text."""
    ascent, descent = font.getmetrics() if hasattr(font, "getmetrics") else (10, 3)
    return math.ceil(font.getlength(text)), ascent + descent


def _class_colour(index: int) -> Colour:
    # Steps of the golden ratio keep neighbouring classes apart, however many there are.
    hue = (0.58 + index * 0.618033988749895) % 1.0
    r, g, b = colorsys.hsv_to_rgb(hue, 0.85 if index % 2 == 0 else 0.6, 1.0)
    return round(r * 255), round(g * 255), round(b * 255)


def _contrast(colour: Colour) -> Colour:
    r, g, b = colour
    return (0, 0, 0) if 0.299 * r + 0.587 * g + 0.114 * b > 130 else (255, 255, 255)


def _rectangles(boxes: Boxes, size: tuple[int, int], grow: int) -> list[tuple[int, Rectangle]]:
    """Box index and canvas rectangle, best score last; boxes outside the picture are left out."""
    w, h = size
    pixels = boxes.to(Space.PIXEL).xyxy.astype(np.float64)
    order = range(len(boxes)) if boxes.scores is None else np.argsort(boxes.scores, kind="stable")
    out = []
    for i in order:
        x1, y1, x2, y2 = pixels[i]
        if x1 >= w or y1 >= h or x2 <= 0 or y2 <= 0:
            continue
        out.append((int(i), _snap((x1, y1, x2, y2), w, h, grow)))
    return out


def _snap(box: Sequence[float], w: int, h: int, grow: int) -> Rectangle:
    """Whole canvas pixels inside the picture, at least one each way."""
    x1, y1 = max(0, math.floor(box[0] * grow)), max(0, math.floor(box[1] * grow))
    x1, y1 = min(x1, w * grow - 1), min(y1, h * grow - 1)
    x2, y2 = min(w * grow, math.ceil(box[2] * grow)), min(h * grow, math.ceil(box[3] * grow))
    return x1, y1, max(x2, x1 + 1), max(y2, y1 + 1)


def _outline(draw: ImageDraw.ImageDraw, r: Rectangle, colour: Colour, width: int) -> None:
    draw.rectangle((r[0], r[1], r[2] - 1, r[3] - 1), outline=colour, width=width)


def _draw_boxes(
    draw: ImageDraw.ImageDraw,
    canvas: tuple[int, int],
    boxes: Boxes,
    shown: list[tuple[int, Rectangle]],
    text_size: int,
    taken: list[Rectangle],
) -> None:
    font = _font(text_size * 0.62)
    width = max(1, round(text_size / 10))
    colours = {i: _NEUTRAL if boxes.classes is None else _class_colour(int(boxes.classes[i])) for i, _ in shown}
    for i, r in shown:
        _outline(draw, r, colours[i], width)
    # Labels after all outlines, the best scores first, so that they get the free places.
    for i, r in reversed(shown):
        score = "" if boxes.scores is None else f" {boxes.scores[i]:.2f}"
        text = _clean(boxes.label(i), 40) + score
        _draw_label(draw, canvas, text, r, colours[i], font, taken, [o for _, o in shown])


def _draw_label(
    draw: ImageDraw.ImageDraw,
    canvas: tuple[int, int],
    text: str,
    box: Rectangle,
    colour: Colour,
    font: Any,
    taken: list[Rectangle],
    others: Sequence[Rectangle] = (),
    must: bool = False,
) -> None:
    """Puts a label above, below or inside its box where it hides nothing; else leaves it out.

    It hides another label by touching it, and another box by covering half of it.
    """
    w, h = _text_box(text, font)
    pad = max(1, h // 8)
    w, h = w + 2 * pad, h + pad
    x = max(0, min(box[0], canvas[0] - w))
    places = [y for y in (box[1] - h, box[3], box[1]) if 0 <= y <= canvas[1] - h]
    spots = [(x, y, x + w, y + h) for y in places]
    free = [
        s[1]
        for s in spots
        if not any(_overlap(s, t) for t in taken) and not any(_hides(s, o) for o in others if o != box)
    ]
    if not free and not must:
        return
    y = free[0] if free else places[0] if places else 0
    label = (x, y, x + w, y + h)
    draw.rectangle((x, y, x + w - 1, y + h - 1), fill=colour)
    draw.text((x + pad, y + pad // 2), text, fill=_contrast(colour), font=font)
    taken.append(label)


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _hides(label: Rectangle, box: Rectangle) -> bool:
    w = min(label[2], box[2]) - max(label[0], box[0])
    h = min(label[3], box[3]) - max(label[1], box[1])
    return w > 0 and h > 0 and 2 * w * h >= (box[2] - box[0]) * (box[3] - box[1])


def _draw_answer_box(
    draw: ImageDraw.ImageDraw,
    canvas: tuple[int, int],
    box: Sequence[float],
    size: tuple[int, int],
    grow: int,
    text_size: int,
    taken: list[Rectangle],
) -> None:
    if len(box) != 4 or not all(math.isfinite(v) for v in box):
        return
    w, h = size
    x1, x2 = sorted((box[0] * w, box[2] * w))
    y1, y2 = sorted((box[1] * h, box[3] * h))
    r = _snap((x1, y1, x2, y2), w, h, grow)
    width = max(2, round(text_size / 5))
    # White on both sides keeps the colour readable on any ground.
    halo = max(1, width // 2)
    around = width + halo
    outer = (
        max(0, r[0] - around),
        max(0, r[1] - around),
        min(w * grow, r[2] + around),
        min(h * grow, r[3] + around),
    )
    _outline(draw, outer, (255, 255, 255), width + 2 * halo)
    middle = (outer[0] + halo, outer[1] + halo, outer[2] - halo, outer[3] - halo)
    if middle[0] < middle[2] and middle[1] < middle[3]:
        _outline(draw, middle, _ANSWER, width)
    _draw_label(draw, canvas, "answer", outer, _ANSWER, _font(text_size * 0.8), taken, must=True)


def _draw_depth(
    canvas: Image.Image,
    depth: DepthMap | NDArray[Any],
    boxes: list[Rectangle],
    text_size: int,
) -> Rectangle:
    """Draws the inset in the corner that hides the least of the boxes, and says where it is."""
    values = np.asarray(getattr(depth, "depth", depth), np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"found depth of shape {values.shape}; height x width is needed")
    w = max(32, round(canvas.width * 0.26))
    h = max(1, round(w * values.shape[0] / values.shape[1]))
    if h > canvas.height * 0.4:
        h = max(1, round(canvas.height * 0.4))
        w = max(1, round(h * values.shape[1] / values.shape[0]))
    colours, near, far = _depth_colours(values)
    inset = Image.fromarray(colours).resize((w, h), Image.Resampling.BILINEAR)
    font = _font(text_size * 0.6)
    border = max(1, text_size // 12)
    legend = _legend(getattr(depth, "kind", None), near, far)
    line = _text_box(legend, font)[1] + border
    margin = max(2, text_size // 2)
    full_w = max(w, _text_box(legend, font)[0] + 2 * border) + 2 * border
    full_h = h + line + 2 * border
    right, bottom = canvas.width - full_w - margin, canvas.height - full_h - margin
    corners = [(right, margin), (margin, margin), (right, bottom), (margin, bottom)]
    places = [(max(0, x), max(0, y), max(0, x) + full_w, max(0, y) + full_h) for x, y in corners]
    place = min(places, key=lambda p: sum(_overlap(p, b) for b in boxes))
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((place[0], place[1], place[2] - 1, place[3] - 1), fill=_BAR, outline=_TEXT, width=border)
    canvas.paste(inset, (place[0] + (full_w - w) // 2, place[1] + border))
    draw.text((place[0] + 2 * border, place[1] + border + h), legend, fill=_TEXT, font=font)
    return place


def _depth_colours(values: NDArray[np.float64]) -> tuple[NDArray[np.uint8], float, float]:
    """RGB picture (near red, far blue, unknown grey) and the 2nd and 98th percentile of the depth."""
    known = np.isfinite(values)
    if not known.any():
        return np.full((*values.shape, 3), 90, np.uint8), math.nan, math.nan
    near, far = (float(v) for v in np.percentile(values[known], (2, 98)))
    span = far - near
    closeness = (far - np.where(known, values, near)) / span if span > 0 else np.full(values.shape, 0.5)
    grey = np.round(np.clip(closeness, 0, 1) * 255).astype(np.uint8)
    colours = np.ascontiguousarray(cv2.applyColorMap(grey, cv2.COLORMAP_TURBO)[..., ::-1])
    colours[~known] = 90
    return colours.astype(np.uint8), near, far


def _legend(kind: str | None, near: float, far: float) -> str:
    if not math.isfinite(near):
        return "depth unknown"
    if kind == "metric":
        return f"depth {near:.1f} m (red) to {far:.1f} m (blue)"
    return "depth, near (red) to far (blue)"


def _clean(text: str, limit: int) -> str:
    """Printable text on one line: control, format and unassigned characters become spaces."""
    text = text[:limit] + ("..." if len(text) > limit else "")
    kept = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)
    return " ".join(kept.split())


def _wrap(text: str, font: Any, width: int, lines: int) -> list[str]:
    """Lines that fit ``width`` pixels, words broken where they must be; the last one ends in ``...``."""
    out: list[str] = []
    line = ""
    for word in text.split(" "):
        piece = f"{line} {word}" if line else word
        while font.getlength(piece) > width:
            if line and font.getlength(word) <= width:
                out.append(line)
                piece = word
            else:
                fit = max(1, _fitting(piece, font, width))
                out.append(piece[:fit])
                piece = piece[fit:].lstrip()
            line, word = "", piece
        line = piece
    if line:
        out.append(line)
    if len(out) > lines:
        last = out[lines - 1]
        while last and font.getlength(last + "...") > width:
            last = last[:-1]
        out = [*out[: lines - 1], last + "..."]
    return out


def _fitting(text: str, font: Any, width: int) -> int:
    """How many leading characters fit ``width`` pixels."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if font.getlength(text[:middle]) <= width:
            low = middle
        else:
            high = middle - 1
    return low


def _caption(answer: Answer | None, question: str | None, width: int, text_size: int) -> list[tuple[str, Any, Colour]]:
    """Lines of the caption with font and colour."""
    room = width - 2 * text_size
    lines: list[tuple[str, Any, Colour]] = []

    def add(text: str, size: float, colour: Colour) -> None:
        font = _font(size)
        for line in _wrap(_clean(text, _CAPTION_CHARS), font, room, _CAPTION_LINES):
            lines.append((line, font, colour))

    if question:
        add(question, text_size * 0.9, _FAINT)
    if answer is not None:
        add(answer.answer or "(no answer)", text_size * 1.1, _TEXT)
        parts = [answer.mode, answer.exit]
        if answer.confidence is not None:
            parts.insert(0, f"confidence {answer.confidence:.2f}")
        add(", ".join(parts), text_size * 0.65, _FAINT)
        for warning in answer.warnings[:3]:
            add(f"warning: {warning}", text_size * 0.65, (255, 190, 90))
    return lines


def _with_caption(canvas: Image.Image, lines: list[tuple[str, Any, Colour]], text_size: int) -> Image.Image:
    if not lines:
        return canvas
    gap = max(1, text_size // 6)
    margin = text_size // 2
    heights = [_text_box(text, font)[1] + gap for text, font, _ in lines]
    out = Image.new("RGB", (canvas.width, canvas.height + sum(heights) + 2 * margin), _BAR)
    out.paste(canvas, (0, 0))
    draw = ImageDraw.Draw(out)
    y = canvas.height + margin
    for (text, font, colour), height in zip(lines, heights, strict=True):
        draw.text((text_size, y), text, fill=colour, font=font)
        y += height
    return out
