"""Ranks hosts for shares of GPUs with `fragmentation.Packer`, so that the remaining capacity stays usable.

The mix of demands is that of the running and pending jobs, each with the hosts that its rules admit. It is used for
shares that start now, and for single workers with whole devices where devices are shared; for other workers the whole
devices are counted, and nominations depend on the workers that leave. It is created when a plan places its first share,
and updated with the hosts that changed since.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.placement.fragmentation import WHOLE, Demand, Machine, Packer
from kfp_gpuquota.scheduler.state.model import GPU, UNLIMITED, Host, Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Rules

_ENDLESS = 1 << 50
_MIB = 1 << 20


class Packing:
    """The hosts of a ledger as machines, in the order of their names."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        mix = _mix(ledger)
        self._hosts = sorted((host for host in ledger.hosts.values() if host.ready), key=lambda host: host.name)
        self._rows = {host: row for row, host in enumerate(self._hosts)}
        kinds = {(r.rules, pool): self._admitted(r.rules, pool) for r, pool in mix}
        columns = sorted(set(kinds.values()))
        self._kinds = {kind: columns.index(admitted) for kind, admitted in kinds.items()}
        machines = [
            Machine(host.name, len(host.devices), _ENDLESS, _ENDLESS, "".join(column[row] for column in columns))
            for host, row in self._rows.items()
        ]
        self._models = {machine.model for machine in machines}
        self._packer = Packer(machines, _counted((self._demand(r, pool), n) for (r, pool), n in mix.items()))
        self._packer.set_idle({row: _idle(host) for host, row in self._rows.items()})
        self._seen = len(ledger.touched_hosts)

    def ranked(self, request: Request, pool: str) -> Iterator[Host]:
        """Return the hosts with enough devices, CPU and memory, in ascending order of fragmentation."""
        touched = self._ledger.touched_hosts
        changed = dict.fromkeys(touched[self._seen :])
        self._packer.set_idle({self._rows[host]: _idle(host) for host in changed if host in self._rows})
        self._seen = len(touched)
        return (self._hosts[row] for row in self._packer.ranked(self._demand(request, pool)))

    def _admitted(self, rules: Rules, pool: str) -> str:
        """Return for each host '+' where such requests may use it: hosts with the same signs are of one model."""
        return "".join("-+"[pool == host.pool and host.admits(rules)] for host in self._hosts)

    def _demand(self, request: Request, pool: str) -> Demand:
        share = min(GPU, request.share_of(self._ledger.gpu_memory_mib))
        at = self._kinds.get((request.rules, pool))
        models = frozenset(model for model in self._models if at is None or model[at] == "+")
        some = models if len(models) < len(self._models) else None
        return Demand(request.devices, -(-share * WHOLE // GPU), request.cpu, -(-request.memory // _MIB), some)


def _idle(host: Host) -> tuple[list[int], int, int]:
    """Return the idle thousandths of each device, milli-CPUs and MiB."""
    free = [host.other_idle(index) for index in range(2)]
    cpu, memory = (_ENDLESS if left == UNLIMITED else max(0, int(left)) for left in free)
    devices = [max(0, host.idle(device)) * WHOLE // GPU for device in host.devices]
    return devices, cpu, memory // _MIB


def _mix(ledger: Ledger) -> Counter[tuple[Request, str]]:
    """Return the number of tasks by request and node pool."""
    mix: Counter[tuple[Request, str]] = Counter()
    for queue in ledger.queues.values():
        for shape, entries in queue.waiting.items():
            for request in shape.requests:
                mix[request, queue.pool] += len(entries)
        for job in queue.running:
            mix[job.request, queue.pool] += job.active
    return mix


def _counted(demands: Iterable[tuple[Demand, int]]) -> Counter[Demand]:
    """Return the demands with the sums of their counts; several requests may be the same demand.

    In an order of their own: that of the running jobs is another one after each plan, and sums of floating-point
    numbers in another order can be another choice of equal hosts.
    """
    counted: Counter[Demand] = Counter()
    for demand, number in demands:
        counted[demand] += number
    return Counter(dict(sorted(counted.items(), key=lambda row: _order(row[0]))))


def _order(demand: Demand) -> tuple[int, int, int, int, list[str]]:
    return demand.devices, demand.milli, demand.cpu_milli, demand.memory_mib, sorted(demand.models or ())
