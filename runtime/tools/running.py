"""Runs several tools at once: their calls to the MLLM go through it as one batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import Cancelled, HoverlensError
from ..mllm.base import ChooseRequest, GenerateRequest
from .base import Ask, Feedback, Perception, Told, Tool, ToolError, ToolRun
from .perception import Timed

if TYPE_CHECKING:
    from ..reasoning.session import Session

MAX_ROUNDS = 16
"""A tool that asks the MLLM more often than this is given up on."""

A = TypeVar("A")
R = TypeVar("R")


@dataclass
class _Job:
    tool: Tool
    arguments: Mapping[str, Any]
    run: ToolRun | None = None
    asks: list[Ask] = field(default_factory=list)
    answers: list[Told | Exception] = field(default_factory=list)
    feedback: Feedback | None = None
    seconds: float = 0.0
    """Time inside the tool itself: perception, cropping, encoding a crop; without its calls to the MLLM."""

    def advance(self, session: Session, perception: Perception) -> None:
        """Runs the tool up to its next requests, or to its end."""
        start = time.perf_counter()
        self.asks = []
        try:
            try:
                if self.run is None:
                    self.run = self.tool.run(session, perception, self.arguments)
                    self._take(next(self.run))
                else:
                    failed = next((a for a in self.answers if isinstance(a, Exception)), None)
                    told = [a for a in self.answers if not isinstance(a, Exception)]
                    self._take(self.run.throw(failed) if failed else self.run.send(told))
            except StopIteration as end:
                if not isinstance(end.value, Feedback):
                    raise TypeError(f"it gave {type(end.value).__name__} and no feedback") from None
                self.feedback = end.value
        except Cancelled:
            raise
        except Exception as e:
            self.fail(e)
        finally:
            self.seconds += time.perf_counter() - start

    def _take(self, asks: list[Ask]) -> None:
        if not all(isinstance(a, (GenerateRequest, ChooseRequest)) for a in asks):
            raise TypeError("it asked for something that is no request")
        self.asks = list(asks)
        self.answers = []

    def fail(self, error: Exception) -> None:
        expected = isinstance(error, (ToolError, HoverlensError))
        reason = " ".join(str(error).split()) or type(error).__name__
        text = f"{self.tool.name} failed: {reason if expected else f'{type(error).__name__}: {reason}'}"
        self.feedback = Feedback(text[:300], ok=False, details={"error": type(error).__name__})
        self.close()

    def close(self) -> None:
        if self.run is not None:
            try:
                self.run.close()
            except Exception as e:
                # A tool that does not even end in peace; its feedback says what happened before.
                self.feedback = self.feedback or Feedback(f"{self.tool.name} failed: {type(e).__name__}", ok=False)


def run_tools(
    session: Session,
    perception: Perception,
    jobs: Sequence[tuple[Tool, Mapping[str, Any]]],
    timeout_s: float | None = None,
) -> list[Feedback]:
    """Runs tools in lockstep: one call of ``generate`` and one of ``choose`` a round, for all of them.

    A tool that fails in any way gives feedback that is not ok, and the others go on. The same tool with the same
    arguments runs once, and its feedback counts for all who asked.

    Args:
        session: The question.
        perception: The compiled models.
        jobs: Tools and their arguments.
        timeout_s: Seconds after which a perception call counts as failed (what then goes on in the background:
            :class:`~hoverlens.runtime.tools.perception.Timed`). A tool that hangs outside of perception cannot
            be stopped.

    Returns:
        Feedback in the order of the jobs.

    Raises:
        Cancelled: The session was cancelled.
    """
    if timeout_s is not None:
        perception = Timed(perception, timeout_s, session.cancel)
    distinct: dict[tuple[int, str], _Job] = {}
    order = []
    for tool, arguments in jobs:
        key = (id(tool), repr(sorted(arguments.items(), key=lambda item: item[0])))
        order.append(distinct.setdefault(key, _Job(tool, arguments)))
    running = list(distinct.values())
    try:
        for _ in range(MAX_ROUNDS):
            for job in running:
                session.cancel.check()
                job.advance(session, perception)
            running = [job for job in running if job.feedback is None]
            if not running:
                break
            _answer(session, running)
        for job in running:
            job.fail(ToolError(f"it asked the model more than {MAX_ROUNDS - 1} times"))
    finally:
        for job in distinct.values():
            job.close()
    for job in distinct.values():
        assert job.feedback is not None
        session.trace.emit(
            "tool",
            tool=job.tool.name,
            arguments=_json(job.arguments),
            text=job.feedback.text,
            ok=job.feedback.ok,
            boxes=[list(b) for b in job.feedback.boxes],
            details=_json(job.feedback.details),
            wall_s=round(job.seconds, 6),
        )
    return [job.feedback for job in order if job.feedback is not None]


def _answer(session: Session, jobs: Sequence[_Job]) -> None:
    """Sends all requests of all jobs to the MLLM, and files what comes back."""
    places = [(job, i) for job in jobs for i in range(len(job.asks))]
    told: dict[tuple[int, int], Told | Exception] = {}
    generates = [(j, i, a) for j, i in places if isinstance(a := j.asks[i], GenerateRequest)]
    chooses = [(j, i, a) for j, i in places if isinstance(a := j.asks[i], ChooseRequest)]
    generations = _batch(session.generate, [a for *_, a in generates])
    choices = _batch(session.choose, [a for *_, a in chooses])
    for (job, i, _), generation in zip(generates, generations, strict=True):
        told[id(job), i] = generation
    for (job, i, _), choice in zip(chooses, choices, strict=True):
        told[id(job), i] = choice
    for job in jobs:
        job.answers = [told[id(job), i] for i in range(len(job.asks))]


def _batch(ask: Callable[[list[A]], list[R]], requests: list[A]) -> list[R | Exception]:
    """Asks for all at once; if that fails, one by one, so that only the culprit's answer is an exception."""
    if not requests:
        return []
    try:
        return [*ask(requests)]
    except Cancelled:
        raise
    except Exception as e:
        if len(requests) == 1:
            return [e]
    return [_batch(ask, [request])[0] for request in requests]


def _json(value: Mapping[str, Any]) -> Any:
    """Plain values for the trace, whatever a tool or a model put there."""
    try:
        return json.loads(json.dumps(dict(value), default=str))
    except (TypeError, ValueError, RecursionError):
        return repr(value)[:500]
