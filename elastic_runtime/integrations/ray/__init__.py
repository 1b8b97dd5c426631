"""Ray Train, elastic: `ElasticTorchTrainer` in place of `TorchTrainer` (docs/guides/ray_train.md).

    from elastic_runtime.integrations.ray import ElasticTorchTrainer

    trainer = ElasticTorchTrainer(train, scaling_config=ScalingConfig(num_workers=(1, 4)))
    result = trainer.fit()

Ray's own elastic policy stops all workers, and starts them again from the last checkpoint that was reported. Here the
processes stay, and the group changes in place at the end of a step. The loop is one for TorchTrainer, as it is
(`unmodified`), or one of `elastic_runtime`; in both `ray.train.report`, `get_checkpoint` and `get_context` are Ray
Train's.

Belongs here: the actors of a training, and what they have of Ray Train. Does not: how members agree, which is
`elastic_runtime.membership` and the coordinator, a program of `kfp_gpuquota`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_runtime.integrations.ray.trainer import ElasticTorchTrainer, current_workers, limit_workers

__all__ = ["ElasticTorchTrainer", "current_workers", "limit_workers"]


def __getattr__(name: str) -> object:
    """Import the trainer, and with it torch, when it is used: the actor of the datasets starts without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elastic_runtime.integrations.ray import trainer  # noqa: PLC0415

    return getattr(trainer, name)
