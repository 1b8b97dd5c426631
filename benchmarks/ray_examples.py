"""Fifteen loops for TorchTrainer, unmodified, with ElasticTorchTrainer through 2 -> 1 -> 3 workers.

    python benchmarks/ray_examples.py [--only linear,images]

The oracle is Ray's own TorchTrainer: two workers with the loop's batch each (one worker with both, where Ray Data
splits the rows), on the same loop and data. A loop is in place if one process trained at sizes 2, 1 and 3, and the last
checkpoint has the oracle's parameters within TOLERANCE; refused, if fit() raised a UsageError or SettingsError of
elastic_runtime; else wrong. ElasticTorchTrainer is given `global_batch_size`, so that a step has the same samples.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import print_conditions, print_result

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = (2, 1, 3)
TIMEOUT_S = 240.0
TOLERANCE = 2e-4
LOOSE = {"mixed_precision": 5e-2}
"""Half precision rounds by the shapes of the batches."""
STORE_BYTES = 100 << 20
SPLIT_BY_RAY_DATA = {"table", "arrays", "ragged"}


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """One node with five CPUs: three workers, and Ray Data."""
    import ray  # noqa: PLC0415
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    shape = {"num_cpus": 5, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=shape, shutdown_at_exit=False)
    try:
        ray.init(cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def options_of(name: str, storage: Path, **config: Any) -> dict[str, Any]:
    """Return the arguments of both trainers."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig  # noqa: PLC0415
    from ray_loops import BATCH, tables  # noqa: PLC0415

    datasets = {"train": tables()[name]()} if name in SPLIT_BY_RAY_DATA else None
    return {
        "train_loop_config": {"global_batch": 2 * BATCH, "divide": True, **config},
        "datasets": datasets,
        "run_config": RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=1 if name == "resumed" else 0),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    }


def oracle(name: str, directory: Path) -> dict[str, Any]:
    """Return the parameters that Ray's own trainer reaches."""
    from ray.train import ScalingConfig  # noqa: PLC0415
    from ray.train.torch import TorchTrainer  # noqa: PLC0415
    from ray_loops import LOOPS  # noqa: PLC0415

    workers = 1 if name in SPLIT_BY_RAY_DATA else 2
    trainer = TorchTrainer(
        LOOPS[name], scaling_config=ScalingConfig(num_workers=workers), **options_of(name, directory)
    )
    return parameters(trainer.fit())


def elastic(name: str, directory: Path) -> dict[str, Any]:
    """Return those of ElasticTorchTrainer, whose size changes meanwhile."""
    from ray.train import ScalingConfig  # noqa: PLC0415
    from ray_loops import BATCH, LOOPS  # noqa: PLC0415

    from elastic_runtime.integrations.ray import ElasticTorchTrainer  # noqa: PLC0415

    ended = threading.Event()
    resizing = threading.Thread(target=resize, args=(name, directory, ended), daemon=True)
    trainer = ElasticTorchTrainer(
        LOOPS[name],
        scaling_config=ScalingConfig(num_workers=(1, 3)),
        global_batch_size=2 * BATCH,
        **options_of(name, directory / "results", directory=str(directory)),
    )
    resizing.start()
    try:
        return parameters(trainer.fit())
    finally:
        ended.set()
        resizing.join()


def resize(name: str, directory: Path, ended: threading.Event) -> None:
    """Ask for each size once the one before trains, then let the loop train on as fast as possible."""
    from elastic_runtime import UsageError  # noqa: PLC0415
    from elastic_runtime.integrations.ray import current_workers, limit_workers  # noqa: PLC0415

    end = time.monotonic() + TIMEOUT_S
    if name == "resumed":  # its second attempt
        while not list(directory.glob("results/resumed/checkpoint_*")) and not ended.wait(0.1):
            pass
        for file in directory.glob("sizes-*"):
            file.unlink()
    for size in SIZES:
        while not ended.wait(0.1) and time.monotonic() < end:
            with contextlib.suppress(UsageError):  # it does not run yet
                limit_workers(name, size)
                if current_workers(name) == size and size in sizes(directory):
                    break
    (directory / "go").touch()


def sizes(directory: Path) -> set[int]:
    """Return the sizes at which the process trained that trained at most of them."""
    found = [{int(line) for line in file.read_text().split()} for file in directory.glob("sizes-*")]
    return max(found, key=len, default=set())


def parameters(result: Any) -> dict[str, Any]:
    """Return the model of the last checkpoint, without the prefixes of its wrappers."""
    import torch  # noqa: PLC0415

    with result.checkpoint.as_directory() as path:
        directory = Path(path)
        if (directory / "model.pt").exists():
            state = torch.load(directory / "model.pt")["model"]
        elif (directory / "checkpoint.ckpt").exists():
            state = torch.load(directory / "checkpoint.ckpt", weights_only=False)["state_dict"]
        else:
            from safetensors.torch import load_file  # noqa: PLC0415

            state = load_file(directory / "checkpoint" / "model.safetensors")
    return {name.removeprefix("module."): value for name, value in state.items()}


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference of two parameters; infinity for other names."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def verdict(name: str) -> tuple[str, str]:
    """Run a loop with both trainers; return "in place", "refused" or "wrong", and why."""
    from elastic_runtime import ElasticError  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "elastic")
        directory.mkdir()
        try:
            found = elastic(name, directory)
        except Exception as error:  # noqa: BLE001  (a trainer's, whatever it is)
            causes = getattr(error, "worker_failures", {0: error}).values()
            refused = all(isinstance(cause, ElasticError) for cause in causes)
            return "refused" if refused else "wrong", "; ".join(f"{type(c).__name__}: {c}" for c in causes)[:1500]
        trained = sizes(directory)
        apart = difference(found, oracle(name, Path(folder, "oracle")))
    if not set(SIZES) <= trained:
        return "wrong", f"no process trained at sizes {SIZES}, but at {sorted(trained)}"
    if apart > LOOSE.get(name, TOLERANCE):
        return "wrong", f"the parameters differ from Ray's by {apart:.2g}"
    return "in place", f"sizes {sorted(trained)}, parameters within {apart:.1g} of Ray's"


def main() -> None:
    """Run all, and print."""
    from ray_loops import LOOPS  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(LOOPS))
    options = parser.parse_args()
    print_conditions("loops of TorchTrainer, unmodified, through 2 -> 1 -> 3 workers", loops=options.only)
    os.environ.setdefault("RAY_worker_niceness", "0")
    found: dict[str, str] = {}
    with ray_cluster():
        for name in options.only.split(","):
            began = time.monotonic()
            found[name], why = verdict(name)
            print(f"{name}: {found[name]} ({time.monotonic() - began:.0f} s): {why}", flush=True)
    counts = {each: sum(verdict == each for verdict in found.values()) for each in ("in place", "refused", "wrong")}
    print_result(examples=len(found), in_place=counts["in place"], refused=counts["refused"], wrong=counts["wrong"])


if __name__ == "__main__":
    main()
