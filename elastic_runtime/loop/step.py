"""The global step that is being computed: what this worker's iterations add to it, and whether optimizers act."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from elastic_runtime.errors import CollectiveError, LoopError, UsageError
from elastic_runtime.loop.passes import SummedPasses
from elastic_runtime.loop.row_gather import RowGather
from elastic_runtime.loop.step_states import (
    ACTING,
    COMPLETE,
    FIRST,
    OPEN,
    SETTLED,
    TRANSITIONS,
    UNCOUNTED,
    StepState,
    StepTrigger,
)
from elastic_runtime.process.device_memory import free_cache, is_out_of_memory
from elastic_runtime.reduction.backward_pass import NO_PASS, Loss, Pass, StepLosses
from elastic_runtime.reduction.step_metadata import CHECKSUMS, Share
from elastic_runtime.state.optimizer_state import GroupValues
from elastic_runtime.state.sparse_parameters import sparse_parameters, zero_gradient
from elastic_runtime.validation.leftover_gradients import UnappliedSteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.loop.member import Member
    from elastic_runtime.membership.generations import Generation
    from elastic_runtime.plan.batch_sizes import MicroBatchLimit
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.process.device_memory import MemoryFollower
    from elastic_runtime.reduction.gradient_noise import GradientNoise
    from elastic_runtime.reduction.step_modes import Clipping, Mode
    from elastic_runtime.state.training_state import TrainingState


class Observer(Protocol):
    """Looks at the gradients of each step, as a rehearsal does."""

    def started(self) -> None:
        """Note that the training starts."""

    def entered(self) -> None:
        """Note that the loader's loop begins."""

    def summed(self) -> None:
        """Look at the gradients of a step, which are summed over all workers. CollectiveError: repeat the step."""

    def between_steps(self) -> None:
        """Note that a step is about to begin, possibly for the second time."""


_CHECKSUM_OF_PASS = (11, 7)
"""By whether it is its iteration's last: workers in different passes of a step do not add up to one checksum."""
_UNMEASURED = (
    "{} excludes noise_scale=True (and scale_lr='adascale'), which compare the mean gradients of parts of a batch, in "
    "one backward pass each; leave that option out, or call job.backward with a mean, once in each iteration"
)
_RETRYABLE = OPEN | {StepState.COMPUTED, StepState.REPEATED}


class GlobalStep:
    """As this worker takes part in it.

    Its methods raise CollectiveError where a peer was lost, or where all have to compute the step once more; the state
    is that of the step's beginning again after `revert`.
    """

    def __init__(
        self,
        state: TrainingState,
        member: Member,
        mode: Mode,
        scaler: torch.amp.GradScaler | None,
        limit: MicroBatchLimit | None,
        memory: MemoryFollower,
        noise: GradientNoise | None = None,
    ) -> None:
        self.noise = noise
        self._training, self._member, self._mode, self._scaler = state, member, mode, scaler
        self._limit, self._memory = limit, memory
        self.state = StepState.BETWEEN_STEPS
        self.micro: MicroBatch | None = None  # of the current iteration
        self.agreed: Generation | None = None  # on a switch, once the step is over
        self._order_checksum = 0
        self._samples = 0
        self._losses = StepLosses(whole=mode.name == "exact")
        self._pass = NO_PASS
        self._earlier = SummedPasses(state)
        self._rows = RowGather(member, mode, limit)
        self.loss = 0.0  # of the global batch, in the last pass that was summed
        self._unapplied = UnappliedSteps()
        self._rates = GroupValues(state)
        self.observer: Observer | None = None  # of a rehearsal
        self._shows_zeros = False  # the parameters have gradients that nobody computed
        self._scales_late = mode.name == "fast" and _half(state, scaler)
        mode.reducer.on_stray = self._check_stray

    def _change(self, trigger: StepTrigger) -> None:
        self.state = TRANSITIONS[self.state][trigger]

    @property
    def first(self) -> bool:
        """Whether the next backward pass is the first one of a step."""
        return self.state in FIRST

    @property
    def evaluations(self) -> int:
        """Backward passes of the iteration that are summed, with others to come."""
        return self._earlier.done

    def note_call(self, *, acts: bool) -> None:
        """Note that the script called `optimizer.step()`, and whether it acts. LoopError within a backward pass."""
        if self._pass.running:
            raise LoopError(
                "optimizer.step() was called within job.backward, by a hook, where the gradients are those of this "
                "worker only; call it after job.backward, for all parameters"
            )
        self._unapplied.steps_are_applied = True
        if acts:
            self._earlier.applied |= self.state is StepState.PASSED
            self.note_skipping()

    def note_skipping(self) -> None:
        """Note that a GradScaler decides whether an optimizer acts on the step."""
        if self.state is StepState.SUMMED:
            self._change(StepTrigger.ACTED)

    def begin(self, micro_batch: MicroBatch, order_checksum: int) -> None:
        """Begin an iteration. `order_checksum`: equal for workers with the same order of samples."""
        if self._shows_zeros:
            self.clear(repeats=False)
        self._mode.begin_micro_batch(micro_batch, self._training.position.step, first=self.first)
        if self.first:
            self._samples = 0
            self._losses.reset()
        if self._limit is not None:
            self._limit.note(micro_batch.size)
        self._rows.reset()
        self.micro, self._order_checksum = micro_batch, order_checksum
        self._change(StepTrigger.BEGUN)

    def run_pass(self, loss: Loss, *, more: bool, evaluation: bool = False) -> None:
        """Run the backward pass of one micro-batch, and sum the gradients after the last one.

        `evaluation`: an optimizer wants the loss of the global batch as well.
        """
        micro = self._current("job.backward")
        if self.state is StepState.REPEATED:
            return  # an earlier pass of the iteration failed
        if more:
            self._earlier.check(micro, self._mode, first=self.first, evaluation=evaluation)
        self._losses.check(loss)
        if self.noise and (more or loss.reduction == "sum"):
            raise UsageError(_UNMEASURED.format("job.backward(more=True)" if more else "a loss that is a sum"))
        begun = self._begin_pass(micro, last=not more)
        factor = self._losses.factor(micro, loss, passive=self._mode.reducer.passive)
        if self.noise:
            self.noise.parts.count(factor)
        if evaluation:
            begun.loss = factor * float(loss.value.detach())
        if self._scales_late:
            begun.scale, factor = factor, 1.0
        try:
            self._rows.check()
            scaled = self._scaler.scale(loss.value) if self._scaler else loss.value
            begun.backpropagate(scaled, self._losses.seed(scaled, factor), **loss.options)
            self._rows.check()
            self._end_pass(begun)
        except CollectiveError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not self.out_of_memory(error):
                raise

    def _check_stray(self, name: str) -> None:
        """Raise LoopError for a gradient of the script's own within an iteration; outside of one it is the script's."""
        if self.micro is None or self.state is StepState.REPEATED:
            return
        raise LoopError(
            f"parameter {name!r} got a gradient by loss.backward() beside job.backward, which no other worker would "
            "know; add the losses up and call job.backward(loss) once, or, for gradients of an input, use "
            "torch.autograd.grad(loss, x)"
        )

    def end_evaluations(self) -> None:
        """End the step whose passes were an optimizer's evaluations: all workers have applied the same ones.

        How many there were is known only afterwards, so the sum that ends the step is one more, without gradients.
        """
        self._end_pass(self._begin_pass(self._current("optimizer.step(closure)"), last=True))

    def skip(self) -> None:
        """Count this iteration's samples without gradients."""
        micro = self._current("job.skip")
        if self.state is StepState.REPEATED:
            return
        if self._mode.lockstep or self._earlier.done or self._rows.used:
            raise LoopError(
                "job.skip cannot take the place of one of several backward passes, nor be with shard= or "
                "job.gather_batch or SyncBatchNorm, where all workers compute together; call "
                "job.backward(loss, weight=0.0) with a finite loss"
            )
        begun = self._begin_pass(micro, last=True)
        begun.skipped = True
        self._end_pass(begun)
        if self.state in COMPLETE and self._mode.reducer.empty:
            self._change(StepTrigger.SKIPPED)

    def gather_batch(self, rows: torch.Tensor, largest_share: int) -> torch.Tensor:
        """Return the rows of all workers in this step; zeros in an iteration whose results are dropped."""
        if self.micro is None or not (self.state in OPEN or self.state is StepState.REPEATED):
            raise LoopError("job.gather_batch comes in an iteration of the prepared loader's loop, before job.backward")
        if self.noise:
            raise UsageError(_UNMEASURED.format("job.gather_batch"))
        if self.state is StepState.REPEATED:
            return rows.new_zeros((self.micro.step_samples, *rows.shape[1:]))
        return self._rows.whole(rows, self.micro, largest_share)

    def gather_statistics(self, row: torch.Tensor, largest_share: int) -> torch.Tensor | None:
        """Return one row of each worker; None where this worker's own count, or nothing does."""
        if self.micro is None or self.state not in OPEN:
            return None
        return self._rows.one_of_each(row, self.micro, largest_share)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Clip the summed gradients, and return their norm; 0 if the step is not complete."""
        return self._mode.clip_grad_norm_(parameters, clipping) if self.state in ACTING else torch.tensor(0.0)

    def end(self) -> None:
        """End the iteration. LoopError for one that did not do its part."""
        before, missing, micro = self.state, self._missing(), self.micro
        self.micro = None
        if before in {StepState.COMPUTED, StepState.REPEATED}:
            self._rates.restore()
        failed = before is StepState.COMPUTED and micro is not None and micro.last  # and the script has caught it
        if not missing and (failed or self.state in UNCOUNTED):
            self._count()
        self._change(StepTrigger.ABANDONED if failed else StepTrigger.ENDED)
        if before is StepState.REPEATED:
            self.clear(repeats=True)
        if missing:
            raise LoopError(missing)

    def _missing(self) -> str:
        """Return what the iteration has left out, if anything."""
        if self.state in OPEN:
            last = "a job.backward(loss) without more=True" if self._earlier.done else "job.backward(loss)"
            return (
                f"an iteration ended without {last}; every iteration needs it, exactly once. Where the loop leaves a "
                "batch out by `continue`, call job.skip() and optimizer.step() before it; where something fetches a "
                "batch ahead (a prefetcher, `next` before the backward pass), iterate over the prepared loader itself, "
                "whose num_workers and pin_memory fetch ahead"
            )
        if self.state is StepState.SUMMED and self._pass.skipped:
            return (
                "an iteration with job.skip() ended without optimizer.step(), but the other workers' samples count; "
                "call it in place of job.backward(loss), and leave the rest of the iteration as it is"
            )
        return ""

    def pause(self) -> None:
        """Count the step before its iteration is over: what follows in it is outside of the training."""
        if self.state not in SETTLED:
            raise LoopError("job.repeat within a step: call it where job.applied, after optimizer.step()")
        self.micro = None
        self._count()
        self._change(StepTrigger.PAUSED)

    def abandon(self) -> None:
        """Leave the iteration: a step counts where it was complete, else what was computed is dropped."""
        self.micro = None
        if self.state in UNCOUNTED:
            self._count()
        elif self.state in {StepState.PASSED, StepState.COMPUTED, StepState.REPEATED}:
            self.revert()
            self._rates.restore()
            self.clear(repeats=True)
        self._change(StepTrigger.ABANDONED)

    def _count(self) -> None:
        applied = self.state in {StepState.APPLIED, StepState.TAKEN_OVER}
        self._unapplied.note(None if applied else self._training.position.step)
        self._earlier.forget()
        if self.noise:
            self.noise.commit()

    def revert(self) -> None:
        """Return to the step's beginning; the iteration is repeated."""
        self._mode.reducer.abandon()
        self._earlier.restore()
        self._mode.restore()
        if self.noise:
            self.noise.drop()
        self._change(StepTrigger.REVERTED)
        free_cache()  # it may not have fitted

    def clear(self, *, repeats: bool) -> None:
        """Remove what `show_zeros` set, except where zeros were before: all of them if the iteration `repeats`, else
        those that the rest of the iteration has left.
        """
        kept, self._shows_zeros = self._training.kept_gradients, False
        before = kept.of_repeated_step() if kept else frozenset()
        self._set_zeros(lambda parameter: parameter in before and (repeats or parameter.grad is not None))

    def remember_gradients(self) -> None:
        """Note which parameters have a gradient as the next step begins, unless that is shown zeros' iteration."""
        if self._shows_zeros and self.micro is None:
            self.clear(repeats=False)
        if self._training.kept_gradients and not self._shows_zeros:
            self._training.kept_gradients.begin_step()

    def show_zeros(self) -> None:
        """Set zero gradients on every trained parameter: the rest of an iteration may read them, without effect."""
        self._shows_zeros = True
        self._set_zeros(lambda parameter: parameter.requires_grad)

    def zeros(self) -> frozenset[torch.nn.Parameter]:
        """Return the parameters that have a gradient: between two steps it is zero."""
        return frozenset(parameter for _, parameter in self._training.parameters() if parameter.grad is not None)

    def set_zeros(self, parameters: frozenset[torch.nn.Parameter]) -> None:
        """Set zero gradients on these parameters, and remove those of all others."""
        self._shows_zeros = False
        self._set_zeros(lambda parameter: parameter in parameters)

    def _set_zeros(self, wanted: Callable[[torch.nn.Parameter], bool]) -> None:
        sparse = sparse_parameters(self._training.model)
        for _, parameter in self._training.parameters():
            parameter.grad = zero_gradient(parameter, sparse) if wanted(parameter) else None

    def take_over(self) -> None:
        """Continue with the state of others, who have applied the step: the rest of the iteration is as if it had, with
        gradients for what the script does to them where `job.applied`, though nothing comes of it.
        """
        self.show_zeros()
        self._change(StepTrigger.TAKEN_OVER)
        self._mode.completed(self._training.position.step - 1)

    def out_of_memory(self, error: BaseException | None, *, reruns: bool = False) -> bool:
        """Revert an iteration that ran out of memory, to repeat it in halves; False if that is impossible. `reruns`: it
        is one without effect.

        CollectiveError where gradients of it are under way already: the others have to repeat the step as well.
        """
        micro = self.micro
        retryable = reruns or self.state in _RETRYABLE
        if micro is None or not retryable or error is None or not is_out_of_memory(error):
            return False
        if self._mode.lockstep:
            error.add_note("with shard= all workers iterate in step: lower max_batch_per_gpu")
            return False
        if self._rows.used:
            error.add_note(
                "with job.gather_batch or SyncBatchNorm a worker's share is not cut: use a smaller global_batch_size"
            )
            return False
        if not self._memory.grow() and not self._halve(micro, error):
            return False
        if (self._mode.reducer.in_flight or self._earlier.done) and self._member.group is not None:
            raise CollectiveError("out of memory in the middle of a reduction")
        self.revert()
        return True

    def _halve(self, micro: MicroBatch, error: BaseException) -> bool:
        """Plan smaller iterations from now on."""
        if self._limit is None:
            error.add_note(
                "reduction='exact' fixes the shape of a shard: use more shards, so that one fits into memory"
            )
            return False
        if self._earlier.used:
            error.add_note("an iteration with several backward passes is not cut: use a smaller global_batch_size")
            return False
        if not self._limit.halve(micro.size):
            error.add_note("an iteration of one sample does not fit into memory")
            return False
        self._member.report_halved(micro.size, self._limit.now)
        return True

    def _current(self, call: str) -> MicroBatch:
        if self.micro is None:
            raise LoopError(
                f"{call} was called outside the prepared loader's loop; call it once per iteration, whose "
                "batches of several loaders come side by side: zip(first, second)"
            )
        if self.state not in OPEN and self.state is not StepState.REPEATED:
            raise LoopError(
                f"{call} was called twice in one iteration; add the losses up and call it once, or, where an optimizer "
                "acts in between, pass more=True to all calls but the last"
            )
        return self.micro

    def _begin_pass(self, micro: MicroBatch, *, last: bool) -> Pass:
        if self.state is StepState.STARTED:
            self._unapplied.check(self._training.parameters())
        first = self.state is not StepState.CONTINUED
        if not self._earlier.done:
            self._rates.note(acts=micro.last and self._member.rank_and_size[1] == 1 and not self.observer)
        if last:
            self._change(StepTrigger.COMPUTED)
        self._samples += micro.size
        self._earlier.set_aside()
        self._pass = Pass(micro, first, last, self._rows)
        if self.noise:
            self.noise.parts.begin(first=first)
        self._mode.reducer.begin_pass(self._member.group, self._pass)
        return self._pass

    def _end_pass(self, ended: Pass) -> None:
        self._mode.end_pass(ended.micro)
        if ended.micro.last:
            self._sum(ended)

    def _sum(self, ended: Pass) -> None:
        """Sum a pass's gradients; all workers read the same decisions from the sum's metadata."""
        member, mode, micro = self._member, self._mode, ended.micro
        vote = member.vote() if ended.last else None
        rank, workers = member.rank_and_size
        mode.fill_metadata(self._share(ended, vote), leader=rank == 0, alone=workers == 1)
        member.check()
        mode.reducer.reduce()
        member.end_work(reduced=True)
        member.stable_state.end()
        keeps = rank == 0 or not ended.last  # between two passes a graph may still need the buffers as they are
        agreed = mode.read_metadata(micro, leader=keeps, workers=workers, group=member.group)
        factor = self._losses.final(micro.step_samples, mode.metadata.weight)
        if not ended.last:
            self._earlier.add_one()
            self._samples, self.loss = 0, factor * mode.metadata.loss
            self._losses.reset()
            self._distribute(factor)
            self._change(StepTrigger.EARLIER_SUMMED)
            return
        member.reporter.clock.summed(mode.metadata.busy_s / workers)
        self._distribute(factor)
        if self.noise:
            self._measure(self.noise, micro.step_samples, factor)
        if self.observer:
            self.observer.summed()
        if self._training.kept_gradients:
            self._training.kept_gradients.end_step()
        mode.completed(self._training.position.step)
        self._change(StepTrigger.SUMMED)
        if self._earlier.applied:
            self._change(StepTrigger.ACTED)
        member.reporter.note_step(micro.step_samples, workers)
        if agreed:
            self.agreed = vote

    def _measure(self, noise: GradientNoise, samples: int, factor: float) -> None:
        """Add this step's norms to the averages: before optimizers act, and before the script clips."""
        scaler, measured = self._scaler, noise.parts.parts > 1
        scale = scaler.get_scale() if measured and scaler is not None else 1.0
        noise.add(samples, self._mode.reducer.summed_square() if measured else 0.0, scale, factor)

    def _distribute(self, factor: float) -> None:
        self._mode.reducer.distribute(factor)
        self._earlier.add_back()

    def _share(self, ended: Pass, vote: Generation | None) -> Share:
        distance = vote.number - self._member.generation if vote else 0
        number = self._training.position.step
        checksum = number + self._order_checksum + _CHECKSUM_OF_PASS[ended.last] * (self._earlier.done + 1)
        busy_s = self._member.reporter.clock.ready() if ended.last else 0.0
        step = number if self._member.rank_and_size[1] > 1 else -1
        return Share(self._samples, distance, self._losses.weight, busy_s, checksum % CHECKSUMS, step, ended.loss)


def _half(state: TrainingState, scaler: torch.amp.GradScaler | None) -> bool:
    """Return whether gradients are computed in float16, where a loss scaled down by a worker's share underflows.

    They are scaled in the buckets then, which are float32.
    """
    scaled = scaler is not None and scaler.is_enabled()
    return scaled or any(parameter.dtype == torch.float16 for _, parameter in state.parameters())
