"""Work of the script that all workers share, such as an evaluation: it is repeated if a worker is lost meanwhile.

Invariant: no worker passes the barrier of a round before all workers have reached it, so a round is complete on all
workers or on none. A worker that passed the barrier may have continued when others detect a loss. The number of
complete rounds is therefore part of the state that the next generation exchanges: a worker that is behind keeps its
own result.

A worker that begins a round may have applied a step that another worker has not, because the sums were lost with a
worker. The other one then takes over the state of a round that it has not begun, and runs the script up to that round
without applying anything. Rejected: a second barrier, which would only move the same race.

With sharded state a lost worker takes its shards with it, so the shards are copied before the work begins. If one is
lost while they are, the others return to the last step's beginning. They do the work with that state, since the script
waits for a result; then nothing acts until the script has come to the step again. One that is still in that step runs
to the work without applying anything, too. Where one of them is still in the work before, they cannot do it together,
and CollectiveError ends their scripts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import torch

from elastic_runtime.errors import CollectiveError, UsageError
from elastic_runtime.state.epoch_start import NOTHING
from elastic_runtime.state.packing import pack, unpack
from elastic_runtime.state.transfer import gather_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.loop.member import Member
    from elastic_runtime.state.epoch_start import EpochStart
    from elastic_runtime.state.training_state import TrainingState

Result = TypeVar("Result")
SUMMABLE: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""The types that both gloo and NCCL sum."""
_LIBRARIES = ("gloo", "nccl")
_OWN_COLLECTIVE = (
    "within job.repeat a lost worker breaks off every collective, and only job.all_reduce and job.all_gather are done "
    "again: use them in place of torch.distributed (a metric of torchmetrics: give it a dist_sync_fn, as "
    "docs/guides/training_loop.md shows)"
)


def nothing() -> None:
    """Do nothing."""


class SynchronizedCalls:
    """Runs work that all workers share. `recover(error)` continues with the workers that are left. `results`: of the
    code before the loader's loop, for workers that run it later, when the others are in their steps.
    """

    def __init__(
        self,
        state: TrainingState,
        member: Member,
        recover: Callable[[CollectiveError], None],
        results: EpochStart,
    ) -> None:
        self._state, self._member, self._recover, self._results = state, member, recover, results

    def run(self, work: Callable[[], Result], *, copies: bool = True, before: Callable[[], object] = nothing) -> Result:
        """Return the result of `work` after all workers completed it with the same peers.

        `copies`: it takes long enough that shards are copied before it. `before` is called each time that it begins,
        before this worker waits for the others: it may raise instead.
        """
        self._state.in_round = True
        try:
            return self._run(work, copies=copies, before=before)
        finally:
            self._state.in_round = False
            if self._member.sharding:
                self._member.sharding.end_round()

    def _run(self, work: Callable[[], Result], *, copies: bool, before: Callable[[], object]) -> Result:
        number, sharding = self._state.rounds, self._member.sharding
        while True:
            try:
                self._member.check()
                before()
                if sharding and copies:
                    sharding.begin_round()
                if not sharding:
                    self._member.meet("job.repeat or job.mean", self._state)
                result = work()
                if sharding:
                    sharding.link.check()
            except CollectiveError as error:
                self._recover(error)
                self._check_together(error)
                continue
            except RuntimeError as error:
                if any(library in str(error).lower() for library in _LIBRARIES):
                    error.add_note(_OWN_COLLECTIVE)
                raise
            try:
                self._member.meet("the end of job.repeat or job.mean", self._state)
            except CollectiveError as error:
                self._recover(error)
                if self._state.rounds == number:
                    self._check_together(error)
                    continue
            self._state.rounds = number + 1
            return result

    def _check_together(self, error: CollectiveError) -> None:
        """Raise CollectiveError where the workers that are left cannot do the work together."""
        if self._member.sharding and not self._state.round_is_shared:
            raise CollectiveError(
                "a worker was lost in job.repeat, with its shards of the model, and another one has not completed the "
                "job.repeat before it: the script has to start again, from the last checkpoint"
            ) from error

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over all workers. UsageError for what cannot be summed, CollectiveError where one is lost."""
        if tensor.dtype not in SUMMABLE or tensor.layout is not torch.strided:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in SUMMABLE))
            raise UsageError(
                f"all_reduce got a {tensor.dtype} tensor of layout {tensor.layout}; convert it to a dense tensor of "
                f"one of: {names}"
            )
        summed = self._recorded(lambda: self._summed(tensor))
        return tensor if summed is tensor else tensor.copy_(summed)

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        group = self._member.group
        if group is not None and group.size > 1:
            self._member.check()
            dense = tensor.contiguous()
            group.wait([group.all_reduce(dense)])
            if dense is not tensor:
                tensor.copy_(dense)
        return tensor

    def all_gather(self, value: Result) -> list[Result]:
        """Return each worker's `value`, by rank. CollectiveError where one is lost."""
        return self._recorded(lambda: self._gathered(value))

    def _recorded(self, collective: Callable[[], Result]) -> Result:
        """Return the result that the others had here, before their loop, or that of `collective`. Within `run` the
        result of its work is recorded.
        """
        if self._state.in_round or not self._results.has_collectives:
            return collective()
        found: Result = self._results.next_result()
        if found is not NOTHING:
            return found
        result = collective()
        self._results.note(result)
        return result

    def _gathered(self, value: Result) -> list[Result]:
        group = self._member.group
        if group is None or group.size == 1:
            skeleton, tensors = pack(value)
            return [unpack(skeleton, [tensor.cpu().clone() for tensor in tensors])]
        self._member.check()
        return gather_values(group, value)
