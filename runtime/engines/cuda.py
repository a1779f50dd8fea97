"""Device memory, pinned host memory and one stream, through pycuda or, where that is absent, cuda-python.

Untested on a GPU so far: the tests run it against a stand-in for pycuda.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import HoverlensError


@dataclass(frozen=True)
class Pinned:
    """Page-locked host memory: the only kind that is copied while the CPU goes on.

    Attributes:
        array: uint8, one axis.
        address: Where the GPU sees the same bytes, if they are mapped; else None.
        free: Gives the memory back; ``array`` must not be used afterwards.
    """

    array: NDArray[np.uint8]
    address: int | None
    free: Callable[[], None]


@dataclass(frozen=True)
class OnDevice:
    """Memory of the GPU."""

    address: int
    free: Callable[[], None]


class Cuda(Protocol):
    """What an engine needs of CUDA. Everything but :meth:`active` is called inside it."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Makes the device's context current on this thread."""
        ...

    def stream(self) -> Any: ...

    def handle(self, stream: Any) -> int: ...

    def allocate(self, size: int) -> OnDevice: ...

    def pinned(self, size: int, mapped: bool) -> Pinned: ...

    def to_device(self, address: int, source: NDArray[np.uint8], stream: Any) -> None: ...

    def to_host(self, target: NDArray[np.uint8], address: int, stream: Any) -> None: ...

    def wait(self, stream: Any) -> None: ...

    def close_stream(self, stream: Any) -> None: ...


def open_cuda(index: int = 0) -> Cuda:
    """The binding that is installed.

    Raises:
        HoverlensError: Neither is, or the driver refuses.
    """
    reasons = []
    for make in (PyCuda, CudaPython):
        try:
            return make(index)
        except (ImportError, OSError) as e:
            reasons.append(f"{make.package}: {e}")
        except Exception as e:
            raise HoverlensError(f"CUDA does not start ({make.package}: {e}); see 'hoverlens doctor'") from None
    raise HoverlensError(
        f"no CUDA binding for Python ({'; '.join(reasons)}); pip install pycuda, or cuda-python where it does not build"
    )


class PyCuda:
    """pycuda on the device's primary context, which TensorRT uses too."""

    package = "pycuda"

    def __init__(self, index: int) -> None:
        import pycuda.driver as driver

        self._driver = driver
        driver.init()
        self._context = driver.Device(index).retain_primary_context()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self._context.push()
        try:
            yield
        finally:
            self._driver.Context.pop()

    def stream(self) -> Any:
        return self._driver.Stream()

    def handle(self, stream: Any) -> int:
        return int(stream.handle)

    def allocate(self, size: int) -> OnDevice:
        memory = self._driver.mem_alloc(size)
        return OnDevice(int(memory), memory.free)

    def pinned(self, size: int, mapped: bool) -> Pinned:
        flags = self._driver.host_alloc_flags.DEVICEMAP if mapped else 0
        array = self._driver.pagelocked_empty(size, np.uint8, mem_flags=flags)
        address = int(array.base.get_device_pointer()) if mapped else None
        return Pinned(array, address, array.base.free)

    def to_device(self, address: int, source: NDArray[np.uint8], stream: Any) -> None:
        self._driver.memcpy_htod_async(address, source, stream)

    def to_host(self, target: NDArray[np.uint8], address: int, stream: Any) -> None:
        self._driver.memcpy_dtoh_async(target, address, stream)

    def wait(self, stream: Any) -> None:
        stream.synchronize()

    def close_stream(self, stream: Any) -> None:
        # pycuda destroys a stream with its object.
        return None


class CudaPython:
    """NVIDIA's cuda-python; its calls return a status first."""

    package = "cuda-python"

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError:
            from cuda import cudart as runtime

        self._runtime = runtime
        self._index = index
        self._do(runtime.cudaSetDevice(index))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # The runtime API's context is per device; a thread only has to say which.
        self._do(self._runtime.cudaSetDevice(self._index))
        yield

    def stream(self) -> Any:
        return self._do(self._runtime.cudaStreamCreateWithFlags(self._runtime.cudaStreamNonBlocking))

    def handle(self, stream: Any) -> int:
        return int(stream)

    def allocate(self, size: int) -> OnDevice:
        address = int(self._do(self._runtime.cudaMalloc(size)))
        return OnDevice(address, lambda: self._do(self._runtime.cudaFree(address)))

    def pinned(self, size: int, mapped: bool) -> Pinned:
        flags = self._runtime.cudaHostAllocMapped if mapped else self._runtime.cudaHostAllocDefault
        host = int(self._do(self._runtime.cudaHostAlloc(size, flags)))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(host))
        address = int(self._do(self._runtime.cudaHostGetDevicePointer(host, 0))) if mapped else None
        return Pinned(array, address, lambda: self._do(self._runtime.cudaFreeHost(host)))

    def to_device(self, address: int, source: NDArray[np.uint8], stream: Any) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._do(self._runtime.cudaMemcpyAsync(address, source.ctypes.data, source.nbytes, kind, stream))

    def to_host(self, target: NDArray[np.uint8], address: int, stream: Any) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._do(self._runtime.cudaMemcpyAsync(target.ctypes.data, address, target.nbytes, kind, stream))

    def wait(self, stream: Any) -> None:
        self._do(self._runtime.cudaStreamSynchronize(stream))

    def close_stream(self, stream: Any) -> None:
        self._do(self._runtime.cudaStreamDestroy(stream))

    def _do(self, result: Any) -> Any:
        status, *values = result
        if int(status) != 0:
            raise HoverlensError(f"CUDA failed: {getattr(status, 'name', status)}; see 'hoverlens doctor'")
        return values[0] if values else None
