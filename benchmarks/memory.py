"""Memory against the plan, and seconds a stage, of one question on a bundle.

    python -m hoverlens.benchmarks.memory --bundle DIR --json memory.json

The question is asked in a process of its own, since a process's peak is that of all it ever did. A single
question leaves most of the cache empty, and pages that nothing wrote are not resident: ``--fill`` then fills the
cache and makes the largest forward pass that the settings allow, which is what the plan has to cover.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.bundle import Bundle, find_bundle
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.files import write_json
from ..runtime.frame import Frame
from ..runtime.mllm.base import Text
from ..runtime.process import peak_rss_bytes, rss_bytes
from ..runtime.profiles import PROFILES, Profile, profile_named
from ..runtime.runtime import as_frame
from .demo import OPTIONS, QUESTION, draw_car_park

#: What llama.cpp says of its buffers, by the plan's names for them.
_SIZES = {
    "weights": re.compile(r"(?:model buffer size =|model size:)\s+([\d.]+) MiB"),
    "kv": re.compile(r"KV buffer size =\s+([\d.]+) MiB"),
    "outputs": re.compile(r"output buffer size =\s+([\d.]+) MiB"),
    "activations": re.compile(r"sched_reserve:.*compute buffer size =\s+([\d.]+) MiB"),
    "vision": re.compile(r"reserve_compute_meta:.*compute buffer size =\s+([\d.]+) MiB"),
}
_GROWING = ("vision", "activations")


@dataclass(frozen=True)
class Case:
    """What is measured. None leaves a setting as the profile or the bundle has it.

    Attributes:
        bundle: The bundle's folder.
        profile: Name of the profile.
        n_ctx: KV cells.
        n_batch: Most tokens in a forward pass.
        image_tokens: Most tokens of the image.
        threads: CPU threads; one for comparable times.
        image: A photo; None draws one that is larger than any limit.
        mode: How to reason.
        depth: Most steps of a path, in a mode that searches.
        width: Most children of a node.
        fill: Fill the cache afterwards.
    """

    bundle: str
    profile: str = "onboard"
    n_ctx: int | None = None
    n_batch: int | None = None
    image_tokens: int | None = None
    threads: int | None = 1
    image: str | None = None
    mode: str = "direct"
    depth: int | None = None
    width: int | None = None
    fill: bool = False

    def settings(self) -> Profile:
        """The profile with this case's changes."""
        profile = profile_named(self.profile)
        return replace(
            profile,
            threads=self.threads,
            reasoner=replace(profile.reasoner, **self._given("depth", "width")),
            **self._given("n_ctx", "n_batch"),
        )

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def opened(self) -> Bundle:
        """The bundle, with this case's limit on an image's tokens."""
        bundle = find_bundle(self.bundle)
        if self.image_tokens is None:
            return bundle
        limit = {"image_max_tokens": self.image_tokens}
        return Bundle(bundle.path, bundle.manifest.model_copy(update=limit))


def bench_memory(case: Case) -> dict[str, Any]:
    """Measures a case in a fresh process.

    Returns:
        Sizes in bytes. ``plan``: by purpose. ``allocated``: what llama.cpp says it took, by the same names.
        ``rss``: resident memory at each stage, and its ``peak``; ``anonymous`` leaves out mapped files.
        ``seconds``: ``load``, the question and its stages; ``cpu_seconds`` are the processor's, which others on the
        machine do not lengthen. ``plan_over_peak``: 1 or more if the plan holds.

    Raises:
        BadInput: The bundle or the image cannot be used.
        HoverlensError: The measurement failed.
    """
    command = [sys.executable, "-m", f"{__package__}.memory", "--measure"]
    environment = os.environ | {"OMP_NUM_THREADS": str(case.threads)} if case.threads else dict(os.environ)
    done = subprocess.run(
        command, input=json.dumps(vars(case)), capture_output=True, text=True, errors="replace", env=environment
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        kind = BadInput if done.returncode == BadInput.exit_status else HoverlensError
        raise kind(last.removeprefix("memory: "))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(case: Case) -> dict[str, Any]:
    """Measures a case in this process; see :func:`bench_memory`."""
    import hoverlens

    rss = {"imported": rss_bytes()}
    allocated = _Allocations()
    with allocated, hoverlens.load(case.opened(), case.settings()) as runtime:
        plan = runtime.memory_plan()
        seconds: dict[str, float] = {}
        cpu: dict[str, float] = {}
        with _timed("load", seconds, cpu):
            backend = runtime.backend()
        rss["loaded"] = rss_bytes()
        photo = as_frame(case.image) if case.image is not None else _drawn()
        with _timed("question", seconds, cpu):
            answer = runtime.ask(photo, QUESTION, OPTIONS, mode=case.mode)
        seconds |= answer.stages_s
        rss["asked"] = rss_bytes()
        peak_of_question = peak_rss_bytes()
        if runtime.bundle.file("detector"):
            runtime.detect(photo)
        if runtime.bundle.file("depth"):
            runtime.depth(photo)
        rss["perceived"] = rss_bytes()
        if case.fill:
            with _timed("fill", seconds, cpu):
                fill_cache(backend)
            rss["filled"] = rss_bytes()
        peak = peak_rss_bytes()
        settings = runtime.profile
        return {
            "bundle": runtime.bundle.name,
            "profile": settings.name,
            "mode": case.mode,
            "n_ctx": settings.n_ctx,
            "n_batch": settings.n_batch,
            "threads": settings.threads,
            "image_max_tokens": runtime.bundle.manifest.image_max_tokens,
            "plan": plan.to_dict(),
            "allocated": allocated.bytes,
            "rss": {**rss, "anonymous": _anonymous_bytes(), "peak_of_question": peak_of_question, "peak": peak},
            "plan_over_peak_of_question": round(plan.total / peak_of_question, 3),
            "plan_over_peak": round(plan.total / peak, 3),
            "seconds": {name: round(s, 3) for name, s in seconds.items()},
            "cpu_seconds": {name: round(s, 3) for name, s in cpu.items()},
            "answer": answer.answer,
            "stats": vars(answer.stats),
        }


@contextmanager
def _timed(name: str, seconds: dict[str, float], cpu: dict[str, float]) -> Iterator[None]:
    start, cpu_start = time.perf_counter(), time.process_time()
    yield
    seconds[name] = time.perf_counter() - start
    cpu[name] = time.process_time() - cpu_start


def _drawn() -> Frame:
    # Twice the drawn size: the limit on an image's tokens, not the photo, decides how many it takes.
    return as_frame(np.ascontiguousarray(draw_car_park(0).repeat(2, 0).repeat(2, 1)))


def _anonymous_bytes() -> int:
    """Resident memory that no file backs; 0 where /proc is absent."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
    return int(found.group(1)) * 1024 if found else 0


class _Allocations(logging.Handler):
    """Collects the buffer sizes that llama.cpp reports, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.bytes: dict[str, int] = {}
        self._log = logging.getLogger("hoverlens.llama")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        for name, pattern in _SIZES.items():
            if found := pattern.search(text):
                size = round(float(found.group(1)) * 2**20)
                old = self.bytes.get(name, 0)
                # Some buffers are made anew when they must grow; the others come one for each file or device.
                self.bytes[name] = max(old, size) if name in _GROWING else old + size

    def __enter__(self) -> _Allocations:
        self._before = self._log.level
        self._log.setLevel(logging.INFO)
        self._log.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._before)


def fill_cache(backend: Any) -> None:
    """Fills the KV cache and makes one forward pass of the most tokens and outputs over it.

    Evaluating as many tokens would take minutes for a large model, so one run is evaluated and its state loaded
    into other sequences, each time into cells of its own.
    """
    from ..runtime.mllm.llama_native import libraries

    lib, _ = libraries()
    context = backend.context
    sequences = backend.options.n_sequences
    # Room for the last pass, and for the pass that makes the run.
    room = context.n_ctx - context.n_batch
    length = max(1, room // (sequences - 1))
    tokens = backend.model.tokenize("the car beside the house " * length, special=False)[:length]
    with backend.prefix([Text("cars " * 4)]):
        pass
    for s in range(sequences):
        context.drop(s)
    for at in range(0, length, context.n_batch):
        run = tokens[at : at + context.n_batch]
        _decoded(context.decode(run, range(at, at + len(run)), [0] * len(run), [False] * len(run), None))
    size = lib.llama_state_seq_get_size(context.ptr, 0)
    state = (ctypes.c_uint8 * size)()
    lib.llama_state_seq_get_data(context.ptr, state, size, 0)
    for s in range(1, sequences - 1):
        if lib.llama_state_seq_set_data(context.ptr, state, size, s) == 0:
            raise HoverlensError("llama.cpp refuses a sequence's own state; run without --fill")
    del state
    run = [tokens[0]] * context.n_batch
    outputs = [i < context.n_outputs for i in range(context.n_batch)]
    last = sequences - 1
    _decoded(context.decode(run, range(context.n_batch), [last] * len(run), outputs, None))


def _decoded(status: int) -> None:
    if status != 0:
        raise HoverlensError(f"llama.cpp failed to decode (status {status})")


def report(result: Mapping[str, Any]) -> str:
    """A result for people, in MB of 10^6 bytes."""
    plan, allocated, rss = result["plan"], result["allocated"], result["rss"]
    lines = [
        f"{result['bundle']}, {result['mode']}, n_ctx {result['n_ctx']}, n_batch {result['n_batch']}, "
        f"image_max_tokens {result['image_max_tokens']}, threads {result['threads']}",
        f"{'MB':<14}{'plan':>8}{'llama.cpp':>12}",
    ]
    for name, size in plan.items():
        taken = f"{allocated[name] / 1e6:12.1f}" if name in allocated else ""
        lines.append(f"{name:<14}{size / 1e6:8.1f}{taken}")
    lines += [f"{'rss ' + name:<22}{size / 1e6:8.1f}" for name, size in rss.items()]
    lines.append(f"plan / peak {result['plan_over_peak']}, of the question {result['plan_over_peak_of_question']}")
    for title in ("seconds", "cpu_seconds"):
        lines.append(f"{title}: " + ", ".join(f"{name} {s:.2f}" for name, s in result[title].items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m hoverlens.benchmarks.memory``"""
    parser = argparse.ArgumentParser(
        prog="python -m hoverlens.benchmarks.memory",
        description="Memory against the plan, and seconds a stage, of one question on a bundle.",
    )
    parser.add_argument("--bundle", metavar="DIR", help="the bundle's folder (default: as for hoverlens ask)")
    parser.add_argument("--profile", choices=list(PROFILES), default="onboard")
    parser.add_argument("--n-ctx", type=int, metavar="N", help="KV cells")
    parser.add_argument("--n-batch", type=int, metavar="N", help="most tokens in a forward pass")
    parser.add_argument("--image-tokens", type=int, metavar="N", help="most tokens of the image")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    parser.add_argument("--image", metavar="FILE", help="a photo (default: a drawn one)")
    parser.add_argument("--mode", default="direct", help="how to reason (default: direct)")
    parser.add_argument("--depth", type=int, metavar="N", help="most steps of a path, in a mode that searches")
    parser.add_argument("--width", type=int, metavar="N", help="most children of a node")
    parser.add_argument("--fill", action="store_true", help="also fill the cache: the most that can be taken")
    parser.add_argument("--json", metavar="FILE", help="write the result; - prints it")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    try:
        if given.measure:
            print(json.dumps(measure(Case(**json.load(sys.stdin)))))
            return 0
        case = Case(
            bundle=str(find_bundle(given.bundle, verify=False).path),
            **{n: getattr(given, n) for n in vars(Case("")) if n != "bundle"},
        )
        result = bench_memory(case)
        if given.json == "-":
            print(json.dumps(result, indent=2))
        else:
            if given.json:
                write_json(given.json, result)
            print(report(result))
    except HoverlensError as e:
        print(f"memory: {e}", file=sys.stderr)
        return e.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
