"""What the elastic benchmarks share: real workers that write down when each step ended, and pauses between sizes."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic_runtime
from kfp_gpuquota.server.membership.service import MembershipService
from tests.standalone_coordinator import StandaloneCoordinator
from tools.devcluster.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.membership import AnnounceCommit

JOB = "bench"
LAYERS = 8
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["elastic_bench", "elastic_runtime.loop.job", "torch.distributed", "torch._dynamo"])


@dataclass(frozen=True)
class Task:
    """A stack of linear layers with `mparams` million parameters, AdamW, a global batch of 32."""

    mparams: float
    global_batch: int = 32

    @property
    def width(self) -> int:
        """Of each of the layers."""
        return int((self.mparams * 1e6 / LAYERS) ** 0.5)


class _Noise(Dataset[torch.Tensor]):
    def __init__(self, width: int) -> None:
        self._one = torch.randn(width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._one


def build(task: Task) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(task.width, task.width), nn.ReLU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def train(task: Task, environment: dict[str, str], stop: Any) -> None:
    """A worker's body: trains until it is stopped, writing (step, generation, size, end of the step) as it goes."""
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    log = Path(environment["BENCH_STEPS"]).open("w", buffering=1)  # noqa: SIM115  (as long as the process)
    job = elastic_runtime.init(global_batch_size=task.global_batch)
    model, optimizer = build(task)
    loader = DataLoader(_Noise(task.width), batch_size=task.global_batch)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for _epoch in job.epochs(1):
        for x in loader:
            job.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{job.step} {job.world_size} {time.monotonic()}\n")
            if stop.value:
                os._exit(0)


def run_body(body: Callable[..., None], *arguments: Any) -> None:
    """Run a worker's body, until the server that has forked this process ends.

    It ends with the benchmark. At a signal for the process group it ends before the workers, whose ends it reports to
    multiprocessing: they would count as ended, and would continue to train.
    """
    die_with_parent()
    if os.getppid() != 1:
        body(*arguments)


@dataclass(frozen=True)
class Step:
    """One applied step, by one worker's clock (monotonic, the same for all processes)."""

    step: int
    size: int
    end: float


def parse_steps(path: Path) -> list[Step]:
    """What a worker has written so far."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [line.split() for line in lines]
    return [Step(int(step), int(size), float(end)) for step, size, end in rows]


@dataclass(frozen=True)
class Pause:
    """One change of size, as the loop felt it."""

    from_size: int
    to_size: int
    pause_ms: float
    step_ms: float
    lost_steps: int


def pauses(steps: list[Step], settle: int = 30) -> list[Pause]:
    """Each change of size: its gap, less the median of up to `settle` steps of the new size; where that one lasted for
    a step only, since the next worker was there already, less the median step of all.
    """
    all_times = [b.end - a.end for a, b in itertools.pairwise(steps) if a.size == b.size]
    found = []
    for i in range(1, len(steps)):
        before, after = steps[i - 1], steps[i]
        if before.size == after.size:
            continue
        later = [s for s in steps[i : i + settle] if s.size == after.size]
        times = [b.end - a.end for a, b in itertools.pairwise(later)]
        step_s = statistics.median(times or all_times)
        gap_ms = (after.end - before.end - step_s) * 1e3
        found.append(Pause(before.size, after.size, gap_ms, step_s * 1e3, before.step + 1 - after.step))
    return found


class Bench:
    """Workers under a coordinator in this process."""

    def __init__(self, directory: Path, task: Task, settle_steps: int = 40) -> None:
        self._directory, self._task, self._settle_steps = directory, task, settle_steps
        self._processes: dict[str, Any] = {}
        self._stop = context.RawValue("b", 0)
        self.commits: list[AnnounceCommit] = []
        self._closing = False
        (directory / "token").write_text("secret")
        self.coordinator = StandaloneCoordinator(self)
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def generation_reserved(self, _job_uid: str, _generation: int) -> None:
        """Do nothing: no state survives this process."""

    def generation_committed(self, _job_uid: str, commit: AnnounceCommit) -> None:
        """Record the commit."""
        self.commits.append(commit)

    def worker_released(self, _job_uid: str, _worker: str, _step: int) -> None:
        """Do nothing: the worker exits by itself."""

    def kill_requested(self, _job_uid: str, worker: str, why: str) -> None:
        """Kill the worker's process, which no benchmark expects."""
        print(f"{worker} is killed: {why}", file=sys.stderr)
        self.kill(worker)

    def progress_reported(self, _job_uid: str, _worker: str, _progress: Progress) -> None:
        """Ignore the report."""

    def training_finished(self, _job_uid: str, _worker: str, _step: int) -> None:
        """Does not happen."""

    def kill(self, worker: str) -> None:
        """With SIGKILL."""
        self.signal(worker, signal.SIGKILL)

    def signal(self, worker: str, number: int) -> None:
        """Send its process a signal."""
        with contextlib.suppress(ProcessLookupError):  # it ended just before
            os.kill(self._processes[worker].pid, number)

    def start(self, *workers: str, body: Callable[..., None] = train, arguments: tuple[Any, ...] = ()) -> None:
        """Processes for these workers, which run `body(task, environment, *arguments)`."""
        for worker in workers:
            environment = {
                "ELASTIC_COORDINATOR": self.coordinator.url(JOB),
                "ELASTIC_TOKEN_FILE": str(self._directory / "token"),
                "ELASTIC_WORKER_ID": worker,
                "BENCH_STEPS": str(self._directory / f"steps-{worker}"),
            }
            given = (body, self._task, environment, *(arguments or (self._stop,)))
            process = context.Process(target=run_body, args=given, daemon=True)
            process.start()
            self._processes[worker] = process

    def target(self, *workers: str) -> None:
        """The workers the job should have."""
        self.coordinator.call(lambda service: service.set_target(JOB, workers))

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        """Poll another process's doing."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(what)
            time.sleep(0.02)  # each look reads a file: more of them would be felt by those that are measured

    def wait_for_size(self, size: int, timeout_s: float = 120) -> None:
        """A complete generation of this size that has trained for some steps."""

        def reached() -> bool:
            last = self.commits[-1] if self.commits else None
            if last is None or not last.complete or len(last.members) != size:
                return False
            steps = self.steps(last.members[0])
            return bool(steps) and steps[-1].step >= last.step + self._settle_steps

        self.wait_for(reached, f"size {size}, seen {self.commits}", timeout_s)

    def grow_and_shrink(self, rounds: int) -> None:
        """w0 alone, then with a new worker, then alone again."""
        self.target("w0")
        self.start("w0")
        self.wait_for_size(1)
        for i in range(1, rounds + 1):
            self.target("w0", f"w{i}")
            self.start(f"w{i}")
            self.wait_for_size(2)
            self.target("w0")
            self.wait_for_size(1)

    def steps(self, worker: str) -> list[Step]:
        """What the worker has written so far."""
        return parse_steps(self._directory / f"steps-{worker}")

    def _watch(self) -> None:
        received: set[str] = set()
        while not self._closing:
            sentinels = {p.sentinel: w for w, p in list(self._processes.items()) if w not in received}
            for sentinel in wait_for_any(list(sentinels), timeout=0.01):
                worker = sentinels[sentinel]
                received.add(worker)
                self.coordinator.call(partial(MembershipService.worker_exited, job_uid=JOB, worker=worker))

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no worker is left behind
        self.coordinator.__enter__()
        self.coordinator.call(lambda service: service.open(JOB, "secret"))
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.value = 1
        for process in self._processes.values():
            process.join(10)
            if process.is_alive():
                process.kill()
        self._closing = True
        self._watcher.join()
        self.coordinator.__exit__(None, None, None)


def print_result(result: dict[str, object]) -> None:
    """The last line."""
    print(json.dumps(result))
