"""The trace: one JSON object a line, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.trace import TRACE_VERSION, Trace

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_file_appears_when_the_trace_is_closed_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace = Trace(path)
    trace.emit("call", role="base", output="a\nb é")
    assert os.listdir(tmp_path) == []
    trace.close()
    assert os.listdir(tmp_path) == ["t.jsonl"]
    events = read(path)
    assert [e["event"] for e in events] == ["trace", "call"]
    assert events[0]["version"] == TRACE_VERSION
    assert events[1]["output"] == "a\nb é"
    assert events == trace.events


def test_times_never_go_back(tmp_path: Path) -> None:
    trace = Trace()
    for i in range(20):
        trace.emit("x", i=i)
    times = [float(e["t"]) for e in trace.events]
    assert times == sorted(times)
    assert times[0] >= 0


def test_closing_twice_writes_what_came_between(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Trace(path) as trace:
        trace.close()
        trace.emit("late")
    assert [e["event"] for e in read(path)] == ["trace", "late"]


def test_a_trace_without_a_path_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Trace() as trace:
        trace.emit("x")
    assert os.listdir(tmp_path) == []
    assert len(trace.events) == 2


def test_a_failed_question_still_leaves_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(RuntimeError), Trace(path) as trace:  # noqa: PT012
        trace.emit("question", text="?")
        raise RuntimeError
    assert [e["event"] for e in read(path)] == ["trace", "question"]


def test_an_old_file_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    trace = Trace(path)
    trace.emit("x")
    assert path.read_text() == "old"
    trace.close()
    assert len(read(path)) == 2


@pytest.mark.parametrize("where", ["missing/t.jsonl", "file/t.jsonl", "."])
def test_a_place_that_cannot_be_written_is_told_at_the_start(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="the trace") as error:
        Trace(tmp_path / where)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_vanishes_is_an_error_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    trace = Trace(folder / "t.jsonl")
    folder.rmdir()
    with pytest.raises(HoverlensError) as error:
        trace.close()
    assert "\n" not in str(error.value)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3))
def test_any_json_value_can_be_read_again(fields: dict[str, object]) -> None:
    trace = Trace()
    trace.emit("x", **fields)
    lines = trace.to_text().split("\n")
    assert lines[-1] == ""
    found = json.loads(lines[1])
    assert {k: found[k] for k in fields} == fields


def test_surrogates_of_a_model_do_not_spoil_the_file(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        trace.emit("x", said="\ud800")
    assert len(read(tmp_path / "t.jsonl")) == 2


def test_what_is_no_number_is_written_as_null(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        trace.emit("x", p=float("nan"), q=[float("inf")])
    text = (tmp_path / "t.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
