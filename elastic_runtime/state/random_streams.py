"""Random streams: remembered at a step's beginning, so that a repeated step draws the same numbers."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from elastic_runtime.torch_internals.modules import numpy_words, python_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
        _load_torch(states)
        random.setstate(states["python"])
        if "numpy" in states and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(states["numpy"])

    def reseed(self, seed: int) -> None:
        """Seed new streams: a joiner must not draw the numbers of the rank whose state it received."""
        _seed_torch(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % (1 << 32))

    def _capture(self, of_python: Callable[[], Any], of_numpy: Callable[[Any], Any]) -> dict[str, Any]:
        states = {**_torch_states(), "python": of_python()}
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


WATCHED: Final = 64
"""Steps of an optimizer that are watched for the streams from which it draws."""


class SeededDraws:
    """Work that draws random numbers which are a function of a seed; what follows it draws as if it had drawn none.

    torch's generators take 4 us. Python's and NumPy's take 400 us, so they are left as they are once the work has been
    done `WATCHED` times and has never drawn from them.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._left = WATCHED

    @contextmanager
    def within(self, seed: int) -> Iterator[None]:
        """Do the work, with streams of this seed."""
        if not self._left:
            states = _torch_states()
            _seed_torch(seed)
            try:
                yield
            finally:
                _load_torch(states)
            return
        before = self._streams.capture()
        self._streams.reseed(seed)
        words = _other_words()
        try:
            yield
        finally:
            if _other_words() == words:
                self._left -= 1
            else:
                self._left = WATCHED
            self._streams.load(before)


def _other_words() -> tuple[bytes, bytes]:
    """Return the words of Python's and NumPy's generators, which change as numbers are drawn."""
    numpy = sys.modules.get("numpy")
    return python_words(), numpy_words(numpy) if numpy else b""


def _torch_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if _cuda_in_use():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _load_torch(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states and _cuda_in_use():
        torch.cuda.set_rng_state(states["cuda"])


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
