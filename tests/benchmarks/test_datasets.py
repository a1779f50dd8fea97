"""Truth is read in pixels from every format, and what cannot be read is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hoverlens.benchmarks.datasets import open_dataset
from hoverlens.runtime.errors import BadInput


def photo(path: Path, size: tuple[int, int] = (200, 100)) -> None:
    Image.new("RGB", size).save(path)


def auair(folder: Path) -> None:
    photo(folder / "b.jpg")
    photo(folder / "a.jpg")
    box = {"left": 10, "top": 20, "width": 30, "height": 40}
    entries = [
        {"image_name": "b.jpg", "bbox": [{**box, "class": 1}, {**box, "class": 0}]},
        {"image_name": "a.jpg", "bbox": []},
        {"image_name": "gone.jpg", "bbox": []},
        {"image_name": "../../escape.jpg", "bbox": []},
    ]
    (folder / "annotations.json").write_text(json.dumps({"annotations": entries}))


def test_auair_boxes_are_left_top_width_height_and_humans_are_ignored(tmp_path: Path) -> None:
    auair(tmp_path)
    data = open_dataset(tmp_path)
    assert (data.kind, data.names) == ("auair", ("vehicle",))
    assert [s.path.name for s in data.samples] == ["a.jpg", "b.jpg"]
    truth = data.samples[1].truth
    assert truth is not None
    assert truth.xyxy.tolist() == [[10, 20, 40, 60]] * 2
    assert truth.classes.tolist() == [0, -1]
    assert truth.ignore.tolist() == [False, True]
    assert len(open_dataset(tmp_path, limit=1).samples) == 1


def test_visdrone_rows_are_fractions_of_the_picture(tmp_path: Path) -> None:
    photo(tmp_path / "x.jpg")
    (tmp_path / "x.val.txt").write_text("3 0.5 0.5 0.5 0.2\n\n0 0.25 0.5 0.5 1\n")
    data = open_dataset(tmp_path)
    assert data.kind == "visdrone"
    truth = data.samples[0].truth
    assert truth is not None
    assert truth.xyxy == pytest.approx(np.array([[50, 40, 150, 60], [0, 0, 100, 100]]))
    assert [data.names[c] for c in truth.classes] == ["bus", "car"]


def test_dota_polygons_become_boxes(tmp_path: Path) -> None:
    photo(tmp_path / "p.png")
    (tmp_path / "p.txt").write_text(
        "imagesource:GoogleEarth\ngsd:0.2\n"
        "10 5 30 15 25 25 5 15 small-vehicle 0\n0 0 9 0 9 9 0 9 plane 0\n0 0 9 0 9 9 0 9 large-vehicle 1\n"
    )
    data = open_dataset(tmp_path)
    truth = data.samples[0].truth
    assert truth is not None
    assert data.kind == "dota"
    assert truth.xyxy[0].tolist() == [5, 5, 30, 25]
    assert truth.classes.tolist() == [0, -1, 1]
    assert truth.ignore.tolist() == [False, True, True]


def test_crowns_and_depth(tmp_path: Path) -> None:
    trees, heights = tmp_path / "trees", tmp_path / "heights"
    trees.mkdir()
    heights.mkdir()
    photo(trees / "t.png")
    (trees / "t.csv").write_text("image_path,xmin,ymin,xmax,ymax,label\nt.png,1.5,2,3,4,Tree\n")
    data = open_dataset(trees)
    assert (data.kind, data.names) == ("deepforest", ("tree",))
    assert data.samples[0].truth is not None
    assert data.samples[0].truth.xyxy.tolist() == [[1.5, 2, 3, 4]]
    photo(heights / "d.JPG")
    np.save(heights / "d_depth.npy", np.full((5, 10), 40, np.float16))
    data = open_dataset(heights)
    assert data.kind == "brighton"
    assert data.samples[0].depth is not None
    assert data.samples[0].depth.dtype == np.float32


def test_a_folder_of_photos_has_no_truth(tmp_path: Path) -> None:
    photo(tmp_path / "x.jpg")
    data = open_dataset(tmp_path)
    assert (data.kind, len(data.samples), data.samples[0].truth) == ("photos", 1, None)


def _empty(folder: Path) -> None:
    pass


def _bad_json(folder: Path) -> None:
    photo(folder / "x.jpg")
    (folder / "annotations.json").write_text("{")


def _bad_keys(folder: Path) -> None:
    (folder / "annotations.json").write_text('{"annotations": [{"bbox": [{"left": 1}]}]}')


def _bad_shape(folder: Path) -> None:
    (folder / "annotations.json").write_text('{"annotations": {"bbox": 3}}')


def _bad_row(folder: Path) -> None:
    photo(folder / "x.jpg")
    (folder / "x.val.txt").write_text("0 0.5 oops 1 1\n")


def _bad_class(folder: Path) -> None:
    photo(folder / "x.jpg")
    (folder / "x.val.txt").write_text("9 0.5 0.5 1 1\n")


def _nan_box(folder: Path) -> None:
    photo(folder / "x.jpg")
    (folder / "x.val.txt").write_text("0 nan 0.5 1 1\n")


def _pickle(folder: Path) -> None:
    photo(folder / "x.jpg")
    np.save(folder / "x_depth.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    "make",
    [_empty, _bad_json, _bad_keys, _bad_shape, _bad_row, _bad_class, _nan_box, _pickle],
)
def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    with pytest.raises(BadInput) as e:
        open_dataset(tmp_path)
    assert str(tmp_path) in str(e.value)
    assert "\n" not in str(e.value)


def test_a_missing_folder_or_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        open_dataset(tmp_path / "none")
    photo(tmp_path / "x.jpg")
    with pytest.raises(BadInput, match="is a file"):
        open_dataset(tmp_path / "x.jpg")


def test_the_shared_folders(shared_data: Path) -> None:
    images = shared_data / "images"
    kinds = {p.name: open_dataset(p) for p in images.iterdir() if p.is_dir()}
    assert {k: v.kind for k, v in kinds.items()} == {
        "auair": "auair",
        "visdrone": "visdrone",
        "dota": "dota",
        "deepforest": "deepforest",
        "brighton": "brighton",
        "bebop": "photos",
    }
    counts = {k: sum(len(s.truth.classes) for s in v.samples if s.truth) for k, v in kinds.items()}
    assert counts["auair"] == 162
    assert counts["visdrone"] == 248
    assert counts["dota"] == 64
    for name in ("auair", "visdrone", "dota"):
        for sample in kinds[name].samples[:4]:
            assert sample.truth is not None
            w, h = sample.frame().size
            assert (sample.truth.xyxy <= np.array([w, h, w, h]) + 1).all()
            assert (sample.truth.xyxy >= -1).all()
