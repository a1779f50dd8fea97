"""Which class of a model counts as which class of a data set.

The names differ and so do the borders between classes: COCO has no van, and says ``car`` to it. A
true box whose class the model has no name for is ignored: it is neither missed nor does a box on it
count as wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VEHICLE = "vehicle"

SYNONYMS: Mapping[str, str] = {
    "motorbike": "motorcycle",
    "motor": "motorcycle",
    "bike": "bicycle",
    "human": "person",
    "pedestrian": "person",
    "people": "person",
    "tree crown": "tree",
    "small vehicle": "car",
    "large vehicle": "truck",
}
"""Other data sets' names (VisDrone, AU-AIR, DOTA) for what is one class here, mostly by COCO's name."""

VEHICLES = frozenset(
    {
        "car",
        "truck",
        "bus",
        "van",
        "motorcycle",
        "bicycle",
        "trailer",
        "tricycle",
        "awning tricycle",
        "vehicle",
    }
)
"""What counts as a vehicle where a data set is judged by that one class."""

FALLBACK: Mapping[str, Mapping[str, str]] = {
    # DOTA's two classes are coarser than those of ground-level data sets.
    "dota": {"van": "car", "bus": "truck"},
}


def canonical(name: str) -> str:
    """One spelling for a class name: lower case, words apart, synonyms joined."""
    plain = " ".join(name.lower().replace("-", " ").replace("_", " ").split())
    return SYNONYMS.get(plain, plain)


def class_map(model: Sequence[str], dataset: Sequence[str], kind: str) -> list[int | None]:
    """For each class of a model the index of the data set's class, or None to leave it out.

    Args:
        model: The model's names.
        dataset: The data set's names.
        kind: The data set's kind; a one-class set named ``vehicle`` takes every vehicle.
    """
    wanted = {canonical(name): i for i, name in enumerate(dataset)}
    fallback = FALLBACK.get(kind, {})
    out: list[int | None] = []
    for name in model:
        plain = canonical(name)
        if VEHICLE in wanted and plain in VEHICLES:
            out.append(wanted[VEHICLE])
        elif plain in wanted:
            out.append(wanted[plain])
        else:
            out.append(wanted.get(fallback.get(plain, "")))
    return out
