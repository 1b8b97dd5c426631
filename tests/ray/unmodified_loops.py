"""A training function for TorchTrainer, as its users write it, in a worker of a job without Ray's processes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import prepare_data_loader, prepare_model
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elastic_runtime.integrations.ray import ElasticTorchTrainer
from elastic_runtime.integrations.ray.unmodified.names import driver
from tests.forked import preload

preload("tests.ray.unmodified_loops")

SAMPLES, BATCH, EPOCHS = 48, 4, 16
SOME, PLENTY = 40, 120
"""Steps that take 20 ms, and 200 ms; those after them take a second, as long as there is no file "go"."""


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
    steps = 0
    checkpoint = ray.train.get_checkpoint()
    for epoch in range(0 if checkpoint is None else int(Path(checkpoint.path, "epoch").read_text()) + 1, EPOCHS):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            steps += 1
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if not driver().replaying:
                seen.write("".join(f"{epoch} {int(number)}\n" for number in x.flatten()))
            if not (directory / "go").exists():
                time.sleep(0.02 if steps < SOME else 0.2 if steps < PLENTY else 1.0)
        schedule.step()
        model.eval()
        count = torch.zeros(1)
        with torch.no_grad():
            for x, _y in evaluation:
                count += len(model(x))
        dist.all_reduce(count)
        workers = ray.train.get_context().get_world_size()
        rate = round(float(schedule.get_last_lr()[0]) / 0.99 ** (epoch + 1), 9)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "epoch").write_text(str(epoch))
            saved = Checkpoint.from_directory(folder) if ray.train.get_context().get_world_rank() == 0 else None
            metrics = {"epoch": epoch, "evaluated": int(count), "workers": workers, "rate": rate}
            ray.train.report(metrics, checkpoint=saved)
    torch.save(model.module.state_dict(), directory / f"model-{ray.train.get_context().get_world_rank()}")


class Reported(UserCallback):  # type: ignore[misc]
    """Appends what is reported to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Append it."""
        with self.file.open("a") as file:
            file.write(json.dumps(metrics[0]) + "\n")


def main(arguments: list[str]) -> None:
    """Fit in this process, a worker. DIRECTORY"""
    (directory,) = arguments
    torch.set_num_threads(1)
    ElasticTorchTrainer(
        train,
        train_loop_config={"directory": directory},
        scaling_config=ScalingConfig(num_workers=(1, 3)),
        run_config=RunConfig(
            name="unmodified", storage_path=f"{directory}/results", callbacks=[Reported(Path(directory, "reports"))]
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
