"""A question can be stopped at any time, from any thread, and the next one never notices."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.errors import Cancelled
from hoverlens.runtime.mllm.base import CancelToken, ChooseRequest, GenerateRequest, Part, Sampling, State, Text
from hoverlens.runtime.mllm.forms import Free, Literal
from hoverlens.runtime.mllm.interrupts import hold_interrupts
from hoverlens.runtime.mllm.llama_native import Context
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend
from hoverlens.runtime.mllm.scheduler import Schedule

Pictures = Sequence[NDArray[np.uint8]]
Prompt = Callable[..., list[Part]]

pytestmark = pytest.mark.timeout(60)

LONG = Text(" a" * 3000)


class At(CancelToken):
    """Sets itself when it has been looked at ``n`` times."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def check(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.cancel()
        super().check()


@pytest.fixture
def expected(backend: LlamaCppBackend, opened: State, ending: Text) -> Iterator[Callable[[], None]]:
    """Asserts that the same question still gets the same answer, to the last bit of its probability."""
    request = GenerateRequest(opened, (Text(" what?"), ending), max_tokens=6, sampling=Sampling(0.8, seed=2))
    choice = ChooseRequest(opened, ("yes", "no", "a car"), (ending,))

    def ask() -> tuple[Any, ...]:
        result = backend.generate([request])[0]
        return result.tokens, result.text, list(backend.choose([choice])[0].scores)

    before = ask()

    def check() -> None:
        assert backend.sequences_in_use() == 1
        assert backend._pool.extra_cells == 0
        assert ask() == before

    yield check
    check()


def test_a_token_that_is_set_already_stops_every_call(
    backend: LlamaCppBackend,
    opened: State,
    pictures: Pictures,
    prompt: Prompt,
    ending: Text,
    expected: Callable[[], None],
) -> None:
    cancel = CancelToken()
    cancel.cancel()
    calls: list[Callable[[], Any]] = [
        lambda: backend.encode(pictures[2], cancel),
        lambda: backend.prefix(prompt(None, " new"), cancel),
        lambda: backend.generate([GenerateRequest(opened, (Text(" new"), ending))], cancel),
        lambda: backend.choose([ChooseRequest(opened, ("yes", "no"), (Text(" new"), ending))], cancel),
    ]
    for call in calls:
        with pytest.raises(Cancelled):
            call()
        expected()


@pytest.mark.parametrize("after", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("keep", [False, True])
def test_cancelling_at_any_step_leaves_nothing_behind(
    backend: LlamaCppBackend, opened: State, ending: Text, expected: Callable[[], None], after: int, keep: bool
) -> None:
    requests = [
        GenerateRequest(
            opened, (Text(f" {i}"), ending), max_tokens=30, grammar="root ::= [a-z ]{200}", keep=keep and i != 1
        )
        for i in range(3)
    ]
    with pytest.raises(Cancelled):
        backend.generate(requests, At(after))
    expected()


def test_cancelling_while_options_are_scored_leaves_nothing_behind(
    backend: LlamaCppBackend, opened: State, ending: Text, expected: Callable[[], None]
) -> None:
    for after in (1, 2):
        with pytest.raises(Cancelled):
            backend.choose([ChooseRequest(opened, ("yes", "no, not at all"), (Text(" x"), ending))], At(after))
        expected()


def test_cancelling_inside_a_form_leaves_nothing_behind(
    backend: LlamaCppBackend, opened: State, ending: Text, expected: Callable[[], None]
) -> None:
    def form() -> Any:
        yield Literal("{")
        yield Free("said", 30, end="\x00")
        yield Literal("}")

    with pytest.raises(Cancelled):
        backend.generate([GenerateRequest(opened, (ending,), form=form)], At(4))
    expected()


def test_an_error_of_a_form_is_raised_and_leaves_nothing_behind(
    backend: LlamaCppBackend, opened: State, ending: Text, expected: Callable[[], None]
) -> None:
    def form() -> Any:
        yield Literal("{")
        yield Free("said", 3)
        raise KeyError("of the form")

    with pytest.raises(KeyError, match="of the form"):
        backend.generate([GenerateRequest(opened, (ending,), form=form, keep=True)])
    expected()


@pytest.fixture
def from_elsewhere() -> Iterator[Callable[[float, Callable[[], None]], None]]:
    """Calls something on another thread after some seconds."""
    threads: list[threading.Timer] = []

    def later(seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, call)
        timer.start()
        threads.append(timer)

    yield later
    for timer in threads:
        timer.cancel()
        timer.join()


def full_pass_s(backend: LlamaCppBackend) -> float:
    """Seconds of the long prompt, undisturbed."""
    start = time.perf_counter()
    backend.prefix([LONG]).close()
    return time.perf_counter() - start


def test_a_long_pass_is_stopped_in_the_middle(
    make_backend: Callable[..., LlamaCppBackend], from_elsewhere: Callable[..., None]
) -> None:
    """All 3,000 tokens are one forward pass here: stopped later, the call would have ended well."""
    backend = make_backend(n_batch=3072)
    whole = full_pass_s(backend)
    cancel = CancelToken()
    from_elsewhere(whole / 5, cancel.cancel)
    with pytest.raises(Cancelled):
        backend.prefix([LONG], cancel)
    assert backend.sequences_in_use() == 0
    assert backend.counters.prefill_tokens == 3000


def test_an_image_is_stopped_in_the_middle(
    make_backend: Callable[..., LlamaCppBackend], from_elsewhere: Callable[..., None]
) -> None:
    backend = make_backend(n_batch=3072, image_max_tokens=1600)
    features = backend.encode(np.zeros((1024, 1024, 3), np.uint8))
    start = time.perf_counter()
    backend.prefix([features]).close()
    whole = time.perf_counter() - start
    cancel = CancelToken()
    from_elsewhere(whole / 5, cancel.cancel)
    before = backend.counters.copy()
    with pytest.raises(Cancelled):
        backend.prefix([Text("another"), features], cancel)
    assert (backend.counters - before).prefill_tokens < features.n_tokens, "the image went in to its end"


def test_decoding_is_stopped_from_another_thread(
    backend: LlamaCppBackend,
    opened: State,
    ending: Text,
    expected: Callable[[], None],
    from_elsewhere: Callable[..., None],
) -> None:
    cancel = CancelToken()
    from_elsewhere(0.1, cancel.cancel)
    start = time.perf_counter()
    request = GenerateRequest(opened, (ending,), max_tokens=3000, sampling=Sampling(1.0))
    with pytest.raises(Cancelled):  # noqa: PT012 - an answer may end by itself
        while True:
            backend.generate([request], cancel)
    assert time.perf_counter() - start < 5
    expected()


def test_a_stopped_pass_does_not_stop_the_next(backend: LlamaCppBackend) -> None:
    """The flag that llama.cpp reads goes down again, whoever raised it and when."""
    context: Context = backend.context
    cancel = CancelToken()
    with context.abortable(cancel):
        cancel.cancel()
        assert context._flag[0] == b"!"
    assert context._flag[0] == b"\0"
    cancel.cancel()
    assert context._flag[0] == b"\0"
    with context.abortable(None):
        assert context._flag[0] == b"\0"


def test_a_token_tells_its_listeners_once_and_only_while_they_listen() -> None:
    cancel = CancelToken()
    heard: list[str] = []
    with cancel.listening(lambda: heard.append("early")):
        pass
    with cancel.listening(lambda: heard.append("a")), cancel.listening(lambda: heard.append("b")):
        cancel.cancel()
        cancel.cancel()
    assert heard == ["a", "b"]
    with cancel.listening(lambda: heard.append("late")):
        assert heard == ["a", "b", "late"]
    assert cancel.cancelled
    with pytest.raises(Cancelled):
        cancel.check()


# -- Ctrl-C --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _raised() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT; here it must arrive."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_waits_for_the_end_of_the_block_and_is_never_lost() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():  # noqa: PT012
        interrupt()
        reached.append("behind it")
    assert reached == ["behind it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_passed_on_at_a_check_at_any_depth() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts(), hold_interrupts():  # noqa: PT012
        interrupt()
        reached.append("held")
        hold_interrupts.check()
        reached.append("never")
    assert reached == ["held"]
    hold_interrupts.check()


def test_a_handler_of_the_program_is_called_instead() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: called.append(number))
    try:
        with hold_interrupts():
            interrupt()
            hold_interrupts.check()
            assert called == [signal.SIGINT]
            interrupt()
        assert called == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_may_hold_without_harm() -> None:
    def work() -> None:
        with hold_interrupts():
            hold_interrupts.check()

    with hold_interrupts():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("step", [1, 2, 4])
def test_ctrl_c_between_two_steps_leaves_nothing_behind(
    backend: LlamaCppBackend,
    opened: State,
    ending: Text,
    expected: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    advance, left = Schedule._step, [step]

    def interrupted(self: Schedule) -> None:
        left[0] -= 1
        if left[0] == 0:
            interrupt()
        advance(self)

    monkeypatch.setattr(Schedule, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.generate(
            [GenerateRequest(opened, (Text(f" {i}"), ending), grammar="root ::= [a-z ]{99}") for i in range(3)]
        )
    assert left == [0], "it went on after Ctrl-C"
    monkeypatch.undo()
    expected()


def test_ctrl_c_at_random_moments_leaves_nothing_behind(
    backend: LlamaCppBackend,
    opened: State,
    pictures: Pictures,
    prompt: Prompt,
    ending: Text,
    expected: Callable[[], None],
    from_elsewhere: Callable[..., None],
) -> None:
    """Whatever bytecode it strikes: nothing stays taken, and it arrives."""
    rng = random.Random(5)
    requests = [GenerateRequest(opened, (Text(f" {i}"), ending), max_tokens=20, keep=i == 0) for i in range(4)]

    def question() -> None:
        with backend.prefix(prompt(backend.encode(pictures[1]))) as state:
            for result in backend.generate(requests):
                if result.state is not None:
                    result.state.close()
            backend.choose([ChooseRequest(state, ("yes", "no"), (ending,))])

    start = time.perf_counter()
    question()
    usual = time.perf_counter() - start
    for _ in range(25):
        arrived = False
        end = time.perf_counter() + 30
        try:
            from_elsewhere(rng.uniform(0, usual), interrupt)
            while time.perf_counter() < end:
                question()
        except KeyboardInterrupt:
            arrived = True
        assert arrived
        # What Python raised outside of the backend, before the caller could take a result, is the caller's.
        for slot in backend._pool._slots:
            if slot.owner is not None and slot.owner is not opened:
                slot.owner.close()
        expected()


def test_ctrl_c_while_a_model_loads_is_not_lost(tiny_bundle: Any) -> None:
    """llama.cpp logs through Python while it loads; an exception raised in there would vanish."""
    program = f"""
        import os, signal
        from hoverlens.runtime.mllm import llama_native
        from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions

        signal.signal(signal.SIGINT, signal.default_int_handler)
        lib, _ = llama_native.libraries()
        emit, sent = llama_native.log.log, []

        def log(level, *args):
            if not sent:
                sent.append(os.kill(os.getpid(), signal.SIGINT))
            emit(level, *args)

        llama_native.log.log = log
        try:
            LlamaCppBackend({str(tiny_bundle.need("mllm"))!r}, None, LlamaOptions(n_ctx=256, threads=1), "x")
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("interrupted", "")
