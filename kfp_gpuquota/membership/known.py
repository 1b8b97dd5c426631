"""What is known of one elastic job, and the changes of it that hold its invariants.

Written by `hearing` (what the events say) and `deciding` (what follows), within one call of `Membership.apply`.
"""

from __future__ import annotations

from kfp_gpuquota.membership import commands as c
from kfp_gpuquota.membership.roster import Generation, Limits, Member
from kfp_gpuquota.membership.tables import GenerationState, GenerationTrigger, WorkerState, WorkerTrigger


class KnownJob:
    """One elastic job as its coordinator knows it. `out`: what is to be done, in order."""

    def __init__(self, min_workers: int, first_generation: int, limits: Limits, now: float) -> None:
        self.min_workers, self.limits = min_workers, limits
        self.members: dict[str, Member] = {}
        self.target: tuple[str, ...] = ()
        self.targeted: frozenset[str] = frozenset()  # the same, to look one worker up
        self.asked_to_leave: set[str] = set()  # they, or their nodes; for good
        self.generations: dict[int, Generation] = {}  # in force, pending, or withdrawn and perhaps agreed on
        self.refused_before: dict[str, int] = {}  # by worker: a generation not known of that it gave up
        self.base: Generation | None = None  # the one in force
        self.pending: Generation | None = None  # the next one
        self.finished_at: float | None = None  # somebody had applied the last step
        self.first = first_generation  # numbers below it were used by coordinators before this one
        self.highest = first_generation - 1
        self.amnesia_until = now + limits.silence_s if first_generation > 1 else now
        self.now = now
        self.failed_at: float | None = None  # when a collective failed, while nothing was done about it
        self.sent: dict[str, c.Order] = {}
        self.out: list[c.Command] = []

    @property
    def generation(self) -> int:
        """The number of the generation in force; 0 before the first."""
        return self.base.number if self.base else 0

    @property
    def finished(self) -> bool:
        """Somebody has applied the last step."""
        return self.finished_at is not None

    @property
    def recovering(self) -> bool:
        """Nobody trains: what is pending is built at once, for a loss or as the first one."""
        return self.pending is not None and self.pending.base == 0

    def wanted(self) -> tuple[str, ...]:
        """Whom the cluster wants, in its order, less those who asked to go and those who cannot."""
        return tuple(w for w in self.target if w not in self.asked_to_leave and self.members[w].alive)

    def finish(self, member: Member) -> None:
        """It has applied the last step, and with it the job."""
        member.finished = True
        self.finished_at = self.now if self.finished_at is None else self.finished_at

    def stays(self, member: Member) -> bool:
        """It is wanted, or nobody has named it yet; others are let go."""
        if member.wanted_at is None:
            return True
        return member.id in self.targeted and member.id not in self.asked_to_leave and member.alive

    def perhaps_training(self) -> set[str]:
        """Workers that have not been heard since a restart, and may hold the job's state, wanted or not.

        For a while all of them; those that are known to have trained until one of them is heard or all are gone.
        """
        unheard = {worker for worker, member in self.members.items() if member.heard_at is None and member.alive}
        if self.now >= self.amnesia_until:
            return {worker for worker in unheard if self.members[worker].returning}
        return unheard

    def all_switched(self, generation: Generation) -> bool:
        """Everybody whom the switch concerns has made it, or will never make it."""
        waited_for = {*generation.members, *generation.leavers} - set(generation.adopted)
        return all(self.members[w].killed or self.members[w].state is WorkerState.GONE for w in waited_for)

    def commit(self, generation: Generation, step: int) -> None:
        """It is in force, since the end of `step`."""
        generation.move(GenerationTrigger.ADOPTED)
        generation.step = step
        generation.leavers = set(self.base.members if self.base else ()) - set(generation.members)
        for worker in generation.leavers & (self.base.failed if self.base else set()):
            self.let_go(worker, generation)
        self.base, self.pending, self.failed_at = generation, None, None
        for number in [n for n in self.generations if n < generation.number]:
            self.generations.pop(number).move(GenerationTrigger.REPLACED)
        for worker in generation.members:
            self.members[worker].move(WorkerTrigger.INCLUDED)
        self.announce(generation)

    def withdraw(self) -> None:
        """What is pending is not wanted any more; its members may still agree on it."""
        if self.pending:
            self.pending.move(GenerationTrigger.OUTDATED)
        self.pending, self.failed_at = None, None

    def open(self, members: tuple[str, ...], base: int) -> None:
        """The next generation, under a number of its own; `base` as `Generation` says."""
        self.highest += 1
        state = GenerationState.PROPOSED if base else GenerationState.RECOVERING
        self.pending = Generation(self.highest, members, base, state)
        self.generations[self.highest] = self.pending
        self.out.append(c.Reserve(self.highest))

    def forget_base(self) -> None:
        """Nobody holds the job's state any more: what comes next starts from the last checkpoint."""
        if self.base:
            self.base.move(GenerationTrigger.REPLACED)
        self.base = None

    def announce(self, generation: Generation) -> None:
        """Tell the cluster what is in force, and what the switch cost so far."""
        pauses, lost = zip(*(generation.adopted.values() or [(0.0, 0)]), strict=True)
        self.out.append(
            c.AnnounceCommit(
                generation.number, generation.members, generation.step, max(pauses), max(lost), generation.complete
            )
        )

    def let_go(self, worker: str, generation: Generation) -> None:
        """It leaves with this generation, and its collective before has failed: it is waited for no more."""
        self.release(worker, WorkerTrigger.EXCLUDED, generation.step)
        generation.adopted.setdefault(worker, (0.0, 0))

    def release(self, worker: str, trigger: WorkerTrigger, step: int) -> None:
        """It is in no generation any more, as was agreed: its end says nothing about the job."""
        member = self.members[worker]
        if member.move(trigger) and not member.killed:
            self.out.append(c.AnnounceRelease(worker, step))

    def kill(self, worker: str, why: str) -> None:
        """Have its process ended, once."""
        member = self.members[worker]
        if not member.killed and member.state is not WorkerState.GONE:
            member.killed = True
            self.out.append(c.Kill(worker, why))
