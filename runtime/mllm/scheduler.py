"""Continuous batching over the prompt tree.

A call becomes *jobs*. A job forks the deepest part of its prompt that some sequence holds, evaluates what is
missing, and then decodes or scores. All running jobs advance together in one forward pass; a job that ends
makes room for the next at once. Jobs with the same prompt evaluate it once: the first is their leader, the
others wait and fork from it.

Room runs out in two ways. Without a free sequence a job waits for another to end. Without free cells the
branches that nobody here needs are dropped first, then the newest job goes back into the queue, and only a
job that runs alone may drop the states that others of the call start from. A job starts only where there is room for
what is known of its end, so that few are put back.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput, Cancelled, HoverlensError
from .base import CancelToken, Counters, GenerateRequest
from .dictation import Dictation
from .interrupts import hold_interrupts
from .kvtree import ImageItem, Node, NoSequence, SequencePool, TokenRun
from .llama_native import DECODE_ABORTED, DECODE_NO_SLOT, Context, Grammar, Model, Projector, last_error
from .sampling import Sampler, log_probability
from .slots import Filler


class Owner(Protocol):
    """What may keep a sequence after a job: a state."""

    node: Node
    seq: int | None

    def lost_sequence(self) -> None:
        """The pool took the sequence back."""


@dataclass(eq=False)
class Job:
    """One request on its way: evaluate the prompt, then decode (``request``) or score (``option``).

    With neither it only evaluates the prompt, for its ``owner``.

    Attributes:
        index: The request that it belongs to.
        tip: The end of its prompt.
        owner: Takes over the sequence at the end.
        collect: For a scored run, the token ids whose logits are wanted after its first n tokens; empty: the
            log-probability of every token.
        wants_output: The logits after the prompt are needed.
        keeps_output: They stay at the tip afterwards.
        missing: Nodes of the prompt that its sequence does not hold yet.
        offset: Tokens of the first of them that it holds.
        feed: Tokens to put behind the prompt: the run to score, or what was decoded so far.
        fed: How many of them are in the cache.
        was_fed: How many of them were in the cache before it was put back.
        prefilled: Prompt tokens evaluated for it.
        started: Its prompt is done, and its first token drawn.
        finish: Why it ended; empty while it runs.
        cut: Where a stop string begins in the text.
    """

    index: int
    tip: Node
    request: GenerateRequest | None = None
    option: tuple[int, ...] | None = None
    owner: Owner | None = None
    collect: dict[int, tuple[int, ...]] = field(default_factory=dict)
    wants_output: bool = True
    keeps_output: bool = False
    sampler: Sampler | None = None
    grammar: Grammar | None = None
    filler: Filler | Dictation | None = None
    seq: int | None = None
    missing: deque[Node] = field(default_factory=deque)
    offset: int = 0
    feed: list[int] = field(default_factory=list)
    fed: int = 0
    was_fed: int = 0
    prefilled: int = 0
    started: bool = False
    finish: str = ""
    text: bytearray = field(default_factory=bytearray)
    cut: int | None = None
    logprob: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    collected: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def left(self) -> int:
        """Tokens that its sequence still has to take, as far as they are known."""
        prompt = sum(node.item.n_tokens for node in self.missing if node.item) - self.offset
        return prompt + max(1, len(self.feed) - self.fed, len(self.option or ()) - 1 - self.fed)

    def scores_at(self, position: int) -> bool:
        """Whether a scored run needs the logits after its first ``position`` tokens."""
        assert self.option is not None
        return position in self.collect if self.collect else position < len(self.option)


@dataclass
class Engine:
    """What jobs run on.

    Attributes:
        forbidden: bool (n_vocab,), tokens that are never drawn.
        share: Off, images are encoded again for each job, and owners get no sequence.
    """

    model: Model
    context: Context
    projector: Projector | None
    pool: SequencePool
    counters: Counters
    forbidden: NDArray[np.bool_]
    share: bool


class Schedule:
    """One run of jobs to their end.

    Args:
        jobs: In the order in which they are started.
        spare: States whose sequences are not dropped while anything else helps.

    The caller frees what jobs still hold (:func:`free`) if it does not hand the jobs in again.
    """

    def __init__(
        self, engine: Engine, jobs: Sequence[Job], cancel: CancelToken | None, spare: Sequence[Owner] = ()
    ) -> None:
        self._model = engine.model
        self._context = engine.context
        self._projector = engine.projector
        self._pool = engine.pool
        self._counters = engine.counters
        self._engine = engine
        self._cancel = cancel
        self._spare = set(spare)
        self._jobs = jobs
        self._pending: deque[Job] = deque(jobs)
        self._active: list[Job] = []
        self._lingering: list[Job] = []
        # No job starts between one's being put back and the next one's end, or they would change places for ever.
        self._full = False
        self._users = Tally(id(job.tip) for job in jobs)

    def run(self) -> None:
        """Runs the jobs. On any exception no sequence stays taken.

        Raises:
            Cancelled: ``cancel`` was set.
            BadInput: A prompt longer than the context.
            HoverlensError: A job does not fit even alone, or llama.cpp failed.
        """
        try:
            while self._pending or self._active:
                hold_interrupts.check()
                if self._cancel:
                    self._cancel.check()
                self._admit()
                self._step()
                self._collect()
        except BaseException:
            for job in self._jobs:
                free(self._engine, job)
                job.tip.logits = None
            raise

    # -- who runs ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts waiting jobs while there is room."""
        if self._full and self._active:
            return
        waiting: deque[Job] = deque()
        at_work = {id(job.tip) for job in self._active if not job.started}
        while self._pending:
            job = self._pending.popleft()
            if id(job.tip) in at_work:
                waiting.append(job)
                continue
            if not self._scored_at_tip(job):
                if not self._fits(job) or not self._fork(job):
                    waiting.append(job)
                    break
                if not job.started:
                    at_work.add(id(job.tip))
            self._active.append(job)
        self._pending.extendleft(reversed(waiting))

    def _fits(self, job: Job) -> bool:
        """Whether a job can run to its end, as far as that is known, without another's being put back for it."""
        if not self._active:
            return True
        held = next((n.end_tokens for n in job.tip.up() if n.holders), 0)
        need = job.tip.end_tokens - held + max(len(job.option or ()) - 1, len(job.feed) + 1)
        need += sum(other.left() for other in self._active if not other.finish)
        return self._pool.room(need, self._spare) >= need

    def _scored_at_tip(self, job: Job) -> bool:
        """A run of one token needs no sequence once the logits after the prompt are known."""
        if job.option is None or len(job.option) != 1 or job.tip.logits is None:
            return False
        self._score(job, 0, job.tip.logits)
        job.started, job.finish = True, "stop"
        return True

    def _fork(self, job: Job) -> bool:
        """Gives a job a sequence with the deepest resident part of its prompt; False if it has to wait."""
        tip = job.tip
        if tip.item is None:
            raise ValueError("the prompt is empty")
        if tip.end_tokens + 1 > self._context.n_ctx:
            raise BadInput(
                f"the prompt has {tip.end_tokens} tokens and the context {self._context.n_ctx}; "
                "shorten the question or raise n_ctx"
            )
        # Where the tip is held but its output is not known, its last token is evaluated once more.
        again = job.wants_output and not job.started and tip.logits is None
        _, donor = self._donor(tip, again)
        guarded = donor if donor is not None and not self._pool.pinned(donor) else None
        if guarded is not None:
            self._pool.pin(guarded)
        try:
            seq = self._sequence(job, again)
        finally:
            if guarded is not None:
                self._pool.unpin(guarded)
        if seq is None:
            return False
        job.seq = seq
        # Looked for again, since what lingered may have been given up.
        node, donor = self._donor(tip, again)
        if self._pool.tip(seq) is tip:  # taken over as it is
            job.missing = deque()
        elif donor is None or node is None:
            self._context.drop(seq)
            job.missing = deque(tip.path())
        else:
            job.missing = deque(tip.path()[len(node.path()) :])
            end, held = node.end_position, node
            if node is tip and again:
                assert node.item is not None
                assert node.parent is not None
                job.offset, job.missing = node.item.n_tokens - 1, deque([tip])
                end, held = end - 1, node.parent
            self._context.copy_sequence(donor, seq, end)
            self._pool.move(seq, held if held.item is not None else None, source=donor)
            self._pool.extra_cells += job.offset
        if not job.missing and not job.started:
            self._prompt_done(job)
        return True

    def _donor(self, tip: Node, again: bool) -> tuple[Node | None, int | None]:
        """The deepest node of a path that a sequence holds, and such a sequence."""
        for node in tip.up():
            if again and node is tip and (self._model.recurrent or not isinstance(tip.item, TokenRun)):
                continue
            # A recurrent model's state cannot be cut back, so only a sequence that ends here will do.
            holders = [s for s in node.holders if not self._model.recurrent or self._pool.tip(s) is node]
            if holders:
                return node, min(holders)
        return None, None

    def _sequence(self, job: Job, again: bool) -> int | None:
        """A pinned sequence for a job, or None if it has to wait for another's end."""
        try:
            return self._pool.take(self._spare)
        except NoSequence:
            pass
        if not again:
            for other in self._lingering:
                if other.tip is job.tip:
                    self._lingering.remove(other)
                    seq, other.seq = other.seq, None
                    return seq
        if self._active:
            return None
        while self._lingering:
            free(self._engine, self._lingering.pop())
        return self._pool.take()

    def _collect(self) -> None:
        """Ends jobs that are finished. One that alone holds a prompt others wait for lingers until they have it."""
        for job in [j for j in self._active if j.finish]:
            self._active.remove(job)
            self._full = False
            self._users[id(job.tip)] -= 1
            if self._is_last_holder(job):
                self._lingering.append(job)
            else:
                complete(self._engine, job)
            if not self._users[id(job.tip)] and not job.keeps_output:
                job.tip.logits = None
        wanted = {id(job.tip) for job in self._pending}
        for job in [j for j in self._lingering if id(j.tip) not in wanted]:
            self._lingering.remove(job)
            free(self._engine, job)

    def _is_last_holder(self, job: Job) -> bool:
        if job.seq is None or job.owner is not None or job.tip.holders != {job.seq}:
            return False
        if not any(other.tip is job.tip for other in self._pending):
            return False
        if not self._context.truncate(job.seq, job.tip.end_position):
            return False
        self._pool.extra_cells -= job.fed
        job.fed = 0
        return True

    def _make_room(self, tokens: int) -> None:
        """The cache is full: makes one step towards room for ``tokens`` more."""
        if self._pool.evict(self._spare):
            return
        if self._lingering:
            free(self._engine, self._lingering.pop())
            return
        holding = [j for j in self._active if j.seq is not None and not j.finish]
        if len(holding) > 1:
            job = holding[-1]
            job.was_fed = max(job.was_fed, job.fed)
            if not job.started:
                job.prefilled = 0
            free(self._engine, job, lost=True)
            self._active.remove(job)
            self._pending.appendleft(job)
            self._counters.evictions += 1
            self._full = True
            return
        if not self._pool.evict():
            raise HoverlensError(
                f"{self._pool.cells + tokens} tokens do not fit the KV cache of {self._context.n_ctx}; "
                "raise n_ctx, or ask a shorter question"
            )

    # -- one forward pass ----------------------------------------------------------------------------

    def _step(self) -> None:
        """Advances everything that can advance."""
        for job in [j for j in self._active if not j.finish]:
            try:
                self._images(job)
            except NoSequence:
                item = job.missing[0].item
                assert item is not None
                self._make_room(item.n_tokens)
                return
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        plan: list[tuple[Job, int, int, int]] = []  # job, first batch index, prompt tokens, fed tokens
        running = [j for j in self._active if not j.finish]
        if not running:
            return
        room = self._pool.room(min(self._context.n_batch, sum(j.left() for j in running)), self._spare)
        if not room:
            self._make_room(1)
            return
        for job in running:
            first = len(tokens)
            if job.missing:
                run, start, output = self._prompt_tokens(job, room - first)
            else:
                run, start, output = self._fed_tokens(job, room - first)
            run, output = _within(run, output, self._context.n_outputs - sum(wanted))
            if run:
                assert job.seq is not None
                tokens += run
                positions += range(start, start + len(run))
                sequences += [job.seq] * len(run)
                wanted += output
                plan.append((job, first, *((len(run), 0) if job.missing else (0, len(run)))))
        if not tokens:
            return
        start_s = time.perf_counter()
        status = self._context.decode(tokens, positions, sequences, wanted, self._cancel)
        elapsed = time.perf_counter() - start_s
        if status == DECODE_NO_SLOT:
            self._make_room(len(tokens))
            return
        if status == DECODE_ABORTED:
            raise Cancelled("cancelled before the answer was complete")
        if status != 0:
            raise HoverlensError(f"llama.cpp failed to decode ({last_error() or f'status {status}'})")
        n_prompt = sum(prompt for _, _, prompt, _ in plan)
        share = n_prompt / len(tokens)
        self._counters.batches += 1
        self._counters.prefill_tokens += n_prompt
        self._counters.prefill_s += elapsed * share
        self._counters.decode_s += elapsed * (1 - share)
        for job, first, prompt, fed in plan:
            if prompt:
                self._advance(job, first, prompt)
            else:
                self._fed(job, first, fed)

    def _prompt_tokens(self, job: Job, room: int) -> tuple[list[int], int, list[bool]]:
        """At most ``room`` tokens of the text that comes next in a prompt, and where they begin."""
        tokens: list[int] = []
        output: list[bool] = []
        offset = job.offset
        begin: int | None = None
        for node in job.missing:
            if len(tokens) >= room or not isinstance(node.item, TokenRun):
                break
            run = node.item.tokens[offset : offset + room - len(tokens)]
            if begin is None:
                begin = node.end_position - node.item.n_positions + offset
            tokens += run
            whole = offset + len(run) == node.item.n_tokens
            output += [False] * (len(run) - 1)
            output += [whole and node is job.tip and job.wants_output and not job.started]
            if not whole:
                break
            offset = 0
        return tokens, begin or 0, output

    def _fed_tokens(self, job: Job, room: int) -> tuple[list[int], int, list[bool]]:
        """At most ``room`` tokens of what stands behind a prompt, and where they begin."""
        tokens = job.feed[job.fed : job.fed + room]
        if job.option is not None:
            output = [job.scores_at(job.fed + k + 1) for k in range(len(tokens))]
        else:
            output = [job.fed + k + 1 == len(job.feed) for k in range(len(tokens))]
        return tokens, job.tip.end_position + job.fed, output

    def _images(self, job: Job) -> None:
        """Decodes the images that stand next in a job's prompt (one at a time: they are not batched)."""
        while job.missing and isinstance(item := job.missing[0].item, ImageItem):
            hold_interrupts.check()
            if self._cancel:
                self._cancel.check()
            node = job.missing[0]
            if node is job.tip and job.wants_output:
                raise ValueError("a request must end with text: after an image there are no logits")
            self._image(job, node, item)
            self._book(job, node, item.n_tokens)
            job.missing.popleft()
            self._hold(job, node)
            if not job.missing and not job.started:
                self._prompt_done(job)

    def _image(self, job: Job, node: Node, item: ImageItem) -> None:
        """Puts an image behind what a job's sequence holds, encoding it first where that is due."""
        assert self._projector is not None
        assert job.seq is not None
        chunk = item.chunk
        if chunk.embedding is None or not self._engine.share:
            start_s = time.perf_counter()
            chunk.embedding = self._projector.encode_chunk(chunk)
            self._counters.image_encodes += 1
            self._counters.encode_s += time.perf_counter() - start_s
            hold_interrupts.check()
        self._pool.reserve(item.n_tokens, self._spare)
        start_s = time.perf_counter()
        position = node.end_position - item.n_positions
        status = self._projector.decode_chunk(self._context, chunk, job.seq, position, self._cancel)
        if status == DECODE_ABORTED:
            raise Cancelled("cancelled before the answer was complete")
        if status == DECODE_NO_SLOT and self._context.truncate(job.seq, position):
            # A large image goes in several passes, and some may have found room.
            raise NoSequence("no cells for the image")
        if status != 0:
            raise HoverlensError(
                f"llama.cpp failed to take the image ({last_error() or f'status {status}'}); "
                "raise n_ctx or lower image_max_tokens"
            )
        self._counters.prefill_s += time.perf_counter() - start_s
        self._counters.prefill_tokens += item.n_tokens

    # -- what came of it -----------------------------------------------------------------------------

    def _book(self, job: Job, node: Node, count: int) -> None:
        """Counts evaluated tokens of a prompt node."""
        if node.lost:
            self._counters.recomputed_tokens += count
        if not job.started:
            job.prefilled += count

    def _hold(self, job: Job, node: Node) -> None:
        """A job's sequence now reaches to ``node``."""
        assert job.seq is not None
        self._pool.move(job.seq, node)

    def _advance(self, job: Job, first: int, count: int) -> None:
        """Books ``count`` evaluated prompt tokens of a job."""
        index = first
        while count:
            node = job.missing[0]
            assert node.item is not None
            took = min(node.item.n_tokens - job.offset, count)
            count -= took
            index += took
            self._book(job, node, took)
            if job.offset + took < node.item.n_tokens:
                job.offset += took
                self._pool.extra_cells += took
                return
            self._pool.extra_cells -= job.offset
            job.offset = 0
            job.missing.popleft()
            self._hold(job, node)
            if node is job.tip and not job.started:
                if job.wants_output:
                    job.tip.logits = self._context.logits(index - 1)
                self._prompt_done(job)

    def _prompt_done(self, job: Job) -> None:
        """The whole prompt is in the cache, and its output known if it is wanted."""
        job.started = True
        if job.option is None and job.request is None:
            job.finish = "stop"
            return
        logits = job.tip.logits
        assert logits is not None
        if job.option is not None:
            self._score(job, 0, logits)
            job.feed = list(job.option[:-1])
            if not job.feed:
                job.finish = "stop"
            return
        if job.filler is not None:
            self._fill(job, job.filler.start())
            self._counters.forced_tokens += job.filler.forced
        if job.fed == len(job.feed) and not job.finish:
            self._draw(job, logits)

    def _fed(self, job: Job, first: int, count: int) -> None:
        """Books tokens behind the prompt, and draws the next one or collects scores."""
        repeated = max(0, min(job.was_fed, job.fed + count) - job.fed)
        self._counters.recomputed_tokens += repeated
        self._pool.extra_cells += count
        if job.option is not None:
            for k in range(count):
                position = job.fed + k + 1
                if job.scores_at(position):
                    self._score(job, position, self._context.logits(first + k))
            self._counters.forced_tokens += count - repeated
            job.fed += count
            if job.fed == len(job.feed):
                job.finish = "stop"
            return
        job.fed += count
        if job.fed == len(job.feed):
            self._draw(job, self._context.logits(first + count - 1))

    def _score(self, job: Job, position: int, logits: NDArray[np.float32]) -> None:
        """Keeps what a scored run needs of the logits after its first ``position`` tokens."""
        assert job.option is not None
        if job.collect:
            if position in job.collect:
                job.collected[position] = logits[list(job.collect[position])]
        else:
            del job.logprobs[position:]
            job.logprobs.append(log_probability(logits, job.option[position]))

    def _draw(self, job: Job, raw: NDArray[np.float32]) -> None:
        """Draws a job's next token from its logits and looks whether it ends."""
        request = job.request
        assert request is not None
        assert job.sampler is not None
        if job.filler is not None:
            # A slot may end without a token, and then the same logits serve the next one.
            while job.fed == len(job.feed) and not job.finish:
                drawn, forced = job.filler.drawn, job.filler.forced
                self._fill(job, job.filler.draw(raw))
                self._counters.decoded_tokens += job.filler.drawn - drawn
                self._counters.forced_tokens += job.filler.forced - forced
            return
        if len(job.feed) >= request.max_tokens:
            job.finish = "length"
            return
        logits = np.where(self._engine.forbidden, np.float32(-np.inf), raw)
        if job.grammar is not None:
            greedy = request.sampling.temperature <= 0
            if not (greedy and job.grammar.allows(int(np.argmax(logits)))):
                logits = job.grammar.mask(logits)
                if not np.isfinite(logits).any():
                    job.finish = "stop"  # the grammar is complete and has no end token to give
                    return
        token = job.sampler.draw(logits)
        self._counters.decoded_tokens += 1
        if self._model.eog[token]:
            job.finish = "stop"
            return
        if job.grammar is not None:
            job.grammar.accept(token)
        job.logprob += log_probability(raw, token)
        job.feed.append(token)
        piece = self._model.piece(token)
        job.text += piece
        for stop in request.stop:
            wanted = stop.encode()
            at = job.text.find(wanted, max(0, len(job.text) - len(piece) - len(wanted) + 1))
            if at >= 0:
                job.cut = at if job.cut is None else min(job.cut, at)
                job.finish = "stop"
        if not job.finish and self._at_limit(job):
            job.finish = "length"

    def _fill(self, job: Job, tokens: Sequence[int]) -> None:
        """Puts a form's tokens behind the prompt and looks whether it ends."""
        assert job.filler is not None
        job.feed += tokens
        if job.filler.done:
            job.finish = "stop"
        elif self._at_limit(job):
            job.finish = "length"

    def _at_limit(self, job: Job) -> bool:
        assert job.request is not None
        return len(job.feed) >= job.request.max_tokens or job.tip.end_tokens + len(job.feed) >= self._context.n_ctx


def _within(run: list[int], wanted: list[bool], outputs: int) -> tuple[list[int], list[bool]]:
    """As much of a run as wants at most ``outputs`` outputs; the rest goes into a later pass."""
    for k, wants in enumerate(wanted):
        outputs -= wants
        if outputs < 0:
            return run[:k], wanted[:k]
    return run, wanted


def complete(engine: Engine, job: Job) -> None:
    """A job's end: its owner, if it has one, takes over the sequence and stands at the job's last token."""
    owner = job.owner
    if owner is None:
        free(engine, job)
        return
    # What was drawn last is not in the cache, so it becomes a node of its own.
    held = node = job.tip
    if job.fed:
        held = node = node.child(TokenRun(tuple(job.feed[: job.fed])))
    if job.feed[job.fed :]:
        node = node.child(TokenRun(tuple(job.feed[job.fed :])))
    owner.node = node
    if not engine.share or job.seq is None:
        free(engine, job)
        return
    if owner.seq is not None:
        engine.pool.release(owner.seq)
    engine.pool.extra_cells -= job.fed
    engine.pool.move(job.seq, held)
    engine.pool.retain(job.seq, owner)
    engine.pool.unpin(job.seq)
    owner.seq, job.seq, job.fed = job.seq, None, 0


def free(engine: Engine, job: Job, lost: bool = False) -> None:
    """Frees what a job holds in the cache; it may start again, which ``lost`` says that it will."""
    if job.seq is not None:
        engine.pool.extra_cells -= job.fed + job.offset
        engine.pool.release(job.seq, lost)
        job.seq, job.fed, job.offset = None, 0, 0
        job.missing = deque()
