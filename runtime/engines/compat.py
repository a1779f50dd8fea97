"""Whether a TensorRT engine fits this machine, asked before TensorRT is.

An engine of another version or GPU makes TensorRT fail with a message that says neither; the file beside the
engine says what it was built for.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..digest import remembered_sha256
from ..errors import BadInput, HoverlensError
from .device import Device, find_device

FORMAT = 1
MODULES = {"trt": "tensorrt", "rtx": "tensorrt_rtx"}
PRODUCTS = {"trt": "TensorRT", "rtx": "TensorRT for RTX"}
DISTRIBUTIONS = {
    "trt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
}
MAX_SIDECAR_BYTES = 16 << 20


def installed_version(flavour: str) -> str | None:
    """The version of the installed ``trt`` or ``rtx`` Python module, or None. The module decides, if it says."""
    try:
        module = importlib.import_module(MODULES[flavour])
    except (ImportError, OSError):
        return None
    version = getattr(module, "__version__", None)
    if version:
        return str(version)
    for name in DISTRIBUTIONS[flavour]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@dataclass(frozen=True)
class Here:
    """What this machine can run engines with.

    Attributes:
        versions: ``trt`` and ``rtx`` where installed, with their versions.
        device: The GPU, or None.
    """

    versions: Mapping[str, str]
    device: Device | None

    @classmethod
    def look(cls) -> Here:
        found = {flavour: installed_version(flavour) for flavour in MODULES}
        return cls({k: v for k, v in found.items() if v is not None}, find_device())


def sidecar_path(engine: str | os.PathLike[str]) -> Path:
    """The file that says what an engine is: ``a.engine`` has ``a.json`` beside it."""
    return Path(engine).with_suffix(".json")


def read_sidecar(engine: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what an engine was built from and for.

    Raises:
        BadInput: The engine or the file beside it is missing, damaged, or of a later format.
    """
    file, beside = Path(engine), sidecar_path(engine)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "no such file"
        raise BadInput(f"cannot open the engine {file}: {what}; name an .engine file")
    if not beside.is_file():
        raise BadInput(
            f"cannot open the engine {file}: found no {beside.name} beside it, needed to know what it was built for; "
            "build it with 'hoverlens export engine'"
        )
    try:
        if beside.stat().st_size > MAX_SIDECAR_BYTES:
            raise ValueError(f"larger than {MAX_SIDECAR_BYTES} bytes")
        read = json.loads(beside.read_text(encoding="utf-8"))
        if read["format"] > FORMAT:
            raise ValueError(f"format {read['format']}, this hoverlens reads {FORMAT}; update hoverlens")
        if read["flavour"] not in MODULES:
            raise ValueError(f"flavour {read['flavour']!r}")
        for key, kind in (("version", str), ("sm", int), ("precision", str), ("inputs", list), ("outputs", list)):
            if not isinstance(read[key], kind):
                raise ValueError(f"{key} is {read[key]!r}")
        if not isinstance(read["engine"]["sha256"], str) or not isinstance(read["engine"]["bytes"], int):
            raise ValueError("no digest of the engine")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInput(
            f"cannot open the engine {file}: {beside.name} is damaged ({type(e).__name__} {e}); build the engine again"
        ) from None
    return dict(read)


def rebuild_command(engine: str | os.PathLike[str], sidecar: Mapping[str, Any], here: Here) -> str:
    """The command that builds this engine anew for this machine."""
    source = str((sidecar.get("source") or {}).get("file", "MODEL.onnx"))
    words = ["hoverlens", "export", "engine", source, "--precision", str(sidecar.get("precision", "fp16"))]
    for profile in sidecar.get("profiles") or ():
        words += ["--profile", str(profile)]
    if "trt" in here.versions:
        words += ["--target", "board"]
    elif here.device is not None:
        words += ["--target", f"rtx-sm{here.device.sm}"]
    return shlex.join([*words, "-o", str(Path(engine).parent)])


def check_engine(engine: str | os.PathLike[str], here: Here | None = None) -> dict[str, Any]:
    """Checks that an engine file is whole and can run here.

    Args:
        engine: The engine file.
        here: This machine by default.

    Returns:
        What :func:`read_sidecar` read.

    Raises:
        BadInput: It is damaged.
        HoverlensError: It is for another TensorRT or GPU, or there is none here. The message says what was found,
            what is needed, and the command that builds the engine anew.
    """
    sidecar = read_sidecar(engine)
    here = here or Here.look()
    file = Path(engine)
    flavour, version, sm = sidecar["flavour"], sidecar["version"], sidecar["sm"]
    product = PRODUCTS[flavour]
    command = rebuild_command(engine, sidecar, here)
    size = file.stat().st_size
    if size != sidecar["engine"]["bytes"] or remembered_sha256(file) != sidecar["engine"]["sha256"]:
        raise BadInput(
            f"{file.name} is damaged: found {size} bytes that differ from the {sidecar['engine']['bytes']} built; "
            f"rebuild it: {command}"
        )
    found = f"found {product} {version} for sm{sm}"
    if here.device is None:
        raise HoverlensError(
            f"{file.name} cannot run here: {found}, needed an NVIDIA GPU and its driver, which are not here; "
            "use the ONNX model here"
        )
    if flavour not in here.versions:
        others = " and ".join(f"{PRODUCTS[f]} {v}" for f, v in here.versions.items()) or "no TensorRT"
        raise HoverlensError(f"{file.name} cannot run here: {found}, here is {others}; rebuild it: {command}")
    if version != here.versions[flavour]:
        raise HoverlensError(
            f"{file.name} cannot run here: {found}, needed {product} {here.versions[flavour]}; rebuild it: {command}"
        )
    if sm != here.device.sm:
        raise HoverlensError(
            f"{file.name} cannot run here: {found}, needed sm{here.device.sm} ({here.device.name}); "
            f"rebuild it: {command}"
        )
    return sidecar
