"""Real elastic trainings within random histories of the embedded cluster, and what must be true of their ends."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.api import Phase
from tests.cluster import counting_training
from tests.cluster.counting_training import STEPS

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.api import Job

MOST = 2  # trainings of one history
UNHEARD_S = 5.0
"""A worker that has ended waits for so long until its last report is read; its result does not depend on it."""


@dataclass
class Trainings:
    """Where trainings write their results. `expected`: the checksum of an undisturbed one."""

    python: tuple[str, ...]
    """What begins the command of a script, in place of the interpreter."""
    results: Path
    expected: str
    faults: int = 0
    """Kills, restarts and shortages of the history so far, by which alone a training may fail."""
    uids: set[str] = field(default_factory=set)

    @property
    def command(self) -> tuple[str, ...]:
        """The command of a worker."""
        return (*self.python, counting_training.__file__, str(self.results))

    def is_one(self, job: Job) -> bool:
        """Whether the job is one of them."""
        return tuple(job.spec.command) == self.command

    def results_of(self, uid: str) -> list[dict[str, Any]]:
        """What its workers have written at their ends."""
        file = self.results / f"{uid}.jsonl"
        return [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else []

    def check(self, jobs: list[Job]) -> None:
        """AssertionError unless each ended training is at its true step with its true state, or failed by a fault."""
        right = {"step": STEPS, "counted": [1.0], "sha256": self.expected}
        for file in self.results.glob("*.jsonl"):  # also of jobs that were deleted or cancelled meanwhile
            for result in self.results_of(file.stem):
                found = {name: result[name] for name in right}
                assert found == right, (file.stem, result)
        for job in filter(self.is_one, jobs):
            status = job.status
            if status.phase is Phase.SUCCEEDED:
                assert self.results_of(job.uid), f"{job.spec.name} succeeded without a result: {status}"
                assert status.progress is not None, f"{job.spec.name} succeeded without a report: {status}"
                silent_s = (status.finished_at or 0.0) - status.progress.at
                told = silent_s < UNHEARD_S  # else the daemon may have been away for all the time that it waits
                assert status.progress.step == STEPS or not told, f"{job.spec.name} succeeded elsewhere: {status}"
            elif status.phase is Phase.FAILED:
                explained = status.reason is not None and "signal 9" in status.reason.message and self.faults > 0
                assert explained, f"{job.spec.name} failed without a fault: {status}"


def undisturbed(results: Path) -> str:
    """Return the checksum of the parameters that one worker alone ends with."""
    counting_training.train(results, pace_s=0.0)
    (row,) = (results / "alone.jsonl").read_text().splitlines()
    checksum: str = json.loads(row)["sha256"]
    return checksum
