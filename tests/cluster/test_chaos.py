"""Random histories of a real cluster: users, crashes and kills in any order. A seed replays one:

pytest tests/cluster/test_chaos.py --seeds 7,8,9
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Job, Phase
from kfp_gpuquota.api.wire import EventKind
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.errors import ConflictError, NotFoundError, StateFileError
from tests.cluster.real_trainings import MOST
from tests.conftest import running_cluster
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.real_trainings import Trainings
    from tests.conftest import EmbeddedCluster

ACTIONS = 40
TEAMS = {"team-a": (2, None), "team-b": (2, 3), "team-c": (0, None)}
SETTLE_S = 120.0
LET_TRAIN_S = 2.0


class History:
    """One cluster, one seed, and what was done to it."""

    def __init__(self, cluster: EmbeddedCluster, seed: int, tally: Path, trainings: Trainings) -> None:
        self.cluster, self.seed, self.tally = cluster, seed, tally
        self.random = random.Random(seed)
        self.trainings = trainings
        self.count = 0
        self.done: list[str] = []
        self.actions: list[Callable[[], str]] = [
            self.submit_short, self.submit_short, self.submit_long, self.submit_elastic, self.submit_session,
            self.submit_training, self.submit_training, self.let_train, self.let_train,
            self.delete, self.suspend, self.resume, self.cancel, self.kill_worker, self.kill_shim, self.kill_daemon,
        ]  # fmt: skip

    def play(self) -> None:
        """Take all steps, wait for the end of what they began, and check it; print them where that fails."""
        try:
            for number in range(ACTIONS):
                self.step(number)
            self.settle()
            self.check_results()
        except BaseException:
            print("\n".join(self.done))
            for job in filter(self.trainings.is_one, self.cluster.client.list_jobs().jobs):
                print(job, *self.logs_of(job), sep="\n")
            raise

    def logs_of(self, job: Job) -> list[str]:
        """The ends of its workers' logs."""
        logs = (self.cluster.home.jobs / job.uid).glob("workers/*/log")
        return [f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs]

    def step(self, number: int) -> None:
        """Take the step of this number, drawn for it alone: a replay takes the same, whatever was there to act upon."""
        self.random = random.Random(f"{self.seed}:{number}")
        action = self.random.choice(self.actions)
        with contextlib.suppress(ConflictError, NotFoundError, StateFileError):  # the last one: the disk is full
            self.done.append(action())
        self.check()

    # What users do

    def submit(self, *command: str, **spec: object) -> str:
        self.count += 1
        name, project = f"job-{self.count}", self.random.choice(list(TEAMS))
        self.cluster.submit(name, *command, project=project, grace_period_s=0.5, **spec)
        return f"submit {name} to {project}"

    def submit_short(self) -> str:
        return self.submit("sh", "-c", f"echo $JOB_UUID >> {self.tally}; sleep 0.1", gpus=self.random.choice([1, 1, 2]))

    def submit_long(self) -> str:
        return self.submit(gpus=self.random.choice([1, 2]), priority=self.random.choice([10, 50]))

    def submit_elastic(self) -> str:
        return self.submit(gpus=2, min_gpus=1, max_gpus=4)

    def submit_session(self) -> str:
        return self.submit(kind="build")

    def submit_training(self) -> str:
        """Submit a real training, whose end is checked; a few of them keep two cores busy."""
        if sum(map(self.trainings.is_one, self.cluster.client.list_jobs().jobs)) >= MOST:
            return self.let_train()
        sizes = self.random.choice([{"gpus": 1}, {"gpus": 2}, {"gpus": 1, "max_gpus": 2}, {"gpus": 2, "max_gpus": 3}])
        return "real training: " + self.submit(*self.trainings.command, min_gpus=1, max_restarts=100, **sizes)

    def let_train(self) -> str:
        """Let a training proceed by a few steps, if one can: what happens next meets it in its loop."""
        before = self.trained()
        with contextlib.suppress(TimeoutError):
            until(lambda: self.trained() != before, timeout_s=LET_TRAIN_S)
        return f"trained: {before} -> {self.trained()}"

    def trained(self) -> dict[str, int]:
        """The steps that trainings have reported, by name."""
        jobs = [job for job in self.cluster.client.list_jobs().jobs if self.trainings.is_one(job)]
        return {job.spec.name: job.status.progress.step for job in jobs if job.status.progress}

    def delete(self) -> str:
        return self.on_some_job("delete", self.cluster.client.delete_job)

    def suspend(self) -> str:
        return self.on_some_job("suspend", self.cluster.client.suspend_job)

    def resume(self) -> str:
        return self.on_some_job("resume", self.cluster.client.resume_job)

    def cancel(self) -> str:
        return self.on_some_job("cancel", self.cluster.client.cancel_job)

    def on_some_job(self, what: str, call: Callable[[str, str], object]) -> str:
        jobs = self.cluster.client.list_jobs().jobs
        if not jobs:
            return "nothing"
        job = self.random.choice(jobs)
        call(job.spec.project, job.spec.name)
        return f"{what} {job.spec.name}"

    # What happens to machines

    def kill_daemon(self) -> str:
        self.cluster.kill_daemon()
        return "kill the daemon"

    def kill_worker(self) -> str:
        return self.kill_some("worker", lambda pid: pid)

    def kill_shim(self) -> str:
        return self.kill_some("shim", parent_of)

    def kill_some(self, what: str, target: Callable[[int], int]) -> str:
        workers = [
            w for job in self.cluster.client.list_jobs().jobs for w in job.status.workers if w.phase == "Running"
        ]
        if not workers:
            return "nothing"
        worker = self.random.choice(workers)
        with contextlib.suppress(OSError):
            os.kill(target(worker.pid or 0), signal.SIGKILL)
            self.trainings.faults += 1
        return f"kill the {what} of {worker.id}"

    # What must hold

    def check(self) -> None:
        listed = self.cluster.client.list_jobs().jobs
        held = Counter(
            (w.node, d) for job in listed for w in job.status.workers if w.phase != "Gone" for d in w.devices
        )
        assert max(held.values(), default=1) == 1, held
        for view in self.cluster.client.list_projects():
            limit = TEAMS[view.project.name][1]
            assert limit is None or view.allocated <= limit, view
        for job in listed:
            assert (job.status.phase.final or job.status.phase is Phase.PENDING) <= (job.status.gpus == 0), job

    def settles_from(self, before: list[object]) -> bool:
        """Whether all jobs have ended, or something has changed since."""
        return not self.unended() or self.progress() != before

    def progress(self) -> list[object]:
        """What changes while the cluster settles: on a slow machine a training takes long, and is not stuck."""
        return [self.trained(), *((job.uid, job.status.phase, job.status.restarts) for job in self.unended())]

    def unended(self) -> list[Job]:
        return [job for job in self.cluster.client.list_jobs().jobs if not ended(job)]

    def settle(self) -> None:
        """Check that finally every job that may run runs, and that stopped workers have exited."""
        for job in self.cluster.client.list_jobs().jobs:
            if self.trainings.is_one(job):
                with contextlib.suppress(ConflictError):  # one that ends
                    self.cluster.client.resume_job(job.spec.project, job.spec.name)
            elif job.spec.command[0] == "sleep" or job.status.phase in {Phase.SUSPENDED, Phase.STOPPING}:
                with contextlib.suppress(NotFoundError):
                    self.cluster.client.delete_job(job.spec.project, job.spec.name)
        while self.unended():
            before = self.progress()
            until(partial(self.settles_from, before), self.unended, SETTLE_S)
        assert all(not view.held for view in self.cluster.client.list_nodes())

    def check_results(self) -> None:
        """Check that no job succeeded that did not run, and that none ran without a decision to start it."""
        ran = Counter(self.tally.read_text().split())
        decided = Counter(e.job_uid for e in self.cluster.client.events().events if e.kind is EventKind.JOB_STARTED)
        listed = self.cluster.client.list_jobs().jobs
        succeeded = [job for job in listed if job.status.phase is Phase.SUCCEEDED]
        assert {job.uid for job in succeeded if not self.trainings.is_one(job)} <= set(ran)
        assert all(ran[uid] <= decided[uid] for uid in ran), (ran, decided)
        self.trainings.check(list(listed))


def ended(job: Job) -> bool:
    return job.status.phase.final


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_whatever_happens_no_gpu_is_held_twice_and_every_job_ends(
    tmp_path: Path, seed: int, trainings: Trainings
) -> None:
    tally = tmp_path / "tally"
    tally.touch()
    with running_cluster(tmp_path / "home", ClusterConfig(nodes=2, gpus_per_node=3)) as cluster:
        for name, (guaranteed, limit) in TEAMS.items():
            cluster.project(name, guaranteed, limit=limit)
        History(cluster, seed, tally, trainings).play()
