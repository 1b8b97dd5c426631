"""Log formats of the controller: text, or one JSON object for each line; each with the plan that caused it.

Each plan has an id. The writes, evictions, events and retries that it causes are logged with that id: asyncio copies
the context to tasks and timers, so the id is not passed as an argument.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

FORMATS: Final = ("text", "json")
_CAUSE: Final = ContextVar("cause", default="")
_FIELDS: Final = "gpuquota_fields"


@contextmanager
def because_of(cause: str) -> Iterator[None]:
    """Set the cause of all that is logged and started inside the context."""
    token = _CAUSE.set(cause)
    try:
        yield
    finally:
        _CAUSE.reset(token)


def cause() -> str:
    """Return the id of the current cause; "" if there is none."""
    return _CAUSE.get()


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the `extra` of a logging call that adds these fields to its JSON object."""
    return {_FIELDS: values}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --log-format and --log-level, the arguments of `configure`."""
    parser.add_argument("--log-format", default="text", choices=FORMATS, help="json: one object for each line")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def configure(form: str, level: str) -> None:
    """Log to standard error in one of FORMATS."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())


class TextFormatter(logging.Formatter):
    """Text lines with the cause in brackets at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging calls it so
        """Return the line without a traceback."""
        text = super().formatMessage(record)
        return f"{text} [{cause()}]" if cause() else text


class JsonFormatter(logging.Formatter):
    """JSON lines: {"time", "level", "logger", "message", "cause"?, "error"?, and the fields of the call}."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **({"cause": cause()} if cause() else {}),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
