"""llama.cpp's quantiser, called through its library.

The work runs in a process of its own (``python -m hoverlens.export.quantise JOB``): it is one long call into C
that can neither be interrupted nor, where a file is damaged, be kept from ending its process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..calibration.imatrix_file import ImportanceMatrix, read_imatrix
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.gguf import read_gguf_header
from ..runtime.mllm.llama_native import last_error, libraries

#: File types by the names that people use, with llama.cpp's numbers.
QUANTS = {
    **{"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q5_1": 9, "Q5_0": 8},
    **{"Q4_K_M": 15, "Q4_K_S": 14, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "IQ4_XS": 30, "Q3_K_L": 13, "Q3_K_M": 12},
    **{"Q3_K_S": 11, "IQ3_M": 27, "IQ3_S": 26, "IQ3_XXS": 23, "Q2_K": 10, "IQ2_M": 29, "IQ2_S": 28},
    **{"IQ2_XS": 20, "IQ2_XXS": 19},
}

#: Types that the converter writes by itself.
PLAIN = ("F32", "F16", "BF16")

#: Types that are useless without an importance matrix; llama.cpp ends with an error.
NEEDS_IMATRIX = ("IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS")

#: Bits of a weight, roughly, for plans.
BITS = {
    **{"F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q5_K_S": 5.6, "Q5_1": 6.0},
    **{"Q5_0": 5.6, "Q4_K_M": 4.9, "Q4_K_S": 4.6, "Q4_1": 5.1, "Q4_0": 4.7, "IQ4_NL": 4.7, "IQ4_XS": 4.4},
}

_STEP = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_WORD = "hoverlens-progress"

Progress = Callable[[int, int], None]


def quant_named(name: str) -> str:
    """The canonical spelling.

    Raises:
        BadInput: Unknown.
    """
    found = name.upper().replace("-", "_")
    if found not in QUANTS:
        raise BadInput(f"unknown quantisation {name!r}; choose one of {', '.join(QUANTS)}")
    return found


def check_imatrix(matrix: ImportanceMatrix, model: str | os.PathLike[str], name: str) -> None:
    """Refuses a matrix of another model.

    Raises:
        BadInput: It lacks a layer's weight, or has other columns.
    """
    header = read_gguf_header(model)
    for tensor in header.tensors:
        if len(tensor.shape) < 2 or not re.fullmatch(r"blk\.\d+\.(attn|ffn)_\w+\.weight", tensor.name):
            continue
        columns = matrix.entries.get(tensor.name)
        if columns is None and tensor.name.startswith("blk.0."):
            raise BadInput(f"importance matrix {name} has nothing on {tensor.name}; make it with this very model")
        experts = tensor.shape[2] if len(tensor.shape) > 2 else 1
        if columns is not None and columns.sums.shape != (experts, tensor.shape[0]):
            found = "x".join(map(str, columns.sums.shape))
            raise BadInput(
                f"importance matrix {name} is of another model: {tensor.name} has {tensor.shape[0]} columns, found "
                f"{found}; make it with this very model"
            )


def quantise(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    quant: str,
    imatrix: ImportanceMatrix | None = None,
    threads: int = 1,
) -> None:
    """Quantises a GGUF text model in this process.

    Weights whose rows do not fit the type's blocks fall back to a type that they fit, as llama.cpp decides.

    Raises:
        HoverlensError: llama.cpp refused.
    """
    lib, _ = libraries()
    params = lib.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = QUANTS[quant]
    # What the C struct points to must live until the call returns.
    kept: list[Any] = []
    if imatrix is not None:
        entries = (lib.llama_model_imatrix_data * (len(imatrix.entries) + 1))()
        for i, (name, columns) in enumerate(sorted(imatrix.entries.items())):
            means = columns.means()
            kept.append(means)
            entries[i].name = name.encode()
            entries[i].data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entries[i].size = means.size
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(lib.llama_model_imatrix_data))
        kept.append(entries)
    status = lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if status != 0:
        raise HoverlensError(f"llama.cpp cannot quantise to {quant} ({last_error() or f'status {status}'})")


def run_quantise(
    source: Path,
    target: Path,
    quant: str,
    imatrix: Path | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> None:
    """:func:`quantise` in a process of its own, which ends with this one.

    Raises:
        HoverlensError: It failed; the message says how.
    """
    job = {"source": str(source), "target": str(target), "quant": quant, "threads": threads}
    job["imatrix"] = str(imatrix) if imatrix else ""
    with subprocess.Popen(
        [sys.executable, "-m", "hoverlens.export.quantise", json.dumps(job)],
        cwd=source.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        last = ""
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(_WORD):
                    _, done, total = line.split()
                    if progress is not None:
                        progress(int(done), int(total))
                elif line.strip():
                    last = line.strip()
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise HoverlensError(f"quantising to {quant} failed: {last[:300] or f'exit status {child.returncode}'}")


def die_with_parent() -> None:
    """A killed export must not leave a process behind that goes on writing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(arguments: list[str]) -> int:
    """``python -m hoverlens.export.quantise JOB``"""
    die_with_parent()
    job = json.loads(arguments[0])
    lib, _ = libraries()

    def forward(_level: int, text: bytes | None, _user: Any) -> None:
        message = (text or b"").decode("utf-8", "replace")
        if step := _STEP.search(message):
            print(_WORD, step.group(1), step.group(2), flush=True)
        elif _level == 4:
            print(message.strip(), flush=True)

    callback = lib.llama_log_callback(forward)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        matrix = read_imatrix(job["imatrix"]) if job["imatrix"] else None
        quantise(job["source"], job["target"], job["quant"], matrix, job["threads"])
    except HoverlensError as e:
        print(e, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
