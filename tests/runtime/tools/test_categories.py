"""A detector is trusted with a category only if the words say nothing more than its class does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.perception.labels import COCO_NAMES
from hoverlens.runtime.tools.categories import classes_for

VISDRONE = ("pedestrian", "people", "bicycle", "car", "van", "truck", "tricycle", "awning-tricycle", "bus", "motor")
AUAIR = ("Human", "Car", "Truck", "Van", "Motorbike", "Bicycle", "Bus", "Trailer")
DOTA = ("small-vehicle", "large-vehicle")


@pytest.mark.parametrize(
    ("category", "names", "classes"),
    [
        ("car", VISDRONE, ("car",)),
        ("Cars", VISDRONE, ("car",)),
        ("the cars", VISDRONE, ("car",)),
        ("any car?", VISDRONE, ("car",)),
        ("automobiles", AUAIR, ("Car",)),
        ("vehicle", VISDRONE, ("car", "van", "truck", "bus")),
        ("vehicles", COCO_NAMES, ("car", "bus", "truck")),
        ("vehicles", AUAIR, ("Car", "Truck", "Van", "Bus", "Trailer")),
        ("vehicles", DOTA, DOTA),
        ("people", VISDRONE, ("pedestrian", "people")),
        ("person", VISDRONE, ("pedestrian", "people")),
        ("pedestrians", COCO_NAMES, ("person",)),
        ("humans", AUAIR, ("Human",)),
        ("bike", VISDRONE, ("bicycle", "motor")),
        ("bikes", COCO_NAMES, ("bicycle", "motorcycle")),
        ("motorcycles", VISDRONE, ("motor",)),
        ("bicycle", COCO_NAMES, ("bicycle",)),
        ("buses", VISDRONE, ("bus",)),
        ("bus", COCO_NAMES, ("bus",)),
        ("lorries", VISDRONE, ("truck",)),
        ("awning tricycles", VISDRONE, ("awning-tricycle",)),
        ("tricycle", VISDRONE, ("tricycle",)),
        ("cars and trucks", VISDRONE, ("car", "truck")),
        ("car, van / bus", VISDRONE, ("car", "van", "bus")),
        ("traffic lights", COCO_NAMES, ("traffic light",)),
        ("ships", COCO_NAMES, ("boat",)),
        ("benches", COCO_NAMES, ("bench",)),
        ("van", COCO_NAMES, ()),
        ("red car", VISDRONE, ()),
        ("taxi", VISDRONE, ()),
        ("car roof", VISDRONE, ()),
        ("cars and trees", VISDRONE, ()),
        ("tree", VISDRONE, ()),
        ("building", COCO_NAMES, ()),
        ("vehicle", ("tree",), ()),
        ("", VISDRONE, ()),
        ("the", VISDRONE, ()),
        (" , and ", VISDRONE, ()),
        ("class_0", ("class_0", "class_1"), ("class_0",)),
    ],
)
def test_what_a_category_stands_for(category: str, names: tuple[str, ...], classes: tuple[str, ...]) -> None:
    assert classes_for(category, names) == classes


def test_every_class_knows_its_own_name() -> None:
    for names in (VISDRONE, AUAIR, COCO_NAMES, DOTA):
        for name in names:
            assert name in classes_for(name, names)


@given(st.text(max_size=60), st.lists(st.text(max_size=12), max_size=5))
def test_any_words_give_classes_that_exist(category: str, names: list[str]) -> None:
    assert set(classes_for(category, names)) <= set(names)
