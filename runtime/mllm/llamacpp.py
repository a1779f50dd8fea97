"""The MLLM on llama.cpp: one KV cache shared by all branches, and continuous batching over them."""

from __future__ import annotations

import codecs
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput, HoverlensError
from ..process import default_threads
from .base import (
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
from .dictation import Dictation
from .interrupts import hold_interrupts
from .kvtree import ImageItem, Item, Node, SequencePool, TokenRun, root
from .llama_native import Context, Grammar, ImageChunk, Model, Projector, libraries
from .sampling import Sampler
from .scheduler import Engine, Job, Schedule, free
from .slots import Filler
from .trie import Trie

SCORINGS = ("mean", "tree")
_CLOSED = "this model is closed; load the bundle again"


@dataclass(frozen=True)
class LlamaOptions:
    """How llama.cpp runs a model.

    Attributes:
        n_ctx: KV cells for all branches together, rounded up to 256; one branch may take all of them.
        n_sequences: Most branches resident at once (llama.cpp's limit is 256).
        n_batch: Most tokens in one forward pass; at least ``n_sequences`` are taken.
        threads: CPU threads; None means one for each core that this process may use.
        gpu_layers: Layers on the GPU; -1 means all, where the build has a GPU backend.
        flash_attention: Of the text model. Off by default: with a unified cache its results depend on what else is
            cached.
        image_min_tokens: Least tokens for an image; None means the model's own.
        image_max_tokens: Most tokens for an image; None means the model's own.
        share: Fork KV states and reuse features. Off, every request evaluates its whole prompt and
            encodes its images again.
        feature_cache_bytes: Most bytes of visual features kept for reuse; 0 keeps none.
        use_mmap: Map the text model's file, so that its pages are shared and can be dropped. A file that is cut
            short in place then ends the process; off, the weights are read into memory of the process's own.
    """

    n_ctx: int = 8192
    n_sequences: int = 64
    n_batch: int = 512
    threads: int | None = None
    gpu_layers: int = -1
    flash_attention: bool = False
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
    share: bool = True
    feature_cache_bytes: int = 256 * 1024 * 1024
    use_mmap: bool = True


class LlamaState(State):
    """A branch; it may own a sequence that holds its content."""

    def __init__(self, backend: LlamaCppBackend, node: Node) -> None:
        self._backend = backend
        self.node = node
        self.seq: int | None = None
        backend._states.add(self)
        self.closed = False

    @property
    def n_tokens(self) -> int:
        return self.node.end_tokens

    @property
    def key(self) -> str:
        return self.node.key.hex()

    def fork(self) -> LlamaState:
        self._check()
        return LlamaState(self._backend, self.node)

    def append(self, *parts: Part) -> None:
        self._check()
        self.node = self._backend.extend(self.node, parts)

    def lost_sequence(self) -> None:
        """The pool took the sequence back; the content is evaluated again when it is needed."""
        self.seq = None
        self._backend.counters.evictions += 1

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._backend.release_state(self)

    def _check(self) -> None:
        if self.closed:
            raise ValueError("this state is closed")

    def __del__(self) -> None:
        self.close()


class LlamaCppBackend(Backend):
    """One model, one projector, one KV cache.

    Args:
        mllm: Text model, GGUF.
        mmproj: Its projector, GGUF, or None for a model that only reads.
        options: How to run it.
        identity: Stands for the files in cache keys; by default a digest of their content.
        projector_of: Another variant of the same model whose projector and features this one uses; it must be
            closed after this one.
        observer: A ``ggml_backend_sched_eval_callback`` that is shown the text model's tensors in every pass.

    Raises:
        BadInput: A file that is not there, is not what it should be, or does not fit the other.
        HoverlensError: llama.cpp is missing or memory does not suffice.
    """

    def __init__(
        self,
        mllm: str | os.PathLike[str],
        mmproj: str | os.PathLike[str] | None,
        options: LlamaOptions | None = None,
        identity: str | None = None,
        projector_of: LlamaCppBackend | None = None,
        observer: Any = None,
    ) -> None:
        self._observer = observer
        self.options = options = options or LlamaOptions()
        for path in (mllm, mmproj):
            if path is not None and not Path(path).is_file():
                raise BadInput(f"{path}: no such model file; check the path or the bundle")
        if not 2 <= options.n_sequences <= 256:
            raise BadInput(f"n_sequences is {options.n_sequences}; llama.cpp takes 2 to 256")
        for name in ("n_ctx", "n_batch", "threads", "image_min_tokens", "image_max_tokens"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} is {value}; it must be 1 or more")
        threads = options.threads or default_threads()
        self._model: Model | None = None
        self._context: Context | None = None
        self._projector: Projector | None = None
        self._lender = projector_of
        self.counters = Counters()
        self._root = root(identity or _identity(mllm, mmproj))
        self._identity = self._root.key.hex()
        with hold_interrupts():
            self._load(Path(mllm), Path(mmproj) if mmproj is not None else None, threads)

    def _load(self, mllm: Path, mmproj: Path | None, threads: int) -> None:
        options = self.options
        try:
            self._model = model = Model(mllm, options.gpu_layers, options.use_mmap)
            hold_interrupts.check()
            if mmproj is not None:
                self._projector = Projector(
                    mmproj,
                    model,
                    threads,
                    options.image_min_tokens,
                    options.image_max_tokens,
                )
            elif self._lender is not None:
                self._projector = self._lender._projector
                lent = self._lender.model.n_embd_inp
                if lent != model.n_embd_inp:
                    raise BadInput(
                        f"{mllm} reads features {model.n_embd_inp} wide, and the other model's vision encoder gives "
                        f"{lent}; use two variants of one model"
                    )
            n_ctx = min(options.n_ctx, model.n_ctx_train) if model.n_ctx_train else options.n_ctx
            self._context = Context(
                model,
                n_ctx,
                options.n_sequences,
                min(options.n_batch, n_ctx),
                threads,
                options.flash_attention,
                self._observer,
            )
            hold_interrupts.check()
        except BaseException:
            self.close()
            raise
        self._pool = SequencePool(options.n_sequences, self._context.n_ctx, self._context.drop)
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._states: WeakSet[LlamaState] = WeakSet()
        self._feature_bytes = 0
        # A control token in an output could act as template text when the output is read back.
        self._forbidden = model.control & ~model.eog
        self._engine = Engine(
            model, self._context, self._projector, self._pool, self.counters, self._forbidden, options.share
        )
        self.capabilities = Capabilities(
            fork=options.share,
            batch=True,
            grammar=True,
            logprobs=True,
            max_sequences=options.n_sequences,
            context_tokens=self._context.n_ctx,
        )
        self.info = ModelInfo(
            name=model.meta("general.name") or mllm.stem,
            architecture=model.meta("general.architecture") or "unknown",
            identity=self._identity,
            n_params=model.n_params,
            embedding=model.n_embd_inp,
            chat_template=model.meta("tokenizer.chat_template"),
        )

    # -- handles -----------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        if self._model is None:
            raise HoverlensError(_CLOSED)
        return self._model

    @property
    def context(self) -> Context:
        if self._context is None:
            raise HoverlensError(_CLOSED)
        return self._context

    # -- prompts -----------------------------------------------------------------------------------

    def items(self, part: Part) -> list[Item]:
        """The tree items that a part becomes."""
        if isinstance(part, Text):
            tokens = self.model.tokenize(part.text, special=part.trusted)
            return [TokenRun(tokens)] if tokens else []
        chunks: list[ImageChunk] = part.handle
        out: list[Item] = []
        for i, chunk in enumerate(chunks):
            if chunk.tokens is not None:
                out.append(TokenRun(chunk.tokens))
            else:
                out.append(ImageItem(part.key, i, chunk.n_tokens, chunk.n_positions, chunk))
        return out

    def extend(self, node: Node, parts: Sequence[Part]) -> Node:
        """The node after ``parts``."""
        if node.item is None and parts and self.model.add_bos:
            first = self.items(parts[0])
            starts = first and isinstance(first[0], TokenRun) and first[0].tokens[0] == self.model.bos
            if not starts:
                node = node.child(TokenRun((self.model.bos,)))
        for part in parts:
            for item in self.items(part):
                node = node.child(item)
        return node

    def count_tokens(self, parts: Sequence[Part]) -> int:
        return sum(item.n_tokens for part in parts for item in self.items(part))

    def encode(self, rgb: NDArray[np.uint8], cancel: CancelToken | None = None) -> ImageFeatures:
        if self._model is None:
            raise HoverlensError(_CLOSED)
        if self._projector is None:
            raise BadInput("this bundle has no mmproj, so the model cannot see; add one with --mmproj")
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or 0 in rgb.shape:
            raise ValueError(f"an image is uint8 (H, W, 3); found {rgb.dtype} {rgb.shape}")
        if cancel:
            cancel.check()
        key = self._image_key(rgb)
        if self.options.share and key in self._features:
            self._features.move_to_end(key)
            self.counters.encode_hits += 1
            return self._features[key]
        start = time.perf_counter()
        with hold_interrupts():
            chunks = self._projector.tokenize(rgb)
            if self.options.share:
                for chunk in chunks:
                    if chunk.tokens is None:
                        chunk.embedding = self._projector.encode_chunk(chunk)
                        hold_interrupts.check()
                        if cancel:
                            cancel.check()
                self.counters.image_encodes += 1
        images = [c.embedding for c in chunks if c.embedding is not None]
        features = ImageFeatures(
            key=key,
            n_tokens=sum(c.n_tokens for c in chunks),
            n_positions=sum(c.n_positions for c in chunks),
            size=(rgb.shape[1], rgb.shape[0]),
            data=np.concatenate(images) if len(images) > 1 else (images[0] if images else None),
            handle=chunks,
        )
        self.counters.encode_s += time.perf_counter() - start
        if self.options.share:
            self._remember(features)
        return features

    def _image_key(self, rgb: NDArray[np.uint8]) -> str:
        o = self.options
        h = hashlib.blake2b(digest_size=16)
        h.update(
            f"image/1|{rgb.shape}|{rgb.dtype}|rgb|{o.image_min_tokens}|{o.image_max_tokens}|{self._identity}|".encode()
        )
        h.update(np.ascontiguousarray(rgb).tobytes())
        return h.hexdigest()

    def forget(self) -> None:
        """Drops the kept visual features. States that hold an image go on."""
        self._features.clear()
        self._feature_bytes = 0

    def _remember(self, features: ImageFeatures) -> None:
        def size(f: ImageFeatures) -> int:
            return sum(c.embedding.nbytes for c in f.handle if c.embedding is not None)

        self._features[features.key] = features
        self._feature_bytes += size(features)
        while self._feature_bytes > self.options.feature_cache_bytes:
            _, old = self._features.popitem(last=False)
            self._feature_bytes -= size(old)

    # -- states ------------------------------------------------------------------------------------

    def prefix(self, parts: Sequence[Part], cancel: CancelToken | None = None) -> State:
        state = LlamaState(self, self.extend(self._root, parts))
        try:
            with hold_interrupts():
                self._materialise([state], cancel, output=False)
        except BaseException:
            state.close()
            raise
        return state

    def release_state(self, state: LlamaState) -> None:
        with hold_interrupts():
            self._states.discard(state)
            seq, state.seq = state.seq, None
            if seq is None:
                return
            heir = self._heir(seq)
            if heir is None:
                self._pool.release(seq)
            else:
                self._pool.retain(seq, heir)
                heir.seq = seq

    def _heir(self, seq: int) -> LlamaState | None:
        """A state that goes on from what a sequence alone holds, and has nothing evaluated of its own.

        A search closes a node once its children are there; what they have in common must not be evaluated
        again for each of them.
        """
        tip = self._pool.tip(seq)
        if tip is None or tip.item is None or len(tip.holders) > 1:
            return None
        for state in self._states:
            if state.seq is None and not state.closed and any(node is tip for node in state.node.up()):
                return state
        return None

    def sequences_in_use(self) -> int:
        """Sequences held by states or requests; 0 when every state is closed."""
        return self._pool.in_use()

    def _materialise(self, states: Sequence[LlamaState], cancel: CancelToken | None, output: bool) -> None:
        """Gives every state a sequence that holds its content, so that requests fork instead of repeating."""
        if not self.options.share:
            return
        todo: dict[bytes, LlamaState] = {}
        for state in states:
            needs_output = output and state.node.logits is None
            if (not state.node.resident or needs_output) and state.node.item is not None:
                todo.setdefault(state.node.key, state)
        # Two states that miss the same nodes must not both evaluate them: one after the other.
        while todo:
            now: list[LlamaState] = []
            taken: set[int] = set()
            for state in list(todo.values()):
                missing = {id(n) for n in state.node.path() if not n.resident}
                if not missing & taken:
                    now.append(state)
                    taken |= missing
                    del todo[state.node.key]
            jobs = [
                Job(index=i, tip=s.node, owner=s, wants_output=output, keeps_output=output) for i, s in enumerate(now)
            ]
            Schedule(self._engine, jobs, cancel, states).run()

    # -- requests ----------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerateRequest], cancel: CancelToken | None = None) -> list[Generation]:
        states = [self._state(r.state) for r in requests]
        if any("" in r.stop for r in requests):
            raise ValueError("a stop string is empty")
        self.counters.mllm_calls += len(requests)
        out: dict[int, Generation] = {}
        kept: list[LlamaState] = []
        with hold_interrupts():
            try:
                for wave in self._waves(states):
                    jobs: list[Job] = []
                    try:
                        for i in wave:
                            jobs.append(self._generate_job(i, requests[i], states[i]))
                            if (owner := jobs[-1].owner) is not None:
                                kept.append(cast("LlamaState", owner))
                        self._evaluate(wave, states, requests, cancel)
                        self._run(jobs, [states[i] for i in wave], cancel)
                        out |= {job.index: self._generation(job) for job in jobs}
                    finally:
                        for job in jobs:
                            if job.grammar:
                                job.grammar.close()
                            if job.filler:
                                job.filler.close()
                            free(self._engine, job)
            except BaseException:
                for state in kept:
                    state.close()
                raise
        return [out[i] for i in range(len(requests))]

    def _waves(self, states: Sequence[LlamaState]) -> list[list[int]]:
        """Indexes of requests that run together: their states must leave sequences for the requests."""
        if not self.options.share:
            return [list(range(len(states)))]
        users: dict[bytes, list[int]] = {}
        for i, state in enumerate(states):
            users.setdefault(state.node.key, []).append(i)
        together = max(1, self.options.n_sequences // 2)
        groups = list(users.values())
        return [[i for group in groups[k : k + together] for i in group] for k in range(0, len(groups), together)]

    def _evaluate(
        self,
        wave: Sequence[int],
        states: Sequence[LlamaState],
        requests: Sequence[GenerateRequest] | Sequence[ChooseRequest],
        cancel: CancelToken | None,
    ) -> None:
        """Evaluates the states of a wave; with their output where a request adds nothing to its state."""
        self._materialise([states[i] for i in wave if requests[i].suffix], cancel, False)
        self._materialise([states[i] for i in wave if not requests[i].suffix], cancel, True)

    def _generate_job(self, index: int, request: GenerateRequest, state: LlamaState) -> Job:
        tip = self.extend(state.node, request.suffix)
        return Job(
            index=index,
            tip=tip,
            request=request,
            owner=LlamaState(self, tip) if request.keep else None,
            keeps_output=self.options.share and not request.suffix,
            sampler=Sampler(request.sampling),
            grammar=Grammar(self.model, request.grammar) if request.grammar and request.form is None else None,
            filler=self._filler(request),
        )

    def _filler(self, request: GenerateRequest) -> Filler | Dictation | None:
        if request.form is None:
            return None
        model = self.model
        if request.script is not None:
            return Dictation(request.form, model, request.script)
        return Filler(request.form, model, self._forbidden, request.sampling, lambda source: Grammar(model, source))

    def _generation(self, job: Job) -> Generation:
        written = job.filler.text if job.filler else job.text
        reused = job.tip.end_tokens - job.prefilled
        self.counters.reused_tokens += reused
        return Generation(
            text=whole_characters(bytes(written if job.cut is None else written[: job.cut])),
            tokens=tuple(job.feed),
            finish=job.finish,
            prefill_tokens=job.prefilled,
            reused_tokens=reused,
            logprob=job.filler.logprob if job.filler else job.logprob,
            state=cast("LlamaState | None", job.owner),
            forced_tokens=job.filler.forced if job.filler else 0,
            slots=dict(job.filler.slots) if job.filler else {},
            probabilities=dict(job.filler.probabilities) if job.filler else {},
        )

    def choose(self, requests: Sequence[ChooseRequest], cancel: CancelToken | None = None) -> list[Choice]:
        states = [self._state(r.state) for r in requests]
        for request in requests:
            if request.scoring not in SCORINGS:
                raise ValueError(f"unknown scoring {request.scoring!r}; one of {', '.join(SCORINGS)} is needed")
        tries = [self._trie(r) if r.scoring == "tree" else None for r in requests]
        runs = [self._scoring_runs(r, trie) for r, trie in zip(requests, tries, strict=True)]
        self.counters.mllm_calls += len(requests)
        out: dict[int, Choice] = {}
        with hold_interrupts():
            for wave in self._waves(states):
                jobs: list[Job] = []
                try:
                    for i in wave:
                        tip = self.extend(states[i].node, requests[i].suffix)
                        keeps = self.options.share and not requests[i].suffix
                        for option, collect in runs[i]:
                            jobs.append(Job(index=i, tip=tip, option=option, collect=collect, keeps_output=keeps))
                    self._evaluate(wave, states, requests, cancel)
                    self._run(jobs, [states[i] for i in wave], cancel)
                    for i in wave:
                        out[i] = self._choice([job for job in jobs if job.index == i], tries[i])
                finally:
                    for job in jobs:
                        free(self._engine, job)
        return [out[i] for i in range(len(requests))]

    def _choice(self, jobs: Sequence[Job], trie: Trie | None) -> Choice:
        if trie is not None:
            scores = trie.scores({job.option[:-1]: job.collected for job in jobs if job.option})
        else:
            scores = np.array([np.mean(job.logprobs) for job in jobs], dtype=np.float64)
        p = np.exp(scores - scores.max())
        p /= p.sum()
        ranked = np.sort(scores)
        prefilled = sum(job.prefilled for job in jobs)
        reused = jobs[0].tip.end_tokens - prefilled
        self.counters.reused_tokens += reused
        return Choice(
            index=int(np.argmax(scores)),
            probabilities=p,
            scores=scores,
            logits_gap=float(ranked[-1] - ranked[-2]) if len(scores) > 1 else float("inf"),
            prefill_tokens=prefilled,
            reused_tokens=reused,
        )

    def _scoring_runs(
        self, request: ChooseRequest, trie: Trie | None
    ) -> list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]]:
        """What has to be evaluated to score a request's options: runs, and the logits wanted along them."""
        if trie is None:
            return [(run, {}) for run in self._option_tokens(request.options)]
        # The last token of a run is never evaluated, so a placeholder stands there.
        return [((*path, -1), wanted) for path, wanted in trie.runs()]

    def _trie(self, request: ChooseRequest) -> Trie:
        runs = [self.model.tokenize(option, special=False) for option in request.options]
        for option, run in zip(request.options, runs, strict=True):
            if not run:
                raise ValueError(f"option {option!r} has no tokens")
        return Trie(runs, self._end_token())

    def _option_tokens(self, options: tuple[str, ...]) -> list[tuple[int, ...]]:
        if not options:
            raise ValueError("choose needs at least one option")
        runs = [self.model.tokenize(option, special=False) for option in options]
        for option, run in zip(options, runs, strict=True):
            if not run:
                raise ValueError(f"option {option!r} has no tokens")
        if len(set(runs)) != len(runs):
            raise ValueError("two options are the same tokens")
        # "1" is how "12" begins: without the end of the turn, the shorter one cannot lose.
        prefix = any(a is not b and len(a) < len(b) and b[: len(a)] == a for a in runs for b in runs)
        if prefix:
            end = self._end_token()
            runs = [(*run, end) for run in runs]
        return runs

    def _end_token(self) -> int:
        lib, _ = libraries()
        for token in (lib.llama_vocab_eot(self.model.vocab), lib.llama_vocab_eos(self.model.vocab)):
            if token >= 0:
                return int(token)
        return int(np.flatnonzero(self.model.eog)[0])

    def _run(self, jobs: Sequence[Job], states: Sequence[LlamaState], cancel: CancelToken | None) -> None:
        """All jobs as one batch; without sharing, one request after the other."""
        if self.options.share:
            Schedule(self._engine, jobs, cancel, states).run()
            return
        for index in sorted({job.index for job in jobs}):
            Schedule(self._engine, [job for job in jobs if job.index == index], cancel).run()

    def _state(self, state: State) -> LlamaState:
        if not isinstance(state, LlamaState) or state._backend is not self:
            raise ValueError("this state belongs to another backend")
        state._check()
        return state

    def close(self) -> None:
        projector = self._projector if self._lender is None else None
        for handle in (self._context, projector, self._model):
            if handle is not None:
                handle.close()
        self._context = None
        self._projector = None
        self._model = None


def whole_characters(data: bytes) -> str:
    """UTF-8 as text: what no character can have becomes U+FFFD, a last one that is cut short is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _identity(*paths: str | os.PathLike[str] | None) -> str:
    """Digest of the model files' content, for cache keys when no manifest tells it."""
    h = hashlib.sha256()
    for path in paths:
        if path is None:
            h.update(b"-")
            continue
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                h.update(block)
    return h.hexdigest()
