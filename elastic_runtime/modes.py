"""What a step does beside its gradients: buffers and random streams, under either reduction.

`fast`: streams and buffers are remembered at a step's beginning and restored where it is repeated; every worker's own
streams go on from step to step.
`exact`: each shard begins with the step's buffers and with streams of its own, a function of (seed, step, shard); the
buffers of the first shard, and streams that are a function of (seed, step), are what the step leaves behind.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import torch

from elastic_runtime.errors import SettingsError
from elastic_runtime.exact import ExactReducer
from elastic_runtime.gradients import FastReducer, GradientReducer
from elastic_runtime.order import mix_seed
from elastic_runtime.tail import Tail

if TYPE_CHECKING:
    from elastic_runtime.batches import MicroBatch
    from elastic_runtime.buffers import FollowedBuffers
    from elastic_runtime.state import TrainingState
    from elastic_runtime.streams import RandomStreams

DEFAULT_SHARDS = 8


class Mode(Protocol):
    """How the steps of one training are computed."""

    name: str
    reducer: GradientReducer
    tail: Tail

    def remember(self) -> None:
        """A step begins, and its data are not fetched yet: what is there now is what a repeated step begins with."""

    def begin(self, micro: MicroBatch, step: int, *, first: bool) -> None:
        """A micro-batch is about to be computed, the `first` of its step."""

    def end(self, micro: MicroBatch) -> None:
        """Its backward pass is over."""

    def fill_tail(self, *, leader: bool, samples: int, vote: int, weight: float) -> None:
        """This worker's numbers, for the sum over all workers."""

    def take_tail(self, micro: MicroBatch, *, leader: bool, workers: int) -> bool:
        """Everybody's; whether the switch that this worker voted for is agreed on."""

    def completed(self, step: int) -> None:
        """The gradients are summed: optimizer and scheduler come next."""

    def restore(self) -> None:
        """The step is repeated."""

    def rewound(self, captured: dict[str, Any]) -> dict[str, Any]:
        """A state that was captured in the middle of a step, as it was at the step's beginning."""


class FastMode:
    """See the module."""

    name = "fast"

    def __init__(self, state: TrainingState, buffers: FollowedBuffers, streams: RandomStreams) -> None:
        self._buffers, self._streams = buffers, streams
        self.tail = Tail(buffers)
        self.reducer: GradientReducer = FastReducer(state.parameters(), self.tail.size)

    def remember(self) -> None:
        """See Mode."""
        self._buffers.save()
        self._streams.save()

    def begin(self, micro: MicroBatch, step: int, *, first: bool) -> None:
        """See Mode."""

    def end(self, micro: MicroBatch) -> None:  # noqa: ARG002
        """See Mode."""
        self.reducer.end()

    def fill_tail(self, *, leader: bool, samples: int, vote: int, weight: float) -> None:
        """See Mode."""
        self.tail.fill(self.reducer.tail, leader=leader, samples=samples, vote=vote, weight=weight)

    def take_tail(self, micro: MicroBatch, *, leader: bool, workers: int) -> bool:
        """See Mode."""
        return self.tail.take(self.reducer.tail, keeps=leader, samples=micro.step_samples, workers=workers)

    def completed(self, step: int) -> None:
        """See Mode."""

    def restore(self) -> None:
        """See Mode."""
        self._buffers.restore()
        self._streams.restore()

    def rewound(self, captured: dict[str, Any]) -> dict[str, Any]:
        """See Mode."""
        return {**captured, "model": self._buffers.rewound(captured["model"]), "streams": self._streams.saved}


class ExactMode:
    """See the module. `seed`: the job's."""

    name = "exact"

    def __init__(self, state: TrainingState, buffers: FollowedBuffers, streams: RandomStreams, seed: int) -> None:
        self._buffers, self._streams, self._seed = buffers, streams, seed
        self.tail = Tail(buffers)
        self.reducer: GradientReducer = ExactReducer(state.parameters(), self.tail.size)
        use_deterministic_algorithms()

    def remember(self) -> None:
        """See Mode."""
        self._buffers.save()

    def begin(self, micro: MicroBatch, step: int, *, first: bool) -> None:
        """See Mode."""
        if not first:
            self._buffers.restore()
        self._streams.reseed(mix_seed(self._seed, step, micro.shard))

    def end(self, micro: MicroBatch) -> None:
        """See Mode."""
        self.reducer.end()
        if micro.shard == 0 and not micro.ghost:
            self._buffers.keep()

    def fill_tail(self, *, leader: bool, samples: int, vote: int, weight: float) -> None:
        """See Mode. Rank 0 has the first shard."""
        if leader:
            self._buffers.restore_kept()
        self.tail.fill(self.reducer.tail, leader=leader, samples=samples, vote=vote, weight=weight)

    def take_tail(self, micro: MicroBatch, *, leader: bool, workers: int) -> bool:
        """See Mode."""
        return self.tail.take(self.reducer.tail, keeps=leader, samples=micro.step_samples, workers=workers)

    def completed(self, step: int) -> None:
        """See Mode."""
        self._streams.reseed(mix_seed(self._seed, step, -1))

    def restore(self) -> None:
        """See Mode."""
        self._buffers.restore()

    def rewound(self, captured: dict[str, Any]) -> dict[str, Any]:
        """See Mode. A step begins with streams of its own."""
        return {**captured, "model": self._buffers.rewound(captured["model"])}


def use_deterministic_algorithms() -> None:
    """An operation that cannot give the same bits twice raises RuntimeError from now on.

    SettingsError where cuBLAS was not told in time.
    """
    if torch.cuda.is_available():
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in {":4096:8", ":16:8"}:
            raise SettingsError(
                "reduction='exact' on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before torch "
                "starts; set it in the job's environment"
            )
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)  # noqa: FBT003
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def numerics() -> str:
    """What the bits of a result depend on, beside the script: equal on all workers of an exact training."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"
