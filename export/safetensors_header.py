"""Headers of safetensors files, read without torch: names, types and shapes, and whether the file is whole."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from ..runtime.errors import BadInput

_MAX_HEADER = 100 << 20
_LFS = b"version https://git-lfs"

#: Bytes of an element, by the names that safetensors uses.
SIZES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """Tensors of one file by name.

    Raises:
        BadInput: No safetensors file, a damaged one, or one that is cut short.
    """
    source = Path(path)
    try:
        size = source.stat().st_size
        with source.open("rb") as f:
            start = f.read(8)
            if (start + f.read(len(_LFS) - 8)).startswith(_LFS):
                raise BadInput(f"{source} is a Git LFS pointer, not the weights; run 'git lfs pull' in its folder")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(_MAX_HEADER, size - 8):
                raise BadInput(
                    f"{source} is no whole safetensors file: {size} bytes, and a header of {length}; download it again"
                )
            f.seek(8)
            text = f.read(length)
    except OSError as e:
        raise BadInput(f"cannot read {source}: {e.strerror}; check the path") from None
    tensors: dict[str, Stored] = {}
    try:
        header = json.loads(text)
        end = 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            stored = Stored(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), source.name)
            first, last = (int(n) for n in entry["data_offsets"])
            each = SIZES.get(stored.dtype)
            wrong = each is not None and last - first != each * stored.n_elements
            if wrong or min(first, *stored.shape, 0) < 0 or last < first:
                raise ValueError(name)
            end = max(end, last)
            tensors[name] = stored
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"{source} has a damaged safetensors header; download it again") from None
    if 8 + length + end != size:
        short = "cut short" if size < 8 + length + end else "longer than its header says"
        raise BadInput(f"{source} has {size} bytes, needed {8 + length + end}: it is {short}; download it again")
    return tensors
