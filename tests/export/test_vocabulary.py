"""Tokenizers: any text survives, templates work, Qwen's merges are rebuilt."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoverlens.export import vocabulary

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def text() -> str:
    return vocabulary.train_small_tokenizer(2048)


@pytest.fixture(scope="module")
def tokenizer(text: str) -> Any:
    return tokenizers.Tokenizer.from_str(text)


def test_training_again_gives_the_same_tokenizer(text: str) -> None:
    assert vocabulary.train_small_tokenizer(2048) == text


def test_every_id_is_a_token(text: str) -> None:
    document = json.loads(text)
    ids = [*document["model"]["vocab"].values(), *vocabulary.token_ids(text).values()]
    assert sorted(ids) == list(range(2048))


def test_special_tokens_stand_in_qwens_order_and_text_cannot_spell_them(text: str, tokenizer: Any) -> None:
    ids = vocabulary.token_ids(text)
    assert list(ids) == [name for name, _ in vocabulary.SPECIAL_TOKENS]
    assert ids["<|image_pad|>"] - ids["<|endoftext|>"] == 151655 - 151643
    assert tokenizer.encode("<|im_end|>").ids == [ids["<|im_end|>"]]
    assert ids["<|im_end|>"] not in tokenizer.encode("<|im_end |>").ids


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives(tokenizer: Any, sample: str) -> None:
    wanted = unicodedata.normalize("NFC", sample)
    assert tokenizer.decode(tokenizer.encode(sample).ids, skip_special_tokens=False) == wanted


def test_words_of_the_task_are_single_tokens() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(vocabulary.train_small_tokenizer(4096))
    for word in ("yes", "Yes", "no", "No", "true", "A", " car", " building", " truck", " the"):
        assert len(tokenizer.encode(word).ids) == 1, word
    # Qwen's pattern gives each digit a token of its own.
    assert tokenizer.encode("0.123").tokens == ["0", ".", "1", "2", "3"]


def test_the_chat_template_writes_chatml_with_images() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment().from_string(vocabulary.CHAT_TEMPLATE)
    messages = [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "One?"}, {"type": "video"}],
        },
        {"role": "assistant", "content": "Yes"},
    ]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>One?"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_merges_are_rebuilt_from_ranks(text: str) -> None:
    """The small tokenizer's own ranks give back its own merges."""
    model = json.loads(text)["model"]
    letters = {c: b for b, c in enumerate(vocabulary._byte_letters())}
    ranks = {bytes(letters[c] for c in token): i for token, i in model["vocab"].items()}
    vocab, merges = vocabulary._merges_of(ranks)
    assert vocab == model["vocab"]
    assert merges == model["merges"]


def test_the_byte_letters_are_those_of_byte_level_bpe() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(vocabulary._byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
