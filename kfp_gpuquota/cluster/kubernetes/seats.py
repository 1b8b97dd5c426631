"""Which pod holds which devices of which node. Pure bookkeeping.

The kubelet's device plugin chooses the real devices; these numbers only have to be distinct and to survive a restart,
which they do because the patch that admits a pod writes them on it. A pod without them (bound before we were there, or
by somebody else) gets free ones. Where a node has lost devices under running pods, their numbers lie beyond its count.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class NodeSeats:
    """One node: `count` devices, `taken` by pods; `foreign` are those of pods outside the quota."""

    count: int = 0
    taken: dict[int, str] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)


class Seats:
    """All nodes' devices."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeSeats] = {}
        self._of: dict[str, tuple[str, tuple[int, ...]]] = {}

    def resize(self, node: str, count: int) -> None:
        """The node has that many devices from now on."""
        self._node(node).count = count

    def held(self, holder: str) -> tuple[str, tuple[int, ...]] | None:
        """(node, devices) of a holder."""
        return self._of.get(holder)

    def foreign(self, node: str) -> set[int]:
        """Devices of pods outside the quota."""
        return self._node(node).foreign

    def overcommitted(self, node: str) -> bool:
        """More is held on the node than it has."""
        seats = self._node(node)
        return any(index >= seats.count for index in seats.taken)

    def take(
        self, holder: str, node: str, count: int, wanted: tuple[int, ...] | None, *, foreign: bool = False
    ) -> tuple[int, ...]:
        """Seat `holder` on `wanted` where these are free, else on any free ones; the devices."""
        seats = self._node(node)
        devices = wanted if wanted is not None and _all_free(seats, wanted) else _free(seats, count, last=foreign)
        seats.taken.update(dict.fromkeys(devices, holder))
        if foreign:
            seats.foreign.update(devices)
        self._of[holder] = (node, devices)
        return devices

    def release(self, holder: str) -> tuple[str, tuple[int, ...]] | None:
        """The holder is gone; what it held."""
        held = self._of.pop(holder, None)
        if held is None:
            return None
        seats = self._node(held[0])
        for device in held[1]:
            del seats.taken[device]
        seats.foreign.difference_update(held[1])
        return held

    def _node(self, node: str) -> NodeSeats:
        return self._nodes.setdefault(node, NodeSeats())


def _all_free(seats: NodeSeats, devices: tuple[int, ...]) -> bool:
    return all(device < seats.count and device not in seats.taken for device in devices)


def _free(seats: NodeSeats, count: int, *, last: bool) -> tuple[int, ...]:
    """Free devices, the first ones, or the last ones for pods outside the quota; beyond the node's where none are."""
    free = [index for index in range(seats.count) if index not in seats.taken]
    chosen = free[-count:] if last else free[:count]
    beyond = max((seats.count, *(index + 1 for index in seats.taken)))
    return (*chosen, *range(beyond, beyond + count - len(chosen)))
