"""Fixtures that any test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from hoverlens.runtime.bundle import Bundle
from hoverlens.runtime.errors import HoverlensError

# A busy board misses time limits that say nothing about the code.
settings.register_profile("hoverlens", deadline=None)
settings.load_profile("hoverlens")

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of test photos and models, which is not part of the repository."""
    given = os.environ.get("HOVERLENS_SHARED_DATA")
    folder = Path(given) if given else REPO.parent / "shared" / "data"
    if not (folder / "images").is_dir():
        pytest.skip(f"no test data at {folder}; set HOVERLENS_SHARED_DATA to the folder that has images/")
    return folder


def _random(preset: str) -> Bundle:
    from hoverlens.export.random_mllm import make_random_bundle

    try:
        return make_random_bundle(preset=preset)[0]
    except HoverlensError as e:
        pytest.skip(f"no random-weight model: {e}")


@pytest.fixture(scope="session")
def random_bundle() -> Bundle:
    """The default random-weight bundle, made once and kept in the cache."""
    return _random("10m")


@pytest.fixture(scope="session")
def tiny_bundle() -> Bundle:
    """The smallest random-weight bundle, made once and kept in the cache."""
    return _random("tiny")
