"""The memory plan: what a bundle will take, worked out before anything is loaded.

The plan is what resident memory comes to once the cache is full, every buffer was used and all models are loaded. It
follows from the files' headers: llama.cpp reserves its buffers for the largest pass that the settings allow, and their
sizes are known (``python -m hoverlens.benchmarks.memory --fill`` compares). A single question takes less: of the
reserved buffers, pages that were never written take no memory.

Not in the plan: where llama.cpp repacks quantised weights for the CPU, the file's own pages stay mapped beside the
copies and show in the resident size, but the kernel takes them back whenever it needs them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from .errors import BadInput, HoverlensError
from .gguf import Array, GGUFHeader, read_gguf_header
from .mllm.llama_native import CONTEXT_UNIT, most_outputs

MB = 1_000_000

#: An image's tokens where neither bundle nor model sets a limit: llama.cpp's for the Qwen-VL family.
LLAMA_IMAGE_TOKENS = 4096

#: Encoded images that are kept: a photo that is asked about again, and what was zoomed in on.
_IMAGES_KEPT = 8
_MOST_KEPT = 256 * 1024 * 1024

# Measured with CPython 3.11 on x86-64, with some to spare: Python, its libraries and a photo of 2.8 megapixels; ONNX
# Runtime and OpenCV once they have run; a session's activations at 640 x 640.
_RUNTIME = 150 * MB
_PERCEPTION = 80 * MB
_SESSION = 50 * MB
# Of each token: llama.cpp's tables, and ours of spellings.
_VOCABULARY_ENTRY = 700


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        weights: Text model and projector, as large as their files.
        kv: Keys and values of ``n_ctx`` tokens, 16-bit.
        outputs: Logits of one forward pass, and a copy to draw from.
        activations: Buffers of a forward pass over ``n_batch`` tokens with the cache full.
        vision: Buffers of the vision encoder for the largest image, and its output.
        features: Encoded images that are kept for reuse.
        perception: Detector and depth model: twice their files, and their activations.
        vocabulary: The tokenizer's tables.
        runtime: Python, its libraries and a photo.
    """

    weights: int
    kv: int
    outputs: int
    activations: int
    vision: int
    perception: int
    runtime: int = _RUNTIME
    features: int = 0
    vocabulary: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def to_dict(self) -> dict[str, int]:
        """Bytes by purpose, and ``total``."""
        return {**asdict(self), "total": self.total}

    def largest_first(self) -> str:
        """For an error: the plan in megabytes, the largest first."""
        parts = sorted(asdict(self).items(), key=lambda kv: -kv[1])
        return ", ".join(f"{name} {size / MB:.0f}" for name, size in parts if size >= MB)


def plan_memory(
    mllm: Path,
    mmproj: Path | None,
    n_ctx: int,
    n_batch: int,
    perception: tuple[Path | None, ...] = (),
    image_max_tokens: int | None = None,
    n_sequences: int = 64,
) -> MemoryPlan:
    """Plans from the files' headers; no weights are read.

    Args:
        mllm: The text model.
        mmproj: Its vision encoder, or None.
        n_ctx: KV cells.
        n_batch: Most tokens in a forward pass.
        perception: Detector and depth model.
        image_max_tokens: Most tokens of an image; None for the model's own limit.
        n_sequences: Most branches in the cache at once.

    Raises:
        BadInput: A file is no GGUF, or a size in it is no number.
    """
    text = _Text(read_gguf_header(mllm))
    n_ctx = min(n_ctx, text.context or n_ctx)
    n_batch = max(min(n_batch, n_ctx), n_sequences)
    n_ctx = -(-n_ctx // CONTEXT_UNIT) * CONTEXT_UNIT
    outputs = most_outputs(n_batch, n_sequences)
    vision, features = 0, 0
    if mmproj is not None:
        image_tokens = image_max_tokens or LLAMA_IMAGE_TOKENS
        image = image_tokens * text.input_width * 4
        vision = _vision(read_gguf_header(mmproj), image_tokens, text.width) + image
        features = min(_IMAGES_KEPT * image, max(_MOST_KEPT, image))
    models = [p.stat().st_size for p in perception if p is not None]
    return MemoryPlan(
        weights=mllm.stat().st_size + (mmproj.stat().st_size if mmproj else 0),
        kv=n_ctx * text.cell,
        outputs=2 * outputs * text.vocabulary * 4,
        activations=text.activations(n_ctx, n_batch, outputs),
        vision=vision,
        features=features,
        perception=2 * sum(models) + _SESSION * len(models) + (_PERCEPTION if models else 0),
        vocabulary=text.vocabulary * _VOCABULARY_ENTRY,
    )


def cells_within(mllm: Path, budget: int, n_ctx: int) -> int:
    """KV cells that fit a budget of bytes, at most ``n_ctx``.

    Raises:
        BadInput: The file is no GGUF, or not even the least context fits.
    """
    cell = _Text(read_gguf_header(mllm)).cell
    cells = n_ctx if cell == 0 else min(n_ctx, budget // cell // CONTEXT_UNIT * CONTEXT_UNIT)
    if cells < CONTEXT_UNIT:
        raise BadInput(
            f"a KV budget of {budget / MB:g} MB holds {budget // max(cell, 1)} tokens of this model; "
            f"give {CONTEXT_UNIT * cell / MB:.1f} MB or more"
        )
    return cells


class _Text:
    """What the text model's header says of its sizes."""

    def __init__(self, header: GGUFHeader) -> None:
        self.context = _int(header, "{arch}.context_length", 0)
        self.layers = _int(header, "{arch}.block_count", 0)
        self.width = _int(header, "{arch}.embedding_length", 0)
        self.heads = _int(header, "{arch}.attention.head_count", 1)
        self.kv_heads = _int(header, "{arch}.attention.head_count_kv", self.heads)
        head = self.width // max(self.heads, 1)
        self.key = _int(header, "{arch}.attention.key_length", head)
        self.value = _int(header, "{arch}.attention.value_length", head)
        self.inner = _int(header, "{arch}.feed_forward_length", 4 * self.width)
        # Features of deeper layers of the vision encoder stand beside each embedding.
        self.input_width = self.width * (1 + _int(header, "{arch}.n_deepstack_layers", 0))
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        self.vocabulary = tokens.length if isinstance(tokens, Array) else 0

    @property
    def cell(self) -> int:
        """Bytes of the keys and values of one token, 16-bit."""
        return self.layers * self.kv_heads * (self.key + self.value) * 2

    def activations(self, n_ctx: int, n_batch: int, outputs: int) -> int:
        """Bytes of a forward pass's buffers.

        Alive together, in floats of 4 bytes: for each token its input, hidden states, queries, keys and values, and
        a row of the mask; and the largest of what comes one after the other: attention scores (flash attention is
        off, so each token has a score for each head and cell), the gated layer, and the logits. Beside them, a
        matrix product's right side in 16 bits: that of the scores is the largest.
        """
        token = self.input_width + 6 * self.width + 2 * self.heads * self.key
        token += 2 * self.kv_heads * max(self.key, self.value)
        scores = n_batch * self.heads * n_ctx
        gated = n_batch * 3 * self.inner
        alive = n_batch * (token + n_ctx) + max(scores, gated, outputs * self.vocabulary)
        return 4 * alive + 2 * max(scores, n_batch * self.inner)


def _vision(header: GGUFHeader, tokens: int, out: int) -> int:
    """Bytes of the vision encoder's buffers, and of the image as pixels.

    With flash attention, so all of it grows with the number of patches, not with its square.
    """
    width = _int(header, "clip.vision.embedding_length", 0)
    inner = _int(header, "clip.vision.feed_forward_length", 4 * width)
    patch = _int(header, "clip.vision.patch_size", 16)
    patches = tokens * _int(header, "clip.vision.spatial_merge_size", 2) ** 2
    floats = max(8 * width, 4 * width + 2 * inner) + out
    pixels = 3 * patch**2
    return patches * (4 * (floats + 2 * pixels) + 2 * inner)


def _int(header: GGUFHeader, key: str, default: int) -> int:
    value = header.get(key, default)
    if isinstance(value, Array):  # a value for each layer
        numbers = [_whole(v, key) for v in value.first if isinstance(v, (int, float))]
        return max(numbers, default=default)
    return _whole(value, key) if isinstance(value, (int, float)) else default


def _whole(value: float, key: str) -> int:
    if not math.isfinite(value):
        raise BadInput(f"the model's {key.removeprefix('{arch}.')} is {value}; its file is damaged, export it again")
    return int(value)


def available_bytes(proc: str | os.PathLike[str] = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Memory that a new allocation may take without swapping; None where nothing tells.

    The smaller of the kernel's estimate and what is left of the container's limit. Files that the container has
    read are not counted as used: the kernel lets go of them first.
    """
    found: list[int] = []
    try:
        for line in Path(proc, "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for folder in _own_groups(Path(proc), Path(cgroup)):
        found += _left(folder, "memory.max", "memory.current", "")
    found += _left(Path(cgroup, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")  # version 1
    return min(found) if found else None


def _own_groups(proc: Path, cgroup: Path) -> list[Path]:
    """The control group of this process and those around it: the limit of each holds."""
    own = PurePosixPath()
    try:
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):
                own = PurePosixPath(line[4:])
    except (OSError, ValueError):
        pass
    if ".." in own.parts:  # outside of what this container sees
        own = PurePosixPath()
    return [cgroup / path for path in (own, *own.parents)]


def _left(folder: Path, limit_name: str, used_name: str, prefix: str) -> list[int]:
    """Bytes left of a group's limit, if it has one."""
    try:
        limit = int((folder / limit_name).read_text(encoding="ascii"))
        used = int((folder / used_name).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        files = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    except (OSError, ValueError):  # "max" is no number: no limit
        return []
    return [min(limit, max(0, limit - used + files))]


def check_plan(plan: MemoryPlan, available: int | None, limits: Mapping[str, int]) -> None:
    """Refuses to start what will not fit.

    Args:
        plan: What will be loaded.
        available: Bytes to be had, or None where that is unknown.
        limits: Current value of what a user can lower, by name.

    Raises:
        HoverlensError: The plan is larger than what is available.
    """
    if available is None or plan.total <= available:
        return
    lower = " or ".join(f"{name} (now {value})" for name, value in limits.items())
    raise HoverlensError(
        f"needs {plan.total / MB:.0f} MB ({plan.largest_first()}) but {available / MB:.0f} MB are "
        f"available; lower {lower}, or use a smaller bundle"
    )
