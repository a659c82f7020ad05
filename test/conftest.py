"""What tests of several folders share; also puts this folder on the path, for helper modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from srt.default_model import fetch_default_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, from the cache; its tests are slow, as the first fetches it."""
    return fetch_default_model()
