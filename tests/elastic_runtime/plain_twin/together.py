"""The same scripts as two workers of a job: each leaves what the plain one leaves, but for what `documented` names.

A script may end on one worker only. The other one trains on, and leaves what the plain script does that does not end
there.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.membership import Limits
from tests.elastic_runtime.plain_twin import parts
from tests.elastic_runtime.plain_twin.twins import Draft, draw, left_in, run, start
from tests.polling import TIMEOUT_S
from tests.standalone_coordinator import StandaloneCoordinator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.elastic_runtime.plain_twin.twins import Left

WORKERS = ("w0", "w1")
JOB = "twin"
LIMITS = Limits(silence_s=30.0, unheard_s=30.0, isolated_s=30.0, leave_s=20.0, forming_s=30.0, failure_s=0.5)
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR2", "SIGHUP")
OF_THE_JOB = {"group of its own", "random drawn"}
"""Habits that differ by design: the default process group is the job's, and a worker has random numbers of its own."""

AFTER = (parts.AFTER_LOOP, parts.END)
COMPARED = {"code", "stdout", "stderr", "files"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A draft of which the workers `ending` end as it says, and the others return."""

    draft: Draft
    ending: frozenset[str]

    def of(self, worker: str) -> Draft:
        """Return what one worker runs."""
        return self.draft if worker in self.ending else dataclasses.replace(self.draft, end=(parts.END, "returns"))


def draw_pair(seed: int) -> Pair:
    """Return the pair of this seed."""
    draws, draft = random.Random(f"pair {seed}"), draw(seed)
    end = (draws.choice(parts.PLACES), draws.choice([*parts.ENDS, *SIGNALS * 3]))
    main = draws.choice(parts.WITH_ONE[:3])
    ending = draws.choice([WORKERS, WORKERS, WORKERS[:1], WORKERS[1:]])
    habits = tuple(habit for habit in draft.habits if habit[1] not in OF_THE_JOB)
    return Pair(Draft(habits, end, main, "worker"), frozenset(ending))


class Cluster:
    """The notices of a coordinator; nothing is to be done for them."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.killed: list[str] = []

    def generation_reserved(self, job_uid: str, generation: int) -> None: ...

    def generation_committed(self, job_uid: str, commit: object) -> None: ...

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        self.released.append(worker)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        self.killed.append(f"{worker}: {why}")

    def progress_reported(self, job_uid: str, worker: str, progress: object) -> None: ...

    def training_finished(self, job_uid: str, worker: str, step: int) -> None: ...


def run_together(python: Sequence[str], pair: Pair, directory: Path) -> dict[str, Left]:
    """Run both workers, and return what each leaves."""
    cluster = Cluster()
    directory.mkdir(parents=True)
    (directory / "token").write_text("secret")
    with StandaloneCoordinator(cluster, limits=LIMITS) as coordinator:
        coordinator.call(lambda service: service.open(JOB, "secret"))
        coordinator.call(lambda service: service.set_target(JOB, list(WORKERS)))
        running = {}
        for worker in WORKERS:
            environment = {
                "JOB_NAME": JOB, "ELASTIC_COORDINATOR": coordinator.url(JOB), "ELASTIC_WORKER_ID": worker,
                "ELASTIC_TOKEN_FILE": f"{directory}/token", "ELASTIC_ERROR_FILE": f"{directory}/{worker}.error",
                "ELASTIC_STALL_S": "off", "ELASTIC_STOPPED_S": "off",
            }  # fmt: skip
            running[worker] = start(python, pair.of(worker).source(elastic=True), directory / worker, environment)
        codes = {}
        try:
            for worker in sorted(running, key=lambda worker: worker not in pair.ending):
                codes[worker] = running[worker].wait(TIMEOUT_S)
                coordinator.call(lambda service, worker=worker: service.worker_exited(JOB, worker))  # type: ignore[misc]
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    assert not [line for line in cluster.killed if line[:2] not in pair.ending], cluster.killed
    return {worker: left_in(directory / worker, codes[worker]) for worker in WORKERS}


def plain_of(pair: Pair, worker: str) -> Draft:
    """Return the script whose plain run is the measure.

    On a cluster SIGTERM is a request to leave: a worker that has finished goes on to its end, within its grace period,
    unless the script handles the signal by itself.
    """
    draft = pair.of(worker)
    if (
        draft.end[1] == "SIGTERM"
        and draft.end[0] in AFTER
        and not any(" term " in f" {name}" for _, name in draft.habits)
    ):
        return dataclasses.replace(draft, end=(parts.END, "returns"))
    return draft


def documented(pair: Pair, worker: str, plain: Left, elastic: Left) -> frozenset[str]:
    """Return what differs by design."""
    named: set[str] = set()
    place, end = pair.of(worker).end
    if end == "SIGTERM" and place not in {parts.START, parts.BEFORE_INIT, *AFTER}:
        named |= {"stdout", "stderr", "files"}  # it leaves at the end of its step
        named |= {"code"} if elastic.code == 0 else set()
    if "weights" not in plain.stdout and elastic.code == 2 and (plain.code == 0 or end.startswith("SystemExit")):
        named |= {"code", "stderr"}  # no step was trained
    return frozenset(named)


def compare(python: Sequence[str], pair: Pair, directory: Path) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (worker, what, plain, elastic) of all that differs."""
    elastic = run_together(python, pair, directory / "elastic")
    for worker in WORKERS:
        plain = run(python, plain_of(pair, worker).source(elastic=False), directory / f"plain-{worker}", {})
        for name in COMPARED - documented(pair, worker, plain, elastic[worker]):
            one, other = getattr(plain, name), getattr(elastic[worker], name)
            if one != other:
                yield worker, name, one, other
