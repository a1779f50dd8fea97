"""The Answer JSON: scripts outside the project read it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.answer import EXITS, STAGES, Answer, Stats

FRAME = {"digest": "ab", "width": 4, "height": 3, "stamp": 1.5}


def full() -> Answer:
    return Answer(
        answer="3",
        kind="option",
        options=("3",),
        box=(0.1, 0.2, 0.3, 0.4),
        confidence=0.5,
        mode="direct",
        stats=Stats(wall_s=1.0),
        bundle={"name": "nano", "sha256": "00"},
        frame=dict(FRAME),
        warnings=("w",),
        probabilities={"3": 0.5, "4": 0.5},
    )


def test_the_contract_has_all_its_keys() -> None:
    found = json.loads(full().to_json())
    assert set(found) >= {
        "answer", "kind", "options", "box", "confidence", "exit", "mode", "stats", "stages_s", "bundle", "frame"
    }  # fmt: skip
    assert set(found["stats"]) >= {
        "wall_s", "mllm_calls", "tool_calls", "image_encodes", "prefill_tokens", "reused_tokens", "decoded_tokens",
        "nodes", "pruned", "peak_rss_mb",
    }  # fmt: skip
    assert set(found["stages_s"]) == {"encode", "prefill", "decode", "tools", "other"} == set(STAGES)
    assert set(found["bundle"]) == {"name", "sha256"}
    assert set(found["frame"]) == {"digest", "width", "height", "stamp"}
    assert found["options"] == ["3"]
    assert found["box"] == [0.1, 0.2, 0.3, 0.4]
    assert found["exit"] in EXITS


def test_what_is_not_there_is_null() -> None:
    found = json.loads(Answer(answer="free text", kind="text").to_json())
    assert (found["box"], found["confidence"], found["options"]) == (None, None, [])


@pytest.mark.parametrize("exit_", EXITS)
def test_every_exit_is_written_as_it_is_named(exit_: str) -> None:
    assert Answer("x", "text", exit=exit_).to_dict()["exit"] == exit_


def test_the_same_answer_leaves_out_stats_stages_and_the_stamp() -> None:
    other = full()
    other.stats.wall_s = 9.0
    other.stages_s["decode"] = 3.0
    other.frame["stamp"] = 77.0
    assert full().same_as(other)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("answer", "4"),
        ("kind", "text"),
        ("options", ("3", "4")),
        ("box", None),
        ("confidence", 0.6),
        ("exit", "deadline"),
        ("mode", "uavmas"),
        ("bundle", {"name": "nano", "sha256": "01"}),
        ("frame", {**FRAME, "digest": "cd"}),
        ("warnings", ()),
        ("probabilities", {"3": 0.6, "4": 0.4}),
    ],
)
def test_anything_else_makes_another_answer(name: str, value: object) -> None:
    other = full()
    setattr(other, name, value)
    assert not full().same_as(other)


def test_comparing_changes_nothing() -> None:
    answer = full()
    answer.comparable()
    assert answer.to_dict() == full().to_dict()
    answer.to_dict()["stats"]["wall_s"] = 5
    answer.to_dict()["frame"]["stamp"] = 5
    assert answer.to_dict() == full().to_dict()


@given(st.text(), st.lists(st.text(), max_size=3))
def test_any_text_survives_json(text: str, options: list[str]) -> None:
    answer = Answer(text, "options", tuple(options))
    found = json.loads(answer.to_json().encode("utf-8", "surrogatepass"))
    assert (found["answer"], found["options"]) == (text, options)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_know_is_never_written(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Answer("x", "text", confidence=number).to_json()
