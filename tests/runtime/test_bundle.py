"""Bundles: what opens, what is refused, and what identity means."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoverlens.runtime import digest
from hoverlens.runtime.bundle import Bundle, bundle_info, describe_bundle, find_bundle, verify_bundle
from hoverlens.runtime.errors import BadInput

CONTENT = {"detector": b"a detector", "mllm": b"a text model", "mmproj": b"a projector"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOVERLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HOVERLENS_BUNDLE", raising=False)
    return tmp_path / "cache"


def document() -> dict[str, Any]:
    files = {
        role: {"path": f"{role}.bin", "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for role, data in CONTENT.items()
    }
    files["detector"]["labels"] = ["car", "bus"]
    return {"format": 1, "name": "test", "files": files}


def write(folder: Path, manifest: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for role, data in CONTENT.items():
        (folder / f"{role}.bin").write_bytes(data)
    text = manifest if isinstance(manifest, str) else json.dumps(document() if manifest is None else manifest)
    (folder / "manifest.json").write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "bundle")


@pytest.mark.parametrize("name", ["a\x7fb", "a\x9bb", "a\u202eb", "a\u2028b", "a\nb", "a\ud800", ""])
def test_names_that_could_steer_a_terminal_are_refused(tmp_path: Path, name: str) -> None:
    assert "name" in refused(write(tmp_path / "b", {**document(), "name": name}))


def test_a_name_may_be_of_any_script(tmp_path: Path) -> None:
    name = "Drohne — 无人机 é"
    assert Bundle.open(write(tmp_path / "b", {**document(), "name": name})).name == name


@pytest.mark.parametrize("path", ["\ud800", "a\0b", "x" * 256])
def test_paths_that_no_file_can_have_are_refused(tmp_path: Path, path: str) -> None:
    found = document()
    found["files"]["mllm"]["path"] = path
    assert refused(write(tmp_path / "b", found))


@pytest.mark.parametrize("version", ["a\0b", "../v1", "\ud800", "", "v1\n"])
def test_a_prompt_version_is_a_plain_word(tmp_path: Path, version: str) -> None:
    assert "prompt_template" in refused(write(tmp_path / "b", {**document(), "prompt_template": version}))


def refused(path: Path, verify: bool = True) -> str:
    with pytest.raises(BadInput) as e:
        Bundle.open(path, verify=verify)
    message = str(e.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_a_bundle_opens(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.name == "test"
    assert bundle.file("mllm") == folder / "mllm.bin"
    assert bundle.file("depth") is None
    assert bundle.need("mmproj") == folder / "mmproj.bin"
    with pytest.raises(BadInput, match=r"has no depth \(it has detector, mllm, mmproj\)"):
        bundle.need("depth")


def test_a_missing_folder_a_file_and_an_empty_folder_are_told_apart(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "is a file, not a folder" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "has no manifest.json" in refused(tmp_path / "empty")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "no format number"),
        ('{"format": 2}', "format 2, needed 1; upgrade hoverlens"),
        ('{"format": 0}', "format 0, needed 1; assemble the bundle again"),
        ('{"format": "one", "name": "x", "files": {}}', "format"),
        ('{"format": 1, "name": "x"}', "files: Field required"),
        ('{"format": 1, "name": "x", "files": {}}', "files"),
        ('{"format": 1, "name": "", "files": {}}', "name"),
    ],
)
def test_an_unusable_manifest_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(write(tmp_path / "b", text))


def test_a_manifest_that_is_not_text_is_one_line(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in refused(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sha256", "0" * 63), ("sha256", "Z" * 64), ("size", -1), ("size", "many"), ("weights", "good"), ("path", 3)],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    manifest = document()
    manifest["files"]["mllm"][field] = value
    assert f"files.mllm.{field}" in refused(write(tmp_path / "b", manifest))


@pytest.mark.parametrize(
    "path",
    ["../secret", "/etc/passwd", "a/../../secret", "", ".", "..", "a\\b", "C:x", "a\0b", "./mllm.bin", "a//b", "a/"],
)
def test_a_path_out_of_the_bundle_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(CONTENT["mllm"])
    manifest = document()
    manifest["files"]["mllm"]["path"] = path
    assert "leaves the bundle or is not in plain form" in refused(write(tmp_path / "b", manifest))


def test_a_link_out_of_the_bundle_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(CONTENT["mllm"])
    (folder / "mllm.bin").unlink()
    (folder / "mllm.bin").symlink_to(tmp_path / "secret")
    assert "is a link out of the bundle" in refused(folder, verify=False)


def test_a_link_inside_the_bundle_and_a_link_to_the_bundle_are_fine(folder: Path, tmp_path: Path) -> None:
    (folder / "mllm.bin").rename(folder / "real.bin")
    (folder / "mllm.bin").symlink_to("real.bin")
    (tmp_path / "link").symlink_to(folder)
    Bundle.open(tmp_path / "link")


def test_a_loop_of_links_is_one_line(folder: Path) -> None:
    (folder / "mllm.bin").unlink()
    (folder / "mllm.bin").symlink_to("mllm.bin")
    assert "mllm file mllm.bin" in refused(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "mmproj.bin").unlink()
    assert "mmproj file mmproj.bin is missing" in refused(folder, verify=False)


def test_a_file_of_another_size_is_refused_without_hashing(folder: Path) -> None:
    (folder / "mllm.bin").write_bytes(b"short")
    assert "mllm file mllm.bin has 5 bytes, needed 12" in refused(folder, verify=False)


def test_a_changed_file_is_refused(folder: Path) -> None:
    (folder / "mllm.bin").write_bytes(b"A text model")
    message = refused(folder)
    assert "mllm file mllm.bin has sha256" in message
    assert f"needed {hashlib.sha256(CONTENT['mllm']).hexdigest()[:16]}" in message
    Bundle.open(folder, verify=False)


def test_a_file_changed_after_it_was_checked_is_noticed(folder: Path) -> None:
    """The memory of earlier checks is not fooled by a restored modification time."""
    Bundle.open(folder)
    path = folder / "mllm.bin"
    before = path.stat()
    path.write_bytes(b"A text model")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused(folder)


def test_an_unchanged_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Bundle.open(folder)

    def never(path: object, progress: object = None) -> str:
        raise AssertionError(f"read {path} again")

    monkeypatch.setattr(digest, "sha256_file", never)
    Bundle.open(folder)


def test_a_damaged_memory_of_checks_is_ignored(folder: Path, cache: Path) -> None:
    Bundle.open(folder)
    for stamp in (cache / "digests").iterdir():
        stamp.write_text("[]")
    Bundle.open(folder)


def test_a_cache_that_cannot_be_written_costs_only_time(folder: Path, cache: Path) -> None:
    cache.write_text("a file, no folder")
    Bundle.open(folder)


def test_verify_reads_everything_and_lists_every_problem(folder: Path) -> None:
    Bundle.open(folder)
    (folder / "detector.bin").unlink()
    (folder / "mllm.bin").write_bytes(b"A text model")
    problems = verify_bundle(folder)
    assert len(problems) == 2
    assert "detector file detector.bin is missing" in problems[0]
    assert "mllm file mllm.bin has sha256" in problems[1]


def test_verify_tells_its_progress(folder: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    assert verify_bundle(folder, lambda *step: steps.append(step)) == []
    total = sum(map(len, CONTENT.values()))
    assert steps[-1] == ("mmproj.bin", total, total)
    assert [s[1] for s in steps] == sorted(s[1] for s in steps)


def test_the_digest_is_stable_across_moves_names_and_dates(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    manifest = document()
    manifest["name"] = "other"
    manifest["created"] = "2030-01-01T00:00:00+00:00"
    manifest["note"] = "hello"
    manifest["files"] = dict(reversed(manifest["files"].items()))
    (moved / "manifest.json").write_text(json.dumps(manifest))
    assert Bundle.open(moved).sha256 == Bundle.open(folder).sha256


@pytest.mark.parametrize(
    ("key", "value"),
    [("labels", ["car", "van"]), ("family", "yolox"), ("preprocessing", {"size": [1, 1]}), ("kind", "metric")],
)
def test_what_changes_an_answer_changes_the_digest(folder: Path, tmp_path: Path, key: str, value: object) -> None:
    manifest = document()
    manifest["files"]["detector"][key] = value
    assert Bundle.open(write(tmp_path / "b", manifest)).sha256 != Bundle.open(folder).sha256


def test_the_digest_changes_only_on_purpose(folder: Path) -> None:
    frozen = "0e4670d25e27413815406dd2e89c72d37ba048e8eb447d7ce4e60b236d49d717"
    assert Bundle.open(folder).sha256 == frozen


def test_fields_of_a_newer_writer_are_kept(tmp_path: Path) -> None:
    manifest = document()
    manifest["later"] = {"a": 1}
    manifest["files"]["mllm"]["later"] = True
    bundle = Bundle.open(write(tmp_path / "b", manifest))
    again = json.loads(bundle.manifest.to_json())
    assert again["later"] == {"a": 1}
    assert again["files"]["mllm"]["later"] is True


def test_info_is_json_and_description_says_random(folder: Path, tmp_path: Path) -> None:
    manifest = document()
    manifest["files"]["mllm"]["weights"] = "random"
    bundle = Bundle.open(write(tmp_path / "b", manifest))
    info = json.loads(json.dumps(bundle_info(bundle)))
    assert info["random"] == ["mllm"]
    assert info["size"] == sum(map(len, CONTENT.values()))
    assert info["accuracy"] is None
    text = describe_bundle(bundle)
    assert "RANDOM WEIGHTS" in text
    assert "2 classes" in text


def test_the_bundle_named_wins_then_the_environment_then_the_random_one(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoverlens.runtime.bundle.nano_bundle_dir", lambda: tmp_path / "nano")
    with pytest.raises(BadInput, match=r"no bundle: .*make venv"):
        find_bundle()
    random = write(cache / "bundles" / "random")
    assert find_bundle().path == random
    nano = write(tmp_path / "nano")
    assert find_bundle().path == nano
    monkeypatch.setenv("HOVERLENS_BUNDLE", str(folder))
    assert find_bundle().path == folder
    other = write(tmp_path / "other")
    assert find_bundle(other).path == other


def test_a_named_bundle_that_is_bad_is_no_reason_to_take_another(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cache / "bundles" / "random")
    monkeypatch.setenv("HOVERLENS_BUNDLE", str(tmp_path / "gone"))
    with pytest.raises(BadInput, match="does not exist"):
        find_bundle()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_manifest_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    manifest = document()
    where: Any = data.draw(st.sampled_from([manifest, manifest["files"], manifest["files"]["mllm"]]))
    where[data.draw(st.sampled_from([*where, "x"]))] = data.draw(JSON)
    folder = write(tmp_path_factory.mktemp("b"), manifest)
    # Any other exception than a refusal fails the test.
    with contextlib.suppress(BadInput):
        Bundle.open(folder, verify=False)
