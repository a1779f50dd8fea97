"""Algorithm 1 of arXiv 2608.11738: steps, verification, arbitration; who is asked how often, and together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hoverlens.runtime.mllm.base import GenerateRequest
from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning import agents
from hoverlens.runtime.reasoning.session import stream_seed
from hoverlens.runtime.reasoning.settings import FAITHFUL, ONBOARD
from hoverlens.runtime.tools.base import Feedback, Parameter

from .world import COUNT, NAMES, WHAT, WHERE, WHICH, FakeTool, Node, Played, fake_tools, play, scripted

TWO_TOOLS = fake_tools(NAMES[:2])
ONE_TOOL = fake_tools(NAMES[:1])
A_BOX, B_BOX = "<0.100><0.100><0.200><0.200>", "<0.500><0.500><0.700><0.700>"
FINISH_TWO = {"1": Node(5, "two", final=True)}


def roles(played: Played) -> Counter[str]:
    return Counter(label.rpartition(" ")[0] or label for label, _ in played.backend.prompts)


# -- how often ---------------------------------------------------------------------------------------


def test_calls_are_base_and_s_init_and_five_ts_and_four_a_node() -> None:
    # W 2, D 2, nothing final, nothing pruned: 2 + 4 = 6 nodes. LA and its CI come on top.
    extra = {f"TS {name}": {"use": "no"} for name in NAMES[2:]}
    played = play(scripted({}, extra=extra), depth=2, la="never")
    assert roles(played) == {"base": 1, "TS": 5, "SC": 1 + 6, "SR": 6, "PV": 6, "CI": 6}
    assert played.answer is not None
    assert played.answer.stats.mllm_calls == 1 + 1 + 5 + 4 * 6
    assert played.answer.stats.nodes == 1 + 6
    # All six asked for different things: no tool ran twice for nothing, and none was left out.
    assert played.answer.stats.tool_calls == 6


def test_the_papers_count_is_reached_by_about_four_and_a_half_nodes() -> None:
    # Table VI: 25.6 calls = 1 base + 1 S_init + 5 TS + 4 n (+ LA and its CI once): n = 4.15 to 4.65.
    extra = {f"TS {name}": {"use": "no"} for name in NAMES[2:]}
    tree = {"1": Node(5), "1.1": Node(5, "two", final=True), "1.2": Node(5, "two", final=True), "2": Node(final=True)}
    played = play(scripted(tree, extra=extra | {"LA 2": {"answer": "one"}}), la="winner")
    assert played.answer is not None
    assert played.answer.stats.mllm_calls == 7 + 4 * 4 + 2


def test_ci_is_asked_about_valid_drafts_only() -> None:
    tree = {"1": Node(5, "no box here"), "2": Node(5, A_BOX)}
    played = play(scripted(tree, base=B_BOX), WHERE, tools=TWO_TOOLS, depth=1, la="never")
    assert set(played.prompts("PV")) == {"1", "2"}
    assert set(played.prompts("CI")) == {"2"}
    assert set(played.prompts("SC")) == {"base", "1", "2"}
    nodes = {e["node"]: e for e in played.all("node")}
    # An invalid draft leaves the state as it is.
    assert nodes["1"]["answer"] == nodes["1"]["previous"] == B_BOX
    assert nodes["2"]["answer"] == A_BOX


def test_a_box_close_to_the_standing_one_only_adds_its_clue() -> None:
    # Widths .100 and .090 of one height: IoU .9 >= .7.
    close = "<0.100><0.100><0.190><0.200>"
    played = play(scripted({"1": Node(5, close, final=True)}, base=A_BOX), WHERE, tools=ONE_TOOL, la="never")
    (node,) = played.all("node")
    assert (node["answer"], node["clues"]) == (A_BOX, ["evidence-1"])
    assert played.text == A_BOX


def test_boxes_are_compared_by_the_overlap_of_the_settings() -> None:
    close = "<0.100><0.100><0.190><0.200>"
    tree = scripted({"1": Node(5, close, final=True)}, base=A_BOX)
    assert play(tree, WHERE, tools=ONE_TOOL, la="never", same_box_iou=0.95).text == close


# -- together ----------------------------------------------------------------------------------------


def test_siblings_are_asked_in_batches_a_level() -> None:
    played = play(scripted({}), tools=TWO_TOOLS, depth=2, la="each_path", arbitrate_equal=True)
    level1, level2 = ["1", "2"], ["1.1", "1.2", "2.1", "2.2"]
    expected = [["base"], ["TS alpha", "TS beta"], ["SC base"]]
    for level in (level1, level2):
        expected += [
            [f"SR {p}" for p in level],
            [f"PV {p}" for p in level],
            [f"CI {p}" for p in level] + [f"SC {p}" for p in level],
        ]
    expected += [[f"LA {p}" for p in level2], [f"CI end {p}" for p in level2]]
    assert played.backend.batches == expected


def test_nobody_is_asked_for_nothing() -> None:
    # Without CI and scores there is nothing to choose; without valid drafts neither.
    played = play(scripted({}, base=B_BOX), WHERE, tools=ONE_TOOL, mode="no_daas", ci=False, la="never")
    assert all(played.backend.batches)
    played = play(scripted(lambda p: Node(5, "none"), base=B_BOX), WHERE, tools=ONE_TOOL, mode="no_daas", la="winner")
    assert all(played.backend.batches)
    assert played.calls("CI") == played.calls("CI end") == 0
    assert played.exit == "complete"


# -- LA ----------------------------------------------------------------------------------------------


def with_la(answer: str, trust: bool = True, tree: dict[str, Node] | None = None, **settings: Any) -> Played:
    tree = FINISH_TWO if tree is None else tree
    extra: dict[str, Any] = {}
    for path in ("1", "1.1", "2", "1.1.1"):
        extra[f"LA {path}"] = {"reasoning": "r", "answer": answer, "clues": f"summary-{path}"}
        extra[f"CI end {path}"] = "yes" if trust else "no"
    return play(scripted(tree, extra=extra), tools=TWO_TOOLS if "2" in tree else ONE_TOOL, **settings)


def test_las_answer_wins_where_ci_trusts_it() -> None:
    played = with_la("four", la="winner")
    assert played.text == "four"
    assert played.one("arbitration") | {"t": 0} == {
        "t": 0,
        "event": "arbitration",
        "node": "1",
        "long_chain": "four",
        "before": "two",
        "after": "four",
    }
    assert played.one("winner")["answer"] == "four"


def test_las_answer_loses_where_ci_does_not() -> None:
    played = with_la("four", trust=False, la="winner")
    assert played.text == "two"
    assert played.one("arbitration")["after"] == "two"


def test_ci_is_not_asked_whether_an_answer_equals_itself() -> None:
    assert with_la("two", la="winner").calls("CI end") == 0
    played = with_la("two", la="winner", arbitrate_equal=True)
    assert played.calls("CI end") == 1
    assert played.text == "two"
    assert with_la("two", trust=False, la="winner", arbitrate_equal=True).text == "two"


def test_an_invalid_long_chain_answer_changes_nothing() -> None:
    extra = {"LA 1": {"answer": "nowhere"}}
    tree = {"1": Node(5, A_BOX, final=True)}
    played = play(scripted(tree, base=B_BOX, extra=extra), WHERE, tools=ONE_TOOL, la="winner", arbitrate_equal=True)
    assert played.text == A_BOX
    assert played.calls("CI end") == 0
    assert played.one("arbitration")["long_chain"] is None


TWO_PATHS = {"1": Node(6, "two", final=True), "2": Node(5, "three", final=True)}


@pytest.mark.parametrize(
    ("la", "asked"), [("each_path", {"1", "2"}), ("winner", {"1"}), ("unsettled", {"1"}), ("never", set())]
)
def test_when_la_is_asked(la: str, asked: set[str]) -> None:
    played = with_la("four", tree=TWO_PATHS, la=la)
    assert set(played.prompts("LA")) == asked
    assert played.text == ("four" if asked else "two")
    assert [e["node"] for e in played.all("arbitration")] == sorted(asked)


def test_with_each_path_the_winners_own_arbitration_counts() -> None:
    # Path 2 has the greater mean; LA says four about 1 and one about 2.
    tree = {"1": Node(5, "two", final=True), "2": Node(6, "three", final=True)}
    extra = {"LA 1": {"answer": "four"}, "LA 2": {"answer": "one"}}
    assert play(scripted(tree, extra=extra), tools=TWO_TOOLS, la="each_path").text == "one"
    extra["CI end 2"] = "no"
    assert play(scripted(tree, extra=extra), tools=TWO_TOOLS, la="each_path").text == "three"


def chain(*trusted_same: bool) -> dict[str, Node]:
    """A chain of drafts "two" that ends by finishing; False is an untrusted step."""
    paths = [".".join(["1"] * (n + 1)) for n in range(len(trusted_same))]
    return {
        p: Node(5, "two", trust=t, final=n == len(paths) - 1)
        for n, (p, t) in enumerate(zip(paths, trusted_same, strict=True))
    }


@pytest.mark.parametrize(
    ("steps", "settled_after", "asked"),
    [
        ((True,), 2, 1),
        ((True, True), 2, 0),
        ((True, True), 3, 1),
        ((True, True, True), 2, 0),
        ((True, False), 2, 1),
        ((True, True, False), 2, 1),
        ((False, True, True), 2, 0),
    ],
)
def test_la_is_skipped_once_trusted_steps_in_a_row_kept_the_answer(
    steps: tuple[bool, ...], settled_after: int, asked: int
) -> None:
    for settings in ({}, {"daas": False}):
        played = with_la("two", tree=chain(*steps), la="unsettled", settled_after=settled_after, **settings)
        assert played.calls("LA") == asked, settings
        assert played.text == "two"


@pytest.mark.parametrize(("la", "asked"), [("each_path", 1), ("winner", 1), ("unsettled", 0), ("never", 0)])
def test_the_end_of_a_settled_chain(la: str, asked: int) -> None:
    played = with_la("four", tree=chain(True, True, True), la=la, daas=False)
    assert played.calls("LA") == asked
    assert played.text == ("four" if asked else "two")


@pytest.mark.parametrize("first", ["nowhere", A_BOX])
def test_a_path_without_arbitration_does_not_keep_others_from_theirs(first: str) -> None:
    # LA about path 1 gives no box, or the box that stands; about path 2, which wins, another one.
    tree = {"1": Node(5, A_BOX, final=True), "2": Node(6, A_BOX, final=True)}
    extra = {"LA 1": {"answer": first}, "LA 2": {"answer": B_BOX}}
    played = play(scripted(tree, base=A_BOX, extra=extra), WHERE, tools=TWO_TOOLS, la="each_path")
    assert set(played.prompts("CI end")) == {"2"}
    assert played.text == B_BOX


def test_the_faithful_profile_asks_la_for_each_path_and_ci_always() -> None:
    assert (FAITHFUL.la, FAITHFUL.arbitrate_equal) == ("each_path", True)
    assert (FAITHFUL.temperature, FAITHFUL.agent_temperature) == (0.7, 0.7)
    assert (FAITHFUL.depth, FAITHFUL.width) == (5, 3)
    assert (ONBOARD.la, ONBOARD.depth, ONBOARD.width, ONBOARD.temperature) == ("unsettled", 5, 3, 0.7)
    # Drawn at temperature 0.7, a certain score is itself and a certain yes is yes.
    sure = [0.0] * 11
    sure[7] = 1.0
    extra = {"SC 1": sure, "SC 2": sure, "CI 1": [1.0, 0.0], "CI 2": [1.0, 0.0]}
    extra |= {"CI end 1": [0.0, 1.0], "CI end 2": [0.0, 1.0], "SC base": [0.0] * 5 + [1.0] + [0.0] * 5}
    played = play(scripted(TWO_PATHS, extra=extra), tools=TWO_TOOLS, profile="faithful")
    assert played.calls("LA") == played.calls("CI end") == 2
    assert played.one("winner")["scores"] == [5, 7]
    assert played.text == "two"


# -- draws -------------------------------------------------------------------------------------------


def test_draws_depend_on_seed_run_role_and_path_alone() -> None:
    def seeds(seed: int) -> dict[str, int]:
        played = play(scripted({}), tools=TWO_TOOLS, depth=2, seed=seed, la="each_path")
        return {r.label: r.sampling.seed for r in played.backend.requests if isinstance(r, GenerateRequest)}

    first = seeds(3)
    assert first == seeds(3)
    assert first["SR 1"] == stream_seed(3, 0, "SR", 0)
    assert first["SR 2.1"] == stream_seed(3, 0, "SR", 1, 0)
    assert first["PV 1.2"] == stream_seed(3, 0, "PV", 0, 1)
    assert first["LA 1.1"] == stream_seed(3, 0, "LA", 0, 0)
    assert first["TS alpha"] == stream_seed(3, 0, "TS", 0)
    assert first["TS beta"] == stream_seed(3, 0, "TS", 1)
    assert len(set(first.values())) == len(first)
    assert not set(first.values()) & set(seeds(4).values())


def test_runs_of_a_vote_draw_differently() -> None:
    played = play(scripted({}), tools=ONE_TOOL, mode="vote3", depth=1)
    seeds = [r.sampling.seed for r in played.backend.requests if isinstance(r, GenerateRequest) and r.label == "SR 1"]
    assert seeds == [stream_seed(0, run, "SR", 0) for run in range(3)]


def test_only_sr_is_drawn_at_the_search_temperature() -> None:
    played = play(scripted({}), tools=ONE_TOOL, depth=1, la="winner", temperature=0.6, agent_temperature=0.2)
    found = {
        r.label.partition(" ")[0]: r.sampling.temperature
        for r in played.backend.requests
        if isinstance(r, GenerateRequest)
    }
    assert found == {"TS": 0.2, "SR": 0.6, "PV": 0.2, "LA": 0.2}


def test_streams_of_random_numbers_are_frozen() -> None:
    # Answers of one seed may change on purpose only.
    assert stream_seed(0, 0, "SR", 0) == 17403080211540968884
    assert stream_seed(5, 1, "CI end", 2, 0) == 13658094371287685959


# -- SR's decisions ----------------------------------------------------------------------------------


def test_arguments_come_from_sr_and_where_it_leaves_them_out_from_ts() -> None:
    tool = FakeTool("alpha")
    extra = {"SR 1": {"action": "alpha", "target": "said by SR"}, "SR 1.1": {"action": "alpha", "target": "  "}}
    play(scripted({}, extra=extra), tools=[tool], depth=2, la="never")
    assert tool.runs == [{"target": "said by SR"}, {"target": "proposed-alpha"}]


def test_an_argument_that_nobody_gave_is_left_out() -> None:
    tool = FakeTool("alpha", told=lambda arguments: Feedback(f"{len(arguments)} arguments"))
    extra = {"SR 1": {"action": "alpha"}, "TS alpha": {"use": "yes"}}
    played = play(scripted({}, extra=extra), tools=[tool], depth=1, la="never")
    assert tool.runs == [{}]
    assert played.one("node")["feedback"] == "0 arguments"
    assert played.one("node")["action"] == "Action: alpha()"


def test_a_final_step_runs_no_tool() -> None:
    played = play(scripted(FINISH_TWO), tools=ONE_TOOL, la="never")
    assert played.answer is not None
    assert played.answer.stats.tool_calls == 0
    (node,) = played.all("node")
    assert (node["final"], node["tool"]) == (True, None)
    assert "Action: finish(two)\nResult: the answer is proposed\n" in played.prompts("PV")["1"]


@pytest.mark.parametrize(
    ("question", "slots", "text"),
    [
        (COUNT, {"answer": "three"}, "three"),
        (WHICH, {"answer3": "bus", "answer1": "tram"}, "bus, tram"),
        (WHICH, {"answer3": "tram"}, "tram"),
        (WHICH, {"answer3": "car", "answer2": agents.END}, "car"),
        (WHICH, {"answer3": "car", "answer2": "bus", "answer1": agents.END}, "car, bus"),
        (WHERE, {"answer": A_BOX}, A_BOX),
        (WHERE, {"answer": "[100, 100, 200, 200]"}, A_BOX),
        (WHERE, {"answer": "<200><200><100><100>"}, A_BOX),
        (WHAT, {"answer": " a  bus\n"}, "a bus"),
    ],
)
def test_answers_of_every_kind(question: Any, slots: dict[str, str], text: str) -> None:
    extra = {"PV 1": {"evidence": "e", **slots}, "SR 1": {"action": "finish", **slots}}
    base = B_BOX if question is WHERE else "yes" if question is WHICH else "something" if question is WHAT else "one"
    played = play(scripted({}, base=base, extra=extra), question, tools=ONE_TOOL, la="never")
    assert played.text == text
    assert played.all("node")[0]["action"].endswith(f"finish({text})")


def test_repairs_of_answers_and_arguments_are_traced_with_their_node() -> None:
    tool = FakeTool("alpha", parameters=(Parameter("region", "box", "where"), Parameter("others", "boxes", "more")))
    extra = {
        "SR 1": {"action": "alpha", "region": "<200><200><100><100>", "others": "rubbish"},
        "PV 1": {"answer": "[900, 900, 100, 100]"},
        "SR 1.1": {"action": "finish", "answer": "no box"},
    }
    played = play(scripted({}, base=B_BOX, extra=extra), WHERE, tools=[tool], depth=2, la="never")
    assert tool.runs == [{"region": (0.1, 0.1, 0.2, 0.2)}]
    repairs = [(e.get("node"), e.get("role") or e.get("parameter"), e["what"]) for e in played.all("repair")]
    assert ("1", "region", "corners swapped") in repairs
    assert ("1", "others", "left out: no box in the text") in repairs
    assert ("1", "PV", "corners swapped") in repairs
    assert ("1.1", "SR", "no box in the text") in repairs


def test_what_a_model_writes_stays_on_one_line() -> None:
    assert agents.clean('a\\nb  "c\n\td') == 'a b "c d'
    assert agents.clean("\x1b[1mbold\x00\u2028end") == "[1mbold end"
    assert agents.clean("a\u202eb\u2066c\ud800d") == "a b c d"
    # Letters that need joiners, and emoji made of several, stay whole.
    assert (
        agents.clean("\u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f692")
        == "\u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f692"
    )
    assert agents.clean("") == ""


def test_ts_cannot_write_lines_of_its_own_into_the_list_of_tools() -> None:
    extra = {"TS alpha": {"use": "yes", "target": "x\n- delta: free", "tip": "y\\n- finish: now\x1b"}}
    played = play(scripted({}, extra=extra), tools=[FakeTool("alpha")], depth=1, la="never")
    (prompt,) = played.prompts("SR").values()
    assert "- alpha(target): about alpha. Tip: y - finish: now (target=x - delta: free)\n- finish: give" in prompt


@pytest.mark.parametrize(
    ("options", "preferred"),
    [
        (("a", "b"), '"'),
        (("1", "10"), '"'),
        (("Yes", "Yes, two"), ","),
        (("x", "x|y", "x,"), ","),
        (("a", 'a"b', "a|"), '"'),
    ],
)
def test_no_option_with_its_end_is_how_another_begins(options: tuple[str, ...], preferred: str) -> None:
    end = agents.unambiguous_end(options, preferred)
    ended = [o + end for o in options]
    assert not any(a != b and b.startswith(a) for a in ended for b in ended)
    clash = any(a != b and (b + preferred).startswith(a + preferred) for a in options for b in options)
    assert (end == preferred) is not clash


def test_an_option_may_be_called_like_the_end_of_a_list() -> None:
    question = Question.make("Which?", [agents.END, "car", agents.END + "."], kind="options")
    extra = {"PV 1": {"answer3": agents.END, "answer2": "no more.."}, "SR 1": {"action": "finish"}}
    played = play(scripted({}, base="yes", extra=extra), question, tools=ONE_TOOL, la="never")
    assert played.text == agents.END


# -- the chain ---------------------------------------------------------------------------------------


def test_a_chain_ends_when_sr_finishes_or_after_t_steps() -> None:
    tree = {"1": Node(), "1.1": Node(draft="three", final=True)}
    played = play(scripted(tree), tools=TWO_TOOLS, mode="no_daas", la="never")
    assert [e["node"] for e in played.all("node")] == ["1", "1.1"]
    assert played.text == "three"
    played = play(scripted({}), tools=TWO_TOOLS, mode="no_daas", la="never", depth=4)
    assert len(played.all("node")) == 4
    assert played.calls("SC") == 0
    assert played.answer is not None
    # A chain has steps, and no scored nodes.
    assert played.answer.stats.nodes == 0
    assert played.all("node")[0]["score"] is None


def test_a_chain_without_cair_is_made_to_finish_after_t_steps() -> None:
    says = {".".join(["1"] * n): Node(says="four") for n in range(1, 5)}
    played = play(scripted(says), tools=TWO_TOOLS, mode="react", depth=3)
    assert played.calls("SR") == 4
    assert [e["final"] for e in played.all("node")] == [False, False, False, True]
    assert played.text == "four"


def test_a_chain_without_cair_starts_from_no_answer() -> None:
    # SR's only answer is no box: the base answer is a fallback and not a result of the chain.
    tree = {"1": Node(says="none", final=True)}
    played = play(scripted(tree, base=B_BOX), WHERE, tools=ONE_TOOL, mode="react")
    assert (played.text, played.exit) == (B_BOX, "fallback")


# -- confidence --------------------------------------------------------------------------------------


def test_confidence_is_that_of_the_answer_that_stands() -> None:
    # The base answer: one with 0.6. Drafts come with 0.9.
    extra = {"base": [0.6, 0.2, 0.1, 0.1]}
    changed = play(scripted(FINISH_TWO, extra=extra), tools=ONE_TOOL, la="never").answer
    kept = play(scripted({"1": Node(trust=False, final=True)}, extra=extra), tools=ONE_TOOL, la="never").answer
    same = play(scripted({"1": Node(draft="one", final=True)}, extra=extra), tools=ONE_TOOL, la="never").answer
    assert changed is not None
    assert kept is not None
    assert same is not None
    assert (changed.answer, changed.confidence) == ("two", pytest.approx(0.9))
    assert (kept.answer, kept.confidence) == ("one", pytest.approx(0.6))
    assert (same.answer, same.confidence) == ("one", pytest.approx(0.6))
    assert changed.probabilities == dict(zip(COUNT.options, extra["base"], strict=True))
