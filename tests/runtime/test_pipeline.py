"""From a picture and a question to an answer, on random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import hoverlens
from hoverlens.runtime import pipeline
from hoverlens.runtime.answer import Answer
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import BadInput, Cancelled, HoverlensError
from hoverlens.runtime.frame import Frame
from hoverlens.runtime.mllm.base import CancelToken
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend
from hoverlens.runtime.profiles import Profile
from hoverlens.runtime.runtime import Runtime
from hoverlens.runtime.trace import Trace

pytestmark = pytest.mark.timeout(120)

SMALL: dict[str, Any] = {"n_ctx": 2048, "threads": 1, "max_tokens": 24}


def pixels(seed: int, height: int = 120, width: int = 200) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (6, 10, 3), dtype=np.uint8)
    return np.ascontiguousarray(np.kron(blocks, np.ones((height // 6, width // 10, 1), np.uint8)))


@pytest.fixture(scope="module")
def _runtime(tiny_bundle: Bundle) -> Iterator[Runtime]:
    with hoverlens.load(tiny_bundle, Profile(name="test", **SMALL)) as runtime:
        yield runtime


@pytest.fixture
def runtime(_runtime: Runtime) -> Iterator[Runtime]:
    """A loaded bundle; after each test every state must be closed."""
    yield _runtime
    assert_idle(_runtime)


def assert_idle(runtime: Runtime) -> None:
    backend = runtime.backend()
    assert isinstance(backend, LlamaCppBackend)
    assert (backend.sequences_in_use(), backend._pool.cells, backend._pool.extra_cells) == (0, 0, 0)


def events(trace: Trace) -> list[str]:
    return [str(e["event"]) for e in trace.events]


QUESTIONS: list[dict[str, Any]] = [
    {"question": "How many cars are there?", "options": ["0", "1", "2", "12"], "mode": "direct"},
    {"question": "Which are seen?", "options": ["car", "truck", "a person"], "kind": "options", "mode": "direct"},
    {"question": "Where is the car?", "kind": "box", "mode": "direct"},
    {"question": "What is it?", "mode": "direct"},
]


def test_an_option_is_one_of_the_options_with_its_probability(runtime: Runtime) -> None:
    answer = runtime.ask(pixels(0), **QUESTIONS[0])
    assert answer.options == (answer.answer,)
    assert answer.answer in QUESTIONS[0]["options"]
    assert answer.probabilities is not None
    assert list(answer.probabilities) == QUESTIONS[0]["options"]
    assert sum(answer.probabilities.values()) == pytest.approx(1.0)
    assert answer.confidence == answer.probabilities[answer.answer] == max(answer.probabilities.values())


def test_several_options_are_each_judged(runtime: Runtime) -> None:
    answer = runtime.ask(pixels(0), **QUESTIONS[1])
    assert answer.probabilities is not None
    above = [o for o, p in answer.probabilities.items() if p >= 0.5]
    best = max(answer.probabilities, key=lambda o: answer.probabilities[o] if answer.probabilities else 0)
    assert list(answer.options) == (above or [best])
    assert answer.answer == ", ".join(answer.options)
    assert bool(above) != any("threshold" in w for w in answer.warnings)
    assert 0 < (answer.confidence or 0) <= 1


def test_a_box_is_normalised_and_upright(runtime: Runtime) -> None:
    for seed in range(4):
        answer = runtime.ask(pixels(seed), **QUESTIONS[2])
        assert answer.box is not None
        x1, y1, x2, y2 = answer.box
        assert 0 <= x1 <= x2 <= 1
        assert 0 <= y1 <= y2 <= 1
        assert answer.answer == "".join(f"<{v:.3f}>" for v in answer.box)
        assert answer.options == ()


def test_text_is_free_and_its_cut_is_told(runtime: Runtime) -> None:
    answer = runtime.ask(pixels(0), **QUESTIONS[3])
    assert (answer.kind, answer.box, answer.options, answer.confidence) == ("text", None, (), None)
    assert answer.answer == answer.answer.strip()
    assert any("cut after 24 tokens" in w for w in answer.warnings) == (answer.stats.decoded_tokens == 24)


@pytest.mark.parametrize("asked", QUESTIONS, ids=["option", "options", "box", "text"])
def test_the_answer_is_the_contract(runtime: Runtime, asked: dict[str, Any]) -> None:
    frame = Frame.from_array(pixels(1), stamp=12.5)
    found = json.loads(runtime.ask(frame, **asked).to_json())
    assert found["frame"] == {"digest": frame.digest, "width": 200, "height": 120, "stamp": 12.5}
    assert found["bundle"] == {"name": runtime.bundle.name, "sha256": runtime.bundle.sha256}
    assert (found["exit"], found["mode"]) == ("complete", "direct")
    stats, stages = found["stats"], found["stages_s"]
    assert stats["mllm_calls"] == (3 if asked.get("kind") == "options" else 1)
    assert stats["image_encodes"] <= 1
    assert stats["prefill_tokens"] > 50
    assert stats["peak_rss_mb"] > 10
    assert sum(stages.values()) == pytest.approx(stats["wall_s"], rel=0.05)
    assert min(stages.values()) >= 0


@pytest.mark.parametrize("asked", QUESTIONS, ids=["option", "options", "box", "text"])
def test_the_same_question_gets_the_same_json(runtime: Runtime, asked: dict[str, Any]) -> None:
    first = runtime.ask(pixels(2), **asked)
    runtime.ask(pixels(3), **asked)
    again = runtime.ask(Frame.from_array(pixels(2), stamp=3.0), **asked)
    assert again.comparable() == first.comparable()
    assert again.same_as(first)
    assert runtime.ask(pixels(3), **asked).comparable() != first.comparable()


def test_a_seed_matters_only_where_something_is_drawn(tiny_bundle: Bundle) -> None:
    with hoverlens.load(tiny_bundle, Profile(name="warm", temperature=0.9, **SMALL)) as warm:
        texts = [warm.ask(pixels(0), "What is it?", mode="direct", seed=seed).comparable() for seed in (0, 1, 2, 0)]
        assert texts[0] == texts[3]
        assert len({t["answer"] for t in texts}) == 3
        options = [
            warm.ask(pixels(0), "Is it?", ["yes", "no"], mode="direct", seed=seed).comparable() for seed in (0, 1)
        ]
        assert options[0] == options[1]
        assert_idle(warm)


COLD = """
import json, sys
import numpy as np
import hoverlens
from hoverlens.runtime.profiles import Profile
bundle, picture, small = sys.argv[1:]
with hoverlens.load(bundle, Profile(name="test", **json.loads(small))) as runtime:
    pixels = np.load(picture)
    print(json.dumps([runtime.ask(pixels, "How many cars are there?", ["0", "1", "12"], mode="direct").comparable(),
                      runtime.ask(pixels, "What is it?", mode="direct").comparable()]))
"""


def test_five_pictures_in_one_process_get_the_answers_of_five_cold_ones(runtime: Runtime, tmp_path: Path) -> None:
    warm = [
        [
            runtime.ask(pixels(10 + i), "How many cars are there?", ["0", "1", "12"], mode="direct").comparable(),
            runtime.ask(pixels(10 + i), "What is it?", mode="direct").comparable(),
        ]
        for i in range(5)
    ]
    started = []
    for i in range(5):
        np.save(tmp_path / f"{i}.npy", pixels(10 + i))
        command = [sys.executable, "-c", COLD, str(runtime.bundle.path), str(tmp_path / f"{i}.npy"), json.dumps(SMALL)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        if i % 2:
            started[-2].wait()
    cold = [json.loads(process.communicate()[0]) for process in started]
    assert json.loads(json.dumps(warm)) == cold
    assert len({json.dumps(answers) for answers in cold}) == 5


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 2000), (2000, 1), (2250, 4000), (33, 31), (1, 60000)], ids=str
)
def test_a_picture_of_any_shape_is_answered_or_refused_in_one_line(runtime: Runtime, height: int, width: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    try:
        answer = runtime.ask(picture, "Is it?", ["yes", "no"], mode="direct")
    except HoverlensError as error:
        assert (height, width) == (1, 60000)
        assert "\n" not in str(error)  # noqa: PT017 - both ways are right
        assert f"{width}x{height}" in str(error)  # noqa: PT017
        return
    assert answer.answer in ("yes", "no")
    assert answer.frame["width"] == width


def test_too_few_image_tokens_for_the_model_are_warned_of(runtime: Runtime) -> None:
    def ask(least: int | None) -> Answer:
        backend, chat = runtime._mllm()
        question = hoverlens.runtime.question.Question.make("Where is it?", kind="box")
        frame = Frame.from_array(pixels(0))
        return pipeline.ask(backend, chat, runtime.profile, frame, question, mode="direct", image_min_tokens=least)

    few = [w for w in ask(1000).warnings if "1000" in w]
    assert len(few) == 1
    assert "tokens" in few[0]
    assert not any("tokens, and this model needs" in w for answer in (ask(None), ask(1)) for w in answer.warnings)


# -- stopping --------------------------------------------------------------------------------------------


def test_a_deadline_that_is_too_short_is_an_error_in_one_line(runtime: Runtime) -> None:
    cancel, trace = CancelToken(), Trace()
    with pytest.raises(HoverlensError, match=r"no answer within .* 1e-06 s") as error:
        runtime.ask(pixels(0), "What is it?", mode="direct", deadline_s=1e-6, cancel=cancel, trace=trace)
    assert not isinstance(error.value, (BadInput, Cancelled))
    assert "\n" not in str(error.value)
    assert not cancel.cancelled, "the caller's token is the caller's"
    assert events(trace)[-1] == "error"
    assert_idle(runtime)
    assert runtime.ask(pixels(0), "What is it?", mode="direct", deadline_s=60, cancel=cancel).answer


def test_a_deadline_in_the_middle_stops_the_question(tiny_bundle: Bundle) -> None:
    profile = Profile(name="long", n_ctx=8192, threads=1, max_tokens=8000)
    with hoverlens.load(tiny_bundle, profile) as runtime:
        runtime.ask(pixels(0), "Is it?", ["yes", "no"], mode="direct")
        start = time.perf_counter()
        with pytest.raises(HoverlensError, match="no answer within"):  # noqa: PT012
            for seed in range(100):  # an answer may end by itself
                runtime.ask(pixels(seed), "What is it?", mode="direct", deadline_s=0.15)
        assert time.perf_counter() - start < 30
        assert_idle(runtime)


def test_waiting_for_another_question_counts_and_can_be_stopped(runtime: Runtime) -> None:
    holding, release = threading.Event(), threading.Event()

    def hold(_: dict[str, Any]) -> None:
        holding.set()
        release.wait(30)

    first = threading.Thread(
        target=runtime.ask, args=(pixels(0), "What is it?"), kwargs={"mode": "direct", "on_step": hold}
    )
    first.start()
    try:
        assert holding.wait(30)
        with pytest.raises(HoverlensError, match=r"no answer within the deadline of 0\.1 s"):
            runtime.ask(pixels(1), "What is it?", mode="direct", deadline_s=0.1)
        cancel = CancelToken()
        timer = threading.Timer(0.1, cancel.cancel)
        timer.start()
        with pytest.raises(Cancelled):
            runtime.ask(pixels(1), "What is it?", mode="direct", cancel=cancel)
    finally:
        release.set()
        first.join()


def test_loading_the_model_counts_towards_the_deadline(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with hoverlens.load(tiny_bundle, Profile(name="test", **SMALL)) as fresh:
        load = fresh._mllm

        def slow() -> Any:
            time.sleep(0.3)
            return load()

        monkeypatch.setattr(fresh, "_mllm", slow)
        with pytest.raises(HoverlensError, match="no answer within"):
            fresh.ask(pixels(0), "What is it?", mode="direct", deadline_s=0.2)
        monkeypatch.undo()
        assert_idle(fresh)


@pytest.mark.parametrize(
    "deadline", [0, -1, float("nan"), float("inf"), -(10**400), True, np.bool_(True), "5", [5], 5j, np.float32("nan")]
)
def test_an_impossible_deadline_is_bad_input(runtime: Runtime, deadline: Any) -> None:
    with pytest.raises(BadInput, match="deadline"):
        runtime.ask(pixels(0), "What is it?", mode="direct", deadline_s=deadline)


@pytest.mark.parametrize("deadline", [np.float32(60), np.int64(60), 1e10, 1e300, 10**400])
def test_a_deadline_may_be_any_positive_number(runtime: Runtime, deadline: Any) -> None:
    assert runtime.ask(pixels(0), "What is it?", mode="direct", deadline_s=deadline).answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mode": ["direct"]}, "unknown mode"),
        ({"mode": None}, "unknown mode"),
        ({"on_step": 5}, "on_step is int"),
        ({"trace": "t.jsonl"}, "trace is str"),
        ({"trace": ""}, "trace is str"),
        ({"cancel": threading.Event()}, "cancel is Event"),
    ],
)
def test_arguments_of_the_wrong_type_are_bad_input(runtime: Runtime, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        runtime.ask(pixels(0), "What is it?", **{"mode": "direct", **wrong})


def test_an_unknown_mode_is_bad_input(runtime: Runtime) -> None:
    with pytest.raises(BadInput, match="unknown mode 'guess'"):
        runtime.ask(pixels(0), "What is it?", mode="guess")


@pytest.mark.parametrize("at", ["encode", "prefill", "answer"])
def test_cancelling_at_any_stage_is_cancelled(runtime: Runtime, at: str) -> None:
    cancel, trace, seen = CancelToken(), Trace(), []

    def on_step(step: dict[str, Any]) -> None:
        seen.append(step["stage"])
        if step["stage"] == at:
            cancel.cancel()

    before = runtime.ask(pixels(0), "What is it?", mode="direct")
    with pytest.raises(Cancelled):
        runtime.ask(pixels(0), "What is it?", mode="direct", cancel=cancel, on_step=on_step, trace=trace)
    assert seen[-1] == at
    assert trace.events[-1] | {"t": 0} == {"t": 0, "event": "error", "type": "Cancelled"} | {
        "message": trace.events[-1]["message"]
    }
    assert_idle(runtime)
    assert runtime.ask(pixels(0), "What is it?", mode="direct").same_as(before)


@pytest.mark.parametrize("at", ["encode", "prefill", "answer"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_a_callback_raises_comes_out_and_leaves_nothing(
    runtime: Runtime, at: str, error: type[BaseException]
) -> None:
    def on_step(step: dict[str, Any]) -> None:
        if step["stage"] == at:
            raise error

    with pytest.raises(error):
        runtime.ask(pixels(0), "What is it?", mode="direct", on_step=on_step)
    assert_idle(runtime)


def test_ctrl_c_during_questions_leaves_nothing(runtime: Runtime) -> None:
    rng = np.random.default_rng(1)
    runtime.ask(pixels(0), "What is it?", mode="direct")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    for _ in range(8):
        timer = threading.Timer(rng.uniform(0.001, 0.05), os.kill, (os.getpid(), signal.SIGINT))
        arrived = False
        try:
            timer.start()
            while True:
                runtime.ask(pixels(0), "What is it?", mode="direct")
        except KeyboardInterrupt:
            arrived = True
        assert arrived
        timer.join()
        assert_idle(runtime)
    signal.signal(signal.SIGINT, before)


def test_a_question_that_does_not_fit_the_context_is_bad_input(tiny_bundle: Bundle) -> None:
    with hoverlens.load(tiny_bundle, Profile(name="narrow", n_ctx=256, threads=1)) as runtime:
        trace = Trace()
        with pytest.raises(BadInput, match="n_ctx") as error:
            runtime.ask(pixels(0), "word " * 700, mode="direct", trace=trace)
        assert "\n" not in str(error.value)
        assert events(trace)[-1] == "error"
        assert_idle(runtime)


# -- traces and threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", QUESTIONS, ids=["option", "options", "box", "text"])
def test_a_trace_tells_the_whole_question(runtime: Runtime, asked: dict[str, Any]) -> None:
    trace = Trace()
    answer = runtime.ask(pixels(0), **asked, trace=trace, seed=7)
    names = [n for n in events(trace) if n not in ("warning", "repair")]
    calls = names.count("call")
    assert names == ["trace", "question", "encode", "prefix", *["call"] * calls, "answer"]
    by_name = {str(e["event"]): e for e in trace.events}
    assert by_name["question"]["text"] == asked["question"]
    assert (by_name["question"]["seed"], by_name["question"]["mode"]) == (7, "direct")
    assert by_name["answer"]["answer"] == answer.answer
    told = [e for e in trace.events if e["event"] == "call"]
    assert len(told) == answer.stats.mllm_calls
    assert by_name["prefix"]["tokens"] + sum(e["prefill_tokens"] for e in told) == answer.stats.prefill_tokens
    assert sum(e["reused_tokens"] for e in told) == answer.stats.reused_tokens
    for line in trace.to_text().splitlines():
        json.loads(line)


def test_two_threads_at_once_get_the_answers_of_one_after_the_other(runtime: Runtime) -> None:
    alone = {i: runtime.ask(pixels(i), **QUESTIONS[i % 4]).comparable() for i in range(6)}
    found: dict[int, dict[str, Any]] = {}
    failed: list[BaseException] = []

    def work(numbers: range) -> None:
        try:
            for i in numbers:
                found[i] = runtime.ask(pixels(i), **QUESTIONS[i % 4]).comparable()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(range(k, 6, 2),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert found == alone


def test_without_sharing_the_answers_are_the_same(runtime: Runtime, tiny_bundle: Bundle) -> None:
    with hoverlens.load(tiny_bundle, runtime.profile, share=False) as naive:
        for asked in QUESTIONS[:3]:
            a, b = runtime.ask(pixels(4), **asked), naive.ask(pixels(4), **asked)
            assert (a.answer, a.options, a.box) == (b.answer, b.options, b.box)
            assert a.confidence is None or a.confidence == pytest.approx(b.confidence, abs=0.02)
            assert b.stats.reused_tokens == 0
            assert b.stats.image_encodes == b.stats.mllm_calls
