"""Replaces a function of the process, such as the interpreter's hook, while a training needs it.

Others replace the same functions, and call the one before: init_process_group does so at each call, a script where it
likes. Invariant: each replacement calls what it replaced itself. So none is called twice, none calls itself, and one
that others have kept and put back later still works. It is put back only where nobody has replaced it since; else it
stays, and is not replaced once more, unless the original itself is there again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Replacement:
    """Of the attribute `name` of `owner` by `make(original)`."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._ours: Any = None
        self._before: Any = None

    def begin(self) -> None:
        """Replace it, unless it is replaced."""
        if self._ours is None or getattr(self._owner, self._name) is self._before:
            self._before = getattr(self._owner, self._name)
            self._ours = self._make(self._before)
            setattr(self._owner, self._name, self._ours)

    def end(self) -> None:
        """Put the original back."""
        if self._ours is not None and getattr(self._owner, self._name) is self._ours:
            setattr(self._owner, self._name, self._before)
            self._ours = self._before = None
