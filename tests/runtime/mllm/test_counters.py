"""What is counted: every token is evaluated once, every picture encoded once, and the counters say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.runtime.mllm.base import ChooseRequest, Counters, GenerateRequest, Part, Sampling, State, Text
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend

Pictures = Sequence[NDArray[np.uint8]]
Prompt = Callable[..., list[Part]]
MakeBackend = Callable[..., LlamaCppBackend]


def tails(n: int, end: Text) -> list[tuple[Part, ...]]:
    return [(Text(" role " + "x " * (i + 1)), end) for i in range(n)]


def test_prefill_is_the_prefix_once_and_each_different_suffix_once(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    before = backend.counters.copy()
    parts = prompt(backend.encode(pictures[0]))
    different = tails(4, ending)
    with backend.prefix(parts) as state:
        requests = [GenerateRequest(state, t, max_tokens=3) for t in (*different, different[1], different[1])]
        results = backend.generate(requests)
        choice = backend.choose([ChooseRequest(state, ("yes", "no", "a car"), different[2])])[0]
    used = backend.counters - before
    shared = backend.count_tokens(parts)
    sizes = [backend.count_tokens(t) for t in different]
    assert used.prefill_tokens == shared + sum(sizes) + sizes[2]
    assert used.recomputed_tokens == used.evictions == 0
    assert [r.prefill_tokens for r in results] == [*sizes, 0, 0]
    assert [r.reused_tokens for r in results] == [shared] * 4 + [shared + sizes[1]] * 2
    assert (choice.prefill_tokens, choice.reused_tokens) == (sizes[2], shared)
    assert used.reused_tokens == sum(r.reused_tokens for r in results) + choice.reused_tokens
    assert used.mllm_calls == 7
    assert used.decoded_tokens >= sum(len(r.tokens) for r in results)


def test_a_deeper_state_evaluates_only_what_was_appended(
    backend: LlamaCppBackend, opened: State, pictures: Pictures, ending: Text
) -> None:
    before = backend.counters.copy()
    step: tuple[Part, ...] = (Text(" step one, crop: "), backend.encode(pictures[1]), Text(" seen."))
    with opened.fork() as child:
        child.append(*step)
        backend.generate([GenerateRequest(child, t, max_tokens=2) for t in tails(2, ending)])
        used = backend.counters - before
        expected = backend.count_tokens(step) + sum(backend.count_tokens(t) for t in tails(2, ending))
        assert used.prefill_tokens == expected
        with child.fork() as grandchild:
            grandchild.append(Text(" step two"))
            backend.generate([GenerateRequest(grandchild, (ending,), max_tokens=2)])
    used = backend.counters - before
    assert used.prefill_tokens == expected + backend.count_tokens((Text(" step two"), ending))
    assert used.recomputed_tokens == 0


def test_two_states_that_miss_the_same_text_evaluate_it_once(
    backend: LlamaCppBackend, opened: State, ending: Text
) -> None:
    before = backend.counters.copy()
    children = [opened.fork() for _ in range(3)]
    for child in children:
        child.append(Text(" the same step"))
    children[2].append(Text(" and more"))
    backend.generate([GenerateRequest(c, (ending,), max_tokens=1) for c in children])
    used = backend.counters - before
    parts = (Text(" the same step"), Text(" and more"), ending, ending)  # two of three requests are equal
    assert used.prefill_tokens == backend.count_tokens(parts)
    for child in children:
        child.close()


def test_without_a_suffix_only_the_last_token_is_evaluated_again(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt
) -> None:
    with backend.prefix(prompt(backend.encode(pictures[0]))) as state:
        before = backend.counters.copy()
        first = backend.generate([GenerateRequest(state, max_tokens=3)])[0]
        assert (backend.counters - before).prefill_tokens == 1
        again = backend.generate([GenerateRequest(state, max_tokens=3)])[0]
        assert (backend.counters - before).prefill_tokens == 1
        assert again.tokens == first.tokens
        assert again.reused_tokens == state.n_tokens


def test_a_choice_counts_its_options_as_given_tokens(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    options = ("yes", "no", "three cars", "three trucks")
    runs = [backend.model.tokenize(o, special=False) for o in options]
    before = backend.counters.copy()
    backend.choose([ChooseRequest(opened, options, (ending,))])
    used = backend.counters - before
    assert used.forced_tokens == sum(len(r) - 1 for r in runs)
    assert used.decoded_tokens == 0
    assert used.mllm_calls == 1


def test_a_picture_is_encoded_once_however_often_it_is_asked_about(
    backend: LlamaCppBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    rng = np.random.default_rng(11)
    fresh = [rng.integers(0, 256, (64, 96, 3), dtype=np.uint8) for _ in range(2)]
    before = backend.counters.copy()
    for picture in (fresh[0], fresh[1], fresh[0].copy(), fresh[0]):
        with backend.prefix(prompt(backend.encode(picture))) as state:
            backend.generate([GenerateRequest(state, (ending,), max_tokens=1)])
    used = backend.counters - before
    assert (used.image_encodes, used.encode_hits) == (2, 2)


def test_without_sharing_every_request_pays_in_full(
    naive: LlamaCppBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    before = naive.counters.copy()
    parts = prompt(naive.encode(pictures[0]))
    with naive.prefix(parts) as state:
        naive.generate([GenerateRequest(state, (ending,), max_tokens=2) for _ in range(3)])
        for _ in range(2):
            naive.choose([ChooseRequest(state, ("yes", "no"), (ending,))])
            naive.generate([GenerateRequest(state, (Text("."),), max_tokens=1)])
    used = naive.counters - before
    whole = naive.count_tokens([*parts, ending])
    assert used.prefill_tokens == 5 * whole + 2 * naive.count_tokens([*parts, Text(".")])
    assert used.image_encodes == 7
    assert used.reused_tokens == used.encode_hits == 0


def test_without_sharing_a_request_without_a_suffix_pays_each_time_too(
    naive: LlamaCppBackend, pictures: Pictures, prompt: Prompt
) -> None:
    with naive.prefix(prompt(naive.encode(pictures[0]))) as state:
        for _ in range(2):
            before = naive.counters.copy()
            naive.choose([ChooseRequest(state, ("yes", "no"))])
            naive.generate([GenerateRequest(state, max_tokens=1)])
            assert (naive.counters - before).prefill_tokens == 2 * state.n_tokens


def test_features_are_found_by_pixels_not_by_object(backend: LlamaCppBackend, pictures: Pictures) -> None:
    first = backend.encode(pictures[0])
    before = backend.counters.copy()
    assert backend.encode(pictures[0].copy()).key == first.key
    assert backend.encode(np.asfortranarray(pictures[0])).key == first.key
    assert (backend.counters - before).image_encodes == 0


def test_another_picture_never_finds_the_features(backend: LlamaCppBackend) -> None:
    base = np.zeros((64, 64, 3), np.uint8)
    other = base.copy()
    other[63, 63, 2] = 1
    reshaped = np.zeros((32, 128, 3), np.uint8)
    keys = {backend.encode(p).key for p in (base, other, reshaped)}
    assert len(keys) == 3


def test_the_key_covers_model_and_preprocessing(make_backend: MakeBackend, pictures: Pictures) -> None:
    backends = [
        make_backend(n_ctx=256),
        make_backend(n_ctx=256, image_max_tokens=32),
        make_backend(n_ctx=256, image_min_tokens=32),
        make_backend(n_ctx=256, identity="another"),
    ]
    keys = [b.encode(pictures[0]).key for b in backends]
    assert len(set(keys)) == 4
    assert make_backend(n_ctx=256, n_batch=64).encode(pictures[0]).key == keys[0]
    states = [b.prefix([Text("text")]) for b in (backends[0], backends[3])]
    assert states[0].key != states[1].key
    for state in states:
        state.close()


def test_without_a_given_identity_the_files_are_it(make_backend: MakeBackend) -> None:
    identities = {make_backend(n_ctx=256, identity=None).info.identity for _ in range(2)}
    assert len(identities) == 1
    assert make_backend(n_ctx=256).info.identity not in identities


def size(backend: LlamaCppBackend) -> int:
    return sum(c.embedding.nbytes for f in backend._features.values() for c in f.handle if c.embedding is not None)


@pytest.mark.parametrize("fits", [0, 1, 2, 3])
def test_kept_features_stay_within_their_bytes(make_backend: MakeBackend, pictures: Pictures, fits: int) -> None:
    one = make_backend(n_ctx=256).encode(pictures[0]).data
    assert one is not None
    budget = fits * one.nbytes + one.nbytes // 2
    backend = make_backend(n_ctx=256, feature_cache_bytes=budget)
    for picture in pictures[:4]:
        backend.encode(picture)
        assert size(backend) <= budget
        assert size(backend) == backend._feature_bytes
    assert len(backend._features) == fits
    before = backend.counters.copy()
    for picture in pictures[:4][4 - fits :]:
        backend.encode(picture)
    assert (backend.counters - before).encode_hits == fits


def test_a_picture_larger_than_the_bytes_is_used_but_not_kept(
    make_backend: MakeBackend, pictures: Pictures, prompt: Prompt, ending: Text
) -> None:
    backend = make_backend(feature_cache_bytes=100)
    with backend.prefix(prompt(backend.encode(pictures[0]))) as state:
        assert backend.generate([GenerateRequest(state, (ending,), max_tokens=1)])[0].tokens
    assert size(backend) == 0
    assert backend.counters.encode_hits == 0


def test_the_least_recently_used_features_go_first(make_backend: MakeBackend, pictures: Pictures) -> None:
    one = make_backend(n_ctx=256).encode(pictures[0]).data
    assert one is not None
    backend = make_backend(n_ctx=256, feature_cache_bytes=2 * one.nbytes)
    for i in (0, 1, 0, 2):
        backend.encode(pictures[i])
    before = backend.counters.copy()
    backend.encode(pictures[0])
    backend.encode(pictures[1])
    used = backend.counters - before
    assert (used.encode_hits, used.image_encodes) == (1, 1)


@pytest.mark.parametrize(
    "picture",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)],
    ids=["grey", "alpha", "float"],
)
def test_what_is_no_picture_is_refused(backend: LlamaCppBackend, picture: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="uint8"):
        backend.encode(picture)


def test_snapshots_of_counters_subtract(backend: LlamaCppBackend) -> None:
    a, b = Counters(mllm_calls=5, decode_s=1.5), Counters(mllm_calls=2, decode_s=0.5)
    assert a - b == Counters(mllm_calls=3, decode_s=1.0)
    copy = a.copy()
    copy.mllm_calls += 1
    assert a.mllm_calls == 5


def test_sampling_alone_does_not_make_prompts_different(backend: LlamaCppBackend, opened: State, ending: Text) -> None:
    before = backend.counters.copy()
    backend.generate(
        [GenerateRequest(opened, (ending,), max_tokens=2, sampling=Sampling(t, seed=3)) for t in (0.0, 0.5, 1.0)]
    )
    assert (backend.counters - before).prefill_tokens == backend.count_tokens((ending,))
