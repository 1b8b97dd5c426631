"""A training whose parameters are the record of what it consumed: RESULTS, a directory.

`counts[epoch, sample]` has the gradient -1 for each time that the sample is computed in the epoch, and learns it with a
rate of 1: in every state of the training it is how often that state has consumed each sample. A step that was repeated
from another state than its own, a checkpoint of another position and a result of a rolled-back step show in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime

EPOCHS, SAMPLES, GLOBAL_BATCH = 2, 160, 8
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH
STEP_S = 0.02  # long enough that most faults of a history meet the loop
EVERY_S = 0.1  # a checkpoint


class Counted(nn.Module):
    """How often each sample was consumed, and weights whose result depends on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(EPOCHS, SAMPLES))
        self.weights = nn.Linear(4, 3)

    def forward(self, epoch: int, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        fitted: torch.Tensor = self.weights(x).square().sum()
        return fitted - self.counts[epoch][indices].sum()


def train(results: Path, *, pace_s: float = STEP_S) -> None:
    """Train to the end, and write down the state that it ended with."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    job = elastic_runtime.init(
        global_batch_size=GLOBAL_BATCH, reduction="exact", shards=4, seed=3, checkpoint_every_s=EVERY_S
    )
    model = Counted()
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES))
    groups = [{"params": [model.counts], "lr": 1.0}, {"params": model.weights.parameters(), "lr": 1e-3}]
    optimizer = torch.optim.SGD(groups)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for epoch in job.epochs(EPOCHS):
        for x, indices in loader:
            job.backward(model(epoch, x, indices), reduction="sum")
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pace_s)
    counts = model.counts.detach()
    result = {
        "step": job.step,
        "counted": sorted(set(counts.flatten().tolist())),
        "sha256": digest(model),
    }
    uid, index = os.environ.get("JOB_UUID", "alone"), os.environ.get("POD_INDEX", "0")
    with (results / f"{uid}.jsonl").open("a") as file:  # one write: workers end at the same time
        file.write(json.dumps({"worker": index, **result}) + "\n")


def digest(model: nn.Module) -> str:
    """Return the checksum of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
