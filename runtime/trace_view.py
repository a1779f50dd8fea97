"""Shows a trace as a readable tree."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BadInput
from .trace import TRACE_VERSION

MAX_TRACE_BYTES = 1 << 30
_NODE = re.compile(r"[1-9]\d{0,3}(\.[1-9]\d{0,3}){0,31}", re.ASCII)
"""A node's path; no search is deeper or wider."""


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a trace file.

    Raises:
        BadInput: No such file, no trace, a damaged line, or a trace of a newer version.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_TRACE_BYTES:
            raise BadInput(f"{path} is larger than {MAX_TRACE_BYTES} bytes; this is no trace of one question")
        # Not splitlines: a model's text may hold other line ends than ours.
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not text; a trace is a file that --trace wrote") from None
    except OSError as e:
        raise BadInput(f"cannot read the trace {path}: {e.strerror}") from None
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            # Python writes numbers that JSON has no word for; nothing here needs them.
            event = json.loads(line, parse_constant=lambda _: None)
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


@dataclass
class _Run:
    """What happened in one run of the search: a vote has several.

    Attributes:
        before: Calls and facts from before the first step.
        nodes: By path.
        tools: What the tools did; a tool that several branches asked for ran once.
        after: What came of it.
    """

    title: str = ""
    before: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[str, _Node] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)

    def node(self, name: str) -> _Node:
        return self.nodes.setdefault(name, _Node())


def show_trace(events: Iterable[dict[str, Any]], prompts: bool = False) -> str:
    """The trace as indented text: the question, each node with its agents, score and fate, the answer, the cost.

    Whatever the events hold, this does not raise, and nothing in them steers a terminal.

    Args:
        events: As :func:`read_trace` returns them.
        prompts: Also each agent's prompt.
    """
    return "\n".join(_lines(list(events), prompts))


def agent_costs(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What each agent cost: calls, tokens evaluated, reused, decoded and forced, and seconds.

    The seconds of a batch are shared out equally among its calls.
    """
    out: dict[str, dict[str, float]] = {}
    for event in events:
        if event.get("event") != "call":
            continue
        sums = out.setdefault(
            _agent(event), {"calls": 0, "evaluated": 0, "reused": 0, "decoded": 0, "forced": 0, "wall_s": 0.0}
        )
        sums["calls"] += 1
        for name, key in (("evaluated", "prefill"), ("reused", "reused"), ("decoded", "decoded"), ("forced", "forced")):
            sums[name] += int(_number(event.get(f"{key}_tokens")))
        sums["wall_s"] += _number(event.get("wall_s")) / max(1.0, _number(event.get("batch")))
    return out


def _lines(events: list[dict[str, Any]], prompts: bool) -> Iterator[str]:
    runs = [_Run()]
    ends: list[dict[str, Any]] = []
    for event in events:
        kind = event.get("event")
        if kind == "question":
            yield from _question(event)
        elif kind == "run":
            runs.append(_Run(f"Run       {_short(event.get('run'))} of {_short(event.get('of'))}"))
        elif kind in ("answer", "error"):
            ends.append(event)
        else:
            _file(runs[-1], event)
    for run in runs:
        if run.title:
            yield run.title
        yield from _run(run, prompts)
    for event in ends:
        yield from _ending(event)
    yield from _costs(agent_costs(events))


def _file(run: _Run, event: dict[str, Any]) -> None:
    """Puts an event where it belongs."""
    kind, name = event.get("event"), _node_of(event)
    if kind == "tool" or (kind == "call" and _agent(event) == "tools"):
        run.tools.append(event)
    elif kind in ("winner", "arbitration"):
        run.after.append(event)
    elif name is None:
        if kind in ("call", "tools", "root", "repair", "tool_failed"):
            run.before.append(event)
    elif kind == "call":
        run.node(name).calls.append(event)
    elif kind == "node":
        run.node(name).facts = event
    elif kind == "fate":
        run.node(name).fate = _short(event.get("fate"))
    elif kind in ("repair", "tool_failed"):
        run.node(name).notes.append(_note(event))


def _node_of(event: dict[str, Any]) -> str | None:
    """The node that an event belongs to: its own field, or the end of an agent's label."""
    name = event.get("node", str(event.get("role", "")).rpartition(" ")[2])
    return name if isinstance(name, str) and _NODE.fullmatch(name) else None


def _agent(event: dict[str, Any]) -> str:
    """The agent of a call, without its node or tool."""
    role = _short(event.get("role"))
    if role.startswith("tool "):
        return "tools"
    first, _, last = role.rpartition(" ")
    if _NODE.fullmatch(last) or first in ("TS", "SC"):
        return first or role
    return role


def _question(event: dict[str, Any]) -> Iterator[str]:
    frame, options = _mapping(event.get("frame")), _list(event.get("options"))
    yield f"Question  {_short(event.get('text'), 300)}"
    if options:
        yield f"Options   {_short(', '.join(_short(o, 60) for o in options), 600)}"
    yield (
        f"Asked     kind {_short(event.get('kind'))}, mode {_short(event.get('mode'))}, "
        f"seed {_short(event.get('seed'))}, profile {_short(event.get('profile'))}, "
        f"frame {_short(frame.get('width'))}x{_short(frame.get('height'))}"
    )


def _run(run: _Run, prompts: bool) -> Iterator[str]:
    for event in run.before:
        yield from _before(event, prompts)
    winner = next((e.get("node") for e in run.after if e.get("event") == "winner"), None)
    tops: list[str] = []
    for name in sorted(run.nodes, key=lambda n: [int(k) for k in n.split(".")]):
        parent = run.nodes.get(name.rpartition(".")[0])
        (tops if parent is None else parent.children).append(name)
    for name in tops:
        yield from _tree(run.nodes, name, "", prompts, winner)
    for event in run.tools:
        yield from _tool(event, prompts)
    for event in run.after:
        yield from _after(event)


def _before(event: dict[str, Any], prompts: bool) -> Iterator[str]:
    kind = event.get("event")
    if kind == "call":
        yield from _call(event, "", prompts)
    elif kind == "tools":
        active = [_short(name) for name in _list(event.get("active"))]
        yield f"Tools     {', '.join(active) if active else 'none active'}"
        for name, tip in _mapping(event.get("tips")).items():
            if tip:
                yield f"  tip for {_short(name)}: {_short(tip)}"
    elif kind == "root":
        yield (
            f"Root      S_init {_figure(event.get('s_init'))}, tau {_figure(event.get('tau'))}, "
            f"W {_figure(event.get('width'))}, a_0 {_short(event.get('answer'))}"
        )
    else:
        yield _note(event)


def _tree(nodes: dict[str, _Node], name: str, indent: str, prompts: bool, winner: object) -> Iterator[str]:
    node = nodes[name]
    facts = node.facts
    marks = [f"score {_figure(facts['score'])}"] if facts.get("score") is not None else []
    marks += [node.fate] if node.fate else []
    marks += ["WINNER"] if name == winner else []
    yield f"{indent}[{name}] {', '.join(marks)}".rstrip()
    inner = indent + "  "
    for line in str(facts.get("action", "")).splitlines():
        yield inner + _short(line)
    if facts.get("feedback"):
        yield f"{inner}Result: {_short(facts['feedback'], 240)}"
    for call in node.calls:
        # What SR said stands above already.
        said = facts and str(call.get("role")).startswith("SR ")
        yield from _call({**call, "output": "as above"} if said else call, inner, prompts)
    for note in node.notes:
        yield inner + note
    if facts:
        before, after = facts.get("previous"), facts.get("answer")
        changed = "kept" if before == after else f"was {_short(before)}"
        yield f"{inner}Answer: {_short(after)} ({changed})"
    for child in node.children:
        yield from _tree(nodes, child, inner, prompts, winner)


def _call(event: dict[str, Any], indent: str, prompts: bool) -> Iterator[str]:
    role, output = _short(event.get("role")), event.get("output")
    first, _, last = role.rpartition(" ")
    shown = first if _NODE.fullmatch(last) and first and indent else role
    options, chances = _list(event.get("options")), _list(event.get("probabilities"))
    sure = ""
    if output in options and options.index(output) < len(chances):
        sure = f" p={_number(chances[options.index(output)]):.2f}"
    if event.get("finish") == "length":
        sure += " (cut)"
    tokens = f"{_figure(event.get('prefill_tokens'))}+{_figure(event.get('reused_tokens'))} tokens"
    if _number(event.get("decoded_tokens")):
        tokens += f", {_figure(event.get('decoded_tokens'))} decoded"
    if prompts and event.get("prompt"):
        for line in str(event["prompt"]).splitlines():
            yield f"{indent}| {_short(line, 240)}"
    yield f"{indent}{shown}: {_short(output, 240)}{sure}  ({tokens})"


def _tool(event: dict[str, Any], prompts: bool) -> Iterator[str]:
    if event.get("event") == "call":
        yield from _call(event, "", prompts)
        return
    ended = "" if event.get("ok", True) else "failed, "
    arguments = ", ".join(f"{_short(k)}={_short(v, 80)}" for k, v in _mapping(event.get("arguments")).items())
    wall = _number(event.get("wall_s"))
    yield f"Tool      {_short(event.get('tool'))}({_short(arguments, 240)}): {ended}{wall:.3f} s"
    yield f"  {_short(event.get('text'), 240)}"


def _after(event: dict[str, Any]) -> Iterator[str]:
    if event.get("event") == "winner":
        scores = ", ".join(_figure(s) for s in _list(event.get("scores")))
        yield f"Winner    [{_short(event.get('node'))}] mean {_number(event.get('mean')):.2f} of {_short(scores, 240)}"
    else:
        yield (
            f"LA        [{_short(event.get('node'))}] says {_short(event.get('long_chain'))}; "
            f"answer {_short(event.get('before'))} -> {_short(event.get('after'))}"
        )


def _ending(event: dict[str, Any]) -> Iterator[str]:
    if event.get("event") == "error":
        yield f"Error     {_short(event.get('type'))}: {_short(event.get('message'), 300)}"
        return
    stats = _mapping(event.get("stats"))
    confidence = event.get("confidence")
    sure = "" if confidence is None else f", confidence {_number(confidence):.2f}"
    yield f"Answer    {_short(event.get('answer'), 300)} (exit {_short(event.get('exit'))}{sure})"
    for warning in _list(event.get("warnings")):
        yield f"Warning   {_short(warning, 300)}"
    counts = (
        ("mllm_calls", "MLLM calls"),
        ("tool_calls", "tool calls"),
        ("nodes", "nodes"),
        ("pruned", "pruned"),
        ("image_encodes", "image encodes"),
        ("prefill_tokens", "tokens evaluated"),
        ("reused_tokens", "reused"),
        ("decoded_tokens", "decoded"),
    )
    cost = ", ".join(f"{_figure(stats.get(key))} {label}" for key, label in counts)
    yield f"Cost      {_number(stats.get('wall_s')):.2f} s: {cost}"


def _costs(costs: dict[str, dict[str, float]]) -> Iterator[str]:
    if not costs:
        return
    yield f"{'Agent':9} {'calls':>6} {'evaluated':>10} {'reused':>9} {'decoded':>8} {'given':>7} {'seconds':>9}"
    for agent, c in costs.items():
        yield (
            f"{agent:9} {c['calls']:6.0f} {c['evaluated']:10.0f} {c['reused']:9.0f} {c['decoded']:8.0f} "
            f"{c['forced']:7.0f} {c['wall_s']:9.3f}"
        )


def _note(event: dict[str, Any]) -> str:
    where = " ".join(_short(event[k], 40) for k in ("role", "tool", "parameter") if event.get(k))
    return f"{_short(event.get('event'))}: {where + ': ' if where else ''}{_short(event.get('what'))}"


def _mapping(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> float:
    """A finite number; 0 for everything else, also for what no float can hold."""
    try:
        number = float(value) if isinstance(value, (int, float)) else 0.0
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _figure(value: object) -> str:
    return f"{_number(value):g}" if isinstance(value, float) else _short(0 if value is None else value)


def _short(value: object, limit: int = 120) -> str:
    """A value on one line, without control characters, cut to ``limit``."""
    text = "none" if value is None else str(value)[: 100 * limit]
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 2] + ".."
