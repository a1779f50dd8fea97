"""Mode direct: one look, one answer; and what a session does around it."""

from __future__ import annotations

from typing import Any

import pytest

from hoverlens.runtime import pipeline
from hoverlens.runtime.errors import HoverlensError
from hoverlens.runtime.mllm.base import GenerateRequest, Generation
from hoverlens.runtime.profiles import PROFILES

from .scripted import ScriptedBackend
from .world import CHAT, COUNT, FRAME, WHAT, WHERE, WHICH, play


def test_an_option_is_the_most_probable_one() -> None:
    played = play({"base": [0.1, 0.2, 0.6, 0.1]}, COUNT, mode="direct")
    assert played.answer is not None
    assert (played.text, played.answer.options, played.answer.confidence) == ("three", ("three",), 0.6)
    assert played.answer.probabilities == {"one": 0.1, "two": 0.2, "three": 0.6, "four": 0.1}
    assert played.answer.stats.mllm_calls == 1


def each(*yes: float) -> Any:
    left = list(yes)
    return lambda label, prompt: [p := left.pop(0), 1 - p]


def test_of_several_options_each_is_judged_by_itself() -> None:
    played = play(each(0.9, 0.2, 0.5), WHICH, mode="direct")
    assert played.answer is not None
    assert played.text == "car, tram"
    assert played.answer.confidence == pytest.approx(0.9 * 0.8 * 0.5)
    assert played.answer.probabilities == {"car": 0.9, "bus": 0.2, "tram": 0.5}
    assert [f'"{o}"' in prompt for (_, prompt), o in zip(played.backend.prompts, WHICH.options, strict=True)] == [
        True
    ] * 3
    assert not played.answer.warnings


def test_an_answer_has_at_least_one_option() -> None:
    played = play(each(0.1, 0.4, 0.4), WHICH, mode="direct")
    assert played.answer is not None
    assert played.text == "bus"  # the first of equals
    assert played.answer.confidence == pytest.approx(0.9 * 0.4 * 0.6)
    assert len(played.answer.warnings) == 1


@pytest.mark.parametrize(
    ("said", "box", "repaired"),
    [
        ("<0.100><0.200><0.300><0.400>", (0.1, 0.2, 0.3, 0.4), False),
        ("<0.300><0.200><0.100><0.400>", (0.1, 0.2, 0.3, 0.4), True),
        ("<0.100><0.400><0.300><0.200>", (0.1, 0.2, 0.3, 0.4), True),
    ],
)
def test_a_box(said: str, box: tuple[float, ...], repaired: bool) -> None:
    played = play({"base": said}, WHERE, mode="direct")
    assert played.answer is not None
    assert played.answer.box == box
    assert played.text == "<0.100><0.200><0.300><0.400>"
    assert len(played.answer.warnings) == len(played.all("repair")) == repaired


@pytest.mark.parametrize("said", ["", "<0.1", "<0.100><0.200><0.300>"])
def test_an_incomplete_box_is_one_error(said: str) -> None:
    played = play({"base": said}, WHERE, mode="direct")
    assert isinstance(played.error, HoverlensError)
    assert "box_tokens" in str(played.error)


class Finishing(ScriptedBackend):
    """Ends its texts as it is told."""

    finish = "stop"
    kept = False

    def _generate(self, request: GenerateRequest) -> Generation:
        said = super()._generate(request)
        state = request.state.fork() if self.kept else None
        return Generation(said.text, (1, 2), self.finish, 0, 0, 0.0, state=state)


@pytest.mark.parametrize(
    ("text", "finish", "warning"),
    [("a tower", "stop", ""), ("a tow", "length", "cut after 2 tokens"), (" \n", "stop", "is empty")],
)
def test_a_text_says_whether_it_was_cut_or_empty(text: str, finish: str, warning: str) -> None:
    backend = Finishing({"base": text})
    backend.finish = finish
    answer = pipeline.ask(backend, CHAT, PROFILES["onboard"], FRAME, WHAT)
    assert answer.answer == text.strip()
    assert (answer.confidence, answer.probabilities, answer.options, answer.box) == (None, None, (), None)
    assert len(answer.warnings) == bool(warning)
    assert warning in "".join(answer.warnings)


def test_states_that_a_call_returns_are_closed_at_the_end() -> None:
    backend = Finishing({"base": "x"})
    backend.kept = True
    pipeline.ask(backend, CHAT, PROFILES["onboard"], FRAME, WHAT)
    assert backend.open_states == 0


@pytest.mark.parametrize(("least", "warned"), [(None, False), (4, False), (5, True)])
def test_too_few_image_tokens_for_boxes_are_said(least: int | None, warned: bool) -> None:
    answer = pipeline.ask(ScriptedBackend({}), CHAT, PROFILES["onboard"], FRAME, COUNT, image_min_tokens=least)
    assert any("image takes 4 tokens" in w for w in answer.warnings) is warned
