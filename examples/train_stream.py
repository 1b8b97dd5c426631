"""Elastic training on a stream: an iterable dataset that stores its position.

    python examples/train_stream.py                                      # alone
    gpuquota submit stream -g 1 --elastic -- python examples/train_stream.py

Any worker may come, go or be lost: each sample of the stream is trained exactly once an epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import elastic_runtime as elastic

if TYPE_CHECKING:
    from collections.abc import Iterator


class Measurements(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A placeholder for a file, a queue or a table: it is read from the front, and `at` is the position."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < self.count:
            self.at += 1
            x = torch.sin(torch.arange(8.0) * self.at)
            yield x, x.sum().reshape(1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.at = state["at"]


def main() -> None:
    """Train, and print the accuracy."""
    job = elastic.init(global_batch_size=64, max_batch_per_gpu=32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Measurements(5_000), batch_size=64))
    loss = torch.zeros(())
    for epoch in job.epochs(5):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        job.report(loss=loss.item())
        if job.is_leader:
            print(f"epoch {epoch}: step {job.step}, {job.world_size} workers, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
