"""A KV budget below what a search needs costs time, never an answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hoverlens
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.gguf import read_gguf_header
from hoverlens.runtime.memory import MB, _Text, cells_within
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend
from hoverlens.runtime.profiles import PROFILES, Profile
from hoverlens.runtime.reasoning.settings import ONBOARD

PHOTO = Frame.from_array(np.random.default_rng(3).integers(0, 255, (96, 128, 3), dtype=np.uint8))
OPTIONS = ("zero", "one", "many")
# All tools active and no pruning: a full tree of 3 + 9 + 27 nodes.
WIDE = replace(
    PROFILES["onboard"],
    threads=1,
    reasoner=replace(
        ONBOARD,
        activation="all",
        depth=3,
        width=3,
        max_nodes=None,
        pruning=False,
        thought_tokens=24,
        evidence_tokens=6,
        la_tokens=8,
    ),
)


def ask(bundle: Bundle, profile: Profile) -> tuple[hoverlens.Answer, LlamaCppBackend]:
    with hoverlens.load(bundle, profile) as runtime:
        backend = runtime.backend()
        assert isinstance(backend, LlamaCppBackend)
        return runtime.ask(PHOTO, "How many cars?", OPTIONS), backend


def test_a_quarter_of_the_need_gives_the_same_answer(tiny_bundle: Bundle) -> None:
    full, backend = ask(tiny_bundle, WIDE)
    need = backend._pool.peak_cells
    header = read_gguf_header(tiny_bundle.need("mllm"))
    budget = need / 4 * _Text(header).cell / MB
    tight, small = ask(tiny_bundle, replace(WIDE, kv_budget_mb=budget))
    assert small.capabilities.context_tokens <= need / 4
    assert small._pool.peak_cells <= need / 4
    assert small.counters.evictions > 0
    assert (tight.answer, tight.exit, tight.stats.mllm_calls) == (full.answer, full.exit, full.stats.mllm_calls)
    assert tight.stats.prefill_tokens > full.stats.prefill_tokens


def test_a_budget_is_counted_in_whole_contexts_and_never_above_n_ctx(tiny_bundle: Bundle) -> None:
    mllm = tiny_bundle.need("mllm")
    cell = _Text(read_gguf_header(mllm)).cell
    assert cells_within(mllm, 10**12, 8192) == 8192
    cells = cells_within(mllm, 1000 * cell, 8192)
    assert 0 < cells <= 1000
    assert cells % 256 == 0


def test_a_budget_that_holds_nothing_says_what_is_needed(tiny_bundle: Bundle) -> None:
    with pytest.raises(BadInput, match="MB or more"):
        ask(tiny_bundle, replace(WIDE, kv_budget_mb=0.001))
