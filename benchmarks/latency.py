"""What sharing work saves: one recorded question run three ways, in one process.

``tree`` forks KV states and batches siblings; ``naive`` evaluates every call's whole prompt and encodes its
images again; ``direct`` is one answer at first look. The words are given (:mod:`.schedule`), so tree and
naive decode the same tokens; tools cost nothing.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.answer import STAGES
from ..runtime.bundle import Bundle
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.frame import Frame
from ..runtime.mllm.base import Counters
from ..runtime.mllm.chat import ChatFormat
from ..runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions
from ..runtime.process import peak_rss_bytes
from ..runtime.profiles import PROFILES
from ..runtime.question import Question
from ..runtime.reasoning import direct, uavmas
from ..runtime.reasoning.outcome import Outcome
from ..runtime.reasoning.session import Session
from ..runtime.tools import toolset
from ..runtime.tools.base import NO_PERCEPTION
from ..runtime.trace import Trace
from .demo import draw_car_park
from .schedule import LEAN, OPTIONS, PLAIN, QUESTION, CannedTool, Directed, Schedule, schedule, words

Progress = Callable[[int, int], None]


@dataclass
class Run:
    """One question run one way.

    Attributes:
        agents_s: Seconds by agent; a batch's time in equal parts.
        least_tokens: Prompt tokens when the shared prefix and each suffix are evaluated once.
    """

    wall_s: float
    used: Counters
    stages_s: dict[str, float]
    agents_s: dict[str, float]
    answer: str
    least_tokens: int


def bench_latency(
    bundle: Bundle,
    nodes: int = 4,
    lean: bool = False,
    questions: int = 3,
    image_px: int = 448,
    threads: int = 1,
    baseline: str | None = "naive",
    n_ctx: int = 8192,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Runs the schedule ``questions`` times each way, interleaved, and reports ratios.

    Args:
        bundle: The models; their words do not count.
        nodes: 3, 4, 6 or 9 (:func:`~.schedule.schedule`).
        lean: Short outputs instead of plain ones.
        questions: Repetitions, each with another picture.
        image_px: Side of the square picture.
        threads: CPU threads.
        baseline: ``naive``, or None to leave it out.
        progress: Called with (done, all) after each run.

    Raises:
        BadInput: A number out of range, or a bundle without an MLLM.
    """
    if questions < 1 or image_px < 16 or threads < 1:
        raise BadInput("latency needs 1 or more questions and threads, and pictures of 16 pixels or more")
    if baseline not in (None, "naive"):
        raise BadInput(f"unknown baseline {baseline!r}; use naive")
    try:
        plan = schedule(nodes, LEAN if lean else PLAIN)
    except ValueError as e:
        raise BadInput(str(e)) from None
    ways = ["direct", "tree"] + (["naive"] if baseline else [])
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    backends = {"tree": _load(bundle, threads, n_ctx, True)}
    if baseline:
        backends["naive"] = _load(bundle, threads, n_ctx, False)
    try:
        chat = ChatFormat.from_template(backends["tree"].info.chat_template)
        total = (questions + 1) * len(ways)
        done = 0
        for repeat in range(-1, questions):  # the first round warms up and does not count
            frame = picture(repeat + 1, image_px)
            for way in ways:
                run = _run(backends["naive" if way == "naive" else "tree"], chat, frame, plan, way)
                if repeat >= 0:
                    runs[way].append(run)
                done += 1
                if progress is not None:
                    progress(done, total)
        return _report(bundle, plan, backends["tree"], runs, image_px, threads)
    finally:
        for backend in backends.values():
            backend.close()


def picture(seed: int, px: int) -> Frame:
    """A drawn square picture, another for each seed, so that no cache knows it."""
    import cv2

    drawn = draw_car_park(seed)[:, 120:840]
    return Frame.from_array(np.ascontiguousarray(cv2.resize(drawn, (px, px), interpolation=cv2.INTER_AREA)))


def _load(bundle: Bundle, threads: int, n_ctx: int, share: bool) -> LlamaCppBackend:
    return LlamaCppBackend(
        bundle.need("mllm"),
        bundle.need("mmproj"),
        LlamaOptions(n_ctx=n_ctx, threads=threads, share=share, image_max_tokens=bundle.manifest.image_max_tokens),
        identity=bundle.sha256,
    )


def _run(backend: LlamaCppBackend, chat: ChatFormat, frame: Frame, plan: Schedule, way: str) -> Run:
    backend.forget()  # direct and tree look at one picture; each must encode it
    directed = Directed(backend, plan)
    question = Question.make(QUESTION, OPTIONS)
    session = Session(directed, chat, PROFILES["onboard"], frame, question, NO_PERCEPTION, Trace())
    tools = [CannedTool(t, words(plan.lengths.result)) for t in toolset()]
    before = backend.counters.copy()
    start = time.perf_counter()
    try:
        session.open()
        outcome: Outcome = direct.answer(session) if way == "direct" else uavmas.answer(session, plan.settings, tools)
    finally:
        session.close()
    wall = time.perf_counter() - start
    used = backend.counters - before
    stages = dict.fromkeys(STAGES, 0.0) | {"encode": used.encode_s, "prefill": used.prefill_s, "decode": used.decode_s}
    stages["other"] = max(0.0, wall - sum(stages.values()))
    return Run(wall, used, stages, dict(directed.seconds), outcome.value.text, directed.least_tokens)


def _report(
    bundle: Bundle, plan: Schedule, backend: LlamaCppBackend, runs: dict[str, list[Run]], image_px: int, threads: int
) -> dict[str, Any]:
    tree, one, naive = runs["tree"], runs["direct"], runs.get("naive", [])
    wall = {way: float(np.median([r.wall_s for r in rs])) for way, rs in runs.items()}
    calls = tree[0].used.mllm_calls
    if any(r.used.mllm_calls != calls for r in tree + naive):
        raise HoverlensError("the runs made different calls; the schedule is not what it should be")
    return {
        "model": f"{bundle.name} ({backend.info.n_params / 1e6:.0f} M parameters, {backend.info.architecture})",
        "schedule": plan.name,
        "lengths": vars(plan.lengths),
        "image_px": image_px,
        "threads": threads,
        "questions": len(tree),
        "mllm_calls": calls,
        "ratios": {
            "naive_over_tree_wall": _ratio([r.wall_s for r in naive], [r.wall_s for r in tree]),
            "naive_over_tree_prefill_tokens": _ratio(
                [r.used.prefill_tokens for r in naive], [r.used.prefill_tokens for r in tree]
            ),
            "uavmas_over_direct_wall_median": wall["tree"] / wall["direct"],
            "uavmas_exits_over_direct_wall_median": None,
        },
        "wall_s": wall,
        "image_encodes_per_image": float(np.mean([r.used.image_encodes for r in tree])),
        "prefill_tokens_over_minimum": float(np.mean([r.used.prefill_tokens / r.least_tokens for r in tree])),
        "answers_equal_naive_tree": [r.answer for r in naive] == [r.answer for r in tree] if naive else None,
        "tokens": {way: _tokens(rs) for way, rs in runs.items()},
        "stages": {stage: _percentiles([r.stages_s[stage] for r in tree]) for stage in STAGES},
        "stages_direct": {stage: _percentiles([r.stages_s[stage] for r in one]) for stage in STAGES},
        "agents_s": {
            role: float(np.median([r.agents_s.get(role, 0.0) for r in tree])) for role in sorted(tree[0].agents_s)
        },
        "peak_rss_mb": peak_rss_bytes() / 1e6,
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
    }


def _ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Median of the pairs' ratios; pairs ran one after the other, so noise hits both."""
    return float(np.median([a / b for a, b in zip(above, below, strict=True)])) if above else None


def _tokens(runs: Sequence[Run]) -> dict[str, float]:
    names = ("prefill_tokens", "reused_tokens", "decoded_tokens", "forced_tokens", "image_encodes", "batches")
    return {n: float(np.mean([getattr(r.used, n) for r in runs])) for n in names}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    array: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    return {f"p{p}": float(np.percentile(array, p)) for p in (50, 90, 99)}
