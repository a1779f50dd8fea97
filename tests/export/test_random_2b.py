"""Qwen3-VL-2B's real sizes with random weights: made in bounded memory, with Qwen's own vocabulary.

The bundle stays in the cache (4.3 GB), so that tests that run it find it made.
"""

from __future__ import annotations

import resource

import pytest

from hoverlens.export.random_mllm import make_random_bundle
from hoverlens.runtime.mllm.files import check_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_2b_preset_has_the_real_models_sizes() -> None:
    bundle, made = make_random_bundle(preset="2b")
    text, vision = check_pair(bundle.need("mllm"), bundle.need("mmproj"))
    assert text.n_params == pytest.approx(1.72e9, rel=0.01)
    assert vision.n_params == pytest.approx(0.407e9, rel=0.01)
    assert text.get("tokenizer.ggml.tokens").length == 151936
    # Not forced by us: the converter recognised the rebuilt vocabulary as Qwen's.
    assert text.get("tokenizer.ggml.pre") == "qwen2"
    if made:
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        assert most < 4, f"the converter took {most:.1f} GB for a model of 4.3 GB"
