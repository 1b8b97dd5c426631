"""What one iteration of the loop means.

An iteration is one micro-batch of this worker. Between two iterations, where the loader is asked for the next batch,
lies the only place where the membership changes by agreement; where the gradients are summed, the only one where a
loss is noticed. Everything else in a loop is the script's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.losses import StepLosses
from elastic_runtime.memory import free_cache, is_out_of_memory
from elastic_runtime.rounds import Rounds
from elastic_runtime.tail import STAMPS, Share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_runtime.batches import MicroBatch
    from elastic_runtime.generations import Generation
    from elastic_runtime.loader import ElasticLoader
    from elastic_runtime.member import Member
    from elastic_runtime.memory import MemoryFollower
    from elastic_runtime.modes import Clipping, Mode
    from elastic_runtime.position import Position
    from elastic_runtime.sizes import MicroBatchLimit
    from elastic_runtime.state import TrainingState


class Session:
    """The loop of one training: counts micro-batches into steps, repeats a failed step, switches between steps."""

    loader: ElasticLoader  # set once it is made: the two need each other
    warm_up: Callable[[Any], torch.Tensor] | None = None  # from a batch to its loss

    def __init__(
        self,
        state: TrainingState,
        member: Member,
        mode: Mode,
        scaler: torch.amp.GradScaler | None,
        limit: MicroBatchLimit | None,
        memory: MemoryFollower,
    ) -> None:
        self._state, self._member, self._mode, self._scaler = state, member, mode, scaler
        self._limit, self._memory = limit, memory
        self._total_steps: int | None = None
        self.last_step: int | None = None
        self.started = self.finished = False
        self._micro: MicroBatch | None = None
        self._samples = 0
        self._losses = StepLosses(whole=mode.name == "exact")
        self._first = True  # the next iteration begins a step
        self._backward_done = self._complete = self._repeat = False
        self._released = False
        self._acted = True  # an optimizer did, in this step
        self._acts = False  # one ever did
        self._unapplied: int | None = None  # the step before, where none did
        self._catching_up = False  # another's state is ahead of this worker's place in the loop
        self._agreed: Generation | None = None
        self._counted = self._moved = False  # in this iteration: its step, early; the membership
        self.rounds = Rounds(state, member, self._recover_between_steps)

    @property
    def position(self) -> Position:
        """Where the training stands."""
        return self._state.position

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size)."""
        return self._member.place

    @property
    def leaving(self) -> bool:
        """Whether this worker was told to go."""
        return self._member.leaving

    @property
    def applied(self) -> bool:
        """Whether this iteration completes a global step."""
        return self._complete

    @property
    def reached(self) -> Position:
        """Where the training stands once this iteration is over."""
        micro = self._micro
        return self.position.after_step(micro.step_samples) if micro and self._complete else self.position

    def may_act(self) -> bool:
        """Whether optimizer, scheduler and scaler act now: outside an iteration, and where a step is complete."""
        if self._released:
            return True
        if self._micro is None:
            self._member.at_rest.end()
        return not self._catching_up and (self._micro is None or self._complete)

    def may_step(self) -> bool:
        """Whether an optimizer acts now; it is about to, if so."""
        may = self.may_act()
        self._acted |= may
        self._acts |= may
        return may

    # Epochs

    def start(self, *, total_steps: int | None, last_step: int | None = None) -> None:
        """The training begins, here or where others are; or goes on, after it had finished.

        LoopError where the coordinator was told that it is over.
        """
        if self.finished and self._member.coordinated:
            raise LoopError("the job's training has finished; what comes after it needs a job of its own")
        self.finished = self._released = False
        self._mode.reducer.attach()
        self._member.check_state(self._state)
        self._total_steps, self.last_step = total_steps, last_step
        if self._member.coordinated and not self.started:
            self.loader.start_processes()
            self._warm_up()
        self.started = True
        self._member.join(self._state, self._mode)
        self._memory.follow()

    def _warm_up(self) -> None:
        """A step whose gradients are dropped: what the first one takes longer is nobody's wait."""
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

    def enter_epoch(self) -> None:
        """The loop begins to iterate, perhaps in the middle of an epoch. LoopError outside `job.epochs`."""
        if not self.started:
            raise LoopError(
                "the prepared loader is iterated outside job.epochs(...); write: for epoch in job.epochs(N)"
            )
        self.break_off()
        self._catching_up, self._first = False, True
        self._change_membership()
        self._remember()

    def leave_epoch(self, epoch: int) -> None:
        """The script is done with an epoch, unless others already are further."""
        self.break_off()
        if self.position.epoch == epoch:
            self._state.position = self.position.after_epoch()

    def finish(self) -> None:
        """All epochs are done: wait for the others, so that whoever is a step behind finds a state to go on from."""
        self._catching_up = False
        step = self.position.step
        while not self._member.all_here(self._state):
            self._member.recover(self._state, None)
            if self.position.step < step:
                return  # a shard was lost, and the steps since the checkpoint are to be trained again
        self._tell_progress(force=True)
        self._end()

    def finish_early(self) -> None:
        """The process ends well after the loop was left by `break`: the training is over where it stands."""
        if self.started and not self.finished:
            self.break_off()
            self._end()

    def release(self) -> None:
        """Leave model, optimizers and schedulers to the script, or to another job."""
        self._released = True
        self._mode.reducer.release()

    def owns(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether one of these is trained here."""
        own = {id(parameter) for _, parameter in self._state.parameters()}
        return any(id(parameter) in own for parameter in parameters)

    def _end(self) -> None:
        self.finished = True
        self.release()
        self._member.at_rest.end()
        self._member.finish(self.position.step)

    # Iterations

    def begin(self, micro_batch: MicroBatch) -> None:
        """The loop gets this micro-batch next."""
        self._mode.begin(micro_batch, self.position.step, first=self._first)
        if self._first:
            self._samples, self._acted = 0, False
            self._losses.begin()
        if self._limit is not None:
            self._limit.note(micro_batch.size)
        self._micro, self._backward_done, self._complete, self._counted = micro_batch, False, False, False

    def backward(self, loss: torch.Tensor, weight: float | None, reduction: str) -> None:
        """See `Job.backward`."""
        micro = self._micro
        if micro is None:
            raise LoopError("job.backward was called outside the prepared loader's loop; call it once per iteration")
        if self._backward_done:
            raise LoopError("job.backward was called twice in one iteration; add the losses up and call it once")
        self._losses.check(weight, reduction, first=self._first)
        self._check_applied()
        self._backward_done = True
        self._samples += micro.size
        self._mode.reducer.begin(self._member.group, micro, first=self._first)
        factor = self._losses.factor(micro, weight, reduction, passive=self._mode.reducer.passive)
        self._first = False
        try:
            if self._scaler:
                loss = self._scaler.scale(loss)
            loss.backward(self._losses.seed(loss, factor))  # type: ignore[no-untyped-call]
            self._mode.end(micro)
            if micro.last:
                self._complete_step(micro)
        except CollectiveError as error:
            self._repeat_step(error)
        except (RuntimeError, MemoryError) as error:
            if not self.out_of_memory(error):
                raise

    def clip_grad_norm_(self, parameters: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """See `Job.clip_grad_norm_`."""
        if self._complete:
            try:
                return self._mode.clip_grad_norm_(parameters, clipping)
            except CollectiveError as error:
                self._repeat_step(error)
        return torch.tensor(0.0)

    def end(self) -> bool:
        """The loop is done with an iteration; False where what follows is to be planned anew."""
        micro, self._micro = self._micro, None
        counted, self._counted = self._counted, False
        changed, self._moved = self._moved, False
        if self._repeat:
            self._repeat, self._first = False, True
            return False
        if not self._backward_done:
            raise LoopError("an iteration ended without job.backward(loss); every iteration needs it, exactly once")
        if not counted:
            if micro is None or not micro.last:
                return True
            self._count(micro)
        self._member.save_if_due(self._state)
        if not self.loader.has_more(self.position):
            self._remember()
            return True  # a joiner should begin with a whole epoch: the switch waits for it
        changed |= self._memory.follow()
        changed |= self._change_membership()
        self._remember()
        return not changed

    def pause(self) -> None:
        """Work beside the training comes next: an iteration that completed a step counts from here on.

        LoopError in one that did not, and before its optimizer stepped: workers would not be at the same state.
        """
        if not self.started:
            raise LoopError("job.repeat comes after the training has begun; call it within job.epochs(...)")
        if self._micro is None:
            return
        if not self._complete or not self._acted:
            raise LoopError("job.repeat within a step: call it where job.applied, after optimizer.step()")
        micro, self._micro = self._micro, None
        self._counted = True
        self._count(micro)

    def _recover_between_steps(self, error: CollectiveError) -> None:
        self._agreed = None
        self._recover(error)
        self._moved = True

    def break_off(self, iteration: MicroBatch | None = None) -> None:
        """The loop was left within an iteration (this one: a generator may be closed long after). A step counts where
        it was complete; else what was computed of it is dropped, and trained when the loop is entered again.
        """
        micro = self._micro
        if micro is None or (iteration is not None and iteration is not micro):
            return
        self._micro = None
        if self._complete:
            self._count(micro)
        elif self._backward_done:
            self._forget_step()
            self._repeat = False

    def _count(self, micro: MicroBatch) -> None:
        """A step is over."""
        self._unapplied = None if self._acted else self.position.step
        self._first, self._complete = True, False
        self._state.position = self.position.after_step(micro.step_samples)
        self._tell_progress()

    def out_of_memory(self, error: BaseException | None) -> bool:
        """Take an iteration that did not fit back, to be repeated in halves; False where it is not that, or cannot be.

        Where gradients of it are under way already, the others have to repeat the step as well.
        """
        micro = self._micro
        if micro is None or self._complete or error is None or not is_out_of_memory(error):
            return False
        if self._mode.lockstep:
            error.add_note("with shard= all workers iterate in step: lower max_batch_per_gpu")
            return False
        if not self._memory.grow() and not self._halve(micro, error):
            return False
        self._backward_done = True
        if self._mode.reducer.in_flight and self._member.group is not None:
            self._repeat_step(CollectiveError("out of memory in the middle of a reduction"))
        else:
            self._forget_step()
        free_cache()
        return True

    def _halve(self, micro: MicroBatch, error: BaseException) -> bool:
        """Plan smaller iterations from now on."""
        if self._limit is None:
            error.add_note(
                "reduction='exact' fixes the shape of a shard: use more shards, so that one fits into memory"
            )
            return False
        if not self._limit.halve(micro.size):
            error.add_note("an iteration of one sample does not fit into memory")
            return False
        self._member.tell_halved(micro.size, self._limit.now)
        return True

    def _check_applied(self) -> None:
        """Loops that add gradients up by themselves would add up those of all workers, again and again."""
        step, self._unapplied = self._unapplied, None
        if step is None or not self._acts:
            return
        if any(p.grad is not None and bool(p.grad.any()) for _, p in self._state.parameters()):
            raise LoopError(
                f"the gradients of step {step} were neither applied nor cleared; job.backward adds micro-batches up by "
                "itself, so call optimizer.step() and optimizer.zero_grad() in every iteration (they act where a step "
                "is complete), and give global_batch_size in place of accumulating in the loop"
            )

    def _complete_step(self, micro: MicroBatch) -> None:
        """Sum the gradients; what the tail says is decided by all workers in the same way."""
        vote = self._member.vote()
        rank, workers = self.place
        clock, tail = self._member.reporter.clock, self._mode.tail
        distance = vote.number - self._member.generation if vote else 0
        stamp = (self.position.step + self.loader.stamp) % STAMPS
        share = Share(self._samples, distance, self._losses.weight, clock.ready(), stamp)
        self._mode.fill_tail(share, leader=rank == 0)
        self._member.check()
        self._mode.reducer.reduce()
        self._member.at_rest.end()
        agreed = self._mode.take_tail(micro, leader=rank == 0, workers=workers)
        clock.summed(tail.busy_s / workers)
        self._mode.reducer.hand_out(self._losses.final(micro.step_samples, tail.weight))
        self._mode.completed(self.position.step)
        self._complete = True
        self._member.reporter.note_step(micro.step_samples, workers)
        if agreed:
            self._agreed = vote

    def _repeat_step(self, error: CollectiveError) -> None:
        """Back to the step's beginning, and on with whoever is left."""
        self._forget_step()
        self._agreed = None
        self._recover(error)
        self._remember()

    def _forget_step(self) -> None:
        self._mode.reducer.abandon()
        self._mode.restore()
        self._repeat, self._complete = True, False

    def _recover(self, error: CollectiveError | None) -> None:
        epoch = self.position.epoch
        self._member.at_rest.end()
        self._member.recover(self._state, error)
        self._catching_up = self.position.epoch != epoch
        self._tell_progress(force=True)

    def _change_membership(self) -> bool:
        """Between two steps: make the switch that was agreed on, or the one that a loss calls for."""
        agreed, self._agreed = self._agreed, None
        self._member.leave_if_told(self._state)
        if self._member.must_recover:
            self._recover(None)
            return True
        if agreed:
            self._member.switch_to(agreed, self._state)
            self._tell_progress(force=True)
            return True
        return False

    def _remember(self) -> None:
        """What the next step begins with."""
        self._mode.remember()
        self._member.at_rest.begin()

    def _tell_progress(self, *, force: bool = False) -> None:
        self._member.tell_progress(self.position, self._total_steps, force=force)
