"""What ends while no controller runs has the same consequences as what a controller sees.

Each job has a twin whose workers end in the same way, one under a running controller and one without any.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.kubernetes.controlled import Controlled, is_over
from tests.kubernetes.installation import jobs_of
from tests.kubernetes.running_workers import RunningWorkers
from tests.polling import until

if TYPE_CHECKING:
    from pathlib import Path

JOBS = 8
ENDS = (None, None, 0, 1, 137)
"""Of a worker: it lives, it finishes, its program fails, it is killed."""
MOST_FAILURES = 1
"""Of a job: after two its end depends on whether the first one was replaced before the second one failed."""


class Twins:
    """The jobs of one team; `ends` has how the workers of each pair end."""

    def __init__(self, controlled: Controlled, folder: Path, ends: list[list[int | None]]) -> None:
        self.controlled, self.ends = controlled, ends
        self.workers = RunningWorkers(controlled.cluster, folder)
        controlled.on_close.append(self.workers.stop)
        controlled.add_nodes(1 + 6 * len(ends) // 8, gpus=8)
        self.team = controlled.team(guaranteed=8 * len(ends))

    def start(self) -> None:
        """Start all jobs, and wait until their first generations are stored."""
        for number, ends in enumerate(self.ends):
            for twin in ("seen", "unseen"):
                size = len(ends)
                self.controlled.job(self.team, f"{twin}{number}", gpus=size, gpusPerWorker=1, gracePeriodSeconds=1)
        self._until(lambda: all(len(self._status(name).get("ranks", ())) == len(ends) for name, ends in self._all()))

    def end(self, twin: str) -> None:
        """End the workers, those that finish first."""
        for number, ends in enumerate(self.ends):
            for index in sorted(range(len(ends)), key=lambda index: ends[index] or 0):
                if (code := ends[index]) is not None:
                    self._end(f"{twin}{number}-{index}", code)

    def until_alike(self) -> list[dict[str, Any]]:
        """Return what became of the jobs when it is the same for both twins of each."""
        self._until(lambda: self._found("seen") == self._found("unseen"))
        return self._found("seen")

    def until_seen(self) -> None:
        """Return when the controller has processed all ends of the first twins."""
        for number, ends in enumerate(self.ends):
            ended = {index for index, code in enumerate(ends) if code is not None}
            name = f"seen{number}"
            self._until(lambda name=name, ended=ended: self._processed(name, ended))

    def _processed(self, name: str, ended: set[int]) -> bool:
        status = self._status(name)
        return status["phase"] in {"Succeeded", "Failed"} or status["attempt"] > 1 or ended <= set(status["ended"])

    def _all(self) -> list[tuple[str, list[int | None]]]:
        return [(f"{twin}{number}", ends) for twin in ("seen", "unseen") for number, ends in enumerate(self.ends)]

    def _found(self, twin: str) -> list[dict[str, Any]]:
        kept = ("phase", "attempt", "restarts", "nextIndex", "exitCode", "workers")
        found = []
        for number in range(len(self.ends)):
            status = self._status(f"{twin}{number}")
            result = (status.get("resultWorker") or "").removeprefix(f"{twin}{number}-")
            found.append({"result": result, **{name: status.get(name) for name in kept}})
        return found

    def _status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self.controlled.cluster.api.get(f"{jobs_of(self.team)}/{name}").get("status", {})
        return status

    def _end(self, pod: str, code: int) -> None:
        path = f"/api/v1/namespaces/{self.team}/pods/{pod}"
        self.workers.workers[self.controlled.cluster.api.get(path)["metadata"]["uid"]].close()
        self.controlled.finish(path, code)

    def _until(self, condition: Any) -> None:
        def kept_running() -> object:
            for pod in self.controlled.pods(self.team).values():
                running = pod["status"].get("phase") == "Running" and not is_over(pod)
                if running and pod["metadata"]["uid"] not in self.workers.workers:
                    self.workers.start(pod)
            return condition()

        until(kept_running, lambda: f"{self._found('seen')}\n{self._found('unseen')}\n{self.controlled.log()[-4000:]}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_workers_that_end_while_no_controller_runs_are_judged_as_if_one_had_run(
    controlled: Controlled, tmp_path: Path, seed: int
) -> None:
    drawn = random.Random(seed)
    ends: list[list[int | None]] = []
    while len(ends) < JOBS:
        one = [drawn.choice(ENDS) for _ in range(drawn.choice((1, 2, 2, 3)))]
        if sum(bool(code) for code in one) <= MOST_FAILURES:
            ends.append(one)
    twins = Twins(controlled, tmp_path, ends)
    controlled.start()
    twins.start()
    twins.end("seen")
    twins.until_seen()
    controlled.kill()
    twins.end("unseen")
    controlled.start()
    found = twins.until_alike()
    assert {status["phase"] for status in found} == {"Running", "Succeeded", "Failed"}
    assert any(status["restarts"] for status in found)
