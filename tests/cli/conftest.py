"""The command line as people use it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cli.main import COMMANDS
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from tests import forked, programs
from tests.conftest import EmbeddedCluster, running_cluster
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = str(Path(sys.executable).with_name("gpuquota"))
PACED_TRAINING = str(Path(__file__).parents[1] / "elastic_runtime" / "paced_training.py")

forked.preload("kfp_gpuquota.cli.main", *(f"kfp_gpuquota.cli.{name}" for name in COMMANDS))


@dataclass(frozen=True)
class Answer:
    """The output of a command."""

    code: int
    out: str
    err: str


def answer_of(done: forked.Completed) -> Answer:
    """Return the output of a command that ended without a traceback."""
    assert "Traceback" not in done.stderr, done.stderr
    return Answer(done.returncode, done.stdout, done.stderr)


class Cli:
    """`cli("list -o json")`, or `cli("submit", "x", "--", "sleep", "1")`."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.cluster = cluster
        self.environment = {**cluster.environment, "COLUMNS": "200", "NO_COLOR": "1"}

    def run(self, *words: str, cwd: Path | None = None) -> Answer:
        arguments = words[0].split() if len(words) == 1 else list(words)
        return answer_of(forked.run(programs.gpuquota, *arguments, environment=self.environment, cwd=cwd))

    def __call__(self, *words: str) -> str:
        """The output of a command that succeeds."""
        answer = self.run(*words)
        assert answer.code == 0, answer
        return answer.out

    def job(self, name: str, project: str) -> dict[str, Any]:
        """A job as `describe -o json` shows it."""
        described: dict[str, Any] = json.loads(self("describe", name, "-p", project, "-o", "json"))
        return described

    def await_gpus(self, project: str, **gpus: int) -> None:
        """Return when the jobs named hold so many GPUs (`_` in a name stands for `-`)."""
        wanted = {name.replace("_", "-"): count for name, count in gpus.items()}
        self.await_jobs(project, lambda held: all(held.get(name) == count for name, count in wanted.items()))

    def await_jobs(self, project: str, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """GPUs in running processes by job, as soon as `condition` holds for them."""
        held: dict[str, int] = {}

        def settled() -> bool:
            jobs = self.cluster.client.list_jobs(project).jobs
            held.clear()
            for job in jobs:
                held[job.spec.name] = sum(len(w.devices) for w in job.status.workers if w.phase == "Running")
            return condition(held) and all(w.phase in {"Running", "Gone"} for job in jobs for w in job.status.workers)

        until(settled, lambda: held)
        return held


@pytest.fixture
def cli(embedded_cluster: EmbeddedCluster) -> Cli:
    """On one node of 2 slots."""
    return Cli(embedded_cluster)


@pytest.fixture
def wide_cli(tmp_path: Path) -> Iterator[Cli]:
    """On four nodes of 10 slots."""
    with running_cluster(tmp_path / "home", ClusterConfig(nodes=4, gpus_per_node=10)) as cluster:
        yield Cli(cluster)


@pytest.fixture(autouse=True)
def no_configured_project(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GPUQUOTA_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def training(forked_python: tuple[str, ...]) -> tuple[str, ...]:
    """The end of a command line that submits a training."""
    return ("--", *forked_python, PACED_TRAINING, "100000")
