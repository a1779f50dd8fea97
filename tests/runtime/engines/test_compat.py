"""An engine is checked before TensorRT sees it: found, needed, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hoverlens.runtime.engines import open_engine
from hoverlens.runtime.engines.compat import Here, check_engine, read_sidecar
from hoverlens.runtime.engines.device import Device, find_device
from hoverlens.runtime.errors import BadInput, HoverlensError

Make = Callable[..., Path]


def test_an_engine_of_this_board_passes(engine_file: Make, board: Here) -> None:
    assert check_engine(engine_file(b"plan"), board)["sm"] == 87


@pytest.mark.parametrize(
    ("changes", "found", "needed"),
    [
        ({"version": "8.6.2"}, "TensorRT 8.6.2 for sm87", "needed TensorRT 10.3.0"),
        ({"sm": 72}, "TensorRT 10.3.0 for sm72", "needed sm87 (Orin)"),
        ({"flavour": "rtx", "version": "1.7.1"}, "TensorRT for RTX 1.7.1", "here is TensorRT 10.3.0"),
    ],
)
def test_an_engine_of_another_board_says_found_needed_and_the_command(
    engine_file: Make, board: Here, changes: dict[str, Any], found: str, needed: str
) -> None:
    path = engine_file(b"plan", profiles=["images=1x3x64x64,2x3x64x64,8x3x64x64"], **changes)
    with pytest.raises(HoverlensError) as e:
        check_engine(path, board)
    message = str(e.value)
    assert found in message
    assert needed in message
    command = (
        "hoverlens export engine yolo.onnx --precision fp16 --profile images=1x3x64x64,2x3x64x64,8x3x64x64 "
        f"--target board -o {path.parent}"
    )
    assert command in message
    assert "\n" not in message


def test_the_command_for_a_desktop_names_its_gpu(engine_file: Make) -> None:
    here = Here({"rtx": "1.7.1"}, Device("RTX 3060", 86, integrated=False))
    with pytest.raises(HoverlensError, match="--target rtx-sm86"):
        check_engine(engine_file(b"plan", flavour="rtx", version="1.7.0", sm=86), here)


def test_without_a_gpu_the_onnx_model_is_advised(engine_file: Make) -> None:
    with pytest.raises(HoverlensError, match=r"needed an NVIDIA GPU and its driver.*use the ONNX model"):
        check_engine(engine_file(b"plan"), Here({"rtx": "1.7.1"}, None))


def test_a_changed_engine_is_damaged_whatever_else_fits(engine_file: Make, board: Here) -> None:
    path = engine_file(b"plan")
    path.write_bytes(b"plam")
    with pytest.raises(BadInput, match="damaged"):
        check_engine(path, board)
    path.write_bytes(b"pl")
    with pytest.raises(BadInput, match="damaged: found 2 bytes"):
        check_engine(path, board)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"format": 1}', '{"format": "1"}', "\x00", '{"format": 1, "flavour": "vulkan"}'],
)
def test_a_damaged_description_is_bad_input(engine_file: Make, text: str) -> None:
    path = engine_file(b"plan")
    path.with_suffix(".json").write_text(text)
    with pytest.raises(BadInput, match="damaged"):
        read_sidecar(path)


@pytest.mark.parametrize("key", ["version", "sm", "precision", "inputs", "outputs", "engine", "flavour"])
def test_every_key_that_is_read_is_needed(engine_file: Make, key: str) -> None:
    path = engine_file(b"plan")
    beside = path.with_suffix(".json")
    held = json.loads(beside.read_text())
    del held[key]
    beside.write_text(json.dumps(held))
    with pytest.raises(BadInput, match="damaged"):
        read_sidecar(path)


def test_a_later_format_asks_for_an_update(engine_file: Make) -> None:
    with pytest.raises(BadInput, match="update hoverlens"):
        read_sidecar(engine_file(b"plan", format=99))


def test_an_engine_without_its_description_or_a_missing_one_is_bad_input(engine_file: Make, tmp_path: Path) -> None:
    path = engine_file(b"plan")
    path.with_suffix(".json").unlink()
    with pytest.raises(BadInput, match=r"no model\.json beside it.*hoverlens export engine"):
        open_engine(path)
    with pytest.raises(BadInput, match="no such file"):
        open_engine(tmp_path / "none.engine")
    with pytest.raises(BadInput, match="no such file"):
        open_engine(tmp_path / "none.plan")


def test_asking_for_the_cpu_refuses_an_engine(engine_file: Make) -> None:
    with pytest.raises(BadInput, match="is a TensorRT engine, asked for cpu"):
        open_engine(engine_file(b"plan"), ["cpu"])


def test_looking_for_a_device_never_fails() -> None:
    found = find_device(index=4096)
    assert found is None
