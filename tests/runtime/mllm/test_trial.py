"""Damaged model files end a child process, never the caller's."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hoverlens
from hoverlens.export.assemble import assemble
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.digest import sha256_file
from hoverlens.runtime.doctor import Host, cache_law_check, look_at_board
from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.manifest import MANIFEST
from hoverlens.runtime.mllm import trial
from hoverlens.runtime.profiles import Profile

PICTURE = np.zeros((64, 64, 3), np.uint8)
SMALL = Profile(name="small", n_ctx=512, threads=1, max_tokens=4)

Doctored = Callable[[str, bytes, bytes], Bundle]


@pytest.fixture(autouse=True)
def _fresh_cache(tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOVERLENS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def doctored(tiny_bundle: Bundle, tmp_path: Path) -> Doctored:
    """A copy of the bundle in which bytes of a file's header differ, with a manifest that agrees."""

    def make(role: str, old: bytes, new: bytes) -> Bundle:
        folder = tmp_path / "doctored"
        folder.mkdir()
        files = dict(tiny_bundle.manifest.files)
        for name, entry in files.items():
            data = tiny_bundle.need(name).read_bytes()
            if name == role:
                assert data.count(old) == 1
                assert len(old) == len(new)
                data = data.replace(old, new)
            (folder / entry.path).write_bytes(data)
            files[name] = entry.model_copy(update={"sha256": sha256_file(folder / entry.path)})
        manifest = tiny_bundle.manifest.model_copy(update={"files": files})
        (folder / MANIFEST).write_text(manifest.to_json())
        return Bundle.open(folder)

    return make


CRASHING = ("mmproj", b"v.blk.0.attn_qkv.weight", b"v.blk.0.attn_qkw.weight")


def test_a_model_that_crashes_llama_cpp_is_bad_input_and_the_process_lives(doctored: Doctored) -> None:
    bundle = doctored(*CRASHING)
    for _ in range(2):  # a failure is not remembered as a success
        with (
            hoverlens.load(bundle, SMALL) as runtime,
            pytest.raises(BadInput, match=r"crashes on .*mmproj\.gguf \(SIG") as e,
        ):
            runtime.ask(PICTURE, "Is it?", ["yes", "no"], mode="direct")
        assert "\n" not in str(e.value)
        assert "again" in str(e.value)


def test_the_doctor_survives_a_model_that_crashes_llama_cpp(doctored: Doctored) -> None:
    host = Host()
    (line,) = cache_law_check(str(doctored(*CRASHING).path), deep=False)(host, look_at_board(host))
    assert line.status == "bad"
    assert "crashes on" in line.found


def test_a_pair_that_crashes_llama_cpp_is_not_assembled(doctored: Doctored, tmp_path: Path) -> None:
    bundle = doctored(*CRASHING)
    files: dict[str, Any] = {role: bundle.need(role) for role in ("mllm", "mmproj")}
    with pytest.raises(BadInput, match="crashes on"):
        assemble(tmp_path / "out", **files)
    assert not (tmp_path / "out").exists()


def test_a_projector_of_another_model_is_refused_when_the_bundle_is_loaded(doctored: Doctored) -> None:
    bundle = doctored("mmproj", b"qwen3vl_merger", b"qwen9vl_merger")
    with hoverlens.load(bundle, SMALL) as runtime, pytest.raises(BadInput, match="of another model"):
        runtime.backend()


def test_a_trial_that_went_well_is_remembered(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tiny_bundle.need(role) for role in ("mllm", "mmproj")]
    trial.try_load(*files, "a", "b")

    def none(*_: object, **__: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(subprocess, "run", none)
    trial.try_load(*files, "a", "b")
    with pytest.raises(AssertionError):
        trial.try_load(*files, "a", "c")
    monkeypatch.setattr(trial, "__version__", "other")
    with pytest.raises(AssertionError):
        trial.try_load(*files, "a", "b")


def test_a_trial_without_a_cache_is_made_each_time(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOVERLENS_CACHE", str(tmp_path / "file"))
    trial.try_load(tiny_bundle.need("mllm"), tiny_bundle.need("mmproj"), "a", "b")


@pytest.mark.parametrize(
    ("code", "out", "err", "kind", "words"),
    [
        (-9, "mllm\n", "", HoverlensError, "memory"),
        (-6, "mllm\n", "x\nGGML_ASSERT(a) failed\n\n", BadInput, r"m\.gguf \(SIGABRT: GGML_ASSERT\(a\) failed\)"),
        (-8, "mllm\nmmproj\n", "", BadInput, r"p\.gguf \(SIGFPE\)"),
        (1, "", "Traceback\nImportError: no", HoverlensError, "ImportError: no"),
        (1, "mllm\ntold\n", "no memory; free it", HoverlensError, "^no memory; free it$"),
        (2, "mllm\ntold\n", "not a model; copy it", BadInput, "^not a model; copy it$"),
        (1, "mllm\n", "Traceback\nUnicodeDecodeError: x", BadInput, "UnicodeDecodeError"),
    ],
)
def test_what_a_child_ends_with_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str, kind: type[HoverlensError], words: str
) -> None:
    done = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(kind, match=words) as e:
        trial.try_load("m.gguf", "p.gguf", "a", "b")
    assert type(e.value) is kind
    assert "\n" not in str(e.value)


def test_a_trial_has_a_time_limit(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TIME_LIMIT_S", 0.01)
    with pytest.raises(HoverlensError, match="did not load"):
        trial.try_load(tiny_bundle.need("mllm"), tiny_bundle.need("mmproj"), "a", "b")
