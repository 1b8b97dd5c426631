"""The gradient noise scale against a known one, and AdaScale's learning rates against a fixed batch and linear scaling.

In one process: a worker is a micro-batch here, and the noise is measured over micro-batches wherever they are computed
(tests/elastic_runtime/test_gradient_noise.py shows that two real workers measure what two micro-batches do).

- Regression: inputs of unit covariance, targets with noise, a learning rate of 0. Then the covariance of one sample's
  gradient is known, and with it the noise scale. `noise_error`: the largest relative error at 1, 2, 4 and 8 workers
  (one worker computes its share in two micro-batches).
- scikit-learn's digits, a small CNN, SGD with momentum: with a fixed batch; and with a batch that follows a size which
  cycles from 1 to 8 workers, one epoch each, by `scale_lr="adascale"` for as many scaled steps, and by
  `scale_lr="linear"` for as many epochs. `adascale_ci_low`, `_high`: the 95 % interval of the difference to the fixed
  batch in points of accuracy, over all folds and seeds, paired. `linear_loss_points`: what linear scaling loses.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable  # noqa: TC003  (a dataclass's field)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from common import print_conditions, print_result
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic_runtime
from elastic_runtime.plan.batch_sizes import GlobalBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_runtime.loop.job import Job

SIZES = (1, 2, 4, 8)
LARGEST = 8
SHARE = 64
EPOCHS = 16
LR = 0.1


class Rows(Dataset[Any]):
    """Rows of tensors, fetched a batch at a time."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [tensor[torch.as_tensor(indices)] for tensor in self._tensors]


def loader_of(batch: int, *tensors: torch.Tensor) -> DataLoader[Any]:
    """Return a loader over these rows."""
    return DataLoader(Rows(*tensors), batch_size=batch, shuffle=True, collate_fn=lambda rows: rows)


# The noise scale


def measured_noise(workers: int, seed: int, *, features: int = 16, share: int = 32, steps: int = 1200) -> float:
    """Return the relative error of the noise scale of a regression with this number of workers."""
    generator = torch.Generator().manual_seed(seed)
    distance, spread = torch.randn(features, generator=generator), 2.0
    x = torch.randn(steps * share * workers, features, generator=generator)
    y = x @ distance + spread * torch.randn(len(x), generator=generator)
    known = features * (1 + spread**2 / float(distance.square().sum())) + 1
    parts = max(workers, 2)
    job = elastic_runtime.init(
        global_batch_size=share * workers,
        max_batch_per_gpu=share * workers // parts,
        noise_scale=True,
        seed=seed,
        progress=False,
    )
    model = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer, _ = job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loader_of(share * workers, x, y)
    )
    for inputs, targets in job.steps(steps):
        job.backward((model(inputs).squeeze(1) - targets).square().mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
    assert job.noise_scale is not None
    return abs(job.noise_scale / known - 1)


# Accuracy


@dataclass(frozen=True)
class CyclingBatch(GlobalBatch):
    """The batch of a job whose size is another one in each epoch, from 1 to 8 workers. `epoch()`: the present one."""

    epoch: Callable[[], int] = int

    def at(self, world_size: int) -> int:  # noqa: ARG002
        """Return the samples of a step in this epoch."""
        return self.per_worker * (1 + self.epoch() % LARGEST)


def network() -> nn.Module:
    """Return the model."""
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    return nn.Sequential(
        *(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def accuracy(
    rule: str, train: list[torch.Tensor], test: list[torch.Tensor], seed: int, epochs: int, lr: float
) -> float:
    """Return the accuracy in points. `rule`: "fixed", "linear" or "adascale"."""
    torch.manual_seed(seed)
    scaled: dict[str, Any] = {} if rule == "fixed" else {"scale_batch": (1, LARGEST * SHARE), "scale_lr": rule}
    job = elastic_runtime.init(global_batch_size=SHARE, max_batch_per_gpu=SHARE, seed=seed, progress=False, **scaled)
    if rule != "fixed":
        bounds = (SHARE, LARGEST * SHARE)
        batch = CyclingBatch(SHARE, SHARE, bounds, rule, lambda: job.position.epoch if job._session else 0)  # noqa: SLF001
        setattr(job, "_batch", lambda _loader: batch)  # noqa: B010
    steps = epochs * math.ceil(len(train[0]) / SHARE)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, loader, schedule = job.prepare(model, optimizer, loader_of(SHARE, *train), schedule)
    run(job, rule, model, optimizer, loader, schedule, epochs, steps)
    with torch.no_grad():
        return 100 * float((model(test[0]).argmax(1) == test[1]).double().mean())


def run(
    job: Job, rule: str, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, schedule: Any, *length: int
) -> None:
    """Train. `length`: epochs and steps of the fixed batch. Linear scaling has a schedule that counts samples."""
    epochs, steps = length

    def iterate(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        job.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    if rule != "linear":
        for inputs, targets in job.steps(steps):
            iterate(inputs, targets)
            schedule.step()
        return
    for epoch in job.epochs(epochs):
        for inputs, targets in loader:
            iterate(inputs, targets)
            if job.applied:
                for _ in range(1 + epoch % LARGEST):
                    schedule.step()


def folds(count: int, used: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return the first `used` of `count` divisions of the digits into (training, test)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    split = StratifiedKFold(count, shuffle=True, random_state=0).split(digits.data, digits.target)
    return [tuple([images[part], labels[part]] for part in parts) for parts in list(split)[:used]]  # type: ignore[misc]


def interval(differences: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by the normal distribution; of one difference: itself."""
    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return mean - 1.96 * spread, mean + 1.96 * spread


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=1, help="of 5; the bar is for all of them")
    parser.add_argument("--seeds", type=int, default=2, help="for each fold; the bar is for 10")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--steps", type=int, default=1200, help="of the regression")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_conditions("gradient noise scale, AdaScale", **vars(options))
    errors = {workers: measured_noise(workers, seed=1, steps=options.steps) for workers in SIZES}
    print("error of the noise scale by workers:", {n: f"{100 * error:.1f} %" for n, error in errors.items()})
    found: dict[str, list[float]] = {"fixed": [], "adascale": [], "linear": []}
    for train, test in folds(5, options.folds):
        for seed in range(options.seeds):
            for rule, values in found.items():
                values.append(accuracy(rule, train, test, seed, options.epochs, options.lr))
            print(", ".join(f"{rule} {values[-1]:.2f} %" for rule, values in found.items()), file=sys.stderr)
    for rule, values in found.items():
        print(f"accuracy, {rule}: {statistics.fmean(values):.2f} %")
    of_fixed = found["fixed"]
    low, high = interval([a - b for a, b in zip(found["adascale"], of_fixed, strict=True)])
    print_result(
        noise_error=round(max(errors.values()), 4),
        adascale_ci_low=round(low, 3),
        adascale_ci_high=round(high, 3),
        linear_loss_points=round(statistics.fmean(of_fixed) - statistics.fmean(found["linear"]), 2),
        trainings=len(of_fixed),
    )


if __name__ == "__main__":
    main()
