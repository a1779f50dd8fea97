"""The memory plan: what a bundle will take, worked out before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from .errors import HoverlensError
from .gguf import Array, GGUFHeader, read_gguf_header
from .mllm.llama_native import CONTEXT_UNIT

MB = 1_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        weights: Text model and projector, as large as their files.
        kv: Keys and values of ``n_ctx`` tokens, 16-bit.
        outputs: Logits of one forward pass over ``n_batch`` tokens.
        activations: llama.cpp's compute buffers, estimated.
        vision: The vision encoder's attention at the most image tokens, estimated.
        perception: Detector and depth model, twice their files.
        runtime: Python and its libraries.
    """

    weights: int
    kv: int
    outputs: int
    activations: int
    vision: int
    perception: int
    runtime: int = 200 * MB

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
) -> MemoryPlan:
    """Plans from the files' headers; no weights are read.

    Raises:
        BadInput: A file is no GGUF.
    """
    text = read_gguf_header(mllm)
    n_ctx = min(n_ctx, _int(text, "{arch}.context_length", n_ctx))
    n_ctx = -(-n_ctx // CONTEXT_UNIT) * CONTEXT_UNIT
    layers = _int(text, "{arch}.block_count", 0)
    width = _int(text, "{arch}.embedding_length", 0)
    heads = _int(text, "{arch}.attention.head_count", 1)
    kv_heads = _int(text, "{arch}.attention.head_count_kv", heads)
    head = width // max(heads, 1)
    key = _int(text, "{arch}.attention.key_length", head)
    value = _int(text, "{arch}.attention.value_length", head)
    inner = _int(text, "{arch}.feed_forward_length", 4 * width)
    tokens = text.metadata.get("tokenizer.ggml.tokens")
    vocab = tokens.length if isinstance(tokens, Array) else 0
    kv = n_ctx * layers * kv_heads * (key + value) * 2
    outputs = n_batch * vocab * 4
    # The largest tensors alive at once: attention scores, and the two halves of the gated layer.
    activations = n_batch * 4 * (heads * n_ctx + 3 * inner + 6 * width)
    vision = 0
    if mmproj is not None:
        header = read_gguf_header(mmproj)
        v_heads = _int(header, "clip.vision.attention.head_count", 1)
        v_width = _int(header, "clip.vision.embedding_length", 0)
        v_inner = _int(header, "clip.vision.feed_forward_length", 4 * v_width)
        # Patches are merged 2 x 2 into one token.
        patches = 4 * (image_max_tokens or 1024)
        vision = patches * 4 * (v_heads * patches + 2 * v_inner + 6 * v_width)
    return MemoryPlan(
        weights=mllm.stat().st_size + (mmproj.stat().st_size if mmproj else 0),
        kv=kv,
        outputs=outputs,
        activations=activations,
        vision=vision,
        perception=2 * sum(p.stat().st_size for p in perception if p is not None),
    )


def _int(header: GGUFHeader, key: str, default: int) -> int:
    value = header.get(key, default)
    if isinstance(value, Array):  # a value for each layer
        numbers = [int(v) for v in value.first if isinstance(v, (int, float))]
        return max(numbers, default=default)
    return int(value) if isinstance(value, (int, float)) else default


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
