"""A recorded schedule: one uavmas question whose words are given, so that only the way it is run differs.

The tree is fixed by what the agents say. Model calls are real (every prompt is evaluated, every token takes
its decode step); tools cost nothing and report texts of a fixed length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..runtime.mllm.base import (
    Backend,
    CancelToken,
    Choice,
    ChooseRequest,
    GenerateRequest,
    Generation,
    ImageFeatures,
    Part,
    State,
)
from ..runtime.mllm.llamacpp import LlamaCppBackend, LlamaState
from ..runtime.reasoning.settings import ONBOARD, Settings
from ..runtime.tools.base import Feedback, Parameter, Perception, Tool, ToolRun

Request = GenerateRequest | ChooseRequest
Result = TypeVar("Result", Generation, Choice)

OPTIONS = ("1", "3", "5", "7")
QUESTION = "How many vehicles are in the bounding box <0.411><0.187><0.706><0.557>?"

_TEXT = (
    "the red car next to the long building stands on the road near a lawn and two white vans wait behind it at "
    "the crossing while people walk along the kerb towards the small car park with trees and a bus turns left "
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Lengths:
    """How long the agents' words are, in words (about one token each).

    Attributes:
        thought: SR's.
        evidence: PV's.
        tip: TS's.
        reasoning: LA's.
        result: A tool's report.
    """

    thought: int = 32
    evidence: int = 24
    tip: int = 10
    reasoning: int = 40
    result: int = 50


PLAIN = Lengths()
LEAN = Lengths(thought=12, evidence=8, tip=4, reasoning=20, result=24)


def words(n: int, start: int = 0) -> str:
    """n words of running text."""
    return " ".join(_WORDS[(start + i) % len(_WORDS)] for i in range(n))


@dataclass(frozen=True)
class Schedule:
    """What every agent says.

    Attributes:
        name: For the report.
        settings: Of the reasoner.
        forms: Label to slots of a generated form; a label may be a role alone, for all of its calls.
        choices: Label to the chosen option of a choice.
        active: Tools that are used.
        lengths: Of the words.
    """

    name: str
    settings: Settings
    forms: Mapping[str, Mapping[str, str]]
    choices: Mapping[str, str]
    active: tuple[str, ...]
    lengths: Lengths

    def slots(self, label: str) -> Mapping[str, str]:
        return self.forms.get(label) or self.forms.get(label.partition(" ")[0], {})

    def choice(self, label: str) -> str | None:
        return self.choices.get(label) or self.choices.get(label.partition(" ")[0])


def schedule(nodes: int = 4, lengths: Lengths = PLAIN) -> Schedule:
    """A question of 3, 4, 6 or 9 nodes.

    3: one level of three, all final. 4: two levels of two, one branch. 6: two levels of three, one branch.
    9: two levels of three, two branches. With base, S_init, five TS and LA with its CI, 4 nodes are 25 calls
    and 6 are 33.
    """
    # For each node of the first level, whether it goes on.
    shapes = {
        3: (3, (False, False, False)),
        4: (2, (True, False)),
        6: (3, (True, False, False)),
        9: (3, (True, True, False)),
    }
    if nodes not in shapes:
        raise ValueError(f"a schedule has {sorted(shapes)} nodes; found {nodes}")
    width, goes_on = shapes[nodes]
    active = ("detect", "zoom", "ground")[:width]
    forms: dict[str, Mapping[str, str]] = {}
    for i, name in enumerate(("zoom", "describe", "distance", "ground", "detect")):
        used = name in active
        forms[f"TS {name}"] = (
            {"use": "yes", "what": words(3, i), "tip": words(lengths.tip, i)} if used else {"use": "no"}
        )
    for i, open_ in enumerate(goes_on):
        thought = words(lengths.thought, 5 * i)
        if open_:
            forms[f"SR {i + 1}"] = {"thought": thought, "action": active[i], "what": words(3, i)}
            for k in range(width):
                forms[f"SR {i + 1}.{k + 1}"] = {
                    "thought": words(lengths.thought, 3 * k),
                    "action": "finish",
                    "answer": "3",
                }
        else:
            forms[f"SR {i + 1}"] = {"thought": thought, "action": "finish", "answer": "5"}
    for i, label in enumerate([label for label in forms if label.startswith("SR")]):
        # Siblings see different things: equal words would be one prompt for CI, and cost half.
        forms[label.replace("SR", "PV")] = {"evidence": words(lengths.evidence, 4 * i), "answer": "3"}
    forms["LA"] = {"reasoning": words(lengths.reasoning), "answer": "3", "clues": words(lengths.evidence)}
    choices = {"base": "1", "SC base": "5", "SC": "7", "CI": "yes", "CI end": "yes"}
    settings = replace(
        ONBOARD, width=width, la="winner", arbitrate_equal=True, thought_tokens=512, evidence_tokens=512, la_tokens=512
    )
    return Schedule(f"{nodes} nodes", settings, forms, choices, active, lengths)


class CannedTool:
    """A tool that reports a text of a fixed length at no cost."""

    parameters: tuple[Parameter, ...] = (Parameter("what", "text", "what to look for"),)

    def __init__(self, tool: Tool, result: str) -> None:
        self.name = tool.name
        self.about = tool.about
        self._result = result

    def run(self, session: Any, perception: Perception, arguments: Mapping[str, Any]) -> ToolRun:
        yield from ()  # a tool is a generator, also where it asks nothing
        return Feedback(self._result)


class Directed(Backend):
    """Runs everything on a real backend, but the words are those of a schedule.

    Attributes:
        seconds: By agent; a batch's time in equal parts.
        prompts: Every distinct piece of prompt that was read, by its place: digest of the path to its tokens.
    """

    def __init__(self, inner: LlamaCppBackend, plan: Schedule) -> None:
        self.inner = inner
        self.plan = plan
        self.capabilities = inner.capabilities
        self.info = inner.info
        self.counters = inner.counters
        self.seconds: dict[str, float] = {}
        self.prompts: dict[bytes, int] = {}

    @property
    def least_tokens(self) -> int:
        """Prompt tokens when each piece is evaluated once: the shared prefix and the sum of all suffixes."""
        return sum(self.prompts.values())

    def encode(self, rgb: NDArray[np.uint8], cancel: CancelToken | None = None) -> ImageFeatures:
        return self.inner.encode(rgb, cancel)

    def prefix(self, parts: Sequence[Part], cancel: CancelToken | None = None) -> State:
        return self.inner.prefix(parts, cancel)

    def generate(self, requests: Sequence[GenerateRequest], cancel: CancelToken | None = None) -> list[Generation]:
        directed = [replace(r, script=self.plan.slots(r.label)) for r in requests]
        return self._timed(requests, lambda: self.inner.generate(directed, cancel))

    def choose(self, requests: Sequence[ChooseRequest], cancel: CancelToken | None = None) -> list[Choice]:
        choices = self._timed(requests, lambda: self.inner.choose(requests, cancel))
        return [self._said(r, c) for r, c in zip(requests, choices, strict=True)]

    def _said(self, request: ChooseRequest, choice: Choice) -> Choice:
        said = self.plan.choice(request.label)
        if said not in request.options:
            return choice
        index = request.options.index(said)
        sure = np.full(len(request.options), 1e-6)
        sure[index] = 1.0
        return replace(choice, index=index, probabilities=sure / sure.sum())

    def _timed(self, requests: Sequence[Request], run: Callable[[], list[Result]]) -> list[Result]:
        """Adds a batch's time to its roles, in equal parts."""
        for r in requests:
            assert isinstance(r.state, LlamaState)
            for node in self.inner.extend(r.state.node, r.suffix).path():
                assert node.item is not None
                self.prompts[node.key] = node.item.n_tokens
        start = time.perf_counter()
        out = run()
        share = (time.perf_counter() - start) / max(len(requests), 1)
        for r in requests:
            role = "base score" if r.label == "SC base" else r.label.partition(" ")[0]
            self.seconds[role] = self.seconds.get(role, 0.0) + share
        return out

    def count_tokens(self, parts: Sequence[Part]) -> int:
        return self.inner.count_tokens(parts)

    def close(self) -> None:
        """The inner backend belongs to the caller."""
