"""LA runs on the bundle's thinking model, which sees the photo, the question and the whole history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hoverlens
from hoverlens.export.assemble import assemble
from hoverlens.export.random_mllm import make_random_bundle
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.mllm.base import ChooseRequest, Text
from hoverlens.runtime.mllm.chat import ChatFormat
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions
from hoverlens.runtime.profiles import PROFILES
from hoverlens.runtime.reasoning.settings import ONBOARD
from hoverlens.runtime.trace import Trace

PHOTO = Frame.from_array(np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8))
OPTIONS = ("zero", "one", "many")
SMALL = replace(
    PROFILES["onboard"],
    threads=1,
    reasoner=replace(ONBOARD, activation="all", depth=1, width=1, la="winner", think_tokens=12, thought_tokens=4),
)


@pytest.fixture(scope="module")
def thinking_bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny model, and other random weights of the same sizes as its thinking variant."""
    try:
        other = make_random_bundle(preset="tiny", seed=5)[0]
    except HoverlensError as e:
        pytest.skip(f"no random-weight model: {e}")
    return assemble(
        tmp_path_factory.mktemp("thinking") / "bundle",
        mllm=tiny_bundle.need("mllm"),
        mmproj=tiny_bundle.need("mmproj"),
        mllm_thinking=other.need("mllm"),
    )


def test_la_alone_runs_on_the_thinking_model_and_is_counted(thinking_bundle: Bundle) -> None:
    trace = Trace()
    with hoverlens.load(thinking_bundle, SMALL) as runtime:
        answer = runtime.ask(PHOTO, "How many cars?", OPTIONS, trace=trace)
        assert runtime.backend().sequences_in_use() == 0  # type: ignore[attr-defined]
        thinker = runtime._thinking
        assert thinker is not None
        thinking = thinker.backend
        assert thinking.sequences_in_use() == 0  # type: ignore[attr-defined]
        assert thinking.counters.mllm_calls == 1
        assert thinking.counters.image_encodes == 0
        assert thinking.counters.prefill_tokens > 0
    calls = [e for e in trace.events if e["event"] == "call"]
    assert answer.stats.mllm_calls == len(calls)
    assert answer.stats.image_encodes == 1 + sum(e["event"] == "tool" and e["tool"] == "zoom" for e in trace.events)
    (la,) = [e for e in calls if e["role"].startswith("LA")]
    assert "</think>" in la["output"]
    assert la["output"].count('"answer": "') == 1


def test_a_mode_without_la_never_loads_it(thinking_bundle: Bundle) -> None:
    with hoverlens.load(thinking_bundle, SMALL) as runtime:
        runtime.ask(PHOTO, "How many cars?", OPTIONS, mode="direct")
        assert runtime._thinking is None


def test_borrowed_features_give_the_answers_of_a_model_with_a_projector_of_its_own(thinking_bundle: Bundle) -> None:
    options = LlamaOptions(n_ctx=1024, threads=1, image_max_tokens=64)
    mllm, mmproj = thinking_bundle.need("mllm"), thinking_bundle.need("mmproj")
    thinking = thinking_bundle.need("mllm_thinking")
    with (
        LlamaCppBackend(mllm, mmproj, options) as lender,
        LlamaCppBackend(thinking, None, options, projector_of=lender) as borrower,
        LlamaCppBackend(thinking, mmproj, options) as whole,
    ):
        chat = ChatFormat.from_template(whole.info.chat_template)
        scores = []
        for reader, encoder in ((borrower, lender), (whole, whole)):
            with reader.prefix(chat.open("See.", encoder.encode(PHOTO.rgb), Text("How many?"))) as state:
                scores.append(reader.choose([ChooseRequest(state, OPTIONS, chat.close())])[0].scores)
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


def test_a_model_of_another_width_cannot_borrow(tiny_bundle: Bundle, random_bundle: Bundle) -> None:
    options = LlamaOptions(n_ctx=512, threads=1)
    with (
        LlamaCppBackend(tiny_bundle.need("mllm"), tiny_bundle.need("mmproj"), options) as lender,
        pytest.raises(BadInput, match="two variants of one model"),
    ):
        LlamaCppBackend(random_bundle.need("mllm"), None, options, projector_of=lender)


def test_a_bundle_without_one_lets_the_same_weights_conclude(tiny_bundle: Bundle, tmp_path: Path) -> None:
    trace = Trace()
    with hoverlens.load(tiny_bundle, SMALL) as runtime:
        runtime.ask(PHOTO, "How many cars?", OPTIONS, trace=trace)
        assert runtime._thinking is None
    (la,) = [e for e in trace.events if e["event"] == "call" and e["role"].startswith("LA")]
    assert la["output"].startswith('{"reasoning": "')
