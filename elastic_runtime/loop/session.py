"""The meaning of one iteration of the loop.

An iteration is one micro-batch of this worker. Between two iterations, where the loader is asked for the next batch,
lies the only place where the membership changes by agreement; where the gradients are summed, the only one where a
loss is noticed. Everything else in a loop is the script's own.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.loop.error_notes import explain_errors, explain_no_more, note_on_lightning
from elastic_runtime.loop.optimizer_guards import watch_no_more, watch_unprepared_optimizers
from elastic_runtime.loop.passes import ClosureSteps
from elastic_runtime.loop.step_calls import StepCalls
from elastic_runtime.loop.step_states import ACTING, BETWEEN, COMPLETE, COUNTED, UNCOUNTED, StepState
from elastic_runtime.loop.sync_batch_norm import release, synchronize
from elastic_runtime.loop.synchronized_calls import SynchronizedCalls, nothing
from elastic_runtime.process.process_exit import at_exit, failed
from elastic_runtime.state.epoch_start import NOTHING, EpochStart
from elastic_runtime.state.random_streams import SeededDraws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from elastic_runtime.loop.member import Member
    from elastic_runtime.loop.step import GlobalStep, Observer
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.plan.position import Position
    from elastic_runtime.process.device_memory import MemoryFollower
    from elastic_runtime.reduction.gradient_noise import GradientNoise
    from elastic_runtime.reduction.step_modes import Mode
    from elastic_runtime.state.training_state import TrainingState
    from elastic_runtime.validation.new_parameters import NewParameters


Result = TypeVar("Result")
MOST_WATCHED = 64
"""Iterations, after which nothing is looked for any more."""


class Session(StepCalls):
    """The loop of one training: counts micro-batches into steps, repeats a failed step, switches between steps."""

    warm_up: Callable[[Any], torch.Tensor] | None = None  # from a batch to its loss
    passive = False  # the script runs again what others have run, and nothing acts
    whole_epochs = False  # in a rehearsal, too: another loop counts their steps
    counts_gain = False  # steps are counted, and schedules advance, by the gain of the batch
    optimizers: Sequence[torch.optim.Optimizer] = ()  # that prepare was given
    structure: NewParameters | None = None  # what model and optimizers consist of; None: not watched

    def __init__(
        self, state: TrainingState, member: Member, mode: Mode, memory: MemoryFollower, step: GlobalStep
    ) -> None:
        super().__init__(step)
        self._state, self._member, self._mode, self._memory = state, member, mode, memory
        self._total_steps: int | None = None
        self._wanted_steps: int | None = None
        self.started = self.finished = False
        self.released = False
        self._went_back = False  # it is an earlier one, from which the next iteration continues
        self._epoch: int | None = None  # of the script, where the state is that of an earlier one
        self._restored: Position | None = None  # of the state, while the script runs to work that others are in
        self._at_exit: Callable[[], None] | None = None
        self._moved = False  # the membership changed in this iteration
        self._before_rerun: tuple[Position, frozenset[torch.nn.Parameter]] | None = None
        self.newest_samples = 0  # of the newest iteration
        self.without_gradients = False  # the loop was left in an iteration that did not complete a step
        self._draws: dict[int, SeededDraws] = {}  # of optimizers
        self._iteration = 0  # its number: micro-batches of different steps may be one object
        self._epoch_start = EpochStart(state, mode.buffers, member.streams)
        self.synchronized_calls = SynchronizedCalls(state, member, self._recover_between_steps, self._epoch_start)
        self.closure_steps = ClosureSteps(step, self)

    def compare(self, scheduler: object) -> None:
        """Compare the numbers of one more scheduler with those of the other workers."""
        self._mode.metadata.agreement.schedulers.append(scheduler)

    def observe(self, observer: Observer) -> None:
        """Attach a rehearsal's observer."""
        self._step.observer = observer

    @property
    def position(self) -> Position:
        """The position of the training."""
        return self._state.position

    @property
    def noise(self) -> GradientNoise | None:
        """The noise of the gradients; None: it is not measured."""
        return self._step.noise

    def has_trained(self, count: int) -> bool:
        """Return whether `count` steps of `global_batch_size` are trained, or steps that are worth as much."""
        if self.counts_gain and self.noise is not None:
            return self.noise.scaled_steps >= count
        return self.position.step >= count

    @property
    def last_step(self) -> int | None:
        """The step after which the training ends; None: it ends otherwise, or that is not known yet."""
        if self._wanted_steps is None or not self.counts_gain:
            return self._wanted_steps
        return self.position.step if self.has_trained(self._wanted_steps) else None

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Return (rank, world size)."""
        return self._member.rank_and_size

    @property
    def training(self) -> bool:
        """Whether model and optimizers are the job's: from the loop's beginning to the training's end."""
        return self.started and not self.released

    @property
    def leaving(self) -> bool:
        """Whether this worker is leaving the job."""
        return self._member.leaving

    @property
    def applied(self) -> bool:
        """Whether this iteration completes a global step."""
        return self._step.state in COMPLETE

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The micro-batch of this iteration; None outside of one."""
        return self._step.micro

    @property
    def begins_step(self) -> bool:
        """Whether this iteration's backward pass is the first one of its step."""
        return self._step.first

    @property
    def reached(self) -> Position:
        """The position of the training after this iteration."""
        micro = self._step.micro
        ahead = micro is not None and self._step.state in UNCOUNTED
        return self.position.after_step(micro.step_samples) if micro and ahead else self.position

    @property
    def steps_before(self) -> int:
        """Global steps applied before this iteration; outside of one, so far."""
        return self.position.step - (self._step.state in COUNTED)

    def may_act(self) -> bool:
        """Return whether optimizer, scheduler and scaler act now: outside an iteration, or if a step is complete."""
        if self.released:
            return True
        if self.passive:
            return False
        if self._step.micro is None:
            self._member.stable_state.end()
        return not self.catching_up and (self._step.micro is None or self._step.state in ACTING)

    def schedule_steps(self) -> int:
        """Return by how many steps a schedule advances now, in a call of its `step()`."""
        if not self.may_act():
            return 0
        if not self.counts_gain or self.noise is None or self.released or self._step.state in BETWEEN:
            return 1
        return self.noise.ticks

    def may_step(self) -> bool:
        """Return whether an optimizer acts now; it is about to, if so. LoopError within a backward pass."""
        may = self.may_act()
        self._step.note_call(acts=may)
        return may

    def may_scale(self) -> bool:
        """Return whether a GradScaler acts now; it may leave the optimizer's step out."""
        may = self.may_act()
        if may:
            self._step.note_skipping()
        return may

    # Epochs

    def start(self, *, total_steps: int | None, last_step: int | None = None) -> None:
        """Begin the training, at its beginning or where the other workers are; or continue a finished one.

        LoopError if the end was reported to the coordinator.
        """
        if self.finished and self._member.coordinated:
            raise LoopError("the job's training has finished; what comes after it needs a job of its own")
        self.finished = self.released = False
        if self.structure is not None:
            self.structure.start()
        synchronize([self._state.model], self)
        self._mode.start()
        self._mode.reducer.attach()
        self._member.check_state(self._state)
        self._total_steps, self._wanted_steps = total_steps, last_step
        if self._member.coordinated and not self.started:
            self.loader.start_processes()
            self._state.sample_checksum = self.loader.sample_checksum()
            self._warm_up()
        self.started = True
        if self._step.observer:
            self._step.observer.started()
        explain_errors(self)
        watch_unprepared_optimizers(self, self.optimizers)
        self._finish_at_exit()
        if self._keeps_epochs:
            self._epoch_start.capture()  # in the structure of the state that a joiner receives
        self._member.join(self._state, self._mode)
        self._memory.follow()

    def _warm_up(self) -> None:
        """Run one step and drop its gradients: the longer time of a first step then delays no other worker."""
        batch = self.loader.sample() if self.warm_up else None
        if self.warm_up is None or batch is None:
            return
        self._mode.remember()
        self._mode.reducer.release()
        try:
            self.warm_up(batch).backward()  # type: ignore[no-untyped-call]
        finally:
            for _, parameter in self._state.parameters():
                parameter.grad = None
            self._mode.reducer.attach()
            self._mode.restore()

    def most_steps(self, epoch: int) -> int | None:
        """Return after how many steps an epoch ends, if not with its samples: the first one of a rehearsal."""
        orders, several = self._member.rehearsed, self._state.totals.epochs > 1 and not self.whole_epochs
        return orders.first_epoch if orders is not None and several and epoch == 0 else None

    @property
    def _keeps_epochs(self) -> bool:
        """Whether a worker may enter an epoch of the script's in its middle."""
        return self._member.awaited and self._wanted_steps is None

    def begin_epoch(self) -> None:
        """Begin the script's next epoch, or one again that others, or a checkpoint, have begun."""
        if self._keeps_epochs:
            self._member.stable_state.end()
            self._epoch_start.begin()

    @contextmanager
    def drawing_alike(self, number: int) -> Iterator[None]:
        """Let optimizer `number` draw random numbers that are a function of seed and step: the same on all workers.

        With "exact" the streams are such ones already.
        """
        if self._state.reduction != "reduction='fast'":
            yield
            return
        draws = self._draws.setdefault(number, SeededDraws(self._member.streams))
        with draws.within(self._member.seed_of(self.position.step, -1 - number)):
            yield

    def repeat(
        self, work: Callable[[], Result], *, copies: bool = True, before: Callable[[], object] = nothing
    ) -> Result:
        """Do work of all workers, as `Job.repeat` does; in an epoch that others have begun, what it returned there.

        `copies`, `before`: as for `SynchronizedCalls.run`.
        """
        found: Result = self._epoch_start.next_result()
        if found is not NOTHING:
            return found
        self.pause()
        result = self.synchronized_calls.run(work, copies=copies, before=before)
        self._epoch_start.note(result)
        return result

    def enter_epoch(self) -> int:
        """Begin the loop over the loader, possibly in the middle of an epoch. LoopError outside `job.epochs`.

        Return the script's epoch. A loss, now or since it began, may have led back to the one before.
        """
        if not self.started:
            raise LoopError(
                "the prepared loader is iterated outside job.epochs(...); write: for epoch in job.epochs(N)"
                + note_on_lightning()
            )
        epoch, self._epoch = self.position.epoch if self._epoch is None else self._epoch, None
        self.abandon_iteration()
        within = self._epoch_start.enter()
        self.catching_up = False
        if self.position.step and not self.position.index:
            self._member.save_if_due(self._state)
        self._change_membership()
        self.catching_up |= self.position.epoch != epoch
        if self._step.observer:
            self._step.observer.entered()
        self._remember()
        if within and self._keeps_epochs and not self.whole_epochs and self._is_over(epoch):
            self._plan_rerun()
        return epoch

    def _is_over(self, epoch: int) -> bool:
        """Return whether all steps of the script's epoch are applied."""
        return self.position.epoch == epoch and not self.loader.has_more(self.position)

    def leave_epoch(self, epoch: int) -> None:
        """End an epoch of the script, unless others are further already."""
        self.abandon_iteration()
        self.loader.changes.left([part for _, part in self._state.parts])
        if self.position.epoch == epoch and not self._went_back:
            self._state.position, self._state.resumed = self.position.after_epoch(), False

    def finish(self) -> None:
        """End the training: wait for all workers, so that one which is a step behind can still receive the state."""
        self.catching_up = False
        step = self.position.step
        while not self._member.all_here(self._state, self._mode.metadata.agreement):
            self._member.recover(self._state, None)
            if self.position.step < step:
                return  # a shard was lost, and the steps since the checkpoint are to be trained again
        self._report_progress(force=True)
        self._member.save_if_due(self._state)
        self._end()
        explain_no_more(self)

    def finish_early(self) -> None:
        """End the training where it stands: the loop was left by `break`, and the process ends well."""
        if self.started and not self.finished:
            self.abandon_iteration()
            self._end()

    def finish_unless_failed(self) -> None:
        """End the training where it stands, at the process's exit.

        On a cluster only an exception is a failure of the training: an exit code of the script's own fails the job.
        """
        has_failed = hasattr(sys, "last_type") if self._member.coordinated else failed()
        if not self.leaving and not has_failed:
            self.finish_early()

    @contextmanager
    def left_early(self) -> Iterator[None]:
        """Around the loop: the script may leave it by `break` or an error. If nothing outside of this process waits for
        the training's end, that is its end: what follows is the script's own, until it enters a loop again.
        """
        try:
            yield
        except GeneratorExit:
            if self.leaving or self.released:  # by another job, which trains the model now
                raise
            if self._member.awaited:
                self._member.leave_loop()
            else:
                self.finish_early()
            raise

    def release(self) -> None:
        """Leave model, optimizers and schedulers to the script, or to another job."""
        self.released = True
        release([self._state.model])
        if self.structure is not None:
            self.structure.end()
        for watch in self.watches:
            watch.end()
        self._mode.reducer.release()
        self._mode.end()
        watch_no_more(self)

    def owns(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether one of these is trained here."""
        own = {id(parameter) for _, parameter in self._state.parameters()}
        return any(id(parameter) in own for parameter in parameters)

    def _finish_at_exit(self) -> None:
        """Register the training's end at the process's exit, if a cluster waits for it; else it may be collected
        as soon as the script drops it, as in a notebook that trains several models.
        """
        if self._at_exit is None:
            held = (lambda: self) if self._member.awaited else weakref.ref(self)
            self._at_exit = at_exit(partial(_finish_left, held))

    def _end(self) -> None:
        self.finished = True
        if self._at_exit:
            atexit.unregister(self._at_exit)
            self._at_exit = None
        self.release()
        self._member.stable_state.end()
        self._member.finish(self.position.step)

    # Iterations

    def begin_iteration(self, micro_batch: MicroBatch) -> int:
        """Begin an iteration over this micro-batch; return the iteration's number."""
        self._iteration += 1
        self.newest_samples = micro_batch.size
        if self.reruns:
            self._begin_rerun(micro_batch)
            return self._iteration
        if self.watches:
            self._watch(micro_batch)
        self._step.begin(micro_batch, self.loader.order_checksum)
        self._member.begin_work(self.position.step)
        self.catching_up = self._went_back = self._state.resumed = False
        return self._iteration

    @contextmanager
    def changing_state(self) -> Iterator[None]:
        """Around changes of the state before the first pass of a step: they belong to what it begins with."""
        self._member.stable_state.end()
        yield
        for watch in self.watches:
            watch.accept()
        self._mode.buffers.save()
        self._member.stable_state.begin()

    def _plan_rerun(self) -> None:
        """Let the loop have one iteration without effect: this worker resumes where all steps of an epoch are applied.

        What follows the loop then finds what an iteration leaves: a loss, a count of batches to divide by. It is as the
        rest of an iteration whose step others have applied. What the script does in it by itself is undone.
        """
        self._member.stable_state.end()
        self.reruns, self._before_rerun = True, (self.position, self._step.zeros())
        self._epoch_start.begin_rerun(whole=self._member.sharding is None)  # a copy of shards may not fit

    def _begin_rerun(self, micro_batch: MicroBatch) -> None:
        self._step.begin(micro_batch, self.loader.order_checksum)
        self._step.revert()
        self._step.take_over()
        self.catching_up = True

    def _end_rerun(self) -> None:
        assert self._before_rerun is not None
        (position, zeros), self.reruns, self._before_rerun = self._before_rerun, False, None
        if position == self.position:  # else a loss has led back to an earlier state
            self.catching_up = False
            self._step.set_zeros(zeros)
            self._mode.restore()
            self._epoch_start.end_rerun()
            self._note_loop_end()
        self._remember()
        if self.rerun_failed:
            self.rerun_failed = False
            self._plan_rerun()

    def _note_loop_end(self) -> None:
        if self._keeps_epochs:
            self._epoch_start.end()

    def _watch(self, micro_batch: MicroBatch) -> None:
        """Run the watches of the first iterations."""
        for watch in self.watches:
            watch.before_iteration(micro_batch.size)
        if self._iteration > MOST_WATCHED:
            for watch in self.watches:
                watch.end()
            self.watches.clear()

    def end_iteration(self, iteration: int) -> bool:
        """End an iteration; return False if what follows is to be planned again.

        LoopError for one that was abandoned: what its loop has planned to follow is outdated.
        """
        step = self._step
        if iteration != self._iteration or step.state in BETWEEN:
            if self.finished:
                return False  # by job.finish
            raise LoopError(
                "the loop over the prepared loader was continued after it had ended: by the next epoch of job.epochs, "
                "or by another loop over the loader; call iter(loader) in each epoch, and iterate over one at a time"
            )
        micro, counted, repeated = step.micro, step.state in COUNTED, step.state is StepState.REPEATED
        changed, self._moved = self._moved, False
        step.end()
        self._state.in_iteration = False
        if self.reruns:
            self._end_rerun()
            return False
        if repeated:
            return False
        if not counted:
            if micro is None or not micro.last:
                return True
            self._count(micro)
        if not self.loader.has_more(self.position):
            self._note_loop_end()
            self._remember()
            # a joiner should begin with a whole epoch, and a resume after what follows the loop: switch and save wait
            return not self.counts_gain or self.last_step is None  # else what was planned to follow does not
        self._member.save_if_due(self._state)
        changed |= self._memory.follow()
        changed |= self._change_membership()
        self._remember()
        self._member.begin_work(self.position.step)
        return not changed

    def pause(self) -> None:
        """Prepare for work beside the training: an iteration that completed a step counts from here on.

        LoopError in one that did not, and before its optimizer stepped: workers would not be at the same state.
        """
        if not self.started:
            raise LoopError("job.repeat comes after the training has begun; call it within job.epochs(...)")
        self.catching_up = self._went_back or self.reruns
        micro, counted = self._step.micro, self._step.state in COUNTED
        if micro is not None:
            self._step.pause()
            self._state.in_iteration = True
            if not counted:
                self._count(micro)
        if self._restored is not None:
            before, self._state.position, self._restored = self.position, self._restored, None
            self._mode.restore()
            self._go_back(before)

    def _recover_between_steps(self, error: CollectiveError) -> None:
        before, self._step.agreed = self.position, None
        self._recover(error)
        self._moved = True
        if self.position.step < before.step:
            self._go_back(before)

    def _go_back(self, before: Position) -> None:
        """Let the script run on to the next iteration without effect: a step that it has left is trained again."""
        self.catching_up = self._went_back = True
        if self.position.epoch != before.epoch and self._epoch is None:
            self._epoch = before.epoch
            self._epoch_start.leave()
        self._mode.remember()

    def abandon_iteration(self, iteration: int | None = None) -> None:
        """End an iteration in which the loop was left (this one: a generator may be closed long after). A step counts
        if it was complete; else what was computed of it is dropped, and trained when the loop is entered again.
        """
        if iteration is not None:
            if iteration != self._iteration:
                return
            self._member.stable_state.end()
        self._member.end_work()
        step, micro = self._step, self._step.micro
        counts = step.state in UNCOUNTED
        if micro is not None:
            self.without_gradients = step.state in {StepState.COMPUTED, StepState.REPEATED}
        step.abandon()
        self._state.in_iteration = False
        if counts and micro is not None:
            self._count(micro)
        if self.reruns:
            self._end_rerun()
        elif iteration is not None:
            self._note_loop_end()

    def _count(self, micro: MicroBatch) -> None:
        """Count a step as applied."""
        self._state.position = self.position.after_step(micro.step_samples)
        self._report_progress()

    def _repeat_step(self, error: CollectiveError) -> None:
        """Return to the step's beginning, and continue with the workers that are left."""
        if self._step.state is StepState.APPLIED and self._member.sharding:
            self._member.sharding.give_up()  # one of several optimizers has acted
        self._step.revert()
        self._step.agreed, self._state.awaited = None, False
        before, micro = self.position, self._step.micro
        self._recover(error)
        if not self._state.awaited:
            self._step.show_zeros()
            self._remember()
            return
        restored = self.position
        if self._member.sharding and micro is not None:
            self._state.position = before.after_step(micro.step_samples)
        self._step.take_over()
        self._moved = self.catching_up = True
        self._remember()
        if self._member.sharding:
            self._member.stable_state.end()  # its position is not that of its state
            self._restored = restored

    def _recover(self, error: CollectiveError | None) -> None:
        epoch = self.position.epoch
        self._member.end_work()
        self._member.stable_state.end()
        self._member.recover(self._state, error)
        self.catching_up = self.position.epoch != epoch
        self._report_progress(force=True)

    def _change_membership(self) -> bool:
        """Make the switch that was agreed on, or the one that a loss calls for, between two steps."""
        agreed, self._step.agreed = self._step.agreed, None
        self._member.leave_if_preempted(self._state)
        if self._member.must_recover:
            self._recover(None)
            return True
        if agreed:
            self._member.switch_to(agreed, self._state)
            self._report_progress(force=True)
            return True
        return False

    def _remember(self) -> None:
        """Keep the state with which the next step begins."""
        if self._went_back or self._restored is not None:
            self._mode.restore()  # buffers and random streams, as nothing since then was of effect
        if self._step.observer:
            self._step.observer.between_steps()
        self._step.remember_gradients()
        self._mode.remember()
        self._member.stable_state.begin()

    def _report_progress(self, *, force: bool = False) -> None:
        self._member.report_progress(self.position, self._total_steps, force=force)


def _finish_left(held: Callable[[], Session | None]) -> None:
    """Finish the training at the process's exit, unless it has failed."""
    if session := held():
        session.finish_unless_failed()
