"""Stand-ins for TensorRT and the CUDA bindings, which compute with ONNX Runtime.

An "engine file" of the stand-in is an ONNX file; its ``profile`` metadata has the limits of its inputs. Work on a
stream happens when somebody waits for the stream, so that reading a result too early gives the wrong numbers.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from hoverlens.runtime.digest import sha256_file
from hoverlens.runtime.engines.compat import FORMAT, Here
from hoverlens.runtime.engines.device import Device

MAPPED_OFFSET = 1 << 60


class Gpu:
    """Memory by address, streams with work waiting, and counts of what was done."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.copies = 0
        self.depth = 0
        self.next = 1 << 40
        self.fail_context = False
        self.kept: list[Any] = []

    def check_active(self) -> None:
        assert self.depth > 0, "no context is current on this thread"

    def allocate(self, size: int) -> int:
        self.check_active()
        self.next += 1 << 20
        # Not zero: what was never written must not look right.
        self.memory[self.next] = np.full(size, 0xA5, np.uint8)
        return self.next

    def map_host(self, array: np.ndarray) -> int:
        address = array.ctypes.data + MAPPED_OFFSET
        self.memory[address] = array
        return address

    def new_stream(self) -> int:
        self.check_active()
        self.next += 1 << 20
        self.streams[self.next] = []
        return self.next

    def later(self, stream: int, work: Callable[[], None]) -> None:
        self.check_active()
        self.streams[stream].append(work)

    def wait(self, stream: int) -> None:
        self.check_active()
        work, self.streams[stream] = self.streams[stream], []
        for step in work:
            step()

    def to_device(self, address: int, source: np.ndarray, stream: int) -> None:
        self.copies += 1
        self.later(stream, lambda: self.memory[address].__setitem__(slice(source.nbytes), source))

    def to_host(self, target: np.ndarray, address: int, stream: int) -> None:
        self.copies += 1
        self.later(stream, lambda: np.copyto(target, self.memory[address][: target.nbytes]))


def pycuda(gpu: Gpu) -> dict[str, ModuleType]:
    driver: Any = ModuleType("pycuda.driver")

    class HostBase:
        """What a page-locked array is a view of."""

        def __init__(self, size: int, mapped: bool) -> None:
            gpu.check_active()
            self.bytes = np.full(size, 0x5A, np.uint8)
            self.__array_interface__ = self.bytes.__array_interface__
            self.mapped = mapped
            gpu.memory[self.bytes.ctypes.data] = self.bytes

        def get_device_pointer(self) -> int:
            assert self.mapped
            return gpu.map_host(self.bytes)

        def free(self) -> None:
            gpu.check_active()
            del gpu.memory[self.bytes.ctypes.data]
            gpu.memory.pop(self.bytes.ctypes.data + MAPPED_OFFSET, None)

    class Allocation:
        def __init__(self, size: int) -> None:
            self.address = gpu.allocate(size)

        def __int__(self) -> int:
            return self.address

        def free(self) -> None:
            gpu.check_active()
            del gpu.memory[self.address]

    class Stream:
        def __init__(self) -> None:
            self.handle = gpu.new_stream()

        def synchronize(self) -> None:
            gpu.wait(self.handle)

        def __del__(self) -> None:
            gpu.streams.pop(self.handle, None)

    class Context:
        def push(self) -> None:
            gpu.depth += 1

        @staticmethod
        def pop() -> None:
            gpu.depth -= 1

    driver.init = lambda: None
    driver.Context = Context
    driver.Device = lambda index: SimpleNamespace(retain_primary_context=Context)
    driver.host_alloc_flags = SimpleNamespace(DEVICEMAP=2)
    driver.mem_alloc = Allocation
    driver.pagelocked_empty = lambda size, dtype, mem_flags=0: np.asarray(HostBase(size, mem_flags == 2))
    driver.Stream = Stream
    driver.memcpy_htod_async = lambda to, source, stream: gpu.to_device(to, source, stream.handle)
    driver.memcpy_dtoh_async = lambda to, address, stream: gpu.to_host(to, address, stream.handle)
    package: Any = ModuleType("pycuda")
    package.driver = driver
    return {"pycuda": package, "pycuda.driver": driver}


def cuda_python(gpu: Gpu) -> dict[str, ModuleType]:
    runtime: Any = ModuleType("cuda.bindings.runtime")
    host: dict[int, Any] = {}

    def set_device(index: int) -> tuple[int]:
        gpu.depth = 1
        return (0,)

    def host_alloc(size: int, flags: int) -> tuple[int, int]:
        buffer = (ctypes.c_uint8 * size)()
        address = ctypes.addressof(buffer)
        host[address] = buffer
        gpu.memory[address] = np.ctypeslib.as_array(buffer)
        return 0, address

    def host_free(address: int) -> tuple[int]:
        # Kept alive, so that a late write is a wrong number and not a crash of the tests.
        gpu.kept.append(host.pop(address))
        del gpu.memory[address]
        gpu.memory.pop(address + MAPPED_OFFSET, None)
        return (0,)

    def copy(to: int, source: int, size: int, kind: str, stream: int) -> tuple[int]:
        host_side = to if kind == "to_host" else source
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(host_side))
        (gpu.to_host(array, source, stream) if kind == "to_host" else gpu.to_device(to, array, stream))
        return (0,)

    runtime.cudaSetDevice = set_device
    runtime.cudaStreamNonBlocking = 1
    runtime.cudaStreamCreateWithFlags = lambda flags: (0, gpu.new_stream())
    runtime.cudaStreamSynchronize = lambda stream: (gpu.wait(stream), (0,))[1]
    runtime.cudaStreamDestroy = lambda stream: (gpu.streams.pop(stream), (0,))[1]
    runtime.cudaMalloc = lambda size: (0, gpu.allocate(size))
    runtime.cudaFree = lambda address: (gpu.memory.pop(address), (0,))[1]
    runtime.cudaHostAllocMapped, runtime.cudaHostAllocDefault = 2, 0
    runtime.cudaHostAlloc = host_alloc
    runtime.cudaFreeHost = host_free
    runtime.cudaHostGetDevicePointer = lambda address, flags: (0, gpu.map_host(gpu.memory[address]))
    runtime.cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice="to_device", cudaMemcpyDeviceToHost="to_host")
    runtime.cudaMemcpyAsync = copy
    package: Any = ModuleType("cuda")
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime = runtime
    package.bindings = bindings
    # An installed pycuda must not be found first.
    return {
        "cuda": package,
        "cuda.bindings": bindings,
        "cuda.bindings.runtime": runtime,
        "pycuda": None,  # type: ignore[dict-item]
        "pycuda.driver": None,  # type: ignore[dict-item]
    }


def tensorrt(gpu: Gpu, version: str) -> ModuleType:
    trt: Any = ModuleType("tensorrt")

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = "ERROR", "INTERNAL_ERROR", "WARNING"

    class Context:
        def __init__(self, engine: Engine) -> None:
            self.engine = engine
            self.addresses: dict[str, int] = {}
            self.shapes = {name: tuple(s) for name, s in engine.shapes.items() if name in engine.input_names}

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            low, _, high = self.engine.get_tensor_profile_shape(name, 0)
            if not all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
                return False
            self.shapes[name] = tuple(shape)
            return True

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            if name in self.shapes:
                return self.shapes[name]
            sizes = {}
            for key in self.engine.input_names:
                sizes.update(zip(self.engine.symbols[key], self.shapes[key], strict=True))
            return tuple(sizes.get(s, -1) if isinstance(s, str) else s for s in self.engine.symbols[name])

        def set_tensor_address(self, name: str, address: int) -> bool:
            assert address in gpu.memory
            self.addresses[name] = address
            return True

        def execute_async_v3(self, stream: int) -> bool:
            assert set(self.addresses) == {*self.engine.input_names, *self.engine.output_names}
            shapes = dict(self.shapes)

            def work() -> None:
                feeds = {}
                for name in self.engine.input_names:
                    dtype = np.dtype(self.engine.dtypes[name])
                    size = int(np.prod(shapes[name])) * dtype.itemsize
                    feeds[name] = gpu.memory[self.addresses[name]][:size].view(dtype).reshape(shapes[name]).copy()
                results = self.engine.session.run(self.engine.output_names, feeds)
                for name, value in zip(self.engine.output_names, results, strict=True):
                    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                    gpu.memory[self.addresses[name]][: raw.size] = raw

            gpu.later(stream, work)
            return True

    class Engine:
        def __init__(self, data: bytes) -> None:
            model = onnx.ModelProto.FromString(data)
            self.profile = json.loads({p.key: p.value for p in model.metadata_props}.get("profile", "{}"))
            options = ort.SessionOptions()
            options.log_severity_level = 4
            self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            self.input_names = [i.name for i in self.session.get_inputs()]
            self.output_names = [o.name for o in self.session.get_outputs()]
            values = {v.name: v for v in (*model.graph.input, *model.graph.output)}
            self.symbols = {v.name: list(v.shape) for v in (*self.session.get_inputs(), *self.session.get_outputs())}
            self.shapes = {k: tuple(-1 if isinstance(n, str) else n for n in s) for k, s in self.symbols.items()}
            self.dtypes = {
                k: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type).name for k, v in values.items()
            }

        @property
        def num_io_tensors(self) -> int:
            return len(self.input_names) + len(self.output_names)

        def get_tensor_name(self, index: int) -> str:
            return [*self.input_names, *self.output_names][index]

        def get_tensor_mode(self, name: str) -> str:
            return "INPUT" if name in self.input_names else "OUTPUT"

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return self.shapes[name]

        def get_tensor_dtype(self, name: str) -> str:
            return self.dtypes[name]

        def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
            assert index == 0
            return [tuple(s) for s in self.profile.get(name, [self.shapes[name]] * 3)]

        def create_execution_context(self) -> Context | None:
            return None if gpu.fail_context else Context(self)

    class Runtime:
        def __init__(self, logger: ILogger) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            gpu.check_active()
            if data.startswith(b"not an engine"):
                self.logger.log(ILogger.ERROR, "magic tag does not match")  # type: ignore[attr-defined]
                return None
            return Engine(data)

    def nptype(dtype: str) -> type:
        if dtype == "bfloat16":
            raise TypeError
        return np.dtype(dtype).type

    trt.__version__ = version
    trt.ILogger, trt.Runtime, trt.nptype = ILogger, Runtime, nptype
    trt.TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")
    return trt


TRT_VERSION = "10.3.0"


@pytest.fixture(params=["pycuda", "cuda-python"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A stand-in GPU, reached through either binding."""
    made = Gpu()
    modules = pycuda(made) if request.param == "pycuda" else cuda_python(made)
    for name, module in {**modules, "tensorrt": tensorrt(made, TRT_VERSION)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def board() -> Here:
    """A Jetson Orin with JetPack 6.2."""
    return Here({"trt": TRT_VERSION}, Device("Orin", 87, integrated=True))


@pytest.fixture
def desktop() -> Here:
    """A machine whose GPU has memory of its own."""
    return Here({"trt": TRT_VERSION}, Device("NVIDIA GeForce RTX 3060", 87, integrated=False))


def write_engine(folder: Path, data: bytes, name: str = "model", **changes: Any) -> Path:
    """Writes a stand-in engine and the file beside it."""
    path = folder / f"{name}.engine"
    path.write_bytes(data)
    beside = {
        "format": FORMAT,
        "source": {"file": "yolo.onnx", "bytes": len(data), "sha256": "0" * 64},
        "engine": {"file": path.name, "bytes": len(data), "sha256": sha256_file(path)},
        "precision": "fp16",
        "profiles": [],
        "flavour": "trt",
        "version": TRT_VERSION,
        "sm": 87,
        "inputs": [],
        "outputs": [],
        "metadata": {},
        **changes,
    }
    path.with_suffix(".json").write_text(json.dumps(beside))
    return path


@pytest.fixture
def engine_file(tmp_path: Path) -> Callable[..., Path]:
    return lambda data, name="model", **changes: write_engine(tmp_path, data, name, **changes)
