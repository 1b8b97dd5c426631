"""The memory of the process's random generators, which shows whether numbers were drawn without copying their state."""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from typing import Any, Final

_MT19937_BYTES: Final = 625 * 4
"""NumPy's struct of a Mersenne Twister: 624 words of key, and the position among them."""


def python_words() -> bytes:
    """Return the memory of Python's global generator behind the object's head; empty if it is not CPython's own."""
    generator = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return b""
    head = object.__basicsize__
    return ctypes.string_at(id(generator) + head, _random.Random.__basicsize__ - head)


def numpy_words(numpy: Any) -> bytes:
    """Return the memory of NumPy's global generator; empty if it is not the usual one."""
    get = getattr(numpy.random, "get_bit_generator", None)
    generator = get() if get else None
    if generator is None or type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
