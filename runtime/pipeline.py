"""From a frame and a question to an answer."""

from __future__ import annotations

import math
import numbers
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from . import prompts
from .answer import STAGES, Answer, Stats
from .errors import BadInput, Cancelled, HoverlensError
from .frame import Frame
from .mllm.base import Backend, CancelToken, Counters
from .mllm.chat import ChatFormat
from .process import peak_rss_bytes
from .profiles import Profile
from .question import Question
from .reasoning import direct
from .reasoning.outcome import Outcome
from .reasoning.session import Session, StepCallback, Thinker
from .reasoning.settings import MODES as REASONING_MODES
from .tools.base import NO_PERCEPTION, Perception
from .trace import Trace


def _reasoning(mode: str) -> Callable[[Session], Outcome]:
    def answer(session: Session) -> Outcome:
        from .reasoning import uavmas

        return uavmas.answer_in_mode(session, mode)

    return answer


MODES: dict[str, Callable[[Session], Outcome]] = {
    "direct": direct.answer,
    **{name: _reasoning(name) for name in REASONING_MODES},
}
"""Name of a mode to the function that runs it."""

DEFAULT_MODE = "uavmas"


def check_mode(mode: str) -> None:
    """Raises BadInput for a mode that does not exist."""
    if not isinstance(mode, str) or mode not in MODES:
        raise BadInput(f"unknown mode {mode!r}; use one of {', '.join(MODES)}")


def check_deadline(deadline_s: object) -> float | None:
    """The deadline as a number of seconds that a timer takes: no more than it can wait.

    Raises:
        BadInput: It is not a positive number of seconds.
    """
    if deadline_s is None:
        return None
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, numbers.Real):
        raise BadInput(f"the deadline is {type(deadline_s).__name__}; it must be a positive number of seconds")
    try:
        seconds = float(deadline_s)
    except OverflowError:  # of whole numbers alone
        seconds = -math.inf if deadline_s < 0 else threading.TIMEOUT_MAX
    if not (math.isfinite(seconds) and seconds > 0):
        raise BadInput(f"the deadline is {seconds} s; it must be a positive number of seconds")
    return min(seconds, threading.TIMEOUT_MAX)


def _check_hooks(on_step: object, trace: object, cancel: object) -> None:
    """Raises BadInput for what could only fail in the middle of a question."""
    if on_step is not None and not callable(on_step):
        raise BadInput(f"on_step is {type(on_step).__name__}; pass a function of one step, or None")
    if trace is not None and not isinstance(trace, Trace):
        raise BadInput(f"trace is {type(trace).__name__}; pass a Trace, or None")
    if cancel is not None and not isinstance(cancel, CancelToken):
        raise BadInput(f"cancel is {type(cancel).__name__}; pass a CancelToken, or None")


def ask(
    backend: Backend,
    chat: ChatFormat,
    profile: Profile,
    frame: Frame,
    question: Question,
    *,
    mode: str = DEFAULT_MODE,
    seed: int = 0,
    deadline_s: float | None = None,
    called: float | None = None,
    on_step: StepCallback | None = None,
    trace: Trace | None = None,
    cancel: CancelToken | None = None,
    perception: Perception = NO_PERCEPTION,
    thinker: Thinker | None = None,
    prompt_version: str = prompts.VERSION,
    image_min_tokens: int | None = None,
    bundle: dict[str, str] | None = None,
    warnings: Sequence[str] = (),
) -> Answer:
    """Answers one question about one frame. The backend must be idle.

    Args:
        called: When the deadline's time began to run, by ``time.perf_counter``; None means now.

    Raises:
        BadInput: Unknown mode, impossible deadline, an argument of the wrong type, or a prompt longer than the
            context.
        Cancelled: ``cancel`` was set.
        HoverlensError: The model failed, or no answer came before the deadline.
    """
    check_mode(mode)
    deadline_s = check_deadline(deadline_s)
    _check_hooks(on_step, trace, cancel)
    trace = trace or Trace()
    # The caller's token may stop this question; a deadline of this question must not set the caller's token.
    stop = CancelToken()
    start = time.perf_counter()
    backends = [backend] if thinker is None else [backend, thinker.backend]
    before = [b.counters.copy() for b in backends]
    session = Session(
        backend, chat, profile, frame, question, perception, trace, seed, stop, on_step, prompt_version, thinker
    )
    frame_facts = {
        "digest": frame.digest,
        "width": frame.width,
        "height": frame.height,
        "stamp": frame.stamp,
    }
    trace.emit(
        "question",
        text=question.text,
        options=list(question.options),
        kind=question.kind,
        mode=mode,
        seed=seed,
        profile=profile.name,
        prompts=prompt_version,
        frame=frame_facts,
        bundle=bundle or {},
    )
    try:
        left = None if deadline_s is None else deadline_s - (0 if called is None else start - called)
        with (cancel or CancelToken()).listening(stop.cancel), _deadline(stop, left) as expired:
            try:
                session.open(image_min_tokens)
                outcome = MODES[mode](session)
            except Cancelled:
                if expired.is_set() and deadline_s is not None:
                    raise too_late(deadline_s) from None
                raise
    except BaseException as e:
        trace.emit("error", type=type(e).__name__, message=str(e))
        raise
    finally:
        session.close()
    wall = time.perf_counter() - start
    used = sum((b.counters - old for b, old in zip(backends, before, strict=True)), Counters())
    result = Answer(
        answer=outcome.value.text,
        kind=question.kind,
        options=outcome.value.options,
        box=outcome.value.box,
        confidence=outcome.confidence,
        exit=outcome.exit,
        mode=mode,
        stats=_stats(session, used, wall),
        stages_s=_stages(session, used, wall),
        bundle=dict(bundle or {}),
        frame=frame_facts,
        warnings=(*warnings, *session.warnings),
        probabilities=outcome.probabilities,
    )
    trace.emit("answer", **result.to_dict())
    return result


def too_late(deadline_s: float) -> HoverlensError:
    """What is said when the deadline has passed."""
    return HoverlensError(f"no answer within the deadline of {deadline_s:g} s; raise --deadline")


@contextmanager
def _deadline(cancel: CancelToken, seconds: float | None) -> Iterator[threading.Event]:
    """Sets ``cancel`` when the time is over; the event tells that this was the reason."""
    expired = threading.Event()
    if seconds is None:
        yield expired
        return

    def fire() -> None:
        expired.set()
        cancel.cancel()

    if seconds <= 0:
        fire()
    timer = threading.Timer(max(0.0, seconds), fire)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


def _stats(session: Session, used: Counters, wall_s: float) -> Stats:
    return Stats(
        wall_s=wall_s,
        mllm_calls=used.mllm_calls,
        tool_calls=session.tool_calls,
        image_encodes=used.image_encodes,
        prefill_tokens=used.prefill_tokens,
        reused_tokens=used.reused_tokens,
        decoded_tokens=used.decoded_tokens,
        forced_tokens=used.forced_tokens,
        nodes=session.nodes,
        pruned=session.pruned,
        peak_rss_mb=peak_rss_bytes() / 1e6,
    )


def _stages(session: Session, used: Counters, wall_s: float) -> dict[str, float]:
    stages = dict.fromkeys(STAGES, 0.0)
    stages |= {"encode": used.encode_s, "prefill": used.prefill_s, "decode": used.decode_s}
    stages["tools"] = session.tools_s
    stages["other"] = max(0.0, wall_s - sum(stages.values()))
    return stages
