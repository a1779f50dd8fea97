"""A whole question on a scripted MLLM: trees written down by hand, tools that say what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from hoverlens.runtime import pipeline
from hoverlens.runtime.answer import Answer
from hoverlens.runtime.errors import HoverlensError
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.mllm.base import CancelToken
from hoverlens.runtime.mllm.chat import ChatFormat
from hoverlens.runtime.profiles import PROFILES
from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning import uavmas
from hoverlens.runtime.reasoning.session import Thinker
from hoverlens.runtime.reasoning.settings import Settings
from hoverlens.runtime.tools.base import Feedback, Parameter, Perception, ToolRun
from hoverlens.runtime.trace import Trace

from .scripted import Script, ScriptedBackend

FRAME = Frame.from_array(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3))
CHAT = ChatFormat.from_template(None)
OPTIONS = ("one", "two", "three", "four")
COUNT = Question.make("How many cars?", OPTIONS)
WHICH = Question.make("Which are there?", ("car", "bus", "tram"), kind="options")
WHERE = Question.make("Where is the tower?", kind="box")
WHAT = Question.make("What is it?", kind="text")


@dataclass
class FakeTool:
    """Says what ``told`` returns for the argument ``target``, and remembers each run."""

    name: str
    about: str = ""
    parameters: tuple[Parameter, ...] = (Parameter("target", "text", "what to look for"),)
    told: Callable[[Mapping[str, Any]], Feedback] = lambda arguments: Feedback(f"saw {arguments.get('target', '?')}")
    runs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.about = self.about or f"about {self.name}."

    def run(self, session: Any, perception: Perception, arguments: Mapping[str, Any]) -> ToolRun:
        yield from ()
        self.runs.append(dict(arguments))
        return self.told(arguments)


NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")


def fake_tools(names: Sequence[str] = NAMES) -> tuple[FakeTool, ...]:
    return tuple(FakeTool(name) for name in names)


@dataclass(frozen=True)
class Node:
    """What the agents say at one node.

    Attributes:
        score: SC's.
        draft: PV's answer.
        trust: CI's.
        final: SR finishes here, with ``draft`` unless ``says`` is set.
        says: SR's answer where it finishes.
    """

    score: int = 5
    draft: str = "two"
    trust: bool = True
    final: bool = False
    says: str | None = None


def scripted(
    tree: Mapping[str, Node] | Callable[[str], Node],
    s_init: int = 5,
    base: str = "one",
    extra: Mapping[str, Any] | None = None,
) -> Callable[[str, str], Any]:
    """A script of nodes by path ("1.2" is the second child of the first); a node not written down is the default.

    Thoughts, targets and evidence name their node, so that a test can find them in prompts.
    """
    node_of = tree if callable(tree) else lambda path: tree.get(path, Node())
    named = dict(extra or {})

    def script(label: str, prompt: str) -> Any:
        if label in named:
            return named[label]
        if label == "base":
            return base
        if label == "SC base":
            return str(s_init)
        role, _, path = label.rpartition(" ")
        if role == "TS":
            return {"use": "yes", "target": f"proposed-{path}", "tip": f"tip-{path}"}
        if role not in ("SR", "PV", "CI", "SC"):
            return None
        node = node_of(path)
        if role == "SR":
            said = node.draft if node.says is None else node.says
            action = {"action": "finish"} if node.final else {"action": "alpha", "target": f"target-{path}"}
            return {"thought": f"thought-{path}", "answer": said, **action}
        if role == "PV":
            return {"evidence": f"evidence-{path}", "answer": node.draft}
        if role == "CI":
            return "yes" if node.trust else "no"
        return str(node.score)

    return script


@dataclass
class Played:
    """A question that was asked.

    Attributes:
        answer: None where it failed.
        error: Why it failed.
    """

    answer: Answer | None
    error: HoverlensError | None
    backend: ScriptedBackend
    events: list[dict[str, Any]]
    tools: tuple[FakeTool, ...]

    @property
    def text(self) -> str:
        assert self.answer is not None, self.error
        return self.answer.answer

    @property
    def exit(self) -> str:
        assert self.answer is not None, self.error
        return self.answer.exit

    def all(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    def one(self, event: str) -> dict[str, Any]:
        (found,) = self.all(event)
        return found

    def fates(self) -> dict[str, str]:
        return {e["node"]: e["fate"] for e in self.all("fate")}

    def prompts(self, role: str) -> dict[str, str]:
        """Path (or tool) to prompt, of one role."""
        return {
            label[len(role) + 1 :]: prompt
            for label, prompt in self.backend.prompts
            if label.rpartition(" ")[0] == role or label == role
        }

    def calls(self, role: str) -> int:
        return sum(label == role or label.rpartition(" ")[0] == role for label, _ in self.backend.prompts)


def play(
    script: Script,
    question: Question = COUNT,
    mode: str = "uavmas",
    tools: Sequence[FakeTool] | None = None,
    profile: str = "onboard",
    seed: int = 0,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    cancel: CancelToken | None = None,
    thinker: ScriptedBackend | None = None,
    **settings: Any,
) -> Played:
    """Asks a question in a mode, with the profile's settings changed by ``settings``.

    Whatever happens, no state may be left open. ``thinker`` is the model that LA runs on.
    """
    backend = ScriptedBackend(script)
    given = fake_tools() if tools is None else tuple(tools)
    base = PROFILES[profile]
    # Trees here are as large as they are drawn, unless a test is about the limit.
    reasoner: Settings = replace(base.reasoner, **{"max_nodes": None, **settings})
    trace = Trace()
    answer, error = None, None
    with ExitStack() as stack:
        stack.enter_context(patch.object(uavmas, "toolset", lambda name: given))
        try:
            answer = pipeline.ask(
                backend,
                CHAT,
                replace(base, reasoner=reasoner),
                FRAME,
                question,
                mode=mode,
                seed=seed,
                on_step=on_step,
                trace=trace,
                cancel=cancel,
                thinker=None if thinker is None else Thinker(thinker, CHAT),
            )
        except HoverlensError as e:
            error = e
    assert backend.open_states == 0
    assert thinker is None or thinker.open_states == 0
    return Played(answer, error, backend, trace.events, given)


def paths(width: int, depth: int) -> Iterator[str]:
    """Every path of a full tree, in the recursion's order."""
    for k in range(1, width + 1):
        yield str(k)
        if depth > 1:
            for below in paths(width, depth - 1):
                yield f"{k}.{below}"
