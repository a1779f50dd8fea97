"""The importance matrix: what is collected, how it is kept, and which sets are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hoverlens.calibration.activations import Activations
from hoverlens.calibration.imatrix import calibrate_imatrix
from hoverlens.calibration.imatrix_file import Columns, ImportanceMatrix, read_imatrix
from hoverlens.calibration.questions import check_set, generic_questions, looks_like_noise, read_questions
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.gguf import read_gguf_header


def photo(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """Smooth ground with a few rectangles."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    picture = np.stack([60 + x, 90 + y, 40 + (x + y) // 2], -1).astype(np.uint8)
    for _ in range(4):
        left, top = generator.integers(0, size[0] - 20), generator.integers(0, size[1] - 20)
        picture[top : top + 16, left : left + 16] = generator.integers(0, 256, 3)
    return Image.fromarray(picture)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(16):
        photo(i).save(folder / f"{i:02}.png")
    return folder


MATRIX = ImportanceMatrix(
    {
        "blk.0.attn_q.weight": Columns(np.array([[4.0, 16.0, 0.0]], np.float32), np.array([2.0], np.float32)),
        "blk.0.ffn_up_exps.weight": Columns(
            np.array([[3.0, 6.0], [0.0, 0.0]], np.float32), np.array([3.0, 0.0], np.float32)
        ),
    },
    ("flights",),
    7,
    120,
    {"images": 5, "set_sha256": "ab"},
)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    MATRIX.save(tmp_path / "m.gguf")
    found = read_imatrix(tmp_path / "m.gguf")
    assert (found.datasets, found.chunks, found.chunk_size) == (("flights",), 7, 120)
    assert found.facts == MATRIX.facts
    for name, columns in MATRIX.entries.items():
        np.testing.assert_array_equal(found.entries[name].sums, columns.sums)
        np.testing.assert_array_equal(found.entries[name].counts, columns.counts)


def test_the_file_has_the_layout_of_llama_cpps_tools(tmp_path: Path) -> None:
    MATRIX.save(tmp_path / "m.gguf")
    header = read_gguf_header(tmp_path / "m.gguf")
    assert header.get("general.type") == "imatrix"
    assert {t.name: t.shape for t in header.tensors} == {
        "blk.0.attn_q.weight.in_sum2": (3, 1),
        "blk.0.attn_q.weight.counts": (1, 1),
        "blk.0.ffn_up_exps.weight.in_sum2": (2, 2),
        "blk.0.ffn_up_exps.weight.counts": (1, 2),
    }
    assert header.least_size <= (tmp_path / "m.gguf").stat().st_size


def test_means_are_over_inputs_and_an_unused_expert_counts_all_columns_alike() -> None:
    assert MATRIX.entries["blk.0.attn_q.weight"].means().tolist() == [2.0, 8.0, 0.0]
    assert MATRIX.entries["blk.0.ffn_up_exps.weight"].means().tolist() == [1.0, 2.0, 1.0, 1.0]


def test_the_older_layout_is_read(tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii3f", 4, 3, 4.0, 8.0, 12.0)
    (tmp_path / "m.dat").write_bytes(data)
    assert read_imatrix(tmp_path / "m.dat").entries["blk.0.attn_q.weight"].means().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no importance matrix"),
        (b"\x01\x00\x00\x00\xff\xff\xff\x7fx", "is no importance matrix"),
        (MATRIX.to_bytes()[:-40], "is cut short"),
        (MATRIX.to_bytes().replace(b"imatrix", b"iwatrix"), "needed an importance matrix"),
        (ImportanceMatrix({}).to_bytes(), "holds no importance matrix"),
        (
            ImportanceMatrix({"w": Columns(np.array([[-1.0]], np.float32), np.ones(1, np.float32))}).to_bytes(),
            "no sums of squares",
        ),
        (
            ImportanceMatrix({"w": Columns(np.array([[np.nan]], np.float32), np.ones(1, np.float32))}).to_bytes(),
            "no sums of squares",
        ),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(BadInput, match=message) as e:
        read_imatrix(tmp_path / "m")
    assert "\n" not in str(e.value)


def test_experts_are_added_up_apart() -> None:
    seen = Activations()
    seen.add("blk.0.ffn_up_exps.weight", np.array([[1.0, 2.0], [3.0, 0.0]], np.float32), expert=1, experts=3)
    seen.add("blk.0.ffn_up_exps.weight", np.array([[2.0, 2.0]], np.float32), expert=2, experts=3)
    found = seen.entries()["blk.0.ffn_up_exps.weight"]
    assert found.sums.tolist() == [[0, 0], [10, 4], [4, 4]]
    assert found.counts.tolist() == [0, 2, 1]


def test_every_matrix_of_every_layer_is_seen_and_equal_inputs_have_equal_sums(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "imatrix.gguf"
    made = calibrate_imatrix(
        out, bundle=str(tiny_bundle.path), images=[str(photos)], image_max_tokens=16, threads=1, allow_small=True
    )
    matrix = read_imatrix(out)
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert set(matrix.entries) == {f"blk.{i}.{k}.weight" for i in range(4) for k in kinds}
    for columns in matrix.entries.values():
        assert (columns.sums > 0).all()
    q, k = matrix.entries["blk.2.attn_q.weight"], matrix.entries["blk.2.attn_k.weight"]
    np.testing.assert_allclose(q.sums, k.sums, rtol=1e-6)
    # The last layer evaluates only what is asked for.
    assert matrix.entries["blk.0.attn_q.weight"].counts[0] >= matrix.entries["blk.3.ffn_up.weight"].counts[0]
    assert made["images"] == 16
    assert made["tensors"] == 28
    assert made["questions"] == 16
    assert len(made["sha256"]) == len(made["set_sha256"]) == 64


def test_the_same_set_gives_the_same_file(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        calibrate_imatrix(
            tmp_path / name,
            bundle=str(tiny_bundle.path),
            images=[str(photos)],
            image_max_tokens=16,
            threads=1,
            limit=3,
            allow_small=True,
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_normalised_input_of_the_first_layer_has_mean_square_one(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path
) -> None:
    """RMS norm makes it so, up to the norm's own weights: a wrong tensor or stride would not."""
    out = tmp_path / "imatrix.gguf"
    calibrate_imatrix(
        out,
        bundle=str(tiny_bundle.path),
        images=[str(photos)],
        image_max_tokens=16,
        threads=1,
        limit=2,
        allow_small=True,
    )
    means = read_imatrix(out).entries["blk.0.attn_q.weight"].means()
    assert means.mean() == pytest.approx(1.0, abs=0.05)


def test_a_small_set_is_refused_unless_named(tmp_path: Path) -> None:
    photo(1).save(tmp_path / "a.png")
    items = generic_questions(tmp_path)
    with pytest.raises(BadInput, match=r"has 1 different pictures, needed 16; give more, or --allow-small"):
        check_set(items)
    assert check_set(items, allow_small=True).n_images == 1


def test_the_same_picture_many_times_is_a_small_set(tmp_path: Path) -> None:
    for i in range(20):
        photo(1).save(tmp_path / f"{i}.png")
    with pytest.raises(BadInput, match="has 1 different pictures"):
        check_set(generic_questions(tmp_path))


def test_noise_is_refused_unless_named(photos: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photos / "noise.png")
    items = generic_questions(photos)
    with pytest.raises(BadInput, match=r"1 of 17 calibration pictures are noise or blank \(the first: .*noise\.png\)"):
        check_set(items)
    assert check_set(items, allow_noise=True).n_noise == 1


def test_photos_are_no_noise_and_blank_pictures_are() -> None:
    assert not looks_like_noise(np.asarray(photo(3)))
    assert looks_like_noise(np.full((32, 32, 3), 128, np.uint8))
    assert looks_like_noise(np.zeros((1, 1, 3), np.uint8))


def test_every_aerial_photo_passes_for_a_photo(shared_data: Path) -> None:
    items = generic_questions(shared_data / "images" / "visdrone")[:20]
    assert check_set(items, allow_small=True).n_noise == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no questions"),
        ("{", r"line 1 is no question; needed \{"),
        ("[1]", "line 1 is no question"),
        ('{"question": "a?"}', "line 1 is no question"),
        ('{"image": "no.png", "question": "a?"}', r"line 1: no picture .*no\.png"),
        ('{"image": "a.png"}', "line 1: the question is NoneType"),
        ('{"image": "a.png", "question": "a?", "options": ["x", "x"]}', "line 1: option 2 .* repeats option 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    photo(1).save(tmp_path / "a.png")
    (tmp_path / "q.jsonl").write_text(line + "\n")
    with pytest.raises(BadInput, match=message):
        read_questions(tmp_path / "q.jsonl")


def test_questions_keep_their_options_and_kind(tmp_path: Path) -> None:
    photo(1).save(tmp_path / "a.png")
    lines = [{"image": "a.png", "question": "x?", "options": ["1", "2"]}, {"image": "a.png", "question": "y?"}]
    (tmp_path / "q.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    found = read_questions(tmp_path / "q.jsonl")
    assert [(i.question.kind, i.question.options) for i in found] == [("option", ("1", "2")), ("text", ())]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "which model"),
        ({"bundle": "b", "mllm": "m", "mmproj": "p"}, "which model"),
        ({"mllm": "m"}, "which model"),
        ({"bundle": "b"}, "no calibration questions"),
    ],
)
def test_missing_arguments_are_named(tmp_path: Path, given: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        calibrate_imatrix(tmp_path / "m.gguf", **given)  # type: ignore[arg-type]
