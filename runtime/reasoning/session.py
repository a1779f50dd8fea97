"""One question being answered: what every reasoning mode needs at hand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import prompts
from ..frame import Frame
from ..mllm.base import (
    Backend,
    CancelToken,
    Choice,
    ChooseRequest,
    GenerateRequest,
    Generation,
    ImageFeatures,
    Part,
    Sampling,
    State,
    Text,
)
from ..mllm.chat import ChatFormat
from ..mllm.interrupts import hold_interrupts
from ..profiles import Profile
from ..question import Question
from ..tools.base import Perception
from ..trace import Trace

StepCallback = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Thinker:
    """A thinking variant of the model, for LA. It reads the features that the other model's encoder made."""

    backend: Backend
    chat: ChatFormat


@dataclass
class Session:
    """The shared prefix of one question, and calls on it that are traced and counted.

    Attributes:
        shared: State after [system][image][question][options]; every agent forks from it.
        perception: The compiled detector and depth model.
        thinker: What LA runs on, where the bundle has a thinking model.
        warnings: Said in the answer.
        run: Which of several runs (a vote) is going on; it seeds the draws.
        tool_calls, nodes, pruned: Counts for the answer's stats.
        tools_s: Seconds in tools, without the MLLM calls they make.
    """

    backend: Backend
    chat: ChatFormat
    profile: Profile
    frame: Frame
    question: Question
    perception: Perception
    trace: Trace
    seed: int = 0
    cancel: CancelToken = field(default_factory=CancelToken)
    on_step: StepCallback | None = None
    prompt_version: str = prompts.VERSION
    thinker: Thinker | None = None
    warnings: list[str] = field(default_factory=list)
    shared: State = field(init=False)
    image_tokens: int = 0
    run: int = 0
    tool_calls: int = 0
    nodes: int = 0
    pruned: int = 0
    tools_s: float = 0.0
    _states: dict[int, State] = field(default_factory=dict)
    _mllm_s: float = 0.0
    _picture: ImageFeatures | None = None
    _thinking: State | None = None

    def open(self, image_min_tokens: int | None = None) -> None:
        """Encodes the image and evaluates the shared prefix."""
        self.step("encode")
        features = self._picture = self.encode(self.frame.rgb)
        self.image_tokens = features.n_tokens
        if image_min_tokens is not None and features.n_tokens < image_min_tokens:
            self.warnings.append(
                f"the image takes {features.n_tokens} tokens, and this model needs {image_min_tokens} "
                "for reliable boxes; use a larger image"
            )
        self.trace.emit("encode", image=features.key, tokens=features.n_tokens, positions=features.n_positions)
        self.step("prefill")
        content: list[Part] = [features, Text(question_text(self.question, self.prompt_version))]
        system = prompts.template("system", self.prompt_version)
        # An interruption between the making of a state and its keeping would leave it open for ever.
        with hold_interrupts():
            self.shared = self.keep(self.backend.prefix(self.chat.open(system, *content), self.cancel))
        self.trace.emit("prefix", tokens=self.shared.n_tokens, key=self.shared.key)

    def thinking(self, *history: Part) -> State:
        """The thinker's state after the shared prefix and a history; the prefix is evaluated once."""
        assert self.thinker is not None
        assert self._picture is not None
        if self._thinking is None:
            system = prompts.template("system", self.prompt_version)
            content: list[Part] = [self._picture, Text(question_text(self.question, self.prompt_version))]
            start = time.perf_counter()
            with hold_interrupts():
                prefix = self.thinker.backend.prefix(self.thinker.chat.open(system, *content), self.cancel)
                self._thinking = self.keep(prefix)
            self._mllm_s += time.perf_counter() - start
        state = self.keep(self._thinking.fork())
        state.append(*history)
        return state

    def encode(self, rgb: NDArray[np.uint8]) -> ImageFeatures:
        """Features of a picture, uint8 RGB (H, W, 3): the frame, or what a tool made of it."""
        start = time.perf_counter()
        features = self.backend.encode(rgb, self.cancel)
        self._mllm_s += time.perf_counter() - start
        return features

    def keep(self, state: State) -> State:
        """Takes charge of closing a state."""
        self._states[id(state)] = state
        return state

    def drop(self, state: State) -> None:
        """Closes a state now: nothing will fork from it again."""
        self._states.pop(id(state), None)
        state.close()

    def close(self) -> None:
        """Frees every state of this question, whatever happened."""
        with hold_interrupts():
            while self._states:
                self._states.popitem()[1].close()

    def step(self, stage: str, **fields: Any) -> None:
        """Tells the caller what is going on, and stops here if it asked to."""
        self.cancel.check()
        if self.on_step is not None:
            self.on_step({"stage": stage, **fields})

    def suffix(self, name: str, chat: ChatFormat | None = None, **values: str) -> tuple[Part, ...]:
        """A role's prompt, from its template to where the answer begins."""
        return (chat or self.chat).close(Text(prompts.fill(name, self.prompt_version, **values)))

    def draws(self, temperature: float, role: str, *path: int) -> Sampling:
        """Sampling for one call. Its stream depends on the seed, the run, the role and the node's path
        alone, so neither batching nor what other branches do changes what is drawn."""
        return Sampling(temperature=temperature, seed=stream_seed(self.seed, self.run, role, *path))

    @contextmanager
    def timed_tools(self) -> Iterator[None]:
        """Counts the time inside as tools', less what MLLM calls take in it."""
        start, mllm = time.perf_counter(), self._mllm_s
        try:
            yield
        finally:
            self.tools_s += time.perf_counter() - start - (self._mllm_s - mllm)

    def choose(self, requests: list[ChooseRequest]) -> list[Choice]:
        start = time.perf_counter()
        choices = self.backend.choose(requests, self.cancel)
        wall = time.perf_counter() - start
        self._mllm_s += wall
        for request, choice in zip(requests, choices, strict=True):
            self.trace.emit(
                "call",
                role=request.label,
                prompt=shown(request.suffix),
                options=list(request.options),
                output=request.options[choice.index],
                probabilities=[round(float(p), 6) for p in choice.probabilities],
                prefill_tokens=choice.prefill_tokens,
                reused_tokens=choice.reused_tokens,
                batch=len(requests),
                wall_s=round(wall, 6),
            )
        return choices

    def generate(self, requests: list[GenerateRequest], backend: Backend | None = None) -> list[Generation]:
        """Runs requests as one batch, on another backend where one is given, and traces each."""
        start = time.perf_counter()
        with hold_interrupts():
            results = (backend or self.backend).generate(requests, self.cancel)
            for result in results:
                if result.state is not None:
                    self.keep(result.state)
        wall = time.perf_counter() - start
        self._mllm_s += wall
        for request, result in zip(requests, results, strict=True):
            self.trace.emit(
                "call",
                role=request.label,
                prompt=shown(request.suffix),
                output=result.text,
                finish=result.finish,
                prefill_tokens=result.prefill_tokens,
                reused_tokens=result.reused_tokens,
                decoded_tokens=len(result.tokens) - result.forced_tokens,
                forced_tokens=result.forced_tokens,
                logprob=round(result.logprob, 6),
                batch=len(requests),
                wall_s=round(wall, 6),
            )
        return results


def question_text(question: Question, version: str = prompts.VERSION) -> str:
    """The part of the shared prefix that follows the image."""
    options = "".join(f"- {o}\n" for o in question.options)
    return prompts.fill(
        "question",
        version,
        question=question.text,
        options=f"Options:\n{options}" if options else "",
    )


def shown(parts: tuple[Part, ...]) -> str:
    """Prompt parts as a reader of the trace sees them."""
    return "".join(p.text if isinstance(p, Text) else f"<image {p.key[:8]}>" for p in parts)


def stream_seed(seed: int, *key: int | str) -> int:
    """A 64-bit seed for one stream of random numbers, independent for each key."""
    text = ",".join(str(k) for k in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
