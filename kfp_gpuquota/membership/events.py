"""What happened to one elastic job, in the past tense: the only way to change its `Membership`.

The events of a worker are also the wire format: the worker posts them as JSON with the class's name under "event".
"""

from __future__ import annotations

import msgspec


class TargetChanged(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The cluster wants these workers, in this order; the others are told to go. Empty: the whole job is evicted."""

    workers: tuple[str, ...]
    reasons: dict[str, str] = {}


class WorkerGone(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The cluster saw the worker's process end. It never comes back under this id.

    `finished`: nobody had told it to go and its exit code was 0, so that its training is over, said or not.
    """

    worker: str
    finished: bool = False


class WorkerDisconnected(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """The worker's stream of orders broke. It may have died, or only lost its connection."""

    worker: str


class Ticked(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Time went by; the machine looks at its limits."""


class WorkerJoined(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A new process connected. It belongs to no generation yet."""

    worker: str


class WorkerReady(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """It has imported and built everything, and waits for a generation."""

    worker: str


class WorkerHeard(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A sign of life and nothing else."""

    worker: str


class WorkerReconnected(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A worker that already trains connected again, perhaps to a coordinator that knows nothing yet.

    `generation` and `members` are those it adopted last, `step` the steps it has applied.
    """

    worker: str
    generation: int
    members: tuple[str, ...]
    step: int = 0


class GenerationPrepared(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """It has built its end of the generation's process group and votes for the switch with its gradients."""

    worker: str
    generation: int


class PreparationFailed(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """It could not build its end of the generation's process group; it stays where it is."""

    worker: str
    generation: int
    why: str = ""


class GenerationAdopted(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """It switched at the end of `step`. From a worker outside the generation: it left, by the same agreement.

    `pause_ms` is how long its loop stood still, `lost_steps` the applied steps that have to be computed again;
    `members` are the generation's, for a coordinator that does not know it; none: the whole job leaves.
    """

    worker: str
    generation: int
    step: int
    pause_ms: float = 0.0
    lost_steps: int = 0
    members: tuple[str, ...] | None = None


class CollectiveFailed(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A collective of this generation, of these members, failed. The worker waits to be told with whom it goes on."""

    worker: str
    generation: int
    step: int = 0
    why: str = ""
    members: tuple[str, ...] | None = None


class LeaveRequested(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Somebody told the worker itself to go (SIGTERM: a node is drained); it asks to be let go by agreement."""

    worker: str


class TrainingFinished(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """It applied the last step. Nothing is resized any more."""

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
"""What a worker says about itself."""

Event = TargetChanged | WorkerGone | WorkerDisconnected | Ticked | WorkerEvent
