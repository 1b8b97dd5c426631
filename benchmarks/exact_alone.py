"""What reduction="exact" costs one worker, on a small model, against a plain loop and against a loop of its shape.

A step of "exact" is computed in 8 shards, one after another, so `accumulating`, a plain loop that adds up 8 parts of
the batch, is what its passes cost by themselves. CPU time of the loop's thread: the least of turns of one epoch, which
the kinds take in turns. Last line: JSON, each figure a multiple of the plain loop's step.

Usage: python benchmarks/exact_alone.py [--batch 512] [--epochs 6]
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import torch
from common import print_conditions, print_result
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import elastic_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDS, STEPS, FEATURES = 8, 40, 64


class Batches(Dataset[Any]):
    """Gives a whole batch at once, so that reading costs the same in one part and in eight."""

    def __init__(self, samples: int) -> None:
        self._x, self._y = torch.randn(samples, FEATURES), torch.randint(0, 10, (samples,))

    def __len__(self) -> int:
        return len(self._x)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self._x[indices], self._y[indices])]


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A perceptron of three layers and 27,000 parameters, with AdamW."""
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def read_in(parts: int, batch: int) -> DataLoader[Any]:
    """A loader of `STEPS` batches, each cut into `parts`."""
    return DataLoader(Batches(batch * STEPS), batch_size=batch // parts, collate_fn=lambda found: found[0])


def plain(parts: int, batch: int) -> Iterator[float]:
    """CPU seconds of each epoch of a plain loop."""
    (model, optimizer), loader = built(), read_in(parts, batch)
    while True:
        began = time.thread_time()
        for number, (x, y) in enumerate(loader, 1):
            (cross_entropy(model(x), y) / parts).backward()  # type: ignore[no-untyped-call]
            if number % parts == 0:
                optimizer.step()
                optimizer.zero_grad()
        yield time.thread_time() - began


def elastic(reduction: Any, batch: int) -> Iterator[float]:
    """CPU seconds of each epoch of an elastic loop of one worker."""
    job = elastic_runtime.init(global_batch_size=batch, reduction=reduction, shards=SHARDS, progress=False)
    model, optimizer, loader = job.prepare(*built(), read_in(1, batch))
    for _epoch in job.epochs(1 << 20):
        began = time.thread_time()
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        yield time.thread_time() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_conditions("exact results on one worker", batch=options.batch, shards=SHARDS, steps_per_epoch=STEPS)
    kinds = {
        "plain": plain(1, options.batch),
        "accumulating": plain(SHARDS, options.batch),
        "fast": elastic("fast", options.batch),
        "exact": elastic("exact", options.batch),
    }
    for loop in kinds.values():
        next(loop)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.epochs):
        for name, loop in kinds.items():
            seconds[name].append(next(loop))
    steps = {name: min(found) / STEPS for name, found in seconds.items()}
    for name, step in steps.items():
        print(f"{name:12} {step * 1e6:7.0f} us a step")
    ratios = {name: round(step / steps["plain"], 2) for name, step in steps.items() if name != "plain"}
    print_result(**ratios, exact_over_accumulating=round(steps["exact"] / steps["accumulating"], 2))


if __name__ == "__main__":
    main()
