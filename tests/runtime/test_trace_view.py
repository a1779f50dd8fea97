"""A trace becomes a readable tree, whatever it holds; what is no trace is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.trace import TRACE_VERSION, Trace
from hoverlens.runtime.trace_view import agent_costs, read_trace, show_trace

from .reasoning.world import NAMES, Node, fake_tools, play, scripted

TREE = {
    "1": Node(3),
    "1.1": Node(4, "two", final=True),
    "1.2": Node(3),
    "2": Node(5, trust=False),
    "2.1": Node(3, "three", final=True),
    "2.2": Node(5, "four", final=True),
}


def events(**settings: Any) -> list[dict[str, Any]]:
    extra = {"TS gamma": {"use": "no"}, "LA 2.2": {"reasoning": "r", "answer": "one", "clues": "c"}}
    return play(
        scripted(TREE, extra=extra), tools=fake_tools(NAMES[:3]), **{"la": "winner", "depth": 2, **settings}
    ).events


def test_a_search_is_shown_as_a_tree() -> None:
    lines = show_trace(events()).splitlines()
    assert lines[:3] == [
        "Question  How many cars?",
        "Options   one, two, three, four",
        "Asked     kind option, mode uavmas, seed 0, profile onboard, frame 8x8",
    ]
    tree = [line for line in lines if line.lstrip().startswith("[")]
    # S_init 5, tau 4; means: 1.1 (5+3+4)/3 = 4, 2.1 (5+5+3)/3 = 4.33, 2.2 (5+5+5)/3 = 5.
    assert tree == [
        "[1] score 3, open",
        "  [1.1] score 4, answer",
        "  [1.2] score 3, pruned",
        "[2] score 5, open",
        "  [2.1] score 3, answer",
        "  [2.2] score 5, answer, WINNER",
    ]
    for line in (
        "Tools     alpha, beta",
        "  tip for alpha: tip-alpha",
        "Root      S_init 5, tau 4, W 2, a_0 one",
        "  Thought: thought-1",
        "  Action: alpha(target=target-1)",
        "  Result: saw target-1",
        "  Answer: two (was one)",
        "    Answer: two (kept)",
        "LA        [2.2] says one; answer four -> one",
        "Winner    [2.2] mean 5.00 of 5, 5, 5",
        "Answer    one (exit complete, confidence 0.90)",
    ):
        assert line in lines, line
    # An agent stands below its node, which it need not name.
    at = lines.index("  [1.1] score 4, answer")
    assert [line.split(":")[0] for line in lines[at + 4 : at + 8]] == ["    SR", "    PV", "    CI", "    SC"]
    # What SR said is its action, and is shown once.
    assert lines[at + 4] == "    SR: as above  (0+0 tokens)"
    assert any(line.startswith("Tool      alpha(target=target-1): 0.0") for line in lines)
    assert any(line.startswith("Cost ") and "31 MLLM calls" in line and "7 nodes, 1 pruned" in line for line in lines)


def test_prompts_are_shown_where_they_are_asked_for() -> None:
    assert "| " not in show_trace(events())
    shown = show_trace(events(), prompts=True)
    assert "  | Rate this step from 0 to 10" in shown
    assert "| Tool alpha: about alpha." in shown


def test_each_run_of_a_vote_is_a_tree_of_its_own() -> None:
    lines = show_trace(events(mode="vote3", depth=5)).splitlines()
    assert [line for line in lines if line.startswith("Run ")] == [f"Run       {k} of 3" for k in (1, 2, 3)]
    assert [line for line in lines if line.lstrip().startswith("[")] == ["[1]", "  [1.1]"] * 3


def test_the_direct_mode_and_failures_are_shown() -> None:
    lines = show_trace(events(mode="direct")).splitlines()
    assert any(line.startswith("base: one p=0.90") for line in lines)
    failed = play(scripted({}, extra={"SR 1": BadInput("the prompt is too long")}), tools=fake_tools(NAMES[:1]))
    assert "Error     BadInput: the prompt is too long" in show_trace(failed.events).splitlines()


def test_repairs_and_failed_tools_stand_at_their_node() -> None:
    given = [
        {"event": "node", "node": "1", "action": "Action: zoom()", "feedback": "f", "score": 5.5, "answer": None},
        {"event": "repair", "node": "1", "role": "PV", "what": "corners swapped"},
        {"event": "tool_failed", "node": "1", "what": "zoom failed"},
        {"event": "repair", "what": "box corners reordered", "found": "x"},
    ]
    lines = show_trace(given).splitlines()
    assert lines == [
        "repair: box corners reordered",
        "[1] score 5.5",
        "  Action: zoom()",
        "  Result: f",
        "  repair: PV: corners swapped",
        "  tool_failed: zoom failed",
        "  Answer: none (kept)",
    ]


def call(role: str, **fields: Any) -> dict[str, Any]:
    return {"event": "call", "role": role, **fields}


def test_costs_are_summed_by_agent_and_seconds_shared_in_a_batch() -> None:
    given = [
        call("base", prefill_tokens=10, reused_tokens=100, batch=1, wall_s=0.5),
        call("TS zoom", prefill_tokens=3, reused_tokens=100, decoded_tokens=2, forced_tokens=4, batch=2, wall_s=1.0),
        call("TS detect", prefill_tokens=4, reused_tokens=100, decoded_tokens=1, forced_tokens=4, batch=2, wall_s=1.0),
        call("SC base", batch=1),
        call("SC 1.2", batch=1),
        call("CI 1", batch=1),
        call("CI end 1", batch=1),
        call("tool detect exists", batch=1),
        call("tool ground", batch=1),
        call("TS central", batch=1),
        {"event": "node", "role": "TS"},
    ]
    costs = agent_costs(given)
    assert {agent: c["calls"] for agent, c in costs.items()} == {
        "base": 1,
        "TS": 3,
        "SC": 2,
        "CI": 1,
        "CI end": 1,
        "tools": 2,
    }
    assert costs["TS"] == {"calls": 3, "evaluated": 7, "reused": 200, "decoded": 3, "forced": 8, "wall_s": 1.0}
    assert costs["base"]["wall_s"] == 0.5
    table = show_trace(given).splitlines()[-7:]
    assert table[0].split() == ["Agent", "calls", "evaluated", "reused", "decoded", "given", "seconds"]
    assert table[2].split() == ["TS", "3", "7", "200", "3", "8", "1.000"]


HOSTILE = "\x1b[31m\x07\x00\u202egnp.exe\u2028\u0085\ud800\n\r\tend"


def test_nothing_in_a_trace_steers_a_terminal() -> None:
    fields = dict.fromkeys(
        ("text", "kind", "mode", "action", "feedback", "answer", "previous", "fate", "what"), HOSTILE
    )
    fields |= {"options": [HOSTILE], "tips": {HOSTILE: HOSTILE}, "active": [HOSTILE], "warnings": [HOSTILE]}
    fields |= {"output": HOSTILE, "prompt": HOSTILE, "tool": HOSTILE, "arguments": {HOSTILE: HOSTILE}}
    fields |= {"message": HOSTILE, "type": HOSTILE, "run": HOSTILE, "of": HOSTILE, "frame": {"width": HOSTILE}}
    fields |= {"long_chain": HOSTILE, "before": HOSTILE, "after": HOSTILE, "exit": HOSTILE, "s_init": HOSTILE}
    kinds = ("question", "tools", "root", "node", "fate", "call", "repair", "tool", "arbitration", "winner", "answer")
    given = [
        {"event": k, **fields, "node": n, "role": HOSTILE} for k in (*kinds, "run", "error") for n in ("1", HOSTILE)
    ]
    shown = show_trace(given, prompts=True)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "gnp.exe" in shown


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1", "1.2", "2.1.1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KINDS = ["question", "call", "node", "fate", "repair", "tool_failed", "tool", "root", "tools", "winner", "arbitration"]
# fmt: off
KEYS = [
    "node", "role", "text", "options", "kind", "frame", "fate", "what",
    "tips", "active", "s_init", "tau", "score", "action", "feedback", "previous",
    "answer", "output", "probabilities", "prefill_tokens", "decoded_tokens", "prompt", "finish", "scores",
    "mean", "long_chain", "stats", "confidence", "warnings", "type", "message", "wall_s",
    "batch", "arguments", "ok", "run", "of", "width",
]
# fmt: on
EVENTS = st.lists(
    st.builds(
        lambda kind, fields: {**fields, "event": kind},
        st.sampled_from([*KINDS, "run", "answer", "error", "encode", ""]),
        st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8),
    ),
    max_size=12,
)


@given(EVENTS, st.booleans())
def test_no_events_raise(given: list[dict[str, Any]], prompts: bool) -> None:
    assert all(c.isprintable() or c == "\n" for c in show_trace(given, prompts))
    json.dumps(agent_costs(given), allow_nan=False)


def test_the_largest_numbers_are_shown() -> None:
    given = [{"event": "winner", "node": "1", "mean": 10**400, "scores": [10**400, 1e308, None, "x"]}]
    assert "mean 0.00" in show_trace(given)
    assert agent_costs([call("PV 1", prefill_tokens=10**400, wall_s=1e308, batch=0)])["PV"]["evaluated"] == 0


def test_a_path_too_deep_or_odd_is_no_node() -> None:
    given = [
        {"event": "node", "node": n, "action": "a"} for n in ("", ".", "1.", "0", "1..2", "x", ".".join(["1"] * 40))
    ]
    assert show_trace(given) == ""


# -- files -------------------------------------------------------------------------------------------


def write(path: Path, *lines: str, first: bool = True) -> Path:
    head = [json.dumps({"t": 0, "event": "trace", "version": TRACE_VERSION})] if first else []
    path.write_text("\n".join([*head, *lines]), encoding="utf-8")
    return path


def test_a_written_trace_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with Trace(path) as trace:
        # A model may write line ends of every kind, and numbers may have no word in JSON.
        trace.emit("call", role="PV 1", output="a\u2028b\u0085c\x1cd\r\ne", logprob=float("-inf"))
    found = read_trace(path)
    assert [e["event"] for e in found] == ["trace", "call"]
    assert found[1]["output"] == "a\u2028b\u0085c\x1cd\r\ne"
    assert found[1]["logprob"] is None


def test_empty_lines_and_other_line_ends_are_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "t", "", '{"event": "x"}', "  ", "")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [e["event"] for e in read_trace(path)] == ["trace", "x"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"event": "no', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"a": 1' + "0" * 5000 + "}", "line 2: not JSON"),
        ("[1]", "line 2: no trace event"),
        ('"text"', "line 2: no trace event"),
        ('{"t": 1}', "line 2: no trace event"),
        ('{"event": 1}', "line 2: no trace event"),
    ],
    ids=["cut", "deep", "long number", "list", "string", "without event", "event is a number"],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_trace(write(tmp_path / "t", line))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is no trace"),
        (b"\n\n", "is no trace"),
        (b'{"event": "call"}\n', "is no trace"),
        (b'{"event": "trace"}\n', "version None"),
        (b'{"event": "trace", "version": 99}\n', "version 99, needed 1"),
        (b'{"event": "trace", "version": "\x1b"}\n', "not JSON"),
        (b"\xff\xd8\xff\xe0", "is not text"),
        (b'{"event": "trace", "version": 1}\n{"event": "\xff"}', "is not text"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(text)
    with pytest.raises(BadInput, match=words):
        read_trace(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadInput, match="cannot read the trace"):
            read_trace(path)


def test_a_file_too_large_for_one_question_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoverlens.runtime.trace_view.MAX_TRACE_BYTES", 10)
    with pytest.raises(BadInput, match="larger than 10 bytes"):
        read_trace(write(tmp_path / "t"))
