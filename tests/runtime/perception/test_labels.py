"""Class names are read from what exporters write, and nothing in them is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.perception.labels import (
    COCO_NAMES,
    default_names,
    load_labels,
    names_from_metadata,
    parse_names,
)


def test_eighty_classes_are_coco_and_others_are_numbered() -> None:
    assert len(COCO_NAMES) == len(set(COCO_NAMES)) == 80
    assert default_names(80)[2] == "car"
    assert default_names(80)[79] == "toothbrush"
    assert default_names(3) == ("class_0", "class_1", "class_2")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{0: 'a', 1: \"b's\"}", ("a", "b's")),
        ('{"0": "a", "2": "c"}', ("a", "class_1", "c")),
        ('["a", "b"]', ("a", "b")),
        ("('a', 'b')", ("a", "b")),
        ('{"names": ["a"]}', ("a",)),
        ("car\n van \n\nbus\n", ("car", "van", "bus")),
        ("", None),
        ("{}", None),
        ("[]", None),
        ("{0: 'a'", None),
        ("{-1: 'a'}", None),
        ("{999999999: 'a'}", None),
        ("{'a': 'b'}", None),
        ("[__import__('os').system('touch /tmp/x')]", None),
        ("{0: open('x')}", None),
        ("[" * 5000, None),
        ("{" + "0:" * 5000, None),
        ("[" + "1," * 600_000 + "]", None),
    ],
)
def test_names_in_any_spelling(text: str, names: tuple[str, ...] | None) -> None:
    assert parse_names(text) == names


def test_metadata_keys_that_exporters_use() -> None:
    assert names_from_metadata({"names": "{0: 'a'}"}) == ("a",)
    assert names_from_metadata({"classes": "a\nb"}) == ("a", "b")
    assert names_from_metadata({"names": "{", "labels": "['a']"}) == ("a",)
    assert names_from_metadata({"author": "x"}) is None


def test_a_labels_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes("﻿car\r\nvan\r\n".encode())
    assert load_labels(path) == ("car", "van")
    assert load_labels(["car"]) == ("car",)
    assert load_labels(None) is None


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00bad", b"{}", b"\n" * 5, b"a" * 1_000_001])
def test_an_unusable_labels_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="labels"):
        load_labels(path)
    with pytest.raises(BadInput, match="labels"):
        load_labels(tmp_path / "none.txt")
    with pytest.raises(BadInput, match="labels"):
        load_labels(tmp_path)
