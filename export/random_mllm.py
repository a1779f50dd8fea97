"""A multimodal model with random weights and Qwen3-VL's real architecture, made on the spot in seconds.

Its answers mean nothing; everything else about it is real: tokenizer, chat template, vision encoder with
deepstack, M-RoPE, the file formats. So it proves and measures all that does not depend on trained weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.bundle import Bundle
from ..runtime.digest import sha256_file
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.gguf import read_gguf_header
from ..runtime.locks import path_lock
from ..runtime.manifest import FileEntry, Manifest
from ..runtime.paths import random_bundle_dir
from . import qwen3vl, vocabulary
from .assemble import (
    RANDOM_MAX_TOKENS,
    RANDOM_TAG,
    check_replaceable,
    gguf_facts,
    new_bundle,
    tool_versions,
    write_manifest,
)
from .converter import OUTPUT_TYPES, convert_pair, installed_version
from .random_weights import write_safetensors

DEFAULT_PRESET = "10m"


@dataclass(frozen=True)
class Preset:
    """Sizes, and which vocabulary they go with."""

    sizes: qwen3vl.Sizes
    real_vocabulary: bool
    summary: str


PRESETS = {
    "tiny": Preset(
        qwen3vl.Sizes(
            hidden=128,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=64,
            intermediate=384,
            vision_hidden=128,
            vision_depth=4,
            vision_heads=2,
            vision_intermediate=384,
            deepstack=(1, 2, 3),
            vocabulary=2048,
        ),
        real_vocabulary=False,
        summary="for unit tests",
    ),
    "10m": Preset(
        qwen3vl.Sizes(
            hidden=256,
            layers=6,
            heads=4,
            kv_heads=2,
            head_dim=64,
            intermediate=640,
            vision_hidden=192,
            vision_depth=4,
            vision_heads=3,
            vision_intermediate=768,
            deepstack=(1, 2, 3),
            vocabulary=4096,
        ),
        real_vocabulary=False,
        summary="the default: text 6 layers of 256",
    ),
    "159m": Preset(
        qwen3vl.Sizes(
            hidden=1024,
            layers=12,
            heads=16,
            kv_heads=8,
            head_dim=64,
            intermediate=3072,
            vision_hidden=192,
            vision_depth=4,
            vision_heads=3,
            vision_intermediate=768,
            deepstack=(1, 2, 3),
            vocabulary=4096,
        ),
        real_vocabulary=False,
        summary="text 12 layers of 1024, for timing",
    ),
    "2b": Preset(
        qwen3vl.QWEN3_VL_2B,
        real_vocabulary=True,
        summary="Qwen3-VL-2B's sizes and vocabulary, for memory and timing",
    ),
}


def write_checkpoint(folder: Path, preset: str, seed: int) -> None:
    """Writes a Hugging Face model folder: config, tokenizer, weights."""
    chosen = PRESETS[preset]
    if chosen.real_vocabulary:
        tokenizer = vocabulary.qwen_tokenizer()
    else:
        tokenizer = vocabulary.train_small_tokenizer(chosen.sizes.vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.write_tokenizer(folder, tokenizer, chosen.sizes.context)
    config = qwen3vl.config(chosen.sizes, vocabulary.token_ids(tokenizer))
    for name, document in (
        ("config.json", config),
        ("preprocessor_config.json", qwen3vl.preprocessor_config()),
    ):
        (folder / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", qwen3vl.shapes(chosen.sizes), seed)


def write_gguf_pair(folder: Path, checkpoint: Path, preset: str, outtype: str) -> None:
    """Converts a checkpoint to ``mllm.gguf`` and ``mmproj.gguf``."""
    convert_pair(
        checkpoint,
        mllm=folder / "mllm.gguf",
        mmproj=folder / "mmproj.gguf",
        outtype=outtype,
        model_name=f"hoverlens random {preset}",
        metadata={
            "general.description": "Random weights: the answers mean nothing.",
            "general.tags": [RANDOM_TAG],
        },
        # The converter knows Qwen's own vocabulary, and so proves that it was rebuilt right.
        pre_tokenizer=None if PRESETS[preset].real_vocabulary else vocabulary.PRE_TOKENIZER,
    )


def make_random_bundle(
    out: str | os.PathLike[str] | None = None,
    *,
    preset: str = DEFAULT_PRESET,
    seed: int = 0,
    outtype: str = "f16",
    force: bool = False,
) -> tuple[Bundle, bool]:
    """Makes a bundle whose MLLM has random weights, unless the same one is there already.

    Args:
        out: Its folder; by default a place in the cache that goes with the other arguments.
        preset: One of :data:`PRESETS`.
        seed: The same seed gives the same files, byte for byte, with the same llama-cpp-python.
        outtype: Type of the large weights: ``f16``, ``f32`` or ``q8_0``. With f32 the values are those of f16.
        force: Make it even if it is up to date.

    Returns:
        The bundle, and whether it was made now.

    Raises:
        BadInput: An unknown preset or type, or ``out`` holds something else.
        HoverlensError: The converter is missing or failed, or writing failed.
    """
    if preset not in PRESETS:
        raise BadInput(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    if outtype not in OUTPUT_TYPES:
        raise BadInput(f"unknown output type {outtype!r}; choose one of {', '.join(OUTPUT_TYPES)}")
    target = Path(out) if out is not None else _place(preset, seed, outtype)
    recipe = _recipe(preset, seed, outtype)
    check_replaceable(target.expanduser().absolute())
    # One lock over the check and the making, so that a second process waits and then finds it up to date.
    with path_lock(f"{target.expanduser().absolute()}/recipe"):
        if not force and (bundle := _up_to_date(target, recipe)) is not None:
            return bundle, False
        with new_bundle(target) as folder:
            with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder.parent) as scratch:
                checkpoint = Path(scratch) / f"random-{preset}"
                write_checkpoint(checkpoint, preset, seed)
                write_gguf_pair(folder, checkpoint, preset, outtype)
            write_manifest(folder, _manifest(folder, preset, recipe))
        return Bundle.open(target), True


def _place(preset: str, seed: int, outtype: str) -> Path:
    default = random_bundle_dir()
    name = default.name
    name += "" if preset == DEFAULT_PRESET else f"-{preset}"
    name += "" if outtype == "f16" else f"-{outtype}"
    name += "" if seed == 0 else f"-seed{seed}"
    return default.with_name(name)


def _recipe(preset: str, seed: int, outtype: str) -> dict[str, Any]:
    return {
        "maker": "random_mllm",
        "code": _code_digest(),
        "preset": preset,
        "seed": seed,
        "outtype": outtype,
        "converter": installed_version(),
    }


def _code_digest() -> str:
    """Stands for the code that decides every byte, so that a bundle made by older code is made again."""
    digest = hashlib.sha256()
    for name in ("qwen3vl", "random_mllm", "random_weights", "vocabulary"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _up_to_date(target: Path, recipe: dict[str, Any]) -> Bundle | None:
    try:
        bundle = Bundle.open(target)
    except BadInput:
        return None
    return bundle if bundle.manifest.recipe == recipe else None


def _manifest(folder: Path, preset: str, recipe: dict[str, Any]) -> Manifest:
    entries = {}
    for role in ("mllm", "mmproj"):
        path = folder / f"{role}.gguf"
        facts = gguf_facts(read_gguf_header(path))
        facts["licence"] = "Apache-2.0"
        facts["source"] = f"hoverlens.export.random_mllm --preset {preset} --seed {recipe['seed']}"
        entries[role] = FileEntry(path=path.name, sha256=sha256_file(path), size=path.stat().st_size, **facts)
    # No date: the same recipe gives the same manifest.
    return Manifest(
        name="random" if preset == DEFAULT_PRESET else f"random-{preset}",
        note="The MLLM has RANDOM weights: its answers mean nothing. For demonstrations, tests and timing.",
        files=entries,
        tools=tool_versions("transformers", "tokenizers"),
        image_max_tokens=RANDOM_MAX_TOKENS,
        recipe=recipe,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m hoverlens.export.random_mllm``"""
    parser = argparse.ArgumentParser(
        prog="python -m hoverlens.export.random_mllm",
        description="Makes a bundle whose multimodal model has Qwen3-VL's architecture and random weights.",
        epilog="presets: " + "; ".join(f"{name}: {p.summary}" for name, p in PRESETS.items()),
    )
    parser.add_argument("-o", "--out", metavar="DIR", help="the bundle's folder (default: in the cache)")
    parser.add_argument("--preset", choices=list(PRESETS), default=DEFAULT_PRESET)
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--outtype", choices=("f16", "f32", "q8_0"), default="f16")
    parser.add_argument("--force", action="store_true", help="make it even if it is up to date")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        bundle, made = make_random_bundle(
            given.out, preset=given.preset, seed=given.seed, outtype=given.outtype, force=given.force
        )
    except HoverlensError as e:
        print(f"random_mllm: {e}", file=sys.stderr)
        return e.exit_status
    except KeyboardInterrupt:
        print("random_mllm: interrupted; nothing was changed", file=sys.stderr)
        return 130
    if made:
        size = sum(e.size for e in bundle.manifest.files.values())
        print(f"made {bundle.path} ({size / 1e6:.1f} MB, {time.perf_counter() - start:.1f} s): random weights")
    else:
        print(f"up to date: {bundle.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
