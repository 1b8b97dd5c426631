"""What the controller logs: lines for people, or one JSON object a line; each with the plan that it follows from.

A plan has an id. What is done because of it (writes, evictions, events, what is tried again later) carries that id
along: asyncio hands its context on to tasks and timers, so nothing has to be passed from hand to hand.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS: Final = ("text", "json")
_CAUSE: Final = ContextVar("cause", default="")
_FIELDS: Final = "gpuquota_fields"


@contextmanager
def because_of(cause: str) -> Iterator[None]:
    """What is logged and started inside follows from it."""
    token = _CAUSE.set(cause)
    try:
        yield
    finally:
        _CAUSE.reset(token)


def cause() -> str:
    """What is being done follows from it; "" where it is nothing that has a name."""
    return _CAUSE.get()


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """As the `extra` of a logging call: fields of its JSON object beside the sentence."""
    return {_FIELDS: values}


def configure(form: str, level: str) -> None:
    """Log to standard error in one of FORMATS."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())


class TextFormatter(logging.Formatter):
    """For people: the cause at the end, in brackets."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging calls it so
        """The line without a traceback."""
        text = super().formatMessage(record)
        return f"{text} [{cause()}]" if cause() else text


class JsonFormatter(logging.Formatter):
    """For programs: {"time", "level", "logger", "message", "cause"?, "error"?, and what the call has added}."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message is."""
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
