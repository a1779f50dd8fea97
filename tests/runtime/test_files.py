"""Outputs are whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.files import atomic_write_bytes, check_writable, write_json


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_new_files_have_ordinary_permissions(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        atomic_write_bytes(tmp_path / "a", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(HoverlensError, match="No space left") as error:
        atomic_write_bytes(path, b"new")
    assert error.value.exit_status == 1
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_write_bytes(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", "missing/x", ".", "x" * 256, "a\0b"])
def test_places_that_cannot_be_written_are_found_before_the_work(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}" if name else ""
    with pytest.raises(BadInput, match="cannot write the trace"):
        check_writable(path, "the trace")


def test_json_survives_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "a.json", {"file": name, "word": "café"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"file": name, "word": "café"}


def test_json_never_holds_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_devices_and_pipes_are_written_into_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic_write_bytes(check_writable(pipe, "the trace"), b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_links_keep_pointing_where_they_did(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    atomic_write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_bytes() == b"new"


def test_a_loop_of_links_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(BadInput, match="symbolic links"):
        check_writable(tmp_path / "a", "the trace")
    with pytest.raises(BadInput, match="symbolic links"):
        atomic_write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    atomic_write_bytes(check_writable(tmp_path / name, "the trace"), b"new")
    assert (tmp_path / name).read_bytes() == b"new"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_no_bad_input() -> None:
    with pytest.raises(HoverlensError, match="No space left") as error:
        atomic_write_bytes("/dev/full", b"x")
    assert error.value.exit_status == 1


def test_a_deleted_folder_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(BadInput, match="cannot write"):
        atomic_write_bytes("t.jsonl", b"new")
    if os.stat(".").st_nlink == 0:
        with pytest.raises(BadInput, match="was deleted"):
            check_writable("t.jsonl", "the trace")
