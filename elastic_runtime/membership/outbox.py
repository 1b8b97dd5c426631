"""A worker's events to its coordinator, and those that are sent again to one that restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.membership.generations import Generation


class EventReceiver(Protocol):
    """The coordinator, or a rehearsal's replacement for it."""

    def send(self, event: str, **fields: Any) -> None:
        """Send an event of this worker."""


class EventOutbox:
    """Sends this worker's events, if there is a coordinator. `adopted()` returns the generation in force."""

    coordinator: EventReceiver | None = None

    def __init__(self, worker: str, adopted: Callable[[], Generation | None]) -> None:
        self._worker, self._adopted = worker, adopted
        self._events: dict[str, dict[str, Any]] = {}

    def send(self, event: str, **fields: object) -> None:
        """Send an event once; it is lost if the coordinator is not connected."""
        if self.coordinator:
            self.coordinator.send(event, **fields)

    def publish(self, event: str, **fields: object) -> None:
        """Send an event now, and again on each new connection until it is replaced or retracted."""
        self._events[event] = fields
        self.send(event, **fields)

    def retract(self, event: str) -> None:
        """Stop sending a published event on new connections."""
        self._events.pop(event, None)

    def published(self) -> list[dict[str, Any]]:
        """Return the events that describe this worker to a coordinator it has just connected to."""
        adopted = self._adopted()
        first: dict[str, Any] = {"event": "WorkerJoined"}
        if adopted:
            step = int(self._events.get("ProgressReported", {}).get("step", 0))
            first = {
                "event": "WorkerReconnected", "generation": adopted.number, "members": adopted.members, "step": step
            }  # fmt: skip
        events = [{"event": event, **fields} for event, fields in list(self._events.items())]
        return [{"worker": self._worker, **event} for event in [first, *events]]
