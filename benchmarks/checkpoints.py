"""What checkpoints cost: how long the loop stands still for one, and how long saving takes when the job has to go.

One worker trains linear layers with AdamW, with a state of `--mbytes` in all, and writes checkpoints continuously.
`stall_ms` is the median time that the loop stood still, `stall_max_ms` the longest; `felt_ms` the median of what the
step with a checkpoint took longer than others. `gone_ms`: from SIGTERM until the process has ended and the checkpoint
of its last step is there, the longest of `--rounds`. Last line: JSON.

Usage: python benchmarks/checkpoints.py [--mbytes 100] [--rounds 3] [--steps 200]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_runtime

COPIES = 3  # parameters and AdamW's two moments
LAYERS = 4


def train(mbytes: float, directory: Path) -> None:
    """Train until SIGTERM, and record the end of each step."""
    torch.set_num_threads(1)
    width = int((mbytes * 1e6 / 4 / COPIES / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    job = elastic_runtime.init(global_batch_size=4, checkpoint_every_s=0.5)
    loader = DataLoader(TensorDataset(torch.randn(1 << 14, 1)), batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    with (directory / "steps").open("w", buffering=1) as log:
        for _epoch in job.epochs(1 << 20):
            for (x,) in loader:
                job.backward(model(x.expand(-1, width)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                log.write(f"{job.step + 1} {time.monotonic()}\n")


def steps_of(directory: Path) -> list[tuple[int, float]]:
    """(steps applied, when the last of them was), as far as they are written."""
    path = directory / "steps"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), float(at)) for step, at in (line.split() for line in lines)]


def measure(mbytes: float, steps: int) -> tuple[list[float], list[float], float]:
    """Return the stalls, the extra time of steps with a checkpoint, and the time from SIGTERM to exit, in ms."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = {
            **os.environ,
            "ELASTIC_CHECKPOINT_DIR": str(directory / "checkpoints"),
            "ELASTIC_REPORT_FILE": str(directory / "report"),
        }
        process = subprocess.Popen(
            [sys.executable, __file__, "--mbytes", str(mbytes), "--train", name],
            env=environment,
            start_new_session=True,
        )
        try:
            while len(steps_of(directory)) < steps:
                if process.poll() is not None:
                    raise SystemExit(f"the training ended with {process.returncode}")
                time.sleep(0.05)
            received = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            gone_ms = (time.monotonic() - received) * 1e3
        finally:
            process.kill()
        rows = [json.loads(line) for line in (directory / "report").read_text().splitlines()]
        written = [row for row in rows if row["event"] == "checkpoint"]
        took = dict(zip(*_durations(steps_of(directory)), strict=True))
        last = max(row["step"] for row in written)
        if last != steps_of(directory)[-1][0]:
            raise SystemExit(f"the last checkpoint is of step {last}, but {steps_of(directory)[-1][0]} were trained")
    periodic = written[:-1]
    usual = statistics.median(took.values())
    felt = [took[row["step"] + 1] - usual for row in periodic if row["step"] + 1 in took]
    return [row["stall_ms"] for row in periodic], felt, gone_ms


def _durations(steps: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    pairs = list(itertools.pairwise(steps))
    return [after[0] for _, after in pairs], [(after[1] - before[1]) * 1e3 for before, after in pairs]


def main() -> None:
    """Measure, or train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.mbytes, options.train)
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, a state of {options.mbytes:g} MB")
    stalls, felt, gone = [], [], []
    for _ in range(options.rounds):
        of_round = measure(options.mbytes, options.steps)
        print(
            f"{len(of_round[0])} checkpoints, stalls of {max(of_round[0]):.1f} ms at most, gone in {of_round[2]:.0f} ms"
        )
        stalls += of_round[0]
        felt += of_round[1]
        gone.append(of_round[2])
    result = {
        "mbytes": options.mbytes,
        "checkpoints": len(stalls),
        "stall_ms": round(statistics.median(stalls), 2),
        "stall_max_ms": round(max(stalls), 2),
        "felt_ms": round(statistics.median(felt), 2),
        "gone_ms": round(max(gone), 1),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
