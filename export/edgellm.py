"""From a Hugging Face folder to TensorRT Edge-LLM's ONNX, by its own exporter.

Its pins clash with ours, so it lives in an environment of its own in the cache folder, made only when asked for.
The engines are built on the board, by Edge-LLM's tools there; the commands stand in ``export.json``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.digest import remembered_sha256, sha256_file
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.files import atomic_write_text
from ..runtime.locks import path_lock
from ..runtime.paths import cache_dir, make_cache_dir
from .checkpoint import Checkpoint, open_checkpoint
from .staging import check_output, check_space, staged

VERSION = "0.11.0"
SIDECAR = "export.json"
WHAT = "exported model"

#: What its exporter was tried with here; requests, datasets and pillow are imported by it but not asked for.
PINS = (
    f"tensorrt-edgellm=={VERSION}",
    "nvidia-modelopt==0.45.0",
    "torch==2.13.0",
    "transformers==5.14.1",
    "onnx==1.19.0",
    "onnxscript==0.7.1",
    "onnx-graphsurgeon==0.6.1",
    "requests",
    "datasets",
    "pillow",
)

#: Architectures whose export was run; others may work.
TRIED = ("Qwen3VLForConditionalGeneration",)

_READY = "ready.json"
_NEEDED_BYTES = 3_000_000_000
_TEXT_HEAD = (64, 128)
_VISION_HEADS = (64, 72, 80)

Stage = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """A Python with Edge-LLM's exporter."""

    path: Path

    @property
    def exporter(self) -> Path:
        return self.path / "bin" / "tensorrt-edgellm-export"


def find_environment() -> Environment | None:
    """The environment in the cache if it is complete and has the pinned packages."""
    path = cache_dir() / "edgellm" / "venv"
    try:
        ready = json.loads((path / _READY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = Environment(path)
    return found if ready == {"pins": list(PINS)} and os.access(found.exporter, os.X_OK) else None


def ensure_environment(install: bool, stage: Stage = lambda _: None) -> Environment:
    """The environment, made first if that was asked for.

    Raises:
        HoverlensError: It is not there and ``install`` is off, this Python cannot have it, or installing failed.
    """
    found = find_environment()
    if found is not None:
        return found
    path = cache_dir() / "edgellm" / "venv"
    python = _python()
    if not install:
        raise HoverlensError(
            f"TensorRT Edge-LLM's exporter is not installed; --install puts it into {path} (a download of about 0.5 "
            "GB, 1 GB more where torch comes with CUDA), apart from hoverlens's own packages"
        )
    if python is None:
        raise HoverlensError(
            f"tensorrt-edgellm {VERSION} is made for Python 3.11 on x86_64 Linux; run this with one on the path"
        )
    with path_lock(path):
        found = find_environment()
        if found is not None:
            return found
        base = make_cache_dir("edgellm")
        check_space(base, _NEEDED_BYTES, "TensorRT Edge-LLM's exporter")
        if not (path / "bin" / "python").exists():
            shutil.rmtree(path, ignore_errors=True)
            stage(f"making {path}")
            _run([python, "-m", "venv", str(path)], "cannot make a virtual environment")
        stage(f"installing tensorrt-edgellm {VERSION} (a large download the first time)")
        pip = [str(path / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, *PINS], f"cannot install tensorrt-edgellm {VERSION}")
        atomic_write_text(path / _READY, json.dumps({"pins": list(PINS)}) + "\n")
    found = find_environment()
    if found is None:
        raise HoverlensError(f"{path} has no tensorrt-edgellm-export after installing; remove it and try again")
    return found


def export_edgellm(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    install: bool = False,
    force: bool = False,
    image_tokens: tuple[int, int] = (64, 1024),
    context: int = 4096,
    stage: Stage = lambda _: None,
) -> dict[str, Any]:
    """Exports language model and visual encoder as ONNX.

    Args:
        source: Folder of a checkpoint.
        out: Folder to make, with ``llm/``, ``visual/`` and ``export.json``.
        install: Install the exporter first where it is missing.
        force: Make it even if it is up to date.
        image_tokens: Least and most visual tokens that the engine is to take.
        context: Most tokens that it is to hold.
        stage: Called with a line for people when a stage begins.

    Returns:
        The document of ``export.json`` with ``path`` and ``made``.

    Raises:
        BadInput: The folder cannot be exported.
        HoverlensError: The exporter is missing or failed.
    """
    target = check_output(out, SIDECAR, WHAT)
    stage("checking the checkpoint")
    checkpoint = open_checkpoint(source)
    _check_heads(checkpoint)
    recipe = {
        "maker": "export mllm --to edgellm 1",
        "pins": list(PINS),
        "image_tokens": list(image_tokens),
        "context": context,
        "sources": {f: remembered_sha256(checkpoint.path / f) for f in checkpoint.files},
    }
    if not force and (before := _up_to_date(target, recipe)) is not None:
        return {"path": str(target), "made": False, **before}
    environment = ensure_environment(install, stage)
    check_space(target.parent, int(2.2 * checkpoint.n_params) + (64 << 20), f"exporting {checkpoint.path.name}")
    with staged(target, SIDECAR, WHAT, "edgellm") as (work, fresh):
        links = work / "source"
        shutil.rmtree(links, ignore_errors=True)
        links.mkdir()
        for file in checkpoint.files:
            (links / file).symlink_to(checkpoint.path / file)
        stage("exporting language model and visual encoder with TensorRT Edge-LLM")
        command = [str(environment.exporter), str(links), str(fresh), "--dtype", "float16"]
        _run(command, f"TensorRT Edge-LLM cannot export {checkpoint.path}")
        missing = [p for p in ("llm/model.onnx", "visual/model.onnx") if not (fresh / p).is_file()]
        if missing:
            raise HoverlensError(
                f"TensorRT Edge-LLM wrote no {missing[0]}; {checkpoint.architecture} may not be supported"
            )
        files = {
            str(p.relative_to(fresh)): {"sha256": sha256_file(p), "size": p.stat().st_size}
            for p in sorted(fresh.rglob("*"))
            if p.is_file()
        }
        document = {
            "format": 1,
            "architecture": checkpoint.architecture,
            "n_params": checkpoint.n_params,
            "precision": "fp16",
            "files": files,
            "board": {"commands": list(board_commands(image_tokens, context)), "run_on_a_board": False},
            "recipe": recipe,
        }
        atomic_write_text(fresh / SIDECAR, json.dumps(document, indent=2) + "\n")
    return {"path": str(target), "made": True, **document}


def board_commands(image_tokens: tuple[int, int], context: int) -> tuple[str, ...]:
    """What builds the engines on the board, with the tools of Edge-LLM's own build there; not run on a board yet."""
    least, most = image_tokens
    return (
        f"llm_build --onnxDir llm --engineDir engines/llm --maxBatchSize 1 --maxInputLen {context} "
        f"--maxKVCacheCapacity {context}",
        f"visual_build --onnxDir visual --engineDir engines/visual --minImageTokens {least} --maxImageTokens {most} "
        f"--maxImageTokensPerImage {most}",
    )


def describe_edgellm(made: Mapping[str, Any]) -> str:
    """The result for people."""
    size = sum(entry["size"] for entry in made["files"].values())
    lines = [f"{'made' if made['made'] else 'up to date:'} {made['path']} ({size / 1e6:.1f} MB)"]
    lines.append("on the board, in that folder, with Edge-LLM's tools built there (not tried on a board):")
    lines += [f"  {command}" for command in made["board"]["commands"]]
    return "\n".join(lines)


def _check_heads(checkpoint: Checkpoint) -> None:
    """Its attention plugins are compiled for the head sizes of real models."""
    text, vision = (checkpoint.config.get(k) or {} for k in ("text_config", "vision_config"))
    head = text.get("head_dim")
    if isinstance(head, int) and head not in _TEXT_HEAD:
        raise BadInput(
            f"TensorRT Edge-LLM's attention takes heads of {_TEXT_HEAD}, found {head}; export to gguf instead"
        )
    width, heads = vision.get("hidden_size"), vision.get("num_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width // heads not in _VISION_HEADS:
        raise BadInput(
            f"TensorRT Edge-LLM's vision attention takes heads of {_VISION_HEADS}, found {width // heads}; export to "
            "gguf instead"
        )


def _up_to_date(target: Path, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        document = json.loads((target / SIDECAR).read_text(encoding="utf-8"))
        if document["recipe"] != recipe:
            return None
        for name, entry in document["files"].items():
            if remembered_sha256(target / name) != entry["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(document)


def _python() -> str | None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return None
    return sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")


def _run(command: list[str], failed: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command,
        # From a checkout our kernels/ would shadow the package that transformers looks for.
        cwd=cache_dir(),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if re.search(r"\w", line)]
        raise HoverlensError(f"{failed}: {lines[-1][:300] if lines else f'exit status {done.returncode}'}")
