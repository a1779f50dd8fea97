"""On a board a search has a limit; what is open when it is reached still counts."""

from __future__ import annotations

import pytest

from .world import NAMES, Node, fake_tools, play, scripted

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
    assert any("6 nodes" in w for w in played.answer.warnings)


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
    from hoverlens.runtime.profiles import PROFILES

    assert PROFILES[profile].reasoner.max_nodes == limit
