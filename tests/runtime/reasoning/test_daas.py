"""Algorithm 2 of arXiv 2608.11738 on trees written down by hand.

In the drawings a node is ``path:score``, ``!`` finishes, and (x) is its answer. W is the number of tools.
"""

from __future__ import annotations

import pytest

from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning.daas import is_pruned, threshold

from .world import NAMES, WHERE, Node, Played, fake_tools, play, scripted

TWO_TOOLS = fake_tools(NAMES[:2])
ONE_TOOL = fake_tools(NAMES[:1])


@pytest.mark.parametrize(
    ("s_init", "tau"), [(0, 2), (1, 2), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (7, 4), (8, 4), (9, 6), (10, 6)]
)
def test_three_bands_of_thresholds(s_init: int, tau: int) -> None:
    assert threshold(s_init) == tau
    played = play(scripted({}, s_init=s_init), depth=1, la="never")
    assert played.one("root") | {"t": 0} == {
        "t": 0,
        "event": "root",
        "s_init": s_init,
        "tau": tau,
        "answer": "one",
        "width": 3,
    }
    assert {e["tau"] for e in played.all("fate")} == {tau}


@pytest.mark.parametrize(("s_init", "tau"), [(3.49, 2), (3.5, 4), (8.49, 4), (8.5, 6), (0.0, 2), (9.99, 6)])
def test_between_the_bands_scores_round_half_up(s_init: float, tau: int) -> None:
    assert threshold(s_init) == tau


@pytest.mark.parametrize(
    ("score", "parent", "pruned"),
    [(3, 3, True), (3, 4, False), (4, 3, False), (4, 4, False), (0, 0, True), (3.99, 3.99, True), (3, 10, False)],
)
def test_only_two_consecutive_scores_strictly_below_tau_prune(score: float, parent: float, pruned: bool) -> None:
    assert is_pruned(score, parent, 4) is pruned


def test_pruning_needs_two_weak_nodes_in_a_row() -> None:
    # S_init 5, tau 4, D 3, W 1 child each unless drawn.
    #
    #   root:5
    #   +- 1:3      weak child of a strong parent: survives
    #   |  +- 1.1:4!(two)    strong child of a weak parent: survives; mean (5 + 3 + 4) / 3 = 4
    #   |  +- 1.2:3          weak child of a weak parent: pruned
    #   +- 2:4      not below tau: strong
    #      +- 2.1:3!(three)  mean (5 + 4 + 3) / 3 = 4: a tie, and 1.1 comes first
    #      +- 2.2:0          strong parent: survives
    #         +- 2.2.1:3     pruned
    #         +- 2.2.2:4     depth 3 = D: ends a path; mean (5 + 4 + 0 + 4) / 4 = 3.25
    tree = {
        "1": Node(3),
        "1.1": Node(4, "two", final=True),
        "1.2": Node(3),
        "2": Node(4),
        "2.1": Node(3, "three", final=True),
        "2.2": Node(0),
        "2.2.1": Node(3),
        "2.2.2": Node(4, "four"),
    }
    played = play(scripted(tree), tools=TWO_TOOLS, depth=3, la="never")
    assert played.fates() == {
        "1": "open",
        "2": "open",
        "1.1": "answer",
        "1.2": "pruned",
        "2.1": "answer",
        "2.2": "open",
        "2.2.1": "pruned",
        "2.2.2": "depth",
    }
    winner = played.one("winner")
    assert (winner["node"], winner["mean"], winner["scores"], winner["paths"]) == ("1.1", 4.0, [5, 3, 4], 3)
    assert played.text == "two"
    assert played.exit == "complete"
    assert played.answer is not None
    assert (played.answer.stats.nodes, played.answer.stats.pruned) == (9, 2)


def test_a_weak_root_and_a_weak_child_are_two_weak_nodes() -> None:
    # S_init 1, tau 2.  root:1 +- 1:1 pruned (1 < 2 and 1 < 2)   +- 2:2!(two) mean (1 + 2) / 2 = 1.5
    tree = {"1": Node(1, "three", final=True), "2": Node(2, "two", final=True)}
    played = play(scripted(tree, s_init=1), tools=TWO_TOOLS, la="never")
    assert played.fates() == {"1": "pruned", "2": "answer"}
    assert played.text == "two"


def test_a_pruned_node_is_never_an_answer_even_when_it_is_final() -> None:
    # S_init 2, tau 2: root is not weak. root:2 +- 1:1 +- 1.1:1!(two) pruned although final.
    tree = {"1": Node(1), "1.1": Node(1, "two", final=True)}
    played = play(scripted(tree, s_init=2), tools=ONE_TOOL)
    assert played.fates() == {"1": "open", "1.1": "pruned"}
    assert (played.text, played.exit) == ("one", "fallback")


def test_the_root_counts_in_the_mean() -> None:
    # S_init 0, tau 2.
    #   root:0 +- 1:6!(two)                        mean (0 + 6) / 2     = 3; without the root 6
    #          +- 2:6 +- 2.1:4!(three)             mean (0 + 6 + 4) / 3 = 3.33; without the root 5
    tree = {"1": Node(6, "two", final=True), "2": Node(6), "2.1": Node(4, "three", final=True), "2.2": Node(0)}
    played = play(scripted(tree, s_init=0), tools=TWO_TOOLS, depth=2, la="never")
    assert played.one("winner")["scores"] == [0, 6, 4]
    assert played.text == "three"


def test_the_whole_path_decides_and_not_its_last_node() -> None:
    # S_init 5, tau 4.
    #   root:5 +- 1:2 +- 1.1:10!(two)    mean (5 + 2 + 10) / 3 = 5.667, best leaf
    #          +- 2:7 +- 2.1:6!(three)   mean (5 + 7 + 6) / 3  = 6, best path
    tree = {
        "1": Node(2),
        "1.1": Node(10, "two", final=True),
        "1.2": Node(1),
        "2": Node(7),
        "2.1": Node(6, "three", final=True),
        "2.2": Node(0),
    }
    played = play(scripted(tree), tools=TWO_TOOLS, depth=2, la="never")
    assert played.one("winner")["node"] == "2.1"
    assert played.text == "three"


def test_ties_go_to_the_path_that_the_recursion_finds_first() -> None:
    # S_init 6, tau 4; all means are 6 but that of 1.1.1. The recursion goes down before it goes on, so it finds
    # 1.1.2 first; level by level 2 and 3 would be first.
    #   root:6 +- 1:6 +- 1.1:6 +- 1.1.1:5(four), 1.1.2:6(two), 1.1.3:6(four) at depth D
    #          |      +- 1.2:6!(three)
    #          +- 2:6!(four)  +- 3:6!(four)
    tree = {
        "1": Node(6),
        "1.1": Node(6),
        "1.1.1": Node(5, "four"),
        "1.1.2": Node(6, "two"),
        "1.1.3": Node(6, "four"),
        "1.2": Node(6, "three", final=True),
        "1.3": Node(6, "four", final=True),
        "2": Node(6, "four", final=True),
        "3": Node(6, "four", final=True),
    }
    played = play(scripted(tree, s_init=6), depth=3, la="never")
    assert played.one("winner")["node"] == "1.1.2"
    assert played.text == "two"


def test_a_valid_answer_at_depth_d_ends_a_path_and_above_it_goes_on() -> None:
    # D 2: 1 and 2 are valid but not final, so they go on; their children end paths at the depth limit.
    #   root:5 +- 1:6 +- 1.1:6(two) mean 5.667   +- 1.2:5(two)
    #          +- 2:5 +- 2.1:5(three)            +- 2.2:5(three)
    tree = {p: Node(5, "two" if p[0] == "1" else "three") for p in ("1", "2", "1.1", "1.2", "2.1", "2.2")}
    tree["1"], tree["1.1"] = Node(6, "two"), Node(6, "two")
    played = play(scripted(tree), tools=TWO_TOOLS, depth=2, la="never")
    assert played.fates() == {
        "1": "open",
        "2": "open",
        "1.1": "depth",
        "1.2": "depth",
        "2.1": "depth",
        "2.2": "depth",
    }
    assert played.one("winner")["node"] == "1.1"


NOWHERE = "nothing here"
A_BOX, B_BOX = "<0.100><0.100><0.200><0.200>", "<0.500><0.500><0.700><0.700>"


def boxes(tree: dict[str, Node], depth: int) -> Played:
    # The base box has no area, so that the root has no valid answer to fall back upon.
    return play(scripted(tree, base="<0.100><0.100><0.100><0.200>"), WHERE, tools=TWO_TOOLS, la="never", depth=depth)


def test_an_invalid_answer_at_depth_d_is_discarded() -> None:
    #   root:5(none) +- 1:9(none) discarded    +- 2:5(box) ends a path
    played = boxes({"1": Node(9, NOWHERE), "2": Node(5, A_BOX)}, depth=1)
    assert played.fates() == {"1": "discarded", "2": "depth"}
    assert played.text == A_BOX
    assert played.answer is not None
    assert played.answer.stats.pruned == 0


def test_a_final_but_invalid_answer_goes_on_searching() -> None:
    #   root:5(none) +- 1:9!(none) -> open +- 1.1:5!(box) mean (5 + 9 + 5) / 3   +- 1.2:5(none) discarded at D
    #                +- 2:5!(box B) mean 5
    tree = {
        "1": Node(9, NOWHERE, final=True),
        "1.1": Node(5, A_BOX, final=True),
        "1.2": Node(5, NOWHERE),
        "2": Node(5, B_BOX, final=True),
    }
    played = boxes(tree, depth=2)
    assert played.fates() == {"1": "open", "2": "answer", "1.1": "answer", "1.2": "discarded"}
    assert played.text == A_BOX


def test_a_final_but_invalid_answer_at_depth_d_is_discarded() -> None:
    played = boxes({"1": Node(9, NOWHERE, final=True), "2": Node(9, NOWHERE, final=True)}, depth=1)
    assert played.fates() == {"1": "discarded", "2": "discarded"}
    assert played.exit == "fallback"
    assert not played.all("winner")


def test_an_untrusted_draft_keeps_the_answer_of_the_parent() -> None:
    #   root(one) +- 1(two) trusted +- 1.1!(three) not trusted: ends with "two"
    tree = {"1": Node(5, "two"), "1.1": Node(5, "three", trust=False, final=True)}
    assert play(scripted(tree), tools=ONE_TOOL, la="never").text == "two"


def test_all_pruned_falls_back_to_the_base_answer() -> None:
    # S_init 3, tau 2, root not weak; root:3 +- 1:1 +- 1.1:1 pruned ...: D 5, but nothing is left after two levels.
    played = play(scripted(lambda path: Node(1, "two"), s_init=3), tools=TWO_TOOLS)
    assert set(played.fates().values()) == {"open", "pruned"}
    assert [p for p, fate in played.fates().items() if fate == "open"] == ["1", "2"]
    assert (played.text, played.exit) == ("one", "fallback")
    assert played.answer is not None
    assert played.answer.stats.pruned == 4
    assert played.answer.confidence == pytest.approx(0.9)
    assert played.answer.probabilities is not None


def test_no_active_tool_means_no_search() -> None:
    extra = {f"TS {name}": {"use": "no"} for name in NAMES}
    played = play(scripted({}, extra=extra))
    assert (played.text, played.exit) == ("one", "fallback")
    assert played.calls("SR") == played.calls("SC") == 0
    assert played.answer is not None
    assert (played.answer.stats.nodes, played.answer.stats.mllm_calls) == (0, 1 + 5)


def test_a_width_of_nothing_is_no_search() -> None:
    played = play(scripted({}), width=0)
    assert (played.text, played.exit) == ("one", "fallback")
    assert not played.all("node")


@pytest.mark.parametrize(("active", "width", "expected"), [(1, 3, 1), (2, 3, 2), (3, 3, 3), (5, 3, 3), (5, 2, 2)])
def test_the_width_is_three_or_the_number_of_active_tools(active: int, width: int, expected: int) -> None:
    extra = {f"TS {name}": {"use": "no"} for name in NAMES[active:]}
    played = play(scripted({}, extra=extra), depth=1, width=width, la="never")
    assert list(played.fates()) == [str(k + 1) for k in range(expected)]
    assert played.one("root")["width"] == expected


def test_the_winning_answer_is_that_of_the_leaf() -> None:
    tree = {"1": Node(5, "two"), "1.1": Node(5, "three"), "1.1.1": Node(5, "four", final=True)}
    played = play(scripted(tree), tools=ONE_TOOL, la="never")
    assert played.text == "four"
    assert played.answer is not None
    # PV's answer came with the probability of its pick.
    assert played.answer.confidence == pytest.approx(0.9)


def test_the_expected_score_counts_where_it_is_asked_for() -> None:
    # SC gives half to 4 and half to 5: the likeliest is 4 (first of equals), the mean 4.5.
    half = [0.0] * 4 + [0.5, 0.5] + [0.0] * 5
    extra = {"SC 1": half, "SC base": [0.0] * 8 + [0.5, 0.5, 0.0]}
    likeliest = play(scripted({"1": Node(final=True)}, extra=extra), tools=ONE_TOOL)
    assert likeliest.one("winner")["scores"] == [8.0, 4.0]
    assert likeliest.one("root")["tau"] == 4
    expected = play(scripted({"1": Node(final=True)}, extra=extra), tools=ONE_TOOL, score="expected")
    assert expected.one("winner")["scores"] == pytest.approx([8.5, 4.5])
    assert expected.one("root")["tau"] == 6


def test_every_question_kind_can_be_searched() -> None:
    box = Question.make("Where?", kind="box")
    played = play(scripted({"1": Node(7, A_BOX, final=True)}, base=B_BOX), box, tools=ONE_TOOL, la="never")
    assert played.text == A_BOX
    assert played.answer is not None
    assert played.answer.box == (0.1, 0.1, 0.2, 0.2)
    assert played.answer.confidence is None
