"""Real worker processes against the real membership service.

The processes come from a fork server that has torch loaded already: importing it costs seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import defaultdict
from functools import partial
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from kfp_gpuquota.membership import AnnounceCommit, Limits
from tests.elastic_runtime.leftovers import processes_at, threads_and_sockets
from tests.elastic_runtime.relay import Relay
from tests.elastic_runtime.training import IN_EVALUATION, Gate, Plan, worker_main
from tests.forked import context, preload
from tests.polling import TIMEOUT_S, until
from tests.standalone_coordinator import StandaloneCoordinator

if TYPE_CHECKING:
    import multiprocessing
    from collections.abc import Iterator, Mapping

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.server.membership.service import MembershipService

JOB = "job"
MOST_WORKERS = 24
LIMITS = Limits(silence_s=8.0, unheard_s=15.0, isolated_s=15.0, leave_s=20.0, forming_s=5.0, failure_s=1.0)

preload("tests.elastic_runtime.training", "elastic_runtime.loop.job", "torch.distributed", "torch._dynamo")


def _newest_rows(path: Path) -> list[dict[str, Any]]:
    """A worker's rows; of a step that it computed twice in one generation, the second time only."""
    rows = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows["computed" in row, row.get("computed", row.get("applied")), row["generation"]] = row
    return list(rows.values())


def _tell_gone(worker: str, service: MembershipService) -> None:
    service.worker_exited(JOB, worker)


def _doing(pid: int | None) -> str:
    """State and function in the kernel of each thread, and its seconds of running and of waiting for a core."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            ran, waited = ((int(ns) / 1e9) for ns in (task / "schedstat").read_text().split()[:2])
            found.append(f"{state} {(task / 'wchan').read_text()} ran {ran:.1f} s waited {waited:.1f} s")
    return f"its threads: {found}"


class Cluster:
    """Starts workers, reports exits to the service, carries out its kills; checks at the end that none is left."""

    def __init__(
        self,
        directory: Path,
        plan: Plan | None = None,
        *,
        checkpoints: bool = False,
        limits: Limits = LIMITS,
        relayed: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = dict(environment or {})  # of each worker
        self._ports: set[int] = set()  # of its coordinators
        self._before = threads_and_sockets(self._ports)
        self.directory, self.plan = directory, plan or Plan()
        self.gate = Gate(context, MOST_WORKERS)
        self.commits: list[AnnounceCommit] = []
        self.released: list[str] = []
        self.finished: list[str] = []
        self.kills: list[tuple[str, str]] = []
        self.highest = 0
        self.progress: list[Progress] = []
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self._stopping = False
        self._checkpoints, self._limits = checkpoints, limits
        (directory / "token").write_text("secret")
        self._target: list[str] = []
        self._lock = threading.Lock()
        self._serving = threading.Lock()  # held while no coordinator can receive an exit
        self._serve(1)
        self.relay = Relay(lambda: self.coordinator.port) if relayed else None
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    # Notices

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        assert generation > self.highest
        self.highest = generation

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        self.commits.append(commit)

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        self.released.append(worker)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        self.kills.append((worker, f"{why}; {_doing(self.processes[worker].pid)}"))
        self.kill(worker)

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        self.progress.append(progress)

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        self.finished.append(worker)

    # What a test does

    def target(self, *indices: int) -> None:
        """Workers of these numbers are wanted; those that do not run yet are started."""
        self._target = [f"w{i}" for i in indices]
        for index in indices:
            self._start(index)
        self.coordinator.call(lambda service: service.set_target(JOB, self._target))

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        process = self.processes[worker]
        ended = wait_for_any([process.sentinel], 0)  # not is_alive: two threads that ask at once get exit code 255
        if process.pid and not ended:
            with contextlib.suppress(ProcessLookupError):  # it just has
                os.kill(process.pid, number)

    def hold_at(self, step: int) -> None:
        """Stop all workers at this step until `let_go`."""
        self.gate.limit.value = step

    def let_go(self) -> None:
        self.gate.limit.value = 1 << 40

    def wait_until_at(self, step: int, *indices: int) -> None:
        until(lambda: all(self.gate.at[i] >= step for i in indices), f"workers {indices} at step {step}")

    def wait_until_somebody_is_at(self, step: int) -> None:
        until(lambda: max(self.gate.at) >= step, lambda: f"step {step}\n{self.logs()}")

    def wait_until_prepared(self, *indices: int) -> None:
        """A generation of exactly these workers is built and waits for the end of a step."""
        wanted = {f"w{i}" for i in indices}

        def prepared() -> bool:
            pending = self.coordinator.call(lambda service: service.machine(JOB)).pending
            return pending is not None and wanted == set(pending.members) == pending.prepared & wanted

        until(prepared, lambda: f"a generation of {wanted} prepared\n{self.logs()}")

    def wait_for_size(self, size: int) -> AnnounceCommit:
        def found() -> AnnounceCommit | None:
            last = self.commits[-1] if self.commits else None
            return last if last and last.complete and len(last.members) == size else None

        return until(found, lambda: f"a generation of {size}, seen {self.commits}\n{self.logs()}")

    def resize(self, *indices: int, up_to: int) -> AnnounceCommit:
        """These workers train together from the next step on, and wait at `up_to`."""
        self.target(*indices)
        self.wait_until_prepared(*indices)
        self.hold_at(up_to)
        return self.wait_for_size(len(indices))

    def wait_for_end(self, *indices: int) -> None:
        """These workers end well."""
        for index in indices:
            process = self.processes[f"w{index}"]
            process.join(TIMEOUT_S)
            assert process.exitcode == 0, f"w{index} ended with {process.exitcode}:\n{self.logs()}"

    def start(self, *indices: int, step: int = 5) -> None:
        """These workers train, and wait at `step`."""
        self.hold_at(step)
        self.target(*indices)
        self.wait_until_at(step, *indices)

    def grow_lose_the_first_and_end(self) -> None:
        """Of workers 0 and 1, which wait: a third one joins them, then the first is killed at step 15; two end."""
        self.resize(0, 1, 2, up_to=15)
        self.wait_until_at(15, 0, 1, 2)
        self.kill("w0")
        self.let_go()
        self.wait_for_end(1, 2)

    def lose_in_evaluation(self, victim: int) -> list[int]:
        """Of workers 0, 1 and 2 the victim is killed where it stays, in an evaluation; the others, returned, end."""
        self.start(0, 1, 2)
        self.let_go()
        self.kill_in_evaluation(victim)
        others = sorted({0, 1, 2} - {victim})
        self.wait_for_end(*others)
        return others

    def kill_in_evaluation(self, victim: int) -> None:
        """Wait until the worker reports that it is in an evaluation."""
        until(lambda: self.gate.at[victim] == IN_EVALUATION, lambda: f"the evaluation\n{self.logs()}")
        self.kill(f"w{victim}")

    def restart_coordinator(self, *, away_s: float = 0.0) -> None:
        """Start a new service at another address, with only the highest number."""
        with self.without_coordinator():
            time.sleep(away_s)

    @contextlib.contextmanager
    def without_coordinator(self) -> Iterator[None]:
        """What happens meanwhile, the one that comes after it has not seen."""
        with self._serving:
            self.coordinator.__exit__(None, None, None)
            yield
            self._serve(self.highest + 1)

    def logs(self) -> str:
        logs = [f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.directory.glob("log-*"))]
        ended = {w: p.exitcode for w, p in self.processes.items()}
        return "\n".join([f"killed by the coordinator: {self.kills}; exit codes: {ended}", *logs])

    # What was trained

    def consumed(self) -> dict[int, list[int]]:
        """The samples of each applied step: those computed in the newest generation that applied it.

        A worker that computed a share may have died, or lost its peers, before it applied the step that others applied.
        """
        rows = [row for path in self.directory.glob("consumed-*") for row in _newest_rows(path)]
        newest: dict[int, int] = defaultdict(int)
        for row in rows:
            if "applied" in row:
                newest[row["applied"]] = max(newest[row["applied"]], row["generation"])
        steps: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            if "computed" in row and row["generation"] == newest.get(row["computed"]):
                steps[row["computed"]] += row["indices"]
        return steps

    def check_samples(self) -> None:
        """Each sample exactly once in each epoch."""
        plan, consumed = self.plan, self.consumed()
        steps = -(-plan.samples // plan.global_batch)
        assert sorted(consumed) == list(range(steps * plan.epochs))
        for epoch in range(plan.epochs):
            seen = [i for k in range(steps) for i in consumed[epoch * steps + k]]
            assert sorted(seen) == list(range(plan.samples)), f"epoch {epoch}"

    def finals(self) -> dict[str, Any]:
        return {p.stem: torch.load(p) for p in self.directory.glob("final-*.pt")}

    def check_result(self, reference: dict[str, Any]) -> None:
        """Each sample once, and every finished worker's model is the single worker's, within rounding."""
        self.check_samples()
        finals = self.finals()
        assert finals
        for final in finals.values():
            assert final["step"] == reference["step"]
            assert final["lr"] == reference["lr"]
            for name, value in reference["model"].items():
                torch.testing.assert_close(final["model"][name], value, rtol=2e-4, atol=2e-5)

    # Inside

    def _serve(self, first_generation: int) -> None:
        self.coordinator = StandaloneCoordinator(self, limits=self._limits)
        self.coordinator.__enter__()
        self._ports.add(self.coordinator.port)
        running = [w for w, p in self.processes.items() if p.is_alive()]
        self.coordinator.call(
            lambda service: service.open(JOB, "secret", first_generation=first_generation, running=running)
        )
        if self._target:
            self.coordinator.call(lambda service: service.set_target(JOB, self._target))
        (self.directory / "address.new").write_text(self.coordinator.url(JOB))
        (self.directory / "address.new").rename(self.directory / "address")

    def _address(self, worker: str) -> str:
        if self.relay is None:
            return f"@{self.directory}/address"
        return self.coordinator.url(JOB).replace(f":{self.coordinator.port}/", f":{self.relay.open_lane(worker)}/")

    def _start(self, index: int) -> None:
        worker = f"w{index}"
        if worker in self.processes:
            return
        environment = {
            **self._environment,
            "JOB_NAME": JOB,
            "ELASTIC_COORDINATOR": self._address(worker),
            "ELASTIC_TOKEN_FILE": f"{self.directory}/token",
            "ELASTIC_WORKER_ID": worker,
            "ELASTIC_REPORT_FILE": f"{self.directory}/report-{index}.jsonl",
        }
        if self._checkpoints:
            environment["ELASTIC_CHECKPOINT_DIR"] = f"{self.directory}/checkpoints"
        process = context.Process(
            target=worker_main, args=(self.plan, index, str(self.directory), environment, self.gate)
        )
        process.start()
        with self._lock:
            self.processes[worker] = process

    def _watch(self) -> None:
        """What a cluster does: notice each end, at once."""
        received: set[str] = set()
        while not self._stopping:
            with self._lock:
                sentinels = {p.sentinel: w for w, p in self.processes.items() if w not in received}
            for sentinel in wait_for_any(list(sentinels), timeout=0.02):
                worker = sentinels[sentinel]  # type: ignore[index]
                with self._serving:
                    self.coordinator.call(partial(_tell_gone, worker))
                received.add(worker)

    def __enter__(self) -> Self:
        if self.relay:
            self.relay.__enter__()
        self._watcher.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        left = [w for w, p in self.processes.items() if p.is_alive()]
        self._stopping = True
        for worker in left:
            self.kill(worker)
        for process in self.processes.values():
            process.join(TIMEOUT_S)
        self._watcher.join(TIMEOUT_S)
        self.coordinator.__exit__(None, None, None)
        if self.relay:
            self.relay.__exit__(None, None, None)
        if kind is None:
            assert not left, f"still running: {left}\n{self.logs()}"
            self._check_nothing_is_left()

    def _check_nothing_is_left(self) -> None:
        """Check that no process of a worker (a loader exits seconds after its worker), thread or socket is left."""
        until(lambda: not processes_at(self.directory), lambda: f"the end of {processes_at(self.directory)}")
        until(
            lambda: threads_and_sockets(self._ports) <= self._before,
            lambda: f"the end of {threads_and_sockets(self._ports) - self._before}",
        )
