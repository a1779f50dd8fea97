"""Backends on random weights, shared by all tests: a tiny model with Qwen3-VL's real architecture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.mllm.base import ChooseRequest, ImageFeatures, Part, Sampling, State, Text
from hoverlens.runtime.mllm.llama_native import libraries
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions
from hoverlens.runtime.mllm.sampling import Sampler
from hoverlens.runtime.mllm.scheduler import Job, free

MakeBackend = Callable[..., LlamaCppBackend]

DEFAULTS: dict[str, Any] = {"n_ctx": 4096, "threads": 1, "image_max_tokens": 64}


def files(bundle: Bundle) -> tuple[Path, Path]:
    return bundle.need("mllm"), bundle.need("mmproj")


def assert_nothing_held(backend: LlamaCppBackend) -> None:
    """No sequence, no cell: every state is closed and no request left anything."""
    pool = backend._pool
    assert (backend.sequences_in_use(), pool.cells, pool.extra_cells) == (0, 0, 0)


@pytest.fixture(scope="session")
def _one_backend(tiny_bundle: Bundle) -> Iterator[LlamaCppBackend]:
    backend = LlamaCppBackend(*files(tiny_bundle), LlamaOptions(**DEFAULTS), identity="tiny")
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def _one_naive(tiny_bundle: Bundle) -> Iterator[LlamaCppBackend]:
    backend = LlamaCppBackend(*files(tiny_bundle), LlamaOptions(**DEFAULTS, share=False), identity="tiny")
    yield backend
    backend.close()


@pytest.fixture
def backend(_one_backend: LlamaCppBackend) -> Iterator[LlamaCppBackend]:
    """A backend that shares; whatever a test does, nothing may be held after it."""
    yield _one_backend
    assert_nothing_held(_one_backend)


@pytest.fixture
def naive(_one_naive: LlamaCppBackend) -> Iterator[LlamaCppBackend]:
    """The same model without any sharing: every request evaluates its whole prompt."""
    yield _one_naive
    assert_nothing_held(_one_naive)


@pytest.fixture
def make_backend(tiny_bundle: Bundle) -> Iterator[MakeBackend]:
    """Makes backends with other options; they are closed and checked at the end."""
    made: list[LlamaCppBackend] = []

    def make(bundle: Bundle | None = None, identity: str | None = "tiny", **options: Any) -> LlamaCppBackend:
        backend = LlamaCppBackend(
            *files(bundle or tiny_bundle), LlamaOptions(**{**DEFAULTS, **options}), identity=identity
        )
        made.append(backend)
        return backend

    yield make
    for backend in made:
        assert_nothing_held(backend)
        backend.close()


@pytest.fixture(scope="session")
def pictures() -> list[NDArray[np.uint8]]:
    """Six different pictures, uint8 RGB 96 x 128."""
    rng = np.random.default_rng(7)
    out = []
    for _ in range(6):
        coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        out.append(np.ascontiguousarray(np.kron(coarse, np.ones((16, 16, 1), np.uint8))))
    return out


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[Part]]:
    """A prompt up to the open user turn: ``prompt(features, text)``."""

    def parts(features: ImageFeatures | None, text: str = "\nQuestion: how many cars are there?") -> list[Part]:
        head: list[Part] = [Text("<|im_start|>system\nYou see.<|im_end|>\n<|im_start|>user\n", trusted=True)]
        return [*head, *([features] if features is not None else []), Text(text)]

    return parts


@pytest.fixture(scope="session")
def ending() -> Text:
    """Where the answer begins."""
    return Text("<|im_end|>\n<|im_start|>assistant\n", trusted=True)


@pytest.fixture
def opened(
    backend: LlamaCppBackend, pictures: list[NDArray[np.uint8]], prompt: Callable[..., list[Part]]
) -> Iterator[State]:
    """A state of the shared backend after a picture and a question."""
    state = backend.prefix(prompt(backend.encode(pictures[0])))
    yield state
    state.close()


class Reference:
    """One full forward pass by llama.cpp's own helpers, in a context of its own: no tree, no fork, no batching.

    The tokens come from mtmd's tokenizer over the whole text, with its marker where an image stands.
    """

    def __init__(self, backend: LlamaCppBackend, n_ctx: int = 4096) -> None:
        self.backend = backend
        self.lib, self.mtmd = libraries()
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, 512, 512
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = self.lib.llama_init_from_model(backend.model.ptr, params)

    def start(self, parts: Sequence[str | NDArray[np.uint8]]) -> int:
        """Evaluates text (special tokens recognised) and images from nothing; the number of tokens."""
        lib, mtmd, projector = self.lib, self.mtmd, self.backend._projector
        assert projector is not None
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        marker = mtmd.mtmd_get_marker(projector.ptr)
        text = b"".join(p.encode() if isinstance(p, str) else marker for p in parts)
        images = [np.ascontiguousarray(p) for p in parts if not isinstance(p, str)]
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * max(1, len(images)))()
        for i, rgb in enumerate(images):
            data = rgb.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmaps[i] = mtmd.mtmd_bitmap_init(rgb.shape[1], rgb.shape[0], data)
        chunks = mtmd.mtmd_input_chunks_init()
        given = mtmd.mtmd_input_text(text, len(text), False, True)
        assert mtmd.mtmd_tokenize(projector.ptr, chunks, ctypes.pointer(given), bitmaps, len(images)) == 0
        count = sum(
            mtmd.mtmd_input_chunk_get_n_tokens(mtmd.mtmd_input_chunks_get(chunks, i))
            for i in range(mtmd.mtmd_input_chunks_size(chunks))
        )
        end = ctypes.c_int32(0)
        status = mtmd.mtmd_helper_eval_chunks(projector.ptr, self.context, chunks, 0, 0, 512, True, ctypes.byref(end))
        assert status == 0
        mtmd.mtmd_input_chunks_free(chunks)
        for i in range(len(images)):
            mtmd.mtmd_bitmap_free(bitmaps[i])
        return int(count)

    def logits(self) -> NDArray[np.float32]:
        """float32 (n_vocab,) after the last token."""
        pointer = self.lib.llama_get_logits_ith(self.context, -1)
        return np.array(np.ctypeslib.as_array(pointer, (self.backend.model.n_vocab,)), dtype=np.float32)

    def feed(self, token: int) -> NDArray[np.float32]:
        """Adds one token; the logits after it."""
        one = (self.lib.llama_token * 1)(token)
        assert self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(one, 1)) == 0
        return self.logits()

    def close(self) -> None:
        self.lib.llama_free(self.context)

    def follow(self, tokens: Sequence[int], sampling: Sampling, tolerance: float) -> int:
        """Draws by itself and asserts that it comes to the same tokens, from where :meth:`start` ended.

        Where two tokens are closer than twice the tolerance either is right, and it stops there.

        Returns:
            The number of tokens that were compared.
        """
        sampler, logits = Sampler(sampling), self.logits()
        for i, token in enumerate(tokens):
            allowed = np.where(self.backend._forbidden, -np.inf, logits)
            expected = sampler.draw(allowed.astype(np.float32))
            if sampling.temperature > 0:
                allowed = allowed + sampling.temperature * sampler._noise(np.arange(len(allowed)))
            if token != expected:
                gap = float(allowed[expected] - allowed[token])
                assert gap < 2 * tolerance, f"token {i}: {token} instead of {expected}, which leads by {gap}"
                return i
            logits = self.feed(token)
        return len(tokens)


@pytest.fixture
def make_reference() -> Iterator[Callable[[LlamaCppBackend], Reference]]:
    """Full forward passes on any backend's model."""
    made: list[Reference] = []

    def make(backend: LlamaCppBackend) -> Reference:
        made.append(Reference(backend))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def reference(_one_backend: LlamaCppBackend) -> Iterator[Reference]:
    """Full forward passes on the tiny model."""
    made = Reference(_one_backend)
    yield made
    made.close()


LogitsAfter = Callable[[LlamaCppBackend, State, Sequence[Part]], NDArray[np.float32]]


@pytest.fixture(scope="session")
def logits_after() -> LogitsAfter:
    """A backend's logits after a state and a suffix, forked as any request is."""

    def after(backend: LlamaCppBackend, state: State, suffix: Sequence[Part]) -> NDArray[np.float32]:
        tip = backend.extend(state.node, suffix)  # type: ignore[attr-defined]
        job = Job(index=0, tip=tip, option=(0,), keeps_output=True)
        try:
            backend._evaluate([0], [state], [ChooseRequest(state, ("x",), tuple(suffix))], None)  # type: ignore[list-item]
            backend._run([job], [state], None)  # type: ignore[list-item]
        finally:
            free(backend._engine, job)
        assert tip.logits is not None
        return tip.logits

    return after
