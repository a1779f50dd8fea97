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
    frontier = [root] if width else []
    while frontier:
        expanded = _within_budget(session, settings, frontier, width, valid)
        if not expanded:
            break
        parents = [(branch, k) for branch in expanded for k in range(width)]
        children = grow(session, settings, perception, active, parents)
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
        for branch in frontier:
            if branch not in valid:
                session.drop(branch.history)
        frontier = following
    return sorted(valid, key=lambda b: b.path)


def _within_budget(
    session: Session, settings: Settings, frontier: list[Branch], width: int, valid: list[Branch]
) -> list[Branch]:
    """The open nodes that may still be expanded: with a limit on nodes, those with the best means.

    A node that may not ends its path where its answer is valid; without one it is dropped.
    """
    if settings.max_nodes is None:
        return frontier
    opened = max(0, session.nodes - 1)  # the root is no node that the search opened
    room = max(0, settings.max_nodes - opened) // width
    if len(frontier) <= room:
        return frontier
    ranked = sorted(frontier, key=lambda b: (-b.mean_score, b.path))
    for branch in ranked[room:]:
        fate = "budget" if branch.belief.answer is not None and branch.path else "discarded"
        session.trace.emit("fate", node=dotted(branch.path), fate=fate, tau=None)
        if fate == "budget":
            valid.append(branch)
        else:
            session.drop(branch.history)
    session.warnings.append(f"the search stopped at {opened} nodes (max_nodes {settings.max_nodes})")
    return sorted(ranked[:room], key=lambda b: b.path)


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
