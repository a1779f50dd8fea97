"""UAV-MAS: tool selection, search, verification, arbitration; and its ablations as settings."""

from __future__ import annotations

from collections.abc import Sequence

from ..mllm.base import Text
from ..tools import toolset
from ..tools.base import Perception, Tool
from . import agents, direct
from .cair import Branch, arbitrate, grow
from .daas import best, search, threshold
from .outcome import Outcome
from .session import Session
from .settings import Settings, for_mode
from .state import Belief
from .value import Value


def answer_in_mode(session: Session, mode: str) -> Outcome:
    """Answers in a mode of :data:`~hoverlens.runtime.reasoning.settings.MODES`."""
    return answer(session, for_mode(session.profile.reasoner, mode))


def answer(session: Session, settings: Settings, tools: Sequence[Tool] | None = None) -> Outcome:
    """Answers the question; with votes, several times with different draws.

    Args:
        tools: Instead of the settings' toolset.
    """
    available = toolset(settings.toolset) if tools is None else tools
    outcomes = []
    for run in range(settings.votes):
        session.run = run
        if settings.votes > 1:
            session.trace.emit("run", run=run + 1, of=settings.votes)
        outcomes.append(_once(session, settings, available))
    return majority(outcomes, settings.same_box_iou)


def majority(outcomes: list[Outcome], box_iou: float) -> Outcome:
    """The outcome whose answer most runs gave; of equals the first."""
    values = [o.value for o in outcomes]
    votes = [sum(v.same(w, box_iou) for w in values) for v in values]
    return outcomes[votes.index(max(votes))]


def _once(session: Session, settings: Settings, tools: Sequence[Tool]) -> Outcome:
    base = direct.answer(session)
    perception = session.perception
    chosen = agents.select_tools(session, settings, tools)
    active = [a for a in chosen if a.active]
    session.trace.emit(
        "tools",
        active=[a.tool.name for a in active],
        probabilities={a.tool.name: round(a.probability, 6) for a in chosen},
        tips={a.tool.name: a.tip for a in active},
        arguments={a.tool.name: dict(a.arguments) for a in active},
    )
    if not active:
        return base.ending("fallback")
    history = session.keep(session.shared.fork())
    told = (Text(agents.tools_text(session.prompt_version, active)),)
    history.append(*told)
    # Without CAIR the base answer is no belief of the chain: only SR's own answer counts.
    held = base.value if settings.cair and base.value.valid else None
    belief = Belief(held, confidence=base.confidence)
    root = Branch((), history, belief, told=told)
    if settings.daas:
        found = _searched(session, settings, perception, active, root, base.value)
    else:
        found = _chained(session, settings, perception, active, root)
    if found is None or found.answer is None:
        return base.ending("fallback")
    return Outcome(found.answer, found.confidence, base.probabilities)


def _searched(
    session: Session,
    settings: Settings,
    perception: Perception,
    active: list[agents.Activation],
    root: Branch,
    base: Value,
) -> Belief | None:
    """DAAS, then LA where the settings ask for it."""
    session.step("score")
    (choice,) = session.choose([agents.ask_base_score(session, base)])
    draw = session.draws(settings.agent_temperature, "SC")
    s_init = agents.read_score(settings, choice.probabilities.tolist(), draw)
    tau = threshold(s_init) if settings.difficulty else settings.fixed_tau
    root.scores = (s_init,)
    session.nodes += 1
    session.trace.emit("root", s_init=s_init, tau=tau, answer=base.text, width=min(settings.width, len(active)))
    paths = search(session, settings, perception, active, root, tau)
    try:
        if not paths:
            return None
        if settings.la == "each_path":
            beliefs = arbitrate(session, settings, paths)
            winner = best(paths)
            belief = beliefs[paths.index(winner)]
        else:
            winner = best(paths)
            belief = _concluded(session, settings, winner)
        session.trace.emit(
            "winner",
            node=agents.dotted(winner.path),
            mean=winner.mean_score,
            scores=list(winner.scores),
            paths=len(paths),
            answer=None if belief.answer is None else belief.answer.text,
        )
        return belief
    finally:
        for path in paths:
            session.drop(path.history)


def _chained(
    session: Session,
    settings: Settings,
    perception: Perception,
    active: list[agents.Activation],
    root: Branch,
) -> Belief:
    """Algorithm 1: one chain of at most ``depth`` steps; a chain without CAIR ends with SR's answer."""
    branch = root
    while not branch.final and branch.depth < settings.depth:
        branch = _next(session, settings, perception, active, branch)
    if not branch.final and not settings.cair:
        branch = _next(session, settings, perception, active, branch, last=True)
    belief = _concluded(session, settings, branch)
    session.drop(branch.history)
    return belief


def _next(
    session: Session,
    settings: Settings,
    perception: Perception,
    active: list[agents.Activation],
    branch: Branch,
    last: bool = False,
) -> Branch:
    (child,) = grow(session, settings, perception, active, [(branch, 0)], scored=False, last=last)
    session.drop(branch.history)
    return child


def _concluded(session: Session, settings: Settings, branch: Branch) -> Belief:
    """LA and arbitration over one branch, where the settings ask for them."""
    settled = branch.belief.confirmed >= settings.settled_after
    if settings.la == "never" or (settings.la == "unsettled" and settled):
        return branch.belief
    (belief,) = arbitrate(session, settings, [branch])
    return belief
