"""``hoverlens trace``: the tree, the prompts, the JSON, and files that are no traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hoverlens.cli import cli

EVENTS = [
    {"t": 0, "event": "trace", "version": 1},
    {"t": 0.1, "event": "question", "text": "How many?", "options": ["1", "2"], "kind": "option", "mode": "uavmas"},
    {"t": 0.2, "event": "call", "role": "PV 1", "prompt": "Next step\x1b[0m", "output": "zoom", "prefill_tokens": 7},
    {"t": 0.3, "event": "node", "node": "1", "action": "Action: zoom()", "score": 5, "answer": "2", "previous": "1"},
    {"t": 0.4, "event": "answer", "answer": "2\x1b[31m", "exit": "complete", "confidence": 0.5, "stats": {}},
]


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in EVENTS))
    return str(path)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["trace", *args])


def test_the_tree_is_shown(trace_file: str) -> None:
    result = run(trace_file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("Question  How many?\n")
    assert "[1] score 5\n  Action: zoom()\n  PV: zoom" in result.stdout
    assert "Answer    2 [31m (exit complete, confidence 0.50)" in result.stdout
    assert "\x1b" not in result.stdout
    assert "Next step" not in result.stdout


def test_prompts_are_shown_on_request(trace_file: str) -> None:
    result = run(trace_file, "--prompts")
    assert "  | Next step [0m\n" in result.stdout


def test_json_has_costs_and_events(trace_file: str) -> None:
    result = run(trace_file, "--json")
    found = json.loads(result.stdout)
    assert found["agents"]["PV"]["evaluated"] == 7
    assert [e["event"] for e in found["events"]] == ["trace", "question", "call", "node", "answer"]
    assert "prompt" not in found["events"][2]
    found = json.loads(run(trace_file, "--json", "--prompts").stdout)
    assert found["events"] == EVENTS


@pytest.mark.parametrize("text", ["", "not a trace\n", '{"event": "trace", "version": 7}\n', '{"event": "trace", "ver'])
def test_what_is_no_trace_exits_2_with_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    result = run(str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("hoverlens: ")


def test_a_missing_file_exits_2(tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.jsonl"))
    assert result.exit_code == 2
    assert "cannot read the trace" in result.stderr
