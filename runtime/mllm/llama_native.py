"""Thin, typed handles over llama.cpp's C interface (through llama-cpp-python's bindings).

Only what the backend needs, with ownership in Python: every handle has ``close()`` and nothing here keeps
state about prompts. One thread at a time.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput, HoverlensError
from .base import CancelToken

log = logging.getLogger("hoverlens.llama")

DECODE_ABORTED = 2
DECODE_NO_SLOT = 1

CONTEXT_UNIT = 256
"""llama.cpp's contexts are multiples of this many tokens."""

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_lib: Any = None
_mtmd: Any = None
_log_callback: Any = None
_last_errors: list[str] = []


def libraries() -> tuple[Any, Any]:
    """``(llama_cpp.llama_cpp, llama_cpp.mtmd_cpp)``, initialised once, with their chatter sent to logging.

    Raises:
        HoverlensError: llama-cpp-python is missing or its shared libraries do not load.
    """
    global _lib, _mtmd, _log_callback
    if _lib is None:
        # On a failed assertion ggml starts a debugger to print a trace, which may hang a board for minutes.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        try:
            from llama_cpp import llama_cpp, mtmd_cpp
        except (ImportError, OSError, RuntimeError) as e:
            raise HoverlensError(
                f"llama.cpp does not load ({e}); run 'pip install llama-cpp-python' for this Python"
            ) from None

        def forward(level: int, text: bytes | None, _user: Any) -> None:
            message = (text or b"").decode("utf-8", "replace").rstrip()
            if not message:
                return
            if level == 4:
                _last_errors.append(message)
                del _last_errors[:-8]
            # llama.cpp reports ordinary conditions as warnings and errors; what matters reaches the user
            # as an exception, so here everything is one step quieter.
            log.log(min(_LEVELS.get(level, logging.DEBUG), logging.INFO), "%s", message)

        _log_callback = llama_cpp.llama_log_callback(forward)
        llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
        mtmd_cpp.mtmd_helper_log_set(_log_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        _lib, _mtmd = llama_cpp, mtmd_cpp
    return _lib, _mtmd


def last_error() -> str:
    """llama.cpp's most recent error line, or ''."""
    return _last_errors[-1] if _last_errors else ""


class Model:
    """A loaded text model and its vocabulary.

    Attributes:
        eog: bool (n_vocab,), tokens that end an output.
        control: bool (n_vocab,), tokens that templates are made of (``<|im_end|>``).
        marks: bool (n_vocab,), other tokens with a meaning of their own (``<think>``, ``<tool_call>``). Outputs
            may have them; untrusted text may not.
    """

    def __init__(self, path: Path, gpu_layers: int = -1, use_mmap: bool = True) -> None:
        lib, _ = libraries()
        self.path = path
        _last_errors.clear()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers if gpu_layers >= 0 else 999
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if use_mmap else lib.LLAMA_LOAD_MODE_NONE
        self.ptr = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.ptr:
            raise BadInput(
                f"{path}: llama.cpp cannot load it as a text model "
                f"({last_error() or 'no reason given'}); see 'hoverlens inspect {path}'"
            )
        self.vocab = lib.llama_model_get_vocab(self.ptr)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self.n_embd_inp = int(lib.llama_model_n_embd_inp(self.ptr))
        self.n_ctx_train = int(lib.llama_model_n_ctx_train(self.ptr))
        self.n_params = int(lib.llama_model_n_params(self.ptr))
        self.recurrent = bool(lib.llama_model_is_recurrent(self.ptr) or lib.llama_model_is_hybrid(self.ptr))
        self.add_bos = bool(lib.llama_vocab_get_add_bos(self.vocab))
        self.bos = int(lib.llama_vocab_bos(self.vocab))
        ids = range(self.n_vocab)
        self.eog: NDArray[np.bool_] = np.fromiter(
            (lib.llama_vocab_is_eog(self.vocab, i) for i in ids), np.bool_, self.n_vocab
        )
        attributes = np.fromiter((lib.llama_vocab_get_attr(self.vocab, i) for i in ids), np.int32, self.n_vocab)
        self.control: NDArray[np.bool_] = (attributes & lib.LLAMA_TOKEN_ATTR_CONTROL) != 0
        self.marks: NDArray[np.bool_] = np.zeros(self.n_vocab, np.bool_)
        self._marks: set[str] = set()
        for i in np.flatnonzero(attributes & lib.LLAMA_TOKEN_ATTR_USER_DEFINED):
            text = (lib.llama_vocab_get_text(self.vocab, int(i)) or b"").decode("utf-8", "replace")
            # Some vocabularies keep runs of spaces or newlines this way; those mark nothing.
            if len(text) > 1 and text.strip(" \t\n\u2581"):
                self.marks[i] = True
                self._marks.add(text)
        self._mark_starts = {text[0] for text in self._marks}
        self._mark_lengths = sorted({len(text) for text in self._marks})
        self._pieces: dict[int, bytes] = {}
        self._spelling: dict[bytes, list[int]] | None = None

    def meta(self, key: str) -> str | None:
        """A metadata value as text, or None."""
        lib, _ = libraries()
        for size in (1024, 1 << 20):
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_model_meta_val_str(self.ptr, key.encode(), buffer, size)
            if n < 0:
                return None
            if n < size:
                return buffer.raw[:n].decode("utf-8", "replace")
        return None

    def tokenize(self, text: str, special: bool) -> tuple[int, ...]:
        """Token ids of text; tokens with a meaning of their own are recognised only if ``special``.

        No BOS is added.
        """
        if special:
            return self._tokenize(text, True)
        tokens: list[int] = []
        for piece in self._broken(text):
            tokens += self._tokenize(piece, False)
        return tuple(tokens)

    def _broken(self, text: str) -> list[str]:
        """Text cut so that no piece contains a mark: llama.cpp takes those for one token in any text."""
        pieces: list[str] = []
        start = 0
        for i, ch in enumerate(text):
            if ch in self._mark_starts and any(text[i : i + n] in self._marks for n in self._mark_lengths):
                pieces.append(text[start : i + 1])
                start = i + 1
        return [*pieces, text[start:]]

    def _tokenize(self, text: str, special: bool) -> tuple[int, ...]:
        lib, _ = libraries()
        data = text.encode("utf-8")
        if not data:
            return ()
        capacity = len(data) + 8
        while True:
            out = (lib.llama_token * capacity)()
            n = lib.llama_tokenize(self.vocab, data, len(data), out, capacity, False, special)
            if n >= 0:
                return tuple(out[:n])
            capacity = -n

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty for control tokens."""
        found = self._pieces.get(token)
        if found is None:
            lib, _ = libraries()
            buffer = ctypes.create_string_buffer(256)
            n = lib.llama_token_to_piece(self.vocab, token, buffer, 256, 0, False)
            if n < 0:
                buffer = ctypes.create_string_buffer(-n)
                n = lib.llama_token_to_piece(self.vocab, token, buffer, -n, 0, False)
            found = self._pieces[token] = buffer.raw[: max(n, 0)]
        return found

    def tokens_spelling(self, data: bytes) -> list[int]:
        """Every ordinary token whose bytes are exactly ``data``."""
        if self._spelling is None:
            self._spelling = {}
            for token in np.flatnonzero(~(self.control | self.eog | self.marks)):
                self._spelling.setdefault(self.piece(int(token)), []).append(int(token))
        return self._spelling.get(data, [])

    def close(self) -> None:
        if self.ptr:
            libraries()[0].llama_model_free(self.ptr)
            self.ptr = None


def most_outputs(n_batch: int, n_seq: int) -> int:
    """How many tokens of a pass may have logits.

    One for each sequence is what decoding takes; scoring wants many for few sequences. Each costs two rows of the
    vocabulary's size (0.6 MB each for Qwen's), so a whole batch of them would take more than all activations.
    """
    return max(n_seq, min(n_batch, 64))


class Context:
    """A KV cache with ``n_seq`` sequences over ``n_ctx`` shared cells, and batched decoding.

    Attributes:
        n_outputs: Most tokens of a pass whose logits may be wanted; more make llama.cpp end the process.

    An ``observer`` (a ``ggml_backend_sched_eval_callback``) is shown the tensors of every pass.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_seq: int,
        n_batch: int,
        threads: int,
        flash_attention: bool,
        observer: Any = None,
    ) -> None:
        lib, _ = libraries()
        self.model = model
        params = lib.llama_context_default_params()
        # llama.cpp rounds the context up too, but only after it has cut the batch to it; and a batch that is
        # smaller than one token for each sequence makes it end the process.
        n_ctx = -(-n_ctx // CONTEXT_UNIT) * CONTEXT_UNIT
        n_batch = max(n_batch, n_seq)
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = n_batch
        params.n_seq_max = n_seq
        params.n_threads = threads
        params.n_threads_batch = threads
        params.kv_unified = True
        params.no_perf = True
        params.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self.n_outputs = most_outputs(n_batch, n_seq)
        params.n_outputs_max = self.n_outputs
        # llama.cpp asks after each operation whether to stop. A function of C reads the flag: Python code would
        # wait for the interpreter's lock each time, and could be struck by a signal where none can be raised.
        libc: Any = ctypes.CDLL(None) if os.name == "posix" else ctypes.cdll.msvcrt
        self._flag = ctypes.create_string_buffer(2)
        self._abort = ctypes.cast(libc.strlen, lib.ggml_abort_callback)
        params.abort_callback = self._abort
        params.abort_callback_data = ctypes.cast(self._flag, ctypes.c_void_p)
        self._observer = observer
        if observer is not None:
            params.cb_eval = observer
        self.ptr = lib.llama_init_from_model(model.ptr, params)
        if not self.ptr:
            raise HoverlensError(
                f"llama.cpp cannot make a context of {n_ctx} tokens "
                f"({last_error() or 'probably out of memory'}); lower n_ctx or free memory"
            )
        self.n_ctx = int(lib.llama_n_ctx(self.ptr))
        self.n_batch = int(lib.llama_n_batch(self.ptr))
        self.memory = lib.llama_get_memory(self.ptr)
        self.batch = lib.llama_batch_init(self.n_batch, 0, 1)
        as_array = np.ctypeslib.as_array
        self._tokens = as_array(self.batch.token, (self.n_batch,))
        self._pos = as_array(self.batch.pos, (self.n_batch,))
        self._n_seq_id = as_array(self.batch.n_seq_id, (self.n_batch,))
        self._want = as_array(self.batch.logits, (self.n_batch,))
        self._seq_ids = [self.batch.seq_id[i] for i in range(self.n_batch)]

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
        cancel: CancelToken | None,
    ) -> int:
        """One forward pass over at most ``n_batch`` tokens, ``n_outputs`` wanted; llama.cpp's status (0 is success)."""
        n = len(tokens)
        assert 0 < n <= self.n_batch
        assert sum(wanted) <= self.n_outputs
        self._tokens[:n] = tokens
        self._pos[:n] = positions
        self._n_seq_id[:n] = 1
        self._want[:n] = wanted
        for i, s in enumerate(sequences):
            self._seq_ids[i][0] = s
        self.batch.n_tokens = n
        with self.abortable(cancel):
            return int(libraries()[0].llama_decode(self.ptr, self.batch))

    @contextmanager
    def abortable(self, cancel: CancelToken | None) -> Iterator[None]:
        """While inside, setting ``cancel`` stops a forward pass between two of its operations."""
        if cancel is None:
            yield
            return
        try:
            with cancel.listening(self._raise_flag):
                yield
        finally:
            self._flag[0] = b"\0"

    def _raise_flag(self) -> None:
        self._flag[0] = b"!"

    def logits(self, index: int) -> NDArray[np.float32]:
        """float32 (n_vocab,) copy of the logits at a batch index that was ``wanted``.

        Raises:
            HoverlensError: They are not numbers.
        """
        lib, _ = libraries()
        pointer = lib.llama_get_logits_ith(self.ptr, index)
        out = cast("NDArray[np.float32]", np.ctypeslib.as_array(pointer, (self.model.n_vocab,)).copy())
        if math.isnan(out.max()):
            raise HoverlensError(
                f"{self.model.path.name} gives no numbers: the file is damaged, or llama.cpp fails on this device; "
                "see 'hoverlens doctor'"
            )
        return out

    def copy_sequence(self, source: int, target: int, end: int) -> None:
        """``target`` holds positions [0, end) of ``source``. No KV data moves: cells are shared."""
        lib, _ = libraries()
        # With a unified cache the target must be empty first, or its logits are off.
        lib.llama_memory_seq_rm(self.memory, target, -1, -1)
        if self.model.recurrent:
            lib.llama_memory_seq_cp(self.memory, source, target, -1, -1)
        else:
            lib.llama_memory_seq_cp(self.memory, source, target, 0, end)

    def truncate(self, sequence: int, end: int) -> bool:
        """Removes positions >= end of a sequence; False where the cache cannot (recurrent models)."""
        lib, _ = libraries()
        return bool(lib.llama_memory_seq_rm(self.memory, sequence, end, -1))

    def drop(self, sequence: int) -> None:
        if self.ptr:
            libraries()[0].llama_memory_seq_rm(self.memory, sequence, -1, -1)

    def close(self) -> None:
        if self.ptr:
            lib, _ = libraries()
            lib.llama_batch_free(self.batch)
            lib.llama_free(self.ptr)
            self.ptr = None


@dataclass
class ImageChunk:
    """A run of tokens or an encoded image inside one tokenised picture.

    Attributes:
        tokens: Text token ids around the image (``<|vision_start|>``), or None for the image itself.
        pointer: Owned mtmd chunk of the image.
        embedding: float32 (n_tokens, n_embd_inp), filled by :meth:`Projector.encode_chunk`.
    """

    tokens: tuple[int, ...] | None
    pointer: Any = None
    n_tokens: int = 0
    n_positions: int = 0
    embedding: NDArray[np.float32] | None = None

    def __del__(self) -> None:
        if self.pointer and _mtmd is not None:
            _mtmd.mtmd_input_chunk_free(self.pointer)
            self.pointer = None


class Projector:
    """The vision encoder (mmproj) of a model."""

    def __init__(
        self,
        path: Path,
        model: Model,
        threads: int,
        min_tokens: int | None,
        max_tokens: int | None,
    ) -> None:
        lib, mtmd = libraries()
        self.model = model
        _last_errors.clear()
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = True
        params.print_timings = False
        params.warmup = False
        params.n_threads = threads
        # Nothing is cached here that a result could depend on; and without it attention takes heads x (4 tokens)^2
        # floats (1 GB for 1,024 tokens of Qwen3-VL-2B) and a third more time. Automatic: on where the device can.
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        if min_tokens is not None:
            params.image_min_tokens = min_tokens
        if max_tokens is not None:
            params.image_max_tokens = max_tokens
        self.ptr = mtmd.mtmd_init_from_file(str(path).encode(), model.ptr, params)
        if not self.ptr:
            raise BadInput(
                f"{path}: cannot be used with {model.path.name} "
                f"({last_error() or 'no reason given'}); use the mmproj exported with this model"
            )
        if not mtmd.mtmd_support_vision(self.ptr):
            self.close()
            raise BadInput(f"{path}: this mmproj has no vision encoder; use the model's image mmproj")

    def tokenize(self, rgb: NDArray[np.uint8]) -> list[ImageChunk]:
        """The token layout of one image, uint8 RGB (H, W, 3), not encoded yet."""
        _, mtmd = libraries()
        height, width = rgb.shape[:2]
        rgb = np.ascontiguousarray(rgb)
        bitmap = mtmd.mtmd_bitmap_init(width, height, rgb.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(None, bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            status = mtmd.mtmd_tokenize_from_parts(self.ptr, chunks, parts, 1, False)
            if status != 0:
                raise HoverlensError(
                    f"the vision encoder cannot take an image of {width}x{height} "
                    f"({last_error() or f'status {status}'}); resize it to a side ratio below 100:1"
                )
            out: list[ImageChunk] = []
            for i in range(mtmd.mtmd_input_chunks_size(chunks)):
                chunk = mtmd.mtmd_input_chunks_get(chunks, i)
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    n = ctypes.c_size_t()
                    tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                    run = tuple(tokens[j] for j in range(n.value))
                    if run:
                        out.append(ImageChunk(run, None, len(run), len(run)))
                else:
                    copy = mtmd.mtmd_input_chunk_copy(chunk)
                    out.append(
                        ImageChunk(
                            None,
                            copy,
                            int(mtmd.mtmd_input_chunk_get_n_tokens(copy)),
                            int(mtmd.mtmd_input_chunk_get_n_pos(copy)),
                        )
                    )
            return out
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def encode_chunk(self, chunk: ImageChunk) -> NDArray[np.float32]:
        """Runs the vision encoder: float32 (n_tokens, n_embd_inp), deepstack features included.

        Raises:
            HoverlensError: It failed, or its output is not finite.
        """
        _, mtmd = libraries()
        if mtmd.mtmd_encode_chunk(self.ptr, chunk.pointer) != 0:
            raise HoverlensError(f"the vision encoder failed ({last_error() or 'no reason given'})")
        pointer = mtmd.mtmd_get_output_embd(self.ptr)
        size = chunk.n_tokens * self.model.n_embd_inp
        flat = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (size,))
        features = cast("NDArray[np.float32]", flat.copy().reshape(chunk.n_tokens, self.model.n_embd_inp))
        if not np.isfinite(features).all():
            raise HoverlensError(
                "the vision encoder gives no numbers: the mmproj is damaged, or llama.cpp fails on this device; "
                "see 'hoverlens doctor'"
            )
        return features

    def decode_chunk(
        self, context: Context, chunk: ImageChunk, sequence: int, position: int, cancel: CancelToken | None
    ) -> int:
        """Puts encoded features into the KV cache at ``position``; llama.cpp's status (0 is success)."""
        _, mtmd = libraries()
        assert chunk.embedding is not None
        embedding = np.ascontiguousarray(chunk.embedding, dtype=np.float32)
        end = ctypes.c_int32(position)
        with context.abortable(cancel):
            return int(
                mtmd.mtmd_helper_decode_image_chunk(
                    self.ptr,
                    context.ptr,
                    chunk.pointer,
                    embedding.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
                    position,
                    sequence,
                    context.n_batch,
                    ctypes.byref(end),
                    mtmd.mtmd_helper_post_decode_callback(0),
                    None,
                )
            )

    def close(self) -> None:
        if self.ptr:
            libraries()[1].mtmd_free(self.ptr)
            self.ptr = None


_TOKEN_DATA = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class Grammar:
    """A GBNF grammar that follows one output.

    Raises:
        BadInput: The grammar does not parse.
    """

    def __init__(self, model: Model, source: str) -> None:
        lib, _ = libraries()
        _last_errors.clear()
        # For C a string ends at the first NUL, and an empty grammar allows anything.
        whole = source.strip() and "\0" not in source
        self.ptr = lib.llama_sampler_init_grammar(model.vocab, source.encode(), b"root") if whole else None
        if not self.ptr:
            raise BadInput(f"the grammar does not parse ({last_error() or 'no rule named root?'})")
        self._ids = np.arange(model.n_vocab, dtype=np.int32)

    def _apply(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        lib, _ = libraries()
        data = np.empty(len(ids), dtype=_TOKEN_DATA)
        data["id"], data["logit"], data["p"] = ids, logits, 0.0
        array = lib.llama_token_data_array()
        array.data = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
        array.size, array.selected, array.sorted = len(ids), -1, False
        lib.llama_sampler_apply(self.ptr, ctypes.byref(array))
        out: NDArray[np.float32] = np.full(len(ids), -np.inf, dtype=np.float32)
        kept = data[: array.size]
        out[np.searchsorted(ids, kept["id"])] = kept["logit"]
        return out

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""
        one = self._apply(np.array([token], np.int32), np.zeros(1, np.float32))
        return bool(np.isfinite(one[0]))

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 (n_vocab,) logits with forbidden tokens at -inf."""
        return self._apply(self._ids, logits)

    def accept(self, token: int) -> None:
        libraries()[0].llama_sampler_accept(self.ptr, token)

    def close(self) -> None:
        if self.ptr:
            libraries()[0].llama_sampler_free(self.ptr)
            self.ptr = None
