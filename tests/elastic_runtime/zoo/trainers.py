"""Scripts with Lightning's Trainer and Fabric. No part of the catalogue: its processes would import Lightning."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from elastic_runtime.integrations.lightning import ElasticFabric, ElasticStrategy
from tests.elastic_runtime.zoo.generated import verdicts
from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, Samples, script, vector
from tests.forked import preload

if TYPE_CHECKING:
    from tests.elastic_runtime.zoo.generated.drawing import Case

preload("tests.elastic_runtime.zoo.trainers")


class Classifier(lightning.LightningModule):
    """Logs in training and in validation; what it saw of both is a part of what is compared."""

    figures: torch.Tensor

    def __init__(self, scheduler: str = "plateau", *, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 3))
        self.scheduler = scheduler
        self.register_buffer("figures", torch.zeros(EPOCHS, 4))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("batches", float(index), reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", cross_entropy(self.net(x), y))

    def on_train_epoch_end(self) -> None:
        metrics, epoch = self.trainer.callback_metrics, self.trainer.current_epoch
        steps = torch.tensor(float(self.trainer.global_step))
        self.figures[epoch] = torch.stack([metrics["train_loss"], metrics["val_loss"], metrics["batches"], steps])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.scheduler == "plateau":
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}
        if self.scheduler == "step":
            cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Shrinking(Callback):
    """Has state, and acts on the model where epochs begin and end."""

    def __init__(self) -> None:
        self.factor = 0.9

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.factor *= 0.99
        next(pl_module.parameters()).mul_(self.factor)

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        next(pl_module.parameters()).mul_(0.95)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict["factor"]


def fitted(module: Classifier, strategy: Any, **arguments: Any) -> Classifier:
    """Return the module as Trainer trains it by this strategy."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"max_epochs": EPOCHS, "enable_checkpointing": False, **arguments}
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", **quiet, **given)
    training = DataLoader(Samples(vector), batch_size=GLOBAL_BATCH)
    trainer.fit(module, training, DataLoader(Samples(vector, 20), batch_size=7))
    return module


@script()
def trainer_with_a_plateau(**init: Any) -> Any:
    """A plateau of the training's loss, clipping, a callback with state."""
    return fitted(Classifier(), strategy_of(init), gradient_clip_val=0.5, callbacks=[Shrinking()])


@script()
def trainer_that_stops_early(**init: Any) -> Any:
    """Early stopping, validation within epochs, a scheduler of steps."""
    stop = EarlyStopping("train_loss", patience=1, min_delta=0.05)
    return fitted(Classifier("step"), strategy_of(init), val_check_interval=2, callbacks=[stop])


@script(rehearsed="another state than the first one")
def trainer_with_checkpoints(**init: Any) -> Any:
    """Checkpoints of Lightning's in a folder of each process, whose path is in its state; a scheduler of epochs."""
    with tempfile.TemporaryDirectory() as directory:
        saved = ModelCheckpoint(directory, monitor="val_loss", save_top_k=2)
        return fitted(Classifier("epoch"), strategy_of(init), callbacks=[saved], enable_checkpointing=True)


@script(modes=("exact",))
def trainer_with_dropout(**init: Any) -> Any:
    """Random numbers in a step."""
    return fitted(Classifier("epoch", dropout=0.3), strategy_of(init))


@script()
def trainer_of_steps(**init: Any) -> Any:
    """`max_steps` within an epoch."""
    return fitted(Classifier("step"), strategy_of(init), max_epochs=-1, max_steps=18)


def strategy_of(init: dict[str, Any]) -> Any:
    """Return the strategy; a plain one if there are no options."""
    return ElasticStrategy(**init) if init else "auto"


class Figures(nn.Module):
    """A net, and a figure of each epoch, which is a part of what is compared."""

    figures: torch.Tensor

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 3))
        self.register_buffer("figures", torch.zeros(EPOCHS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


def _nothing(*_: object) -> None:
    pass


def with_fabric(
    init: dict[str, Any],
    model: Figures,
    optimizer: Any,
    after_epoch: Any = _nothing,
    after_step: Any = _nothing,
    **options: Any,
) -> Any:
    """Train by a loop with Fabric, made with `options`: a plain one if `init` is empty."""
    given: dict[str, Any] = {"accelerator": "cpu", **options}
    fabric: Any = ElasticFabric(elastic=init, **given) if init else lightning.Fabric(**given)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    training, held_out = fabric.setup_dataloaders(
        DataLoader(Samples(vector), batch_size=GLOBAL_BATCH), DataLoader(Samples(vector, 20), batch_size=7)
    )
    assert len(training) == len(Samples(vector)) // GLOBAL_BATCH
    for epoch in fabric.epochs(EPOCHS) if init else range(EPOCHS):
        model.train()
        for x, y in training:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            after_step(fabric, loss.detach())
        model.eval()
        with torch.no_grad():
            losses = torch.stack([cross_entropy(model(x), y) for x, y in held_out])
        together = fabric.all_reduce(losses) + fabric.broadcast(losses) + fabric.all_gather(losses).reshape(-1, 3)[-1]
        model.figures[epoch] = together.mean()
        after_epoch(fabric)
    return model


@script(modes=("fast",))
def fabric_with_mixed_precision(**init: Any) -> Any:
    """And the mean loss of each step, as a loop logs it, also of one that is repeated."""

    def log(fabric: Any, loss: torch.Tensor) -> None:
        assert fabric.all_reduce(loss).isfinite()

    model = Figures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return with_fabric(init, model, optimizer, after_step=log, precision="bf16-mixed")


@script()
def fabric_with_a_scheduler(**init: Any) -> Any:
    """Clipping, evaluation, collectives, a scheduler of epochs and a rate that the loop sets."""
    model = Figures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.8)
    return with_fabric(init, model, optimizer, lambda _fabric: scheduler.step())


@script(modes=("exact",))
def fabric_with_dropout(**init: Any) -> Any:
    """Random numbers in a step, an optimizer with state, and a file that rank 0 saves in each epoch."""
    model = Figures(dropout=0.3)
    with tempfile.TemporaryDirectory() as directory:
        return with_fabric(
            init,
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            lambda fabric: fabric.save(f"{directory}/last.ckpt", {"model": model}),
        )


def judge(chosen: list[Case], directory: str) -> None:
    """Play these cases, in a process that has imported this module."""
    verdicts.play_all(chosen, directory)
