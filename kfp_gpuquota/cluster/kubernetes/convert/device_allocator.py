"""Tracks which pod holds which devices of which node. No I/O.

The kubelet's device plugin chooses the real devices; these indices only have to be distinct and to survive a restart of
the controller. They do, because the patch that admits a pod writes them into an annotation. A pod without it (bound
before the controller was installed, or by another controller) gets free indices. If a node has lost devices under
running pods, pods' indices are beyond its device count: as many free indices are withheld, since what counts is how
many devices are held, not which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@dataclass(slots=True)
class NodeDevices:
    """Devices of one node: `taken` as a whole, or in `parts`, by pods; `foreign`: held by pods outside the quota."""

    count: int = 0
    taken: dict[int, str] = field(default_factory=dict)
    parts: dict[int, set[str]] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)


class SharedDevicesObserver(Protocol):
    """Is notified of changes of shared devices; implemented by `Reservations`."""

    def shared_changed(self, holder: str, node: str, devices: tuple[int, ...], /) -> None:
        """Process that the holder has taken or released parts of these devices."""


class DeviceAllocator:
    """The devices of all nodes."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeDevices] = {}
        self._of: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._observers: list[SharedDevicesObserver] = []
        self.overfull: dict[str, None] = {}
        """Nodes of which devices beyond their count are held: what is withheld of them changes with every pod."""

    def observe(self, observer: SharedDevicesObserver) -> None:
        """Notify the observer from now on when parts of devices are taken or released."""
        self._observers.append(observer)

    def resize(self, node: str, count: int) -> None:
        """Set the number of the node's devices."""
        self._node(node).count = count
        self._note_overfull(node)

    def in_use(self, node: str) -> bool:
        """Return whether any of the node's devices is held."""
        return bool(self._node(node).taken or self._node(node).parts)

    def idle(self, node: str, kept: Collection[int] = ()) -> tuple[int, ...]:
        """Return the node's devices that can be planned and that nobody holds, without those to be `kept`."""
        state = self._node(node)
        left_out = {*state.taken, *state.parts, *self.unplanned(node), *kept}
        return tuple(device for device in range(state.count) if device not in left_out)

    def held(self, holder: str) -> tuple[str, tuple[int, ...]] | None:
        """Return the (node, devices) of a holder, if any."""
        return self._of.get(holder)

    def foreign(self, node: str) -> set[int]:
        """Return the node's devices that pods outside the quota hold."""
        return self._node(node).foreign

    def unplanned(self, node: str) -> set[int]:
        """Return the devices that are not planned: those of pods outside the quota, and free ones that are withheld."""
        state = self._node(node)
        held = state.taken.keys() | state.parts.keys()
        beyond = sum(index >= state.count for index in held)
        free = [index for index in range(state.count) if index not in held]
        return state.foreign | set(free[max(0, len(free) - beyond) :])

    def _note_overfull(self, node: str) -> None:
        state = self._node(node)
        if any(index >= state.count for held in (state.taken, state.parts) for index in held):
            self.overfull[node] = None
        else:
            self.overfull.pop(node, None)

    def sharers(self, node: str, device: int) -> frozenset[str]:
        """Return the holders of parts of a device."""
        return frozenset(self._node(node).parts.get(device, ()))

    def shared(self) -> Iterator[tuple[str, int]]:
        """Return the (node, device) pairs of all shared devices."""
        return ((name, device) for name, state in self._nodes.items() for device in state.parts)

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
        """Assign devices to `holder`: the `wanted` ones if they are free, else any free ones. Return the devices.

        Annotated devices beyond the node's count are given as well: a controller that never stopped counts them.

        With `part` it holds a part of each, and others may hold the rest; the plan ensures that the parts fit.
        """
        state = self._node(node)
        free = wanted is not None and _all_free(state, wanted, part=part)
        devices = wanted if wanted is not None and free else _free(state, count, last=foreign)
        if part:
            for device in devices:
                state.parts.setdefault(device, set()).add(holder)
        else:
            state.taken.update(dict.fromkeys(devices, holder))
        if foreign:
            state.foreign.update(devices)
        self._of[holder] = (node, devices)
        self._note_overfull(node)
        if part:
            self._notify(holder, node, devices)
        return devices

    def release(self, holder: str) -> tuple[str, tuple[int, ...]] | None:
        """Release a holder's devices; return the (node, devices) that it held, if any."""
        held = self._of.pop(holder, None)
        if held is None:
            return None
        state = self._node(held[0])
        shared = tuple(device for device in held[1] if _leave(state, device, holder))
        state.foreign.difference_update(held[1])
        self._note_overfull(held[0])
        if shared:
            self._notify(holder, held[0], shared)
        return held

    def move(self, holder: str, node: str, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
        """Assign as many devices of another node to a holder instead of those that it holds; return them."""
        _, devices = self.release(holder) or ("", ())
        return self.take(holder, node, len(devices), wanted)

    def _notify(self, holder: str, node: str, devices: tuple[int, ...]) -> None:
        for observer in self._observers:
            observer.shared_changed(holder, node, devices)

    def _node(self, node: str) -> NodeDevices:
        return self._nodes.setdefault(node, NodeDevices())


def _leave(state: NodeDevices, device: int, holder: str) -> bool:
    """Remove the holder from a device; return whether it held only a part of it."""
    if state.taken.get(device) == holder:
        del state.taken[device]
        return False
    holders = state.parts.get(device, set())
    shared = holder in holders
    holders.discard(holder)
    if shared and not holders:
        del state.parts[device]
    return shared


def _all_free(state: NodeDevices, devices: tuple[int, ...], *, part: bool) -> bool:
    fits = all(device not in state.taken for device in devices)
    return fits and (part or not any(device in state.parts for device in devices))


def _free(state: NodeDevices, count: int, *, last: bool) -> tuple[int, ...]:
    """Return free devices: the first, or for pods outside the quota the last ones; indices beyond the count if none."""
    free = [index for index in range(state.count) if index not in state.taken and index not in state.parts]
    chosen = free[max(0, len(free) - count) :] if last else free[:count]
    beyond = max((state.count, *(index + 1 for index in (*state.taken, *state.parts))))
    return (*chosen, *range(beyond, beyond + count - len(chosen)))
