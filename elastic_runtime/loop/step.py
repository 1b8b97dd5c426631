"""The global step that is being computed: what this worker's iterations add to it, and whether optimizers act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.loop.multi_backward import Passes
from elastic_runtime.loop.row_gather import RowGather
from elastic_runtime.process.device_memory import free_cache, is_out_of_memory
from elastic_runtime.reduction.loss_scaling import StepLosses
from elastic_runtime.reduction.step_metadata import STAMPS, Share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_runtime.loop.member import Member
    from elastic_runtime.membership.generations import Generation
    from elastic_runtime.plan.batch_sizes import MicroBatchLimit
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.process.device_memory import MemoryFollower
    from elastic_runtime.reduction.step_modes import Clipping, Mode
    from elastic_runtime.state.training_state import TrainingState


class Observer(Protocol):
    """Looks at the gradients of each step, as a rehearsal does."""

    def summed(self) -> None:
        """The gradients of a step are summed over all workers. CollectiveError: repeat the step."""

    def between_steps(self) -> None:
        """A step is about to begin, perhaps for the second time."""


_LEFT_OUT = 2
"""Steps in a row whose gradients may stay where they are."""
_STAMP_OF_PASS = (11, 7)
"""By whether it is its iteration's last: workers that are in different passes of a step do not add up to one stamp."""


@dataclass(frozen=True)
class BackwardOptions:
    """The arguments of `torch.Tensor.backward` besides the loss."""

    retain_graph: bool | None = None
    create_graph: bool = False
    inputs: Sequence[torch.Tensor] | None = None

    def given(self) -> dict[str, Any]:
        """Return its keywords; none in the usual case."""
        return _NO_OPTIONS if self is PLAIN else {key: value for key, value in vars(self).items() if value}


_NO_OPTIONS: dict[str, Any] = {}
PLAIN = BackwardOptions()


class GlobalStep:
    """As this worker takes part in it.

    Its methods raise CollectiveError where a peer was lost, or where all have to compute the step once more; the state
    is that of the step's beginning again after `forget`.
    """

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
        self.micro: MicroBatch | None = None  # of the current iteration
        self.first = True  # the next iteration begins a step
        self.complete = False  # the gradients are those of all workers
        self.repeat = False  # the iteration's results are dropped
        self.computed = False  # the iteration's last backward pass was asked for
        self.backpropagating = False
        self.agreed: Generation | None = None  # on a switch, once the step is over
        self._stamp = 0
        self._samples = 0
        self._losses = StepLosses(whole=mode.name == "exact")
        self._passes = Passes(state)
        self._rows = RowGather(member, mode)
        self.evaluating = False  # an optimizer computes gradients by a closure, as often as it needs
        self.loss = 0.0  # of the global batch, in the last evaluation
        self._loss_share = 0.0
        self._skipped = self._void = False  # this worker's iteration is not counted; no worker's is
        self._acted, self._asked = True, False  # an optimizer acted in this step; the script has called one's step()
        self._unapplied: int | None = None  # the step before, where none did
        self.observer: Observer | None = None  # of a rehearsal
        self._shows_zeros = False  # the parameters have gradients that nobody computed
        self._left_out = 0  # steps in a row without one, gradients not cleared
        self._scales_late = mode.name == "fast" and _half(state, scaler)
        mode.reducer.expects = False
        mode.reducer.on_stray = self._check_stray

    @property
    def acts(self) -> bool:
        """Whether optimizers act now, in an iteration."""
        return (self.complete and not self._void) or self._passes.done > 0

    @property
    def begun(self) -> bool:
        """Whether something of the iteration is computed that did not complete the step."""
        return not self.complete and (self.computed or self._passes.done > 0)

    @property
    def evaluations(self) -> int:
        """Backward passes of the iteration that are summed, with others to come."""
        return self._passes.done

    @property
    def settled(self) -> bool:
        """Whether the step is complete and applied."""
        return self.complete and (self._acted or self._void)

    def note_acting(self) -> None:
        """An optimizer acts on it."""
        self._acted = self._asked = True

    def note_asked(self) -> None:
        """The script called `optimizer.step()` where it does not act."""
        self._asked = True

    def note_skipping(self) -> None:
        """A GradScaler decides whether an optimizer acts on it."""
        if self.complete:
            self._acted = True

    def begin(self, micro_batch: MicroBatch, order_stamp: int) -> None:
        """The loop gets this micro-batch next. `order_stamp`: equal for workers with the same order of samples."""
        if self._shows_zeros:
            self.clear()
        self._mode.begin(micro_batch, self._state.position.step, first=self.first)
        if self.first:
            self._samples, self._acted = 0, False
            self._losses.begin()
        if self._limit is not None:
            self._limit.note(micro_batch.size)
        self._rows.begin()
        self.micro, self._stamp = micro_batch, order_stamp
        self.computed = self.complete = self._skipped = self._void = False

    def backward(
        self, loss: torch.Tensor, weight: float | None, reduction: str, options: BackwardOptions, *, more: bool
    ) -> None:
        """Run the backward pass of one micro-batch, and sum the gradients after the last one."""
        micro = self._current("job.backward")
        if self.repeat:
            return  # an earlier pass of the iteration failed
        more |= self.evaluating
        if more:
            self._passes.check(micro, self._mode, first=self.first)
        self._losses.check(weight, reduction)
        self._begin_pass(micro, last=not more)
        factor = self._losses.factor(micro, weight, reduction, passive=self._mode.reducer.passive)
        self._loss_share = factor * float(loss.detach()) if self.evaluating else 0.0
        if self._scales_late:
            self._mode.reducer.scale, factor = factor, 1.0
        try:
            self._rows.check()
            if self._scaler:
                loss = self._scaler.scale(loss)
            self._backpropagate(loss, factor, options)
            self._rows.check()
            self._end_pass(micro)
        except CollectiveError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not self.out_of_memory(error):
                raise

    def _backpropagate(self, loss: torch.Tensor, factor: float, options: BackwardOptions) -> None:
        self.backpropagating = self._mode.reducer.expects = True
        try:
            loss.backward(self._losses.seed(loss, factor), **options.given())  # type: ignore[no-untyped-call]
        finally:
            self.backpropagating = self._mode.reducer.expects = False

    def _check_stray(self, name: str) -> None:
        """LoopError for a gradient of the script's own within an iteration; outside of one it is the script's."""
        if self.micro is None or self.repeat:
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
        micro = self._current("optimizer.step(closure)")
        self._loss_share = 0.0
        self._begin_pass(micro, last=True)
        self._end_pass(micro)

    def skip(self) -> None:
        """Count this iteration's samples without gradients."""
        micro = self._current("job.skip")
        if self.repeat:
            return
        if self._mode.lockstep or self._passes.done or self._rows.used:
            raise LoopError(
                "job.skip cannot take the place of one of several backward passes, nor be with shard= or "
                "job.gather_batch or SyncBatchNorm, where all workers compute together; call "
                "job.backward(loss, weight=0.0) with a finite loss"
            )
        self._skipped = True
        self._begin_pass(micro, last=True)
        self._end_pass(micro)
        if self._mode.reducer.passive:
            self._mode.reducer.abandon()
        self._void = self.complete and all(p.grad is None for _, p in self._state.parameters())

    def gather_batch(self, rows: torch.Tensor, largest_share: int) -> torch.Tensor:
        """Return the rows of all workers in this step; zeros in an iteration whose results are dropped."""
        if self.micro is None or (self.computed and not self.repeat):
            raise LoopError("job.gather_batch comes in an iteration of the prepared loader's loop, before job.backward")
        if self.repeat:
            return rows.new_zeros((self.micro.step_samples, *rows.shape[1:]))
        return self._rows.whole(rows, self.micro, largest_share, self._limit.now if self._limit is not None else None)

    def gather_statistics(self, row: torch.Tensor, largest_share: int) -> torch.Tensor | None:
        """Return one row of each worker; None where this worker's own count, or nothing does."""
        if self.micro is None or self.computed or self.repeat:
            return None
        return self._rows.one_of_each(
            row, self.micro, largest_share, self._limit.now if self._limit is not None else None
        )

    def clip_grad_norm_(self, parameters: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Clip the summed gradients, and return their norm; 0 if the step is not complete."""
        return self._mode.clip_grad_norm_(parameters, clipping) if self.acts else torch.tensor(0.0)

    def check_ended(self) -> None:
        """LoopError for an iteration that did not do its part."""
        if not self.computed:
            last = "a job.backward(loss) without more=True" if self._passes.done else "job.backward(loss)"
            raise LoopError(
                f"an iteration ended without {last}; every iteration needs it, exactly once. Where the loop leaves a "
                "batch out by `continue`, call job.skip() and optimizer.step() before it; where something fetches a "
                "batch ahead (a prefetcher, `next` before the backward pass), iterate over the prepared loader itself, "
                "whose num_workers and pin_memory fetch ahead"
            )
        if self._skipped and self.complete and not self.settled:
            raise LoopError(
                "an iteration with job.skip() ended without optimizer.step(), but the other workers' samples count; "
                "call it in place of job.backward(loss), and leave the rest of the iteration as it is"
            )

    def count(self) -> None:
        """Count the step as done, and prepare for the next one."""
        self._unapplied = None if self._acted else self._state.position.step
        self.first, self.complete = True, False
        self._passes.forget()

    def forget(self) -> None:
        """Back to its beginning; the iteration is repeated."""
        self._mode.reducer.abandon()
        self._passes.restore()
        self._mode.restore()
        self.repeat, self.complete = True, False
        free_cache()  # it may not have fitted

    def clear(self) -> None:
        """Remove what `show_zeros` set, except where zeros were before."""
        kept, self._shows_zeros = self._mode.reducer.kept, False
        for name, parameter in self._state.parameters():
            parameter.grad = torch.zeros_like(parameter) if name in kept else None

    def show_zeros(self) -> None:
        """Set zero gradients on every trained parameter: the rest of an iteration may read them, without effect."""
        self._shows_zeros = True
        for _, parameter in self._state.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def take_over(self) -> None:
        """Others have applied it, and this worker has their state: the rest of the iteration is as if it had, with
        gradients for what the script does to them where `job.applied`, though nothing comes of it.
        """
        self.show_zeros()
        self.repeat, self.complete, self.computed, self.first = False, True, True, True
        self._acted = True
        self._mode.completed(self._state.position.step - 1)

    def out_of_memory(self, error: BaseException | None) -> bool:
        """Revert an iteration that ran out of memory, to repeat it in halves; False if that is impossible.

        CollectiveError where gradients of it are under way already: the others have to repeat the step as well.
        """
        micro = self.micro
        if micro is None or self.complete or error is None or not is_out_of_memory(error):
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
        self.computed = True
        if (self._mode.reducer.in_flight or self._passes.done) and self._member.group is not None:
            raise CollectiveError("out of memory in the middle of a reduction")
        self.forget()
        return True

    def _halve(self, micro: MicroBatch, error: BaseException) -> bool:
        """Plan smaller iterations from now on."""
        if self._limit is None:
            error.add_note(
                "reduction='exact' fixes the shape of a shard: use more shards, so that one fits into memory"
            )
            return False
        if self._passes.used:
            error.add_note("an iteration with several backward passes is not cut: use a smaller global_batch_size")
            return False
        if not self._limit.halve(micro.size):
            error.add_note("an iteration of one sample does not fit into memory")
            return False
        self._member.report_halved(micro.size, self._limit.now)
        return True

    def _current(self, call: str) -> MicroBatch:
        if self.micro is None:
            raise LoopError(f"{call} was called outside the prepared loader's loop; call it once per iteration")
        if self.computed and not self.repeat:
            raise LoopError(
                f"{call} was called twice in one iteration; add the losses up and call it once, or, where an optimizer "
                "acts in between, pass more=True to all calls but the last"
            )
        return self.micro

    def _begin_pass(self, micro: MicroBatch, *, last: bool) -> None:
        self._check_applied()
        self.computed = last
        self._samples += micro.size
        self._passes.set_aside()
        self._mode.reducer.begin(self._member.group, micro, first=self.first or self._passes.done > 0)
        self.first = False

    def _check_applied(self) -> None:
        """LoopError for a loop that accumulates by itself: it would apply some steps' gradients only, or none.

        At once where the script has called `optimizer.step()` before, in the third step where it never has.
        """
        if not self.first or self._passes.done:
            return
        step, self._unapplied = self._unapplied, None
        if step is None or all(p.grad is None or not bool(p.grad.any()) for _, p in self._state.parameters()):
            self._left_out = 0
            return
        self._left_out += 1
        if self._asked or self._left_out == _LEFT_OUT:
            raise LoopError(
                f"the gradients of step {step} were neither applied nor cleared; job.backward adds micro-batches up by "
                "itself, so call optimizer.step() and optimizer.zero_grad() in every iteration (they act where a step "
                "is complete), and give global_batch_size in place of accumulating in the loop"
            )

    def _end_pass(self, micro: MicroBatch) -> None:
        self._mode.end(micro)
        if micro.last:
            self._sum(micro)

    def _sum(self, micro: MicroBatch) -> None:
        """Sum a pass's gradients; all workers read the same decisions from the sum's metadata."""
        member, mode = self._member, self._mode
        vote = member.vote() if self.computed else None
        rank, workers = member.place
        mode.fill_tail(self._share(vote), leader=rank == 0, alone=workers == 1)
        member.check()
        mode.reducer.reduce()
        member.stable_state.end()
        keeps = rank == 0 or not self.computed  # between two passes a graph may still need the buffers as they are
        agreed = mode.take_tail(micro, leader=keeps, workers=workers, group=member.group)
        factor = self._losses.final(micro.step_samples, mode.tail.weight)
        if not self.computed:
            self._passes.complete_one()
            self._samples, self.loss = 0, factor * mode.tail.loss
            self._losses.begin()
            self._hand_out(factor)
            return
        member.reporter.clock.summed(mode.tail.busy_s / workers)
        self._hand_out(factor)
        if self.observer:
            self.observer.summed()
        mode.completed(self._state.position.step)
        self.complete = True
        member.reporter.note_step(micro.step_samples, workers)
        if agreed:
            self.agreed = vote

    def _hand_out(self, factor: float) -> None:
        self._mode.reducer.hand_out(factor)
        self._passes.add_back()

    def _share(self, vote: Generation | None) -> Share:
        distance = vote.number - self._member.generation if vote else 0
        stamp = self._state.position.step + self._stamp + _STAMP_OF_PASS[self.computed] * (self._passes.done + 1)
        busy_s = self._member.reporter.clock.ready() if self.computed else 0.0
        step = self._state.position.step if self._member.place[1] > 1 else -1
        return Share(self._samples, distance, self._losses.weight, busy_s, stamp % STAMPS, step, self._loss_share)


def _half(state: TrainingState, scaler: torch.amp.GradScaler | None) -> bool:
    """Whether gradients are computed in float16, where a loss that was scaled down by a worker's share underflows.

    They are scaled in the buckets then, which are float32.
    """
    scaled = scaler is not None and scaler.is_enabled()
    return scaled or any(parameter.dtype == torch.float16 for _, parameter in state.parameters())
