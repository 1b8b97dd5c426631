"""Four concurrent pipelines, two teams, two GPUs: which one waits, borrows or releases GPUs.

    python examples/four_pipelines.py

Each team is guaranteed one GPU. Team A's first pipeline runs alone and borrows team B's. B's first one takes the GPU
back, and now each team's second one waits, for its team's GPU or for one that is idle; then the first ones may end. A
table at the end shows what became of each. The four are processes, as four people would start them: `gpuquota pipeline
run` with this very file. Where the machine has no GPUs two CPU slots stand for them; the steps only pretend to work.
"""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kfp import dsl
from own_cluster import end_with_its_steps, own_cluster
from rich.console import Console
from rich.table import Table

import kfp_gpuquota as gpuquota
from kfp_gpuquota.api import Job, JobStatus
from kfp_gpuquota.server.client import Client

OUT = Path("out/four_pipelines").absolute()
GPUS = 2
TEAMS = {"team-a": 1, "team-b": 1}
STEPS, BORROWED_FOR_STEPS = 20, 10
ENOUGH = OUT / "enough"


@gpuquota.component(gpus=1, min_gpus=1, max_gpus=2)
@dsl.component(base_image="python:3.11", install_kfp_package=False)
def train(steps: int, enough: str) -> float:
    """A small regression with micro-batches of 40 ms: two GPUs need half the time of one.

    It takes so many steps, and more until the file `enough` is there.
    """
    # ruff: noqa: PLC0415  # KFP runs a component's source by itself, so it imports what it uses
    import time
    from pathlib import Path

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import elastic_runtime as elastic

    torch.manual_seed(0)
    x = torch.randn(640, 8)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=64, shuffle=True)

    job = elastic.init(global_batch_size=64, max_batch_per_gpu=32)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for epoch in job.epochs(10**6):
        for inputs, wanted in loader:
            loss = (model(inputs) - wanted).square().mean()
            time.sleep(0.04)
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            job.report(loss=loss.item())
        there = job.all_reduce(torch.tensor(float(Path(enough).exists())))  # for all workers at the same step
        if there and (epoch + 1) * 10 >= steps:
            break
    return loss.item()


@gpuquota.pipeline
@dsl.pipeline(name="study")
def study(steps: int, enough: str) -> float:
    """One training; returns its last loss."""
    return train(steps=steps, enough=enough).output


class Run:
    """One pipeline in its own process, and the messages about its job in the step's log."""

    def __init__(self, name: str, team: str) -> None:
        self.name, self.team = name, team
        self.job = ""
        command = [sys.executable, "-m", "kfp_gpuquota.cli.main", "pipeline", "run", __file__]
        command += [f"--project={team}", f"--arg=steps={STEPS}", f"--arg=enough={ENOUGH}", f"--root={OUT / name}"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._tell)
        self._reader.start()

    def _tell(self) -> None:
        for line in self.process.stdout or ():
            if shown := re.search(r"(?:gpuquota: |Error: )(?!step )(.*)", line):
                print(f"{time.strftime('%H:%M:%S')} {self.name:9} {shown[1]}", flush=True)
                self.job = self.job or shown[1].split()[1]

    def wait(self) -> None:
        """Wait for its end, and for its last word."""
        self.process.wait()
        self._reader.join()


def wait_until(condition: Callable[[JobStatus], bool], client: Client, run: Run) -> None:
    """Return when the condition holds for the run's job, or the run has ended."""
    after: int | None = None
    while run.process.poll() is None:
        listed = client.list_jobs(run.team, after=after, timeout_s=0.0 if after is None else 1.0)
        after = listed.revision
        if any(job.spec.name == run.job and condition(job.status) for job in listed.jobs):
            return


def borrows(status: JobStatus) -> bool:
    """It has worked for a while on more than its team is guaranteed."""
    return status.gpus == GPUS and status.progress is not None and status.progress.step >= BORROWED_FOR_STEPS


def holds(status: JobStatus) -> bool:
    """Return whether the pipeline's job has a GPU."""
    return status.gpus > 0


def waits(status: JobStatus) -> bool:
    """Return whether the pipeline's job waits for a GPU and shows the reason."""
    return status.gpus == 0 and status.reason is not None


def row(run: Run, job: Job) -> list[str]:
    """What became of one pipeline's job."""
    status, resizes = job.status, job.status.resizes
    started_at = status.started_at or status.submitted_at
    sizes = [*(resize.from_gpus for resize in resizes[:1] or ()), *(resize.to_gpus for resize in resizes)]
    sizes = sizes or [job.spec.gpus]
    taken = [resize.reason.project for resize in resizes if resize.to_gpus < resize.from_gpus]
    return [
        run.name,
        f"{started_at - status.submitted_at:.1f} s",
        f"{(status.finished_at or started_at) - started_at:.1f} s",
        " → ".join(map(str, sizes)),
        str(max(sizes) - job.spec.gpus),
        ", ".join(f"1 to {team}" for team in taken if team != run.team),
    ]


def main() -> int:
    """Run all four; returns 0 when every one has succeeded."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same cleanup as for Ctrl-C
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(own_cluster(OUT, TEAMS, GPUS))
        runs: list[Run] = []

        def start(name: str, team: str) -> Run:
            runs.append(Run(name, team))
            stack.callback(end_with_its_steps, runs[-1].process)
            return runs[-1]

        wait_until(borrows, client, start("a-first", "team-a"))
        wait_until(holds, client, start("b-first", "team-b"))
        for second in (start("a-second", "team-a"), start("b-second", "team-b")):
            wait_until(waits, client, second)
        ENOUGH.touch()
        for run in runs:
            run.wait()
        table = Table("pipeline", "waited", "ran", "GPUs", "borrowed", "gave back")
        for run in runs:
            if run.job:
                table.add_row(*row(run, client.get_job(run.team, run.job)))
        Console().print(table)
    return max(abs(run.process.returncode) for run in runs)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
