"""Boxes in what a model writes. Nothing here raises, whatever the text; time is linear in it.

Every group of four numbers is a box: ``<0.1><0.2><0.3><0.4>`` with or without all of its brackets,
``[0.1, 0.2, 0.3, 0.4]``, ``(0.1, 0.2), (0.3, 0.4)``, ``<|box_start|>(1,2),(3,4)<|box_end|>``, JSON with any
key, ``x1=.. y1=.. x2=.. y2=..``. Their numbers mean:

* all at most 1 (up to :data:`SLACK`): fractions of width and height;
* otherwise at most 1000 (up to :data:`SLACK` of it): thousandths of the ORIGINAL image, Qwen3-VL's grid. Pixels
  of an image of up to 1000 x 1000 look the same and are read as thousandths: the prompts never ask for pixels,
  and what size the model saw is not known here. Whole numbers 0 and 1 alone are fractions, unless another box
  of the same text is on the grid;
* four percentages: hundredths;
* fractions and larger numbers mixed (0.12 beside 450), more than 1000, not finite: no box. Neither is x, y,
  width, height: four bare numbers never mean that, and where the text names them it is refused, not guessed;
* corners in the wrong order are swapped, and up to :data:`SLACK` outside the image is cut off; both are repairs.
  Further outside, or without an area: no box;
* a number cut off by the end of the text counts as it stands, and that is a repair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .parsed import Parsed, after_answer, visible

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 normalised by the width and height of the original frame; x1 < x2 and y1 < y2."""

SLACK = 0.05
"""How far outside the image a box may reach and still be cut at its edge."""

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4})?|(?<![\w.])[-+]?(?:nan|inf(?:inity)?)(?!\w)",
    re.IGNORECASE | re.ASCII,
)
_MARKER = re.compile(r"<\|(?:box|quad)_(?:start|end)\|>|</?(?:box|bbox|quad)>", re.IGNORECASE)
_PAIR_WORD = re.compile(r"\)\s{0,4}(?:to|and|->|-|\u2013|\u2192)\s{0,4}\(")
_BETWEEN = set(" \t\r\n,;<>()[]{}|/\"'")
_CLOSERS = {"<": ">", "(": ")", "[": "]", "{": "}"}
_CORNER = re.compile(
    r"(?<![A-Za-z])(x_?1|y_?1|x_?2|y_?2|x_?min|y_?min|x_?max|y_?max|left|top|right|bottom)[\"']?\s{0,4}[:=]\s{0,4}[\"']?",
    re.IGNORECASE,
)
_CORNER_INDEX = {"x1": 0, "y1": 1, "x2": 2, "y2": 3, "xmin": 0, "ymin": 1, "xmax": 2, "ymax": 3}
_CORNER_INDEX |= {"left": 0, "top": 1, "right": 2, "bottom": 3}
_ORIGIN = re.compile(r"(?<![A-Za-z])(?:x|cx|left|x_?center)[\"']?\s{0,4}[:=]", re.IGNORECASE)
_SIDE = re.compile(r"(?<![A-Za-z])(?:w|h|width|height)[\"']?\s{0,4}[:=]\s{0,4}[-+.\d]", re.IGNORECASE)
_NO_BOXES = re.compile(r"(?:```(?:json)?)?\s*(?:\[\s*\]|\{\s*\}|none\.?|null)\s*(?:```)?", re.IGNORECASE)
_LONGEST_GAP = 200


@dataclass(frozen=True)
class _Number:
    """A number in a text: where, how much, whether written without point, and whether before a percent sign."""

    start: int
    end: int
    value: float
    whole: bool
    percent: bool


def parse_box(text: str) -> Parsed[Box]:
    """The box that a text gives: its first usable one, behind "answer:" if the text says that."""
    text = visible(text)
    rest = after_answer(text)
    found = parse_boxes(text if rest is None else rest)
    if not found.value and rest is not None:
        found = parse_boxes(text)
    if not found.value:
        return Parsed.none(found.reason or "no box in the text", found.repairs)
    repairs = found.repairs
    if len(found.value) > 1:
        repairs = (*repairs, f"{len(found.value)} boxes given, the first is taken")
    return Parsed(found.value[0], repairs)


def parse_boxes(text: str) -> Parsed[list[Box]]:
    """All boxes of a text, in its order.

    Returns:
        The usable boxes; those that are not are named in the repairs. An empty list where the text says so
        (``[]``, ``none``). No value if there is no usable box.
    """
    text = visible(text)
    if _NO_BOXES.fullmatch(text.strip()):
        return Parsed([])
    if "xywh" in text.lower() or (_SIDE.search(text) and _ORIGIN.search(text)):
        return Parsed.none("x, y, width, height; two corners are needed")
    repairs: list[str] = []
    groups = _named_corners(text)
    if not groups:
        text = _PAIR_WORD.sub("), (", text)
        groups, left_over = _groups(text)
        if groups and left_over:
            repairs.append("numbers that make no whole box are ignored")
    if not groups:
        return Parsed.none("no box in the text")
    if groups[-1][-1].end >= len(text.rstrip()):
        repairs.append("the text ends inside the last box")
    on_grid = any(_on_grid(g) for g in groups)
    boxes: list[Box] = []
    dropped: list[str] = []
    for i, group in enumerate(groups, 1):
        one = _box(group, on_grid)
        repairs += [r for r in one.repairs if r not in repairs]
        if one.value is not None:
            boxes.append(one.value)
        else:
            dropped.append(f"box {i}: {one.reason}" if len(groups) > 1 else str(one.reason))
    if not boxes:
        return Parsed.none(dropped[0], repairs)
    return Parsed(boxes, (*repairs, *(f"dropped {d}" for d in dropped[:8])))


def _numbers(text: str) -> Iterator[_Number]:
    for match in NUMBER.finditer(text):
        start, end = match.span()
        after = text[end : end + 1]
        # "2d", "10px": a name or another unit.
        if after.isalpha() or after == "_":
            continue
        word = match.group().lower()
        percent = after == "%"
        yield _Number(start, end + percent, float(word), not any(c in word for c in ".en"), percent)


def _groups(text: str) -> tuple[list[list[_Number]], bool]:
    """Groups of four numbers, and whether other numbers stood among them."""
    groups: list[list[_Number]] = []
    left_over = False
    run: list[list[_Number]] = []
    end = 0
    for number in _numbers(text):
        gap = text[end : number.start][: _LONGEST_GAP + 1]
        bare = _MARKER.sub("", gap)
        marked = bare != gap
        end = number.end
        if not run or len(gap) > _LONGEST_GAP or not gap or not set(bare) <= _BETWEEN:
            left_over |= _cut(run, groups)
            run = [[number]]
        elif marked or "[" in bare or "]" in bare or any(o in bare and c not in bare for o, c in _CLOSERS.items()):
            run.append([number])
        else:
            run[-1].append(number)
    left_over |= _cut(run, groups)
    return groups, left_over


def _cut(run: list[list[_Number]], groups: list[list[_Number]]) -> bool:
    """Cuts numbers with nothing but separators between them into boxes; True if some are left over."""
    pieces: list[list[_Number]] = []
    for piece in run:
        # [x1, y1], [x2, y2]
        if len(piece) == 2 and pieces and len(pieces[-1]) == 2:
            pieces[-1] = pieces[-1] + piece
        else:
            pieces.append(piece)
    whole = [p for p in pieces if len(p) >= 4]
    if not whole:
        # Brackets that close nothing: only the numbers count.
        whole = pieces = [[n for piece in run for n in piece]]
    for piece in whole:
        groups += [piece[i : i + 4] for i in range(0, len(piece) - 3, 4)]
    return any(len(p) % 4 for p in pieces)


def _named_corners(text: str) -> list[list[_Number]]:
    groups: list[list[_Number]] = []
    corners: dict[int, _Number] = {}
    for match in _CORNER.finditer(text):
        number = next(_numbers(text[match.end() : match.end() + 32]), None)
        if number is None or number.start:
            continue
        index = _CORNER_INDEX[match.group(1).lower().replace("_", "")]
        if index in corners:
            corners = {}
        corners[index] = _Number(match.end(), match.end() + number.end, number.value, number.whole, number.percent)
        if len(corners) == 4:
            groups.append([corners[i] for i in range(4)])
            corners = {}
    return groups


def _on_grid(group: Sequence[_Number]) -> bool:
    return all(n.whole and not n.percent for n in group) and 1 < max(n.value for n in group) <= 1000


def _box(group: Sequence[_Number], on_grid: bool) -> Parsed[Box]:
    """Four numbers as a box.

    Args:
        group: The numbers.
        on_grid: Other boxes of the same text are counted in thousandths.
    """
    values = [n.value for n in group]
    shown = ", ".join(f"{v:g}" for v in values)
    if not all(math.isfinite(v) for v in values):
        return Parsed.none(f"a coordinate is not finite: {shown}")
    repairs: list[str] = []
    high = max(values)
    percent = [n.percent for n in group]
    whole = all(n.whole for n in group)
    if any(percent):
        if not all(percent):
            return Parsed.none(f"percentages and plain numbers mixed: {shown}")
        values = [v / 100 for v in values]
        repairs.append("percentages read as fractions")
    elif high > 1 + SLACK or (on_grid and whole):
        if high > 1000 * (1 + SLACK):
            return Parsed.none(f"coordinates up to {high:g} are neither 0..1 nor 0..1000")
        if high <= 2 and not whole:
            return Parsed.none(f"too far outside the image: {shown}")
        if any(0 < v < 1 for v in values):
            return Parsed.none(f"fractions and larger numbers mixed: {shown}")
        values = [v / 1000 for v in values]
        repairs.append("0..1000 grid read as fractions")
    if min(values) < -SLACK or max(values) > 1 + SLACK:
        return Parsed.none(f"too far outside the image: {shown}", repairs)
    if min(values) < 0 or max(values) > 1:
        values = [min(max(v, 0.0), 1.0) for v in values]
        repairs.append("cut at the edge of the image")
    x1, y1, x2, y2 = values
    if x1 > x2 or y1 > y2:
        x1, y1, x2, y2 = min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
        repairs.append("corners swapped")
    if x1 == x2 or y1 == y2:
        return Parsed.none(f"a box without area: {shown}", repairs)
    return Parsed((x1, y1, x2, y2), tuple(repairs))
