"""An MLLM that says what a test wrote down, and remembers every prompt it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

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
from hoverlens.runtime.mllm.forms import Free, Literal, Pick, Piece

CUT = object()

Script = Mapping[str, Any] | Callable[[str, str], Any]


class ScriptedState(State):
    def __init__(self, backend: ScriptedBackend, parts: tuple[Part, ...]) -> None:
        self.backend = backend
        self.parts = parts
        self.closed = False
        backend.open_states += 1

    @property
    def n_tokens(self) -> int:
        return len(self.text)

    @property
    def key(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        return "".join(p.text if isinstance(p, Text) else f"<image {p.key}>" for p in self.parts)

    def fork(self) -> ScriptedState:
        assert not self.closed, "forked a closed state"
        return ScriptedState(self.backend, self.parts)

    def append(self, *parts: Part) -> None:
        assert not self.closed, "appended to a closed state"
        self.parts = (*self.parts, *parts)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.backend.open_states -= 1


class ScriptedBackend(Backend):
    """Answers by label: a dict of slots for a form, the option or a list of probabilities for a choice.

    Instead of a dict a function may fill a form, piece by piece; instead of an option one may choose among them.
    A label that the script does not know gets the default: the first option, empty text. An exception is raised.
    A slot of a form that is ``CUT`` ends the output there, as a limit on tokens does.

    Attributes:
        prompts: (label, whole prompt) of every request, in order.
        requests: The same requests.
        held: How many states were open at each request, by label (of the last one).
        batches: Labels of each call of generate and choose.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.prompts: list[tuple[str, str]] = []
        self.requests: list[GenerateRequest | ChooseRequest] = []
        self.held: dict[str, int] = {}
        self.batches: list[list[str]] = []
        self.open_states = 0
        self.counters = Counters()
        self.capabilities = Capabilities(True, True, True, True, 256, 1 << 20)
        self.info = ModelInfo("scripted", "none", "0" * 32, 0, 0, None)

    def said(self, label: str, prompt: str) -> Any:
        return self.script(label, prompt) if callable(self.script) else self.script.get(label)

    def encode(self, rgb: np.ndarray, cancel: CancelToken | None = None) -> ImageFeatures:
        self.counters.image_encodes += 1
        return ImageFeatures(f"{int(rgb.sum()) % 2**32:032x}", 4, 2, (rgb.shape[1], rgb.shape[0]))

    def prefix(self, parts: Sequence[Part], cancel: CancelToken | None = None) -> State:
        return ScriptedState(self, tuple(parts))

    def _prompt(self, request: GenerateRequest | ChooseRequest) -> str:
        state = request.state
        assert isinstance(state, ScriptedState)
        assert not state.closed, f"{request.label} asked from a closed state"
        suffix = "".join(p.text for p in request.suffix if isinstance(p, Text))
        prompt = state.text + suffix
        self.prompts.append((request.label, prompt))
        self.requests.append(request)
        self.held[request.label] = self.open_states
        self.counters.mllm_calls += 1
        return prompt

    def generate(self, requests: Sequence[GenerateRequest], cancel: CancelToken | None = None) -> list[Generation]:
        if cancel:
            cancel.check()
        self.batches.append([r.label for r in requests])
        return [self._generate(r) for r in requests]

    def _generate(self, request: GenerateRequest) -> Generation:
        said = self.said(request.label, self._prompt(request))
        if isinstance(said, Exception):
            raise said
        if request.form is None:
            return Generation(str(said or ""), (), "stop", 0, 0, 0.0)
        fill = said if callable(said) else _filling(said or {}, request.label)
        slots: dict[str, str] = {}
        text = ""
        pieces = request.form()
        value: str | None = None
        while True:
            try:
                piece = next(pieces) if value is None else pieces.send(value)
            except StopIteration:
                break
            if isinstance(piece, Literal):
                text += (value := piece.text)
                continue
            # A single option is given, whatever the model would say.
            single = isinstance(piece, Pick) and len(piece.options) == 1
            filled = piece.options[0] if single else fill(piece)
            if filled is CUT:
                return Generation(text, (), "length", 0, 0, 0.0, slots=slots, probabilities=dict.fromkeys(slots, 0.9))
            value = slots[piece.name] = str(filled)
            text += value + (piece.end if isinstance(piece, (Pick, Free)) else "")
        odds = dict.fromkeys(slots, 0.9)
        return Generation(text, (), "stop", 0, 0, 0.0, slots=slots, probabilities=odds)

    def choose(self, requests: Sequence[ChooseRequest], cancel: CancelToken | None = None) -> list[Choice]:
        if cancel:
            cancel.check()
        self.batches.append([r.label for r in requests])
        return [self._choose(r) for r in requests]

    def _choose(self, request: ChooseRequest) -> Choice:
        said = self.said(request.label, self._prompt(request))
        if isinstance(said, Exception):
            raise said
        n = len(request.options)
        if callable(said):
            said = said(request.options)
        if isinstance(said, list):
            p = np.asarray(said, dtype=np.float64)
        else:
            index = 0 if said is None else request.options.index(str(said))
            p = np.full(n, 0.1 / max(n - 1, 1))
            p[index] = 0.9 if n > 1 else 1.0
        return Choice(int(np.argmax(p)), p, np.log(np.maximum(p, 1e-12)), 1.0, 0, 0)

    def count_tokens(self, parts: Sequence[Part]) -> int:
        return sum(len(p.text) for p in parts if isinstance(p, Text))

    def close(self) -> None:
        pass


def _filling(said: Mapping[str, Any], label: str) -> Callable[[Piece], Any]:
    def fill(piece: Piece) -> Any:
        assert not isinstance(piece, Literal)
        if not isinstance(piece, Pick):
            return said.get(piece.name, "")
        value = said.get(piece.name, piece.options[0])
        assert value is CUT or value in piece.options, f"{label}: {value!r} is none of {piece.options}"
        return value

    return fill
