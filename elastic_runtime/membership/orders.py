"""The coordinator's orders, as this worker reads them (docs/membership.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """What stands for this worker. `kind`: Stay, Propose, Recover or Release; what a kind lacks is empty."""

    kind: str
    generation: int = 0
    members: tuple[str, ...] = ()
    base: int = 0
    why: str = ""

    @classmethod
    def parse(cls, message: object) -> Order:
        """From JSON. ValueError and TypeError where it is not an order."""
        if not isinstance(message, dict):
            raise TypeError(f"{message!r} is not an order")
        kind = message.get("order")
        if kind not in {"Stay", "Propose", "Recover", "Release"}:
            raise ValueError(f"{kind!r} is not an order")
        members = message.get("members", [])
        if not isinstance(members, list):
            raise TypeError(f"members of an order are {members!r}")
        return cls(
            str(kind),
            int(str(message.get("generation", 0))),
            tuple(str(worker) for worker in members),
            int(str(message.get("base", 0))),
            str(message.get("why", "")),
        )
