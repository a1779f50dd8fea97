"""Reads the header of a GGUF file: its metadata and tensor list, without loading weights.

Strict, since the file may be damaged or hostile: every length is checked against the file's size
before anything is allocated.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .errors import BadInput

MAGIC = b"GGUF"
MAX_ENTRIES = 1_000_000
MAX_ARRAY_KEPT = 64
MAX_DEPTH = 4

# The type numbers of the GGUF specification.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

TENSOR_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS"},
    **{17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}

# Weights in a block, bytes of a block.
_BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8)},
    **{"I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8)},
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176)},
    **{"Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136)},
}


@dataclass(frozen=True)
class Array:
    """A metadata array: its length and at most the first :data:`MAX_ARRAY_KEPT` values."""

    length: int
    first: tuple[Any, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor as the header lists it; ``shape`` in GGUF's order, fastest axis first.

    ``offset`` is in bytes from the start of the data.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int = 0

    @property
    def n_elements(self) -> int:
        n = 1
        for side in self.shape:
            n *= side
        return n

    @property
    def n_bytes(self) -> int:
        """Size of the data; 0 for a type whose block size is not known here."""
        block, size = _BLOCKS.get(self.type, (1, 0))
        return self.n_elements // block * size


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself.

    Attributes:
        version: Of the format, 2 or 3.
        metadata: Key to number, bool, string or :class:`Array`.
        tensors: In the file's order.
        data_start: Byte at which the tensors' data begins.
    """

    version: int
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]
    data_start: int = 0

    @property
    def least_size(self) -> int:
        """Bytes that the file must have to hold all its tensors."""
        ends = (self.data_start + t.offset + t.n_bytes for t in self.tensors)
        return max(ends, default=self.data_start)

    @property
    def architecture(self) -> str | None:
        """``qwen3vl`` of a text model; ``clip`` of every multimodal projector."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None

    @property
    def is_projector(self) -> bool:
        return self.architecture == "clip"

    @property
    def n_params(self) -> int:
        return sum(t.n_elements for t in self.tensors)

    @property
    def quantisation(self) -> str:
        """The type that holds the most weights."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors:
            weights[tensor.type] += tensor.n_elements
        return weights.most_common(1)[0][0] if weights else "none"

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; ``{arch}`` in the key stands for the architecture."""
        return self.metadata.get(key.replace("{arch}", self.architecture or ""), default)


class _Reader:
    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file = file
        self.size = size

    def take(self, n: int) -> bytes:
        if n > self.size - self.file.tell():
            raise ValueError("cut short")
        data = self.file.read(n)
        if len(data) != n:
            raise ValueError("cut short")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str) -> int:
        n = int(self.number("<Q"))
        if n > self.size:
            raise ValueError(f"{n} {what}, more than the file has bytes")
        return n

    def string(self) -> str:
        return self.take(self.count("characters")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= MAX_DEPTH:
            raise ValueError(f"unknown metadata type {kind}")
        inner = self.number("<I")
        length = self.count("array items")
        kept = min(length, MAX_ARRAY_KEPT)
        first = tuple(self.value(inner, depth + 1) for _ in range(kept))
        if inner in _SCALARS:
            rest = (length - kept) * struct.calcsize(_SCALARS[inner])
            if rest > self.size - self.file.tell():
                raise ValueError("cut short")
            self.file.seek(rest, os.SEEK_CUR)
        else:
            for _ in range(length - kept):
                self.value(inner, depth + 1)
        return Array(length, first)


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Reads a GGUF file's header.

    Raises:
        BadInput: No such file, not a GGUF file, or a damaged one.
    """
    name = Path(path)
    try:
        with name.open("rb") as file:
            reader = _Reader(file, os.fstat(file.fileno()).st_size)
            if file.read(4) != MAGIC:
                raise BadInput(f"{name} is not a GGUF file; a .gguf of llama.cpp is needed")
            version = reader.number("<I")
            if version not in (2, 3):
                raise BadInput(
                    f"{name} is GGUF version {version}; 2 or 3 is needed (little-endian): convert the model again"
                )
            n_tensors, n_values = reader.count("tensors"), reader.count("metadata entries")
            if max(n_tensors, n_values) > MAX_ENTRIES:
                raise ValueError(f"{max(n_tensors, n_values)} entries")
            metadata: dict[str, Any] = {}
            for _ in range(n_values):
                key = reader.string()
                metadata[key] = reader.value(reader.number("<I"))
            tensors = []
            for _ in range(n_tensors):
                tensor = reader.string()
                n_dims = reader.number("<I")
                if n_dims > 8:
                    raise ValueError(f"a tensor of {n_dims} dimensions")
                shape = tuple(int(reader.number("<Q")) for _ in range(n_dims))
                kind = reader.number("<I")
                offset = int(reader.number("<Q"))
                tensors.append(Tensor(tensor, shape, TENSOR_TYPES.get(kind, f"type {kind}"), offset))
            alignment = metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
                raise ValueError(f"alignment {alignment!r}")
            data_start = -(-file.tell() // alignment) * alignment
    except OSError as e:
        raise BadInput(f"cannot read {name}: {e.strerror}; check the path") from None
    except ValueError as e:
        raise BadInput(f"{name} has a damaged GGUF header ({e}); copy or convert it again") from None
    return GGUFHeader(version, metadata, tuple(tensors), data_start)
