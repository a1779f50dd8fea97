"""What a closed state alone held goes to a fork of it, and is not evaluated again."""

from __future__ import annotations

import pytest

from hoverlens.runtime.mllm.base import GenerateRequest, Text
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaState


def ask(state: LlamaState | object, words: str = " go") -> GenerateRequest:
    return GenerateRequest(state, (Text(words),), max_tokens=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("children", [1, 3])
def test_children_do_not_pay_for_a_closed_parents_steps_again(backend: LlamaCppBackend, children: int) -> None:
    with backend.prefix([Text("shared prefix " * 10)]) as shared:
        parent = shared.fork()
        parent.append(Text("a long step " * 20))
        backend.generate([ask(parent)])
        forks = []
        for i in range(children):
            fork = parent.fork()
            fork.append(Text(f"step {i}"))
            forks.append(fork)
        parent.close()
        before = backend.counters.prefill_tokens
        backend.generate([ask(fork) for fork in forks])
        spent = backend.counters.prefill_tokens - before
        own = sum(fork.n_tokens - parent.n_tokens for fork in forks)
        assert spent == own + children * backend.count_tokens([Text(" go")])
        for fork in forks:
            fork.close()


def test_an_heir_that_never_runs_gives_the_sequence_back(backend: LlamaCppBackend) -> None:
    with backend.prefix([Text("shared prefix")]) as shared:
        parent = shared.fork()
        parent.append(Text(" a step"))
        backend.generate([ask(parent)])
        fork = parent.fork()
        parent.close()
        held = backend.sequences_in_use()
        fork.close()
        assert backend.sequences_in_use() == held - 1


def test_a_state_of_other_content_inherits_nothing(backend: LlamaCppBackend) -> None:
    with backend.prefix([Text("shared prefix")]) as shared:
        parent, other = shared.fork(), shared.fork()
        parent.append(Text(" a step"))
        other.append(Text(" another step"))
        backend.generate([ask(parent)])
        before = backend.sequences_in_use()
        parent.close()
        assert backend.sequences_in_use() == before - 1
        other.close()
