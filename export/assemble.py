"""Putting a bundle together from model files."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..runtime.bundle import Bundle
from ..runtime.engines import Engine, open_engine
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.files import atomic_write_text
from ..runtime.gguf import Array, GGUFHeader
from ..runtime.locks import path_lock
from ..runtime.manifest import FORMAT, MANIFEST, ROLES, Accuracy, FileEntry, Manifest, check_words
from ..runtime.mllm.files import check_pair, check_text_model
from ..runtime.mllm.trial import try_load
from ..runtime.paths import full_path

#: Tag in a GGUF file's ``general.tags`` that says its weights are random.
RANDOM_TAG = "random-weights"

#: Below this many visual tokens real Qwen3-VL models point beside the object.
QWEN3VL_MIN_TOKENS = 1024

#: Random weights see nothing better in a large image, and on a CPU it takes tens of seconds.
RANDOM_MAX_TOKENS = 256

_TOOLS = ("hoverlens", "onnxruntime", "llama-cpp-python")
_CHUNK = 4 << 20

Progress = Callable[[str, int, int], None]


def assemble(
    out: str | os.PathLike[str],
    *,
    detector: str | os.PathLike[str] | None = None,
    labels: str | os.PathLike[str] | Sequence[str] | None = None,
    depth: str | os.PathLike[str] | None = None,
    mllm: str | os.PathLike[str] | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    mllm_thinking: str | os.PathLike[str] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    name: str | None = None,
    note: str = "",
    licences: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
    licence_files: Sequence[str | os.PathLike[str]] = (),
    family: str | None = None,
    detector_preprocessing: Mapping[str, Any] | None = None,
    depth_kind: Literal["metric", "relative"] | None = None,
    depth_preprocessing: Mapping[str, Any] | None = None,
    prompt_template: str | None = None,
    image_min_tokens: int | None = None,
    image_max_tokens: int | None = None,
    accuracy: Accuracy | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Checks model files, copies them into a new bundle and writes its manifest.

    The bundle appears complete or not at all. An older bundle at the same place is replaced.

    Args:
        out: Folder to make. It may exist if it is empty or a bundle.
        detector: ONNX detector of a family that hoverlens decodes.
        labels: Class names for it, a file or a sequence; by default what the model says.
        depth: ONNX depth model.
        mllm: GGUF text model; needs ``mmproj``.
        mmproj: GGUF projector of the same checkpoint.
        mllm_thinking: GGUF text model for long thought, which fits the same projector.
        calibration: JSON that turns scores into probabilities.
        name: For people; the folder's name by default.
        note: A sentence for whoever opens the bundle.
        licences: Role to licence, over what the files say.
        sources: Role to source checkpoint; the files' names by default.
        licence_files: Texts to copy into ``licences/``.
        family: How the detector's outputs are read, over what its graph suggests.
        detector_preprocessing: Over the family's usual preprocessing.
        depth_kind: Whether the depth model answers metres.
        depth_preprocessing: Over the depth model's usual preprocessing.
        prompt_template: Version of the prompts that the MLLM was made for.
        image_min_tokens: Least visual tokens for good grounding; 1024 for real Qwen3-VL models.
        image_max_tokens: Most visual tokens of an image; :data:`RANDOM_MAX_TOKENS` for random weights.
        accuracy: The check that the files passed together.
        progress: Called with (file, bytes copied of all files, bytes of all files).

    Raises:
        BadInput: A file is not what its role needs or makes llama.cpp crash, files do not fit, or ``out`` holds
            something else.
        HoverlensError: Copying failed.
    """
    given = {
        "detector": detector,
        "depth": depth,
        "mllm": mllm,
        "mmproj": mmproj,
        "mllm_thinking": mllm_thinking,
        "calibration": calibration,
    }
    files = {role: full_path(path) for role, path in given.items() if path is not None}
    name = name or full_path(out).name or "bundle"
    check_words(name, prompt_template)
    _check_roles(files, labels, licences, sources)
    headers = _check_gguf(files)
    facts: dict[str, dict[str, Any]] = {role: gguf_facts(header) for role, header in headers.items()}
    if "detector" in files:
        facts["detector"] = _detector_facts(files["detector"], labels, family, detector_preprocessing)
    if "depth" in files:
        facts["depth"] = _depth_facts(files["depth"], depth_kind, depth_preprocessing)
    if "calibration" in files:
        _check_json(files["calibration"])
    if "mllm" in headers and facts["mllm"]["weights"] == "random":
        image_max_tokens = image_max_tokens or RANDOM_MAX_TOKENS
    elif "mllm" in headers and image_min_tokens is None and image_max_tokens is None:
        architecture = headers["mllm"].architecture or ""
        image_min_tokens = QWEN3VL_MIN_TOKENS if architecture.startswith("qwen3vl") else None

    total = sum(path.stat().st_size for path in files.values())
    done = 0
    with new_bundle(out) as folder:
        entries: dict[str, FileEntry] = {}
        for role, path in files.items():
            target = folder / f"{role}{path.suffix.lower()}"

            def step(n: int, name: str = path.name) -> None:
                nonlocal done
                done += n
                if progress is not None:
                    progress(name, done, total)

            digest = _copy(path, target, step)
            if path.suffix.lower() == ".onnx":
                _check_self_contained(path, target)
            own = dict(facts.get(role, {}))
            own["source"] = (sources or {}).get(role) or own.get("source") or path.name
            own["licence"] = (licences or {}).get(role) or own.get("licence") or "unknown"
            entries[role] = FileEntry(path=target.name, sha256=digest, size=target.stat().st_size, **own)
        if "mllm" in files:
            # Only now are the digests known under which the trial is remembered for the bundle.
            try_load(files["mllm"], files["mmproj"], entries["mllm"].sha256, entries["mmproj"].sha256)
        for text in licence_files:
            (folder / "licences").mkdir(exist_ok=True)
            _copy(Path(text), folder / "licences" / Path(text).name, lambda _: None)
        manifest = Manifest(
            format=FORMAT,
            name=name,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            note=note,
            files=entries,
            tools=tool_versions(),
            prompt_template=prompt_template,
            image_min_tokens=image_min_tokens,
            image_max_tokens=image_max_tokens,
            accuracy=accuracy,
        )
        write_manifest(folder, manifest)
    return Bundle.open(out, verify=False)


def gguf_facts(header: GGUFHeader) -> dict[str, Any]:
    """What a manifest entry says of a GGUF file."""
    tags = header.get("general.tags")
    random = isinstance(tags, Array) and RANDOM_TAG in tags.first
    facts: dict[str, Any] = {"precision": header.quantisation, "weights": "random" if random else "unknown"}
    if isinstance(licence := header.get("general.license"), str):
        facts["licence"] = licence
    if isinstance(name := header.get("general.name"), str):
        facts["source"] = name
    mean, std = header.get("clip.vision.image_mean"), header.get("clip.vision.image_std")
    if isinstance(mean, Array) and isinstance(std, Array):
        facts["preprocessing"] = {
            "mean": [round(float(v), 6) for v in mean.first],
            "std": [round(float(v), 6) for v in std.first],
            "patch": header.get("clip.vision.patch_size"),
            "merge": header.get("clip.vision.spatial_merge_size"),
        }
    return facts


def tool_versions(*names: str) -> dict[str, str]:
    """Installed versions of the packages that a bundle depends on."""
    out = {}
    for package in (*_TOOLS, *names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[package] = importlib.metadata.version(package)
    return out


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes ``manifest.json`` into a bundle's folder."""
    atomic_write_text(folder / MANIFEST, manifest.to_json())


@contextlib.contextmanager
def new_bundle(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields an empty folder beside ``out`` that takes its place when the body ends without an error.

    What an interrupted run left behind is removed by the next one.

    Raises:
        BadInput: ``out`` holds something that is no bundle, or cannot be made.
        HoverlensError: Writing failed.
    """
    target = full_path(out)
    check_replaceable(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make {target.parent}: {e.strerror}; choose another folder") from None
    with path_lock(target):
        for left in target.parent.glob(f".{target.name}.*.part"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
        except OSError as e:
            raise BadInput(f"cannot write in {target.parent}: {e.strerror}; choose another folder") from None
        try:
            fresh = scratch / "new"
            fresh.mkdir()
            yield fresh
            check_replaceable(target)
            if target.exists():
                os.replace(target, scratch / "old")
            os.replace(fresh, target)
        except OSError as e:
            raise HoverlensError(
                f"cannot write bundle {target}: {e.strerror}; nothing was changed there, free space or choose "
                "another folder"
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(target: Path) -> None:
    """Refuses to replace what is no bundle.

    Raises:
        BadInput: ``target`` is a file or a link, or a folder with other things in it.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BadInput(f"{target} exists and is no folder; name another folder with -o")
    if target.is_dir() and not (target / MANIFEST).is_file() and any(target.iterdir()):
        raise BadInput(f"{target} exists and is no bundle, so it is left alone; name another folder with -o")


def _check_roles(
    files: Mapping[str, Path],
    labels: object,
    licences: Mapping[str, str] | None,
    sources: Mapping[str, str] | None,
) -> None:
    if not files:
        raise BadInput("nothing to assemble; give --detector, --depth or --mllm with --mmproj")
    for role, path in files.items():
        if not path.is_file():
            found = "is a folder" if path.is_dir() else "does not exist"
            raise BadInput(f"{role} file {path} {found}; check the path")
    for mapping in (licences, sources):
        unknown = sorted(set(mapping or {}) - set(files))
        if unknown:
            known = ", ".join(ROLES)
            raise BadInput(f"licence or source for {unknown[0]!r}, which was not given; roles are {known}")
    if labels is not None and "detector" not in files:
        raise BadInput("labels without a detector; give --detector, or leave --labels out")
    if ("mllm" in files) != ("mmproj" in files):
        has, lacks = ("mllm", "mmproj") if "mllm" in files else ("mmproj", "mllm")
        raise BadInput(f"{has} without {lacks}, but one cannot see without the other; give --{lacks} as well")
    if "mllm_thinking" in files and "mllm" not in files:
        raise BadInput("mllm_thinking without mllm; give --mllm and --mmproj as well")


def _check_gguf(files: Mapping[str, Path]) -> dict[str, GGUFHeader]:
    headers: dict[str, GGUFHeader] = {}
    if "mllm" in files:
        headers["mllm"], headers["mmproj"] = check_pair(files["mllm"], files["mmproj"])
    if "mllm_thinking" in files:
        check_text_model(files["mllm_thinking"])
        headers["mllm_thinking"], _ = check_pair(files["mllm_thinking"], files["mmproj"])
    return headers


def _detector_facts(
    path: Path,
    labels: str | os.PathLike[str] | Sequence[str] | None,
    family: str | None,
    preprocessing: Mapping[str, Any] | None,
) -> dict[str, Any]:
    from ..runtime.perception.detector import Detector

    with (
        _refused_as(path, "detector"),
        Detector.open(path, labels=labels, family=family, preprocessing=preprocessing) as model,
    ):
        return {
            "family": model.family.name,
            "labels": list(model.names),
            "preprocessing": model.preprocessing.to_dict(),
            **_engine_facts(model.engine, path),
        }


def _depth_facts(
    path: Path,
    kind: Literal["metric", "relative"] | None,
    preprocessing: Mapping[str, Any] | None,
) -> dict[str, Any]:
    from ..runtime.perception.depth import DepthModel

    with _refused_as(path, "depth model"), DepthModel.open(path, kind=kind, preprocessing=preprocessing) as model:
        return {
            "kind": model.kind,
            # Partly told by the file's name, which a bundle does not keep.
            "meaning": model.meaning,
            "preprocessing": model.preprocessing.to_dict(),
            **_engine_facts(model.engine, path),
        }


@contextlib.contextmanager
def _refused_as(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except BadInput as e:
        message = str(e)
        raise BadInput(message if str(path) in message else f"{what} {path}: {message}") from None


def _engine_facts(engine: Engine, path: Path) -> dict[str, Any]:
    dtype = engine.inputs[0].dtype
    # The operator's name stands in the graph as plain text.
    quantised = path.stat().st_size > 0 and _contains(path, b"DequantizeLinear")
    licence = " ".join(engine.metadata.get("license", "").split())[:200]
    return {
        **({"licence": licence} if licence else {}),
        "precision": "int8" if quantised else {"float32": "fp32", "float16": "fp16"}.get(dtype, dtype),
        "inputs": {spec.name: list(spec.shape) for spec in engine.inputs},
    }


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(text) >= 0


def _check_self_contained(path: Path, copy: Path) -> None:
    """An ONNX file may keep weights in files beside it, which the copy does not have."""
    try:
        open_engine(copy, providers=["CPUExecutionProvider"]).close()
    except HoverlensError:
        raise BadInput(
            f"{path} needs files beside it (external weights); save it as one .onnx file and assemble again"
        ) from None


def _check_json(path: Path) -> None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadInput(f"calibration {path} is no JSON object; make it with `hoverlens calibrate`")


def _copy(source: Path, target: Path, step: Callable[[int], None]) -> str:
    """Copies a file and returns its sha256."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
            step(len(chunk))
    return digest.hexdigest()
