"""A model of Qwen3-VL-2B's real sizes and vocabulary, with random weights, goes through one question.

What it answers means nothing; memory, time and the way through are those of the real model. Run with ``pytest -m slow
-s`` to see the figures. One thread: on a busy machine, threads that wait for each other take all the time there is.
"""

from __future__ import annotations

from typing import Any

import pytest

from hoverlens.benchmarks.demo import OPTIONS
from hoverlens.benchmarks.memory import Case, bench_memory, report
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import HoverlensError
from hoverlens.runtime.memory import available_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

GB = 1_000_000_000


@pytest.fixture(scope="module")
def two_b() -> Bundle:
    """Made once and kept in the cache."""
    from hoverlens.export.random_mllm import make_random_bundle

    available = available_bytes()
    if available is not None and available < 7 * GB:
        pytest.skip(f"{available / GB:.1f} GB of memory are available, needed 7")
    try:
        return make_random_bundle(preset="2b")[0]
    except (HoverlensError, ImportError) as e:
        pytest.skip(f"no random-weight model: {e}")


def check(result: dict[str, Any]) -> None:
    """What holds for every question."""
    print("\n" + report(result))
    assert result["answer"] in OPTIONS
    peak, plan = result["rss"]["peak"], result["plan"]["total"]
    assert peak <= plan <= 1.35 * peak
    stats, seconds = result["stats"], result["seconds"]
    stages = sum(seconds[name] for name in ("encode", "prefill", "decode", "tools", "other"))
    assert stages == pytest.approx(stats["wall_s"], rel=0.02)
    assert stats["peak_rss_mb"] == pytest.approx(peak / 1e6, rel=0.02)
    assert stats["image_encodes"] >= 1
    # A picture at the bundle's limit, and at least a question behind it.
    assert stats["prefill_tokens"] > 200


def test_one_direct_question(two_b: Bundle) -> None:
    result = bench_memory(Case(str(two_b.path)))
    check(result)
    stats = result["stats"]
    assert stats["image_encodes"] == 1
    assert stats["mllm_calls"] == 1
    assert stats["nodes"] == stats["tool_calls"] == stats["pruned"] == 0
    assert result["allocated"]["kv"] == result["plan"]["kv"] == 8192 * 28 * 8 * 256 * 2


def test_one_step_of_a_search(two_b: Bundle) -> None:
    result = bench_memory(Case(str(two_b.path), mode="uavmas", depth=1, width=1))
    check(result)
    stats = result["stats"]
    assert stats["mllm_calls"] > 3
    assert stats["decoded_tokens"] > 0
    # Agents fork from the picture and the question instead of reading them again.
    assert stats["reused_tokens"] > stats["prefill_tokens"]
