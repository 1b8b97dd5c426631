"""All of Ray Train that is not public and is used here, in one place.

Ray Train 2 has no public way to give a training function its context (`ray.train.report`, `get_context`) without its
own worker group, which can only be replaced as a whole. Used are: the context behind these functions (`loop_api`
overrides `_sync_checkpoint_dir_name_across_ranks` of it), the manager that keeps and scores checkpoints, the trainer's
errors, and the list of draining nodes. `tests/ray/test_train_parts.py` pins them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ray
import ray.data
from ray._private.state import state
from ray.train import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ray.train import Checkpoint

TESTED = "2.60"

try:
    from ray.data._internal.delegating_block_builder import DelegatingBlockBuilder
    from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
    from ray.train.v2._internal.execution.context import (
        DistributedContext,
        ExecutionContext,
        TrainContext,
        TrainRunContext,
        set_train_context,
    )
    from ray.train.v2._internal.execution.preemption import PreemptionContext
    from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils
    from ray.train.v2._internal.execution.training_report import _TrainingReport as TrainingReport
    from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
except ImportError as error:
    raise ImportError(
        f"ElasticTorchTrainer is tested with Ray {TESTED}, and Ray {ray.__version__} is installed, which lacks what it "
        f"needs ({error}); install: pip install 'kfp-gpuquota[ray-train]'"
    ) from error

__all__ = [
    "TESTED",
    "CheckpointManager",
    "CheckpointManagerInitializationError",
    "ControllerError",
    "DistributedContext",
    "DistributedTrainFnUtils",
    "ExecutionContext",
    "PreemptionContext",
    "TrainContext",
    "TrainRunContext",
    "TrainingFailedError",
    "TrainingReport",
    "WorkerGroupError",
    "accessor_of",
    "blocks_of",
    "draining_nodes",
    "finalized",
    "forget",
    "joined_blocks",
    "report_index",
    "resources_of",
    "result_of",
    "set_train_context",
    "set_train_fn_utils",
    "training_function",
]


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that leave soon."""
    return set(state.get_draining_nodes())


def resources_of(scaling: Any) -> dict[str, float]:
    """Return what a worker of this ScalingConfig holds."""
    return dict(scaling._resources_per_worker_not_none)  # noqa: SLF001


def report_index(checkpoints: CheckpointManager) -> int:
    """Return the number of reports that were recorded."""
    return int(checkpoints._current_report_index)  # noqa: SLF001


def forget(checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
    """Drop a checkpoint from those that are kept: its directory has other files now."""
    kept = [result for result in checkpoints._checkpoint_results if result.checkpoint.path != checkpoint.path]  # noqa: SLF001
    checkpoints._checkpoint_results = kept  # noqa: SLF001


def result_of(checkpoints: CheckpointManager, storage: Any, error: Exception | None = None) -> Result:
    """Return the result of a run, as TorchTrainer makes it."""
    return cast("Result", Result._from_checkpoint_manager(checkpoints, storage, error))  # noqa: SLF001


def training_function(trainer: Any) -> Callable[[], Any]:
    """Return the trainer's loop with its configuration, as TorchTrainer runs it."""
    return cast("Callable[[], Any]", trainer._get_train_func())  # noqa: SLF001


def blocks_of(dataset: Any) -> Iterator[tuple[Any, int, int]]:
    """Execute a Ray dataset; yield each block's reference, the first of its rows that counts, and how many do."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
            if part is None:
                yield entry.ref, 0, int(entry.metadata.num_rows)
            else:
                yield entry.ref, part.start_offset, part.end_offset - part.start_offset


def accessor_of(block: Any) -> Any:
    """Return what reads a block, in whatever format it is."""
    return ray.data.block.BlockAccessor.for_block(block)


def finalized(finalize: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch as Ray Data's last function for it leaves it: on the device."""
    found = finalize(batch)
    if found.on_consume is not None:
        found.on_consume()
    return found.data


def joined_blocks(blocks: Sequence[Any]) -> Any:
    """Return one block with the rows of all."""
    builder = DelegatingBlockBuilder()
    for block in blocks:
        builder.add_block(block)
    return builder.build()
