"""llama.cpp's own converter, of exactly the revision that will load the file.

The installed llama-cpp-python was built from a source distribution that vendors llama.cpp, converter
included, but installs only the library. The same source distribution is fetched once, checked, and the few
files that the converter needs are kept in ``<cache>/converter/<version>``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..runtime.digest import sha256_file
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.files import atomic_write_text
from ..runtime.locks import path_lock
from ..runtime.paths import make_cache_dir

PACKAGE = "llama-cpp-python"

#: sha256 of the source distributions that this code was tested with.
KNOWN_SHA256 = {
    "0.3.36": "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
}

OUTPUT_TYPES = ("f32", "f16", "bf16", "q8_0")

_NEEDED = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/gguf/", "LICENSE")
_RECORD = "source.json"
_METADATA = "metadata.json"
_MAX_MEMBER = 16 << 20
_MAX_TOTAL = 64 << 20


@dataclass(frozen=True)
class Converter:
    """A converter ready to run.

    Attributes:
        path: Folder with ``convert_hf_to_gguf.py``.
        version: Version of llama-cpp-python that it belongs to.
        sdist_sha256: Digest of the source distribution that it was taken from.
        known: The digest is one that this code was tested with; otherwise it was recorded at first use.
    """

    path: Path
    version: str
    sdist_sha256: str
    known: bool


def installed_version() -> str:
    """Version of the installed llama-cpp-python.

    Raises:
        HoverlensError: It is not installed.
    """
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise HoverlensError(
            f"{PACKAGE} is not installed, so the converter's revision is unknown; run `pip install {PACKAGE}`"
        ) from None


def ensure_converter(version: str | None = None) -> Converter:
    """Returns the cached converter, fetching it first if it is missing or damaged.

    Args:
        version: Version of llama-cpp-python; the installed one by default.

    Raises:
        HoverlensError: It cannot be fetched or does not have the recorded digest.
    """
    version = version or installed_version()
    base = make_cache_dir("converter")
    target = base / version
    cached = _cached(target, version)
    if cached is not None:
        return cached
    with path_lock(target):
        cached = _cached(target, version)
        if cached is not None:
            return cached
        with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=base) as scratch:
            by_hand = base / f"llama_cpp_python-{version}.tar.gz"
            sdist = by_hand if by_hand.is_file() else _download(version, Path(scratch), by_hand)
            digest = _check_digest(sdist, version)
            fresh = Path(scratch) / "fresh"
            files = _extract(sdist, fresh)
            record = {"version": version, "sdist_sha256": digest, "files": files}
            atomic_write_text(fresh / _RECORD, json.dumps(record, indent=1) + "\n")
            if target.exists():
                shutil.rmtree(target)
            os.replace(fresh, target)
    cached = _cached(target, version)
    if cached is None:
        raise HoverlensError(f"converter in {target} is incomplete after extraction; remove it and run again")
    return cached


def run_converter(
    hf_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    mmproj: bool = False,
    outtype: str = "f16",
    model_name: str | None = None,
    metadata: Mapping[str, object] | None = None,
    pre_tokenizer: str | None = None,
    converter: Converter | None = None,
) -> Path:
    """Converts a Hugging Face model folder to one GGUF file.

    Args:
        hf_dir: Folder with config.json, the tokenizer's files and safetensors.
        out: File to write; it appears only when complete.
        mmproj: Write the vision encoder and projector instead of the text model.
        outtype: One of :data:`OUTPUT_TYPES`.
        model_name: ``general.name`` in the file; the folder's name by default.
        metadata: More ``general.*`` keys, such as ``general.license`` and ``general.tags``.
        pre_tokenizer: Name of llama.cpp's pre-tokenizer for a vocabulary that its converter does not know.
            Only right if the tokenizer splits text with that pre-tokenizer's pattern.
        converter: Use this one instead of the installed version's.

    Raises:
        BadInput: ``hf_dir`` is no model folder, or ``outtype`` is unknown.
        HoverlensError: The conversion failed; the message ends with the converter's last line.
    """
    convert_pair(
        hf_dir,
        mllm=None if mmproj else out,
        mmproj=out if mmproj else None,
        outtype=outtype,
        model_name=model_name,
        metadata=metadata,
        pre_tokenizer=pre_tokenizer,
        converter=converter,
    )
    return Path(out)


def convert_pair(
    hf_dir: str | os.PathLike[str],
    *,
    mllm: str | os.PathLike[str] | None,
    mmproj: str | os.PathLike[str] | None,
    outtype: str = "f16",
    model_name: str | None = None,
    metadata: Mapping[str, object] | None = None,
    pre_tokenizer: str | None = None,
    converter: Converter | None = None,
) -> None:
    """:func:`run_converter` for text model and projector in one process, which halves the start-up time."""
    source = Path(hf_dir)
    if not (source / "config.json").is_file():
        raise BadInput(f"{source} is no Hugging Face model folder: it has no config.json")
    if outtype not in OUTPUT_TYPES:
        raise BadInput(f"unknown output type {outtype!r}; choose one of {', '.join(OUTPUT_TYPES)}")
    missing = [m for m in ("torch", "transformers", "safetensors") if importlib.util.find_spec(m) is None]
    if missing:
        raise HoverlensError(
            f"llama.cpp's converter needs {' and '.join(missing)}; run `pip install 'hoverlens[export]'`"
        )
    converter = converter or ensure_converter()
    common = [str(source.resolve()), "--outtype", outtype]
    if model_name:
        common += ["--model-name", model_name]
    if metadata:
        common += ["--metadata", _METADATA]
    jobs: list[list[str]] = []
    outputs: list[tuple[Path, Path]] = []
    for out, extra in ((mllm, ()), (mmproj, ("--mmproj",))):
        if out is None:
            continue
        target = Path(out).absolute()
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        outputs.append((part, target))
        jobs.append([*common, "--outfile", str(part), *extra])
    try:
        _run(converter, jobs, pre_tokenizer, source, metadata)
        for part, target in outputs:
            os.replace(part, target)
    finally:
        for part, _ in outputs:
            part.unlink(missing_ok=True)


def _run(
    converter: Converter,
    jobs: Sequence[list[str]],
    pre_tokenizer: str | None,
    source: Path,
    metadata: Mapping[str, object] | None,
) -> None:
    entry = Path(__file__).with_name("_convert_entry.py")
    spec = json.dumps({"converter": str(converter.path), "pre_tokenizer": pre_tokenizer, "jobs": jobs})
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("NO_LOCAL_GGUF", None)
    # From a checkout the working folder would otherwise be importable, our kernels/ included.
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as empty:
        (Path(empty) / _METADATA).write_text(json.dumps(metadata or {}))
        done = subprocess.run(
            [sys.executable, str(entry), spec],
            cwd=empty,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    if done.returncode != 0:
        raise HoverlensError(f"llama.cpp's converter failed on {source}: {_last_line(done.stdout)}")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it wrote nothing"


def _cached(target: Path, version: str) -> Converter | None:
    try:
        record = json.loads((target / _RECORD).read_text())
        files: dict[str, str] = record["files"]
        for name, digest in files.items():
            if hashlib.sha256((target / name).read_bytes()).hexdigest() != digest:
                return None
        sdist = str(record["sdist_sha256"])
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return Converter(target, version, sdist, known=KNOWN_SHA256.get(version) == sdist)


def _download(version: str, scratch: Path, by_hand: Path) -> Path:
    """Lets pip fetch the source distribution, so that its index, proxy and certificate settings hold.

    pip asks the distribution for its metadata but compiles nothing. With a known digest it checks the file
    before it runs anything from it.
    """
    requirement = f"{PACKAGE}=={version}"
    known = KNOWN_SHA256.get(version)
    if known:
        requirement += f" --hash=sha256:{known}"
    listed = scratch / "requirements.txt"
    listed.write_text(requirement + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", PACKAGE, "--dest", str(scratch), "-r", str(listed)]
    done = subprocess.run(
        command,
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    found = list(scratch.glob("llama_cpp_python-*.tar.gz"))
    if done.returncode != 0 or len(found) != 1:
        raise HoverlensError(
            f"cannot fetch llama.cpp's converter ({_last_line(done.stdout)}); go online once, or put the source "
            f"distribution of {PACKAGE} {version} at {by_hand}"
        )
    return found[0]


def _check_digest(sdist: Path, version: str) -> str:
    digest = sha256_file(sdist)
    known = KNOWN_SHA256.get(version)
    if known is not None and digest != known:
        raise HoverlensError(f"{sdist} has sha256 {digest[:16]}.., needed {known[:16]}..; remove it and fetch it again")
    return digest


def _extract(sdist: Path, target: Path) -> dict[str, str]:
    """Writes the needed files and returns their digests by relative name.

    Only the bytes of regular files are taken, to paths built here from checked names: links, devices, modes
    and absolute or climbing names in the archive have no effect.
    """
    files: dict[str, str] = {}
    total = 0
    try:
        with tarfile.open(sdist, "r:gz") as tar:
            for member in tar:
                name = _needed(member.name)
                if name is None or not member.isreg():
                    continue
                total += member.size
                stream = tar.extractfile(member)
                if stream is None or member.size > _MAX_MEMBER or total > _MAX_TOTAL:
                    raise HoverlensError(f"{sdist} has an implausible member {member.name}; fetch it again")
                data = stream.read()
                out = target / name
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_bytes(data)
                files[name] = hashlib.sha256(data).hexdigest()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as e:
        raise HoverlensError(f"cannot unpack {sdist}: {e}; remove it and fetch it again") from None
    if "convert_hf_to_gguf.py" not in files or not any(f.startswith("gguf-py/") for f in files):
        raise HoverlensError(f"{sdist} holds no llama.cpp converter; needed vendor/llama.cpp/convert_hf_to_gguf.py")
    return files


def _needed(name: str) -> str | None:
    """The path below vendor/llama.cpp if the converter needs this member, else None."""
    parts = PurePosixPath(name).parts
    if len(parts) < 4 or parts[1:3] != ("vendor", "llama.cpp") or ".." in parts or name.startswith("/"):
        return None
    relative = "/".join(parts[3:])
    wanted = any(relative.startswith(n) if n.endswith("/") else relative == n for n in _NEEDED)
    return relative if wanted and "\\" not in relative else None
