"""What the runtime promises between load and use: changed files, forked processes, memory-mapped weights."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hoverlens
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.digest import sha256_file
from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.manifest import FileEntry, Manifest
from hoverlens.runtime.mllm.llama_native import Model
from hoverlens.runtime.profiles import Profile
from hoverlens.runtime.runtime import Runtime

pytestmark = pytest.mark.timeout(120)

PICTURE = np.zeros((64, 64, 3), np.uint8)
SMALL: dict[str, Any] = {"name": "small", "n_ctx": 512, "threads": 1, "max_tokens": 4}


@pytest.fixture
def copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))


def ask(runtime: Runtime) -> str:
    return runtime.ask(PICTURE, "Is it?", ["yes", "no"], mode="direct").answer


def change(path: Path) -> None:
    """Another last byte, the same size."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("role", ["mllm", "mmproj"])
def test_a_model_that_changed_since_load_is_not_opened(copy: Path, role: str) -> None:
    with hoverlens.load(copy, Profile(**SMALL)) as runtime:
        change(runtime.bundle.need(role))
        with pytest.raises(BadInput, match=f"{role} file .* has sha256"):
            ask(runtime)


@pytest.mark.parametrize(
    ("role", "use"), [("detector", lambda r: r.detect(PICTURE)), ("depth", lambda r: r.depth(PICTURE))]
)
def test_a_perception_model_that_changed_since_load_is_not_opened(
    tmp_path: Path, role: str, use: Callable[[Runtime], object]
) -> None:
    path = tmp_path / f"{role}.onnx"
    path.write_bytes(b"not opened anyway")
    entry = FileEntry(path=path.name, sha256=sha256_file(path), size=path.stat().st_size)
    (tmp_path / "manifest.json").write_text(Manifest(name="x", files={role: entry}).to_json())
    with hoverlens.load(tmp_path) as runtime:
        change(path)
        with pytest.raises(BadInput, match=f"{role} file .* has sha256"):
            use(runtime)
        path.unlink()
        with pytest.raises(BadInput, match="is missing"):
            use(runtime)


def test_weights_are_mapped_unless_the_profile_says_otherwise(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = Model.__init__

    def look(self: Model, path: Path, gpu_layers: int = -1, use_mmap: bool = True) -> None:
        seen.append(use_mmap)
        real(self, path, gpu_layers, use_mmap)

    monkeypatch.setattr(Model, "__init__", look)
    answers = []
    for mapped in (True, False):
        with hoverlens.load(tiny_bundle, Profile(mmap=mapped, **SMALL)) as runtime:
            answers.append(ask(runtime))
    assert seen == [True, False]
    assert answers[0] == answers[1]


def test_unmapped_weights_survive_a_file_cut_short_in_place(copy: Path) -> None:
    with hoverlens.load(copy, Profile(mmap=False, **SMALL)) as runtime:
        before = ask(runtime)
        os.truncate(runtime.bundle.need("mllm"), 1000)
        assert ask(runtime) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_load_for_itself_even_while_the_parent_answers(tiny_bundle: Bundle) -> None:
    uses: list[Callable[[], object]] = []
    with hoverlens.load(tiny_bundle, Profile(**SMALL)) as runtime:
        before = ask(runtime)
        uses = [lambda: ask(runtime), lambda: runtime.detect(PICTURE), lambda: runtime.depth(PICTURE), runtime.backend]
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with runtime._lock:
                held.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(10)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            told = 0
            for use in uses:
                try:
                    use()
                except HoverlensError as e:
                    told += "before fork" in str(e)
            runtime.close()
            os._exit(100 + told)
        _, status = os.waitpid(child, 0)
        done.set()
        thread.join()
        assert os.waitstatus_to_exitcode(status) == 100 + len(uses)
        assert ask(runtime) == before
