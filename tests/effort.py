"""How much a test with random cases tries: a sample by default, and with SOAK=1, as `make soak` sets it, much more."""

from __future__ import annotations

import os

import pytest

SOAK = os.environ.get("SOAK") == "1"
soaked = pytest.mark.skipif(not SOAK, reason="make soak runs it: CI has a test of the same paths")


def effort(sample: int, soak: int) -> int:
    """Return how many cases to try."""
    return soak if SOAK else sample
