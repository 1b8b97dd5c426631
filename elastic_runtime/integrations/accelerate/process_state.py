"""An Accelerator with the job's current rank and size, and the calls that all workers make together."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import recursively_apply

from elastic_runtime.errors import CollectiveError, LoopError, UsageError
from elastic_runtime.integrations.accelerate import collectives
from elastic_runtime.loop.synchronized_calls import nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_runtime.loop.job import Job

Result = TypeVar("Result")
_log = logging.getLogger("elastic_runtime")
REDUCTIONS = ("sum", "mean", "max")


class _OwnTurn(Exception):  # noqa: N818  (not an error: it ends a wait)
    """This worker became rank 0 while it waited for rank 0."""


class JobStateAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """An Accelerator whose process state is the job's in the loop, and that of a single process before the loop."""

    job: Job
    flag_tensor: torch.Tensor | None
    live = False  # the loop runs: a lost worker is detected, and the others continue
    iterating = False  # in an iteration of the training loader
    repeating = False  # in a function that `repeat` calls
    read_alone = False  # since the last training iteration a loader was read by each worker alone
    _alone = 0  # nesting depth of such loops
    _divided = False  # the script has shared something out
    _advised = False

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0: which workers share a machine is not visible here."""
        return bool(self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """As `on_main_process`."""
        return self.on_main_process(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            print(*args, **kwargs)  # noqa: T201

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Gathering and the like concern this worker only. It keeps its rank."""
        rank, size = self.process_index, self.num_processes
        if self.live and size > 1 and rank == 0 and not self._advised:
            self._advised = True
            _log.warning(
                "each of the %d workers evaluates everything by itself; accelerator.repeat(evaluate) shares it out",
                size,
            )
        self.read_alone = True
        self._alone += 1
        self._show(rank, 1)
        try:
            yield
        finally:
            self._alone -= 1
            self._show(rank, size)

    def follow(self, *_: object) -> None:
        """Show the rank and size of the moment."""
        self._show(self.job.rank, self.job.world_size)

    def begin_iteration(self) -> None:
        """Mark the loop as running again."""
        self.iterating, self.sync_gradients, self.read_alone, self._divided = True, False, False, False
        for each in self._optimizers:
            each.acted = False

    def end_iterations(self) -> None:
        """The training loader's loop is over."""
        self.iterating, self.sync_gradients = False, True

    def _show(self, rank: int, size: int) -> None:
        cuda = self.device.type == "cuda"
        several = (DistributedType.MULTI_GPU, "nccl") if cuda else (DistributedType.MULTI_CPU, "gloo")
        kind, backend = several if size > 1 else (DistributedType.NO, None)
        for state in (PartialState(), self.state):
            state.process_index = state.local_process_index = rank
            state.num_processes, state.distributed_type, state.backend = size, kind, backend

    # What all workers do at the same place

    def repeat(self, work: Callable[[], Result]) -> Result:
        """`work()`, done by all workers together, and again where one is lost in the middle of it; returns its result.

        In it, and only there, the loaders for evaluation are shared out. It starts again each time: metrics that add up
        are made in it, or reset. After an epoch's loop, or in an iteration after `optimizer.step()` where
        `sync_gradients`; LoopError elsewhere. Before and after the training each worker does it by itself.
        """
        self._check_place("repeat")
        if self.repeating or not self.live:
            return work()
        loops = list(self.gradient_state.dataloader_references)

        def attempt() -> Result:
            self.follow()
            self.gradient_state.dataloader_references = list(loops)  # less those of an attempt that was broken off
            return work()

        self.repeating = True
        try:
            return self.job.repeat(attempt)
        finally:
            self.repeating = False

    def gather(self, tensor: Any) -> Any:
        """As Accelerator's, at a place that all workers reach; parts may differ in length."""
        alone = recursively_apply(lambda each: each, tensor, error_on_other_type=True)
        return self._shared("gather", partial(collectives.gather, self.job, tensor), alone)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: FBT001, FBT002
        """As Accelerator's, in the loop over an evaluation loader; without the samples that were there twice."""
        way = collectives.gather_object if use_gather_object or not _all_tensors(input_data) else collectives.gather
        found = self._shared("gather_for_metrics", partial(way, self.job, input_data), input_data)
        counted = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if counted <= 0:
            return found
        if way is collectives.gather_object:
            return found[:counted]
        return recursively_apply(lambda tensor: tensor[:counted] if tensor.ndim else tensor, found)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:  # noqa: ARG002  (XLA's)
        """As Accelerator's, at a place that all workers reach. `reduction`: "sum", "mean" or "max"; else UsageError."""
        if reduction not in REDUCTIONS:
            raise UsageError(f"accelerator.reduce got reduction={reduction!r}; it must be one of {REDUCTIONS}")
        alone = recursively_apply(lambda each: each.clone(), tensor, error_on_other_type=True)
        return self._shared("reduce", partial(collectives.reduce, self.job, tensor, reduction), alone)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:  # noqa: FBT001, FBT002
        """As Accelerator's, at a place that all workers reach."""
        work = partial(collectives.pad, self.job, tensor, dim, pad_index, first=pad_first)
        return self._shared("pad_across_processes", work, tensor)

    def check_trigger(self) -> bool:
        """As Accelerator's, at a place that all workers reach: the same answer on all that are left."""
        self._check_place("check_trigger")
        triggered = self.flag_tensor is not None and bool(self.flag_tensor)
        self.flag_tensor = None

        def anywhere() -> bool:
            return bool(self.job.all_reduce(torch.tensor(int(triggered))))

        return self._survived("check_trigger", anywhere, triggered)

    def wait_for_everyone(self) -> None:
        """As Accelerator's, at a place that all workers reach: for everyone that is left."""
        self._check_place("wait_for_everyone")
        with suppress(*() if self.live else (CollectiveError,)):  # after the training a lost worker has no effect
            self._meet("wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """As in Accelerator, if all workers reach the call; a worker that becomes rank 0 meanwhile is the first."""
        self._check_place("main_process_first")
        leads = self.is_main_process
        if not leads:
            try:
                self._meet("main_process_first", self._unless_rank_0)
            except _OwnTurn:
                leads = True
        yield
        if leads:
            self._meet("main_process_first")

    def local_main_process_first(self) -> Any:
        """As `main_process_first`."""
        return self.main_process_first()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:  # noqa: FBT001, FBT002
        """As Accelerator's, for the size of the moment. Within `repeat` a lost worker's share is shared out again."""
        self._divided = not self.repeating
        with super().split_between_processes(inputs, apply_padding) as share:
            yield share

    @contextmanager
    def join_uneven_inputs(self, *_: Any, **__: Any) -> Iterator[None]:
        """Nothing: shares may always be uneven."""
        yield

    # Inside

    def _check_place(self, name: str) -> None:
        """LoopError in an iteration that has not completed a step: workers differ in how many of those they have."""
        if not self.sync_gradients:
            raise LoopError(
                f"accelerator.{name} was called in an iteration that has not completed a global step; workers differ "
                "in how many iterations a step has, so call it below accelerator.backward, "
                "within: if accelerator.sync_gradients"
            )

    def _shared(self, name: str, work: Callable[[], Result], alone: Result) -> Result:
        """Return the result of `work` for all workers, or `alone` if there is one worker."""
        self._check_place(name)
        if self.read_alone and not self._alone and not self.repeating:
            raise LoopError(
                f"accelerator.{name} was called after a loop in which each worker evaluated everything by itself, so "
                "that samples would count several times; put the evaluation into a function, and call "
                "accelerator.repeat(evaluate): there it is shared out"
            )
        return self._survived(name, work, alone, again=not self._divided)

    def _meet(self, name: str, before: Callable[[], object] = nothing) -> None:
        """Wait for all others that are left; `before` is called each time that the wait begins."""

        def met() -> None:
            self.job.all_reduce(torch.zeros(1))

        self._survived(name, met, None, before=before)

    def _unless_rank_0(self) -> None:
        if self.is_main_process:
            raise _OwnTurn

    def _survived(
        self,
        name: str,
        work: Callable[[], Result],
        alone: Result,
        *,
        again: bool = True,
        before: Callable[[], object] = nothing,
    ) -> Result:
        """`work()`, and again where a worker is lost in it, if that may be, and the place is one for it.

        Outside of an iteration one worker's `alone` is a result of `job.repeat`, too: a worker that joins within the
        epoch, or resumes in it, runs the code before the loop again, and gets the results from there. Not where this
        worker evaluates by itself: others may not come there.
        """
        if self.num_processes == 1 and (self.iterating or not self.live or self.repeating or self._alone):
            return alone
        if self.num_processes == 1:
            return self.job.repeat(lambda: alone)
        acted = not self.iterating or any(each.acted for each in self._optimizers)
        if again and acted and self.live and not self.repeating:
            return self.job._prepared.repeat(work, before=before)  # noqa: SLF001
        before()
        try:
            return work() if again or self.iterating or not self.live or self.repeating else self._once(work)
        except CollectiveError as error:
            if not self.repeating:
                error.add_note(
                    f"accelerator.{name}: what workers share out is done again where one is lost in a function that "
                    "accelerator.repeat(...) calls; calls in an iteration, where they come after optimizer.step()"
                )
            raise

    def _once(self, work: Callable[[], Result]) -> Result:
        """`work()` as work of `job.repeat`, but not again where a worker is lost in it, whose share only it has."""
        done: list[Result] = []

        def attempt() -> Result:
            try:
                if not done:
                    done.append(work())
            except CollectiveError as error:
                raise _ShareLostError(error) from error
            return done[0]

        try:
            return self.job.repeat(attempt)
        except _ShareLostError as lost:
            raise lost.error from None


class _ShareLostError(Exception):
    """A worker was lost with a share of work that is not done again."""

    def __init__(self, error: CollectiveError) -> None:
        super().__init__(str(error))
        self.error = error


def _all_tensors(found: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, found, error_on_other_type=True)
    except TypeError:
        return False
    return True
