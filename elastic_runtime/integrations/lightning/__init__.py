"""Lightning, elastic: Trainer by `strategy=ElasticStrategy()`, Fabric by `ElasticFabric()`.

    import lightning
    from elastic_runtime.integrations.lightning import ElasticStrategy

    trainer = lightning.Trainer(max_epochs=20, strategy=ElasticStrategy(global_batch_size=256))
    trainer.fit(module, loader)

Trainer keeps its loops, hooks, callbacks, loggers, validation and checkpoints. One of its batches is one global step at
every size, so that `global_step`, `val_check_interval` and `max_steps` count the same; what is logged in a training
step is the mean over all workers. A training resumes from the job's checkpoints (`ELASTIC_CHECKPOINT_DIR`).
"""

from elastic_runtime.integrations.lightning.fabric import ElasticFabric
from elastic_runtime.integrations.lightning.strategy import ElasticStrategy

__all__ = ["ElasticFabric", "ElasticStrategy"]
