"""Class names of different data sets meet where they mean the same."""

from __future__ import annotations

from hoverlens.benchmarks.classes import canonical, class_map
from hoverlens.benchmarks.datasets import DOTA_NAMES, VISDRONE_NAMES
from hoverlens.runtime.perception.labels import COCO_NAMES


def mapped(model: tuple[str, ...], dataset: tuple[str, ...], kind: str) -> dict[str, str]:
    pairs = zip(model, class_map(model, dataset, kind), strict=True)
    return {name: dataset[c] for name, c in pairs if c is not None}


def test_coco_names_meet_visdrones() -> None:
    assert mapped(COCO_NAMES, VISDRONE_NAMES, "visdrone") == {
        "car": "car",
        "truck": "truck",
        "bus": "bus",
        "motorcycle": "motor",
    }


def test_every_vehicle_is_one_class_on_auair() -> None:
    vehicles = mapped((*COCO_NAMES, "van", "awning-tricycle", "Motorbike"), ("vehicle",), "auair")
    assert set(vehicles) == {
        "car",
        "truck",
        "bus",
        "motorcycle",
        "bicycle",
        "van",
        "awning-tricycle",
        "Motorbike",
    }


def test_dota_has_two_sizes() -> None:
    assert mapped(("car", "van", "bus", "person"), DOTA_NAMES, "dota") == {
        "car": "small-vehicle",
        "van": "small-vehicle",
        "bus": "large-vehicle",
    }


def test_numbered_classes_meet_nothing() -> None:
    assert mapped(("class_0", "class_1"), VISDRONE_NAMES, "visdrone") == {}


def test_spelling_does_not_matter() -> None:
    assert canonical("Small-Vehicle") == canonical("small_vehicle") == "car"
    assert canonical("Pedestrian") == canonical("human") == "person"
