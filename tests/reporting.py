"""What workers of pytest-xdist report, and how a run ends.

A report is sent as UTF-8, which has no lone surrogates: a failure that shows hostile text would end the worker with an
internal error, and the failure itself would be lost. They are escaped here.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

LINES = 12
_SURROGATES = re.compile("[\ud800-\udfff]")


def sendable(value: Any) -> Any:
    """Return the same value with lone surrogates as escape sequences, in strings at any depth."""
    if isinstance(value, str):
        return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    if isinstance(value, dict):
        return {sendable(key): sendable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(sendable, value))
    return value


class Reporting:
    """The plugin, in workers and in the process that prints."""

    def __init__(self) -> None:
        self._internal = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
        """Make a report one that can be sent."""
        data = yield
        return sendable(data)  # type: ignore[no-any-return]

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep the first one, which is the cause of what follows."""
        self._internal = self._internal or str(excrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Print the end of an internal error last; print nothing of how a worker's interpreter is torn down."""
        if hasattr(config, "workerinput"):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 2)
            os.close(nothing)
        elif self._internal:
            lines = [line for line in self._internal.splitlines() if line.strip()]
            sys.stderr.write("\n".join(["internal error:", *lines[-LINES:], ""]))
