"""Random streams: remembered at a step's beginning, so that a repeated step draws the same numbers."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.torch_internals.modules import numpy_words, python_words

if TYPE_CHECKING:
    from collections.abc import Callable


class RandomStreams:
    """The generators that a loop draws from here: torch's (CPU, CUDA), Python's, and NumPy's if it is used."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}
        self._numpy_words = self._python_words = b""

    def save(self) -> None:
        """Save the streams at the beginning of a step."""
        self._saved = self._capture(self._python_state, self._numpy_state)

    @property
    def saved(self) -> dict[str, Any]:
        """The states that `save` has stored."""
        return self._saved

    def restore(self) -> None:
        """Restore the streams of the step's beginning."""
        if self._saved:
            self.load(self._saved)

    def capture(self) -> dict[str, Any]:
        """Their states, as something to be stored."""
        return self._capture(random.getstate, lambda numpy: numpy.random.get_state())

    def load(self, states: dict[str, Any]) -> None:
        """Continue from states captured before, here or in another process."""
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        if "cuda" in states and _cuda_in_use():
            torch.cuda.set_rng_state(states["cuda"])
        if "numpy" in states and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(states["numpy"])

    def reseed(self, seed: int) -> None:
        """Seed new streams: a joiner must not draw the numbers of the rank whose state it received."""
        _seed_torch(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % (1 << 32))

    def _capture(self, of_python: Callable[[], Any], of_numpy: Callable[[Any], Any]) -> dict[str, Any]:
        states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": of_python()}
        if _cuda_in_use():
            states["cuda"] = torch.cuda.get_rng_state()
        if numpy := sys.modules.get("numpy"):
            states["numpy"] = of_numpy(numpy)
        return states

    def _python_state(self) -> Any:
        """625 numbers as objects of their own take 10 us, and ten times that where the caches are cold. Where nothing
        was drawn since the last time, those of that time.

        The third part of a state is half of a pair of normal numbers, which is not part of the words.
        """
        words, saved = python_words(), self._saved.get("python")
        if saved is not None and words and words == self._python_words and saved[2] is None:
            return saved
        self._python_words = words
        return random.getstate()

    def _numpy_state(self, numpy: Any) -> Any:
        """NumPy's state takes 30 us to get. Where nothing was drawn since the last time, the one of that time.

        The words of the generator show this, unless half of a pair of normal numbers is still to be returned, which is
        not part of them.
        """
        words = numpy_words(numpy)
        saved = self._saved.get("numpy")
        if saved is not None and words and words == self._numpy_words and not saved[3]:
            return saved
        self._numpy_words = words
        return numpy.random.get_state()


def _seed_torch(seed: int) -> None:
    """Seed as torch.manual_seed does, which formats a stack trace for each kind of device not in use yet: 2 ms."""
    torch.default_generator.manual_seed(seed)
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            device.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
