"""Which pod holds which devices of which node. Pure bookkeeping.

The kubelet's device plugin chooses the real devices; these numbers only have to be distinct and to survive a restart,
which they do because the patch that admits a pod writes them on it. A pod without them (bound before we were there, or
by somebody else) gets free ones. Where a node has lost devices under running pods, their numbers lie beyond its count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class NodeSeats:
    """One node: `count` devices, `taken` whole or in `parts` by pods; `foreign` are those of pods outside the quota."""

    count: int = 0
    taken: dict[int, str] = field(default_factory=dict)
    parts: dict[int, set[str]] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)


class Seats:
    """All nodes' devices. `shared_changed(holder, node, devices)` is called when parts are taken or released."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeSeats] = {}
        self._of: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.shared_changed: Callable[[str, str, tuple[int, ...]], None] = lambda _holder, _node, _devices: None

    def resize(self, node: str, count: int) -> None:
        """The node has that many devices from now on."""
        self._node(node).count = count

    def in_use(self, node: str) -> bool:
        """Some of its devices are held."""
        return bool(self._node(node).taken or self._node(node).parts)

    def held(self, holder: str) -> tuple[str, tuple[int, ...]] | None:
        """(node, devices) of a holder."""
        return self._of.get(holder)

    def foreign(self, node: str) -> set[int]:
        """Devices of pods outside the quota."""
        return self._node(node).foreign

    def sharers(self, node: str, device: int) -> frozenset[str]:
        """Who holds parts of a device."""
        return frozenset(self._node(node).parts.get(device, ()))

    def shared(self) -> Iterator[tuple[str, int]]:
        """(node, device) of all devices that somebody holds a part of."""
        return ((name, device) for name, seats in self._nodes.items() for device in seats.parts)

    def take(
        self,
        holder: str,
        node: str,
        count: int,
        wanted: tuple[int, ...] | None,
        *,
        foreign: bool = False,
        part: bool = False,
    ) -> tuple[int, ...]:
        """Seat `holder` on `wanted` where these are free, else on any free ones; the devices.

        With `part` it holds a part of each: others may hold the rest, and that it suffices is for the plan to see to.
        """
        seats = self._node(node)
        free = wanted is not None and _all_free(seats, wanted, part=part)
        devices = wanted if wanted is not None and free else _free(seats, count, last=foreign)
        if part:
            for device in devices:
                seats.parts.setdefault(device, set()).add(holder)
        else:
            seats.taken.update(dict.fromkeys(devices, holder))
        if foreign:
            seats.foreign.update(devices)
        self._of[holder] = (node, devices)
        if part:
            self.shared_changed(holder, node, devices)
        return devices

    def release(self, holder: str) -> tuple[str, tuple[int, ...]] | None:
        """The holder is gone; what it held."""
        held = self._of.pop(holder, None)
        if held is None:
            return None
        seats = self._node(held[0])
        shared = tuple(device for device in held[1] if _leave(seats, device, holder))
        seats.foreign.difference_update(held[1])
        if shared:
            self.shared_changed(holder, held[0], shared)
        return held

    def _node(self, node: str) -> NodeSeats:
        return self._nodes.setdefault(node, NodeSeats())


def _leave(seats: NodeSeats, device: int, holder: str) -> bool:
    """Take the holder off a device; whether it held a part of it."""
    if seats.taken.get(device) == holder:
        del seats.taken[device]
        return False
    holders = seats.parts.get(device, set())
    shared = holder in holders
    holders.discard(holder)
    if shared and not holders:
        del seats.parts[device]
    return shared


def _all_free(seats: NodeSeats, devices: tuple[int, ...], *, part: bool) -> bool:
    fits = all(device < seats.count and device not in seats.taken for device in devices)
    return fits and (part or not any(device in seats.parts for device in devices))


def _free(seats: NodeSeats, count: int, *, last: bool) -> tuple[int, ...]:
    """Free devices, the first ones, or the last ones for pods outside the quota; beyond the node's where none are."""
    free = [index for index in range(seats.count) if index not in seats.taken and index not in seats.parts]
    chosen = free[max(0, len(free) - count) :] if last else free[:count]
    beyond = max((seats.count, *(index + 1 for index in (*seats.taken, *seats.parts))))
    return (*chosen, *range(beyond, beyond + count - len(chosen)))
