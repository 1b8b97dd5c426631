"""Training functions of the tests of ElasticTorchTrainer, as a user writes them. Its workers import this module."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F  # noqa: N812
from ray.train import Checkpoint, CheckpointUploadMode, UserCallback
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime as elastic
from elastic_runtime.integrations.ray.unmodified.names import driver
from tests.polling import pace, until

SAMPLES, BATCH = 256, 16
STEPS_PER_EPOCH = SAMPLES // BATCH
PART, STREAM_PART = 40, 20
"""What happens to a training in between takes a second on a quiet machine, and minutes on a busy one."""


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """The same model and data each time."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(SAMPLES, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = TensorDataset(inputs, inputs.prod(1, keepdim=True))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3), DataLoader(data, batch_size=BATCH, shuffle=True)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train slowly until the file "go" is there, then as fast as possible; write down each step that rank 0 applied."""
    directory = Path(config["directory"])
    job = elastic.init(global_batch_size=BATCH, reduction="exact")
    model, optimizer, loader = job.prepare(*make())
    began = time.monotonic()
    for epoch in job.epochs(config["epochs"]):
        for inputs, targets in loader:
            job.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if config["alone"]:
                continue
            note_process(directory / f"pid-{job.rank}")
            if job.is_leader and job.applied:
                with (directory / "steps").open("a") as steps:
                    steps.write(f"{job.step}\n")
            if not (directory / "go").exists():
                time.sleep(pace(began, PART))
        if not config["alone"]:
            report(epoch, model)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def report(epoch: int, model: torch.nn.Module) -> None:
    """Report as Ray Train's own examples do: rank 0 with a checkpoint, each second one uploaded in the background."""
    context = ray.train.get_context()
    metrics = {
        "epoch": epoch,
        "rank": context.get_world_rank(),
        "workers": context.get_world_size(),
        "local": (context.get_local_rank(), context.get_local_world_size()),
        "node": context.get_node_rank(),
        "name": context.get_experiment_name(),
    }
    if context.get_world_rank() == 0:
        mode = CheckpointUploadMode.ASYNC if epoch % 2 else CheckpointUploadMode.SYNC
        directory = tempfile.mkdtemp()
        torch.save(model.state_dict(), Path(directory) / "model.pt")
        checkpoint = Checkpoint.from_directory(directory)
        ray.train.report(
            metrics, checkpoint=checkpoint, checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=True
        )
    else:
        ray.train.report(metrics)


def fail(_config: dict[str, Any]) -> None:
    """Fail after a checkpoint, with the rows of the Ray dataset that were read and what the attempt began with."""
    rows = ray.train.get_dataset_shard("train")
    own = Path(os.environ["ELASTIC_CHECKPOINT_DIR"])
    job = elastic.init(global_batch_size=4, checkpoint_every_s=1e-6)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(rows, batch_size=4, shuffle=True)
    )
    before = ray.train.get_checkpoint()
    seen: list[int] = []
    for epoch in job.epochs(2):
        for batch in loader:
            seen += batch["x"].tolist()
            job.backward(model(batch["x"].float().unsqueeze(1)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        report(epoch, model)
        until(lambda: any(own.glob("*.elastic")), "a checkpoint of the job, in the middle of the epoch")
        raise ValueError(f"row {sorted(seen)} is broken; began at {before and Path(before.path).name}")


ROWS, STREAM_EPOCHS = 320, 4


def note_process(file: Path) -> None:
    """Write the process id into a file that others read at any time: it is never empty."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(str(os.getpid()))
    new.replace(file)


def over_stream(config: dict[str, Any]) -> None:
    """A loop for TorchTrainer over a Ray dataset; writes down the rows of each epoch, and evaluates all of them."""
    directory = Path(config["directory"])
    torch.set_num_threads(1)
    rows = ray.train.get_dataset_shard("train")
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = (directory / f"seen-{os.getpid()}").open("w", buffering=1)
    began = time.monotonic()
    for epoch in range(STREAM_EPOCHS):
        model.train()
        size = 8 // ray.train.get_context().get_world_size()
        for batch in rows.iter_torch_batches(batch_size=size, dtypes=torch.float32, local_shuffle_buffer_size=16):
            optimizer.zero_grad()
            model(batch["x"].unsqueeze(1)).square().mean().backward()
            optimizer.step()
            if not driver().replaying:
                pairs = zip(batch["x"].tolist(), batch["drawn"].tolist(), strict=True)
                seen.write("".join(f"{epoch} {int(x)} {value}\n" for x, value in pairs))
            if not (directory / "go").exists():
                time.sleep(pace(began, STREAM_PART))
        model.eval()
        count = torch.zeros(1)
        for arrays in rows.iter_batches(batch_size=8):
            count += len(arrays["x"])
        torch.distributed.all_reduce(count)
        assert driver().replaying or int(count) == ROWS
        ray.train.report({"epoch": epoch})


REPORTED_EPOCHS = 8
SCORES = [0, 1, 7, 5, 6, 3, 4, 2]
OUTSIDE = 4
"""The epoch whose report fails in the first attempt: a checkpoint that is not to be uploaded, and is not in the run."""


def in_all_ways(config: dict[str, Any]) -> dict[str, Any]:
    """A loop for TorchTrainer that reports in each way that Ray Train has, and continues at a checkpoint."""
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    numbers = torch.arange(16.0).reshape(-1, 1)
    loader = ray.train.torch.prepare_data_loader(DataLoader(TensorDataset(numbers, numbers), batch_size=4))
    checkpoint = ray.train.get_checkpoint()
    start = 0
    if checkpoint is not None:
        saved = json.loads(Path(checkpoint.path, "state").read_text())
        model.module.load_state_dict({name: torch.tensor(value) for name, value in saved["model"].items()})
        start = saved["epoch"] + 1
    for epoch in range(start, REPORTED_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        report_in_the_way_of(epoch, model.module, Path(config["directory"]))
    listed = [each.metrics["epoch"] for each in ray.train.get_all_reported_checkpoints()]
    return {"start": start, "listed": listed, "model": rounded(model.module)}


def rounded(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters without the digits in which sums of another order differ."""
    return {name: value.mul(1e4).round().div(1e4).tolist() for name, value in model.state_dict().items()}


def report_in_the_way_of(epoch: int, model: torch.nn.Module, directory: Path) -> None:
    """Report in a way of this epoch: which ranks have a checkpoint, under which name, and how it is uploaded."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    metrics: dict[str, Any] = {"epoch": epoch, "rank": rank, "score": SCORES[epoch], "more": [None, {"a": 1.5}]}

    def saved(where: Path | None = None) -> Checkpoint:
        folder = where or Path(tempfile.mkdtemp())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state").write_text(json.dumps({"epoch": epoch, "model": rounded(model)}))
        return Checkpoint.from_directory(folder)

    options: dict[str, Any] = {}
    if epoch == 1 and rank == 0:
        options["checkpoint"] = saved()
        options["checkpoint"].set_metadata({"epoch": epoch})
    if epoch == 2 and rank == 1:
        options["checkpoint"] = saved()
    if epoch == 3:
        options = {"checkpoint": saved(), "checkpoint_dir_name": "parts"}
        Path(options["checkpoint"].path, f"part-{rank}").touch()
    if epoch >= OUTSIDE and rank == 0:
        options["checkpoint_upload_mode"] = CheckpointUploadMode.NO_UPLOAD
        first = not (directory / "outside").exists()
        own = directory / "outside" if first else Path(context.get_storage().experiment_fs_path, f"own-{epoch}")
        options["checkpoint"] = saved(own)
    if epoch == OUTSIDE + 2 and rank == 0:
        options |= {"checkpoint": saved(), "checkpoint_upload_mode": CheckpointUploadMode.ASYNC}
    if epoch == OUTSIDE + 1:
        ray.train.report({**metrics, "score": float("nan")})
    ray.train.report(metrics, **options)


STABLE_S = 2.5
"""A coordinator takes a worker whose connection breaks after this time for lost at once."""


def one_fails(_config: dict[str, Any]) -> None:
    """A loop for TorchTrainer that has an error on rank 1 only, while rank 0 would train on without end."""
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    numbers = torch.arange(16.0).reshape(-1, 1)
    loader = ray.train.torch.prepare_data_loader(DataLoader(TensorDataset(numbers, numbers), batch_size=4))
    fails = ray.train.get_context().get_world_rank() == 1
    began = time.monotonic()
    for epoch in itertools.count():
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ray.train.report({"epoch": epoch, "rank": ray.train.get_context().get_world_rank()})
        if fails and time.monotonic() - began > STABLE_S:
            raise ValueError("rank 1 has an error")


class Seen(UserCallback):  # type: ignore[misc]
    """Writes down what each report had."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Append the epoch, and the ranks that reported it."""
        with self.file.open("a") as file:
            file.write(f"{metrics[0]['epoch']} {[each['rank'] for each in metrics]} {checkpoint is not None}\n")

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Append what failed."""
        with self.file.open("a") as file:
            file.write(f"failed {worker_exceptions}\n")
