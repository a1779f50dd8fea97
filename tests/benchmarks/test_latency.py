"""The recorded schedule does what it says: the same words and calls, whichever way it is run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from hoverlens.benchmarks.latency import bench_latency
from hoverlens.benchmarks.schedule import LEAN, PLAIN, schedule
from hoverlens.cli import cli
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import BadInput


@pytest.fixture(scope="module", params=[3, 4, 6, 9])
def measured(request: pytest.FixtureRequest, tiny_bundle: Bundle) -> tuple[int, dict[str, Any]]:
    result = bench_latency(tiny_bundle, nodes=request.param, lean=True, questions=1, image_px=128)
    return request.param, result


def test_each_prompt_token_is_evaluated_once_and_the_image_encoded_once(
    measured: tuple[int, dict[str, Any]],
) -> None:
    _, result = measured
    assert result["prefill_tokens_over_minimum"] == 1.0
    assert result["image_encodes_per_image"] == 1.0


def test_the_schedule_makes_the_calls_of_its_nodes(measured: tuple[int, dict[str, Any]]) -> None:
    nodes, result = measured
    # base, S_init, five TS; SR, PV, CI, SC for each node; LA and its CI.
    assert result["mllm_calls"] == 7 + 4 * nodes + 2


def test_naive_evaluates_and_encodes_for_every_call_and_answers_the_same(
    measured: tuple[int, dict[str, Any]],
) -> None:
    _, result = measured
    naive, tree = result["tokens"]["naive"], result["tokens"]["tree"]
    assert naive["image_encodes"] == result["mllm_calls"]
    assert naive["reused_tokens"] == 0
    assert naive["decoded_tokens"] == tree["decoded_tokens"] > 0
    assert naive["forced_tokens"] == tree["forced_tokens"] > 0
    assert result["ratios"]["naive_over_tree_prefill_tokens"] > 3
    assert result["answers_equal_naive_tree"] is True


def test_lean_says_less_and_nothing_else_changes(tiny_bundle: Bundle) -> None:
    plain, lean = (
        bench_latency(tiny_bundle, nodes=3, lean=lean, questions=1, image_px=128, baseline=None)
        for lean in (False, True)
    )
    assert lean["mllm_calls"] == plain["mllm_calls"]
    assert lean["tokens"]["tree"]["decoded_tokens"] < plain["tokens"]["tree"]["decoded_tokens"]
    assert lean["answers_equal_naive_tree"] is None
    assert lean["ratios"]["naive_over_tree_wall"] is None


def test_a_schedule_of_another_size_is_refused(tiny_bundle: Bundle) -> None:
    with pytest.raises(BadInput, match="3, 4, 6, 9"):
        bench_latency(tiny_bundle, nodes=5)


def test_a_script_fills_every_slot_that_the_agents_have() -> None:
    for nodes in (3, 4, 6, 9):
        for lengths in (PLAIN, LEAN):
            plan = schedule(nodes, lengths)
            finals = [label for label, slots in plan.forms.items() if slots.get("action") == "finish"]
            assert sum(label.startswith("SR") for label in plan.forms) == nodes
            assert finals


def test_the_verb_writes_the_contract(tiny_bundle: Bundle) -> None:
    arguments = ["bench", "latency", "--bundle", str(tiny_bundle.path), "--nodes", "3", "--lean"]
    result = CliRunner().invoke(cli, [*arguments, "--questions", "1", "--image-px", "128", "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"model", "image_px", "questions", "ratios", "stages", "answers_equal_naive_tree"} <= set(found)
    assert {"p50", "p90", "p99"} == set(found["stages"]["decode"])
