"""The doctor's check of the cache law holds on a sound cache and fails on a broken one."""

from __future__ import annotations

import pytest

from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.doctor import Host, cache_law_check, look_at_board
from hoverlens.runtime.mllm.chat import ChatFormat
from hoverlens.runtime.mllm.llama_native import Context
from hoverlens.runtime.mllm.llamacpp import LlamaCppBackend
from hoverlens.runtime.mllm.selfcheck import TOLERANCE, check_cache_law


def test_the_law_holds_and_tells_pictures_apart(backend: LlamaCppBackend) -> None:
    result = check_cache_law(backend, ChatFormat.from_template(backend.info.chat_template))
    assert result.holds
    assert result.difference < 0.01
    assert result.swapped > TOLERANCE


def test_a_cache_that_copies_another_pictures_state_is_caught(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Context.copy_sequence

    def first_picture_always(self: Context, source: int, target: int, end: int) -> None:
        real(self, 0, target, end)

    monkeypatch.setattr(Context, "copy_sequence", first_picture_always)
    result = check_cache_law(backend, ChatFormat.from_template(backend.info.chat_template))
    assert not result.holds


def test_the_doctor_says_whether_cached_states_can_be_trusted(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    check = cache_law_check(str(tiny_bundle.path), deep=False)
    (line,) = check(host, look_at_board(host))
    assert (line.name, line.status) == ("cached states", "ok")
    real = Context.copy_sequence
    monkeypatch.setattr(Context, "copy_sequence", lambda self, s, t, end: real(self, 0, t, end))
    (line,) = check(host, look_at_board(host))
    assert line.status == "bad"
    assert "--no-share" in (line.cure or "")


def test_a_large_model_is_not_loaded_unasked(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoverlens.runtime.doctor.SMALL_BUNDLE", 1000)
    host = Host()
    (line,) = cache_law_check(str(tiny_bundle.path), deep=False)(host, look_at_board(host))
    assert "--deep" in line.found
    (line,) = cache_law_check(str(tiny_bundle.path), deep=True)(host, look_at_board(host))
    assert "agree" in line.found
