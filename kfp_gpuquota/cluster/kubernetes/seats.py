"""Which pod holds which devices of which node. Pure bookkeeping.

The kubelet's device plugin chooses the real devices; these numbers only have to be distinct and to survive a restart,
which they do because the patch that admits a pod writes them on it. A pod without them (bound before we were there, or
by somebody else) gets free ones. Where a node has lost devices under running pods, their numbers lie beyond its count.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class NodeSeats:
    """One node: `count` devices, `taken` whole or in `parts` by pods; `foreign` are those of pods outside the quota."""

    count: int = 0
    taken: dict[int, str] = field(default_factory=dict)
    parts: dict[int, set[str]] = field(default_factory=dict)
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
        return devices

    def release(self, holder: str) -> tuple[str, tuple[int, ...]] | None:
        """The holder is gone; what it held."""
        held = self._of.pop(holder, None)
        if held is None:
            return None
        seats = self._node(held[0])
        for device in held[1]:
            if seats.taken.get(device) == holder:
                del seats.taken[device]
            elif (holders := seats.parts.get(device)) is not None:
                holders.discard(holder)
                if not holders:
                    del seats.parts[device]
        seats.foreign.difference_update(held[1])
        return held

    def _node(self, node: str) -> NodeSeats:
        return self._nodes.setdefault(node, NodeSeats())


def _all_free(seats: NodeSeats, devices: tuple[int, ...], *, part: bool) -> bool:
    fits = all(device < seats.count and device not in seats.taken for device in devices)
    return fits and (part or not any(device in seats.parts for device in devices))


def _free(seats: NodeSeats, count: int, *, last: bool) -> tuple[int, ...]:
    """Free devices, the first ones, or the last ones for pods outside the quota; beyond the node's where none are."""
    free = [index for index in range(seats.count) if index not in seats.taken and index not in seats.parts]
    chosen = free[-count:] if last else free[:count]
    beyond = max((seats.count, *(index + 1 for index in (*seats.taken, *seats.parts))))
    return (*chosen, *range(beyond, beyond + count - len(chosen)))
