"""How much a test with random cases tries: a sample by default, and with SOAK=1, as `make soak` sets it, much more."""

from __future__ import annotations

import os

SOAK = os.environ.get("SOAK") == "1"


def effort(sample: int, soak: int) -> int:
    """Return how many cases to try."""
    return soak if SOAK else sample
