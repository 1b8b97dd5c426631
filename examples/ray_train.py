"""Ray Train whose size changes while it trains, on a Ray cluster of two nodes, all on this machine.

    pip install 'kfp-gpuquota[quickstart,ray-train]'
    python examples/ray_train.py

The training begins on the one free CPU; the other one is taken by other work of Ray. When that ends, a second worker
joins; then the program asks for one worker again. The processes stay, and no step is lost. With GPUs: `use_gpu=True`.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
import torch
import torch.nn.functional as F  # noqa: N812
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime as elastic
from elastic_runtime.integrations.ray import ElasticTorchTrainer, current_workers, limit_workers

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME, EPOCHS = "digits", 80


def train(config: dict[str, Any]) -> int:
    """Train on one worker; a loop of Ray Train, with a job of elastic_runtime in place of DDP. Returns the steps."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    job = elastic.init(global_batch_size=64)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    for epoch in job.epochs(config["epochs"]):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)  # the steps of a larger model
        metrics = {"epoch": epoch, "loss": loss.item(), "workers": ray.train.get_context().get_world_size()}
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if job.is_leader and epoch % 20 == 19:
                torch.save(model.state_dict(), Path(directory) / "model.pt")
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)
    return job.step


@ray.remote(num_cpus=1)
class OtherWork:
    """Holds a CPU."""

    def ready(self) -> bool:
        """Return once it holds it."""
        return True


def main() -> None:
    """Run it, and print what happens."""
    with ray_cluster(nodes=2, cpus=1), tempfile.TemporaryDirectory() as directory:
        other = OtherWork.remote()
        ray.get(other.ready.remote())
        threading.Thread(target=change, args=(other,), daemon=True).start()
        trainer = ElasticTorchTrainer(
            train,
            train_loop_config={"epochs": EPOCHS},
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(name=NAME, storage_path=directory),
        )
        result = trainer.fit()
        print("the last checkpoint:", result.metrics)
        print("steps:", result.return_value, "of", EPOCHS * 29)


def change(other: Any) -> None:
    """Let the training grow, then shrink."""
    wait_for(1)
    ray.kill(other)
    print("the other work has ended", flush=True)
    wait_for(2)
    limit_workers(NAME, 1)
    wait_for(1)


def wait_for(workers: int) -> None:
    """Return when so many workers train."""
    while size() != workers:
        time.sleep(0.1)
    print(f"{workers} workers train", flush=True)


def size() -> int:
    """Return how many workers train; 0 before the training begins."""
    with contextlib.suppress(elastic.UsageError):
        return current_workers(NAME)
    return 0


@contextlib.contextmanager
def ray_cluster(nodes: int, cpus: int) -> Iterator[None]:
    """Start a head, which is the first node, and others."""
    shape = {"num_cpus": cpus, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=shape, shutdown_at_exit=False)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**shape)
        ray.init(cluster.address)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
