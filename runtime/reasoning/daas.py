"""Difficulty-aware adaptive search (arXiv 2608.11738, Algorithm 2).

The paper writes it as a recursion, one child after the other. Whether a child is pruned depends on its own
score and its parent's alone, so a level can be searched at once with the same result; that is what makes
siblings one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..tools.base import Perception
from .agents import Activation, dotted
from .cair import Branch, grow
from .session import Session
from .settings import Settings


def threshold(s_init: float) -> int:
    """tau: 2 for S_init of 0 to 3, 4 for 4 to 8, 6 for 9 and 10; between the bands it rounds half up."""
    s = math.floor(s_init + 0.5)
    return 2 if s <= 3 else 4 if s <= 8 else 6


def is_pruned(score: float, parent_score: float, tau: float) -> bool:
    """Eq. 5: only two consecutive weak nodes end a branch."""
    return score < tau and parent_score < tau


def best(paths: Sequence[Branch]) -> Branch:
    """Eq. 6: the path with the greatest mean node score; of equals the one that the recursion finds first."""
    return min(paths, key=lambda b: (-b.mean_score, b.path))


def search(
    session: Session,
    settings: Settings,
    perception: Perception,
    active: Sequence[Activation],
    root: Branch,
    tau: float,
) -> list[Branch]:
    """All paths with a valid answer, in the order of the recursion. The caller owns their histories.

    Args:
        root: With a_0, S_init and the history that holds the tools.
        tau: The pruning threshold.
    """
    width = min(settings.width, len(active))
    valid: list[Branch] = []
    opened = 0
    frontier = [root] if width else []
    while frontier:
        expanded = _within_budget(settings, frontier, width, opened)
        if len(expanded) < len(frontier):
            valid += _ended(session, settings, [b for b in frontier if b not in expanded])
        if not expanded:
            break
        parents = [(branch, k) for branch in expanded for k in range(width)]
        children = grow(session, settings, perception, active, parents)
        opened += len(children)
        session.nodes += len(children)
        following: list[Branch] = []
        for (parent, _), child in zip(parents, children, strict=True):
            fate = _fate(settings, child, parent, tau)
            session.trace.emit("fate", node=dotted(child.path), fate=fate, tau=tau)
            if fate in ("answer", "depth"):
                valid.append(child)
            elif fate == "open":
                following.append(child)
            else:
                session.pruned += fate == "pruned"
                session.drop(child.history)
        for branch in expanded:
            session.drop(branch.history)
        frontier = following
    return sorted(valid, key=lambda b: b.path)


def _within_budget(settings: Settings, frontier: list[Branch], width: int, opened: int) -> list[Branch]:
    """The open nodes that may still be expanded: with a limit on nodes, those with the best means."""
    if settings.max_nodes is None:
        return frontier
    room = (settings.max_nodes - opened) // width
    ranked = sorted(frontier, key=lambda b: (-b.mean_score, b.path))
    return sorted(ranked[: max(0, room)], key=lambda b: b.path)


def _ended(session: Session, settings: Settings, branches: Sequence[Branch]) -> list[Branch]:
    """What becomes of open nodes for which there is no room: a valid answer ends its path, the others are dropped."""
    warning = f"the search was limited to {settings.max_nodes} nodes (max_nodes); paths that were open ended there"
    if warning not in session.warnings:
        session.warnings.append(warning)
    valid = []
    for branch in branches:
        # The root's answer is the base answer: that is the fallback, not a path.
        ends = branch.belief.answer is not None and branch.depth > 0
        session.trace.emit("fate", node=dotted(branch.path), fate="budget" if ends else "discarded", tau=None)
        if ends:
            valid.append(branch)
        else:
            session.drop(branch.history)
    return valid


def _fate(settings: Settings, child: Branch, parent: Branch, tau: float) -> str:
    """What becomes of a child (lines 10 to 22): pruned, answer, depth, discarded or open."""
    if settings.pruning and is_pruned(child.score, parent.score, tau):
        return "pruned"
    has_answer = child.belief.answer is not None
    if child.final and has_answer:
        return "answer"
    if child.depth >= settings.depth:
        return "depth" if has_answer else "discarded"
    return "open"
