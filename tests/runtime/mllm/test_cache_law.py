"""The law of the MLLM cache: what a forked or cached state says is what the whole prompt says.

Largest difference of logits measured here, on weights whose logits have a standard deviation of 2.5 (random,
60 prompts each with an image, x86-64, a 16-bit cache), at 3 M and at 10 M parameters: F16 5.4e-3 and 6.8e-3;
F32 3.9e-3 and 1.6e-3; Q8_0 0.12 and 0.15, since llama.cpp also quantises activations, by the shape of the batch.
Tokens are the same but where two candidates are closer than that, twice: of 60 greedy runs of 40 tokens 2 and 3
part with F16, none with F32, 5 and 12 with Q8_0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.errors import HoverlensError
from hoverlens.runtime.mllm.base import ChooseRequest, GenerateRequest, Part, Sampling, State, Text
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions

TOLERANCE = {"f16": 1.5e-2, "f32": 8e-3, "q8_0": 0.3}

SYSTEM = "<|im_start|>system\nYou see.<|im_end|>\n<|im_start|>user\n"
END = "<|im_end|>\n<|im_start|>assistant\n"
WORDS = ("car", "truck", "road", "river", "drone", "north", "left", "how", "many", "is", "the", "a", "of", "on")


def phrases(n: int, seed: int = 3) -> list[str]:
    """Different role texts, 1 to 30 words."""
    rng = np.random.default_rng(seed)
    return [" " + " ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(n)]


def suffixes(n: int, seed: int = 3) -> list[tuple[Part, ...]]:
    return [(Text(p), Text(END, trusted=True)) for p in phrases(n, seed)]


def whole(picture: NDArray[np.uint8], question: str, phrase: str) -> list[str | NDArray[np.uint8]]:
    """The same prompt as llama.cpp's own helpers take it."""
    return [SYSTEM, picture, question + phrase + END]


QUESTION = "\nQuestion: how many cars are there?"


Pictures = Sequence[NDArray[np.uint8]]
Prompt = Callable[..., list[Part]]


def test_logits_after_a_fork_are_those_of_the_whole_prompt(
    backend: LlamaCppBackend, reference: Any, pictures: Pictures, prompt: Prompt, logits_after: Any
) -> None:
    worst = 0.0
    for picture in pictures[:2]:
        with backend.prefix(prompt(backend.encode(picture), QUESTION)) as state:
            for phrase, suffix in zip(phrases(8), suffixes(8), strict=True):
                count = reference.start(whole(picture, QUESTION, phrase))
                found = logits_after(backend, state, suffix)
                assert state.n_tokens + backend.count_tokens(suffix) == count
                worst = max(worst, float(np.abs(found - reference.logits()).max()))
    assert worst < TOLERANCE["f16"]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
def test_a_forked_request_draws_the_tokens_of_the_whole_prompt(
    backend: LlamaCppBackend, reference: Any, pictures: Pictures, prompt: Prompt, sampling: Sampling
) -> None:
    compared = 0
    for picture in pictures[:2]:
        with backend.prefix(prompt(backend.encode(picture), QUESTION)) as state:
            requests = [GenerateRequest(state, s, max_tokens=20, sampling=sampling) for s in suffixes(6)]
            for phrase, result in zip(phrases(6), backend.generate(requests), strict=True):
                reference.start(whole(picture, QUESTION, phrase))
                compared += reference.follow(result.tokens, sampling, TOLERANCE["f16"])
    assert compared > 150


def test_log_probabilities_are_those_of_the_whole_prompt(
    backend: LlamaCppBackend, reference: Any, opened: State, pictures: Pictures
) -> None:
    result = backend.generate([GenerateRequest(opened, suffixes(1)[0], max_tokens=12)])[0]
    reference.start(whole(pictures[0], QUESTION, phrases(1)[0]))
    total, logits = 0.0, reference.logits()
    for token in result.tokens:
        total += float(logits[token] - np.logaddexp.reduce(logits.astype(np.float64)))
        logits = reference.feed(token)
    assert result.logprob == pytest.approx(total, abs=12 * TOLERANCE["f16"])


def test_sharing_and_not_sharing_give_the_same_answers(
    backend: LlamaCppBackend, naive: LlamaCppBackend, reference: Any, pictures: Pictures, prompt: Prompt
) -> None:
    greedy = Sampling()
    for picture in pictures[:2]:
        states = [b.prefix(prompt(b.encode(picture), QUESTION)) for b in (backend, naive)]
        shared, alone = (
            b.generate([GenerateRequest(state, s, max_tokens=12) for s in suffixes(6, seed=9)])
            for b, state in zip((backend, naive), states, strict=True)
        )
        for phrase, a, b in zip(phrases(6, seed=9), shared, alone, strict=True):
            for result in (a, b):
                reference.start(whole(picture, QUESTION, phrase))
                reference.follow(result.tokens, greedy, TOLERANCE["f16"])
            if a.tokens == b.tokens:
                assert a.logprob == pytest.approx(b.logprob, abs=12 * TOLERANCE["f16"])
        options = ("yes", "no", "three cars", "1", "12")
        scores = [
            b.choose([ChooseRequest(state, options, s) for s in suffixes(3)])
            for b, state in zip((backend, naive), states, strict=True)
        ]
        for x, y in zip(*scores, strict=True):
            np.testing.assert_allclose(x.scores, y.scores, atol=TOLERANCE["f16"])
        for state in states:
            state.close()


def test_a_batch_over_two_pictures_is_the_single_runs(
    backend: LlamaCppBackend, reference: Any, pictures: Pictures, prompt: Prompt
) -> None:
    states = [backend.prefix(prompt(backend.encode(p), QUESTION)) for p in pictures[:2]]
    requests = [GenerateRequest(state, s, max_tokens=12) for s in suffixes(3) for state in states]
    together = backend.generate(requests)
    for i, (request, result) in enumerate(zip(requests, together, strict=True)):
        alone = backend.generate([request])[0]
        reference.start(whole(pictures[i % 2], QUESTION, phrases(3)[i // 2]))
        reference.follow(result.tokens, Sampling(), TOLERANCE["f16"])
        if alone.tokens == result.tokens:
            assert alone.logprob == pytest.approx(result.logprob, abs=12 * TOLERANCE["f16"])
    assert len({r.tokens for r in together}) > 1, "the prompts must lead to different answers"
    for state in states:
        state.close()


def test_pictures_do_not_leak_into_each_other(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, logits_after: Any
) -> None:
    """The same question about six pictures at once: each state answers about its own."""
    states = [backend.prefix(prompt(backend.encode(p), QUESTION)) for p in pictures]
    together = [logits_after(backend, s, suffixes(1)[0]) for s in states]
    for state in states:
        state.close()
    for picture, found in zip(pictures, together, strict=True):
        with backend.prefix(prompt(backend.encode(picture), QUESTION)) as state:
            assert np.abs(logits_after(backend, state, suffixes(1)[0]) - found).max() < TOLERANCE["f16"]
    for a, b in itertools.combinations(together, 2):
        assert np.abs(a - b).max() > 10 * TOLERANCE["f16"]


def test_siblings_evaluate_their_prompt_once_and_draw_as_if_alone(
    backend: LlamaCppBackend, reference: Any, opened: State, pictures: Pictures
) -> None:
    phrase, suffix = phrases(1)[0], suffixes(1)[0]
    samplings = [Sampling(temperature=0.9, seed=seed) for seed in range(5)]
    before = backend.counters.copy()
    results = backend.generate([GenerateRequest(opened, suffix, max_tokens=10, sampling=s) for s in samplings])
    used = backend.counters - before
    assert used.prefill_tokens == backend.count_tokens(suffix)
    assert [r.prefill_tokens for r in results] == [used.prefill_tokens, 0, 0, 0, 0]
    assert len({r.tokens for r in results}) > 1
    for sampling, result in zip(samplings, results, strict=True):
        reference.start(whole(pictures[0], QUESTION, phrase))
        reference.follow(result.tokens, sampling, TOLERANCE["f16"])


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_siblings_that_end_at_once_still_share_their_prompt(
    backend: LlamaCppBackend, opened: State, max_tokens: int
) -> None:
    suffix = suffixes(1)[0]
    before = backend.counters.copy()
    requests = [
        GenerateRequest(opened, suffix, max_tokens=max_tokens, sampling=Sampling(0.9, seed=i)) for i in range(4)
    ]
    backend.generate(requests)
    assert (backend.counters - before).prefill_tokens == backend.count_tokens(suffix)


def test_the_order_of_requests_changes_nothing(
    backend: LlamaCppBackend, reference: Any, opened: State, pictures: Pictures
) -> None:
    samplings = [Sampling(0.7, seed=i) for i in range(5)]
    requests = [
        GenerateRequest(opened, s, max_tokens=8, sampling=x) for s, x in zip(suffixes(5), samplings, strict=True)
    ]
    compared = 0
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)):
        found = backend.generate([requests[i] for i in order])
        for i, result in zip(order, found, strict=True):
            reference.start(whole(pictures[0], QUESTION, phrases(5)[i]))
            compared += reference.follow(result.tokens, samplings[i], TOLERANCE["f16"])
    assert compared > 60


def test_asking_again_gives_the_same_numbers(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, logits_after: Any
) -> None:
    """Bit by bit: where in the cache a prompt lies, and what lay there before, changes nothing."""
    found = []
    for others in range(3):
        for picture in pictures[1 : 1 + others]:
            with backend.prefix(prompt(backend.encode(picture), QUESTION)) as other:
                backend.generate([GenerateRequest(other, s, max_tokens=3) for s in suffixes(others)])
        with backend.prefix(prompt(backend.encode(pictures[0]), QUESTION)) as state:
            found.append(logits_after(backend, state, suffixes(1)[0]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_appending_to_a_fork_never_shows_in_the_other(
    backend: LlamaCppBackend, opened: State, logits_after: Any, pictures: Pictures
) -> None:
    suffix = suffixes(1)[0]
    before = logits_after(backend, opened, suffix)
    with opened.fork() as branch:
        branch.append(Text(" and a crop "), backend.encode(pictures[3]), Text(" of it"))
        assert branch.key != opened.key
        changed = logits_after(backend, branch, suffix)
    assert np.abs(changed - before).max() > 10 * TOLERANCE["f16"]
    np.testing.assert_array_equal(logits_after(backend, opened, suffix), before)


def test_a_crop_inside_a_history_is_read_as_in_a_whole_prompt(
    backend: LlamaCppBackend, reference: Any, opened: State, pictures: Pictures, logits_after: Any
) -> None:
    with opened.fork() as branch:
        branch.append(Text(" crop: "), backend.encode(pictures[4]))
        found = logits_after(backend, branch, (Text(" seen"), Text(END, trusted=True)))
    reference.start([SYSTEM, pictures[0], QUESTION + " crop: ", pictures[4], " seen" + END])
    assert np.abs(found - reference.logits()).max() < TOLERANCE["f16"]


@pytest.fixture(scope="module")
def typed() -> Iterator[Callable[[str], LlamaCppBackend]]:
    """The tiny model with weights of another type."""
    made: list[LlamaCppBackend] = []

    def make(kind: str) -> LlamaCppBackend:
        from hoverlens.export.random_mllm import make_random_bundle

        try:
            bundle, _ = make_random_bundle(preset="tiny", outtype=kind)
        except HoverlensError as e:
            pytest.skip(f"no random-weight model: {e}")
        options = LlamaOptions(n_ctx=4096, threads=1, image_max_tokens=64)
        made.append(LlamaCppBackend(bundle.need("mllm"), bundle.need("mmproj"), options, identity=kind))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_the_law_holds_for_other_weights_within_their_tolerance(
    typed: Callable[[str], LlamaCppBackend],
    make_reference: Any,
    pictures: Pictures,
    prompt: Prompt,
    logits_after: Any,
    kind: str,
) -> None:
    backend = typed(kind)
    reference = make_reference(backend)
    with backend.prefix(prompt(backend.encode(pictures[0]), QUESTION)) as state:
        requests = [GenerateRequest(state, s, max_tokens=12) for s in suffixes(5)]
        for phrase, result in zip(phrases(5), backend.generate(requests), strict=True):
            reference.start(whole(pictures[0], QUESTION, phrase))
            found = logits_after(backend, state, (Text(phrase), Text(END, trusted=True)))
            assert np.abs(found - reference.logits()).max() < TOLERANCE[kind]
            reference.follow(result.tokens, Sampling(), TOLERANCE[kind])
