"""The MLLM on llama.cpp: one KV cache shared by all branches, and continuous batching over them.

A call to :meth:`LlamaCppBackend.generate` or :meth:`~LlamaCppBackend.choose` becomes *jobs*. A job forks the
deepest part of its prompt that some sequence holds, evaluates what is missing, and then decodes or scores.
All running jobs advance together in one forward pass; a job that ends makes room for the next at once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput, Cancelled, HoverlensError
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
from .kvtree import ImageItem, Item, Node, NoSequence, SequencePool, TokenRun, root
from .llama_native import (
    DECODE_ABORTED,
    DECODE_NO_SLOT,
    Context,
    Grammar,
    ImageChunk,
    Model,
    Projector,
    last_error,
    libraries,
)
from .sampling import Sampler, log_probability
from .slots import Filler
from .trie import Trie


@dataclass(frozen=True)
class LlamaOptions:
    """How llama.cpp runs a model.

    Attributes:
        n_ctx: KV cells for all branches together; one branch may take all of them.
        n_sequences: Most branches resident at once (llama.cpp's limit is 256).
        n_batch: Most tokens in one forward pass.
        threads: CPU threads; None means the CPUs this process may use.
        gpu_layers: Layers on the GPU; -1 means all, where the build has a GPU backend.
        flash_attention: Off by default: with a unified cache its results depend on what else is cached.
        image_min_tokens: Least tokens for an image; None means the model's own.
        image_max_tokens: Most tokens for an image; None means the model's own.
        share: Fork KV states and reuse features. Off, every request evaluates its whole prompt and
            encodes its images again.
        feature_cache_bytes: Most bytes of visual features kept for reuse.
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


class LlamaState(State):
    """A branch; it may own a sequence that holds its content."""

    def __init__(self, backend: LlamaCppBackend, node: Node) -> None:
        self._backend = backend
        self.node = node
        self.seq: int | None = None
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

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._backend.release_state(self)

    def _check(self) -> None:
        if self.closed:
            raise ValueError("this state is closed")

    def __del__(self) -> None:
        self.close()


@dataclass(eq=False)
class _Job:
    """One request on its way: evaluate the prompt, then decode or score.

    Attributes:
        group: Jobs with an equal group share one evaluation of their prompt.
        state: The state that takes over the sequence at the end (a prefill on a state's behalf).
        feed: Tokens to put behind the prompt: the option to score, or what was decoded so far.
        fed: How many of them are in the cache.
    """

    index: int
    tip: Node
    group: int
    request: GenerateRequest | None = None
    option: tuple[int, ...] | None = None
    state: LlamaState | None = None
    seq: int | None = None
    missing: deque[Node] = field(default_factory=deque)
    offset: int = 0
    feed: list[int] = field(default_factory=list)
    fed: int = 0
    logits: NDArray[np.float32] | None = None
    prefilled: int = 0
    started: bool = False
    sampler: Sampler | None = None
    grammar: Grammar | None = None
    filler: Filler | None = None
    collect: dict[int, tuple[int, ...]] = field(default_factory=dict)
    collected: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    text: bytearray = field(default_factory=bytearray)
    logprob: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    cut: int | None = None
    keep_logits: bool = False


class LlamaCppBackend(Backend):
    """One model, one projector, one KV cache.

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
    ) -> None:
        self.options = options = options or LlamaOptions()
        for path in (mllm, mmproj):
            if path is not None and not Path(path).is_file():
                raise BadInput(f"{path}: no such model file; check the path or the bundle")
        if not 2 <= options.n_sequences <= 256:
            raise BadInput(f"n_sequences is {options.n_sequences}; llama.cpp takes 2 to 256")
        threads = options.threads or _default_threads()
        self._model: Model | None = None
        self._context: Context | None = None
        self._projector: Projector | None = None
        self.counters = Counters()
        try:
            self._model = model = Model(Path(mllm), options.gpu_layers)
            if mmproj is not None:
                self._projector = Projector(
                    Path(mmproj),
                    model,
                    threads,
                    options.flash_attention,
                    options.image_min_tokens,
                    options.image_max_tokens,
                )
            n_ctx = min(options.n_ctx, model.n_ctx_train) if model.n_ctx_train else options.n_ctx
            self._context = Context(
                model,
                n_ctx,
                options.n_sequences,
                min(options.n_batch, n_ctx),
                threads,
                options.flash_attention,
            )
        except BaseException:
            self.close()
            raise
        self._root = root(identity or _identity(mllm, mmproj))
        self._identity = self._root.key.hex()
        self._pool = SequencePool(options.n_sequences, self._context.n_ctx, self._context.drop)
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._feature_bytes = 0
        # A control token in an output could act as template text when the output is read back.
        self._forbidden = model.control & ~model.eog
        self.capabilities = Capabilities(
            fork=options.share,
            batch=True,
            grammar=True,
            logprobs=True,
            max_sequences=options.n_sequences,
            context_tokens=self._context.n_ctx,
        )
        self.info = ModelInfo(
            name=model.meta("general.name") or Path(mllm).stem,
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
            raise HoverlensError("this model is closed; load the bundle again")
        return self._model

    @property
    def context(self) -> Context:
        if self._context is None:
            raise HoverlensError("this model is closed; load the bundle again")
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
        chunks = self._projector.tokenize(rgb)
        if self.options.share:
            for chunk in chunks:
                if chunk.tokens is None:
                    chunk.embedding = self._projector.encode_chunk(chunk)
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

    def _remember(self, features: ImageFeatures) -> None:
        def size(f: ImageFeatures) -> int:
            return sum(c.embedding.nbytes for c in f.handle if c.embedding is not None)

        self._features[features.key] = features
        self._feature_bytes += size(features)
        while self._feature_bytes > self.options.feature_cache_bytes and len(self._features) > 1:
            _, old = self._features.popitem(last=False)
            self._feature_bytes -= size(old)

    # -- states ------------------------------------------------------------------------------------

    def prefix(self, parts: Sequence[Part], cancel: CancelToken | None = None) -> State:
        state = LlamaState(self, self.extend(self._root, parts))
        try:
            self._materialise([state], cancel, logits=False)
        except BaseException:
            state.close()
            raise
        return state

    def release_state(self, state: LlamaState) -> None:
        if state.seq is not None:
            self._pool.release(state.seq)
            state.seq = None

    def sequences_in_use(self) -> int:
        """Sequences held by states or requests; 0 when every state is closed."""
        return self._pool.in_use()

    @property
    def evictions(self) -> int:
        return self._pool.evictions

    def _materialise(self, states: Sequence[LlamaState], cancel: CancelToken | None, logits: bool) -> None:
        """Gives every state a sequence that holds its content, so that requests fork instead of repeating."""
        if not self.options.share:
            return
        todo: dict[bytes, LlamaState] = {}
        for state in states:
            needs_logits = logits and state.node.logits is None
            if (not state.node.resident or needs_logits) and state.node.item is not None:
                todo.setdefault(state.node.key, state)
        # Two states that miss the same nodes must not both evaluate them: one after the other.
        while todo:
            wave: list[LlamaState] = []
            taken: set[int] = set()
            for state in list(todo.values()):
                missing = {id(n) for n in state.node.path() if not n.resident}
                if not missing & taken:
                    wave.append(state)
                    taken |= missing
                    del todo[state.node.key]
            jobs = [
                _Job(index=i, tip=s.node, group=id(s.node), state=s, keep_logits=logits) for i, s in enumerate(wave)
            ]
            self._run(jobs, cancel)

    # -- requests ----------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerateRequest], cancel: CancelToken | None = None) -> list[Generation]:
        states = [self._state(r.state) for r in requests]
        self.counters.mllm_calls += len(requests)
        self._materialise([s for s, r in zip(states, requests, strict=True) if r.suffix], cancel, False)
        self._materialise([s for s, r in zip(states, requests, strict=True) if not r.suffix], cancel, True)
        jobs: list[_Job] = []
        try:
            for i, (request, state) in enumerate(zip(requests, states, strict=True)):
                tip = self.extend(state.node, request.suffix)
                jobs.append(
                    _Job(
                        index=i,
                        tip=tip,
                        group=id(tip),
                        request=request,
                        keep_logits=not request.suffix,
                        sampler=Sampler(request.sampling),
                        grammar=Grammar(self.model, request.grammar) if request.grammar else None,
                        filler=self._filler(request),
                    )
                )
            self._run_all(jobs, cancel)
            for job in jobs:
                self.counters.reused_tokens += job.tip.end_tokens - job.prefilled
            return [self._generation(job) for job in jobs]
        finally:
            for job in jobs:
                if job.grammar:
                    job.grammar.close()
                if job.filler:
                    job.filler.close()
                self._free(job)

    def _filler(self, request: GenerateRequest) -> Filler | None:
        if request.form is None:
            return None
        model = self.model
        return Filler(request.form, model, self._forbidden, request.sampling, lambda source: Grammar(model, source))

    def _generation(self, job: _Job) -> Generation:
        assert job.request is not None
        written = job.filler.text if job.filler else job.text
        text = bytes(written if job.cut is None else written[: job.cut]).decode("utf-8", "replace")
        state: LlamaState | None = None
        if job.request.keep:
            node = job.tip
            for run in (job.feed[: job.fed], job.feed[job.fed :]):
                if run:
                    node = node.child(TokenRun(tuple(run)))
            state = LlamaState(self, node)
            if job.seq is not None and self.options.share:
                held = node.parent if job.feed[job.fed :] else node
                self._pool.extra_cells -= job.fed
                self._pool.move(job.seq, held)
                self._pool.retain(job.seq, state)
                self._pool.unpin(job.seq)
                state.seq, job.seq, job.fed = job.seq, None, 0
        return Generation(
            text=text,
            tokens=tuple(job.feed),
            finish=job.finish,
            prefill_tokens=job.prefilled,
            reused_tokens=job.tip.end_tokens - job.prefilled,
            logprob=job.filler.logprob if job.filler else job.logprob,
            state=state,
            forced_tokens=job.filler.forced if job.filler else 0,
            slots=dict(job.filler.slots) if job.filler else {},
            probabilities=dict(job.filler.probabilities) if job.filler else {},
        )

    def choose(self, requests: Sequence[ChooseRequest], cancel: CancelToken | None = None) -> list[Choice]:
        states = [self._state(r.state) for r in requests]
        self.counters.mllm_calls += len(requests)
        self._materialise([s for s, r in zip(states, requests, strict=True) if r.suffix], cancel, False)
        self._materialise([s for s, r in zip(states, requests, strict=True) if not r.suffix], cancel, True)
        jobs: list[_Job] = []
        tries: list[Trie | None] = []
        try:
            for i, (request, state) in enumerate(zip(requests, states, strict=True)):
                tip = self.extend(state.node, request.suffix)
                trie = self._trie(request) if request.scoring == "tree" else None
                tries.append(trie)
                for option, collect in self._scoring_runs(request, trie):
                    jobs.append(
                        _Job(
                            index=i,
                            tip=tip,
                            group=id(tip),
                            option=option,
                            collect=collect,
                            keep_logits=not request.suffix,
                        )
                    )
            self._run_all(jobs, cancel)
            out: list[Choice] = []
            for i, trie in enumerate(tries):
                mine = [job for job in jobs if job.index == i]
                if trie is not None:
                    scores = trie.scores({job.option[:-1]: job.collected for job in mine if job.option})
                else:
                    scores = np.array([np.mean(job.logprobs) for job in mine], dtype=np.float64)
                p = np.exp(scores - scores.max())
                p /= p.sum()
                ranked = np.sort(scores)
                prefilled = sum(job.prefilled for job in mine)
                self.counters.reused_tokens += mine[0].tip.end_tokens - prefilled
                out.append(
                    Choice(
                        index=int(np.argmax(scores)),
                        probabilities=p,
                        scores=scores,
                        logits_gap=float(ranked[-1] - ranked[-2]) if len(scores) > 1 else float("inf"),
                        prefill_tokens=prefilled,
                        reused_tokens=mine[0].tip.end_tokens - prefilled,
                    )
                )
            return out
        finally:
            for job in jobs:
                self._free(job)

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

    # -- the engine --------------------------------------------------------------------------------

    def _run_all(self, jobs: Sequence[_Job], cancel: CancelToken | None) -> None:
        """All jobs as one batch; without sharing, one request after the other."""
        if self.options.share:
            self._run(jobs, cancel)
            return
        for index in sorted({job.index for job in jobs}):
            self._run([job for job in jobs if job.index == index], cancel)

    def _run(self, jobs: Sequence[_Job], cancel: CancelToken | None) -> None:
        """Runs jobs to their end. On any exception no sequence stays taken."""
        pending: deque[_Job] = deque(jobs)
        active: list[_Job] = []
        needed: dict[int, int] = {}
        for job in jobs:
            needed[id(job.tip)] = needed.get(id(job.tip), 0) + 1
        try:
            while pending or active:
                if cancel:
                    cancel.check()
                self._admit(pending, active)
                self._step(active, pending, cancel)
                for job in [j for j in active if j.finish]:
                    active.remove(job)
                    self._complete(job)
                    needed[id(job.tip)] -= 1
                    if not needed[id(job.tip)] and not job.keep_logits:
                        job.tip.logits = None
        except BaseException:
            for job in jobs:
                self._free(job)
                job.tip.logits = None
            raise

    def _admit(self, pending: deque[_Job], active: list[_Job]) -> None:
        """Moves jobs from pending to active while there is room."""
        waiting: deque[_Job] = deque()
        while pending:
            job = pending.popleft()
            leader_at_work = any(other.group == job.group and not other.started for other in active)
            if leader_at_work:
                waiting.append(job)
                continue
            if job.tip.logits is not None and self._finished_by_tip(job):
                active.append(job)
                continue
            try:
                # Always leave a running job its progress: only a lone job may evict down to nothing.
                self._fork(job)
            except NoSequence:
                if not active:
                    raise
                waiting.append(job)
                break
            active.append(job)
        pending.extendleft(reversed(waiting))

    def _finished_by_tip(self, job: _Job) -> bool:
        """A one-token option needs no sequence once the prompt's logits are known."""
        if job.option is None or len(job.option) != 1:
            return False
        assert job.tip.logits is not None
        self._score(job, 0, job.tip.logits)
        job.started, job.finish = True, "stop"
        return True

    def _fork(self, job: _Job) -> None:
        """Gives a job a sequence with the deepest resident part of its prompt."""
        if job.tip.end_tokens + 1 > self.context.n_ctx:
            raise BadInput(
                f"the prompt has {job.tip.end_tokens} tokens and the context {self.context.n_ctx}; "
                "shorten the question or raise n_ctx"
            )
        start = job.tip
        if job.tip.logits is None and not job.started and (job.state is None or job.keep_logits):
            # Held or not, its output is not known: evaluate the last item (again).
            start = job.tip.parent or job.tip
        donor_node: Node | None = None
        donor: int | None = None
        for node in start.up():
            # A recurrent model's state cannot be cut back, so only a sequence that ends here will do.
            holders = [s for s in node.holders if not self.model.recurrent or self._pool.tip(s) is node]
            if holders:
                donor_node, donor = node, min(holders)
                break
        if donor is not None:
            self._pool.pin(donor)
        try:
            seq = self._pool.take()
        finally:
            if donor is not None:
                self._pool.unpin(donor)
        if donor is not None and donor_node is not None:
            self.context.copy_sequence(donor, seq, donor_node.end_position)
            self._pool.move(seq, donor_node)
        else:
            self.context.drop(seq)
        job.seq = seq
        path = job.tip.path()
        done = path.index(donor_node) + 1 if donor_node is not None else 0
        job.missing = deque(path[done:])
        job.offset = 0
        job.fed = 0
        if job.started:  # put back once: what it decoded is fed again
            job.logits = None
        elif not job.missing:
            self._prompt_done(job)

    def _prompt_done(self, job: _Job) -> None:
        """The whole prompt is in the cache and its last logits are known (unless a state asked for it)."""
        assert job.seq is not None
        job.started = True
        if job.state is not None:
            job.finish = "stop"
            return
        logits = job.tip.logits
        assert logits is not None
        if job.option is not None:
            self._score(job, 0, logits)
            job.feed = list(job.option[:-1])
            if not job.feed:
                job.finish = "stop"
        else:
            job.logits = logits
            if job.filler is not None:
                self._take(job, job.filler.start())
                self.counters.forced_tokens += job.filler.forced
            if job.fed == len(job.feed) and not job.finish:
                self._draw(job)

    def _score(self, job: _Job, position: int, logits: NDArray[np.float32]) -> None:
        """Keeps what a scored run needs of the logits after ``position`` of its tokens."""
        assert job.option is not None
        if job.collect:
            if position in job.collect:
                job.collected[position] = logits[list(job.collect[position])]
        elif position < len(job.option):
            del job.logprobs[position:]
            job.logprobs.append(log_probability(logits, job.option[position]))

    def _take(self, job: _Job, tokens: list[int]) -> None:
        """Puts a form's tokens behind the prompt and looks whether it ends."""
        assert job.filler is not None
        assert job.request is not None
        job.feed += tokens
        if job.filler.done:
            job.finish = "stop"
        elif len(job.feed) >= job.request.max_tokens or job.tip.end_tokens + len(job.feed) >= self.context.n_ctx:
            job.finish = "length"

    def _step(self, active: list[_Job], pending: deque[_Job], cancel: CancelToken | None) -> None:
        """One forward pass over everything that can advance."""
        running = [j for j in active if not j.finish]
        for job in running:
            try:
                self._images(job, cancel)
            except NoSequence:
                self._make_room(active, pending, job.missing[0].item.n_tokens)  # type: ignore[union-attr]
                return
        running = [j for j in running if not j.finish]
        if not running:
            return
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        plan: list[tuple[_Job, int, int, int]] = []  # job, first batch index, prompt tokens, fed tokens
        n_prompt = 0
        for job in running:
            assert job.seq is not None
            first, prompt = len(tokens), 0
            room = self.context.n_batch - len(tokens)
            offset = job.offset
            for node in job.missing:
                if room <= 0 or not isinstance(node.item, TokenRun):
                    break
                run = node.item.tokens[offset : offset + room]
                start = node.end_position - node.item.n_positions + offset
                tokens += run
                positions += range(start, start + len(run))
                sequences += [job.seq] * len(run)
                whole = offset + len(run) == node.item.n_tokens
                output = job.state is None or job.keep_logits
                wanted += [False] * (len(run) - 1) + [whole and node is job.tip and output]
                prompt += len(run)
                room -= len(run)
                if not whole:
                    break
                offset = 0
            fed = 0
            if not job.missing:
                feed = job.feed[job.fed : job.fed + room]
                start = job.tip.end_position + job.fed
                tokens += feed
                positions += range(start, start + len(feed))
                sequences += [job.seq] * len(feed)
                score = job.option is not None
                wanted += [score or k == len(job.feed) - job.fed - 1 for k in range(len(feed))]
                fed = len(feed)
            if prompt or fed:
                plan.append((job, first, prompt, fed))
                n_prompt += prompt
        if not tokens:
            return
        try:
            self._pool.reserve(len(tokens))
            start_s = time.perf_counter()
            status = self.context.decode(tokens, positions, sequences, wanted, cancel)
            elapsed = time.perf_counter() - start_s
        except NoSequence:
            status, elapsed = DECODE_NO_SLOT, 0.0
        if status == DECODE_NO_SLOT:
            self._make_room(active, pending, len(tokens))
            return
        if status == DECODE_ABORTED:
            raise Cancelled("cancelled before the answer was complete")
        if status != 0:
            raise HoverlensError(f"llama.cpp failed to decode ({last_error() or f'status {status}'})")
        self.counters.batches += 1
        self.counters.prefill_tokens += n_prompt
        share = n_prompt / len(tokens)
        self.counters.prefill_s += elapsed * share
        self.counters.decode_s += elapsed * (1 - share)
        for job, first, prompt, fed in plan:
            if prompt:
                self._advance(job, first, prompt)
            elif fed:
                self._fed(job, first, fed)

    def _images(self, job: _Job, cancel: CancelToken | None) -> None:
        """Decodes the images that stand next in a job's prompt (one at a time: they are not batched)."""
        while job.missing and isinstance(job.missing[0].item, ImageItem):
            assert self._projector is not None
            assert job.seq is not None
            if cancel:
                cancel.check()
            node = job.missing[0]
            item = node.item
            assert isinstance(item, ImageItem)
            chunk: ImageChunk = item.chunk
            if chunk.embedding is None or not self.options.share:
                start = time.perf_counter()
                chunk.embedding = self._projector.encode_chunk(chunk)
                self.counters.image_encodes += 1
                self.counters.encode_s += time.perf_counter() - start
            self._pool.reserve(item.n_tokens)
            start = time.perf_counter()
            status = self._projector.decode_chunk(self.context, chunk, job.seq, node.end_position - item.n_positions)
            if status != 0:
                raise HoverlensError(
                    f"llama.cpp failed to take the image ({last_error() or f'status {status}'}); "
                    "raise n_ctx or lower image_max_tokens"
                )
            self.counters.prefill_s += time.perf_counter() - start
            self.counters.prefill_tokens += item.n_tokens
            job.prefilled += item.n_tokens
            job.missing.popleft()
            self._pool.move(job.seq, node)
            if not job.missing:
                if job.state is None:
                    raise ValueError("a request must end with text: after an image there are no logits")
                self._prompt_done(job)

    def _advance(self, job: _Job, first: int, count: int) -> None:
        """Books ``count`` evaluated prompt tokens of a job."""
        assert job.seq is not None
        if job.started:  # put back once: the prompt is evaluated again
            self.counters.recomputed_tokens += count
        else:
            job.prefilled += count
        index = first
        while count:
            node = job.missing[0]
            assert node.item is not None
            left = node.item.n_tokens - job.offset
            took = min(left, count)
            count -= took
            index += took
            if job.offset + took < node.item.n_tokens:
                job.offset += took
                self._pool.extra_cells += took
                break
            self._pool.extra_cells -= job.offset
            job.offset = 0
            job.missing.popleft()
            self._pool.move(job.seq, node)
            if node is job.tip and not job.started:
                if job.state is None or job.keep_logits:
                    job.tip.logits = self.context.logits(index - 1)
                self._prompt_done(job)

    def _fed(self, job: _Job, first: int, count: int) -> None:
        """Books tokens behind the prompt, and draws the next one or collects scores."""
        self._pool.extra_cells += count
        if job.option is not None:
            for k in range(count):
                self._score(job, job.fed + k + 1, self.context.logits(first + k))
            self.counters.forced_tokens += count
            job.fed += count
            if job.fed == len(job.feed):
                job.finish = "stop"
            return
        job.fed += count
        if job.fed == len(job.feed):
            job.logits = self.context.logits(first + count - 1)
            self._draw(job)

    def _draw(self, job: _Job) -> None:
        """Draws a job's next token from its logits and looks whether it ends."""
        assert job.request is not None
        assert job.sampler is not None
        assert job.logits is not None
        request, raw = job.request, job.logits
        if job.filler is not None:
            drawn, forced = job.filler.drawn, job.filler.forced
            self._take(job, job.filler.draw(raw))
            self.counters.decoded_tokens += job.filler.drawn - drawn
            self.counters.forced_tokens += job.filler.forced - forced
            return
        if len(job.feed) >= request.max_tokens:
            job.finish = "length"
            return
        logits = np.where(self._forbidden, np.float32(-np.inf), raw)
        if job.grammar is not None:
            greedy = request.sampling.temperature <= 0
            best = int(np.argmax(logits))
            if not (greedy and job.grammar.allows(best)):
                logits = job.grammar.mask(logits)
                if not np.isfinite(logits).any():
                    job.finish = "stop"  # the grammar is complete and has no end token to give
                    return
        token = job.sampler.draw(logits)
        self.counters.decoded_tokens += 1
        if self.model.eog[token]:
            job.finish = "stop"
            return
        if job.grammar is not None:
            job.grammar.accept(token)
        job.logprob += log_probability(raw, token)
        job.feed.append(token)
        job.text += self.model.piece(token)
        for stop in request.stop:
            at = job.text.find(stop.encode())
            if at >= 0:
                job.cut = at if job.cut is None else min(job.cut, at)
                job.finish = "stop"
        full = job.tip.end_tokens + len(job.feed) >= self.context.n_ctx
        if not job.finish and (full or len(job.feed) >= request.max_tokens):
            job.finish = "length"

    def _make_room(self, active: list[_Job], pending: deque[_Job], tokens: int) -> None:
        """The cache is full: drop the least recent branch, else put the newest job back in the queue."""
        if self._pool.evict():
            return
        holding = [j for j in active if j.seq is not None and not j.finish]
        if len(holding) <= 1:
            raise HoverlensError(
                f"{self._pool.cells + tokens} tokens do not fit the KV cache of {self.context.n_ctx}; "
                "raise n_ctx, or ask a shorter question"
            )
        job = holding[-1]
        self._free(job)
        active.remove(job)
        pending.append(job)
        self.counters.evictions += 1

    def _complete(self, job: _Job) -> None:
        """A finished job gives its sequence to its state, keeps it for ``keep``, or frees it."""
        if job.state is not None:
            state, seq = job.state, job.seq
            assert seq is not None
            if state.seq is not None:
                self._pool.release(state.seq)
            self._pool.retain(seq, state)
            self._pool.unpin(seq)
            state.seq, job.seq = seq, None
        elif job.request is None or not job.request.keep:
            self._free(job)

    def _free(self, job: _Job) -> None:
        if job.seq is not None:
            self._pool.extra_cells -= job.fed + job.offset
            self._pool.release(job.seq)
            job.seq, job.fed, job.offset = None, 0, 0

    def _state(self, state: State) -> LlamaState:
        if not isinstance(state, LlamaState) or state._backend is not self:
            raise ValueError("this state belongs to another backend")
        state._check()
        return state

    def close(self) -> None:
        for handle in (self._context, self._projector, self._model):
            if handle is not None:
                handle.close()
        self._context = None
        self._projector = None
        self._model = None


def _default_threads() -> int:
    """CPUs that this process may use, hyper-threads of one core counted once where Linux tells."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        try:
            folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
            cores.add((folder.joinpath("physical_package_id").read_text(), folder.joinpath("core_id").read_text()))
        except OSError:
            cores.add((str(cpu), str(cpu)))
    return max(1, len(cores))


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
