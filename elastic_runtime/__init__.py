"""Training that changes size without stopping: for PyTorch, needing nothing but PyTorch.

    import elastic_runtime as elastic

    job = elastic.init(global_batch_size=512, max_batch_per_gpu=64)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for epoch in job.epochs(20):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

Belongs here: what runs inside a training process. Does not: how many workers there should be, and where: that is the
cluster's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from elastic_runtime.errors import (
    BatchPlanError,
    CheckpointError,
    CollectiveError,
    CoordinatorError,
    ElasticError,
    LoopError,
    ModelMismatchError,
    RunError,
    SettingsError,
    StateError,
    UsageError,
)

if TYPE_CHECKING:
    from elastic_runtime.loop.job import Job

__all__ = [
    "BatchPlanError",
    "CheckpointError",
    "CollectiveError",
    "CoordinatorError",
    "ElasticError",
    "LoopError",
    "ModelMismatchError",
    "RunError",
    "SettingsError",
    "StateError",
    "UsageError",
    "init",
]


def init(
    *,
    global_batch_size: int | None = None,
    max_batch_per_gpu: int | Literal["auto"] | None = None,
    seed: int = 0,
    reduction: Literal["fast", "exact"] = "fast",
    shards: int = 8,
    scale_batch: tuple[int, int] | None = None,
    scale_lr: Literal["linear", "sqrt", "adascale", "none"] = "linear",
    noise_scale: bool = False,
    checkpoint_every_s: float = 300.0,
    keep_checkpoints: int = 2,
    progress: bool | None = None,
) -> Job:
    """Become a worker of the job that the environment names; alone, a job of one.

    `global_batch_size`: samples of a step, over all workers, whatever their number; default: the loader's batch_size.
    `max_batch_per_gpu`: the most samples of one iteration; larger shares are cut, and their gradients added up. "auto":
    as many as fit into memory.
    `scale_batch`: (least, most) samples of a step, which then has the loader's batch_size for each worker; the learning
    rate, chosen for `global_batch_size`, is scaled by `scale_lr`; "none": it stays as it is; "adascale": by the gain
    of the batch, as the noise of the gradients shows it.
    `noise_scale`: estimate the gradient noise scale, for `job.noise_scale` and the scheduler.
    `seed`: of the order of the samples.
    `reduction`: "fast", or "exact": the same parameters to the bit whatever sizes the job had; each step is then
    computed as `shards` parts of a fixed shape.
    `checkpoint_every_s`: how much a lost node may cost, where ELASTIC_CHECKPOINT_DIR is set; `keep_checkpoints`: how
    many are kept.
    `progress`: whether rank 0 shows a bar; None: where its standard error is a terminal.

    Call it early: it notifies the coordinator that the worker is starting. BatchPlanError and SettingsError for values
    that cannot be, CheckpointError for a directory that cannot be written to.
    """
    from elastic_runtime.loop.job import Job  # noqa: PLC0415
    from elastic_runtime.loop.options import TrainingOptions  # noqa: PLC0415
    from elastic_runtime.membership.environment import Environment  # noqa: PLC0415  (torch.distributed is loaded when it is used)

    options = TrainingOptions(
        global_batch_size=global_batch_size,
        max_batch_per_gpu=max_batch_per_gpu,
        seed=seed,
        reduction=reduction,
        shards=shards,
        scale_batch=scale_batch,
        scale_lr=scale_lr,
        noise_scale=noise_scale,
        checkpoint_every_s=checkpoint_every_s,
        keep_checkpoints=keep_checkpoints,
        progress=progress,
    )
    return Job(Environment.read(), options)
