"""One elastic job's membership: who trains together, as a pure state machine.

Belongs here: generations, the two transition tables, limits on silence and on leaving, orders to workers.
Does not: connections, stores, clocks (server.membership drives it), and which workers a job should have (scheduler).
"""

from kfp_gpuquota.membership.commands import (
    AnnounceCommit,
    AnnounceFinish,
    AnnounceRelease,
    Command,
    Kill,
    Order,
    Propose,
    Recover,
    Release,
    Reserve,
    Stay,
    Tell,
)
from kfp_gpuquota.membership.events import (
    CollectiveFailed,
    Event,
    GenerationAdopted,
    GenerationPrepared,
    LeaveRequested,
    PreparationFailed,
    TargetChanged,
    Ticked,
    TrainingFinished,
    WorkerDisconnected,
    WorkerEvent,
    WorkerGone,
    WorkerHeard,
    WorkerJoined,
    WorkerReady,
    WorkerReconnected,
)
from kfp_gpuquota.membership.machine import Membership
from kfp_gpuquota.membership.roster import Generation, Limits, Member

__all__ = [
    "AnnounceCommit",
    "AnnounceFinish",
    "AnnounceRelease",
    "CollectiveFailed",
    "Command",
    "Event",
    "Generation",
    "GenerationAdopted",
    "GenerationPrepared",
    "Kill",
    "LeaveRequested",
    "Limits",
    "Member",
    "Membership",
    "Order",
    "PreparationFailed",
    "Propose",
    "Recover",
    "Release",
    "Reserve",
    "Stay",
    "TargetChanged",
    "Tell",
    "Ticked",
    "TrainingFinished",
    "WorkerDisconnected",
    "WorkerEvent",
    "WorkerGone",
    "WorkerHeard",
    "WorkerJoined",
    "WorkerReady",
    "WorkerReconnected",
]
