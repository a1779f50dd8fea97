"""Every mode does what its line in the tables of arXiv 2608.11738 says, and differs by settings alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest

from hoverlens.runtime import pipeline
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.profiles import PROFILES
from hoverlens.runtime.question import Question
from hoverlens.runtime.reasoning import uavmas
from hoverlens.runtime.reasoning.outcome import Outcome
from hoverlens.runtime.reasoning.settings import FAITHFUL, MODES, ONBOARD, Settings, for_mode
from hoverlens.runtime.reasoning.uavmas import majority
from hoverlens.runtime.reasoning.value import Value
from hoverlens.runtime.tools import toolset

from .scripted import ScriptedBackend
from .world import CHAT, COUNT, FRAME, NAMES, WHAT, WHERE, WHICH, Node, Played, fake_tools, play, scripted

A_BOX = "<0.100><0.100><0.200><0.200>"
QUESTIONS: dict[str, tuple[Question, str]] = {
    "option": (COUNT, "one"),
    "options": (WHICH, "yes"),
    "box": (WHERE, A_BOX),
    "text": (WHAT, "a tower"),
}


def roles(played: Played) -> Counter[str]:
    return Counter(label.rpartition(" ")[0] or label for label, _ in played.backend.prompts)


def small(mode: str, tree: dict[str, Node] | None = None, **more: Any) -> Played:
    """W 2, D 2, alpha and beta active wherever TS is asked."""
    extra = {f"TS {name}": {"use": "no"} for name in NAMES[2:]}
    extra["TS central"] = {name: "yes" if name in NAMES[:2] else "no" for name in NAMES}
    extra |= more.pop("extra", {})
    return play(scripted(tree or {}, extra=extra), mode=mode, depth=2, **more)


@pytest.mark.parametrize("kind", sorted(QUESTIONS))
@pytest.mark.parametrize("profile", ["onboard", "faithful"])
@pytest.mark.parametrize("mode", sorted(pipeline.MODES))
def test_every_mode_answers_every_kind_of_question(mode: str, profile: str, kind: str) -> None:
    question, base = QUESTIONS[kind]
    draft = A_BOX if kind == "box" else "a tower"
    script = scripted(lambda path: Node(draft=draft, final="." in path), base=base)

    def fitting(label: str, prompt: str) -> Any:
        said = script(label, prompt)
        if isinstance(said, dict) and kind in ("option", "options"):
            # No draft is an option of these questions: the first one is picked.
            return {k: v for k, v in said.items() if k != "answer"}
        return said

    played = play(fitting, question, mode=mode, profile=profile)
    assert played.answer is not None, played.error
    assert played.exit == "complete"
    assert played.answer.kind == kind
    assert played.answer.mode == mode
    assert played.answer.answer
    assert (played.answer.box is not None) == (kind == "box")
    assert set(played.answer.options) <= set(question.options)


def test_uavmas_changes_nothing_of_the_profile() -> None:
    assert MODES["uavmas"] == {}
    assert for_mode(ONBOARD, "uavmas") == ONBOARD
    assert for_mode(FAITHFUL, "uavmas") == FAITHFUL


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_mode_is_nothing_but_settings(mode: str) -> None:
    assert set(MODES[mode]) <= {f.name for f in fields(Settings)}
    assert mode in pipeline.MODES


def test_full_system_asks_every_agent() -> None:
    expected = {"base": 1, "TS": 5, "SC": 7, "SR": 6, "PV": 6, "CI": 6, "LA": 1, "CI end": 1}
    assert roles(small("uavmas", la="winner")) == expected


def test_no_pv_lets_sr_draft() -> None:
    tree = {"1": Node(draft="three", says="two"), "1.1": Node(draft="three", says="four", final=True)}
    played = small("no_pv", tree, la="never", width=1)
    assert roles(played) == {"base": 1, "TS": 5, "SC": 3, "SR": 2, "CI": 2}
    nodes = {e["node"]: e for e in played.all("node")}
    assert (nodes["1"]["answer"], nodes["1"]["clues"]) == ("two", ["thought-1"])
    assert played.text == "four"


def test_no_pv_traces_what_was_repaired_in_srs_drafts() -> None:
    tree = {"1": Node(says="[200, 200, 100, 100]")}
    played = play(scripted(tree, base=A_BOX), WHERE, mode="no_pv", depth=1, width=1, la="never")
    assert {(e["node"], e["role"]) for e in played.all("repair")} == {("1", "SR")}
    # With PV, SR of a step that calls a tool gives no answer, and that is no repair.
    played = play(scripted(tree, base=A_BOX), WHERE, depth=1, width=1, la="never")
    assert {e["role"] for e in played.all("repair")} == {"PV"}


def test_no_ci_trusts_every_draft_and_las_answer() -> None:
    tree = {"1": Node(draft="three", trust=False, final=True)}
    played = small("no_ci", tree, la="never", width=1)
    assert played.text == "three"
    assert roles(played) == {"base": 1, "TS": 5, "SC": 2, "SR": 1, "PV": 1}
    played = small("no_ci", tree, la="winner", width=1, extra={"LA 1": {"answer": "four"}, "CI end 1": "no"})
    assert played.text == "four"
    assert played.calls("CI end") == 0


def test_no_cair_takes_what_sr_finishes_with() -> None:
    tree = {"1": Node(draft="three", says="two"), "1.1": Node(draft="three", says="four", final=True)}
    played = small("no_cair", tree, width=1)
    assert roles(played) == {"base": 1, "TS": 5, "SC": 3, "SR": 2}
    assert played.text == "four"
    # A branch that never finishes has no answer, and is discarded.
    played = small("no_cair")
    assert set(played.fates().values()) == {"open", "discarded"}
    assert (played.text, played.exit) == ("one", "fallback")


def test_no_daas_is_one_verified_chain() -> None:
    played = small("no_daas", la="winner")
    assert roles(played) == {"base": 1, "TS": 5, "SR": 2, "PV": 2, "CI": 2, "LA": 1, "CI end": 1}
    assert not played.all("fate")
    assert played.text == "one"
    assert played.exit == "complete"


def test_dspe_is_a_chain_with_tool_selection_and_no_verification() -> None:
    played = small("dspe", {"1.1": Node(says="three", final=True)})
    assert roles(played) == {"base": 1, "TS": 5, "SR": 2}
    assert played.text == "three"


@pytest.mark.parametrize(("mode", "tools"), [("react", "domain"), ("react_general", "general"), ("no_dspe", "general")])
def test_toolsets(mode: str, tools: str) -> None:
    asked: list[str] = []

    def named(name: str) -> tuple[Any, ...]:
        asked.append(name)
        return fake_tools(NAMES[:2])

    backend = ScriptedBackend(scripted({"1": Node(says="three", final=True)}))
    with patch.object(uavmas, "toolset", named):
        pipeline.ask(backend, CHAT, PROFILES["onboard"], FRAME, COUNT, mode=mode)
    assert asked == [tools]
    # Every tool is active: nobody is asked.
    assert not any(label.startswith("TS") for label, _ in backend.prompts)


def test_react_is_a_chain_of_sr_alone() -> None:
    played = small("react", {"1": Node(), "1.1": Node(says="three", final=True)})
    assert roles(played) == {"base": 1, "SR": 2}
    assert played.text == "three"


def test_no_activation_shows_all_tools_without_tips() -> None:
    played = small("no_activation", la="never")
    assert roles(played)["TS"] == 0
    assert played.one("root")["width"] == 3
    for prompt in played.prompts("SR").values():
        assert all(f"- {name}(target): about {name}.\n" in prompt for name in NAMES)
        assert "tip" not in prompt.lower()


def test_central_ts_is_one_agent_for_all_tools() -> None:
    played = small("central_ts", la="never")
    assert [label for label, _ in played.backend.prompts if label.startswith("TS")] == ["TS central"]
    (prompt,) = (prompt for label, prompt in played.backend.prompts if label == "TS central")
    assert all(f"- {name}: about {name}.\n" in prompt for name in NAMES)
    assert played.one("tools")["active"] == ["alpha", "beta"]
    assert played.one("root")["width"] == 2


@pytest.mark.parametrize("s_init", [0, 5, 10])
def test_no_difficulty_uses_the_middle_threshold_always(s_init: int) -> None:
    played = small("no_difficulty", la="never", extra={"SC base": str(s_init)})
    assert played.one("root")["tau"] == 4
    assert played.one("root")["s_init"] == s_init


def test_no_pruning_visits_every_node() -> None:
    weak = {p: Node(0) for p in ("1", "2", "1.1", "1.2", "2.1", "2.2")}
    assert "pruned" in small("uavmas", weak, la="never").fates().values()
    played = small("no_pruning", weak, la="never")
    assert len(played.fates()) == 6
    assert "pruned" not in played.fates().values()


def test_vote3_runs_three_chains_and_the_majority_wins() -> None:
    drafts = iter(["two", "three", "three"])

    def script(label: str, prompt: str) -> Any:
        if label == "PV 1":
            return {"answer": next(drafts)}
        return scripted({"1": Node(final=True)})(label, prompt)

    played = play(script, mode="vote3", la="never")
    assert roles(played) == {"base": 3, "TS": 15, "SR": 3, "PV": 3, "CI": 3}
    assert played.text == "three"
    assert [e["run"] for e in played.all("run")] == [1, 2, 3]
    assert not small("no_daas").all("run")


def outcome(text: str, *options: str, box: tuple[float, float, float, float] | None = None) -> Outcome:
    return Outcome(Value(text, options, box))


def test_a_vote_without_majority_goes_to_the_first() -> None:
    assert majority([outcome("a"), outcome("b"), outcome("c")], 0.7).value.text == "a"
    assert majority([outcome("a"), outcome("b"), outcome("b")], 0.7).value.text == "b"
    assert majority([outcome("a"), outcome("b"), outcome("b"), outcome("a")], 0.7).value.text == "a"
    # Boxes vote for each other by their overlap; the second has two friends, each other only one.
    left, middle, right = (0.0, 0.0, 0.30, 1.0), (0.05, 0.0, 0.35, 1.0), (0.10, 0.0, 0.40, 1.0)
    boxes = [outcome("left", box=left), outcome("middle", box=middle), outcome("right", box=right)]
    assert majority(boxes, 0.7).value.text == "middle"


def test_an_unknown_toolset_is_bad_input() -> None:
    with pytest.raises(BadInput, match="toolset"):
        toolset("magic")
