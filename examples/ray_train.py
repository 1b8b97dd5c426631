"""Ray Train whose size changes while it trains, on a Ray cluster of two nodes, all on this machine.

    pip install 'kfp-gpuquota[quickstart,ray-train]'
    python examples/ray_train.py

The training begins on the one free CPU; the other one is taken by other work of Ray. When that ends, a second worker
joins; then the program asks for one worker again, and soon after ends the training. The processes stay, and no step is
lost. The training function knows nothing of the sizes: it is one for TorchTrainer. With GPUs: `use_gpu=True`.
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
import ray.train.torch
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

NAME, EPOCHS, LONGEST = "digits", 80, 4000


def train(config: dict[str, Any]) -> None:
    """Train on one worker: a loop for Ray Train's TorchTrainer, as it is."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=64, shuffle=True))
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = ray.train.get_context()
    for epoch in range(LONGEST):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.005)  # the steps of a larger model
        metrics = {"epoch": epoch, "loss": loss.item(), "workers": context.get_world_size()}
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if context.get_world_rank() == 0 and epoch % 20 == 19:
                torch.save(model.module.state_dict(), Path(directory) / "model.pt")
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)
        if epoch + 1 >= EPOCHS and Path(config["enough"]).exists():
            break


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
        enough = Path(directory) / "enough"
        threading.Thread(target=change, args=(other, enough), daemon=True).start()
        trainer = ElasticTorchTrainer(
            train,
            train_loop_config={"enough": str(enough)},
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(name=NAME, storage_path=directory),
            global_batch_size=64,
        )
        result = trainer.fit()
        print("the last checkpoint:", result.metrics)
        print("epochs:", result.metrics["epoch"] + 1)


def change(other: Any, enough: Path) -> None:
    """Let the training grow, then shrink, then end: on a slow machine it trains for longer."""
    wait_for(1)
    ray.kill(other)
    print("the other work has ended", flush=True)
    wait_for(2)
    limit_workers(NAME, 1)
    wait_for(1)
    enough.touch()


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
