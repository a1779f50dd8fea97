"""Fixtures that any test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of test photos and models, which is not part of the repository."""
    given = os.environ.get("HOVERLENS_SHARED_DATA")
    folder = Path(given) if given else REPO.parent / "shared" / "data"
    if not (folder / "images").is_dir():
        pytest.skip(
            f"no test data at {folder}; set HOVERLENS_SHARED_DATA to the folder that has images/"
        )
    return folder
