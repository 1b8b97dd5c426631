"""The parts of a step beside its gradients: buffers and random streams, under either reduction.

`fast`: streams and buffers are remembered at a step's beginning and restored where it is repeated; every worker's own
streams go on from step to step.
`exact`: each shard begins with the step's buffers and with streams of its own, a function of (seed, step, shard); the
buffers of the first shard, and streams that are a function of (seed, step), are what the step leaves behind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import SettingsError
from elastic_runtime.plan.order import mix_seed
from elastic_runtime.reduction.exact import ExactReducer
from elastic_runtime.reduction.gradients import FastReducer
from elastic_runtime.reduction.step_metadata import StepMetadata
from elastic_runtime.state.sparse_parameters import sparse_parameters
from elastic_runtime.validation.agreement import Agreement
from elastic_runtime.validation.compared_numbers import scheduled

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.reduction.buffers import FollowedBuffers
    from elastic_runtime.reduction.gradient_noise import PartNorms
    from elastic_runtime.reduction.gradients import GradientReducer
    from elastic_runtime.reduction.step_metadata import Share
    from elastic_runtime.state.random_streams import RandomStreams
    from elastic_runtime.state.training_state import TrainingState


@dataclass(frozen=True)
class Clipping:
    """The arguments of torch.nn.utils.clip_grad_norm_."""

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    foreach: bool | None = None


class Mode:
    """The computation of a training's steps, beside the reducer. The methods here are those of `fast`."""

    name: str
    lockstep = False
    """All workers have to iterate equally often in a step, so that none can cut its share by itself."""

    def __init__(
        self,
        buffers: FollowedBuffers,
        streams: RandomStreams,
        make_reducer: Callable[[int], GradientReducer],
        agreement: Agreement | None = None,
        norms: PartNorms | None = None,
    ) -> None:
        """Make the reducer: `make_reducer` gets the number of values in the metadata."""
        self.buffers = self._buffers = buffers
        self._streams = streams
        self.metadata = StepMetadata(buffers, agreement, norms)
        self._alone: Share | None = None  # what one worker adds to its own sums
        self.reducer = make_reducer(self.metadata.size)
        self.reducer.norms = norms

    def start(self) -> None:
        """Prepare the process for the training."""

    def end(self) -> None:
        """Leave the process as it was before `start`."""

    def remember(self) -> None:
        """Save what a repeated step begins with; called before the step's data are fetched."""
        self._buffers.save()
        self._streams.save()

    def begin_micro_batch(self, micro: MicroBatch, step: int, *, first: bool) -> None:
        """Prepare for a micro-batch; `first`: of its step."""

    def end_pass(self, micro: MicroBatch) -> None:  # noqa: ARG002
        """End the backward pass of a micro-batch."""
        self.reducer.end_pass()

    def fill_metadata(self, share: Share, *, leader: bool, alone: bool = False) -> None:
        """Write this worker's numbers, for the sum over all workers. `alone`: there is no other one."""
        self._alone = share if alone else None
        if not alone:
            self.metadata.fill(self.reducer.metadata, share, leader=leader)

    def read_metadata(self, micro: MicroBatch, *, leader: bool, workers: int, group: Group | None = None) -> bool:
        """Read the sums; return whether all workers voted for the switch that this one voted for."""
        if self._alone is not None:
            return self.metadata.take_alone(self._alone, micro.step_samples)
        section = self.reducer.metadata
        return self.metadata.take(section, keeps=leader, samples=micro.step_samples, workers=workers, group=group)

    def completed(self, step: int) -> None:
        """Continue when the gradients are summed, before optimizer and scheduler act."""

    def clip_grad_norm_(self, parameters: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Clip this worker's copy of the summed gradients; no collective is needed."""
        how = clipping
        return torch.nn.utils.clip_grad_norm_(
            parameters, how.max_norm, how.norm_type, how.error_if_nonfinite, how.foreach
        )

    def restore(self) -> None:
        """Restore what `remember` has saved: the step is repeated."""
        self._buffers.restore()
        self._streams.restore()

    def rewound(self, captured: dict[str, Any]) -> dict[str, Any]:
        """Return a state that was captured in the middle of a step as it was at the step's beginning."""
        return {**captured, "model": self._buffers.rewound(captured["model"]), "streams": self._streams.saved}


class FastMode(Mode):
    """The mode `fast`: every worker's own random streams continue from step to step."""

    name = "fast"

    def __init__(
        self,
        state: TrainingState,
        buffers: FollowedBuffers,
        streams: RandomStreams,
        norms: PartNorms | None = None,
    ) -> None:
        reducer = partial(FastReducer, state.parameters(), sparse=sparse_parameters(state.model))
        super().__init__(buffers, streams, reducer, agreement_of(state), norms)


class ExactParts(Mode):
    """What is `exact` beside the gradients: each shard has random streams of its own."""

    name = "exact"
    _seed: int
    _algorithms: Algorithms | None = None  # those of the script, during the training

    def start(self) -> None:
        """Make operations without a deterministic implementation raise RuntimeError."""
        if self._algorithms is None:
            self._algorithms = Algorithms.now()
        check_cublas()
        Algorithms(deterministic=True, warn_only=False, filled=False, benchmark=False).use()

    def end(self) -> None:
        """Use the script's own algorithms again."""
        own, self._algorithms = self._algorithms, None
        if own is not None:
            own.use()

    def remember(self) -> None:
        """Save the buffers; random streams are a function of the step."""
        self._buffers.save()

    def begin_micro_batch(self, micro: MicroBatch, step: int, *, first: bool) -> None:
        """Begin a shard with the step's buffers and its own random streams."""
        super().begin_micro_batch(micro, step, first=first)
        if not first:
            self._buffers.restore()
        self._streams.reseed(mix_seed(self._seed, step, micro.shard))

    def end_pass(self, micro: MicroBatch) -> None:
        """End a shard; the buffers of the first one are what the step leaves behind."""
        super().end_pass(micro)
        if micro.shard == 0 and not micro.padding:
            self._buffers.keep()

    def fill_metadata(self, share: Share, *, leader: bool, alone: bool = False) -> None:
        """Write this worker's numbers. Rank 0 has the first shard, and so the step's buffers."""
        if leader:
            self._buffers.restore_kept()
        super().fill_metadata(share, leader=leader, alone=alone)

    def completed(self, step: int) -> None:
        """Continue with random streams that are a function of the step."""
        self._streams.reseed(mix_seed(self._seed, step, -1))

    def restore(self) -> None:
        """Restore the buffers of the step's beginning."""
        self._buffers.restore()

    def rewound(self, captured: dict[str, Any]) -> dict[str, Any]:
        """Return the state with the buffers of the step's beginning; a step has random streams of its own."""
        return {**captured, "model": self._buffers.rewound(captured["model"])}


class ExactMode(ExactParts):
    """The mode `exact` of replicated models. `seed`: the job's."""

    def __init__(
        self,
        state: TrainingState,
        buffers: FollowedBuffers,
        streams: RandomStreams,
        seed: int,
        norms: PartNorms | None = None,
    ) -> None:
        super().__init__(buffers, streams, partial(ExactReducer, state.parameters()), agreement_of(state), norms)
        self._seed = seed
        check_cublas()


def agreement_of(state: TrainingState) -> Agreement:
    """Return the values that the workers of a replicated training compare in each step."""
    parts = [part for _, part in state.parts]
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    scaler = next((part for part in parts if isinstance(part, torch.amp.GradScaler)), None)
    return Agreement(list(state.parameters()), optimizers, scaler, scheduled(parts))


@dataclass(frozen=True)
class Algorithms:
    """How torch chooses the algorithms of its operations, in the whole process. `filled`: fresh memory."""

    deterministic: bool
    warn_only: bool
    filled: bool
    benchmark: bool

    @classmethod
    def now(cls) -> Algorithms:
        """Return the present choice."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark,
        )

    def use(self) -> None:
        """Make it the present choice."""
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.filled  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = self.benchmark


def check_cublas() -> None:
    """Raise SettingsError if cuBLAS was not configured before torch started."""
    if torch.cuda.is_available() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in {":4096:8", ":16:8"}:
        raise SettingsError(
            "reduction='exact' on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before torch "
            "starts; set it in the job's environment"
        )


def numerics() -> str:
    """Return what the bits of a result depend on, beside the script: equal on all workers of an exact training."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"
