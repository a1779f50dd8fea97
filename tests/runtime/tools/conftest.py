"""A session whose MLLM says what the test wrote down, and perception made of plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hoverlens.runtime.boxes import Boxes, Space
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.mllm.base import (
    Backend,
    CancelToken,
    Capabilities,
    Choice,
    ChooseRequest,
    Counters,
    GenerateRequest,
    Generation,
    ImageFeatures,
    ModelInfo,
    Part,
    State,
    Text,
)
from hoverlens.runtime.mllm.chat import ChatFormat
from hoverlens.runtime.perception.depth import DepthMap
from hoverlens.runtime.profiles import PROFILES
from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning.session import Session
from hoverlens.runtime.tools.categories import classes_for
from hoverlens.runtime.trace import Trace


class FakeState(State):
    n_tokens = 1
    key = "0"

    def fork(self) -> FakeState:
        return FakeState()

    def append(self, *parts: Part) -> None: ...

    def close(self) -> None: ...


class FakeBackend(Backend):
    """``texts`` and ``yes`` are what it says, by a word in the prompt; an exception there is raised.

    Attributes:
        batches: Prompts of each call.
        encoded: Pictures, in order.
    """

    def __init__(self) -> None:
        self.texts: dict[str, Any] = {}
        self.yes: dict[str, Any] = {}
        self.requests: list[GenerateRequest | ChooseRequest] = []
        self.batches: list[list[str]] = []
        self.encoded: list[np.ndarray] = []
        self.counters = Counters()
        self.capabilities = Capabilities(True, True, True, True, 64, 4096)
        self.info = ModelInfo("fake", "fake", "0", 0, 0, None)

    def encode(self, rgb: np.ndarray, cancel: CancelToken | None = None) -> ImageFeatures:
        self.encoded.append(rgb)
        return ImageFeatures(f"{len(self.encoded)}", 4, 4, (rgb.shape[1], rgb.shape[0]))

    def prefix(self, parts: Sequence[Part], cancel: CancelToken | None = None) -> State:
        return FakeState()

    def _said(self, requests: Sequence[Any], source: dict[str, Any], default: Any) -> list[Any]:
        prompts = ["".join(p.text for p in r.suffix if isinstance(p, Text)) for r in requests]
        self.batches.append(prompts)
        self.requests += requests
        out = [next((v for k, v in source.items() if k in prompt), default) for prompt in prompts]
        for value in out:
            if isinstance(value, BaseException):
                raise value
        return out

    def generate(self, requests: Sequence[GenerateRequest], cancel: CancelToken | None = None) -> list[Generation]:
        said = self._said(requests, self.texts, "")
        # A text that was cut off ends with ~ here.
        return [Generation(t.rstrip("~"), (1,), "length" if t.endswith("~") else "stop", 1, 1, -1.0) for t in said]

    def choose(self, requests: Sequence[ChooseRequest], cancel: CancelToken | None = None) -> list[Choice]:
        out = []
        for yes in self._said(requests, self.yes, 0.9):
            p = np.array([yes, 1 - yes])
            out.append(Choice(int(p.argmax()), p, np.log(p + 1e-9), 1.0, 1, 1))
        return out

    def count_tokens(self, parts: Sequence[Part]) -> int:
        return 1

    def close(self) -> None: ...


class FakePerception:
    """Perception of values that are there already."""

    def __init__(self) -> None:
        self.boxes: Boxes | None = None
        self.depth: DepthMap | None = None
        self.calls: list[str] = []

    def detections(self, sliced: bool = False) -> Boxes | None:
        self.calls.append("sliced" if sliced else "whole")
        return self.boxes

    def depth_map(self) -> DepthMap | None:
        self.calls.append("depth")
        return self.depth

    def knows(self, category: str) -> tuple[str, ...]:
        return () if self.boxes is None else classes_for(category, self.boxes.names or ())


MakeSession = Callable[..., Session]


@pytest.fixture
def make_session() -> MakeSession:
    """A session over a picture of noise; its backend is a :class:`FakeBackend`."""

    def make(text: str = "What is there?", options: Sequence[str] = (), kind: str | None = None) -> Session:
        rgb = np.random.default_rng(0).integers(0, 256, (120, 200, 3), dtype=np.uint8)
        question = Question.make(text, options, kind)
        backend = FakeBackend()
        chat = ChatFormat.from_template(None)
        frame = Frame.from_array(rgb)
        session = Session(backend, chat, PROFILES["onboard"], frame, question, FakePerception(), Trace())
        session.open()
        backend.encoded.clear()
        return session

    return make


@pytest.fixture
def perception() -> FakePerception:
    return FakePerception()


@pytest.fixture
def some_cars() -> Boxes:
    """Three cars, a van and a person on a frame of 200 x 120."""
    rows = [[20, 30, 40, 42], [60, 30, 80, 42], [100, 60, 120, 72], [150, 90, 180, 110], [10, 100, 14, 112]]
    names = ("person", "car", "van")
    return Boxes(rows, Space.PIXEL, (200, 120), scores=[0.9, 0.8, 0.7, 0.6, 0.5], classes=[1, 1, 1, 2, 0], names=names)
