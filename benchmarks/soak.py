"""Does anything leak? Many questions with errors and cancellations mixed in.

    python -m hoverlens.benchmarks.soak [--bundle DIR] [--questions 500] [--json FILE]

Every fourth question is cancelled at a random moment, every seventh fails in a tool or is bad input. After each
question no sequence and no KV cell may be held; resident memory is sampled along the way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from ..runtime.bundle import Bundle, find_bundle
from ..runtime.errors import BadInput, Cancelled, HoverlensError
from ..runtime.files import write_json
from ..runtime.frame import Frame
from ..runtime.mllm.base import CancelToken
from ..runtime.mllm.llamacpp import LlamaCppBackend
from ..runtime.process import rss_bytes
from ..runtime.runtime import Runtime, load
from .agreement import QUESTIONS, SMALL
from .demo import draw_car_park

MODES = ("uavmas", "direct", "react", "no_daas", "uavmas")


def bench_soak(bundle: Bundle, questions: int = 500, seed: int = 0) -> dict[str, Any]:
    """Asks, cancels and fails ``questions`` times in one process.

    Returns:
        Outcomes, resident memory in MB at ten points of the second half (the allocator's arenas fill in the
        first), its growth in percent, and how often something was held after a question.
    """
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    held = 0
    samples: list[float] = []
    warm_up = max(1, questions // 2)
    with load(bundle, replace(SMALL, n_ctx=2048)) as runtime:
        backend = runtime.backend()
        assert isinstance(backend, LlamaCppBackend)
        # Cached features are memory on purpose; a small budget fills during the warm-up.
        backend.options = replace(backend.options, feature_cache_bytes=4_000_000)
        for i in range(questions):
            outcomes[_one(runtime, i, rng)] += 1
            pool = backend._pool
            held += (backend.sequences_in_use(), pool.cells, pool.extra_cells) != (0, 0, 0)
            if i >= warm_up and (i - warm_up) % max(1, (questions - warm_up) // 10) == 0:
                samples.append(rss_bytes() / 1e6)
            if i % 20 == 19:
                print(f"{i + 1}/{questions} {rss_bytes() / 1e6:.0f} MB", file=sys.stderr, flush=True)
    half = len(samples) // 2
    first, last = float(np.median(samples[:half])), float(np.median(samples[half:]))
    return {
        "model": bundle.name,
        "questions": questions,
        "outcomes": dict(outcomes),
        "rss_mb": [round(s, 1) for s in samples],
        "growth_percent": 100.0 * (last / first - 1.0),
        "held_after_a_question": held,
    }


def _one(runtime: Runtime, i: int, rng: random.Random) -> str:
    text, options, kind = QUESTIONS[i % len(QUESTIONS)]
    frame = Frame.from_array(draw_car_park(i % 40)[: 240 + 8 * (i % 30)])
    cancel = CancelToken()
    timer: threading.Timer | None = None
    if i % 4 == 3:
        timer = threading.Timer(rng.uniform(0.0, 0.6), cancel.cancel)
        timer.start()
    on_step = None
    if i % 7 == 6:
        if i % 2:
            text = " "
        else:
            stop_at = rng.randrange(1, 8)
            seen = 0

            def on_step(_step: dict[str, Any]) -> None:
                nonlocal seen
                seen += 1
                if seen == stop_at:
                    raise HoverlensError("the caller's callback failed")

    try:
        mode = MODES[i % len(MODES)]
        runtime.ask(frame, text, list(options) or None, kind, mode=mode, seed=i, cancel=cancel, on_step=on_step)
        return "answered"
    except Cancelled:
        return "cancelled"
    except BadInput:
        return "bad input"
    except HoverlensError:
        return "failed"
    finally:
        if timer is not None:
            timer.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask many questions and look for leaks.")
    parser.add_argument("--bundle")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--json", default="-")
    args = parser.parse_args()
    try:
        result = bench_soak(find_bundle(args.bundle), args.questions)
    except HoverlensError as e:
        print(f"soak: {e}", file=sys.stderr)
        return e.exit_status
    if args.json == "-":
        print(json.dumps(result, indent=2))
    else:
        write_json(args.json, result)
    return 1 if result["held_after_a_question"] or result["growth_percent"] > 5.0 else 0


if __name__ == "__main__":
    sys.exit(main())
