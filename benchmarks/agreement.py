"""Do shared and naive runs give the same answers? And where they part, was it a near tie?

    python -m hoverlens.benchmarks.agreement [--bundle DIR] [--questions 30] [--json FILE]

Each question is asked in uavmas mode with sharing and without, on drawn pictures. Every draw is recorded with
its margin (how far the runner-up was behind, in logits). Where two runs of one agent draw different tokens,
the margin at the first difference tells whether rounding can explain it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.answer import Answer
from ..runtime.bundle import Bundle, find_bundle
from ..runtime.errors import HoverlensError
from ..runtime.files import write_json
from ..runtime.frame import Frame
from ..runtime.mllm.base import CancelToken, Choice, ChooseRequest
from ..runtime.mllm.llamacpp import LlamaCppBackend
from ..runtime.mllm.sampling import Sampler
from ..runtime.profiles import PROFILES, Profile
from ..runtime.reasoning.settings import ONBOARD
from ..runtime.runtime import load
from ..runtime.trace import Trace
from .demo import draw_car_park

QUESTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("How many cars can you see?", ("1", "3", "5", "7"), "option"),
    ("Is any car red?", ("yes", "no"), "option"),
    ("Which of the following objects are present in the image?", ("car", "bus", "lawn", "boat"), "options"),
    ("Locate the yellow car.", (), "box"),
    ("What stands beside the lawn?", (), "text"),
    (
        "Which between <0.100><0.400><0.200><0.600> and <0.700><0.400><0.800><0.600> is closer?",
        ("first", "second"),
        "option",
    ),
)

SMALL: Profile = replace(
    PROFILES["onboard"],
    threads=1,
    max_tokens=24,
    reasoner=replace(
        ONBOARD, depth=2, width=2, thought_tokens=12, evidence_tokens=8, tip_tokens=6, la_tokens=16, text_tokens=12
    ),
)


class Draws:
    """Every decision in the order in which its call began: key to [(token or option, margin)].

    The key of a sampler is its seed, which each agent's call has for itself; of a choice, its label and number.
    """

    def __init__(self) -> None:
        self.by_seed: dict[int | str, list[tuple[int, float]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        draw, choose = Sampler.draw, LlamaCppBackend.choose

        def recorded(sampler: Sampler, logits: NDArray[np.float32]) -> int:
            token = draw(sampler, logits)
            self.by_seed.setdefault(sampler._s.seed, []).append((token, _margin(sampler, logits, token)))
            return token

        def chosen(
            backend: LlamaCppBackend, requests: Sequence[ChooseRequest], cancel: CancelToken | None = None
        ) -> list[Choice]:
            choices = choose(backend, requests, cancel)
            for request, choice in zip(requests, choices, strict=True):
                key = f"{request.label} {len(self.by_seed)}"
                self.by_seed[key] = [(choice.index, choice.logits_gap)]
            return choices

        Sampler.draw = recorded  # type: ignore[method-assign, assignment]
        LlamaCppBackend.choose = chosen  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Sampler.draw = draw  # type: ignore[method-assign]
            LlamaCppBackend.choose = choose  # type: ignore[method-assign]


def _margin(sampler: Sampler, logits: NDArray[np.float32], token: int) -> float:
    """How far behind the runner-up was, in logits; infinite where there was no other."""
    temperature = sampler._s.temperature
    ids = np.flatnonzero(np.isfinite(logits))
    x = logits[ids].astype(np.float64)
    if temperature > 0:
        x += temperature * sampler._noise(ids)
    rest = x[ids != token]
    return float(x[ids == token][0] - rest.max()) if len(rest) else float("inf")


def bench_agreement(bundle: Bundle, questions: int = 30, profile: Profile = SMALL) -> dict[str, Any]:
    """Asks each question twice and compares.

    Returns:
        Counts of equal answers and equal draws, and the margin at each first difference.
    """
    runs: dict[bool, list[tuple[Answer, Draws, list[dict[str, Any]]]]] = {True: [], False: []}
    for share in (True, False):
        with load(bundle, profile, share=share) as runtime:
            for i in range(questions):
                text, options, kind = QUESTIONS[i % len(QUESTIONS)]
                frame = Frame.from_array(draw_car_park(i // len(QUESTIONS)))
                draws, trace = Draws(), Trace()
                with draws.recording():
                    answer = runtime.ask(frame, text, list(options) or None, kind, seed=i, trace=trace)
                runs[share].append((answer, draws, trace.events))
                print(f"{'shared' if share else 'naive'} {i + 1}/{questions}", file=sys.stderr, flush=True)
    parted: list[dict[str, Any]] = []
    equal_answers, calls, equal_calls = 0, 0, 0
    for i, (one, other) in enumerate(zip(runs[True], runs[False], strict=True)):
        equal_answers += one[0].same_as(other[0]) or _same_but_rounding(one[0], other[0])
        first = _first_difference(one[1], other[1])
        common = set(one[1].by_seed) & set(other[1].by_seed)
        calls += len(common)
        equal_calls += sum(_tokens(one[1], s) == _tokens(other[1], s) for s in common)
        if first is not None:
            parted.append({"question": i, "margin": first, "answers": [one[0].answer, other[0].answer]})
    return {
        "model": bundle.name,
        "questions": questions,
        "equal_answers": equal_answers,
        "sampled_calls": calls,
        "equal_calls": equal_calls,
        "parted": parted,
        "largest_margin_where_parted": max((p["margin"] for p in parted), default=0.0),
        "mllm_calls": sum(a.stats.mllm_calls for a, _, _ in runs[True]),
        "wall_s": {
            "shared": sum(a.stats.wall_s for a, _, _ in runs[True]),
            "naive": sum(a.stats.wall_s for a, _, _ in runs[False]),
        },
    }


def _tokens(draws: Draws, seed: int | str) -> list[int]:
    return [token for token, _ in draws.by_seed[seed]]


def _first_difference(one: Draws, other: Draws) -> float | None:
    """The margin where the two runs first part: everything after it may follow from it.

    Samplers are in the order in which they drew first, so the first that differs is the cause.
    """
    for seed, draws in one.by_seed.items():
        for (a, margin), (b, other_margin) in zip(draws, other.by_seed.get(seed, []), strict=False):
            if a != b:
                return min(margin, other_margin)
    return None


def _same_but_rounding(a: Answer, b: Answer) -> bool:
    """Equal answers whose probabilities differ by no more than rounding."""
    same = (a.answer, a.options, a.box, a.exit) == (b.answer, b.options, b.box, b.exit)
    return same and (a.confidence is None or b.confidence is None or abs(a.confidence - b.confidence) < 0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare shared with naive runs, question by question.")
    parser.add_argument("--bundle")
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--json", default="-")
    args = parser.parse_args()
    try:
        result = bench_agreement(find_bundle(args.bundle), args.questions)
        if args.json == "-":
            print(json.dumps(result, indent=2))
        else:
            write_json(args.json, result)
    except HoverlensError as e:
        print(f"agreement: {e}", file=sys.stderr)
        return e.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
