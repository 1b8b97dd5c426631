"""Placement that keeps the remaining capacity usable: fragmentation gradient descent.

After Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent"
(USENIX ATC 2023). For a prior mix of demands, a node's fragmentation is the expected amount of its idle GPUs that a
demand drawn from the mix cannot use: all of it where the node lacks the devices, CPU or memory for the demand, else the
devices that have too little left. A demand is placed where it raises that least, among equals on the node with the
fewest idle GPUs.

Costs are cached per kind of demand, and only the nodes that changed since are evaluated again, in one array operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

WHOLE: Final = 1000
"""Thousandths of one device."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The capacity of an empty node."""

    name: str
    devices: int
    cpu_milli: int
    memory_mib: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """A request for `milli` thousandths of each of `devices` devices of one node; `models` None: any model."""

    devices: int
    milli: int = WHOLE
    cpu_milli: int = 0
    memory_mib: int = 0
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """The machine's index and the devices on which a demand was placed."""

    machine: int
    devices: tuple[int, ...]


@dataclass(slots=True)
class _Costs:
    """Per machine, the cost of placing one kind of demand (inf: impossible), valid up to the `seen`-th change."""

    cost: Floats
    value: Ints
    seen: int = 0
    admitted: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


class Packer:
    """Machines with their idle capacity, and the mix of demands for which it should stay usable."""

    def __init__(self, machines: Sequence[Machine], mix: Mapping[Demand, float]) -> None:
        self.machines = list(machines)
        widest = max((m.devices for m in machines), default=0)
        self.gpu: Ints = np.zeros((len(machines), widest), dtype=np.int64)  # (machines, devices): thousandths idle
        for i, machine in enumerate(machines):
            self.gpu[i, : machine.devices] = WHOLE
        self.cpu: Ints = np.array([m.cpu_milli for m in machines], dtype=np.int64)
        self.memory: Ints = np.array([m.memory_mib for m in machines], dtype=np.int64)
        self.models = np.array([m.model for m in machines])
        self._mix = Mix(mix, self.models)
        everything = np.arange(len(machines))
        self._fragments = self._mix.fragments(everything, self.gpu, self.cpu, self.memory)
        self._changes: list[int] = []
        self._known: dict[Demand, _Costs] = {}

    def place(self, demand: Demand) -> Spot | None:
        """Allocate devices for the demand where that fragments least; return None where it fits nowhere."""
        costs = self._costs(demand)
        machine = int(np.argmin(costs.cost))
        if not np.isfinite(costs.cost[machine]):
            return None
        devices = self._pick(machine, demand, int(costs.value[machine]))
        self._change(machine, demand, devices, -1)
        return Spot(machine, devices)

    def ranked(self, demand: Demand) -> list[int]:
        """Return the machines on which the demand fits, in ascending order of fragmentation."""
        costs = self._costs(demand).cost
        return [int(machine) for machine in np.argsort(costs, kind="stable") if np.isfinite(costs[machine])]

    def set_idle(self, idle: Mapping[int, tuple[Sequence[int], int, int]]) -> None:
        """Set the idle capacity of machines: (thousandths by device, CPU, memory) by machine."""
        for machine, (gpu, cpu_milli, memory_mib) in idle.items():
            self.gpu[machine, : len(gpu)] = gpu
            self.cpu[machine], self.memory[machine] = cpu_milli, memory_mib
        rows = np.array(list(idle), dtype=np.int64)
        if len(rows):
            self._fragments[rows] = self._mix.fragments(rows, self.gpu[rows], self.cpu[rows], self.memory[rows])
            self._changes.extend(idle)

    def release(self, demand: Demand, spot: Spot) -> None:
        """Release the devices of the demand."""
        self._change(spot.machine, demand, spot.devices, 1)

    def _pick(self, machine: int, demand: Demand, value: int) -> tuple[int, ...]:
        """Return one shared device with exactly `value` left, else the fullest devices on which it fits."""
        left = self.gpu[machine]
        if demand.devices == 1:
            return (int(np.argmax(left == value)),)
        fitting = [d for d in np.argsort(left, kind="stable") if left[d] >= demand.milli]
        return tuple(sorted(int(d) for d in fitting[: demand.devices]))

    def _change(self, machine: int, demand: Demand, devices: tuple[int, ...], sign: int) -> None:
        self.gpu[machine, list(devices)] += sign * demand.milli
        self.cpu[machine] += sign * demand.cpu_milli
        self.memory[machine] += sign * demand.memory_mib
        self._changed(machine)

    def _changed(self, machine: int) -> None:
        row = np.array([machine])
        self._fragments[machine] = self._mix.fragments(row, self.gpu[row], self.cpu[row], self.memory[row])[0]
        self._changes.append(machine)

    def _costs(self, demand: Demand) -> _Costs:
        costs = self._known.get(demand)
        if costs is None:
            costs = _Costs(np.full(len(self.machines), np.inf), np.zeros(len(self.machines), dtype=np.int64))
            costs.admitted = _admits(demand, self.models)
            self._known[demand] = costs
            rows = np.flatnonzero(costs.admitted)
        else:
            changed = np.unique(np.array(self._changes[costs.seen :], dtype=np.int64))
            rows = changed[costs.admitted[changed]]
        costs.seen = len(self._changes)
        if len(rows):
            self._evaluate(demand, rows, costs)
        return costs

    def _evaluate(self, demand: Demand, rows: Ints, costs: _Costs) -> None:
        """Set the cost of each of the machines `rows`."""
        costs.cost[rows] = np.inf
        fits = (self.cpu[rows] >= demand.cpu_milli) & (self.memory[rows] >= demand.memory_mib)
        fits &= (self.gpu[rows] >= demand.milli).sum(axis=1) >= demand.devices
        rows = rows[fits]
        which, after, value = _options(np.sort(self.gpu[rows], axis=1), demand)
        at = rows[which]
        fragments = self._mix.fragments(at, after, self.cpu[at] - demand.cpu_milli, self.memory[at] - demand.memory_mib)
        # Ties go to the machine with the least idle GPUs: a thousandth of a device never outweighs a fragment.
        rise = fragments - self._fragments[at] + after.sum(axis=1) * _TIE
        order = np.argsort(-rise, kind="stable")  # the last write wins, so the cheapest option of a machine stays
        costs.cost[at[order]] = rise[order]
        costs.value[at[order]] = value[order]


_TIE: Final = 1e-7

_SHARPNESS: Final = 1.5
"""Exponent of the mix, which favors common demands: with 1 (the paper's mix) the last few percent of a cluster are kept
for demands that hardly ever arrive. Rejected: dropping the rarest 5 or 10 % of the mix."""


class Mix:
    """The prior: demands with probabilities, as arrays over kinds of demand (k) and distinct shares (s)."""

    def __init__(self, mix: Mapping[Demand, float], models: NDArray[np.str_], *, sharpness: float = _SHARPNESS) -> None:
        demands = [d for d in mix if d.devices]
        total = sum(count**sharpness for count in mix.values()) or 1.0
        self.weight: Floats = np.array([mix[d] ** sharpness / total for d in demands])  # (k,)
        self.shares: Ints = np.array(sorted({d.milli for d in demands}), dtype=np.int64)  # (s,)
        self.share: Ints = np.searchsorted(self.shares, [d.milli for d in demands])  # (k,): index into shares
        self.devices: Ints = np.array([d.devices for d in demands], dtype=np.int64)
        self.cpu: Ints = np.array([d.cpu_milli for d in demands], dtype=np.int64)
        self.memory: Ints = np.array([d.memory_mib for d in demands], dtype=np.int64)
        admitted = [_admits(d, models) for d in demands]
        self.admitted: Bools = np.array(admitted, dtype=np.bool_).reshape(len(demands), len(models)).T  # (machines, k)

    def fragments(self, machines: Ints, gpu: Ints, cpu: Ints, memory: Ints) -> Floats:
        """Return the expected thousandths of devices that a demand could not use: (b,), (b, d), (b,), (b,) -> (b,)."""
        usable = gpu[:, None, :] >= self.shares[None, :, None]  # (b, s, d)
        counts = usable.sum(axis=2)  # (b, s)
        amounts = (usable * gpu[:, None, :]).sum(axis=2)  # (b, s)
        feasible = counts[:, self.share] >= self.devices  # (b, k)
        feasible &= cpu[:, None] >= self.cpu
        feasible &= memory[:, None] >= self.memory
        feasible &= self.admitted[machines]
        used: Floats = (feasible * amounts[:, self.share]) @ self.weight
        idle: Floats = gpu.sum(axis=1) * self.weight.sum()
        return idle - used


def _admits(demand: Demand, models: NDArray[np.str_]) -> Bools:
    if demand.models is None:
        return np.ones(len(models), dtype=np.bool_)
    return np.isin(models, sorted(demand.models))


def _options(gpu: Ints, demand: Demand) -> tuple[Ints, Ints, Ints]:
    """Return every distinct way to allocate the demand on machines with sorted devices.

    (b, d) -> the machine of each option (o,), the devices after it (o, d), the device's idle share before it (o,).
    """
    rows = np.arange(len(gpu))
    if demand.devices != 1 or demand.milli == WHOLE:
        after = gpu.copy()
        # The tightest devices that fit: in sorted order the first `devices` with enough left.
        enough = gpu >= demand.milli
        taken = enough & (np.cumsum(enough, axis=1) <= demand.devices)
        after[taken] -= demand.milli
        return rows, after, np.full(len(gpu), demand.milli, dtype=np.int64)
    distinct = np.ones(gpu.shape, dtype=np.bool_)
    distinct[:, 1:] = gpu[:, 1:] != gpu[:, :-1]
    which, device = np.nonzero(distinct & (gpu >= demand.milli))
    after = gpu[which]
    value = gpu[which, device]
    after[np.arange(len(which)), device] -= demand.milli
    return which, after, value
