"""Copies of each worker's shards in the memory of another worker, so that a lost worker costs no step.

At the beginning of a step a worker copies its part of the state to host memory and sends the copy to the rank that
mirrors it, while the step computes. It takes part in the step's sum only when both copies, its own and the one that it
receives, are whole. So where any worker has begun step s + 1, all have the copies of step s, and two generations of
copies, of which the older one is overwritten, always hold a step of which every worker's part exists:

    all survivors are in step s, its copies are whole     the step is repeated
    a copy of step s is not whole, or steps differ        the step before is repeated, too

With copies in every k-th step only, the steps since the last ones are, k of them at most.

Work beside the training (`job.repeat`) has copies of its own, of its beginning, whole before it begins. They hold what
the script was in the middle of, so they are of use in that round of work only.

A worker and the one that mirrors it are on different nodes where no node has more than half of the workers. Where both
are lost, the training returns to its last checkpoint. Memory: two copies of two workers' parts.

With several replica groups nothing is sent: others have the same part. If a worker is lost in the middle of a step, the
others have all parts of the step's beginning; the own copies are for a loss after which some of them have applied the
step and others have not.

Within one node the mirror maps the memory of the copy itself, which stays when its worker is killed, and only its
address is sent. The owner may overwrite it before the mirror has read that, but only the older of two copies, and its
version is in the memory too: one that a worker was killed in counts for nothing.

Rejected: only the other worker's part, without an own copy. Workers that have applied the step when others learn of the
loss could not go back.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from elastic_runtime.errors import CollectiveError
from elastic_runtime.sharded.shared_memory import Address, Segment, new_segment, open_segment
from elastic_runtime.sharded.state import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from elastic_runtime.membership.process_group import Group, Transfer
    from elastic_runtime.plan.replica_groups import Grid
    from elastic_runtime.sharded.layout import Sharded

SLOTS = 2
STATE_PER_PARAMETER = 3
"""Bytes of state for each byte of a parameter: itself and the two moments of the usual optimizers."""
_PIECE = 32 << 20
_ALIGNMENT = 64


class Copied(NamedTuple):
    """One slot: the parts that a worker holds of a step's beginning, or of that of a `round` of work beside the
    training (-1: of a step): the parts numbered `own` and `ward` of `shards`; -1: none.
    """

    step: int = -1
    generation: int = 0
    shards: int = 0
    round: int = -1
    own: int = -1
    ward: int = -1

    @property
    def version(self) -> tuple[int, ...]:
        """What the parts of one state have in common."""
        return self[:4]


@dataclass(frozen=True)
class Source:
    """The copies from which a state is restored: `held[r]` is the number of new rank r's own old part (-1: none),
    `provided[r]` the old parts that it provides.
    """

    copied: Copied
    held: list[int]
    provided: list[list[int]]


def choose(table: Sequence[Sequence[Copied]], current_round: int) -> Source | None:
    """Return the newest step of which every part is held by one of these workers, or None.

    `current_round`: in which all of them are; -1: in none.
    """
    versions = {each.version for row in table for each in row if each.own >= 0 and each.round in {-1, current_round}}
    for version in sorted(versions, reverse=True):
        rows = [next((each for each in row if each.version == version), Copied()) for row in table]
        owners = {each.own: rank for rank, each in enumerate(rows) if each.own >= 0}
        wards = {each.ward: rank for rank, each in enumerate(rows) if each.ward >= 0}
        providers = wards | owners
        if len(providers) == Copied(*version).shards:
            provided: list[list[int]] = [[] for _ in rows]
            for old, rank in sorted(providers.items()):
                provided[rank].append(old)
            return Source(Copied(*version), [each.own for each in rows], provided)
    return None


def mirrors_of(nodes: Sequence[int]) -> list[int]:
    """Return for each rank the rank that mirrors it; `nodes[r]` is a number of rank r's node.

    Each rank mirrors one other. In a circle in the order of the nodes, the rank that is as many further as the largest
    node has ranks is on another node, unless that node has more than half of them.
    """
    circle = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    shift = max(Counter(nodes).values()) % len(nodes) or 1
    found = [0] * len(nodes)
    for place, rank in enumerate(circle):
        found[rank] = circle[(place + shift) % len(circle)]
    return found


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


class _Arrival:
    """The address of the ward's memory, which is mapped as soon as it has arrived: the ward may be killed soon."""

    def __init__(self, known: dict[Address, Segment]) -> None:
        self.address = torch.zeros(len(Address._fields), dtype=torch.int64)
        self.segment: Segment | None = None
        self._known = known

    def open(self) -> None:
        """Map the memory, unless it is mapped already; in the thread of the transfer."""
        address = Address(*self.address.tolist())
        self.segment = self._known.get(address) or open_segment(address)


@dataclass
class _Slot:
    """`memory` holds the own shards, in `segment` where others can map it; `mirrored` those of the ward, in its own
    segment `of_ward` if it is mapped.
    """

    copied: Copied = field(default_factory=Copied)
    own: Parts | None = None
    memory: torch.Tensor = field(default_factory=_nothing)
    segment: Segment | None = None
    mirrored: torch.Tensor = field(default_factory=_nothing)
    of_ward: Segment | None = None
    transfer: Transfer | None = None
    arrival: _Arrival | None = None
    alone: bool = False  # there is no ward: other replica groups have the same parts

    @property
    def is_whole(self) -> bool:
        """Whether the ward's part has arrived, and the own one at the rank that mirrors it."""
        return (self.copied.ward >= 0 or (self.alone and self.copied.own >= 0)) and self.transfer is None

    @property
    def held(self) -> Copied:
        """What it holds; not the ward's part, if the ward has begun to overwrite it."""
        is_old = self.of_ward is not None and self.of_ward.version != self.copied.version
        return self.copied._replace(ward=-1) if is_old else self.copied

    def give_up(self) -> None:
        """Keep the own copy only. Data in flight may still be read from, and arrive in, the present memory."""
        self.copied, self.transfer = self.copied._replace(ward=-1), None
        self.memory = self.mirrored = _nothing()
        self.segment = self.of_ward = self.arrival = None

    def allocate(self, nbytes: int, ward_nbytes: int, *, mapped: bool) -> None:
        """Have memory of these sizes: what there is, or new one. `mapped`: the ward's memory comes from the ward."""
        if self.memory.numel() != nbytes:
            self.segment = new_segment(nbytes)
            self.memory = torch.zeros(nbytes, dtype=torch.uint8) if self.segment is None else self.segment.body
        if self.segment is not None:
            self.segment.mark(Copied().version)
        if mapped or self.of_ward is not None or self.mirrored.numel() != ward_nbytes:
            self.mirrored, self.of_ward = torch.zeros(0 if mapped else ward_nbytes, dtype=torch.uint8), None

    def arrived(self) -> None:
        """The transfer has ended well."""
        arrival, self.transfer, self.arrival = self.arrival, None, None
        if arrival is not None and arrival.segment is not None:
            self.mirrored, self.of_ward = arrival.segment.body, arrival.segment
        elif arrival is not None:
            self.copied = self.copied._replace(ward=-1)


class Mirror:
    """This worker's copies of its own shards and of those of one other rank, its ward.

    `every`: how many steps after the last copies this worker wants the next ones; 0: none.
    """

    def __init__(self, every: int) -> None:
        self.every = self._every = every
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._group: Group | None = None
        self._number = 0
        self._to, self._ward = -1, -1
        self._own, self._shards = 0, 1  # the number of the own part, and of all parts
        self._kinds: list[Sharded] = []
        self._layouts = (_Layout([], 0, 1),) * 2  # of the own shards of these kinds, and of the ward's
        self._mapped = (False, False)  # whether the own memory is mapped by another worker, and the ward's here
        self._segments: dict[Address, Segment] = {}  # of the ward
        self._probe = new_segment(0)

    @property
    def probe(self) -> Address:
        """The address of a small segment, by which others find whether they can map this process's memory."""
        return self._probe.address if self._probe is not None else Address()

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory that the copies occupy."""
        return sum(slot.memory.nbytes + slot.mirrored.nbytes for slot in self._slots)

    @property
    def in_flight(self) -> bool:
        """Whether copies were begun, by all workers, for which none has waited yet."""
        return any(slot.transfer is not None for slot in self._slots)

    # The generations

    def leave_generation(self, *, agreed: bool) -> None:
        """Before a change of members: end a transfer. No copies are made until `enter`.

        `agreed`: all members have begun the same step, so the transfer is waited for. After a loss it is not: a peer
        that is alive may not begin that step any more.
        """
        with contextlib.suppress(CollectiveError):
            if agreed:
                self.settle()
        for slot in self._slots:
            if slot.transfer is not None and slot.transfer.succeeded:
                slot.arrived()
            elif slot.transfer is not None:
                slot.give_up()
        self._group = None

    def enter(
        self, group: Group, number: int, to: Sequence[int], every: int, mapped: Sequence[bool] | None = None
    ) -> None:
        """Make copies among the members of this generation from now on, all in the same steps. Rank r is mirrored by
        rank `to[r]`, which maps its memory if `mapped[r]`; without any the copies are this worker's own.
        """
        self._group, self._number, self._every = group, number, every
        self._own, self._shards = group.grid.shard_of(group.rank), group.grid.shards
        self._to, self._ward = (to[group.rank], to.index(group.rank)) if to else (-1, -1)
        self._mapped = (mapped[group.rank], mapped[self._ward]) if mapped else (False, False)
        self._kinds, self._segments = [], {}

    # Each step

    def begin_step(self, step: int, capture: Callable[[], Parts]) -> None:
        """Copy and send this worker's part of the state, if it is due. `capture` returns it, as it is."""
        group = self._group
        if group is None or self.in_flight:
            return
        newest = max(slot.copied for slot in self._slots)
        known = newest.generation == self._number
        if known and (newest.step == step or step % self._every):
            return
        self._copy(step, -1, capture(), group)

    # Work beside the training

    def begin_round(self, number: int, step: int, capture: Callable[[], Parts]) -> None:
        """Copy and send this worker's part of the state before work of all workers.

        All have completed a step's sum, so its copies are whole and the older ones may be overwritten; or, where the
        script has left its loop within a step, they have settled its copies, and met.
        """
        if self._group is not None:
            self._copy(step, number, capture(), self._group)

    def end_round(self) -> None:
        """Drop the copies of its beginning."""
        for slot in self._slots:
            if slot.copied.round >= 0:
                slot.copied = Copied()

    def settle(self) -> None:
        """Wait for copies that are on their way: before a step's sum, after which other workers may overwrite the older
        ones, and before work beside the training. Raises CollectiveError if a peer was lost.
        """
        for slot in self._slots:
            if slot.transfer is not None and self._group is not None:
                self._group.finish(slot.transfer)
                slot.arrived()
                self._segments = {each.address: each for slot in self._slots if (each := slot.of_ward) is not None}

    def _copy(self, step: int, number: int, parts: Parts, group: Group) -> None:
        slot = min(self._slots, key=lambda slot: (slot.is_whole, slot.copied))
        kinds, alone = parts.sharded, self._ward < 0
        if kinds != self._kinds:
            self._kinds = kinds
            of_ward = _Layout([] if alone else kinds, self._ward, self._shards)
            self._layouts = (_Layout(kinds, self._own, self._shards), of_ward)
        own, ward = self._layouts
        slot.copied, slot.own, slot.alone = Copied(), None, alone
        slot.allocate(own.nbytes, ward.nbytes, mapped=self._mapped[1])
        shards = own.shards(slot.memory)
        for copy, shard in zip(shards, parts.shards, strict=True):
            copy.copy_(shard)
        replicated = [tensor.detach().to("cpu", copy=True) for tensor in parts.replicated]
        slot.own = Parts(parts.skeleton, parts.kinds, shards, replicated)
        slot.copied = Copied(step, self._number, self._shards, number, self._own, self._ward)
        if slot.segment is not None:
            slot.segment.mark(slot.copied.version)
        if not alone:
            self._send(slot, group)

    def _send(self, slot: _Slot, group: Group) -> None:
        address = slot.segment.address if slot.segment is not None else Address()
        sent = [torch.tensor(address)] if self._mapped[0] else _pieces(slot.memory)
        slot.arrival = _Arrival(dict(self._segments)) if self._mapped[1] else None
        received = [slot.arrival.address] if slot.arrival else _pieces(slot.mirrored)
        after = slot.arrival.open if slot.arrival else None
        slot.transfer = group.swap(sent, self._to, received, self._ward, after)

    # Recovery

    def held(self) -> list[Copied]:
        """Return what each slot holds."""
        return [slot.held for slot in self._slots]

    def source(self, group: Group, saved: int, current_round: int) -> Source | None:
        """Return the copies that the members of this group choose, if they are not older than the newest checkpoint.

        `saved` is the step of that checkpoint, as rank 0 sees it; -1: there is none. `current_round`: as for `choose`.
        """
        row = torch.tensor([saved, *itertools.chain(*self.held())], dtype=torch.int64)
        rows = group.all_gather(row)
        table = [[Copied(*slot) for slot in each] for each in rows[:, 1:].view(group.size, SLOTS, -1).tolist()]
        found = choose(table, current_round)
        return found if found is not None and found.copied.step >= int(rows[0, 0]) else None

    def part(self, copied: Copied) -> tuple[Parts | None, dict[int, list[torch.Tensor]]]:
        """Return (the own part of this step without its shards, the shards that are held of it by their part)."""
        slot = next((slot for slot in self._slots if slot.copied.version == copied.version), None)
        if slot is None or slot.own is None:
            return None, {}
        own, held = slot.own, slot.held
        shards = {held.own: list(own.shards)}
        if held.ward >= 0:
            shards[held.ward] = _Layout(own.sharded, held.ward, held.shards).shards(slot.mirrored)
        return Parts(own.skeleton, own.kinds, [], [tensor.clone() for tensor in own.replicated]), shards

    def forget_all_but(self, copied: Copied | None) -> None:
        """Drop the copies of other steps: the training has gone back to this one, or to a checkpoint (None)."""
        self._slots = [slot if copied and slot.copied.version == copied.version else _Slot() for slot in self._slots]


class _Layout:
    """The places of one rank's shards in one memory: (start, bytes, dtype, shape) of each."""

    def __init__(self, kinds: Iterable[Sharded], rank: int, ranks: int) -> None:
        self._spans: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        self.nbytes = 0
        for kind in kinds:
            shape = kind.local_shape(kind.part(rank, ranks))
            size = math.prod(shape) * kind.dtype.itemsize
            self._spans.append((self.nbytes, size, kind.dtype, shape))
            self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def shards(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards that lie in this memory, as views of it."""
        return [memory[start : start + size].view(dtype).view(shape) for start, size, dtype, shape in self._spans]


def _pieces(memory: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(memory, _PIECE)) if memory.numel() else []


# Whether there is memory for it


def node_number() -> int:
    """Return a number of the machine on which this process runs, also from within a container; 0: unknown."""
    try:
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return 0


def free_memory() -> tuple[int, int]:
    """Return the bytes of host memory that are available on this machine, and within this process's own limit."""
    machine = limit = 1 << 62
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        own = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        limit = int((own / "memory.max").read_text()) - int((own / "memory.current").read_text())
    except (OSError, ValueError, StopIteration):
        pass  # no such limit, or not Linux
    return machine, max(limit, 0)


def needed(parameter_bytes: int, grid: Grid) -> int:
    """Return the bytes of host memory that the copies take on each worker: two, of two workers' parts, or of its own
    where there are several replica groups.
    """
    workers = 2 if grid.groups == 1 else 1
    return workers * SLOTS * STATE_PER_PARAMETER * parameter_bytes // grid.shards
