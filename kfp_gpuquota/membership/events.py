"""The events of one elastic job, in the past tense: only they change its `Membership`.

The events of a worker are also the wire format: the worker posts them as JSON with the class's name under "event".
"""

from __future__ import annotations

import msgspec


class TargetChanged(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The cluster wants these workers, in this order, and releases the others. Empty: the whole job is evicted."""

    workers: tuple[str, ...]
    reasons: dict[str, str] = {}


class WorkerGone(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker's process has exited. No other process will have this id.

    `finished`: it exited with 0 without having been asked to leave, so that its training is finished, reported or not.
    """

    worker: str
    finished: bool = False


class WorkerDisconnected(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker's stream of orders broke. It may have died, or only lost its connection."""

    worker: str


class Ticked(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Time has passed; the machine checks its limits."""


class WorkerJoined(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A new process connected. It belongs to no generation yet."""

    worker: str


class WorkerReady(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker has imported its modules and built its model, and waits for a generation."""

    worker: str


class WorkerHeard(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A heartbeat of the worker."""

    worker: str


class WorkerReconnected(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A worker that already trains connected again, perhaps to a coordinator that was restarted and has no state.

    `generation` and `members` are those that it adopted last, `step` is the number of steps that it has applied.
    """

    worker: str
    generation: int
    members: tuple[str, ...]
    step: int = 0


class GenerationPrepared(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker has built its end of the generation's process group and votes for the switch with its gradients."""

    worker: str
    generation: int


class PreparationFailed(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker could not build its end of the generation's process group; it stays in its generation."""

    worker: str
    generation: int
    why: str = ""


class GenerationAdopted(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker switched at the end of `step`. From a worker outside the generation: it left by the same agreement.

    `pause_ms` is how long its training loop was stopped, `lost_steps` the number of applied steps to be repeated.
    `members` are the generation's, for a coordinator without this state; none: the whole job leaves.
    """

    worker: str
    generation: int
    step: int
    pause_ms: float = 0.0
    lost_steps: int = 0
    members: tuple[str, ...] | None = None


class CollectiveFailed(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A collective of this generation, of these members, failed. The worker waits for the next generation."""

    worker: str
    generation: int
    step: int = 0
    why: str = ""
    members: tuple[str, ...] | None = None


class LeaveRequested(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker received SIGTERM (its node is drained) and asks to leave by agreement."""

    worker: str


class TrainingFinished(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker applied the last step of the training. The job is not resized any more."""

    worker: str
    step: int


WorkerEvent = (
    WorkerJoined
    | WorkerReady
    | WorkerHeard
    | WorkerReconnected
    | GenerationPrepared
    | PreparationFailed
    | GenerationAdopted
    | CollectiveFailed
    | LeaveRequested
    | TrainingFinished
)
"""The events that workers send."""

Event = TargetChanged | WorkerGone | WorkerDisconnected | Ticked | WorkerEvent
