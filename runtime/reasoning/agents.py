"""The agents: what each one sees, what it is asked, and how its words are read.

TS, PV, CI and SC fork from the shared prefix (image and question) and see nothing of any history; SR and LA
fork from a node's history (arXiv 2608.11738, sections IV-A to IV-C).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import prompts
from ..mllm.base import ChooseRequest, GenerateRequest, Part, Sampling, State, Text
from ..mllm.forms import Form, Free, Held, Literal, Pick, Piece
from ..question import Question
from ..tools.base import Feedback, Parameter, Tool
from .parse import parse_box, parse_boxes, valid_answer
from .session import Session, Thinker
from .settings import Settings
from .state import Belief, Draft
from .value import Value, of_options

YES, NO = "yes", "no"
SCORES = tuple(str(n) for n in range(11))
FINISH = "finish"
END = "no more"

# A model may write a box as UAVQA-Bench does (three decimals), on Qwen's grid of 0..1000, or as a list.
_BOX_RULES = r"""box ::= unit unit unit unit | grid grid grid grid | "[" int ", " int ", " int ", " int "]"
unit ::= "<" ("0." [0-9] [0-9] [0-9] | "1.000") ">"
grid ::= "<" int ">"
int ::= [0-9] | [1-9] [0-9] [0-9]? | "1000"
"""
BOX = "root ::= box\n" + _BOX_RULES
BOXES = 'root ::= (box (sep box){0,7})?\nsep ::= " "\n' + _BOX_RULES
BOX_TOKENS = 48


@dataclass(frozen=True)
class Activation:
    """What TS says of one tool.

    Attributes:
        arguments: Proposed values, as text; they fill in what SR leaves out.
        tip: How to use the tool for this question.
    """

    tool: Tool
    active: bool
    probability: float = 1.0
    arguments: Mapping[str, str] = field(default_factory=dict)
    tip: str = ""


@dataclass(frozen=True)
class Action:
    """What SR decides.

    Attributes:
        tool: None to finish.
        arguments: As text, by parameter.
        answer: With finish, or where SR drafts: a valid answer or None.
    """

    thought: str
    tool: Tool | None
    arguments: Mapping[str, str] = field(default_factory=dict)
    answer: Value | None = None
    confidence: float | None = None

    @property
    def final(self) -> bool:
        return self.tool is None

    def text(self) -> str:
        """A_t as every agent reads it."""
        if self.tool is None:
            return f"Action: {FINISH}({self.answer.text if self.answer else 'nothing'})"
        arguments = ", ".join(f"{k}={v}" for k, v in self.arguments.items() if v)
        return f"Action: {self.tool.name}({arguments})"

    def reason(self) -> str:
        """The thought as a line of its own; it stems from the history, so not every agent may read it."""
        return f"Thought: {self.thought}\n" if self.thought else ""


@dataclass(frozen=True)
class Step:
    """One step of a branch: A_t and F_t."""

    action: Action
    feedback: Feedback

    def parts(self, version: str, thought: bool = True) -> tuple[Part, ...]:
        """The step as prompt parts: text, and the picture that a tool gave."""
        text = prompts.fill("step", version, action=self.action.text(), feedback=self.feedback.text) + "\n"
        if thought:
            text = self.action.reason() + text
        if self.feedback.image is None:
            return (Text(text),)
        return (Text(text), self.feedback.image, Text("\n"))


# -- forms -------------------------------------------------------------------------------------------


def answer_pieces(question: Question, settings: Settings) -> Generator[Piece, str, None]:
    """The slots of an answer, after an opening quote; they end with the closing one."""
    if question.kind == "option":
        yield Pick("answer", question.options, end=unambiguous_end(question.options, '"'))
    elif question.kind == "options":
        stop = END
        while stop in question.options:
            stop += "."
        end = unambiguous_end((*question.options, stop), ",")
        left = list(question.options)
        first = True
        while left:
            chosen = yield Pick(f"answer{len(left)}", tuple(left) if first else (*left, stop), end=end)
            if chosen == stop:
                break
            # In the question's order, so that one set has one spelling.
            left = left[left.index(chosen) + 1 :]
            first = False
        yield Literal('"')
    elif question.kind == "box":
        yield Held("answer", BOX, BOX_TOKENS)
        yield Literal('"')
    else:
        yield Free("answer", settings.text_tokens)


def unambiguous_end(options: Sequence[str], preferred: str) -> str:
    """What ends each option: ``preferred``, unless an option with it is how another begins ("Yes" and "Yes, two")."""
    ended = [o + preferred for o in options]
    if not any(a != b and b.startswith(a) for a in ended for b in ended):
        return preferred
    used = set().union(*options)
    return next(c for c in map(chr, range(ord("|"), 0x110000)) if c.isprintable() and c not in used)


def read_answer(
    question: Question, slots: Mapping[str, str], probabilities: Mapping[str, float]
) -> tuple[Value | None, float | None, list[str]]:
    """An answer from filled slots: a valid value or None, its probability, and what was repaired."""
    if question.kind == "option":
        chosen = slots.get("answer")
        if chosen not in question.options:
            return None, None, []
        return of_options(question, (chosen,)), probabilities.get("answer"), []
    if question.kind == "options":
        names = [n for n in slots if n.startswith("answer")]
        picked = tuple(slots[n] for n in names if slots[n] in question.options)
        if not picked:
            return None, None, []
        probability = 1.0
        for name in names:
            probability *= probabilities.get(name, 1.0)
        return of_options(question, picked), probability, []
    if question.kind == "box":
        parsed = valid_answer(question, slots.get("answer", ""))
        if parsed.value is None:
            return None, None, [*parsed.repairs, parsed.reason or "no box"]
        return Value(parsed.value.text, box=parsed.value.box), None, list(parsed.repairs)
    text = clean(slots.get("answer", ""))
    return (Value(text) if text else None), None, []


def argument_pieces(parameters: Sequence[Parameter]) -> Generator[Piece, str, None]:
    """A tool's parameters as JSON members."""
    for p in parameters:
        yield Literal(f', "{p.name}": "')
        if p.kind == "text":
            yield Free(p.name, p.max_tokens)
        else:
            grammar = BOX if p.kind == "box" else BOXES
            tokens = BOX_TOKENS if p.kind == "box" else 8 * BOX_TOKENS
            yield Held(p.name, grammar, tokens)
            yield Literal('"')


def read_arguments(
    session: Session, tool: Tool, action: Mapping[str, str], proposed: Mapping[str, str], path: tuple[int, ...]
) -> dict[str, Any]:
    """A tool's arguments as values; what SR left out comes from TS. Repairs are traced."""
    values: dict[str, Any] = {}
    where = {"tool": tool.name, "node": dotted(path)}
    for p in tool.parameters:
        text = action.get(p.name, "").strip() or proposed.get(p.name, "").strip()
        if not text:
            continue
        if p.kind == "text":
            values[p.name] = " ".join(text.split())
            continue
        parsed = parse_box(text) if p.kind == "box" else parse_boxes(text)
        for repair in parsed.repairs:
            session.trace.emit("repair", what=repair, parameter=p.name, found=text[:200], **where)
        if parsed.value is None:
            session.trace.emit("repair", what=f"left out: {parsed.reason}", parameter=p.name, **where)
        else:
            values[p.name] = parsed.value
    return values


# -- TS ----------------------------------------------------------------------------------------------


def select_tools(session: Session, settings: Settings, tools: Sequence[Tool]) -> list[Activation]:
    """Asks which tools are active, each by an agent of its own, or one for all, or none."""
    if settings.activation == "all":
        return [Activation(tool, True) for tool in tools]
    session.step("select", tools=[tool.name for tool in tools])
    if settings.activation == "central":
        return _select_centrally(session, settings, tools)

    def form_for(tool: Tool) -> Form:
        def form() -> Generator[Piece, str, None]:
            yield Literal('{"use": "')
            use = yield Pick("use", (YES, NO))
            if use == YES:
                yield from argument_pieces(tool.parameters)
                yield Literal(', "tip": "')
                yield Free("tip", settings.tip_tokens)
            yield Literal("}")

        return form

    requests = [
        GenerateRequest(
            session.shared,
            suffix=session.suffix("ts", tool=tool.name, about=tool.about),
            max_tokens=4096,
            sampling=session.draws(settings.agent_temperature, "TS", i),
            form=form_for(tool),
            label=f"TS {tool.name}",
        )
        for i, tool in enumerate(tools)
    ]
    found = []
    for tool, result in zip(tools, session.generate(requests), strict=True):
        given = {p.name: clean(result.slots.get(p.name, "")) for p in tool.parameters}
        found.append(
            Activation(
                tool,
                result.slots.get("use") == YES,
                result.probabilities.get("use", 1.0),
                {name: text for name, text in given.items() if text},
                clean(result.slots.get("tip", "")),
            )
        )
    return found


def _select_centrally(session: Session, settings: Settings, tools: Sequence[Tool]) -> list[Activation]:
    def form() -> Generator[Piece, str, None]:
        yield Literal("{")
        for i, tool in enumerate(tools):
            yield Literal(f'{", " if i else ""}"{tool.name}": "')
            yield Pick(tool.name, (YES, NO))
        yield Literal("}")

    listed = "".join(f"- {tool.name}: {tool.about}\n" for tool in tools)
    request = GenerateRequest(
        session.shared,
        suffix=session.suffix("ts_central", tools=listed),
        max_tokens=1024,
        sampling=session.draws(settings.agent_temperature, "TS", 0),
        form=form,
        label="TS central",
    )
    result = session.generate([request])[0]
    return [Activation(t, result.slots.get(t.name) == YES, result.probabilities.get(t.name, 1.0)) for t in tools]


def tools_text(version: str, active: Sequence[Activation]) -> str:
    """The head of every history: the active tools with their usage tips."""
    lines = []
    for a in active:
        names = ", ".join(p.name for p in a.tool.parameters)
        proposed = ", ".join(f"{k}={v}" for k, v in a.arguments.items())
        hints = " ".join(h for h in (f"Tip: {a.tip}" if a.tip else "", f"({proposed})" if proposed else "") if h)
        lines.append(f"- {a.tool.name}({names}): {a.tool.about}{' ' + hints if hints else ''}\n")
    return prompts.fill("sr_tools", version, tools="".join(lines)) + "\n"


# -- SR ----------------------------------------------------------------------------------------------


def decide(
    session: Session,
    settings: Settings,
    active: Sequence[Activation],
    jobs: Sequence[tuple[State, tuple[int, ...]]],
    final: bool = False,
) -> list[Action]:
    """One action for each (history, path), as one batch.

    Args:
        active: The tools that may be used.
        jobs: A node's history, and the path of the child to be; siblings share the history and differ in
            their path, which seeds their draws.
        final: Only finishing is left.
    """
    by_name = {a.tool.name: a.tool for a in active}
    names = (FINISH,) if final else (*by_name, FINISH)
    drafts = settings.cair and not settings.pv

    def form() -> Generator[Piece, str, None]:
        yield Literal('{"thought": "')
        yield Free("thought", settings.thought_tokens)
        yield Literal(', "action": "')
        name = yield Pick("action", names)
        if name != FINISH:
            yield from argument_pieces(by_name[name].parameters)
        if name == FINISH or drafts:
            yield Literal(', "answer": "')
            yield from answer_pieces(session.question, settings)
        yield Literal("}")

    requests = [
        GenerateRequest(
            state,
            suffix=session.suffix("sr"),
            max_tokens=16384,
            sampling=session.draws(settings.temperature, "SR", *path),
            form=form,
            label=f"SR {dotted(path)}",
        )
        for state, path in jobs
    ]
    actions = []
    for (_, path), result in zip(jobs, session.generate(requests), strict=True):
        tool = by_name.get(result.slots.get("action", FINISH))
        answer, confidence, repairs = read_answer(session.question, result.slots, result.probabilities)
        for repair in repairs if tool is None or drafts else ():
            session.trace.emit("repair", what=repair, role="SR", node=dotted(path))
        names_of = tool.parameters if tool is not None else ()
        actions.append(
            Action(
                clean(result.slots.get("thought", "")),
                tool,
                {p.name: clean(result.slots.get(p.name, "")) for p in names_of},
                answer,
                confidence,
            )
        )
    return actions


# -- PV, CI, SC --------------------------------------------------------------------------------------


def verify(session: Session, settings: Settings, jobs: Sequence[tuple[State, tuple[int, ...]]]) -> list[Draft]:
    """PV: a draft answer and evidence from each step alone. ``jobs`` are step states and paths."""

    def form() -> Generator[Piece, str, None]:
        yield Literal('{"evidence": "')
        yield Free("evidence", settings.evidence_tokens)
        yield Literal(', "answer": "')
        yield from answer_pieces(session.question, settings)
        yield Literal("}")

    return _drafts(session, settings, "PV", "pv", form, jobs, "evidence")


def _drafts(
    session: Session,
    settings: Settings,
    role: str,
    template: str,
    form: Form,
    jobs: Sequence[tuple[State, tuple[int, ...]]],
    evidence: str,
    thinker: Thinker | None = None,
) -> list[Draft]:
    requests = [
        GenerateRequest(
            state,
            suffix=session.suffix(template, thinker.chat if thinker else None),
            max_tokens=16384,
            sampling=session.draws(settings.agent_temperature, role, *path),
            form=form,
            label=f"{role} {dotted(path)}",
        )
        for state, path in jobs
    ]
    drafts = []
    results = session.generate(requests, thinker.backend if thinker else None)
    for (_, path), result in zip(jobs, results, strict=True):
        answer, confidence, repairs = read_answer(session.question, result.slots, result.probabilities)
        for repair in repairs:
            session.trace.emit("repair", what=repair, role=role, node=dotted(path))
        drafts.append(Draft(answer, clean(result.slots.get(evidence, "")), confidence))
    return drafts


def ask_trust(session: Session, belief: Belief, draft: Draft, path: tuple[int, ...], role: str = "CI") -> ChooseRequest:
    """CI's request: the draft and its evidence against the answer so far and its clues; never F_t."""
    assert draft.answer is not None
    clues = "; ".join(belief.clues)
    return ChooseRequest(
        session.shared,
        (YES, NO),
        suffix=session.suffix(
            "ci",
            answer=belief.answer.text if belief.answer else "no answer",
            clues=f" ({clues})" if clues else "",
            draft=draft.answer.text,
            evidence=f" ({draft.evidence})" if draft.evidence else "",
        ),
        label=f"{role} {dotted(path)}",
        scoring="tree",
    )


def ask_score(session: Session, step_state: State, action: Action, path: tuple[int, ...]) -> ChooseRequest:
    """SC's request for a step, H' - H: the state has A_t and F_t, as PV saw them; the thought comes here."""
    suffix = session.suffix("sc", thought=action.reason())
    return ChooseRequest(step_state, SCORES, suffix=suffix, label=f"SC {dotted(path)}", scoring="tree")


def ask_base_score(session: Session, answer: Value) -> ChooseRequest:
    """SC's request for the base answer: S_init."""
    return ChooseRequest(
        session.shared,
        SCORES,
        suffix=session.suffix("sc_base", answer=answer.text),
        label="SC base",
        scoring="tree",
    )


def read_score(settings: Settings, probabilities: Sequence[float], draw: Sampling) -> float:
    """A score 0..10 from the probabilities of 0..10."""
    if settings.score == "expected":
        return sum(i * float(p) for i, p in enumerate(probabilities))
    return float(pick(probabilities, draw))


# -- LA ----------------------------------------------------------------------------------------------


def conclude(
    session: Session, settings: Settings, jobs: Sequence[tuple[State, tuple[Part, ...], tuple[int, ...]]]
) -> list[Draft]:
    """LA: an answer and a clue summary from whole histories, by the thinking model where there is one.

    Args:
        jobs: For each branch its history as a state, as parts, and its path.
    """
    thinker = session.thinker

    def form() -> Generator[Piece, str, None]:
        if thinker is None:
            yield Literal('{"reasoning": "')
            yield Free("reasoning", settings.la_tokens)
            yield Literal(', "answer": "')
        else:
            if not thinker.chat.after_user.rstrip().endswith("<think>"):
                yield Literal("<think>\n", special=True)
            yield Free("reasoning", settings.think_tokens, end="</think>", special=True)
            yield Literal('\n\n{"answer": "')
        yield from answer_pieces(session.question, settings)
        yield Literal(', "clues": "')
        yield Free("clues", settings.evidence_tokens)
        yield Literal("}")

    if thinker is None:
        return _drafts(session, settings, "LA", "la", form, [(state, path) for state, _, path in jobs], "clues")
    states = [session.thinking(*told) for _, told, _ in jobs]
    try:
        pairs = [(state, path) for state, (_, _, path) in zip(states, jobs, strict=True)]
        return _drafts(session, settings, "LA", "la", form, pairs, "clues", thinker)
    finally:
        for state in states:
            session.drop(state)


# -- small things ------------------------------------------------------------------------------------


def pick(probabilities: Sequence[float], draw: Sampling) -> int:
    """The most probable index, or a draw at the sampling's temperature."""
    import numpy as np

    from ..mllm.sampling import Sampler

    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(probabilities, dtype=np.float64)).astype(np.float32)
    return Sampler(draw).draw(logits)


def clean(text: str) -> str:
    """A slot's text on one line, without JSON's escapes and without control characters."""
    text = text.replace("\\n", " ").replace('\\"', '"')
    return " ".join(harmless(text).split())


def harmless(text: str, keep: str = "") -> str:
    """Text with spaces for control characters and for what makes a line read otherwise than it is written."""
    return "".join(c if c in keep or not _is_control(c) else " " for c in text)


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069"


def dotted(path: tuple[int, ...]) -> str:
    """A node's path as text: children counted from 1, the root is ``root``."""
    return ".".join(str(i + 1) for i in path) or "root"
