"""Which of a detector's classes a category in words stands for.

A category counts as known only if it says nothing that the class does not: "car" and "the cars" are known to a
detector of cars, "red car" and "taxi" are not. Then the MLLM finds the boxes.

================= ==============================================================================
category          classes, as many of them as the detector has
================= ==============================================================================
vehicle           car, van, truck, bus and their other names, trailer, DOTA's vehicles; nothing
                  with two or three wheels, which data sets count apart
person            person, people, pedestrian, human: VisDrone splits them by posture only
bike              bicycle and motorcycle: the word means both
other names       of one thing, see :data:`SAME`
================= ==============================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SAME: tuple[tuple[str, ...], ...] = (
    ("car", "automobile", "passenger car"),
    ("van", "minivan"),
    ("truck", "lorry"),
    ("bus", "coach"),
    ("trailer",),
    ("bicycle", "pushbike", "push bike", "cycle"),
    ("motorcycle", "motorbike", "motor", "moped", "scooter", "motor scooter"),
    ("tricycle",),
    ("awning tricycle",),
    ("person", "people", "pedestrian", "human", "human being"),
    ("airplane", "aeroplane", "plane", "aircraft"),
    ("boat", "ship", "vessel"),
    ("traffic light", "traffic signal"),
    ("small vehicle",),
    ("large vehicle",),
)
"""Each row: names of one thing, all singular."""

GROUPS: dict[str, tuple[str, ...]] = {
    "vehicle": ("car", "van", "truck", "bus", "trailer", "small vehicle", "large vehicle", "vehicle"),
    "motor vehicle": ("car", "van", "truck", "bus", "motorcycle", "small vehicle", "large vehicle"),
    "bike": ("bicycle", "motorcycle", "bike"),
    "animal": ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "animal"),
}
"""Words for several things."""

_IRREGULAR = {"people": "people", "persons": "person", "men": "man", "women": "woman", "children": "child"}
_IRREGULAR |= {
    "buses": "bus",
    "busses": "bus",
    "bus": "bus",
    "lorries": "lorry",
    "sheep": "sheep",
    "aircraft": "aircraft",
}
_LEADING = {"a", "an", "the", "any", "all", "every", "each", "some", "of", "visible", "many"}
_SPLIT = re.compile(r"\s*(?:,|;|/|&|\band\b|\bor\b)\s*")
MAX_CHARS = 200


def classes_for(category: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names in ``names`` that a category stands for, in their order; () where it, or a part of it, is unknown.

    Args:
        category: In words: ``"cars"``, ``"vehicle"``, ``"cars and trucks"``.
        names: The detector's class names.
    """
    wanted: set[str] = set()
    for part in _SPLIT.split(category[:MAX_CHARS]):
        if not part.strip():
            continue
        found = _one(_singular(part), names)
        if not found:
            return ()
        wanted |= found
    return tuple(dict.fromkeys(n for n in names if n in wanted))


def _one(category: str, names: Sequence[str]) -> set[str]:
    things = GROUPS.get(category, (category,))
    same = {name for thing in things for name in _other_names(thing)}
    return {name for name in names if _singular(name) in same}


def _other_names(thing: str) -> tuple[str, ...]:
    return next((row for row in SAME if thing in row), (thing,))


def _singular(text: str) -> str:
    words = re.sub(r"[^\w]+|_", " ", text.casefold()).split()
    while words and words[0] in _LEADING:
        words = words[1:]
    if not words:
        return ""
    last = words[-1]
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif last.endswith("ies") and len(last) > 4:
        last = last[:-3] + "y"
    elif last.endswith(("ches", "shes", "xes", "sses")):
        last = last[:-2]
    elif last.endswith("s") and not last.endswith(("ss", "us")) and len(last) > 3:
        last = last[:-1]
    return " ".join([*words[:-1], last])
