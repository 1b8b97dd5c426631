"""The membership machine of one elastic job: `apply(event, now)` returns commands.

Each event first changes what is known (`_on_...`); then `_decide` compares the generation in force with what is wanted
and possible, and may propose the next one; then the orders that follow from the new state are compared with those last
sent, and what differs is sent. So a decision never depends on which event came when, only on what is known.
"""

from __future__ import annotations

from functools import singledispatchmethod
from typing import Never

from kfp_gpuquota.membership import commands as c
from kfp_gpuquota.membership import events as e
from kfp_gpuquota.membership.limits import kills_due
from kfp_gpuquota.membership.policy import concerned, cut_off, first_members, next_members, still_fits, survivors
from kfp_gpuquota.membership.roster import Generation, Limits, Member
from kfp_gpuquota.membership.tables import GenerationState, GenerationTrigger, WorkerState, WorkerTrigger

_OPEN = {GenerationState.PROPOSED, GenerationState.RECOVERING, GenerationState.WITHDRAWN}


class Membership:
    """One elastic job: who trains together now, and who will next.

    `first_generation` is the first number that was never used: 1 for a new job, one more than the highest reserved
    after the coordinator restarted. With more than 1 the machine first gives workers that already train the time
    (`limits.silence_s`) to reconnect.
    """

    def __init__(
        self, *, min_workers: int = 1, first_generation: int = 1, limits: Limits | None = None, now: float = 0.0
    ) -> None:
        self.min_workers = min_workers
        self.limits = limits or Limits()
        self.members: dict[str, Member] = {}
        self.target: tuple[str, ...] = ()
        self.generations: dict[int, Generation] = {}
        self.base: Generation | None = None
        self.pending: Generation | None = None
        self.finished = False
        self._first, self._highest = first_generation, first_generation - 1
        self._amnesia_until = now + self.limits.silence_s if first_generation > 1 else now
        self._now = now
        self._failed_at: float | None = None
        self._asked_to_leave: set[str] = set()
        self._sent: dict[str, c.Order] = {}
        self._out: list[c.Command] = []

    @property
    def generation(self) -> int:
        """The number of the generation in force; 0 before the first."""
        return self.base.number if self.base else 0

    def apply(self, event: e.Event, now: float) -> list[c.Command]:
        """Take one event in, at `now` (seconds, any origin, never falling); return what is to be done, in order."""
        self._out = []
        self._now = now
        self._hear(event)
        self._on(event)
        self._decide()
        self._send_changed_orders()
        return self._out

    def order_for(self, worker: str) -> c.Order:
        """What stands for `worker` now: sent whenever it connects."""
        member = self.members.get(worker)
        if self.base and worker in self.base.leavers and worker in self._sent and not self._all_switched(self.base):
            return self._sent[worker]  # its connections stay open until nobody needs them
        if member is None:
            return c.Stay(0)
        if not member.alive and member.state is not WorkerState.FINISHED:
            return c.Release("this job does not want the worker any more")
        in_base = self.base is not None and worker in self.base.members
        pending = self.pending
        if pending and pending.base == 0 and worker in pending.members:
            return c.Recover(pending.number, pending.members)
        if pending and pending.base and (in_base or worker in pending.members):
            return c.Propose(pending.number, pending.members, pending.base)
        if not in_base and self.finished and member.state is not WorkerState.FINISHED:
            return c.Release("the training has finished")
        if not in_base and not self._stays(member) and member.state is not WorkerState.FINISHED:
            return c.Release("this job does not want the worker any more")
        return c.Stay(self.generation if in_base else 0)

    # What the events say

    @singledispatchmethod
    def _on(self, event: Never) -> None:
        """Change what is known."""
        raise TypeError(f"{event!r} is not an event")

    def _hear(self, event: e.Event) -> None:
        if isinstance(event, e.TargetChanged | e.Ticked | e.WorkerGone | e.WorkerDisconnected):
            return
        member = self.members.get(event.worker)
        if member and member.alive:
            member.hear(self._now, self.limits.gap_s)

    @_on.register
    def _on_target(self, event: e.TargetChanged) -> None:
        self.target = event.workers
        for worker in event.workers:
            member = self.members.setdefault(worker, Member(worker))
            member.wanted_at = self._now if member.wanted_at is None else member.wanted_at
        self._mark_leaving()

    @_on.register
    def _on_leave_requested(self, event: e.LeaveRequested) -> None:
        self._asked_to_leave.add(event.worker)
        self._mark_leaving()

    @_on.register
    def _on_tick(self, _event: e.Ticked) -> None:
        self._mark_leaving()
        together = [self.members[w] for w in concerned(self.generations.values())]  # also one withdrawn, yet agreed on
        for worker, why in kills_due(self.members.values(), together, self.limits, self._now):
            self._kill(worker, why)
        for member in [member for member in self.members.values() if self._is_stray(member)]:
            self._kill(member.id, f"it trains in generation {member.stray_in}, which is not in force")

    @_on.register
    def _on_gone(self, event: e.WorkerGone) -> None:
        member = self.members.setdefault(event.worker, Member(event.worker))
        member.disconnect(self._now)
        if event.finished and not member.killed and member.state is not WorkerState.LEFT:
            member.finished = self.finished = True
        member.move(WorkerTrigger.GONE)

    @_on.register
    def _on_disconnected(self, event: e.WorkerDisconnected) -> None:
        if member := self.members.get(event.worker):
            member.disconnect(self._now)

    @_on.register
    def _on_joined(self, event: e.WorkerJoined) -> None:
        member = self.members.setdefault(event.worker, Member(event.worker))
        member.connect(self._now)
        member.hear(self._now, self.limits.gap_s)
        member.move(WorkerTrigger.JOINED)

    @_on.register
    def _on_ready(self, event: e.WorkerReady) -> None:
        if (member := self.members.get(event.worker)) and member.move(WorkerTrigger.READY):
            member.ready_at = self._now

    @_on.register
    def _on_heard(self, event: e.WorkerHeard) -> None:
        """`_hear` did it."""

    @_on.register
    def _on_reconnected(self, event: e.WorkerReconnected) -> None:
        """A restarted coordinator learns from its workers which generation is in force: the highest one adopted."""
        member = self.members.setdefault(event.worker, Member(event.worker))
        member.connect(self._now)
        member.stray_in = 0
        known = self.generations.get(event.generation)
        if known is None and event.generation > self.generation:
            self._relearn(event.generation, event.members, event.step).adopted[event.worker] = (0.0, 0)
        elif known is not None:
            generation = self._note_adoption(event.worker, event.generation, event.step)
            if generation:
                generation.adopted.setdefault(event.worker, (0.0, 0))
        else:
            member.stray_in = event.generation

    def _relearn(self, number: int, members: tuple[str, ...], step: int) -> Generation:
        generation = Generation(number, members, 0, GenerationState.RECOVERING)
        self.generations[number] = generation
        self._highest = max(self._highest, number)
        for worker in members:
            member = self.members.setdefault(worker, Member(worker))
            member.heard_at = self._now  # its silence is counted from here
        self._commit(generation, step)
        return generation

    def _learn_switch(self, event: e.GenerationAdopted | e.CollectiveFailed) -> None:
        """A switch that was agreed on under the coordinator before this one, and made after they connected to this one.

        All members of the generation in force had agreed on it, so that it is the only one that can follow; one that
        leaves with it may be the first to say so, and nobody is in it where they agreed on an eviction.
        """
        before = self.generation < event.generation < self._first and event.generation not in self.generations
        if before and event.members is not None and event.worker in self.members:
            self._withdraw()
            self._relearn(event.generation, event.members, event.step)

    @_on.register
    def _on_prepared(self, event: e.GenerationPrepared) -> None:
        if generation := self.generations.get(event.generation):
            generation.prepared.add(event.worker)

    @_on.register
    def _on_preparation_failed(self, event: e.PreparationFailed) -> None:
        if generation := self.generations.get(event.generation):
            generation.refused.add(event.worker)
        if self.pending is None or self.pending.number != event.generation:
            return
        if self.pending.base:
            self.pending.failed_at = self._now  # nobody waits for it; it is proposed anew after a while
        elif self._failed_at is None:
            self._failed_at = self._now

    @_on.register
    def _on_adopted(self, event: e.GenerationAdopted) -> None:
        self._learn_switch(event)
        generation = self._note_adoption(event.worker, event.generation, event.step)
        if generation is None:
            self._end_stray(event.worker, event.generation)
            return
        generation.adopted[event.worker] = (event.pause_ms, event.lost_steps)
        if event.worker not in generation.members:
            self._release(event.worker, WorkerTrigger.RELEASED, event.step)

    @_on.register
    def _on_failed(self, event: e.CollectiveFailed) -> None:
        self._learn_switch(event)
        generation = self._note_adoption(event.worker, event.generation, event.step)
        in_base = self.base is not None and event.worker in self.base.members
        behind = generation is None and in_base and self.base and event.worker not in self.base.adopted
        recovering = self.pending and self.pending.base == 0 and self.pending.number != event.generation
        if (generation or behind) and not recovering and self._failed_at is None:
            self._failed_at = self._now
        if in_base and self.base and event.generation == self.base.number:
            self.base.failed.add(event.worker)
        elif self.base and event.worker in self.base.leavers:
            self._let_go(event.worker, self.base)

    @_on.register
    def _on_finished(self, event: e.TrainingFinished) -> None:
        member = self.members.get(event.worker)
        if member and member.move(WorkerTrigger.FINISHED):
            member.finished = True
            self.finished = True
            self._out.append(c.AnnounceFinish(event.worker, event.step))

    # What follows from them

    def _note_adoption(self, worker: str, number: int, step: int) -> Generation | None:
        """The generation in force if `worker` is in `number`, which commits it; None where that is history."""
        generation = self.generations.get(number)
        if generation is None or worker not in self.members:
            return None
        if generation.state in _OPEN and number > self.generation:
            self._commit(generation, step)
        return generation if generation is self.base else None

    def _end_stray(self, worker: str, number: int) -> None:
        """A worker in a generation that is not in force meets nobody there, and cannot be taken back: its state is old.

        Members of the one in force, and those who leave, may be heard late.
        """
        member = self.members.get(worker)
        base = self.base
        if member is None or (base and number <= base.number and worker in {*base.members, *base.leavers}):
            return
        if number > self.generation:
            self._kill(worker, f"it switched to generation {number}, which was given up")
        elif member.alive:
            self._kill(worker, f"it switched to generation {number}, which generation {self.generation} has replaced")

    def _is_stray(self, member: Member) -> bool:
        """It came back with a generation that is history, and has not said since that it left by agreement."""
        if not member.stray_in or member.connected_at is None or self.base is None or self._recovering:
            return False
        concerned_now = member.id in {*self.base.members, *self.base.leavers}
        had_time = self._now - member.connected_at >= self.limits.failure_s
        return had_time and not concerned_now and self._stays(member)

    def _commit(self, generation: Generation, step: int) -> None:
        generation.move(GenerationTrigger.ADOPTED)
        generation.step = step
        generation.leavers = set(self.base.members if self.base else ()) - set(generation.members)
        for worker in generation.leavers & (self.base.failed if self.base else set()):
            self._let_go(worker, generation)
        self.base, self.pending, self._failed_at = generation, None, None
        for number in [n for n in self.generations if n < generation.number]:
            self.generations.pop(number).move(GenerationTrigger.REPLACED)
        for worker in generation.members:
            self.members[worker].move(WorkerTrigger.INCLUDED)
        self._announce(generation)

    def _let_go(self, worker: str, generation: Generation) -> None:
        """It leaves with this generation, and its collective before has failed: it is waited for no more."""
        self._release(worker, WorkerTrigger.EXCLUDED, generation.step)
        generation.adopted.setdefault(worker, (0.0, 0))

    def _release(self, worker: str, trigger: WorkerTrigger, step: int) -> None:
        """It is in no generation any more, as was agreed: its end says nothing about the job."""
        member = self.members[worker]
        if member.move(trigger) and not member.killed:
            self._out.append(c.AnnounceRelease(worker, step))

    def _announce(self, generation: Generation) -> None:
        pauses, lost = zip(*(generation.adopted.values() or [(0.0, 0)]), strict=True)
        self._out.append(
            c.AnnounceCommit(
                generation.number, generation.members, generation.step, max(pauses), max(lost), generation.complete
            )
        )

    def _all_switched(self, generation: Generation) -> bool:
        """Everybody whom the switch concerns has made it, or will never make it."""
        waited_for = {*generation.members, *generation.leavers} - set(generation.adopted)
        return all(self.members[w].killed or self.members[w].state is WorkerState.GONE for w in waited_for)

    def _complete_switch(self) -> None:
        if self.base and not self.base.complete and self._all_switched(self.base):
            self.base.complete = True
            self._announce(self.base)

    def _kill(self, worker: str, why: str) -> None:
        member = self.members[worker]
        if not member.killed and member.state is not WorkerState.GONE:
            member.killed = True
            self._out.append(c.Kill(worker, why))

    @property
    def _recovering(self) -> bool:
        return self.pending is not None and self.pending.base == 0

    def _stays(self, member: Member) -> bool:
        """It is wanted, or nobody has named it yet; others are let go."""
        return member.wanted_at is None or member.id in self._wanted()

    def _wanted(self) -> tuple[str, ...]:
        return tuple(w for w in self.target if w not in self._asked_to_leave and self.members[w].alive)

    def _perhaps_training(self) -> set[str]:
        """After a restart, for a while: who has not been heard, and may hold the job's state, wanted or not."""
        if self._now >= self._amnesia_until:
            return set()
        return {worker for worker, member in self.members.items() if member.heard_at is None and member.alive}

    def _mark_leaving(self) -> None:
        for member in self.members.values():
            released = member.state is WorkerState.LEFT  # for good: its id is not wanted again
            if not released and member.id in self.target and member.id not in self._asked_to_leave:
                member.leaving_since = None
            elif member.leaving_since is None:
                member.leaving_since = self._now

    # What is decided

    def _decide(self) -> None:
        self._complete_switch()
        if self.base is not None and not self.base.members:
            if not (self.base.complete and self._wanted()):
                return
            self._forget_base()
        if self.base is None and self.finished:
            self._withdraw()  # a first generation would train again what is finished
        elif self.base is None:
            self._decide_first()
        elif self._decide_recovery(self.base):
            return
        elif self.finished:
            self._withdraw()  # nobody votes any more, and whoever waits to join is to be let go
        else:
            self._decide_resize(self.base)

    def _decide_first(self) -> None:
        pending = self.pending
        if pending and set(pending.members) <= set(self._wanted()) and not self._failure_is_due(pending):
            return
        wanted = [] if self._perhaps_training() else [self.members[worker] for worker in self._wanted()]
        members = first_members(wanted, self.min_workers, self.limits.forming_s, self._now)
        self._withdraw()
        if members:
            self._open(members, base=0)

    def _decide_recovery(self, base: Generation) -> bool:
        """True while a loss is being dealt with."""
        if self._recovering and self.pending and all(self.members[w].alive for w in self.pending.members):
            if not self._failure_is_due(self.pending):
                return True
        elif not any(self._is_missing(w, base) for w in base.members) and not self._failure_is_due(base):
            return self._failed_at is not None
        members = survivors([self.members[w] for w in base.members], self._wanted())
        self._withdraw()
        if members:
            self._open(members, base=0)
        else:
            self._forget_base()
        return True

    def _failure_is_due(self, generation: Generation) -> bool:
        """A failed collective is acted upon at once where one lost connection explains it, else after a while."""
        if self._failed_at is None:
            return False
        alive = [member for w in generation.members if (member := self.members[w]).alive]
        lost = cut_off(alive, self._failed_at, self.limits.failure_s, self._now)
        for worker in lost or ():
            self._kill(worker, "its connections broke and its peers lost it")
        return lost is not None

    def _decide_resize(self, base: Generation) -> None:
        members = next_members(base.members, self._wanted(), self.members)
        failed_at = self.pending.failed_at if self.pending else None
        stuck = failed_at is not None and self._now - failed_at >= self.limits.failure_s
        if self.pending and not stuck and still_fits(self.pending.members, base.members, members):
            return
        self._withdraw()
        if members != base.members:
            self._open(members, base=base.number)

    def _is_missing(self, worker: str, base: Generation) -> bool:
        """It is lost, or gave the generation up just before the others agreed on it."""
        member = self.members[worker]
        lost = not member.alive and not member.finished
        return lost or (worker in base.refused and worker not in base.adopted)

    def _forget_base(self) -> None:
        """Nobody holds the job's state any more: what comes next starts from the last checkpoint."""
        if self.base:
            self.base.move(GenerationTrigger.REPLACED)
        self.base = None

    def _withdraw(self) -> None:
        if self.pending:
            self.pending.move(GenerationTrigger.OUTDATED)
        self.pending, self._failed_at = None, None

    def _open(self, members: tuple[str, ...], base: int) -> None:
        self._highest += 1
        state = GenerationState.PROPOSED if base else GenerationState.RECOVERING
        self.pending = Generation(self._highest, members, base, state)
        self.generations[self._highest] = self.pending
        self._out.append(c.Reserve(self._highest))

    def _send_changed_orders(self) -> None:
        in_use = concerned([generation for generation in (self.base, self.pending) if generation])
        named = {worker for worker, member in self.members.items() if member.wanted_at is not None}
        for worker in named - set(self._wanted()) - in_use - self._perhaps_training():
            self._release(worker, WorkerTrigger.RELEASED, self.base.step if self.base else 0)
        for worker, member in self.members.items():
            order = self.order_for(worker)
            if member.state is not WorkerState.GONE and self._sent.get(worker) != order:
                self._sent[worker] = order
                self._out.append(c.Tell(worker, order))
