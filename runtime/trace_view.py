"""Shows a trace as a readable tree."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BadInput
from .trace import TRACE_VERSION

MAX_TRACE_BYTES = 1 << 30


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a trace file.

    Raises:
        BadInput: No such file, no trace, a damaged line, or a trace of a newer version.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_TRACE_BYTES:
            raise BadInput(f"{path} is larger than {MAX_TRACE_BYTES} bytes; this is no trace of one question")
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not text; a trace is a file that --trace wrote") from None
    except OSError as e:
        raise BadInput(f"cannot read the trace {path}: {e.strerror}") from None
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            raise BadInput(f"{path}, line {number}: not JSON; the trace is damaged") from None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise BadInput(f"{path}, line {number}: no trace event; a trace is a file that --trace wrote")
        events.append(event)
    if not events or events[0]["event"] != "trace":
        raise BadInput(f"{path} is no trace; write one with 'hoverlens ask ... --trace FILE'")
    version = events[0].get("version")
    if version != TRACE_VERSION:
        raise BadInput(f"{path} has trace version {version}, needed {TRACE_VERSION}; ask again with --trace")
    return events


@dataclass
class _Node:
    facts: dict[str, Any] = field(default_factory=dict)
    fate: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)


def show_trace(events: Iterable[dict[str, Any]], prompts: bool = False) -> str:
    """The trace as indented text: the question, each node with its agents, score and fate, the answer.

    Args:
        events: As :func:`read_trace` returns them.
        prompts: Also each agent's prompt.
    """
    return "\n".join(_lines(list(events), prompts))


def _lines(events: list[dict[str, Any]], prompts: bool) -> Iterator[str]:
    nodes: dict[str, _Node] = {}
    head: list[dict[str, Any]] = []
    loose: list[dict[str, Any]] = []
    tail: list[str] = []
    for event in events:
        kind = event["event"]
        name = _node_of(event)
        if kind == "question":
            yield from _question(event)
        elif kind == "call":
            if name is not None:
                nodes.setdefault(name, _Node()).calls.append(event)
            else:
                head.append(event)
        elif kind == "node" and name is not None:
            nodes.setdefault(name, _Node()).facts = event
        elif kind == "fate" and name is not None:
            nodes.setdefault(name, _Node()).fate = str(event.get("fate", ""))
        elif kind in ("repair", "tool_failed") and name is not None:
            nodes.setdefault(name, _Node()).notes.append(f"{kind}: {event.get('what')}")
        elif kind == "root" or kind == "tools":
            head.append(event)
        elif kind in ("winner", "answer", "error", "arbitration"):
            tail += _ending(event)
        elif kind in ("repair", "tool_failed"):
            loose.append(event)
    for event in head:
        yield from _head(event, prompts)
    for name in list(nodes):
        parent = name.rpartition(".")[0]
        if parent in nodes:
            nodes[parent].children.append(name)
    for name in nodes:
        if name.rpartition(".")[0] not in nodes:
            yield from _tree(nodes, name, "", prompts)
    for event in loose:
        yield f"{event['event']}: {_short(event.get('what'))}"
    yield from tail


def _node_of(event: dict[str, Any]) -> str | None:
    """The node that an event belongs to: its own field, or the end of an agent's label."""
    if isinstance(event.get("node"), str):
        return None if event["node"] == "root" else str(event["node"])
    last = str(event.get("role", "")).rpartition(" ")[2]
    return last if last and all(p.isdigit() for p in last.split(".")) else None


def _question(event: dict[str, Any]) -> Iterator[str]:
    frame = event.get("frame") or {}
    options = event.get("options") or []
    yield f"Question  {_short(event.get('text'), 300)}"
    if options:
        yield f"Options   {', '.join(map(str, options))}"
    yield (
        f"Asked     kind {event.get('kind')}, mode {event.get('mode')}, seed {event.get('seed')}, "
        f"profile {event.get('profile')}, frame {frame.get('width')}x{frame.get('height')}"
    )


def _head(event: dict[str, Any], prompts: bool) -> Iterator[str]:
    kind = event["event"]
    if kind == "call":
        yield from _call(event, "", prompts)
    elif kind == "tools":
        active = event.get("active") or []
        yield f"Tools     {', '.join(active) if active else 'none active'}"
        for name, tip in (event.get("tips") or {}).items():
            if tip:
                yield f"  tip for {name}: {_short(tip)}"
    elif kind == "root":
        yield f"Root      S_init {event.get('s_init')}, tau {event.get('tau')}, a_0 {_short(event.get('answer'))}"


def _tree(nodes: dict[str, _Node], name: str, indent: str, prompts: bool) -> Iterator[str]:
    node = nodes[name]
    facts = node.facts
    score = facts.get("score")
    marks = [f"score {score:g}"] if isinstance(score, (int, float)) else []
    marks += [node.fate] if node.fate else []
    yield f"{indent}[{name}] {', '.join(marks)}".rstrip()
    inner = indent + "  "
    for line in str(facts.get("action", "")).splitlines():
        yield inner + _short(line)
    if facts.get("feedback"):
        yield f"{inner}Result: {_short(facts['feedback'], 240)}"
    for call in node.calls:
        yield from _call(call, inner, prompts)
    for note in node.notes:
        yield inner + _short(note)
    if facts:
        before, after = facts.get("previous"), facts.get("answer")
        changed = "kept" if before == after else f"changed from {_short(before)}"
        yield f"{inner}Answer: {_short(after)} ({changed})"
    for child in node.children:
        yield from _tree(nodes, child, inner, prompts)


def _call(event: dict[str, Any], indent: str, prompts: bool) -> Iterator[str]:
    role = str(event.get("role", "?"))
    output = event.get("output")
    chances = event.get("probabilities")
    options = event.get("options")
    detail = ""
    if isinstance(chances, list) and isinstance(options, list) and output in options:
        detail = f" p={chances[options.index(output)]:.2f}"
    tokens = f"{event.get('prefill_tokens', 0)}+{event.get('reused_tokens', 0)} tokens"
    if event.get("decoded_tokens"):
        tokens += f", {event['decoded_tokens']} decoded"
    if prompts and event.get("prompt"):
        for line in str(event["prompt"]).splitlines():
            yield f"{indent}| {_short(line, 240)}"
    yield f"{indent}{role}: {_short(output, 240)}{detail}  ({tokens})"


def _ending(event: dict[str, Any]) -> list[str]:
    kind = event["event"]
    if kind == "winner":
        scores = ", ".join(f"{s:g}" for s in event.get("scores", []))
        return [f"Winner    [{event.get('node')}] mean {event.get('mean', 0):.2f} of {scores}"]
    if kind == "arbitration":
        return [
            f"LA        [{event.get('node')}] {_short(event.get('long_chain'))}; "
            f"{_short(event.get('before'))} -> {_short(event.get('after'))}"
        ]
    if kind == "error":
        return [f"Error     {event.get('type')}: {_short(event.get('message'), 300)}"]
    stats = event.get("stats") or {}
    confidence = event.get("confidence")
    sure = "" if confidence is None else f", confidence {confidence:.2f}"
    return [
        f"Answer    {_short(event.get('answer'), 300)} (exit {event.get('exit')}{sure})",
        f"Cost      {stats.get('wall_s', 0):.2f} s, {stats.get('mllm_calls')} MLLM calls, "
        f"{stats.get('tool_calls')} tool calls, {stats.get('image_encodes')} image encodes, "
        f"{stats.get('prefill_tokens')} tokens evaluated, {stats.get('reused_tokens')} reused, "
        f"{stats.get('decoded_tokens')} decoded",
    ]


def _short(value: object, limit: int = 120) -> str:
    """A value on one line, without control characters, cut to ``limit``."""
    text = "none" if value is None else str(value)
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 2] + ".."
