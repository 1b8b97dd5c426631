"""Which of Trainer's arguments, modules and callbacks go together with an elastic job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.callbacks.finetuning import BaseFinetuning

from elastic_runtime.errors import SettingsError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

REFUSED: dict[type, str] = {
    callbacks.GradientAccumulationScheduler: "global_batch_size sets how many samples a step has",
    callbacks.Timer: "it reads each worker's clock, and workers would stop at different steps; set max_steps",
    callbacks.BatchSizeFinder: 'ElasticStrategy(max_batch_per_gpu="auto") does that',
    callbacks.LearningRateFinder: "it trains within the training; find the rate in a job of its own",
    callbacks.StochasticWeightAveraging: "its averages reach no joining worker",
    callbacks.WeightAveraging: "its averages reach no joining worker",
    callbacks.ModelPruning: "its masks reach no joining worker",
    BaseFinetuning: "its bookkeeping of parameter groups reaches no joining worker; set requires_grad in the module's "
    "on_train_epoch_start, with all parameters in the optimizer",
}


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raise SettingsError for what would be done twice, or differently at each size."""
    for name, usual, instead in (
        ("accumulate_grad_batches", 1, "a step has global_batch_size samples whatever fits into memory: set that"),
        ("overfit_batches", 0.0, "use a torch.utils.data.Subset"),
        ("limit_train_batches", 1.0, "an epoch is a whole one: use a torch.utils.data.Subset, or set max_steps"),
        ("reload_dataloaders_every_n_epochs", 0, "the loader is dealt out once for the whole training"),
    ):
        found = getattr(trainer, name)
        if found is not None and (found != usual or type(found) is not type(usual)):  # 1 is a batch, 1.0 all of them
            raise SettingsError(f"Trainer({name}={found!r}) does not go together with ElasticStrategy: {instead}")
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise SettingsError("Trainer(max_epochs=-1) has no end, which an elastic training needs: set max_steps")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise SettingsError(
            "Trainer(precision='16-mixed') scales losses by a GradScaler of its own, which reaches no joining worker; "
            "use precision='bf16-mixed'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in REFUSED.items():
            if isinstance(callback, kind):
                raise SettingsError(f"{kind.__name__} does not go together with ElasticStrategy: {reason}")
    _check_module(module)


def _check_module(module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise SettingsError(
            "automatic_optimization=False does not go together with ElasticStrategy, which repeats a step where a "
            "worker is lost; train the module by job.epochs and job.backward, with `more=True` for several optimizers"
        )
    if type(module).backward is not LightningModule.backward:
        raise SettingsError(
            f"{type(module).__name__}.backward is not called: the job runs the backward pass; leave it out"
        )


def check_optimizers(optimizers: list[Any]) -> None:
    """Raise SettingsError for optimizers that compute a loss several times in a step."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise SettingsError(
                "LBFGS computes the loss several times in a step, from batches that are gone; use another optimizer, "
                "or train the module by job.epochs, with job.backward in the closure"
            )
