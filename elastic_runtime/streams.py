"""Random streams: remembered at a step's beginning, so that a repeated step draws the same numbers."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomStreams:
    """The generators that a loop draws from here: torch's (CPU, CUDA), Python's, and NumPy's if it is used."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}

    def save(self) -> None:
        """Remember them: a step begins."""
        self._saved = self.capture()

    def restore(self) -> None:
        """Go back: the step is repeated."""
        if self._saved:
            self.load(self._saved)

    def capture(self) -> dict[str, Any]:
        """Their states, as something to be stored."""
        states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if _cuda_in_use():
            states["cuda"] = torch.cuda.get_rng_state()
        if numpy := sys.modules.get("numpy"):
            states["numpy"] = numpy.random.get_state()
        return states

    def load(self, states: dict[str, Any]) -> None:
        """Continue from states captured before, here or in another process."""
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        if "cuda" in states and _cuda_in_use():
            torch.cuda.set_rng_state(states["cuda"])
        if "numpy" in states and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(states["numpy"])

    def reseed(self, seed: int) -> None:
        """Start streams of one's own: a joiner must not draw the numbers of the rank whose state it got."""
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % (1 << 32))


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
