"""The records of a dump: those of `scheduler.state.model` by name instead of by reference, in the same units.

Shares are in micro-GPUs, CPU in milli-CPUs, memory in bytes unless a name says MiB, times in seconds since the epoch. A
field that is left out has its default; an amount that is left out is unlimited. Fields are only ever added; a change of
meaning raises `FORMAT`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kfp_gpuquota.api import Order, Project, Reason, StopPolicy
from kfp_gpuquota.api.affinity import NodeTerm, Taint, Toleration
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.scheduler.actions.decisions import Plan
from kfp_gpuquota.scheduler.state.ledger import RESERVE_AFTER_S
from kfp_gpuquota.scheduler.state.model import GPU, NEVER, PAUSE_S, STALE_AFTER_S, UNLIMITED, Group, Mark

FORMAT: Final = 1

Number = int | float


class AmountRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Micro-GPUs, milli-CPUs, bytes of memory."""

    gpu: Number = UNLIMITED
    cpu: Number = UNLIMITED
    memory: Number = UNLIMITED


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node; its `devices` are indices. `workers` hold devices, CPU, memory or other `resources` of it."""

    name: str
    devices: tuple[int, ...] = ()
    gpu_memory_mib: int = 0
    ready: bool = True
    cpu: Number = UNLIMITED
    memory: Number = UNLIMITED
    max_tasks: Number = UNLIMITED
    max_sharers: Number = UNLIMITED
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    pool: str = ""
    resources: dict[str, int] | None = None
    gpu_weights: tuple[tuple[str, int], ...] = ()
    workers: tuple[str, ...] = ()


class QueueRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A project or department in one node pool, with its quota there. Queues are named by `key`.

    `used` is its decayed over-quota usage in GPU-seconds up to `used_until`. `children` are keys, `running` and
    `waiting` uids: `waiting` has the first job of each group of alike jobs. `users` are its users with their past use
    and until when it is counted, as `recalled` is by the keys of others.
    """

    key: str
    name: str
    pool: str = ""
    deserved: AmountRecord = AmountRecord()
    limit: AmountRecord = AmountRecord()
    stop_policy: StopPolicy = StopPolicy.NONE
    order: Order = Order.FAIR
    min_run_time_s: Number = 0.0
    reserve_after_s: Number | None = None
    priority: int = 100
    weights: tuple[Number, Number, Number] = (1.0, 1.0, 1.0)
    created: Number = 0.0
    exists: bool = True
    used: Number = 0.0
    used_until: Number = 0.0
    users: dict[str, tuple[Number, Number]] = {}
    recalled: dict[str, tuple[Number, Number]] = {}
    children: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request of one worker. `labels`, `terms`, `tolerations` and `barred` limit its nodes, as `nodes` does."""

    devices: int = 1
    share: int = GPU
    memory_mib: int = 0
    compute: int = 0
    cpu: int = 0
    memory: int = 0
    nodes: tuple[str, ...] | None = None
    labels: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    barred: tuple[str, ...] = ()
    resources: tuple[tuple[str, int], ...] = ()
    gpu_weights: tuple[tuple[str, int], ...] = ()


class PendingRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that is still to be placed; `request` is the job's where it is None."""

    index: int = 0
    priority: int = 0
    group: str = ""
    request: RequestRecord | None = None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that holds devices of a node; a leaving one was asked to exit."""

    id: str
    node: str
    devices: tuple[int, ...] = ()
    leaving: bool = False
    started_at: Number = 0.0
    index: int = 0
    priority: int = 0
    group: str = ""
    request: RequestRecord | None = None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job with its workers, and with those that it waits for (`pending`); `queue` is a key.

    `gang` workers start together, `wanted` are requested, up to `most` are lent. `hosts` are the nodes of its workers
    in the order in which it came to them.
    """

    uid: str
    name: str
    queue: str
    gang: int
    wanted: int
    most: int
    request: RequestRecord = RequestRecord()
    workers: tuple[WorkerRecord, ...] = ()
    pending: tuple[PendingRecord, ...] = ()
    hosts: tuple[str, ...] = ()
    user: str = ""
    groups: Group | None = None
    spread: bool = False
    priority: int = 50
    preemptible: bool = True
    exceeds: bool = False
    movable: bool = True
    overlapping: bool = False
    together: str = ""
    replaces: bool = False
    promised: tuple[Placement, ...] = ()
    promised_at: Number = 0.0
    victims: tuple[str, ...] = ()
    submitted_at: Number = 0.0
    suspended: bool = False
    suspended_for: Reason | None = None
    completing: bool = False
    removed: bool = False
    next_index: int = 0
    below_since: Number | None = None
    stale_after_s: Number = STALE_AFTER_S
    waiting_since: Number = 0.0
    deferred_until: Number = NEVER
    deferred_for: Reason | None = None
    preemption_delay_s: Number = 0.0
    cool_down_s: Number = 0.0
    min_run_time_s: Number = 0.0
    most_s: Number = UNLIMITED
    expected_s: Number = UNLIMITED
    started_at: Number = 0.0
    grown_at: Number = NEVER
    shrunk_at: Number = NEVER
    checkpoint_at: Number = NEVER
    throughput: dict[int, Number] = {}
    throughput_reported: bool = False
    batches: dict[int, int] = {}
    noise_scale: Number | None = None
    pause_s: Number = PAUSE_S
    measured_last: int = 0
    counting_from: Mark | None = None


class Orders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The orders of the planner's indexes, by uid or worker id. They decide only between what is equal otherwise."""

    workers: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    growable: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    sheltered: tuple[str, ...] = ()
    suspended: tuple[str, ...] = ()
    emptying: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
    halted: tuple[str, ...] = ()
    promised: tuple[str, ...] = ()


STATE_INDEXES: Final = tuple(name for name in Orders.__struct_fields__ if name != "leaving")
"""The indexes that are attributes of the state; `leaving` is the ledger's."""


class StateDump(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the planner of `version` saw at `at`, and the plan that it makes of it.

    `usage_half_life_s`: the half-life of over-quota usage, None: it does not count. `reclaim_shelter_s`: the longest
    time for which a minimum run time protects over-quota workers. `reserve_after_s`: how long an entitled job waits
    until what it needs is kept for it. `moves`: jobs are moved to make room, and in a window to gather free
    GPUs (`defragmentation`, `defragmented`: as in the ledger). `last_at`: the time of the last event.
    """

    format: int
    version: str
    at: float
    plan: Plan
    projects: tuple[Project, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    queues: tuple[QueueRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    usage_half_life_s: Number | None = None
    reclaim_shelter_s: Number = UNLIMITED
    reserve_after_s: Number = RESERVE_AFTER_S
    moves: bool = True
    defragmentation: Defragmentation | None = None
    defragmented: tuple[Number, Number] = (0.0, 0.0)
    last_at: Number = 0.0
    orders: Orders = Orders()
