"""Checks on a text model and its projector that need only their headers."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import BadInput
from ..gguf import Array, GGUFHeader, read_gguf_header

#: Projectors that a text model can read, for the architectures where a wrong one could fit by size alone.
_PROJECTORS = {
    "qwen2vl": ("qwen2vl_merger", "qwen2.5vl_merger"),
    "qwen3vl": ("qwen3vl_merger",),
    "qwen3vlmoe": ("qwen3vl_merger",),
}


def check_text_model(path: str | os.PathLike[str]) -> GGUFHeader:
    """Reads the header of a text model.

    Raises:
        BadInput: Not a GGUF file, cut short, a projector, one part of several, or without what llama.cpp needs.
    """
    header = _whole(path)
    if header.is_projector:
        raise BadInput(f"{path} is a projector (mmproj), needed a text model; give it as the mmproj instead")
    for key in ("general.architecture", "{arch}.block_count", "{arch}.embedding_length", "tokenizer.ggml.model"):
        if header.get(key) is None:
            name = key.replace("{arch}", header.architecture or "ARCH")
            raise BadInput(f"{path} has no {name}, so it is no text model; convert it with llama.cpp's converter")
    parts = header.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise BadInput(f"{path} is one part of several; join them with `llama-gguf-split --merge` first")
    return header


def check_projector(path: str | os.PathLike[str]) -> GGUFHeader:
    """Reads the header of a projector.

    Raises:
        BadInput: Not a GGUF file, cut short, no projector, or one that does not see.
    """
    header = _whole(path)
    if not header.is_projector:
        raise BadInput(
            f"{path} is a {header.architecture or 'model'} without vision, needed a projector (mmproj); "
            "convert it with --mmproj"
        )
    if header.get("clip.has_vision_encoder") is not True:
        raise BadInput(f"{path} has no vision encoder, needed one; give the model's vision mmproj")
    return header


def check_pair(mllm: str | os.PathLike[str], mmproj: str | os.PathLike[str]) -> tuple[GGUFHeader, GGUFHeader]:
    """Checks that a projector was made for a text model.

    The projector's output for a token is the text model's embedding, and once more for each deepstack layer.

    Raises:
        BadInput: One of them cannot be used, or they do not fit.
    """
    text, vision = check_text_model(mllm), check_projector(mmproj)
    kinds = _PROJECTORS.get(text.architecture or "")
    kind = vision.get("clip.projector_type") or vision.get("clip.vision.projector_type")
    if kinds and kind is not None and kind not in kinds:
        raise _misfit(mllm, mmproj, f"a {kind} projector", f"{' or '.join(kinds)} for {text.architecture}")
    width = text.get("{arch}.embedding_length")
    found = vision.get("clip.vision.projection_dim")
    if isinstance(found, int) and found and found != width:
        raise _misfit(mllm, mmproj, f"an output of {found}", f"the text model's {width}")
    layers = text.get("{arch}.n_deepstack_layers", 0)
    flags = vision.get("clip.vision.is_deepstack_layers")
    deep = sum(map(bool, flags.first)) if isinstance(flags, Array) else 0
    if deep != layers:
        raise _misfit(mllm, mmproj, f"{deep} deepstack layers", f"the text model's {layers}")
    return text, vision


def _misfit(mllm: str | os.PathLike[str], mmproj: str | os.PathLike[str], found: str, needed: str) -> BadInput:
    return BadInput(
        f"mmproj {mmproj} is of another model than {Path(mllm).name}: found {found}, needed {needed}; "
        "take both from one checkpoint"
    )


def _whole(path: str | os.PathLike[str]) -> GGUFHeader:
    header = read_gguf_header(path)
    size = os.stat(path).st_size
    if size < header.least_size:
        raise BadInput(f"{path} has {size} bytes, needed {header.least_size}: it is cut short; copy it again")
    return header
