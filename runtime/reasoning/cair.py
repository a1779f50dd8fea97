"""Context-aware iterative refinement: one verified step, for many branches at once.

arXiv 2608.11738, Algorithm 1, lines 5 to 13. Branches advance in lockstep: all SR calls are one batch, then
the tools, then all PV, then all CI and SC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..mllm.base import ChooseRequest, Part, State
from ..tools import run_tools
from ..tools.base import Feedback, Perception
from . import agents
from .agents import Activation, Step, dotted
from .session import Session
from .settings import Settings
from .state import Belief, Draft, update

FINISHED = "the answer is proposed"
MAX_FEEDBACK_CHARS = 2000
"""The tools say less; what a description by an MLLM may become has no other limit in characters."""


@dataclass
class Branch:
    """A node of the search with the path that leads to it.

    Attributes:
        path: Which child at each depth, from 0; empty at the root.
        history: H: shared prefix, tools, and the steps up to here.
        belief: (a, C).
        scores: Of every node from the root to here, the root's S_init first.
        final: SR finished here.
        told: The history as prompt parts, without the shared prefix, for a model that has not read it yet.
    """

    path: tuple[int, ...]
    history: State
    belief: Belief
    scores: tuple[float, ...] = ()
    final: bool = False
    told: tuple[Part, ...] = ()

    @property
    def depth(self) -> int:
        return len(self.path)

    @property
    def score(self) -> float:
        return self.scores[-1]

    @property
    def mean_score(self) -> float:
        return sum(self.scores) / len(self.scores)


def grow(
    session: Session,
    settings: Settings,
    perception: Perception,
    active: Sequence[Activation],
    parents: Sequence[tuple[Branch, int]],
    scored: bool = True,
    last: bool = False,
) -> list[Branch]:
    """One step for each (parent, child number); parents are not changed, children own their histories.

    Args:
        scored: Also ask SC.
        last: Only finishing is left (a chain that must end).
    """
    paths = [(*parent.path, k) for parent, k in parents]
    session.step("reason", depth=len(paths[0]), branches=len(paths))
    histories = [parent.history for parent, _ in parents]
    actions = agents.decide(session, settings, active, list(zip(histories, paths, strict=True)), final=last)
    feedback = _execute(session, settings, perception, active, actions, paths)
    steps = [Step(a, f) for a, f in zip(actions, feedback, strict=True)]
    step_states = [_step_state(session, step) for step in steps] if settings.cair or scored else []
    try:
        beliefs, scores = _verify(session, settings, [p.belief for p, _ in parents], steps, step_states, paths, scored)
    finally:
        for state in step_states:
            session.drop(state)
    children = []
    for (parent, _), path, step, belief, score in zip(parents, paths, steps, beliefs, scores, strict=True):
        history = session.keep(parent.history.fork())
        parts = step.parts(session.prompt_version)
        history.append(*parts)
        scores_so_far = parent.scores + ((score,) if scored else ())
        child = Branch(path, history, belief, scores_so_far, step.action.final, parent.told + parts)
        children.append(child)
        session.trace.emit(
            "node",
            node=dotted(path),
            action=step.action.reason() + step.action.text(),
            feedback=step.feedback.text,
            boxes=[list(b) for b in step.feedback.boxes],
            tool=None if step.action.tool is None else step.action.tool.name,
            tool_ok=step.feedback.ok,
            final=child.final,
            score=score if scored else None,
            answer=None if belief.answer is None else belief.answer.text,
            previous=None if parent.belief.answer is None else parent.belief.answer.text,
            clues=list(belief.clues),
        )
    return children


def _execute(
    session: Session,
    settings: Settings,
    perception: Perception,
    active: Sequence[Activation],
    actions: Sequence[agents.Action],
    paths: Sequence[tuple[int, ...]],
) -> list[Feedback]:
    """F_t of every action; the tools of all branches run together."""
    proposed = {a.tool.name: a.arguments for a in active}
    out = [Feedback(FINISHED) for _ in actions]
    jobs = []
    where = []
    for i, action in enumerate(actions):
        if action.tool is not None:
            arguments = agents.read_arguments(
                session, action.tool, action.arguments, proposed[action.tool.name], paths[i]
            )
            jobs.append((action.tool, arguments))
            where.append(i)
    if jobs:
        session.step("tools", tools=[tool.name for tool, _ in jobs])
        session.tool_calls += len(jobs)
        with session.timed_tools():
            results = run_tools(session, perception, jobs, timeout_s=settings.tool_timeout_s)
        for i, result in zip(where, results, strict=True):
            result = out[i] = replace(result, text=presentable(result.text))
            if not result.ok:
                session.trace.emit("tool_failed", node=dotted(paths[i]), what=result.text)
    return out


def presentable(text: str) -> str:
    """Feedback for prompts: no control characters, and not so long that it crowds out the history."""
    text = agents.harmless(text, keep="\n").strip()
    return text if len(text) <= MAX_FEEDBACK_CHARS else f"{text[:MAX_FEEDBACK_CHARS]} (cut)"


def _step_state(session: Session, step: Step) -> State:
    """Image, question, A_t and F_t: all that PV sees, and the beginning of what SC sees.

    Without SR's thought, which tells of the history.
    """
    state = session.keep(session.shared.fork())
    state.append(*step.parts(session.prompt_version, thought=False))
    return state


def _verify(
    session: Session,
    settings: Settings,
    before: Sequence[Belief],
    steps: Sequence[Step],
    step_states: Sequence[State],
    paths: Sequence[tuple[int, ...]],
    scored: bool,
) -> tuple[list[Belief], list[float]]:
    """PV, then CI and SC in one batch; the new beliefs and the scores."""
    drafts: list[Draft] = []
    if settings.cair:
        session.step("verify")
        if settings.pv:
            drafts = agents.verify(session, settings, list(zip(step_states, paths, strict=True)))
        else:
            drafts = [Draft(s.action.answer, s.action.thought, s.action.confidence) for s in steps]
    requests: list[ChooseRequest] = []
    asked: list[tuple[str, int]] = []
    if settings.cair and settings.ci:
        for i, draft in enumerate(drafts):
            if draft.answer is not None:  # an invalid draft cannot be trusted
                requests.append(agents.ask_trust(session, before[i], draft, paths[i]))
                asked.append(("CI", i))
    if scored:
        for i, state in enumerate(step_states):
            requests.append(agents.ask_score(session, state, steps[i].action, paths[i]))
            asked.append(("SC", i))
    trusted = dict.fromkeys(range(len(steps)), not settings.ci)
    scores = [0.0] * len(steps)
    for (role, i), choice in zip(asked, session.choose(requests) if requests else [], strict=True):
        draw = session.draws(settings.agent_temperature, role, *paths[i])
        if role == "CI":
            trusted[i] = agents.pick(choice.probabilities.tolist(), draw) == 0
        else:
            scores[i] = agents.read_score(settings, choice.probabilities.tolist(), draw)
    if settings.cair:
        beliefs = [
            update(b, d, trusted[i], settings.same_box_iou) for i, (b, d) in enumerate(zip(before, drafts, strict=True))
        ]
    else:
        beliefs = [
            Belief(s.action.answer, confidence=s.action.confidence) if s.action.final else b
            for b, s in zip(before, steps, strict=True)
        ]
    return beliefs, scores


def arbitrate(session: Session, settings: Settings, branches: Sequence[Branch]) -> list[Belief]:
    """LA over each branch's history, then CI between its answer and the branch's (lines 15 and 16)."""
    session.step("conclude", branches=len(branches))
    drafts = agents.conclude(session, settings, [(b.history, b.told, b.path) for b in branches])
    requests: list[ChooseRequest] = []
    asked: list[int] = []
    for i, (branch, draft) in enumerate(zip(branches, drafts, strict=True)):
        if draft.answer is None or not settings.ci:
            continue
        held = branch.belief.answer
        if held is not None and draft.answer.same(held, settings.same_box_iou) and not settings.arbitrate_equal:
            continue
        requests.append(agents.ask_trust(session, branch.belief, draft, branch.path, role="CI end"))
        asked.append(i)
    if settings.ci:
        out = [b.belief for b in branches]
        for i, choice in zip(asked, session.choose(requests) if requests else [], strict=True):
            draw = session.draws(settings.agent_temperature, "CI end", *branches[i].path)
            trusted = agents.pick(choice.probabilities.tolist(), draw) == 0
            out[i] = update(branches[i].belief, drafts[i], trusted, settings.same_box_iou)
    else:
        # The later answer stands, as every draft does.
        out = [update(b.belief, d, True, settings.same_box_iou) for b, d in zip(branches, drafts, strict=True)]
    for branch, draft, belief in zip(branches, drafts, out, strict=True):
        session.trace.emit(
            "arbitration",
            node=dotted(branch.path),
            long_chain=None if draft.answer is None else draft.answer.text,
            before=None if branch.belief.answer is None else branch.belief.answer.text,
            after=None if belief.answer is None else belief.answer.text,
        )
    return out
