"""Loops for TorchTrainer, as they are, in workers of an elastic job."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray")

import torch

from tests.forked import Program, run
from tests.polling import TIMEOUT_S, until
from tests.ray import unmodified_loops
from tests.ray.unmodified_loops import EPOCHS, SAMPLES
from tests.standalone_coordinator import StandaloneCoordinator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.membership import AnnounceCommit

JOB = "job"


class Workers:
    """Forked workers of one job, and what its coordinator has committed."""

    def __init__(self, directory: Path, loop: str, least: int = 1, epochs: int = EPOCHS) -> None:
        self.directory = directory
        self.arguments = (str(directory), loop, str(least), str(epochs))
        self.sizes: list[int] = []
        self.running: dict[str, Program] = {}
        self.coordinator = StandaloneCoordinator(self)
        (directory / "token").write_text("secret")

    def generation_reserved(self, job_uid: str, generation: int) -> None: ...

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        if commit.complete:
            self.sizes.append(len(commit.members))

    def worker_released(self, job_uid: str, worker: str, step: int) -> None: ...

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None: ...

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None: ...

    def training_finished(self, job_uid: str, worker: str, step: int) -> None: ...

    @contextlib.contextmanager
    def opened(self, **options: Any) -> Iterator[None]:
        """Open the job, and let the workers end once the block has."""
        with self.coordinator as coordinator:
            coordinator.call(lambda service: service.open(JOB, "secret", **options))
            try:
                yield
                for worker in list(self.running):
                    self.end(worker)
            finally:
                for program in self.running.values():
                    program.kill()
                    program.wait()

    def resize(self, *numbers: int) -> None:
        """Train with these workers from some step on; return when they do, and the others have ended."""
        target = [f"w{number}" for number in numbers]
        for worker in target:
            self._start(worker)
        self.coordinator.call(lambda service: service.set_target(JOB, target))
        until(lambda: self.sizes[-1:] == [len(target)], lambda: f"{len(target)} workers, seen {self.sizes}{self.log()}")
        for worker in self.running.keys() - set(target):
            self.end(worker)

    def end(self, worker: str) -> None:
        """Wait for a worker's end, which must be a good one."""
        assert self.running.pop(worker).wait(TIMEOUT_S) == 0, self.log()
        self.coordinator.call(lambda service: service.worker_exited(JOB, worker))

    def kill(self, worker: str) -> None:
        """Lose a worker."""
        program = self.running.pop(worker)
        program.kill()
        program.wait()
        self.coordinator.call(lambda service: service.worker_exited(JOB, worker))

    def log(self) -> str:
        """What the workers have written."""
        return "".join(f"\n{file.name}: {file.read_text()[-2000:]}" for file in self.directory.glob("log-*"))

    def _start(self, worker: str) -> None:
        if worker in self.running:
            return
        environment = {
            **os.environ,
            "JOB_NAME": JOB,
            "JOB_UUID": self.arguments[-1],
            "ELASTIC_COORDINATOR": self.coordinator.url(JOB),
            "ELASTIC_TOKEN_FILE": str(self.directory / "token"),
            "ELASTIC_WORKER_ID": worker,
        }
        with (self.directory / f"log-{worker}").open("w") as log:
            self.running[worker] = Program(
                unmodified_loops.main, *self.arguments, stdout=log.fileno(), stderr=log.fileno(),
                environment=environment, cwd=self.directory,
            )  # fmt: skip


@pytest.mark.slow
def test_an_unmodified_loop_trains_each_sample_once_an_epoch_through_two_one_and_three_workers(tmp_path: Path) -> None:
    workers = Workers(tmp_path, "train")
    with workers.opened():
        workers.resize(0, 1)
        workers.resize(0)
        workers.resize(0, 2, 3)
        (tmp_path / "go").touch()

    seen = Counter(line for file in tmp_path.glob("seen-*") for line in file.read_text().splitlines())
    assert seen == Counter(f"{epoch} {number}" for epoch in range(EPOCHS) for number in range(SAMPLES))
    models = [torch.load(file) for file in tmp_path.glob("model-*")]
    assert len(models) == 3
    assert all(torch.equal(model[name], models[0][name]) for model in models for name in model)
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert [(each["epoch"], each["evaluated"]) for each in reports] == [(epoch, SAMPLES) for epoch in range(EPOCHS)]
    assert {each["rate"] for each in reports} == {1e-3}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["with_samplers", "with_lightning", "with_transformers"])
def test_an_unmodified_loop_trains_one_model_on_two_workers(loop: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path, loop, least=2)
    with workers.opened(min_workers=2):
        workers.resize(0, 1)
    first, second = (torch.load(file) for file in tmp_path.glob("model-*"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert len(reports) == 3
    assert all(each.get("evaluated", SAMPLES) == SAMPLES for each in reports)


@pytest.mark.slow
def test_accelerate_continues_at_a_checkpoint_and_through_sizes_and_a_loss_trains_the_model_of_one_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "go").touch()
    before = Workers(tmp_path, "with_accelerate", epochs=2)
    with before.opened():
        before.resize(0)
    (tmp_path / "go").unlink()
    workers = Workers(tmp_path, "with_accelerate", epochs=6)
    with workers.opened():
        workers.resize(1, 2)
        workers.resize(1)
        workers.resize(1, 3)
        workers.kill("w3")  # not rank 0, which records: killed before it has, its report is lost
        workers.resize(1)
        workers.resize(1, 4)
        (tmp_path / "go").touch()
    run(unmodified_loops.accelerate_alone, str(tmp_path), "6")

    alone = torch.load(tmp_path / "model-alone")
    for worker in ("w1", "w4"):
        trained = torch.load(tmp_path / f"model-{worker}")
        assert all(torch.allclose(trained[name], alone[name], atol=1e-6) for name in alone)
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert [(each["epoch"], each["evaluated"]) for each in reports] == [(epoch, SAMPLES) for epoch in range(6)]
    assert [each["rate"] for each in reports] == pytest.approx([0.01 * 0.9 ** (epoch + 1) for epoch in range(6)])
