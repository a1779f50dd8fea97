"""The memory plan holds, and what was measured can be read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hoverlens.benchmarks.memory import Case, bench_memory, main, report
from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import BadInput, HoverlensError


@pytest.fixture(scope="module")
def filled(tiny_bundle: Bundle) -> dict[str, Any]:
    pytest.importorskip("llama_cpp")
    return bench_memory(Case(str(tiny_bundle.path), n_ctx=4096, fill=True))


def test_the_plan_covers_a_full_cache_and_not_much_more(filled: dict[str, Any]) -> None:
    assert 1 <= filled["plan_over_peak"] <= 1.3
    assert filled["plan"]["total"] == pytest.approx(filled["rss"]["peak"] * filled["plan_over_peak"], rel=1e-3)


def test_llama_cpp_takes_what_was_planned(filled: dict[str, Any]) -> None:
    plan, taken = filled["plan"], filled["allocated"]
    assert taken.keys() == {"weights", "kv", "outputs", "activations", "vision"}
    assert taken["weights"] == pytest.approx(plan["weights"], rel=0.01)
    assert taken["kv"] == plan["kv"]
    # Twice: llama.cpp's, and a copy of ours. Reported to a hundredth of a mebibyte.
    assert taken["outputs"] == pytest.approx(plan["outputs"] / 2, abs=2e4)
    # The plan also has what llama.cpp does not count: the other side of its products, the image as pixels.
    assert taken["activations"] < plan["activations"] < 1.6 * taken["activations"]
    assert taken["vision"] < plan["vision"]


def test_memory_only_grows_from_stage_to_stage(filled: dict[str, Any]) -> None:
    rss = filled["rss"]
    assert 0 < rss["imported"] < rss["loaded"] < rss["asked"]
    assert rss["loaded"] <= rss["peak_of_question"] <= rss["peak"]
    assert rss["asked"] < rss["filled"] <= 1.02 * rss["peak"]
    assert 0 < rss["anonymous"] < rss["peak"]


def test_seconds_are_those_of_the_answer(filled: dict[str, Any]) -> None:
    seconds = filled["seconds"]
    stages = sum(seconds[name] for name in ("encode", "prefill", "decode", "tools", "other"))
    assert stages == pytest.approx(filled["stats"]["wall_s"], abs=0.01)
    assert stages <= seconds["question"] + 0.01
    assert filled["cpu_seconds"].keys() == {"load", "question", "fill"}


def test_a_result_reads_as_a_table(filled: dict[str, Any]) -> None:
    text = report(filled)
    assert "n_ctx 4096" in text
    assert f"{filled['plan']['kv'] / 1e6:.1f}" in text
    assert f"plan / peak {filled['plan_over_peak']}" in text


def test_what_cannot_be_measured_is_one_line(tiny_bundle: Bundle, tmp_path: Any) -> None:
    with pytest.raises(BadInput, match=r"none\.jpg"):
        bench_memory(Case(str(tiny_bundle.path), image=str(tmp_path / "none.jpg")))


def test_the_command_writes_json(
    tiny_bundle: Bundle, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"plan_over_peak": 1.1}
    asked: list[Case] = []
    monkeypatch.setattr("hoverlens.benchmarks.memory.bench_memory", lambda case: asked.append(case) or result)
    assert main(["--bundle", str(tiny_bundle.path), "--n-ctx", "512", "--image-tokens", "64", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert asked == [Case(str(tiny_bundle.path), n_ctx=512, image_tokens=64)]


@pytest.mark.parametrize(("error", "status"), [(BadInput("no image"), 2), (HoverlensError("no memory"), 1)])
def test_a_failure_has_a_status(
    tiny_bundle: Bundle,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: HoverlensError,
    status: int,
) -> None:
    def fails(case: Case) -> dict[str, Any]:
        raise error

    monkeypatch.setattr("hoverlens.benchmarks.memory.bench_memory", fails)
    assert main(["--bundle", str(tiny_bundle.path)]) == status
    assert capsys.readouterr().err == f"memory: {error}\n"
