"""What each agent may see, read off the prompts; and that nothing crosses from one branch to another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoverlens.runtime.errors import Cancelled, HoverlensError
from hoverlens.runtime.mllm.base import ImageFeatures
from hoverlens.runtime.reasoning.settings import MODES
from hoverlens.runtime.tools.base import Feedback

from .scripted import ScriptedBackend
from .world import COUNT, NAMES, FakeTool, Node, Played, fake_tools, paths, play, scripted

CROP = ImageFeatures("c" * 32, 4, 2, (8, 8))


def tools() -> tuple[FakeTool, ...]:
    """Each reports on what it was asked for, and the first also shows a picture."""

    def told(arguments: Mapping[str, Any]) -> Feedback:
        target = arguments["target"]
        return Feedback(f"feedback-{target.removeprefix('target-')} raw", image=CROP if target == "target-1" else None)

    return (FakeTool("alpha", told=told), *fake_tools(NAMES[1:3]))


def full_tree(path: str) -> Node:
    """Three levels; one node in three finishes, and CI does not trust all of them."""
    last = int(path[-1])
    return Node(
        score=5, draft="two" if last == 2 else "three", trust=last != 3, final=path.count(".") == 1 and last == 1
    )


@pytest.fixture(scope="module")
def played() -> Played:
    return play(scripted(full_tree), tools=tools(), depth=3, la="each_path", arbitrate_equal=True)


MARKS = re.compile(r"(thought|target|evidence|feedback)-([\d.]*\d)")
PREFIX_END = COUNT.options[-1] + "\n"


def own_text(prompt: str) -> str:
    """The prompt without what all agents share."""
    assert prompt.count("Question: How many cars?") == 1
    return prompt.split(PREFIX_END, 1)[1]


def marks(prompt: str, *kinds: str) -> set[str]:
    """Nodes of which a prompt has some text."""
    return {path for kind, path in MARKS.findall(own_text(prompt)) if not kinds or kind in kinds}


def ancestors(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def test_every_agent_shares_image_question_and_options(played: Played) -> None:
    beginnings = {prompt.split(PREFIX_END, 1)[0] for _, prompt in played.backend.prompts}
    assert len(beginnings) == 1
    (beginning,) = beginnings
    assert beginning.count("<image ") == 1
    assert all(f"- {option}\n" in beginning + PREFIX_END for option in COUNT.options)


def test_all_roles_were_asked(played: Played) -> None:
    roles = {label.rpartition(" ")[0] or label for label, _ in played.backend.prompts}
    assert roles == {"base", "TS", "SC", "SR", "PV", "CI", "LA", "CI end"}


def test_ts_sees_its_own_tool_and_no_history(played: Played) -> None:
    for name, prompt in played.prompts("TS").items():
        assert f"about {name}." in own_text(prompt)
        assert not any(f"about {other}." in prompt for other in NAMES if other != name)
        assert not marks(prompt)


def test_sr_sees_the_whole_history_of_its_branch_and_nothing_of_others(played: Played) -> None:
    for path, prompt in played.prompts("SR").items():
        assert marks(prompt, "thought") == marks(prompt, "target") == ancestors(path)
        assert marks(prompt, "feedback") == ancestors(path)
        # Evidence and answers belong to the state, not to the dialogue.
        assert not marks(prompt, "evidence")
        steps = [
            prompt.index(f"Thought: thought-{p}\nAction: alpha(target=target-{p})\n") for p in sorted(ancestors(path))
        ]
        assert steps == sorted(steps)


def test_sr_sees_a_crop_of_its_own_branch_only(played: Played) -> None:
    for path, prompt in played.prompts("SR").items():
        assert own_text(prompt).count("<image ") == (1 if path.startswith("1.") else 0)


def test_sr_sees_active_tools_with_their_tips_only() -> None:
    extra = {"TS beta": {"use": "no", "target": "unused", "tip": "unused tip"}}
    played = play(scripted({}, extra=extra), tools=fake_tools(), depth=1, la="never")
    for prompt in played.prompts("SR").values():
        for name in ("alpha", "gamma", "delta", "epsilon"):
            assert f"- {name}(target): about {name}. Tip: tip-{name} (target=proposed-{name})\n" in prompt
        assert "beta" not in prompt
        assert "unused" not in prompt


def test_pv_sees_this_steps_action_and_feedback_and_nothing_else(played: Played) -> None:
    for path, prompt in played.prompts("PV").items():
        own = own_text(prompt)
        final = full_tree(path).final
        assert marks(prompt) == (set() if final else {path})
        assert f"Action: finish({full_tree(path).draft})" in own if final else f"alpha(target=target-{path})" in own
        # The thought stems from the history: it would anchor PV to it.
        assert "Thought" not in own
        assert "tip-" not in own
        assert own.count("<image ") == (path == "1")


def test_ci_sees_the_draft_and_the_state_and_never_the_feedback(played: Played) -> None:
    for path, prompt in played.prompts("CI").items():
        assert not marks(prompt, "feedback", "thought", "target")
        seen = marks(prompt, "evidence")
        assert path in seen
        # Clues of the state are those of trusted steps of this branch.
        assert seen - {path} <= {p for p in ancestors(path) if full_tree(p).trust}
        assert "<image " not in own_text(prompt)


def test_ci_sees_the_clues_of_the_standing_answer_only(played: Played) -> None:
    # 1:(three) then 1.2:(two): at 1.2.1 the answer is two, and the clue of 1 belonged to three.
    prompts = played.prompts("CI")
    assert "So far: one\nNew: three (evidence-1)" in own_text(prompts["1"])
    assert "So far: three (evidence-1)\nNew: two (evidence-1.2)" in own_text(prompts["1.2"])
    assert "So far: two (evidence-1.2)\nNew: three (evidence-1.2.1)" in own_text(prompts["1.2.1"])
    # 2.2 confirms 2, so both clues stand; 2.3 is not trusted and leaves no clue.
    assert "So far: two (evidence-2; evidence-2.2)\nNew" in own_text(prompts["2.2.1"])
    assert "So far: two (evidence-2)\nNew" in own_text(prompts["2.3.1"])


def test_sc_sees_the_whole_step_and_nothing_before_it(played: Played) -> None:
    for path, prompt in played.prompts("SC").items():
        if path == "base":
            assert not marks(prompt)
            assert "one" in own_text(prompt)
            continue
        assert marks(prompt, "thought") == {path}
        assert marks(prompt, "feedback", "target") == (set() if full_tree(path).final else {path})
        assert not marks(prompt, "evidence")
        assert "tip-" not in own_text(prompt)
        assert own_text(prompt).count("<image ") == (path == "1")


def test_la_sees_the_whole_history_of_its_trace(played: Played) -> None:
    ends = {e["node"] for e in played.all("fate") if e["fate"] in ("answer", "depth")}
    assert set(played.prompts("LA")) == ends
    for path, prompt in played.prompts("LA").items():
        assert marks(prompt, "thought") == ancestors(path) | {path}
        assert marks(prompt, "feedback") == ancestors(path) | ({path} - {p for p in ends if full_tree(p).final})
        assert not marks(prompt, "evidence")


def test_a_thinking_model_sees_what_la_would_see(played: Played) -> None:
    thinker = ScriptedBackend(scripted(full_tree))
    thought = play(scripted(full_tree), tools=tools(), depth=3, la="each_path", arbitrate_equal=True, thinker=thinker)
    assert not thought.prompts("LA")
    # Word for word what the other model would have been shown, which no sibling and no other agent is.
    assert dict(thinker.prompts) == {f"LA {path}": prompt for path, prompt in played.prompts("LA").items()}
    assert thought.answer is not None
    assert played.answer is not None
    assert thought.answer.comparable() == played.answer.comparable()
    # Its prefix is read once, for all branches.
    assert max(thinker.held.values()) == 1 + len(thinker.prompts)


@pytest.mark.parametrize("error", [HoverlensError("no room"), Cancelled("stop")])
def test_a_thinking_model_that_fails_leaves_no_state(error: HoverlensError) -> None:
    thinker = ScriptedBackend({"LA 1.1": error})
    failed = play(scripted(full_tree), tools=tools(), depth=3, la="each_path", thinker=thinker)
    assert failed.error is error


def test_the_last_ci_sees_las_summary_and_the_final_state() -> None:
    extra = {"LA 1": {"reasoning": "because", "answer": "four", "clues": "summary"}}
    tree = {"1": Node(5, "two", final=True)}
    played = play(scripted(tree, extra=extra), tools=tools()[:1], la="each_path")
    prompt = played.prompts("CI end")["1"]
    assert "So far: two (evidence-1)\nNew: four (summary)" in own_text(prompt)
    assert "because" not in prompt
    assert marks(prompt) == {"1"} == marks(prompt, "evidence")


@pytest.mark.parametrize("mode", sorted(MODES))
def test_no_history_reaches_ts_pv_ci_sc_in_any_mode(mode: str) -> None:
    played = play(scripted(full_tree), tools=tools(), mode=mode, depth=3)
    assert played.answer is not None
    for label, prompt in played.backend.prompts:
        role, _, path = label.rpartition(" ")
        if role in ("TS", "base", ""):
            assert not marks(prompt), label
        if role == "PV":
            assert marks(prompt) <= {path}, label
        if role == "SC":
            assert marks(prompt) <= {path}, label
        if role == "CI":
            assert not marks(prompt, "feedback", "target"), label
            # Without PV the thought is the evidence that CI is given.
            assert mode == "no_pv" or not marks(prompt, "thought"), label
        if role in ("SR", "LA"):
            assert marks(prompt) <= ancestors(path) | {path}, label


ALL = list(paths(2, 3))


@given(changed=st.sampled_from(ALL), what=st.sampled_from(["score", "draft", "trust", "final"]))
def test_a_branch_never_depends_on_its_siblings(changed: str, what: str) -> None:
    """Changing what happens at one node changes no prompt, draw or fate outside of the tree below it."""
    plain = Node(5, "two")
    other = {"score": Node(0), "draft": Node(5, "four"), "trust": Node(5, trust=False), "final": Node(5, final=True)}

    def ask(tree: dict[str, Node]) -> tuple[dict[str, tuple[Any, ...]], dict[str, str]]:
        played = play(
            scripted(dict.fromkeys(ALL, plain) | tree), tools=tools()[:2], depth=3, la="each_path", arbitrate_equal=True
        )
        asked = {
            label: (prompt, getattr(request, "sampling", None))
            for (label, prompt), request in zip(played.backend.prompts, played.backend.requests, strict=True)
        }
        return asked, played.fates()

    before, fates = ask({})
    after, new_fates = ask({changed: other[what]})

    def concerned(path: str) -> bool:
        return path == changed or path.startswith(f"{changed}.")

    for label in before.keys() | after.keys():
        if not concerned(label.rpartition(" ")[2]):
            assert before.get(label) == after.get(label), label
    for path in fates.keys() | new_fates.keys():
        if not concerned(path):
            assert fates.get(path) == new_fates.get(path), path
