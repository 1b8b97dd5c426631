"""A training that leaves the CPU to other tests: it sleeps in each step until a file `go` exists, then ends soon.

With `go` each step takes longer than the one before: it does not end earlier, however slow the machine is.

python -m tests.elastic_runtime.paced_training STEPS [GO]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime

PACE_S, PART = 0.02, 100
STEPS_PER_EPOCH, BATCH = 50, 12


def main(steps: int, go: Path | None) -> None:
    """Train so many steps, a multiple of STEPS_PER_EPOCH."""
    torch.set_num_threads(1)
    job = elastic_runtime.init(global_batch_size=BATCH)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.ones(STEPS_PER_EPOCH * BATCH, 1)), batch_size=BATCH)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    began = time.monotonic()
    for _ in job.epochs(steps // STEPS_PER_EPOCH):
        for (ones,) in loader:
            loss = model(ones).square().mean()
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            job.report(loss=loss.item())
            if go is None:
                time.sleep(PACE_S)
            elif not go.exists():
                time.sleep(max(PACE_S, (time.monotonic() - began) / PART))
    print("step", job.step)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
