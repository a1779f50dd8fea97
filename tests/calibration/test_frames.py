"""A calibration set is looked at before it is trusted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hoverlens.calibration.frames import PerceptionModel, read_frames
from hoverlens.runtime.errors import BadInput


def write_photos(folder: Path, count: int, noise: bool = False, seed: int = 0) -> Path:
    """Smooth pictures, each another, or white noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    ys, xs = np.mgrid[0:48, 0:64]
    for i in range(count):
        a, b, c = rng.uniform(0.02, 0.2, 3)
        smooth = np.stack([np.sin(a * xs + i), np.cos(b * ys - i), np.sin(c * (xs + ys))], -1)
        rgb = rng.integers(0, 256, (48, 64, 3)) if noise else 127 + 120 * smooth
        Image.fromarray(rgb.astype(np.uint8)).save(folder / f"{i:03d}.png")
    return folder


def test_the_record_has_size_and_checksum(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "a", 9)
    found = read_frames([photos])
    assert found.record()["images"] == 9
    assert len(found.sha256) == 64
    assert read_frames([photos]).sha256 == found.sha256
    # Names do not matter, pixels do.
    (photos / "008.png").rename(photos / "008b.png")
    assert read_frames([photos]).sha256 == found.sha256
    write_photos(photos, 1, seed=5)
    assert read_frames([photos]).sha256 != found.sha256


def test_too_few_different_pictures_are_refused_unless_allowed(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "a", 3)
    for i in range(20):
        (photos / f"copy{i}.png").write_bytes((photos / "000.png").read_bytes())
    with pytest.raises(BadInput, match=r"3 different pictures, needed 8.*--allow-small"):
        read_frames([photos])
    assert len(read_frames([photos], allow_small=True).paths) == 23


def test_noise_is_refused_unless_allowed(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "a", 9)
    noise = write_photos(tmp_path / "b", 2, noise=True)
    with pytest.raises(BadInput, match=r"2 of 11 .* noise or blank \(the first: 000.png\).*--allow-noise"):
        read_frames([photos, noise])
    assert read_frames([photos, noise], allow_noise=True).record()["noise"] == 2


def test_a_limit_spreads_over_all(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "a", 20)
    names = [p.stem for p in read_frames([photos], limit=10).paths]
    assert names == [f"{i:03d}" for i in range(0, 20, 2)]


def test_folders_without_pictures_are_bad_input(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="no pictures"):
        read_frames([tmp_path / "empty"])
    with pytest.raises(BadInput, match="no such folder"):
        read_frames([tmp_path / "none"])
    with pytest.raises(BadInput, match="is a file"):
        read_frames([tmp_path / "file"])
    write_photos(tmp_path / "a", 9)
    (tmp_path / "a" / "zzz.jpg").write_bytes(b"no picture")
    with pytest.raises(BadInput, match=r"zzz\.jpg"):
        read_frames([tmp_path / "a"])


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("yolox_nano", "detector", (1, 3, 416, 416)),
        ("FastestDet", "detector", (1, 3, 352, 352)),
        ("rtmonodepth_s_ms_256x448", "depth", (1, 3, 256, 448)),
    ],
)
def test_a_model_is_fed_what_it_is_fed_everywhere(
    shared_data: Path, name: str, kind: str, shape: tuple[int, ...]
) -> None:
    photo = next((shared_data / "images" / "auair").glob("*.jpg"))
    with PerceptionModel(shared_data / "models" / f"{name}.onnx", threads=1) as model:
        assert model.kind == kind
        ((feeds, results),) = model.runs([photo])
    (tensor,) = feeds.values()
    assert tensor.shape == shape
    assert tensor.max() > (100 if name == "yolox_nano" else 0.4)
    assert all(np.isfinite(v).all() for v in results.values())
