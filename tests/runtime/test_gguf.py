"""GGUF headers: what is read, and that damage never does harm."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.gguf import Array, read_gguf_header


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if value and isinstance(value[0], str):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return text(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def gguf(metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...]]], version: int = 3) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(entry(k, v) for k, v in metadata.items())
    for name, (kind, shape) in tensors.items():
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    return out


METADATA: dict[str, Any] = {
    "general.architecture": "qwen3vl",
    "qwen3vl.block_count": 6,
    "some.flag": True,
    "some.scale": 0.5,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(100)],
    "tokenizer.ggml.token_type": list(range(100)),
    "tokenizer.chat_template": "{{ messages }}",
}
TENSORS = {"token_embd.weight": (1, (256, 100)), "norm": (0, (256,))}
GOOD = gguf(METADATA, TENSORS)


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD + b"\0" * 64)
    header = read_gguf_header(path)
    assert header.architecture == "qwen3vl"
    assert header.get("{arch}.block_count") == 6
    assert header.get("some.flag") is True
    assert header.get("absent", 3) == 3
    tokens = header.get("tokenizer.ggml.tokens")
    assert isinstance(tokens, Array)
    assert tokens.length == 100
    assert tokens.first[:2] == ("t0", "t1")
    assert header.n_params == 256 * 101
    assert header.quantisation == "F16"
    assert not header.is_projector


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF"),
        (b"GGU", "not a GGUF"),
        (b"ONNX" + GOOD[4:], "not a GGUF"),
        (GOOD[:20], "damaged"),
        (GOOD[:-9], "damaged"),
        (gguf(METADATA, TENSORS, version=1), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 5, 2**40), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) * 9, "damaged"),
    ],
)
def test_damage_is_one_clear_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=message):
        read_gguf_header(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_gguf_header(tmp_path / "none.gguf")


@settings(max_examples=200, deadline=None)
@given(st.integers(4, len(GOOD) - 1), st.binary(min_size=1, max_size=12))
def test_overwritten_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.gguf"
    path.write_bytes(GOOD[:at] + junk + GOOD[at + len(junk) :])
    with contextlib.suppress(BadInput):
        read_gguf_header(path)
