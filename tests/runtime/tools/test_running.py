"""Tools run side by side; what one does wrong stays its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hoverlens.runtime.errors import Cancelled, HoverlensError
from hoverlens.runtime.mllm.base import ChooseRequest, GenerateRequest
from hoverlens.runtime.tools import Describe, Detect, Distance, Feedback, Ground, Zoom, run_tools

BOX = (0.1, 0.25, 0.3, 0.5)
SHOWN = "<0.100><0.250><0.300><0.500>"


@dataclass(eq=False)
class Scripted:
    """A tool that does what the test says."""

    body: Callable[[Any, Any], Any]
    name: str = "odd"
    about: str = ""
    parameters: tuple[Any, ...] = ()

    def run(self, session: Any, perception: Any, arguments: Any) -> Any:
        return self.body(session, perception)


def asking(times: int) -> Callable[[Any, Any], Any]:
    def body(session: Any, perception: Any) -> Any:
        for _ in range(times):
            told = yield [ChooseRequest(session.shared, ("yes", "no"), session.suffix("direct_text"))]
            assert len(told) == 1
        return Feedback("done")

    return body


def test_all_calls_of_a_round_go_as_one_batch(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts |= {"Describe": "a car", "Give the box of:": SHOWN, "every": SHOWN}
    jobs = [
        (Detect(), {"category": "tree"}),
        (Describe(), {"region": BOX}),
        (Zoom(), {"region": BOX}),
        (Ground(), {"target": "car"}),
        (Detect(), {"category": "house"}),
    ]
    feedback = run_tools(session, perception, jobs)
    assert [f.ok for f in feedback] == [True] * 5
    assert [len(b) for b in session.backend.batches] == [2, 2, 2]
    assert feedback[0].text.startswith("tree: 1 found")
    assert feedback[1].text == f"{SHOWN}: a car"
    assert feedback[2].image is not None
    assert feedback[4].text.startswith("house: 1 found")


def test_the_same_job_runs_once(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["Give the box of:"] = SHOWN
    tool = Ground()
    feedback = run_tools(session, perception, [(tool, {"target": t}) for t in ("car", "bus", "car")])
    assert feedback[0] is feedback[2]
    assert [len(b) for b in session.backend.batches] == [2]
    assert sum(e["event"] == "tool" for e in session.trace.events) == 2


def raises(session: Any, perception: Any) -> Any:
    yield []
    raise RuntimeError("the\nroof fell in")


def not_a_generator(session: Any, perception: Any) -> Any:
    return None


def no_feedback(session: Any, perception: Any) -> Any:
    yield []
    return "found it"


def not_a_request(session: Any, perception: Any) -> Any:
    yield ["what?"]


def no_list(session: Any, perception: Any) -> Any:
    yield None


def at_once(session: Any, perception: Any) -> Any:
    raise ValueError


def will_not_end(session: Any, perception: Any) -> Any:
    while True:
        try:
            yield ["what?"]
        except GeneratorExit:
            raise RuntimeError("no") from None


def no_memory(session: Any, perception: Any) -> Any:
    yield []
    raise MemoryError


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (raises, "odd failed: RuntimeError: the roof fell in"),
        (not_a_generator, "odd failed: TypeError"),
        (no_feedback, "odd failed: TypeError: it gave str"),
        (not_a_request, "odd failed: TypeError: it asked for something"),
        (no_list, "odd failed: TypeError"),
        (at_once, "odd failed: ValueError: ValueError"),
        (will_not_end, "odd failed: TypeError: it asked"),
        (no_memory, "odd failed: MemoryError"),
        (asking(1000), "odd failed: it asked the model more than 15 times"),
    ],
)
def test_a_tool_that_fails_leaves_the_others_alone(make_session: Any, perception: Any, body: Any, said: str) -> None:
    session = make_session()
    session.backend.texts["Describe"] = "a car"
    feedback = run_tools(
        session,
        perception,
        [(Scripted(body), {}), (Describe(), {"region": BOX}), (Scripted(asking(3), "good"), {})],
    )
    assert feedback[0].text.startswith(said)
    assert not feedback[0].ok
    assert feedback[1].text == f"{SHOWN}: a car"
    assert feedback[2].text == "done"
    events = [e for e in session.trace.events if e["event"] == "tool"]
    assert [e["ok"] for e in events] == [False, True, True]
    session.trace.to_text()


def test_a_call_that_fails_is_its_own_tools_failure(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts |= {"Describe": HoverlensError("the prompt is too long"), "Give the box of:": SHOWN}
    feedback = run_tools(session, perception, [(Describe(), {"region": BOX}), (Ground(), {"target": "car"})])
    assert feedback[0].text == "describe failed: the prompt is too long"
    assert feedback[1].ok


@pytest.mark.parametrize("stop", [Cancelled("stop"), KeyboardInterrupt()])
def test_cancelling_stops_everything(make_session: Any, perception: Any, stop: BaseException) -> None:
    ended = []

    def waiting(session: Any, perception: Any) -> Any:
        try:
            yield [GenerateRequest(session.shared, session.suffix("direct_text"))]
        finally:
            ended.append(True)

    def stopping(session: Any, perception: Any) -> Any:
        yield []
        raise stop

    with pytest.raises(type(stop)):
        run_tools(make_session(), perception, [(Scripted(waiting), {}), (Scripted(stopping), {})])
    assert ended == [True]


def test_a_cancelled_session_starts_nothing(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.cancel.cancel()
    with pytest.raises(Cancelled):
        run_tools(session, perception, [(Zoom(), {"region": BOX})])
    assert session.backend.encoded == []


class Hanging:
    """Perception that hangs until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def detections(self, sliced: bool = False) -> None:
        self.go.wait(20)

    depth_map = detections

    def knows(self, category: str) -> tuple[str, ...]:
        return ()


def test_perception_that_hangs_is_given_up_on(make_session: Any) -> None:
    hanging = Hanging()
    session = make_session()
    session.backend.texts["Describe"] = "a car"
    start = time.perf_counter()
    feedback = run_tools(session, hanging, [(Distance(), {}), (Describe(), {"region": BOX})], timeout_s=0.2)
    assert time.perf_counter() - start < 5
    assert feedback[0].text == "distance failed: depth took more than 0.2 s"
    assert feedback[1].ok
    hanging.go.set()


def test_cancelling_does_not_wait_for_hanging_perception(make_session: Any) -> None:
    hanging = Hanging()
    session = make_session()
    timer = threading.Timer(0.2, session.cancel.cancel)
    timer.start()
    start = time.perf_counter()
    with pytest.raises(Cancelled):
        run_tools(session, hanging, [(Distance(), {})], timeout_s=20)
    assert time.perf_counter() - start < 5
    hanging.go.set()


def test_an_error_in_timed_perception_is_the_tools(make_session: Any, perception: Any) -> None:
    def broken() -> None:
        raise HoverlensError("the engine is gone")

    perception.depth_map = broken
    feedback = run_tools(make_session(), perception, [(Distance(), {})], timeout_s=5)
    assert feedback[0].text == "distance failed: the engine is gone"


def test_no_jobs_are_no_work(make_session: Any, perception: Any) -> None:
    session = make_session()
    assert run_tools(session, perception, []) == []
    assert session.backend.batches == []


def test_arguments_of_any_kind_can_be_traced(make_session: Any, perception: Any) -> None:
    session = make_session()
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    run_tools(session, perception, [(Zoom(), loop), (Zoom(), {"region": object()})])
    session.trace.to_text()
