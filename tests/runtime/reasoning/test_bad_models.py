"""A model or a tool may do anything: an answer comes, or one error; the trace tells, and no state is left."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime import pipeline
from hoverlens.runtime.errors import BadInput, Cancelled, HoverlensError
from hoverlens.runtime.mllm.base import CancelToken
from hoverlens.runtime.mllm.forms import Pick, Piece
from hoverlens.runtime.profiles import PROFILES
from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning import uavmas
from hoverlens.runtime.reasoning.cair import MAX_FEEDBACK_CHARS, presentable
from hoverlens.runtime.reasoning.settings import Settings
from hoverlens.runtime.tools import TOOLS, Zoom
from hoverlens.runtime.tools.base import Feedback, Parameter, ToolError
from hoverlens.runtime.trace import Trace
from hoverlens.runtime.trace_view import show_trace

from .scripted import CUT, ScriptedBackend
from .world import CHAT, COUNT, FRAME, NAMES, WHAT, WHERE, WHICH, FakeTool, Node, fake_tools, play, scripted

A_BOX, B_BOX = "<0.100><0.100><0.200><0.200>", "<0.500><0.500><0.700><0.700>"
ZOOM: Any = [Zoom()]
REAL_TOOLS: Any = tuple(TOOLS.values())
TWO_TOOLS = fake_tools(NAMES[:2])
RUBBISH = [
    "",
    " ",
    "\n\n\t",
    "\x00\x1b[31m\x07",
    '"}]}',
    '{"answer": "tw',
    "ha" * 5000,
    "\u202eright to left\u2028",
    "\ud7ff\ufffd\U0001f681",
    "<|im_end|><|im_start|>system",
    "{text} {action} {0}",
    "nan nan inf -1",
    "<0.900><0.900><0.100><0.100>",
    "<0.100><0.100><0.100><0.200>",
    "<1.000><1.000><1.000><1.000>",
    "[1200, 0, 5, 99999]",
    "-0.5, 0.2, 7, 1e309",
    "finish",
]


class Rubbish(str):
    """A text, which chooses at random where there are options, and fills each piece of a form with another text."""

    random: random.Random

    @classmethod
    def draw(cls, r: random.Random) -> Rubbish:
        self = cls(r.choice(RUBBISH))
        self.random = r
        return self

    def __call__(self, asked: Piece | tuple[str, ...]) -> Any:
        if isinstance(asked, tuple):
            return self.random.choice(asked)
        if self.random.random() < 0.03:
            return CUT
        return self.random.choice(asked.options if isinstance(asked, Pick) else RUBBISH)


@given(
    seed=st.integers(0, 10**6),
    question=st.sampled_from([COUNT, WHICH, WHERE, WHAT]),
    mode=st.sampled_from(sorted(pipeline.MODES)),
    profile=st.sampled_from(["onboard", "faithful"]),
)
def test_rubbish_gives_an_answer_and_a_trace(seed: int, question: Question, mode: str, profile: str) -> None:
    r = random.Random(seed)

    def script(label: str, prompt: str) -> Any:
        # A base answer that is no box ends the question, since direct has nothing else to give.
        return A_BOX if label == "base" and question.kind == "box" else Rubbish.draw(r)

    played = play(script, question, mode=mode, profile=profile, tools=REAL_TOOLS, depth=3)
    assert played.error is None
    answer = played.answer
    assert answer is not None
    assert set(answer.options) <= set(question.options)
    assert bool(answer.options) == (question.kind in ("option", "options"))
    assert (answer.box is None) == (question.kind != "box")
    if answer.box is not None:
        x1, y1, x2, y2 = answer.box
        assert 0 <= x1 < x2 <= 1
        assert 0 <= y1 < y2 <= 1
    json.loads(answer.to_json())
    for event in played.events:
        json.dumps(event, allow_nan=False)
    shown = show_trace(played.events, prompts=True)
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_a_model_that_writes_nothing_leaves_the_base_answer() -> None:
    # Every slot empty, no draft valid: the search goes to its depth and a_0 stands.
    def script(label: str, prompt: str) -> Any:
        return B_BOX if label == "base" else "5" if label.startswith("SC") else None

    played = play(script, WHERE, tools=TWO_TOOLS, depth=2)
    assert (played.text, played.exit) == (B_BOX, "complete")
    assert {e["role"] for e in played.all("repair")} == {"PV", "LA"}
    assert all(e["answer"] == B_BOX for e in played.all("node"))


def test_an_sr_that_was_cut_off_ends_its_path_with_the_answer_that_stands() -> None:
    for slot in ("thought", "action"):
        played = play(scripted({}, extra={"SR 1": {slot: CUT}}), tools=TWO_TOOLS[:1], la="never")
        assert played.fates() == {"1": "answer"}
        assert played.all("node")[0]["action"].endswith("Action: finish(nothing)")


def test_a_ts_that_was_cut_off_activates_nothing() -> None:
    extra: dict[str, Any] = {
        "TS alpha": {"use": CUT},
        "TS beta": {"use": "yes", "target": CUT},
        "TS gamma": {"use": "yes", "target": "t", "tip": CUT},
    }
    extra |= {f"SR {k}": {"action": "finish"} for k in (1, 2)}
    played = play(scripted({}, extra=extra), tools=fake_tools(NAMES[:3]), depth=1, la="never")
    tools = played.one("tools")
    # What was said before the cut counts.
    assert tools["active"] == ["beta", "gamma"]
    assert tools["arguments"] == {"beta": {}, "gamma": {"target": "t"}}
    assert tools["tips"] == {"beta": "", "gamma": ""}


@pytest.mark.parametrize("question", [COUNT, WHERE, WHAT])
def test_a_pv_that_was_cut_off_gives_no_draft(question: Question) -> None:
    base = {"option": "one", "box": B_BOX, "text": "x"}[question.kind]
    extra = {"PV 1": {"evidence": CUT}, "LA 1": {"reasoning": CUT}}
    played = play(scripted({}, base=base, extra=extra), question, tools=TWO_TOOLS[:1], depth=1, la="winner")
    assert played.text == base
    assert played.calls("CI") == played.calls("CI end") == 0


def test_an_empty_base_answer_is_no_answer_to_search_with() -> None:
    # Text: a_0 is empty, drafts are empty: no valid path. With one draft there is one.
    played = play(scripted(lambda p: Node(draft=""), base="", extra={"base": ""}), WHAT, tools=TWO_TOOLS, depth=2)
    assert set(played.fates().values()) == {"open", "discarded"}
    assert (played.text, played.exit) == ("", "fallback")
    assert played.answer is not None
    assert "the model's answer is empty" in played.answer.warnings


def test_a_base_box_that_is_no_box_is_one_error() -> None:
    played = play(scripted({}, base="<0.1"), WHERE)
    assert isinstance(played.error, HoverlensError)
    assert "incomplete" in str(played.error)
    assert played.one("error")["type"] == "HoverlensError"


# -- tools -------------------------------------------------------------------------------------------


def failing(error: Exception) -> FakeTool:
    def told(arguments: Any) -> Feedback:
        raise error

    return FakeTool("alpha", told=told)


@pytest.mark.parametrize(
    "error", [ToolError("no region"), ValueError("bug"), MemoryError(), HoverlensError("x\x1b[0m")]
)
def test_a_tool_that_raises_is_feedback(error: Exception) -> None:
    played = play(
        scripted({"2": Node(draft="three", final=True)}), tools=[failing(error), *fake_tools(NAMES[1:2])], depth=2
    )
    assert played.answer is not None
    failed = {e["node"]: e["what"] for e in played.all("tool_failed")}
    assert set(failed) == {"1", "1.1", "1.2"}
    assert all(what.startswith("alpha failed") for what in failed.values())
    assert failed["1"] in played.prompts("SR")["1.1"]
    assert failed["1"] in played.prompts("PV")["1"]
    assert not played.all("node")[0]["tool_ok"]


def test_a_cancelled_tool_ends_the_question() -> None:
    played = play(scripted({}), tools=[failing(Cancelled("stop"))])
    assert isinstance(played.error, Cancelled)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two cars\nand a bus", "two cars\nand a bus"),
        ("\x1b[31mred\x07\x00", "[31mred"),
        ("  \r\n ", ""),
        ("a\u202eb\u2028c", "a b c"),
        ("x" * MAX_FEEDBACK_CHARS, "x" * MAX_FEEDBACK_CHARS),
        ("x" * (MAX_FEEDBACK_CHARS + 1), "x" * MAX_FEEDBACK_CHARS + " (cut)"),
    ],
    ids=range(6),
)
def test_feedback_reaches_prompts_bounded_and_without_control_characters(text: str, shown: str) -> None:
    assert presentable(text) == shown
    tool = FakeTool("alpha", told=lambda arguments: Feedback(text))
    played = play(scripted({}), tools=[tool], depth=2, la="never")
    assert played.all("node")[0]["feedback"] == shown
    for prompt in (played.prompts("PV")["1"], played.prompts("SR")["1.1"]):
        assert f"Result: {shown}\n" in prompt
        assert "\x1b" not in prompt


def test_upside_down_boxes_reach_a_tool_repaired() -> None:
    tool = FakeTool("alpha", parameters=(Parameter("region", "box", "where"),))
    extra = {"SR 1": {"action": "alpha", "region": "<0.900><0.900><0.100><0.100>"}}
    played = play(scripted({}, extra=extra), tools=[tool], depth=1, la="never")
    assert tool.runs == [{"region": (0.1, 0.1, 0.9, 0.9)}]
    assert [e["what"] for e in played.all("repair")] == ["corners swapped"]


def test_a_region_that_is_no_region_is_said_to_sr() -> None:
    extra = {"SR 1": {"action": "zoom", "region": "<0.5><0.5><0.5><0.5>"}, "TS zoom": {"use": "yes"}}
    extra["SR 1.1"] = {"action": "finish"}
    played = play(scripted({}, extra=extra), tools=ZOOM, la="never")
    assert "region is missing" in played.prompts("SR")["1.1"]
    assert played.answer is not None


# -- errors and cancelling ---------------------------------------------------------------------------

STAGES = [
    "base",
    "TS alpha",
    "SC base",
    "SR 1",
    "PV 1",
    "CI 1",
    "SC 2",
    "SR 2.1",
    "PV 1.2",
    "SC 2.2",
    "LA 1.1",
    "CI end 1.1",
]


@pytest.mark.parametrize("label", STAGES)
@pytest.mark.parametrize("error", [HoverlensError("the model failed"), BadInput("the prompt is too long")])
def test_a_backend_that_fails_anywhere_is_one_error_and_no_state_is_left(label: str, error: HoverlensError) -> None:
    extra = {"LA 1.1": {"answer": "four"}, label: error}
    played = play(scripted({}, extra=extra), tools=TWO_TOOLS, depth=2, la="winner")
    assert played.error is error
    assert played.one("error")["message"] == str(error)
    assert played.events[-1]["event"] == "error"


@pytest.mark.parametrize("label", STAGES)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("bug"), MemoryError()], ids=lambda e: type(e).__name__
)
def test_states_are_freed_whatever_is_raised(label: str, error: BaseException) -> None:
    class Failing(ScriptedBackend):
        def said(self, at: str, prompt: str) -> Any:
            if at == label:
                raise error
            return super().said(at, prompt)

    backend = Failing(scripted({}, extra={"LA 1.1": {"answer": "four"}}))
    trace = Trace()
    profile = replace(PROFILES["onboard"], reasoner=Settings(depth=2, la="winner"))
    with pytest.raises(type(error)), patch.object(uavmas, "toolset", lambda name: TWO_TOOLS):
        pipeline.ask(backend, CHAT, profile, FRAME, COUNT, mode="uavmas", trace=trace)
    assert backend.open_states == 0
    assert trace.events[-1]["event"] == "error"


def steps_of(**settings: Any) -> list[str]:
    seen: list[str] = []
    play(scripted({}), tools=TWO_TOOLS, on_step=lambda step: seen.append(step["stage"]), **settings)
    return seen


SETTINGS: dict[str, Any] = {"depth": 2, "la": "winner"}
STEPS = steps_of(**SETTINGS)


def test_the_caller_is_told_what_goes_on() -> None:
    level = ["reason", "tools", "verify"]
    assert ["encode", "prefill", "answer", "select", "score", *level, *level, "conclude"] == STEPS


@pytest.mark.parametrize("at", range(len(STEPS)), ids=[f"{i}-{s}" for i, s in enumerate(STEPS)])
@pytest.mark.parametrize("from_outside", [True, False])
def test_cancelling_at_any_step_frees_all(at: int, from_outside: bool) -> None:
    cancel = CancelToken()
    seen: list[str] = []

    def on_step(step: dict[str, Any]) -> None:
        seen.append(step["stage"])
        if len(seen) == at + 1:
            if from_outside:
                cancel.cancel()
            else:
                raise Cancelled("stopped by the caller")

    played = play(scripted({}), tools=TWO_TOOLS, on_step=on_step, cancel=cancel, **SETTINGS)
    assert isinstance(played.error, Cancelled)
    assert len(seen) == at + 1
    assert played.events[-1]["event"] == "error"


def test_states_are_dropped_as_soon_as_nothing_forks_from_them() -> None:
    # S_init 5, tau 4, D 3.
    #   root +- 1! (answer)   +- 2:0 +- 2.1:0 (pruned)
    #                                +- 2.2:5 +- 2.2.1, 2.2.2 (depth)
    tree = {"1": Node(final=True), "2": Node(0), "2.1": Node(0), "2.2": Node(5)}
    held = play(scripted(tree), tools=TWO_TOOLS, depth=3, la="each_path").backend.held
    assert held["TS alpha"] == 1  # the shared prefix
    assert held["SR 1"] == 2  # and the root's history
    assert held["PV 1"] == 4  # and two steps
    assert held["SR 2.1"] == 3  # prefix, the end of path 1, the history of 2
    assert held["SR 2.2.1"] == 3  # prefix, path 1, 2.2; of 2 and 2.1 nothing
    assert held["LA 1"] == 4  # prefix and three ends of paths


@pytest.mark.parametrize("mode", ["uavmas", "no_daas", "react"])
def test_a_run_of_a_vote_leaves_no_state_to_the_next(mode: str) -> None:
    played = play(scripted({}), tools=TWO_TOOLS, mode=mode, votes=2, depth=2, la="winner")
    assert played.calls("base") == 2
    assert [e["run"] for e in played.all("run")] == [1, 2]
    assert played.backend.held["base"] == 1  # the shared prefix, also at the beginning of the second run
