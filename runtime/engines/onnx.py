"""ONNX models through ONNX Runtime: CPU, CUDA or TensorRT, whichever is here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ..errors import BadInput, HoverlensError
from .base import TensorSpec, check_feeds

PREFERENCE = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
SHORT_NAMES = {"tensorrt": PREFERENCE[0], "trt": PREFERENCE[0], "cuda": PREFERENCE[1], "cpu": PREFERENCE[2]}

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(uint16)": "uint16",
    "tensor(int16)": "int16",
    "tensor(uint32)": "uint32",
    "tensor(int32)": "int32",
    "tensor(uint64)": "uint64",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}
_LOG_FATAL_ONLY = 4


def choose_providers(wanted: Sequence[str] | None = None) -> list[str]:
    """The providers to ask for, best first.

    Args:
        wanted: Names in order of preference; None takes what this build of ONNX Runtime has.

    Raises:
        BadInput: A wanted provider is not in this build.
    """
    available = ort.get_available_providers()
    if wanted is None:
        return [p for p in PREFERENCE if p in available]
    names = [SHORT_NAMES.get(w.lower(), w) for w in wanted]
    absent = [n for n in names if n not in available]
    if absent or not names:
        raise BadInput(
            f"no execution provider {', '.join(absent) or '(none named)'} in this onnxruntime, "
            f"which has {', '.join(available)}; name one of those"
        )
    return names


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 240 else text[:237] + "..."


def _open_error(path: Path, error: Exception) -> BadInput:
    text = str(error)
    lowered = text.lower()
    if "external data" in lowered or "external_data" in lowered or "external initializer" in lowered:
        return BadInput(
            f"cannot open {path}: its weights are in a separate file that is missing or unreadable "
            f"({_one_line(error)}); put that file beside the model"
        )
    if "protobuf" in lowered:
        return BadInput(f"cannot open {path}: not an ONNX file, or a damaged one; copy or export it again")
    return BadInput(f"cannot open {path}: ONNX Runtime refused it ({_one_line(error)}); export it again")


def _spec(argument: Any) -> TensorSpec:
    shape = tuple(argument.shape) if argument.shape is not None else ()
    return TensorSpec(argument.name, _DTYPES.get(argument.type, argument.type), shape)


class OnnxEngine:
    """An ONNX model, ready to run. See :class:`~hoverlens.runtime.engines.base.Engine`.

    Runs may come from several threads; ONNX Runtime allows that on one session.

    Raises:
        BadInput: The file is missing, empty, damaged, no ONNX, or a provider is not available.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        providers: Sequence[str] | None = None,
        threads: int | None = None,
    ) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            what = "is a folder" if self.path.is_dir() else "no such file"
            raise BadInput(f"cannot open the model {self.path}: {what}; name an .onnx file")
        if self.path.stat().st_size == 0:
            raise BadInput(f"cannot open the model {self.path}: it is empty (0 bytes); copy or export it again")
        if threads is not None and threads < 1:
            raise BadInput(f"threads is {threads}, needed 1 or more")
        options = ort.SessionOptions()
        # ONNX Runtime prints warnings to standard error by itself; what matters arrives as an exception.
        options.log_severity_level = _LOG_FATAL_ONLY
        if threads is not None:
            options.intra_op_num_threads = threads
            options.inter_op_num_threads = 1
        wanted = choose_providers(providers)
        try:
            self._session: ort.InferenceSession | None = ort.InferenceSession(
                str(self.path), sess_options=options, providers=wanted
            )
        except Exception as e:
            raise _open_error(self.path, e) from None
        self.name = self.path.stem
        self.provider: str = self._session.get_providers()[0]
        self.inputs = tuple(_spec(i) for i in self._session.get_inputs())
        self.outputs = tuple(_spec(o) for o in self._session.get_outputs())
        self.metadata: Mapping[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Runs the model once.

        Args:
            feeds: Every input by name, with the dtype and rank that the file declares.

        Returns:
            Every output by name.

        Raises:
            BadInput: The feeds do not fit the model.
            HoverlensError: The engine is closed, or the run itself failed.
        """
        if self._session is None:
            raise HoverlensError(f"{self.name}: the engine is closed; open it again")
        check_feeds(self.name, self.inputs, feeds)
        try:
            values = self._session.run(None, {k: np.ascontiguousarray(v) for k, v in feeds.items()})
        except Exception as e:
            raise HoverlensError(f"{self.name}: the run failed on {self.provider} ({_one_line(e)})") from None
        return {spec.name: np.asarray(v) for spec, v in zip(self.outputs, values, strict=True)}

    def close(self) -> None:
        self._session = None
