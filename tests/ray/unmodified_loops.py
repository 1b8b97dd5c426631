"""A training function for TorchTrainer, as its users write it, in a worker of a job without Ray's processes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import prepare_data_loader, prepare_model
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime import UsageError
from elastic_runtime.integrations.ray import ElasticTorchTrainer
from elastic_runtime.integrations.ray.unmodified.names import driver
from tests.forked import preload
from tests.polling import pace

preload("tests.ray.unmodified_loops")

SAMPLES, BATCH, EPOCHS = 48, 4, 16
PART = 20
"""As long as there is no file "go", a step takes so small a part of the time since the first one."""


def data() -> TensorDataset:
    """Samples that carry their number."""
    numbers = torch.arange(float(SAMPLES)).reshape(-1, 1)
    return TensorDataset(numbers, torch.sin(numbers))


def train(config: dict[str, Any]) -> None:
    """Train, and write down which sample was trained in which epoch, and what all evaluate together."""
    directory = Path(config["directory"])
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
    loader = prepare_data_loader(DataLoader(data(), batch_size=BATCH, shuffle=True))
    evaluation = prepare_data_loader(DataLoader(data(), batch_size=BATCH))
    seen = (directory / f"seen-{os.environ['ELASTIC_WORKER_ID']}").open("w", buffering=1)
    checkpoint, began = ray.train.get_checkpoint(), time.monotonic()
    for epoch in range(0 if checkpoint is None else int(Path(checkpoint.path, "epoch").read_text()) + 1, EPOCHS):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if not driver().replaying:
                seen.write("".join(f"{epoch} {int(number)}\n" for number in x.flatten()))
            if not (directory / "go").exists():
                time.sleep(pace(began, PART))
        schedule.step()
        count = evaluate(model, evaluation)
        workers = ray.train.get_context().get_world_size()
        rate = round(float(schedule.get_last_lr()[0]) / 0.99 ** (epoch + 1), 9)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "epoch").write_text(str(epoch))
            saved = Checkpoint.from_directory(folder) if ray.train.get_context().get_world_rank() == 0 else None
            metrics = {"epoch": epoch, "evaluated": count, "workers": workers, "rate": rate}
            ray.train.report(metrics, checkpoint=saved)
    torch.save(model.module.state_dict(), directory / f"model-{ray.train.get_context().get_world_rank()}")


def evaluate(model: torch.nn.Module, evaluation: Any) -> int:
    """The samples that all workers evaluate together; the model stays in evaluation mode."""
    model.eval()
    count = torch.zeros(1)
    with torch.no_grad():
        for x, _y in evaluation:
            count += len(model(x))
    dist.all_reduce(count)
    return int(count)


def net() -> torch.nn.Module:
    """The same model each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def with_samplers(config: dict[str, Any]) -> None:
    """DistributedSampler by hand, and a schedule whose steps are counted before the training."""
    samples, model = data(), DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = 3 * len(prepare_data_loader(DataLoader(samples, batch_size=BATCH)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    loader, evaluation = (DataLoader(samples, BATCH, sampler=DistributedSampler(samples)) for _ in range(2))
    for epoch in range(3):
        model.train()  # type: ignore[no-untyped-call]
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        count = evaluate(model, evaluation)
        ray.train.report({"epoch": epoch, "evaluated": count})
    with pytest.raises(UsageError, match=r"write: model.train\(\) before"):  # what a loop without model.train() reaches
        optimizer.step()
    assert schedule.last_epoch == steps == 3 * SAMPLES // (2 * BATCH)
    save(model.module, config)


def with_accelerate(config: dict[str, Any]) -> None:
    """Accelerate's loop, which gathers its metrics and continues at a checkpoint; also without Ray: `alone`."""
    from accelerate import Accelerator  # noqa: PLC0415  (takes seconds)

    directory, alone, began = Path(config["directory"]), config.get("alone"), time.monotonic()
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.9)
    loader, evaluation = DataLoader(data(), batch_size=BATCH), DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader, evaluation, schedule = accelerator.prepare(model, optimizer, loader, evaluation, schedule)
    checkpoint, start = None if alone else ray.train.get_checkpoint(), 0
    if checkpoint is not None:
        accelerator.load_state(checkpoint.path)
        start = int(Path(checkpoint.path, "epoch").read_text()) + 1
    for epoch in range(start, config["epochs"]):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not (directory / "go").exists():
                time.sleep(pace(began, PART))
        model.eval()
        count = sum(len(accelerator.gather_for_metrics(x)) for x, _ in evaluation)
        if not alone:
            report_state(accelerator, epoch, {"evaluated": count, "rate": schedule.get_last_lr()[0]})
    save(accelerator.unwrap_model(model), config)


def report_state(accelerator: Any, epoch: int, metrics: dict[str, Any]) -> None:
    """Report Accelerate's own files as the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        Path(folder, "epoch").write_text(str(epoch))
        saved = Checkpoint.from_directory(folder) if accelerator.is_main_process else None
        ray.train.report({"epoch": epoch, **metrics}, checkpoint=saved)


def accelerate_alone(arguments: list[str]) -> None:
    """Train with Accelerate alone. DIRECTORY EPOCHS"""
    torch.set_num_threads(1)
    with_accelerate({"directory": arguments[0], "epochs": int(arguments[1]), "alone": True})


def with_lightning(config: dict[str, Any]) -> None:
    """Lightning's Trainer with Ray's classes."""
    import lightning.pytorch as pl  # noqa: PLC0415
    from ray.train.lightning import (  # noqa: PLC0415
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Module()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        strategy=RayDDPStrategy(find_unused_parameters=True),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        **quiet,
    )
    prepare_trainer(trainer).fit(module, DataLoader(data(), batch_size=BATCH))
    save(module.net, config)


def with_transformers(config: dict[str, Any]) -> None:
    """Transformers' Trainer with Ray's callback."""
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: PLC0415

    torch.manual_seed(0)
    small: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    samples: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * SAMPLES
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **small))
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=3,
        per_device_train_batch_size=BATCH,
        save_strategy="epoch",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=samples)
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()
    save(model, config)


def save(model: torch.nn.Module, config: dict[str, Any]) -> None:
    """Leave the trained model for the test."""
    torch.save(model.state_dict(), Path(config["directory"], f"model-{os.environ.get('ELASTIC_WORKER_ID', 'alone')}"))


class Reported(UserCallback):  # type: ignore[misc]
    """Appends what is reported to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Append it."""
        with self.file.open("a") as file:
            file.write(json.dumps(metrics[0]) + "\n")


LOOPS = {each.__name__: each for each in (train, with_samplers, with_accelerate, with_lightning, with_transformers)}


def main(arguments: list[str]) -> None:
    """Fit in this process, a worker. DIRECTORY LOOP LEAST EPOCHS"""
    directory, loop, least, epochs = arguments
    torch.set_num_threads(1)
    ElasticTorchTrainer(
        LOOPS[loop],
        train_loop_config={"directory": directory, "epochs": int(epochs)},
        scaling_config=ScalingConfig(num_workers=(int(least), 3)),
        run_config=RunConfig(
            name="unmodified", storage_path=f"{directory}/results", callbacks=[Reported(Path(directory, "reports"))]
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
