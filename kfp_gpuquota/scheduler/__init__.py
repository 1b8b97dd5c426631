"""The scheduler core: an indexed `State` that events change, and `plan(state, now) -> Plan`.

Belongs here: fair share, queue order, gangs, placement, reclaim, preemption, elasticity, consolidation, explanation.
Does not belong here: clocks, I/O, logging, randomness. docs/scheduler.md has the vocabulary and the rules in order.
"""

from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.scheduler.actions.decisions import Bind, Evict, Move, Nominate, Plan, Resize
from kfp_gpuquota.scheduler.actions.promises import changed_promises, promises_after_starts
from kfp_gpuquota.scheduler.planner import plan, why_not_larger
from kfp_gpuquota.scheduler.state.events import (
    ConstraintsChanged,
    Defragmented,
    Event,
    JobCompleting,
    JobDeferred,
    JobRemoved,
    JobResumed,
    JobSubmitted,
    JobSuspended,
    JobUpdated,
    LimitEnforced,
    NodeChanged,
    NodeRemoved,
    NodesBarred,
    PlacementsPromised,
    ProgressReported,
    QuotaChanged,
    QuotaRemoved,
    RunTimeExpected,
    TimePassed,
    UsageRecalled,
    UserChanged,
    WorkerGone,
    WorkerLeaving,
    WorkerMoved,
    WorkerStarted,
)
from kfp_gpuquota.scheduler.state.ledger import RESERVE_AFTER_S
from kfp_gpuquota.scheduler.state.state import State
from kfp_gpuquota.scheduler.whatif import WhatIf, what_if

__all__ = [
    "RESERVE_AFTER_S",
    "Bind",
    "ConstraintsChanged",
    "Defragmented",
    "Event",
    "Evict",
    "JobCompleting",
    "JobDeferred",
    "JobRemoved",
    "JobResumed",
    "JobSubmitted",
    "JobSuspended",
    "JobUpdated",
    "LimitEnforced",
    "Move",
    "NodeChanged",
    "NodeRemoved",
    "NodesBarred",
    "Nominate",
    "Placement",
    "PlacementsPromised",
    "Plan",
    "ProgressReported",
    "QuotaChanged",
    "QuotaRemoved",
    "Resize",
    "RunTimeExpected",
    "State",
    "TimePassed",
    "UsageRecalled",
    "UserChanged",
    "WhatIf",
    "WorkerGone",
    "WorkerLeaving",
    "WorkerMoved",
    "WorkerStarted",
    "changed_promises",
    "plan",
    "promises_after_starts",
    "what_if",
    "why_not_larger",
]
