"""The tools on a real backend with random weights: grammars hold, pictures encode, nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.perception.depth import DepthMap
from hoverlens.runtime.profiles import PROFILES
from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning.session import Session
from hoverlens.runtime.runtime import Runtime
from hoverlens.runtime.tools import Describe, Detect, Distance, Ground, Zoom, run_tools
from hoverlens.runtime.trace import Trace

BOX = (0.1, 0.25, 0.3, 0.5)


@pytest.fixture
def session(tiny_bundle: Bundle, perception: Any) -> Iterator[Session]:
    rgb = np.random.default_rng(1).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    perception.depth = DepthMap(np.ones((6, 10), np.float32), "metric", (160, 96))
    with Runtime(tiny_bundle) as runtime:
        backend, chat = runtime._mllm()
        question = Question.make("What is there?")
        opened = Session(backend, chat, PROFILES["onboard"], Frame.from_array(rgb), question, perception, Trace())
        opened.open()
        yield opened
        opened.close()


def jobs() -> list[Any]:
    return [
        (Zoom(out_size=64), {"region": BOX}),
        (Describe(), {"region": BOX}),
        (Distance(), {"boxes": [BOX]}),
        (Ground(), {"target": "the red car"}),
        (Detect(confirm_existence="never", max_boxes=3), {"category": "trees"}),
    ]


def test_every_tool_works_on_a_real_backend(session: Session, perception: Any) -> None:
    zoomed, described, measured, grounded, detected = run_tools(session, perception, jobs())
    assert zoomed.image is not None
    assert zoomed.image.n_tokens > 0
    assert described.ok or "says nothing" in described.text
    assert measured.ok
    # A random model's box may lack an area, never a form.
    assert grounded.ok or "without area" in grounded.text
    assert detected.ok
    calls = {e["role"]: e for e in session.trace.events if e["event"] == "call"}
    assert set(calls) == {"tool describe", "tool ground", "tool detect boxes"}
    assert all(c["batch"] == 3 and c["reused_tokens"] > 0 for c in calls.values())


def test_the_same_question_gets_the_same_feedback(session: Session, perception: Any) -> None:
    first = [f.text for f in run_tools(session, perception, jobs())]
    assert [f.text for f in run_tools(session, perception, jobs())] == first
    alone = [run_tools(session, perception, [job])[0].text for job in jobs()]
    assert alone == first
