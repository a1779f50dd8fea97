"""The importance matrix as a file: GGUF, in the layout that llama.cpp's own tools write and read.

Of every weight matrix it holds the sum of squared inputs by column (``NAME.in_sum2``) and how many input rows
were added up (``NAME.counts``), once for each expert where there are experts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import BadInput
from ..runtime.files import atomic_write_bytes
from ..runtime.gguf import Array, read_gguf_header

_U32, _STRING, _ARRAY, _F32 = 4, 8, 9, 0
_ALIGNMENT = 32
_SUMS, _COUNTS = ".in_sum2", ".counts"
_OWN = "hoverlens.calibration."


@dataclass(frozen=True)
class Columns:
    """What one weight matrix was fed.

    Attributes:
        sums: float32 (experts, columns), sums of squares; one expert for an ordinary matrix.
        counts: float32 (experts,), input rows.
    """

    sums: NDArray[np.float32]
    counts: NDArray[np.float32]

    def means(self) -> NDArray[np.float32]:
        """float32 (experts * columns,): mean squares, as the quantiser takes them.

        An expert that was never chosen counts every column alike.
        """
        seen = self.counts[:, None]
        means = np.where(seen > 0, self.sums / np.maximum(seen, 1.0), 1.0)
        return np.ascontiguousarray(means, dtype=np.float32).reshape(-1)


@dataclass(frozen=True)
class ImportanceMatrix:
    """Importance of the columns of every weight matrix of a text model.

    Attributes:
        entries: By the weight's name in GGUF files (``blk.0.attn_q.weight``).
        datasets: What was asked, for people.
        chunks: Number of questions.
        chunk_size: Mean number of prompt tokens of a question.
        facts: More about the making: ``set_sha256``, ``images``, ``tokens``, ``model``.
    """

    entries: Mapping[str, Columns]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0
    facts: Mapping[str, str | int] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; it appears complete or not at all.

        Raises:
            BadInput: It cannot be written there.
        """
        atomic_write_bytes(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """The file's content."""
        tensors: list[tuple[str, NDArray[np.float32]]] = []
        for name, columns in sorted(self.entries.items()):
            tensors.append((name + _SUMS, columns.sums))
            tensors.append((name + _COUNTS, columns.counts[:, None]))
        values = [
            _string("general.type", "imatrix"),
            _strings("imatrix.datasets", self.datasets),
            _number("imatrix.chunk_count", self.chunks),
            _number("imatrix.chunk_size", self.chunk_size),
        ]
        for key, value in self.facts.items():
            values.append(_number(_OWN + key, value) if isinstance(value, int) else _string(_OWN + key, value))
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values))
        offset = 0
        for name, data in tensors:
            # GGUF lists the fastest axis first.
            rows, columns_ = data.shape
            out += _text(name) + struct.pack("<IQQIQ", 2, columns_, rows, _F32, offset)
            offset += _padded(data.nbytes)
        out += bytes(_padded(len(out)) - len(out))
        for _, data in tensors:
            block = np.ascontiguousarray(data, dtype="<f4").tobytes()
            out += block + bytes(_padded(len(block)) - len(block))
        return bytes(out)


def read_imatrix(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Reads a file of ours or of llama.cpp's tools, in its present or its older (.dat) layout.

    Raises:
        BadInput: Neither, or damaged.
    """
    source = Path(path)
    try:
        with source.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise BadInput(f"cannot read importance matrix {source}: {e.strerror}; check the path") from None
    matrix = _read_gguf(source) if magic == b"GGUF" else _read_dat(source)
    if not matrix.entries:
        raise BadInput(f"{source} holds no importance matrix; make one with 'hoverlens calibrate imatrix'")
    for name, columns in matrix.entries.items():
        finite = np.isfinite(columns.sums).all() and np.isfinite(columns.counts).all()
        if not finite or (columns.sums < 0).any() or (columns.counts < 0).any():
            raise BadInput(f"{source} is damaged: {name} has values that are no sums of squares; make it again")
    return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = read_gguf_header(path)
    if header.get("general.type") != "imatrix":
        kind = header.architecture or "GGUF file"
        raise BadInput(f"{path} is a {kind}, needed an importance matrix; make one with 'hoverlens calibrate imatrix'")
    if path.stat().st_size < header.least_size:
        raise BadInput(f"{path} is cut short; copy or make it again")
    arrays: dict[str, NDArray[np.float32]] = {}
    with path.open("rb") as f:
        for tensor in header.tensors:
            if tensor.type != "F32":
                raise BadInput(f"{path} is damaged: {tensor.name} is {tensor.type}, needed F32; make it again")
            f.seek(header.data_start + tensor.offset)
            data = np.frombuffer(f.read(tensor.n_bytes), dtype="<f4").astype(np.float32)
            columns = tensor.shape[0] if tensor.shape else 1
            arrays[tensor.name] = data.reshape(-1, max(columns, 1))
    entries: dict[str, Columns] = {}
    for name, sums in arrays.items():
        if name.endswith(_SUMS):
            weight = name.removesuffix(_SUMS)
            counts = arrays.get(weight + _COUNTS)
            if counts is None or counts.size != len(sums):
                raise BadInput(f"{path} is damaged: {weight} has no counts; make it again")
            entries[weight] = Columns(sums, counts.reshape(-1))
    datasets = header.get("imatrix.datasets")
    own = {k.removeprefix(_OWN): v for k, v in header.metadata.items() if k.startswith(_OWN)}
    return ImportanceMatrix(
        entries,
        tuple(map(str, datasets.first)) if isinstance(datasets, Array) else (),
        int(header.get("imatrix.chunk_count", 0)),
        int(header.get("imatrix.chunk_size", 0)),
        {k: v for k, v in own.items() if isinstance(v, (int, str))},
    )


def _read_dat(path: Path) -> ImportanceMatrix:
    data = path.read_bytes()
    position = 0

    def take(n: int) -> bytes:
        nonlocal position
        if n < 0 or position + n > len(data):
            raise ValueError
        position += n
        return data[position - n : position]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    entries: dict[str, Columns] = {}
    try:
        n = number()
        if not 0 < n < 1_000_000:
            raise ValueError
        for _ in range(n):
            name = take(number()).decode()
            calls = number()
            # It holds means times calls, not sums.
            sums = np.frombuffer(take(4 * number()), dtype="<f4").astype(np.float32)
            entries[name] = Columns(sums[None, :], np.array([max(calls, 0)], np.float32))
    except (ValueError, struct.error):
        raise BadInput(
            f"{path} is no importance matrix; needed a GGUF file of 'hoverlens calibrate imatrix' or llama-imatrix"
        ) from None
    return ImportanceMatrix(entries, chunks=max((int(c.counts[0]) for c in entries.values()), default=0))


def _padded(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _string(key: str, value: str) -> bytes:
    return _text(key) + struct.pack("<I", _STRING) + _text(value)


def _number(key: str, value: int) -> bytes:
    return _text(key) + struct.pack("<II", _U32, value)


def _strings(key: str, values: tuple[str, ...]) -> bytes:
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(values))
    return _text(key) + head + b"".join(map(_text, values))
