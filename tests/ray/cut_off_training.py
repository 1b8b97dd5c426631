"""A training of which workers are cut off, and its records. Arguments: relays' ports by worker's number, DIRECTORY.

Each worker writes its pid, and the steps that it applied with the number of workers. Rank 0 alone would leave gaps: one
that is killed while the others already apply a step never writes it. It is slow until a file "go" exists.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime
from tests.polling import pace

STEPS, PART, BATCH = 1200, 150, 16


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
    written = directory / f".pid-{os.getpid()}"  # others read it at any time: it is never empty
    written.write_text(str(os.getpid()))
    written.replace(directory / f"pid-{os.environ['ELASTIC_WORKER_ID'].rpartition('-')[2]}")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / BATCH)  # with a power of two each step is exact
    loader = DataLoader(TensorDataset(torch.ones(STEPS * BATCH, 1)), batch_size=BATCH)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    began = time.monotonic()
    with (directory / f"steps-{os.getpid()}").open("w", buffering=1) as applied:
        for _ in job.epochs(1):
            for (ones,) in loader:
                job.backward(model(ones).sum(), reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
                if job.applied:
                    applied.write(f"{job.step} {job.world_size}\n")
                if not (directory / "go").exists():
                    time.sleep(pace(began, PART))
    print("weight", model.weight.item(), "after", job.step)


def pids(directory: Path) -> dict[str, int]:
    """The workers' processes by number."""
    return {path.name.removeprefix("pid-"): int(path.read_text()) for path in directory.glob("pid-*")}


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def steps_applied(directory: Path) -> dict[int, int]:
    """The number of workers by applied step. A worker that applied one twice is an error."""
    workers: dict[int, int] = {}
    for file in directory.glob("steps-*"):
        lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        own = [int(step) for step, _ in lines]
        assert all(one < next_one for one, next_one in itertools.pairwise(own)), f"{file} repeats a step: {own}"
        workers |= {int(step): int(size) for step, size in lines}
    return workers


def workers_of(directory: Path) -> int:
    """How many workers applied the last step; 0 before the first."""
    applied = steps_applied(directory)
    return applied[max(applied)] if applied else 0


def check_result(directory: Path, log: str) -> None:
    """AssertionError where a step was lost or repeated."""
    assert sorted(steps_applied(directory)) == list(range(STEPS)), "a step is lost"
    assert f"weight {-float(STEPS)} after {STEPS}" in log, "a step is lost or repeated"


if __name__ == "__main__":
    reach_through(json.loads(sys.argv[1]))
    main(Path(sys.argv[2]))
