"""Ray's function for Transformers: makes a Trainer an ElasticTrainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from elastic_runtime.integrations.ray.unmodified.names import driver
from elastic_runtime.integrations.transformers import ElasticTrainer


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Make it elastic, in place. SettingsError for arguments and classes that cannot be."""
    kind: Any = type(trainer)
    bases = (ElasticTrainer,) if kind is Trainer else (ElasticTrainer, kind)
    trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    assert isinstance(trainer, ElasticTrainer)
    args = trainer.args
    kept = driver().options.kept(args.per_device_train_batch_size * args.gradient_accumulation_steps)
    trainer.make_elastic(global_batch_size=kept)
    driver().follow(trainer.job)
    return trainer
