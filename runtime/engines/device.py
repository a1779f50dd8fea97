"""The CUDA device of this machine, asked of the driver itself: no toolkit, no NVML (Orin has none)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

DRIVER_NAMES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
COMPUTE_MAJOR, COMPUTE_MINOR, INTEGRATED, CAN_MAP_HOST = 75, 76, 18, 19


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes:
        name: As the driver gives it (``Orin``, ``NVIDIA GeForce RTX 3060``).
        sm: Compute capability as one number: 87 is 8.7.
        integrated: Shares its memory with the CPU, as on Tegra: copies between them are a waste.
    """

    name: str
    sm: int
    integrated: bool


def find_device(index: int = 0) -> Device | None:
    """The device with this index, or None where there is no driver or no device."""
    for library in DRIVER_NAMES:
        try:
            cuda = ctypes.CDLL(library)
            break
        except OSError:
            continue
    else:
        return None
    handle = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), index):
        return None
    name = ctypes.create_string_buffer(256)
    if cuda.cuDeviceGetName(name, len(name), handle):
        return None

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), which, handle) else value.value

    sm = 10 * attribute(COMPUTE_MAJOR) + attribute(COMPUTE_MINOR)
    integrated = bool(attribute(INTEGRATED) and attribute(CAN_MAP_HOST))
    return Device(name.value.decode(errors="replace"), sm, integrated)
