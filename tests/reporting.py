"""What workers of pytest-xdist report, and how a run ends.

An error while a failure is reported ends the worker with an internal error, and the failure itself is lost:

- A report is sent as UTF-8, which has no lone surrogates. They are escaped here.
- pytest parses the source of a failed test, and CPython 3.11.7 may answer "SystemError: AST constructor recursion depth
  mismatch" where another thread, or a finalizer, parses meanwhile (cpython#106905). Such a report is a plain traceback.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a failure whose report fails as a plain traceback, with the reason."""
        try:
            return (yield)
        except Exception as error:
            if call.excinfo is None or isinstance(call.excinfo.value, pytest.skip.Exception):
                raise
            plain = [*traceback.format_exception(call.excinfo.value), f"(as plain text because of {error!r})"]
            when, spent = call.when, {"duration": call.duration, "start": call.start, "stop": call.stop}
            return pytest.TestReport(item.nodeid, item.location, {}, "failed", "".join(plain), when, **spent)  # type: ignore[arg-type]

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
