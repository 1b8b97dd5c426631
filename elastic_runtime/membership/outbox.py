"""What a worker says to its coordinator, and what has to be said again to one that restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.membership.generations import Generation


class Listener(Protocol):
    """The coordinator, or what stands in for it."""

    def say(self, event: str, **fields: Any) -> None:
        """Report an event of this worker."""


class Voice:
    """`adopted()`: the generation in force. Without a coordinator nobody listens."""

    coordinator: Listener | None = None

    def __init__(self, worker: str, adopted: Callable[[], Generation | None]) -> None:
        self._worker, self._adopted = worker, adopted
        self._events: dict[str, dict[str, Any]] = {}

    def say(self, event: str, **fields: object) -> None:
        """Once."""
        if self.coordinator:
            self.coordinator.say(event, **fields)

    def stand(self, event: str, **fields: object) -> None:
        """And again to each coordinator that is connected to."""
        self._events[event] = fields
        self.say(event, **fields)

    def forget(self, event: str) -> None:
        """It is not true any more."""
        self._events.pop(event, None)

    def standing(self) -> list[dict[str, Any]]:
        """What is true of this worker now, for a coordinator that it has just connected to."""
        adopted = self._adopted()
        first: dict[str, Any] = {"event": "WorkerJoined"}
        if adopted:
            step = int(self._events.get("ProgressReported", {}).get("step", 0))
            first = {
                "event": "WorkerReconnected", "generation": adopted.number, "members": adopted.members, "step": step
            }  # fmt: skip
        events = [{"event": event, **fields} for event, fields in list(self._events.items())]
        return [{"worker": self._worker, **event} for event in [first, *events]]
