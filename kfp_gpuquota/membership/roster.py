"""The records of one worker and of one generation, and the machine's time limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kfp_gpuquota.membership.tables import (
    GENERATION_TRANSITIONS,
    WORKER_TRANSITIONS,
    GenerationState,
    GenerationTrigger,
    WorkerState,
    WorkerTrigger,
)


@dataclass(frozen=True)
class Limits:
    """The machine's time limits, in seconds.

    `starting_s`: from being in the target to a worker's first message, and without a message until it is ready.
    `silence_s`: without a message after that, before a worker is killed that another worker may wait for.
    `unheard_s`: the same for a worker that no other worker waits for. `isolated_s`: the same while all of its peers are
    silent too, so that the coordinator itself may be disconnected; infinity: such a worker is not killed. `return_s`:
    from a restart of the coordinator to the first message of a worker that trained before, while its peers send
    messages. `leave_s`: from the request to leave to the kill. `forming_s`: from the first ready worker to a first
    generation without the workers that are not ready. `failure_s`: from a failed collective that no lost worker
    explains to repeating the step with all workers that have reconnected; longer than the longest pause between a
    worker's connection attempts.
    """

    starting_s: float = 900.0
    silence_s: float = 10.0
    unheard_s: float = 60.0
    isolated_s: float = 60.0
    return_s: float = 10.0
    leave_s: float = 30.0
    forming_s: float = 5.0
    failure_s: float = 2.0

    @property
    def gap_s(self) -> float:
        """The longest time between two messages of a worker that is regarded as responsive without a gap."""
        return self.silence_s / 2


@dataclass
class Member:
    """One worker of the job, in a generation or not."""

    id: str
    state: WorkerState = WorkerState.EXPECTED
    wanted_at: float | None = None  # None: it has connected, but the cluster has not named it yet
    last_message_at: float | None = None
    responsive_since: float | None = None  # no gap between here and `last_message_at`
    connected_at: float | None = None  # None: not connected
    lost_at: float | None = None  # when the connection broke; None: connected, or never connected
    ready_at: float | None = None
    leaving_since: float | None = None
    trained_before: bool = False  # under an earlier coordinator
    returning: bool = False  # it trained before, and has sent nothing to this coordinator
    stale_generation: int = 0  # the outdated generation with which it reconnected
    killed: bool = False
    finished: bool = False

    def connect(self, now: float) -> None:
        """Record a new connection, which may replace one whose end was not noticed."""
        self.connected_at, self.lost_at = now, None

    def disconnect(self, now: float) -> None:
        """Record the end of the connection."""
        if self.connected_at is not None:
            self.connected_at, self.lost_at = None, now

    def record(self, now: float, gap_s: float) -> None:
        """Record a message of the worker."""
        if self.responsive_since is None or now - (self.last_message_at or 0.0) > gap_s:
            self.responsive_since = now
        self.last_message_at, self.returning = now, False

    def move(self, trigger: WorkerTrigger) -> bool:
        """Make the transition of the table; return False where it has none."""
        after = WORKER_TRANSITIONS[self.state].get(trigger)
        if after is not None:
            self.state = after
        return after is not None

    @property
    def alive(self) -> bool:
        """Whether the worker can still take part in a generation."""
        return not self.killed and self.state not in {WorkerState.GONE, WorkerState.LEFT, WorkerState.FINISHED}


@dataclass
class Generation:
    """One fixed, ordered set of members. `base` is the generation whose members agree to the switch; 0: none."""

    number: int
    members: tuple[str, ...]
    base: int
    state: GenerationState
    prepared: set[str] = field(default_factory=set)
    adopted: dict[str, tuple[float, int]] = field(default_factory=dict)  # worker -> (pause in ms, lost steps)
    leavers: set[str] = field(default_factory=set)  # members of the generation before it, set at the commit
    refused: set[str] = field(default_factory=set)  # members that could not prepare it or gave it up
    failed: set[str] = field(default_factory=set)  # members that reported a failed collective of it
    failed_at: float | None = None  # when a member could not prepare it
    step: int = 0
    complete: bool = False  # all members and leavers have switched

    @cached_property
    def member_set(self) -> frozenset[str]:
        """The members as a set."""
        return frozenset(self.members)

    def move(self, trigger: GenerationTrigger) -> bool:
        """Make the transition of the table; return False where it has none."""
        after = GENERATION_TRANSITIONS[self.state].get(trigger)
        if after is not None:
            self.state = after
        return after is not None
