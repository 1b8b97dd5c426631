"""ElasticTorchTrainer beside TorchTrainer: two raylets, of which one drains and is replaced: 2 -> 1 -> 2 workers.

    python benchmarks/ray_train.py [--models digits,26m] [--steps 60]

Both train the same model with the same global batch, report a checkpoint every 20 steps, and write down each step of
rank 0. TorchTrainer: `ScalingConfig(num_workers=(1, 2))` with DistributedDataParallel, looking for nodes every 2 s.
A pause is the gap that a change leaves between two steps of the job, less the median step; TorchTrainer repeats steps
after it, which its gap does not count. `lost_steps` is ours, `peer_lost_steps` TorchTrainer's. As the node drains,
TorchTrainer may first wait a minute for a group that the cluster cannot hold any more: `grow_ratio` is without that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import print_conditions, print_result
from elastic_bench import Pause, Step, Task, build, parse_steps, pauses

if TYPE_CHECKING:
    from torch import nn

GLOBAL_BATCH = 32
CHECKPOINT_EVERY = 20
MPARAMS = 26.0
DRAIN_S = 5
TIMEOUT_S = 600.0
STORE_BYTES = 80 << 20
SIDES = ("elastic", "torch")


def digits_cnn() -> nn.Module:
    """A small convolutional network for 8 x 8 images."""
    from torch import nn  # noqa: PLC0415

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 64, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def make(model_name: str) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, dataset, and loss of (model, batch)."""
    import torch  # noqa: PLC0415
    import torch.nn.functional as F  # noqa: N812, PLC0415
    from elastic_bench import _Noise  # noqa: PLC0415

    torch.set_num_threads(1)
    if model_name == "26m":
        task = Task(MPARAMS)
        model, optimizer = build(task)
        return model, optimizer, _Noise(task.width), lambda net, x: net(x).square().mean()
    from sklearn.datasets import load_digits  # noqa: PLC0415

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    model = digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, data, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])


def save(step: int, rank: int, model: Any, optimizer: Any) -> None:
    """Report every CHECKPOINT_EVERY steps, rank 0 with a checkpoint."""
    import ray.train  # noqa: PLC0415
    import torch  # noqa: PLC0415

    if (step + 1) % CHECKPOINT_EVERY:
        return
    if rank:
        ray.train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as directory:
        state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(directory) / "state.pt")
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def elastic_loop(config: dict[str, Any]) -> None:
    """The loop of ElasticTorchTrainer."""
    from torch.utils.data import DataLoader  # noqa: PLC0415

    import elastic_runtime  # noqa: PLC0415

    model, optimizer, data, loss_of = make(config["model"])
    job = elastic_runtime.init(global_batch_size=GLOBAL_BATCH)
    model, optimizer, loader = job.prepare(
        model, optimizer, DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=config["model"] == "digits", drop_last=True)
    )
    log = Path(config["directory"], f"steps-{os.getpid()}").open("w", buffering=1)  # noqa: SIM115
    for _ in job.epochs(1 << 20):
        for batch in loader:
            job.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0:
                log.write(f"{job.step} {job.world_size} {time.monotonic()}\n")
            save(job.step, job.rank, model, optimizer)


def torch_loop(config: dict[str, Any]) -> None:
    """The same for TorchTrainer: DistributedDataParallel, from the last checkpoint on."""
    import ray.train.torch  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    model, optimizer, data, loss_of = make(config["model"])
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    wrapped = ray.train.torch.prepare_model(model)
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(data, batch_size=GLOBAL_BATCH // size, shuffle=config["model"] == "digits", drop_last=True)
    )
    log = Path(config["directory"], f"steps-{os.getpid()}").open("w", buffering=1)  # noqa: SIM115
    while True:
        for batch in loader:
            loss_of(wrapped, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                log.write(f"{step} {size} {time.monotonic()}\n")
            save(step, rank, model, optimizer)
            step += 1


def steps_of(directory: Path) -> list[Step]:
    """All steps that a rank 0 has written, in the order of time."""
    return sorted((step for file in directory.glob("steps-*") for step in parse_steps(file)), key=lambda step: step.end)


def measure(side: str, model: str, steps: int) -> list[Step]:
    """Run one trainer on a Ray cluster of its own through 2 -> 1 -> 2."""
    import ray  # noqa: PLC0415
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    shape = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=shape, shutdown_at_exit=False)
    ending = threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        try:
            second = cluster.add_node(**shape)
            ray.init(cluster.address, log_to_driver=False)
            threading.Thread(target=fit, args=(side, model, directory, ending), daemon=True).start()
            wait_for(Path(directory), 2, steps)
            drain(cluster.address, second.node_id)
            wait_for(Path(directory), 1, steps)
            cluster.remove_node(second)
            cluster.add_node(**shape)
            wait_for(Path(directory), 2, steps)
            return steps_of(Path(directory))
        finally:
            ending.set()
            ray.shutdown()
            cluster.shutdown()


def fit(side: str, model: str, directory: str, ending: threading.Event) -> None:
    """Train until the cluster ends; what fails before that is printed."""
    try:
        train(side, model, directory)
    except BaseException:
        if not ending.is_set():
            raise


def train(side: str, model: str, directory: str) -> None:
    """Train, which has no end."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig  # noqa: PLC0415
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    from elastic_runtime.integrations.ray import ElasticTorchTrainer  # noqa: PLC0415

    trainer = ElasticTorchTrainer if side == "elastic" else TorchTrainer
    trainer(
        elastic_loop if side == "elastic" else torch_loop,
        train_loop_config={"model": model, "directory": directory},
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=2.0),
        run_config=RunConfig(
            name=f"{side}-{model}",
            storage_path=f"{directory}/results",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()


def drain(address: str, node_id: str) -> None:
    """Announce to Ray that the node leaves in DRAIN_S seconds."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415
    from ray.core.generated import autoscaler_pb2  # noqa: PLC0415

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + DRAIN_S) * 1e3)
    accepted, why = GcsClient(address=address).drain_node(node_id, reason, "benchmark", deadline_ms)
    if not accepted:
        raise RuntimeError(why)


def wait_for(directory: Path, size: int, steps: int) -> None:
    """Return when the newest `steps` steps were made with `size` workers."""
    end = time.monotonic() + TIMEOUT_S
    while True:
        newest = steps_of(directory)[-steps:]
        if len(newest) == steps and all(step.size == size for step in newest):
            return
        if time.monotonic() > end:
            raise TimeoutError(f"no {steps} steps with {size} workers; the last are {newest[-3:]}")
        time.sleep(0.1)


def side_in_process(side: str, model: str, steps: int) -> list[Step]:
    """`measure` in a process of its own: a trainer has no way to be stopped."""
    command = [sys.executable, __file__, "--side", side, "--models", model, "--steps", str(steps)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return [Step(*row) for row in json.loads(ended.stdout.splitlines()[-1])]


def step_ms(steps: list[Step], size: int) -> float:
    """The median step with `size` workers."""
    times = [b.end - a.end for a, b in itertools.pairwise(steps) if a.size == b.size == size]
    return statistics.median(times) * 1e3


def compare(model: str, steps: int) -> dict[str, Any]:
    """Both sides in turn, for one model."""
    ours, peer = (side_in_process(side, model, steps) for side in SIDES)
    changes, peer_changes = pauses(ours), pauses(peer)
    for side, found in zip(SIDES, (changes, peer_changes), strict=True):
        for change in found:
            print(f"{model}, {side}: {described(change)}")
    numbers = [step.step for step in ours]
    pause, peer_pause = (max(change.pause_ms for change in found) for found in (changes, peer_changes))
    return {
        "lost_steps": len(numbers) - len(set(numbers)) + max(numbers) + 1 - len(set(numbers)),
        "peer_lost_steps": sum(max(0, change.lost_steps) for change in peer_changes),
        "pause_ms": round(pause, 1),
        "peer_pause_ms": round(peer_pause, 1),
        "pause_ratio": round(peer_pause / max(pause, 0.1), 1),
        "grow_ratio": round(growth(peer_changes) / max(growth(changes), 0.1), 1),
        "step_ms": {size: round(step_ms(ours, size), 2) for size in (1, 2)},
        "peer_step_ms": {size: round(step_ms(peer, size), 2) for size in (1, 2)},
        "step_ratio": round(step_ms(ours, 2) / step_ms(peer, 2), 3),
    }


def growth(changes: list[Pause]) -> float:
    """The longest pause of a worker that joins, in ms."""
    return max(change.pause_ms for change in changes if change.to_size > change.from_size)


def described(change: Pause) -> str:
    """One change, in words."""
    return (
        f"{change.from_size} -> {change.to_size} workers, pause {change.pause_ms:.1f} ms, {change.lost_steps} steps "
        f"repeated; a step takes {change.step_ms:.1f} ms"
    )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="digits,26m")
    parser.add_argument("--steps", type=int, default=60, help="at each size")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        found = measure(options.side, options.models, options.steps)
        print(json.dumps([(step.step, step.size, step.end) for step in found]), flush=True)
        os._exit(0)
    print_conditions("ElasticTorchTrainer and TorchTrainer, 2 -> 1 -> 2 workers", models=options.models)
    print_result(**{model: compare(model, options.steps) for model in options.models.split(",")})


if __name__ == "__main__":
    main()
