"""Random weights that behave: the same numbers everywhere, and outputs that depend on the input."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 22

#: Spread of the logits of the output layer (the final norm makes the hidden state's spread 1).
_LOGIT_SPREAD = 2.5

#: Gain of the query and key norms. With 1 a random head averages over everything it sees, and an image of
#: two hundred tokens disappears in the average; the product of the two gains sharpens its choice.
_QK_GAIN = 1.6


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Draws float16 weights and writes them one block after the other.

    Memory stays at a few blocks however large the model is. Every tensor has a stream of its own, from the
    seed and its name, so adding one never changes another.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {
            "dtype": "F16",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        for name, shape in shapes.items():
            for block in _draw(name, shape, seed):
                f.write(block.astype("<f2", copy=False).tobytes())


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Iterator[NDArray[np.float16]]:
    """Blocks of a tensor: uniform, with the mean and standard deviation that its place asks for.

    The raw words of the bit generator are used because numpy promises them to be stable between versions
    and platforms, which it does not for its normal distribution.
    """
    mean, std = _moments(name, shape)
    half_width = std * math.sqrt(3.0)
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")
    bits = np.random.PCG64(key)
    left = math.prod(shape)
    while left:
        n = min(left, _CHUNK)
        words = bits.random_raw((n + 3) // 4).astype("<u8", copy=False)
        steps = words.view("<i2")[:n].astype(np.float32)
        steps += 0.5
        steps *= half_width / 32768.0
        steps += mean
        yield steps.astype(np.float16)
        left -= n


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name.endswith("embed_tokens.weight"):
        return 0.0, _LOGIT_SPREAD / math.sqrt(shape[1])
    if name.endswith("pos_embed.weight"):
        return 0.0, 0.3
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return _QK_GAIN, 0.1
    if name.endswith(".bias"):
        return 0.0, 0.05
    if len(shape) == 1:
        return 1.0, 0.05
    return 0.0, 1.0 / math.sqrt(math.prod(shape[1:]))
