"""A training whose workers reach the cluster through relays. Arguments: their ports by worker's number, DIRECTORY.

It writes down its workers' pids, and each applied step with the number of workers. It is slow until a file "go" exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime

STEPS, PLENTY, BATCH = 600, 200, 12
SLOW_S = 0.02


def reach_through(lanes: dict[str, int]) -> None:
    """Let this worker connect to the relay that is meant for it, if one is."""
    number = os.environ["ELASTIC_WORKER_ID"].rpartition("-")[2]
    if number in lanes:
        address = urlsplit(os.environ["ELASTIC_COORDINATOR"])
        through = address._replace(netloc=f"{address.hostname}:{lanes[number]}")
        os.environ["ELASTIC_COORDINATOR"] = urlunsplit(through)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    job = elastic_runtime.init(global_batch_size=BATCH)
    (directory / f"pid-{os.environ['ELASTIC_WORKER_ID'].rpartition('-')[2]}").write_text(str(os.getpid()))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(STEPS * BATCH, 1)), batch_size=BATCH)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for _ in job.epochs(1):
        for (ones,) in loader:
            job.backward(model(ones).mean())
            optimizer.step()
            optimizer.zero_grad()
            if job.is_leader and job.applied:
                with (directory / "steps").open("a") as steps:
                    steps.write(f"{job.step} {job.world_size}\n")
            if not (directory / "go").exists():
                time.sleep(SLOW_S if job.step < PLENTY else 10 * SLOW_S)
    print("weight", model.weight.item(), "after", job.step)


if __name__ == "__main__":
    reach_through(json.loads(sys.argv[1]))
    main(Path(sys.argv[2]))
