"""The state of one elastic job at its coordinator, and the changes of it that preserve its invariants.

Changed only by `event_handlers` and `decisions`, within one call of `Membership.apply`.
"""

from __future__ import annotations

from kfp_gpuquota.membership import commands as c
from kfp_gpuquota.membership.roster import Generation, Limits, Member
from kfp_gpuquota.membership.tables import GenerationState, GenerationTrigger, WorkerState, WorkerTrigger


class JobState:
    """The coordinator's state of one elastic job. `out` are the commands of the present event, in order."""

    def __init__(self, min_workers: int, first_generation: int, limits: Limits, now: float) -> None:
        self.min_workers, self.limits = min_workers, limits
        self.members: dict[str, Member] = {}
        self.target: tuple[str, ...] = ()
        self.targeted: frozenset[str] = frozenset()  # `target` as a set
        self.leave_requested: set[str] = set()  # by the workers or their nodes; never withdrawn
        self.generations: dict[int, Generation] = {}  # in force, pending, or withdrawn and perhaps agreed on
        self.earlier_refusals: dict[str, int] = {}  # by worker: a generation before the restart that it refused
        self.base: Generation | None = None  # the generation in force
        self.pending: Generation | None = None  # the next generation
        self.finished_at: float | None = None  # when the first worker had applied the last step
        self.first = first_generation  # lower numbers were used by earlier coordinators of the job
        self.highest = first_generation - 1
        self.reconnect_until = now + limits.silence_s if first_generation > 1 else now
        self.now = now
        self.failed_at: float | None = None  # when a collective failed that no recovery has handled yet
        self.sent: dict[str, c.Order] = {}
        self.out: list[c.Command] = []

    @property
    def generation(self) -> int:
        """The number of the generation in force; 0 before the first."""
        return self.base.number if self.base else 0

    @property
    def finished(self) -> bool:
        """Whether a worker has applied the last step."""
        return self.finished_at is not None

    @property
    def recovering(self) -> bool:
        """Whether no worker trains, because the pending generation is the first one or a recovery from a loss."""
        return self.pending is not None and self.pending.base == 0

    def wanted(self) -> tuple[str, ...]:
        """Return the target in its order, without workers that asked to leave and workers that are not alive."""
        return tuple(w for w in self.target if w not in self.leave_requested and self.members[w].alive)

    def finish(self, member: Member) -> None:
        """Record that the member has applied the last step, and the job is finished."""
        member.finished = True
        self.finished_at = self.now if self.finished_at is None else self.finished_at

    def stays(self, member: Member) -> bool:
        """Return whether the member is in the target, or the cluster has not named it yet; others are released."""
        if member.wanted_at is None:
            return True
        return member.id in self.targeted and member.id not in self.leave_requested and member.alive

    def possibly_training(self) -> set[str]:
        """Return the workers that have sent nothing since a restart and may hold the job's state, wanted or not.

        Until `reconnect_until` these are all silent workers; after it those that trained before the restart, until one
        of them reconnects or all have exited.
        """
        silent = {worker for worker, member in self.members.items() if member.last_message_at is None and member.alive}
        if self.now >= self.reconnect_until:
            return {worker for worker in silent if self.members[worker].returning}
        return silent

    def switch_is_over(self, generation: Generation) -> bool:
        """Return whether every member and leaver of the generation has switched, was killed or has exited."""
        waited_for = {*generation.members, *generation.leavers} - set(generation.adopted)
        return all(self.members[w].killed or self.members[w].state is WorkerState.GONE for w in waited_for)

    def commit(self, generation: Generation, step: int) -> None:
        """Put the generation in force, since the end of `step`."""
        generation.move(GenerationTrigger.ADOPTED)
        generation.step = step
        generation.leavers = set(self.base.members if self.base else ()) - set(generation.members)
        for worker in generation.leavers & (self.base.failed if self.base else set()):
            self.release_after_failure(worker, generation)
        self.base, self.pending, self.failed_at = generation, None, None
        for number in [n for n in self.generations if n < generation.number]:
            self.generations.pop(number).move(GenerationTrigger.REPLACED)
        for worker in generation.members:
            self.members[worker].move(WorkerTrigger.INCLUDED)
        self.announce(generation)

    def withdraw(self) -> None:
        """Withdraw the pending generation; its members may still agree on it."""
        if self.pending:
            self.pending.move(GenerationTrigger.OUTDATED)
        self.pending, self.failed_at = None, None

    def open(self, members: tuple[str, ...], base: int) -> None:
        """Open the next generation with a new number; for `base` see `Generation`."""
        self.highest += 1
        state = GenerationState.PROPOSED if base else GenerationState.RECOVERING
        self.pending = Generation(self.highest, members, base, state)
        self.generations[self.highest] = self.pending
        self.out.append(c.Reserve(self.highest))

    def forget_base(self) -> None:
        """Remove the generation in force: no worker has the job's state, the next one starts from the checkpoint."""
        if self.base:
            self.base.move(GenerationTrigger.REPLACED)
        self.base = None

    def announce(self, generation: Generation) -> None:
        """Report the generation in force to the cluster, with the cost of the switch so far."""
        pauses, lost = zip(*(generation.adopted.values() or [(0.0, 0)]), strict=True)
        self.out.append(
            c.AnnounceCommit(
                generation.number, generation.members, generation.step, max(pauses), max(lost), generation.complete
            )
        )

    def release_after_failure(self, worker: str, generation: Generation) -> None:
        """Release a worker that leaves with this generation, without waiting for its switch: its collective failed."""
        self.release(worker, WorkerTrigger.EXCLUDED, generation.step)
        generation.adopted.setdefault(worker, (0.0, 0))

    def release(self, worker: str, trigger: WorkerTrigger, step: int) -> None:
        """Record that the worker is in no generation any more, so that its exit is expected."""
        member = self.members[worker]
        if member.move(trigger) and not member.killed:
            self.out.append(c.AnnounceRelease(worker, step))

    def kill(self, worker: str, why: str) -> None:
        """Order the kill of the worker's process, once."""
        member = self.members[worker]
        if not member.killed and member.state is not WorkerState.GONE:
            member.killed = True
            self.out.append(c.Kill(worker, why))
