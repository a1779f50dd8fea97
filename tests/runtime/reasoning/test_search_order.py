"""Searching level by level gives what Algorithm 2, written down as the paper has it, gives."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from .world import NAMES, WHAT, Node, fake_tools, play, scripted

TOOLS = fake_tools(NAMES[:3])


@dataclass
class Literal:
    """Algorithm 2, lines 5 to 32, as a recursion over answers and scores alone.

    Attributes:
        valid: V: (path, scores, answer) in the order in which they are found.
        visited: Every node in the order of the recursion.
    """

    nodes: dict[str, Node]
    width: int
    depth: int
    tau: int
    pruning: bool
    valid: list[tuple[str, list[int], str]] = field(default_factory=list)
    visited: list[str] = field(default_factory=list)

    def search(self, path: str, answer: str, scores: list[int], d: int) -> None:
        for k in range(1, self.width + 1):
            at = f"{path}.{k}" if path else str(k)
            self.visited.append(at)
            node = self.nodes[at]
            new = node.draft if node.trust and node.draft else answer  # Eq. 4, as far as the answer goes
            if self.pruning and node.score < self.tau and scores[-1] < self.tau:
                continue
            path_scores = [*scores, node.score]
            if node.final and new:
                self.valid.append((at, path_scores, new))
            elif d + 1 == self.depth:
                if new:
                    self.valid.append((at, path_scores, new))
            else:
                self.search(at, new, path_scores, d + 1)

    def winner(self) -> tuple[str, list[int], str] | None:
        best = None
        for found in self.valid:
            mean = Fraction(sum(found[1]), len(found[1]))
            if best is None or mean > best[0]:
                best = (mean, found)
        return best and best[1]


class RandomTree(dict[str, Node]):
    """Nodes that depend on a seed and their path alone. Few answers and scores, so that ties are frequent."""

    def __init__(self, seed: int, low: int) -> None:
        self.seed, self.low = seed, low

    def __missing__(self, path: str) -> Node:
        r = random.Random(f"{self.seed} {path}")
        return Node(
            score=r.choice([self.low, self.low + 1, 5, 5, 6]),
            draft=r.choice(["red", "blue", ""]),
            trust=r.random() < 0.7,
            final=r.random() < 0.35,
        )


@given(
    seed=st.integers(0, 10**6),
    s_init=st.integers(0, 10),
    base=st.sampled_from(["red", ""]),
    width=st.integers(1, 3),
    depth=st.integers(1, 4),
    low=st.integers(0, 4),
    pruning=st.booleans(),
    fixed=st.sampled_from([None, 0, 3, 5, 7]),
)
@example(seed=0, s_init=5, base="", width=3, depth=4, low=3, pruning=True, fixed=None)
def test_level_by_level_equals_the_recursion(
    seed: int, s_init: int, base: str, width: int, depth: int, low: int, pruning: bool, fixed: int | None
) -> None:
    tree = RandomTree(seed, low)
    tau = fixed if fixed is not None else 2 if s_init <= 3 else 4 if s_init <= 8 else 6
    literal = Literal(tree, width, depth, tau, pruning)
    literal.search("", base, [s_init], 0)
    played = play(
        scripted(tree.__getitem__, s_init, base, extra={"base": base}),
        WHAT,
        tools=TOOLS,
        width=width,
        depth=depth,
        pruning=pruning,
        difficulty=fixed is None,
        fixed_tau=-1 if fixed is None else fixed,
        la="never",
    )
    fates = played.fates()
    assert sorted(fates) == sorted(literal.visited)
    assert {p for p, fate in fates.items() if fate in ("answer", "depth")} == {p for p, *_ in literal.valid}
    assert played.answer is not None
    assert played.answer.stats.nodes == 1 + len(literal.visited)
    expected = literal.winner()
    if expected is None:
        assert (played.text, played.exit) == (base, "fallback")
        assert not played.all("winner")
    else:
        winner = played.one("winner")
        assert (winner["node"], winner["scores"], winner["answer"]) == expected
        assert (played.text, played.exit) == (expected[2], "complete")


def test_nodes_are_told_in_the_order_of_levels_and_paths() -> None:
    tree = RandomTree(3, 4)
    played = play(scripted(tree.__getitem__, 5), WHAT, tools=TOOLS, width=3, depth=3, pruning=False, la="never")
    order = [e["node"] for e in played.all("node")]
    assert order == sorted(order, key=lambda p: (p.count("."), [int(k) for k in p.split(".")]))
