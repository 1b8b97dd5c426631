"""All of Ray Train that is not public and is used here, in one place.

Ray Train 2 has no public way to give a training function its context (`ray.train.report`, `get_context`) without its
own worker group, which can only be replaced as a whole. Used are: the context behind these functions (`loop_api`
overrides `_sync_checkpoint_dir_name_across_ranks` of it), the manager that keeps and scores checkpoints, the trainer's
errors, and the list of draining nodes. `tests/ray/test_train_parts.py` pins them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ray
from ray._private.state import state
from ray.train import Result

if TYPE_CHECKING:
    from collections.abc import Callable

TESTED = "2.60"

try:
    from ray._common.usage.usage_lib import TagKey
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
    from ray.train.v2.torch import train_loop_utils
except ImportError as error:
    raise ImportError(
        f"ElasticTorchTrainer is tested with Ray {TESTED}, and Ray {ray.__version__} is installed, which lacks what it "
        f"needs ({error}); install: pip install 'kfp-gpuquota[ray-train]'"
    ) from error

__all__ = [
    "TESTED",
    "CheckpointManager",
    "ControllerError",
    "DistributedContext",
    "DistributedTrainFnUtils",
    "ExecutionContext",
    "PreemptionContext",
    "TagKey",
    "TrainContext",
    "TrainRunContext",
    "TrainingFailedError",
    "TrainingReport",
    "WorkerGroupError",
    "draining_nodes",
    "report_index",
    "resources_of",
    "result_of",
    "set_train_context",
    "set_train_fn_utils",
    "train_loop_utils",
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


def result_of(checkpoints: CheckpointManager, storage: Any, error: Exception | None = None) -> Result:
    """Return the result of a run, as TorchTrainer makes it."""
    return cast("Result", Result._from_checkpoint_manager(checkpoints, storage, error))  # noqa: SLF001


def training_function(trainer: Any) -> Callable[[], Any]:
    """Return the trainer's loop with its configuration, as TorchTrainer runs it."""
    return cast("Callable[[], Any]", trainer._get_train_func())  # noqa: SLF001
