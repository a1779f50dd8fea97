"""What the weight matrices of a running text model are fed, seen through llama.cpp's evaluation callback."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import HoverlensError
from ..runtime.mllm.llama_native import libraries
from .imatrix_file import Columns

_F32, _I32 = 0, 26
_LAYER = re.compile(rb"blk\.\d+\..*\.weight")

ReadTensor = Callable[["Tensor"], NDArray[Any]]


class Tensor(ctypes.Structure):
    """``struct ggml_tensor`` of ggml.h; its size is checked against the library's own."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]

# ggml_tensor_overhead() counts this header too.
_OBJECT_SIZE = 32


class Activations:
    """Adds up squared inputs by column for every weight matrix of the layers.

    The embedding and the output matrix are left out, as llama.cpp leaves them out: quantisers keep them in a finer
    type, and importance makes them worse.

    Attributes:
        callback: For llama.cpp's ``cb_eval``; must outlive the context.
    """

    def __init__(self) -> None:
        lib, _ = libraries()
        self._base = _base_library()
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._error: BaseException | None = None
        self._ops: dict[int, bytes] = {}
        self.callback = lib.ggml_backend_sched_eval_callback(self._observe)

    def entries(self) -> dict[str, Columns]:
        """The sums so far."""
        return {
            name: Columns(sums.astype(np.float32), self._counts[name].astype(np.float32))
            for name, sums in self._sums.items()
        }

    def check(self) -> None:
        """Raises what went wrong inside the callback: an exception cannot pass through C code."""
        if self._error is not None:
            error, self._error = self._error, None
            raise HoverlensError(f"reading activations failed ({error}); this llama.cpp is not supported") from error

    def add(self, name: str, rows: NDArray[np.float32], expert: int = 0, experts: int = 1) -> None:
        """Adds input rows, float32 (n, columns), of one expert of a weight matrix."""
        if not np.isfinite(rows).all():
            raise HoverlensError(f"the inputs of {name} are not finite; the model or the build is damaged")
        sums = self._sums.setdefault(name, np.zeros((experts, rows.shape[-1])))
        counts = self._counts.setdefault(name, np.zeros(experts, np.int64))
        sums[expert] += np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
        counts[expert] += len(rows)

    def _observe(self, pointer: Any, ask: bool, _user: Any) -> bool:
        try:
            tensor = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
            op = self._op(tensor.op)
            if op not in (b"MUL_MAT", b"MUL_MAT_ID"):
                return not ask
            weight = tensor.src[0].contents
            name = _plain_name(weight.name)
            if not _LAYER.fullmatch(name):
                return not ask
            if not ask and self._error is None:
                self._take(op, name.decode(), tensor, weight)
            return True
        except BaseException as e:
            self._error = self._error or e
            return not ask

    def _take(self, op: bytes, name: str, tensor: Tensor, weight: Tensor) -> None:
        inputs = tensor.src[1].contents
        if inputs.type != _F32:
            return
        data = self._read(inputs, np.dtype("<f4"))
        if op == b"MUL_MAT":
            self.add(name, data.reshape(-1, data.shape[-1]))
            return
        # Inputs (token, slot or 1, columns), the expert of each slot in the third source.
        ids = self._read(tensor.src[2].contents, np.dtype("<i4"))[0, 0]
        rows = np.broadcast_to(data[0], (*ids.shape, data.shape[-1]))
        for expert in np.unique(ids):
            self.add(name, rows[ids == expert], int(expert), int(weight.ne[2]))

    def _read(self, tensor: Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The tensor's values, slowest axis first; it may be a view with gaps, and may lie on a device."""
        shape = [int(n) for n in reversed(tensor.ne)]
        strides = [int(n) for n in reversed(tensor.nb)]
        size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
        raw = np.empty(size, np.uint8)
        self._base.ggml_backend_tensor_get(ctypes.byref(tensor), raw.ctypes.data, 0, size)
        view: NDArray[Any] = np.ndarray(shape, dtype, buffer=raw, strides=strides)
        return view

    def _op(self, number: int) -> bytes:
        if number not in self._ops:
            self._ops[number] = self._base.ggml_op_name(number)
        return self._ops[number]


def _plain_name(name: bytes) -> bytes:
    """``CUDA0#blk.0.ffn_up.weight#0`` is a copy for a device of ``blk.0.ffn_up.weight``."""
    return name.split(b"#")[1] if b"#" in name else name


def _base_library() -> Any:
    """libggml-base, with the functions used here declared.

    Raises:
        HoverlensError: It is missing, or its tensors are laid out otherwise.
    """
    lib, _ = libraries()
    folder = Path(cast("str", lib.__file__)).parent / "lib"
    found = [p for p in folder.glob("*ggml-base*") if p.suffix in (".so", ".dylib", ".dll")]
    if not found:
        raise HoverlensError(f"{folder} has no ggml-base library; install llama-cpp-python again")
    base = ctypes.CDLL(str(found[0]))
    base.ggml_tensor_overhead.restype = ctypes.c_size_t
    base.ggml_op_name.restype = ctypes.c_char_p
    base.ggml_op_name.argtypes = [ctypes.c_int]
    base.ggml_backend_tensor_get.restype = None
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    size = int(base.ggml_tensor_overhead()) - _OBJECT_SIZE
    if size != ctypes.sizeof(Tensor):
        raise HoverlensError(
            f"this llama.cpp's tensors have {size} bytes, needed {ctypes.sizeof(Tensor)}; "
            "install the llama-cpp-python version that hoverlens names"
        )
    return base
