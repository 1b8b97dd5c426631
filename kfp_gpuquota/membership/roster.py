"""What the machine remembers of one worker and of one generation, and its limits."""

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
    """How long the machine waits, in seconds.

    `starting_s`: from being wanted to a worker's first message, and without a sign of life while it gets ready.
    `silence_s`: without a sign of life from then on, before a worker is killed that another one may wait for.
    `unheard_s`: the same where no other one waits for it. `isolated_s`: the same where none of its peers is heard, so
    that the coordinator itself may be cut off; infinity: such a worker is not killed. `return_s`: from a restart of the
    coordinator to the first message of a worker that trained before, while its peers are heard. `leave_s`: from being
    asked to leave to being killed. `forming_s`: from the first ready worker to a first generation without those that
    are not. `failure_s`: from a failed collective that no lost worker explains to repeating the step with everybody who
    has come back by then; more than the longest pause between a worker's attempts to connect.
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
        """How long one may not be heard that is said to be heard without a gap: longer, and it was away itself."""
        return self.silence_s / 2


@dataclass
class Member:
    """One worker of the job, in a generation or not."""

    id: str
    state: WorkerState = WorkerState.EXPECTED
    wanted_at: float | None = None  # None: it connected, and the cluster has not named it yet
    heard_at: float | None = None
    heard_since: float | None = None  # from here to `heard_at` there was no gap
    connected_at: float | None = None  # it is connected, since then
    lost_at: float | None = None  # it was, until then
    ready_at: float | None = None
    leaving_since: float | None = None
    trained_before: bool = False  # under an earlier coordinator
    returning: bool = False  # it trained before, and has not been heard by this coordinator
    stray_in: int = 0  # it came back with this generation, which was history already
    killed: bool = False
    finished: bool = False

    def connect(self, now: float) -> None:
        """Its connection was made, perhaps in place of one whose end was not noticed."""
        self.connected_at, self.lost_at = now, None

    def disconnect(self, now: float) -> None:
        """Its connection has ended."""
        if self.connected_at is not None:
            self.connected_at, self.lost_at = None, now

    def hear(self, now: float, gap_s: float) -> None:
        """It gave a sign of life."""
        if self.heard_since is None or now - (self.heard_at or 0.0) > gap_s:
            self.heard_since = now
        self.heard_at, self.returning = now, False

    def move(self, trigger: WorkerTrigger) -> bool:
        """Follow the table; False where it has no such transition."""
        after = WORKER_TRANSITIONS[self.state].get(trigger)
        if after is not None:
            self.state = after
        return after is not None

    @property
    def alive(self) -> bool:
        """It can still take part in a generation."""
        return not self.killed and self.state not in {WorkerState.GONE, WorkerState.LEFT, WorkerState.FINISHED}


@dataclass
class Generation:
    """One fixed, ordered membership. `base` is the generation whose members agree to switch; 0: nobody is asked."""

    number: int
    members: tuple[str, ...]
    base: int
    state: GenerationState
    prepared: set[str] = field(default_factory=set)
    adopted: dict[str, tuple[float, int]] = field(default_factory=dict)  # worker -> (pause in ms, lost steps)
    leavers: set[str] = field(default_factory=set)  # of the generation before, known when this one is committed
    refused: set[str] = field(default_factory=set)  # members that could not, or no longer wanted to, enter it
    failed: set[str] = field(default_factory=set)  # members in which a collective of it failed
    failed_at: float | None = None  # when a member could not prepare it
    step: int = 0
    complete: bool = False  # everybody has switched

    @cached_property
    def member_set(self) -> frozenset[str]:
        """The members, to look one up."""
        return frozenset(self.members)

    def move(self, trigger: GenerationTrigger) -> bool:
        """Follow the table; False where it has no such transition."""
        after = GENERATION_TRANSITIONS[self.state].get(trigger)
        if after is not None:
            self.state = after
        return after is not None
