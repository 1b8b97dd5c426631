"""Hugging Face's Trainer, elastic: `ElasticTrainer` in place of `Trainer`.

    from elastic_runtime.integrations.transformers import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=args, train_dataset=data, global_batch_size=256)
    trainer.train()

Trainer keeps its arguments, losses, optimizers, schedules, callbacks, logging, evaluation and saving; the loop is
elastic: the global batch stays the same at every size, each sample is seen once per epoch, and what a training resumes
from are the job's checkpoints (`ELASTIC_CHECKPOINT_DIR`). Accelerate is used by Trainer as on a single device.
"""

from elastic_runtime.integrations.transformers.losses import CAUSAL_MODELS, counted_tokens
from elastic_runtime.integrations.transformers.trainer import ElasticTrainer

__all__ = ["CAUSAL_MODELS", "ElasticTrainer", "counted_tokens"]
