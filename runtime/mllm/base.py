"""The seam between the reasoner and whatever runs the multimodal LLM (MLLM).

Terms:
    part      a piece of a prompt: text (trusted template text or untrusted user text) or an image's features
    state     everything the model has read so far on one branch; forking it costs no computation where the
              backend can share its KV cache
    request   a state, a suffix that only this request sees, and what to do next (generate or choose)

The law that every backend keeps: a request answered from a forked or cached state gives the tokens of the
same prompt evaluated from nothing (up to the rounding that the backend's batching causes, which its tests
state).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from ..errors import Cancelled
from .forms import Form


@dataclass(frozen=True)
class Text:
    """Prompt text. Special tokens are recognised only in ``trusted`` text (our templates)."""

    text: str
    trusted: bool = False


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """An encoded image, ready to stand in a prompt.

    Attributes:
        key: Hex digest over pixels, shape, preprocessing and the identity of model and projector.
        n_tokens: Tokens that the image takes in the KV cache.
        n_positions: Positions that it advances (with M-RoPE fewer than tokens).
        size: (width, height) in pixels of the image that was encoded.
        data: float32 (n_tokens, width of the text model's input), or None where the backend keeps them.
        handle: Backend-private.
    """

    key: str
    n_tokens: int
    n_positions: int
    size: tuple[int, int]
    data: NDArray[np.float32] | None = None
    handle: Any = None


Part = Union[Text, ImageFeatures]  # noqa: UP007 - evaluated at run time on Python 3.10


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy. Each request has a stream of its own, seeded by
    ``seed`` alone, so what is batched with it never changes its draws."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


GREEDY = Sampling()


class State(ABC):
    """A branch of the prompt tree. Not safe to share between threads without the backend's lock."""

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """Tokens on the path from the root to here, image tokens included."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Hex digest of everything on the path; equal keys mean equal content."""

    @abstractmethod
    def fork(self) -> State:
        """A second branch from the same point. Appending to one never shows in the other."""

    @abstractmethod
    def append(self, *parts: Part) -> None:
        """Adds parts to the end. Evaluation may wait until a request needs it."""

    @abstractmethod
    def close(self) -> None:
        """Frees the state's share of the cache. May be called more than once."""

    def __enter__(self) -> State:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class GenerateRequest:
    """Ask for text.

    Attributes:
        state: Where to fork from; it is not changed.
        suffix: Parts that only this request sees.
        max_tokens: Most new tokens.
        sampling: How tokens are drawn.
        grammar: GBNF with a rule ``root``, or None.
        stop: Strings that end the text; they are cut from it.
        form: Fixed parts and slots instead of plain text; then grammar and stop are not used, and
            ``max_tokens`` is a limit on the whole output.
        script: With a form, the slots' values: the model goes through the motions, but its words are given.
            For timing.
        keep: Return the state after the generated tokens in :attr:`Generation.state`.
        label: Who asks (an agent's name); for traces and counters.
    """

    state: State
    suffix: tuple[Part, ...] = ()
    max_tokens: int = 256
    sampling: Sampling = GREEDY
    grammar: str | None = None
    stop: tuple[str, ...] = ()
    form: Form | None = None
    script: Mapping[str, str] | None = None
    keep: bool = False
    label: str = ""


@dataclass(frozen=True)
class Generation:
    """What a request produced.

    Attributes:
        text: New text without stop strings and end tokens.
        tokens: New token ids, end token excluded.
        finish: ``stop`` (end token, stop string or a complete grammar) or ``length``.
        prefill_tokens: Prompt tokens evaluated for this request alone.
        reused_tokens: Prompt tokens that came from the forked state.
        logprob: Sum of the log-probabilities of the new tokens (natural logarithm, temperature 1,
            before the grammar's mask), end token excluded.
        state: The state after the new tokens, with ``keep``.
        forced_tokens: New tokens that were given, not drawn: a form's fixed parts.
        slots: With a form, the value of each slot that was reached.
        probabilities: With a form, for each pick the probability of what was picked.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    prefill_tokens: int
    reused_tokens: int
    logprob: float
    state: State | None = None
    forced_tokens: int = 0
    slots: dict[str, str] = field(default_factory=dict)
    probabilities: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ChooseRequest:
    """Ask which of several continuations the model prefers.

    Attributes:
        state: Where to fork from; it is not changed.
        suffix: Parts that only this request sees.
        options: Continuations as plain text, two or more or one; all different.
        label: Who asks.
        scoring: ``mean`` compares mean log-probabilities of whole options. ``tree`` is the probability of
            each option when decoding is held to the options; it evaluates only the places where they
            part, so it is cheap for many short options such as 0 to 10.
    """

    state: State
    options: tuple[str, ...]
    suffix: tuple[Part, ...] = ()
    label: str = ""
    scoring: str = "mean"


@dataclass(frozen=True)
class Choice:
    """The preference over the options of a request.

    Attributes:
        index: The most probable option; the first of equals.
        probabilities: float64 (n,), sums to 1: softmax over :attr:`scores`.
        scores: float64 (n,). With ``mean``, the mean log-probability for each token of the option; where
            one option is the beginning of another, the end of the turn counts as a token of every
            option. With ``tree``, the log-probability of the option among the options.
        logits_gap: Difference of the two best scores (inf with one option).
    """

    index: int
    probabilities: NDArray[np.float64]
    scores: NDArray[np.float64]
    logits_gap: float
    prefill_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; the code above falls back where it cannot.

    Attributes:
        fork: States share computed KV. Without it every request evaluates its whole prompt: the same
            answers, slower.
        batch: Several requests advance in one forward pass.
        grammar: Output can be held to a GBNF grammar.
        logprobs: ``choose`` is computed from the model's own probabilities.
        max_sequences: Most branches that can be resident at once.
        context_tokens: Most tokens of one branch.
    """

    fork: bool
    batch: bool
    grammar: bool
    logprobs: bool
    max_sequences: int
    context_tokens: int


@dataclass
class Counters:
    """Running totals of a backend; subtract two snapshots for one question.

    Attributes:
        mllm_calls: Requests.
        image_encodes: Images that went through the vision encoder.
        encode_hits: Images whose features came from the cache instead.
        prefill_tokens: Prompt tokens evaluated, image tokens included.
        reused_tokens: Prompt tokens of requests that came from a forked or cached state instead.
        decoded_tokens: Tokens drawn, end tokens included.
        forced_tokens: Tokens given, not drawn.
        evictions: Branches dropped from the cache, and requests put back in the queue, for lack of room.
        recomputed_tokens: Tokens evaluated once more since they had been dropped for lack of room (those of a
            prompt also count as ``prefill_tokens``).
        batches: Forward passes over text.
        encode_s: Seconds in the vision encoder.
        prefill_s: Seconds on prompts.
        decode_s: Seconds on tokens behind them.
    """

    mllm_calls: int = 0
    image_encodes: int = 0
    encode_hits: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    forced_tokens: int = 0
    evictions: int = 0
    recomputed_tokens: int = 0
    batches: int = 0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    def copy(self) -> Counters:
        return Counters(**vars(self))


class CancelToken:
    """A flag that any thread may set; a backend looks at it at least once for each decode step."""

    def __init__(self) -> None:
        # Re-entrant, since a signal handler may cancel while this thread is in here.
        self._lock = threading.RLock()
        self._cancelled = False
        self._listeners: list[Callable[[], object]] = []

    def cancel(self) -> None:
        with self._lock:
            if not self._cancelled:
                self._cancelled = True
                for listener in list(self._listeners):
                    listener()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def check(self) -> None:
        """Raises Cancelled if the flag is set."""
        if self._cancelled:
            raise Cancelled("cancelled before the answer was complete")

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """While inside, ``listener`` is called as soon as the flag is set, on the thread that sets it."""
        with self._lock:
            self._listeners.append(listener)
            if self._cancelled:
                listener()
        try:
            yield
        finally:
            # Waits for a listener at work, so that none is called after the end of the block.
            with self._lock:
                self._listeners.remove(listener)


@dataclass(frozen=True)
class ModelInfo:
    """What a loaded model says of itself.

    Attributes:
        name: For people.
        architecture: The text model's architecture, as the file names it (``qwen3vl``).
        identity: Hex digest that stands for weights and projector in cache keys.
        n_params: Number of parameters of the text model.
        embedding: Width of the text model's hidden state.
        chat_template: Jinja source from the file's metadata, or None.
    """

    name: str
    architecture: str
    identity: str
    n_params: int
    embedding: int
    chat_template: str | None
    extra: dict[str, str] = field(default_factory=dict)


class Backend(ABC):
    """Runs one MLLM. One thread at a time; the runtime holds a lock around a question."""

    capabilities: Capabilities
    info: ModelInfo
    counters: Counters

    @abstractmethod
    def encode(self, rgb: NDArray[np.uint8], cancel: CancelToken | None = None) -> ImageFeatures:
        """Encodes one image, uint8 RGB (H, W, 3). The same pixels twice may come from a cache."""

    @abstractmethod
    def prefix(self, parts: Sequence[Part], cancel: CancelToken | None = None) -> State:
        """Evaluates parts from an empty context and returns the state after them."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest], cancel: CancelToken | None = None) -> list[Generation]:
        """Answers all requests, batched where the backend can; results in the order of the requests.

        Raises:
            Cancelled: ``cancel`` was set; the states of the requests are as before.
            BadInput: A grammar that does not parse, or a prompt longer than the context.
        """

    @abstractmethod
    def choose(self, requests: Sequence[ChooseRequest], cancel: CancelToken | None = None) -> list[Choice]:
        """Scores every request's options; results in the order of the requests."""

    @abstractmethod
    def count_tokens(self, parts: Sequence[Part]) -> int:
        """Tokens that the parts take."""

    @abstractmethod
    def close(self) -> None:
        """Frees the model. May be called more than once."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
