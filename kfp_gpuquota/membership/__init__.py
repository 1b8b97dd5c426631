"""The membership of one elastic job, the workers that train together, as a pure state machine.

Belongs here: generations, the two transition tables, limits on silence and on leaving, orders to workers.
Does not belong here: connections, stores and clocks (server.membership drives the machine), and which workers a job
should have (scheduler).
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
    SendOrder,
    Stay,
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
    "SendOrder",
    "Stay",
    "TargetChanged",
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
