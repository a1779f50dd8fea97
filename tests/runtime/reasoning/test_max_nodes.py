"""On a board a search has a limit; what is open when it is reached still counts."""

from __future__ import annotations

import pytest

from hoverlens.runtime.profiles import PROFILES

from .world import NAMES, WHERE, Node, fake_tools, play, scripted

BOX, NO_AREA = "<0.100><0.100><0.200><0.200>", "<0.100><0.100><0.100><0.200>"
THREE_TOOLS = fake_tools(NAMES[:3])


def test_no_more_nodes_are_opened_than_allowed_and_the_best_go_on() -> None:
    # S_init 5, W 3. Level 1 opens 3 nodes; 9 more would be 12, and 6 are allowed, so one node is expanded: 2 with
    # mean (5 + 9) / 2 = 7. The others end their paths with the answers they have.
    #
    #   root:5
    #   +- 1:6  (two)    mean 5.5
    #   +- 2:9  (three)  expanded
    #   |  +- 2.1:0  2.2:1  2.3:2!(four)   means 4.67, 5, 5.33
    #   +- 3:7  (one)    mean 6: the winner
    tree = {
        "1": Node(6, draft="two"),
        "2": Node(9, draft="three"),
        "3": Node(7, draft="one"),
        "2.1": Node(0, draft="four"),
        "2.2": Node(1, draft="four"),
        "2.3": Node(2, draft="four", final=True),
    }
    played = play(scripted(tree, s_init=5), tools=THREE_TOOLS, max_nodes=6, depth=4, la="never")
    assert {e["node"] for e in played.all("node")} == set(tree)
    fates = played.fates()
    assert (fates["1"], fates["3"]) == ("budget", "budget")
    assert fates["2.3"] == "answer"
    assert (fates["2.1"], fates["2.2"]) == ("budget", "budget")
    assert played.text == "one"
    assert played.answer is not None
    # Two levels were cut, and that is said once.
    assert ["limited to 6 nodes" in w for w in played.answer.warnings] == [True]


def test_an_open_node_without_a_valid_answer_is_dropped() -> None:
    # Room for 3 nodes is one level of three; at the next only a node with a box ends its path. 1 would win by score.
    tree = {"1": Node(9, "no box"), "2": Node(5, BOX), "3": Node(4, BOX)}
    played = play(scripted(tree, base=NO_AREA), WHERE, tools=THREE_TOOLS, max_nodes=5, la="each_path")
    assert played.fates() == {"1": "discarded", "2": "budget", "3": "budget"}
    assert played.one("winner")["node"] == "2"
    assert set(played.prompts("LA")) == {"2", "3"}


@pytest.mark.parametrize(
    ("limit", "opened"), [(2, 0), (3, 3), (5, 3), (6, 6), (8, 6), (9, 9), (12, 12), (23, 21), (39, 39)]
)
def test_whole_families_are_opened_up_to_the_limit(limit: int, opened: int) -> None:
    # A full tree of width 3 and depth 3 has 3 + 9 + 27 = 39 nodes. Within 21 of 23: 3, then 9, then 9 of 27.
    played = play(scripted(lambda path: Node(5)), tools=THREE_TOOLS, max_nodes=limit, depth=3, la="never")
    assert len(played.all("node")) == opened
    assert played.answer is not None
    assert bool(played.answer.warnings) == (limit < 39)


def test_of_equal_nodes_the_first_of_the_recursion_goes_on() -> None:
    tree = {"1": Node(5), "2": Node(5), "3": Node(5)}
    played = play(scripted(tree), tools=THREE_TOOLS, max_nodes=6, depth=2, la="never")
    assert [n for n in played.fates() if "." in n] == ["1.1", "1.2", "1.3"]


def test_every_run_of_a_vote_has_the_limit_for_itself() -> None:
    played = play(scripted({}), tools=THREE_TOOLS, max_nodes=3, depth=2, votes=2, la="never")
    assert [e["node"] for e in played.all("node")] == ["1", "2", "3"] * 2
    assert played.answer is not None
    assert len(played.answer.warnings) == 1


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    tree = {str(i): Node(8, draft="two", final=True) for i in (1, 2, 3)}
    limited = play(scripted(tree), tools=THREE_TOOLS, max_nodes=3)
    free = play(scripted(tree), tools=THREE_TOOLS)
    assert limited.answer is not None
    assert free.answer is not None
    assert limited.answer.same_as(free.answer)
    assert not limited.answer.warnings


def test_no_room_for_even_one_level_gives_the_first_look() -> None:
    played = play(scripted({}), tools=THREE_TOOLS, max_nodes=2)
    assert played.all("node") == []
    assert played.exit == "fallback"


@pytest.mark.parametrize(("profile", "limit"), [("onboard", 24), ("faithful", None)])
def test_only_the_onboard_profile_has_a_limit(profile: str, limit: int | None) -> None:
    assert PROFILES[profile].reasoner.max_nodes == limit
