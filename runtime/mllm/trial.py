"""The first load of a model happens in a process of its own, since llama.cpp ends its process on some damaged files.

A checksum does not help where the file was damaged before it was taken, and no reading of headers finds all that
llama.cpp asserts. So each pair of files is loaded once by a child that sees one picture and reads one token; what
went well is remembered in the cache for the files' contents and the versions of llama.cpp and hoverlens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from ... import __version__
from ..errors import BadInput, HoverlensError
from ..files import atomic_write_text
from ..paths import make_cache_dir

TIME_LIMIT_S = 300.0
"""Generous: a large model on a slow card has to be read whole."""

_N_CTX = 256
_SIDE = 64
_PACKAGE = Path(__file__).resolve().parents[2]


def try_load(
    mllm: str | os.PathLike[str], mmproj: str | os.PathLike[str], mllm_sha256: str, mmproj_sha256: str
) -> None:
    """Loads a text model and its projector in a child process, unless these have been loaded well before.

    Args:
        mllm: Text model, GGUF.
        mmproj: Its projector, GGUF.
        mllm_sha256: Of the text model's content.
        mmproj_sha256: Of the projector's.

    Raises:
        BadInput: llama.cpp refuses a file, or a file makes it end its process.
        HoverlensError: The trial could not be made: llama.cpp is missing, or memory or time did not suffice.
    """
    memory = _memory(mllm_sha256, mmproj_sha256)
    if memory is not None and memory.is_file():
        return
    _run(Path(mllm).absolute(), Path(mmproj).absolute())
    if memory is not None:
        # Failing to write loses only the memory: the next start tries again.
        with contextlib.suppress(HoverlensError):
            atomic_write_text(memory, json.dumps({"mllm": mllm_sha256, "mmproj": mmproj_sha256}))


def _memory(*digests: str) -> Path | None:
    try:
        llama = metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        llama = "unknown"
    key = hashlib.sha256("|".join((*digests, llama, __version__)).encode()).hexdigest()[:32]
    try:
        return make_cache_dir("trials") / f"{key}.json"
    except HoverlensError:
        return None


def _run(mllm: Path, mmproj: Path) -> None:
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONSAFEPATH": "1"}
    # It would print more lines after llama.cpp's own.
    environment.pop("PYTHONFAULTHANDLER", None)
    if _PACKAGE.name == "hoverlens":
        found = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE.parent), *([found] if found else [])])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hoverlens.runtime.mllm.trial", str(mllm), str(mmproj)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except OSError as e:
        raise HoverlensError(f"cannot start {sys.executable} to try {mllm}: {e.strerror}; free memory") from None
    except subprocess.TimeoutExpired:
        raise HoverlensError(
            f"llama.cpp did not load {mllm} in {TIME_LIMIT_S:.0f} s; take a smaller model or a faster disk"
        ) from None
    if done.returncode == 0:
        return
    stages = done.stdout.split()
    told = bool(stages) and stages[-1] == "told"
    file = mmproj if stages and stages[-1] == "mmproj" else mllm
    lines = [" ".join(line.split()) for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1][:1000] if lines else ""
    if told and done.returncode == BadInput.exit_status:
        raise BadInput(last)
    if told:
        raise HoverlensError(last)
    if not stages:
        why = last or f"exit status {done.returncode}"
        raise HoverlensError(f"cannot try {mllm} in a process of its own ({why}); see 'hoverlens doctor'")
    if done.returncode == -signal.SIGKILL:
        raise HoverlensError(f"the process that tried {file} was killed (SIGKILL), probably for memory; free memory")
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        why = f"{name}: {last}" if last else name
        raise BadInput(f"llama.cpp crashes on {file} ({why}); export or download the model again")
    raise BadInput(
        f"llama.cpp fails on {file} (exit status {done.returncode}: {last or 'no reason given'}); "
        "export or download the model again"
    )


def main(mllm: str, mmproj: str) -> int:
    """What the child does: names each file on standard output before it touches it.

    Returns:
        The exit status; the reason stands on standard error.
    """
    # Ctrl-C is for the parent, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _load(Path(mllm), Path(mmproj))
    except HoverlensError as e:
        _say("told")
        print(str(e), file=sys.stderr)
        return e.exit_status
    return 0


def _say(stage: str) -> None:
    print(stage, flush=True)


def _load(mllm: Path, mmproj: Path) -> None:
    import numpy as np

    from .llama_native import Context, Model, Projector, libraries

    libraries()
    _say("mllm")
    model = Model(mllm)
    context = Context(model, _N_CTX, 2, _N_CTX, 1, False, None)
    status = context.decode([0], [0], [0], [True], None)
    if status != 0:
        raise BadInput(f"{mllm}: llama.cpp cannot decode a token (status {status}); export or download the model again")
    context.logits(0)
    _say("mmproj")
    projector = Projector(mmproj, model, 1, None, None)
    for chunk in projector.tokenize(np.full((_SIDE, _SIDE, 3), 128, np.uint8)):
        if chunk.pointer is not None:
            chunk.embedding = projector.encode_chunk(chunk)
            # Some projectors give any picture more tokens than this small context holds.
            if chunk.n_tokens < _N_CTX:
                status = projector.decode_chunk(context, chunk, 1, 0, None)
                if status != 0:
                    raise BadInput(
                        f"{mllm}: llama.cpp cannot read a picture (status {status}); export or download the model again"
                    )
    projector.close()
    context.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
