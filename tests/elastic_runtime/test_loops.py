"""What training loops have: several optimizers, averaged weights, batch samplers, steps without epochs, callbacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import elastic_runtime
from elastic_runtime.errors import LoopError
from elastic_runtime.state.packing import pack
from elastic_runtime.state.training_state import TrainingState
from tests.elastic_runtime.harness import JOB, Cluster
from tests.elastic_runtime.training import Plan, Points
from tests.standalone_coordinator import StandaloneCoordinator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.membership import AnnounceCommit

DATA = Points(50)


def small(**options: Any) -> tuple[Any, nn.Linear]:
    return elastic_runtime.init(**options), nn.Linear(12, 3)


def test_several_optimizers_and_schedulers_act_once_a_step() -> None:
    job, model = small(global_batch_size=8, max_batch_per_gpu=3)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    _, returned, loader, _ = job.prepare(model, optimizers, DataLoader(DATA, batch_size=8), schedulers)
    assert returned is optimizers
    for _epoch in job.epochs(1):
        for x, _y, _i in loader:
            job.backward(model(x).mean())
            for each in (*optimizers, *schedulers):
                each.step()
            model.zero_grad()
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.1 * 0.5**7] * 2


def test_averaged_weights_are_carried_along_and_updated_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))

    def run(epochs: int) -> tuple[AveragedModel, int]:
        torch.manual_seed(0)
        job, model = small(global_batch_size=8, max_batch_per_gpu=3, checkpoint_every_s=1e-9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=8))
        average, applied = AveragedModel(model), 0
        job.track(average=average)
        for _epoch in job.epochs(epochs):
            for x, _y, _i in loader:
                job.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
                applied += job.applied
        return average, applied

    assert run(1)[1] == 7
    average, more = run(2)  # from the newest checkpoint on
    assert average.n_averaged == 14
    assert more < 14


def test_each_batch_of_a_batch_sampler_is_a_step() -> None:
    class Pairs(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([int(i), int(i) + 1] if i % 4 else [int(i)] for i in RandomSampler(range(25)))

        def __len__(self) -> int:
            return 25

    job, model = small(max_batch_per_gpu=1, seed=7)
    loader = DataLoader(DATA, batch_sampler=Pairs(RandomSampler(DATA), 2, drop_last=False))
    model, _optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    steps: dict[int, list[int]] = {}
    for _epoch in job.epochs(2):
        for x, _y, indices in loader:
            steps.setdefault(job.step, []).extend(indices.tolist())
            job.backward(model(x).mean())
            model.zero_grad()
    assert len(loader) == 25
    assert sorted(map(len, steps.values())) == [1] * 14 + [2] * 36
    assert [steps[k] for k in range(25)] != [steps[k] for k in range(25, 50)]


def test_steps_go_on_over_epochs_and_stop_in_the_middle_of_one() -> None:
    job, model = small(global_batch_size=16, max_batch_per_gpu=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer, DataLoader(DATA, batch_size=16))
    samples = 0
    for x, _y, _i in job.steps(6):
        samples += len(x)
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert job.step == 6
    assert samples == 50 + 2 * 16


def test_callbacks_hear_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))
    job, model = small(global_batch_size=25, checkpoint_every_s=1e-9)
    events: list[dict[str, Any]] = []
    job.on_checkpoint(events.append)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=25))
    for x, _y, _i in job.steps(2):
        job.backward(model(x).mean())
        model.zero_grad()
    assert events
    assert events[0]["step"] == 1


def test_what_is_tracked_is_said_before_the_loop() -> None:
    job, model = small(global_batch_size=25)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=25))
    for x, _y, _i in job.steps(1):
        job.backward(model(x).mean())
    with pytest.raises(LoopError, match=r"job\.track comes before"):
        job.track(average=AveragedModel(model))


def test_every_optimizer_is_rehearsed() -> None:
    model = nn.Linear(3, 2)
    state = TrainingState(model, [(n, torch.optim.Adam([p])) for n, p in model.named_parameters()])
    state.rehearse()
    assert len(pack(state.capture())[1]) == 2 + 2 * 3
    state.forget_rehearsal()
    assert len(pack(state.capture())[1]) == 2


class Notes:
    """The reports to the cluster."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.sizes: list[int] = []

    def generation_reserved(self, job_uid: str, generation: int) -> None: ...

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        self.sizes.append(len(commit.members))

    def worker_released(self, job_uid: str, worker: str, step: int) -> None: ...

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None: ...

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None: ...

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        self.finished.append(step)


SCRIPT = """
import sys, torch, elastic_runtime
from torch.utils.data import DataLoader, TensorDataset
job = elastic_runtime.init(global_batch_size=4)
resizes = []
job.on_resize(resizes.append)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=4))
for epoch in job.epochs(10):
    for x, in loader:
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    if epoch == 1:
        END
assert [r["cause"] for r in resizes] == ["join"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code", "finished"), [("break", 0, [20]), ("raise ValueError(1)", 1, [])])
def test_a_loop_left_by_break_has_finished_when_the_process_ends_well(
    tmp_path: Path, end: str, code: int, finished: list[int]
) -> None:
    notes = Notes()
    (tmp_path / "token").write_text("secret")
    with StandaloneCoordinator(notes) as coordinator:
        coordinator.call(lambda service: service.open(JOB, "secret"))
        coordinator.call(lambda service: service.set_target(JOB, ["w0"]))
        environment = {
            **os.environ,
            "ELASTIC_COORDINATOR": coordinator.url(JOB),
            "ELASTIC_TOKEN_FILE": str(tmp_path / "token"),
            "ELASTIC_WORKER_ID": "w0",
        }
        script = SCRIPT.replace("END", end)
        ended = subprocess.run([sys.executable, "-c", script], env=environment, check=False, capture_output=True)
    assert ended.returncode == code, ended.stderr.decode()
    assert notes.finished == finished


def test_a_memory_limit_is_followed_between_two_steps_with_the_same_global_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, mailbox = tmp_path / "device", tmp_path / "mailbox"
    (device / "processes").mkdir(parents=True)
    mailbox.mkdir()
    (device / "total_mib").write_text("1000")
    monkeypatch.setenv("ELASTIC_SIMULATED_DEVICES", str(device))
    monkeypatch.setenv("ELASTIC_MEMORY_DIR", str(mailbox))

    def set_limit(mib: int) -> None:
        (mailbox / "new").write_text(json.dumps({"limit_mib": mib}))
        (mailbox / "new").rename(mailbox / "limit.json")

    set_limit(800)
    job, model = small(global_batch_size=10, max_batch_per_gpu=8)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=10))
    sizes: dict[int, list[int]] = {}
    held = {}
    for x, _y, _i in job.steps(12):
        sizes.setdefault(job.step, []).append(len(x))
        held[job.step] = sum(int(p.read_text()) for p in (device / "processes").glob("*-*"))
        if job.step == 3:
            set_limit(250)
        if job.step == 7:
            set_limit(800)
        job.backward(model(x).mean())
        model.zero_grad()
    assert [sizes[k] for k in (3, 4, 7, 8)] == [[5, 5], [1] * 10, [1] * 10, [5, 5]]
    assert {sum(step) for step in sizes.values()} == {10}
    assert [held[k] for k in (3, 4, 7, 8)] == [800, 250, 250, 800]
    assert json.loads((mailbox / "usage.json").read_text()) == {"follows_mib": 800, "wanted_mib": None}


def test_an_exact_training_says_that_it_cannot_yield(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "total_mib").write_text("1000")
    (tmp_path / "limit.json").write_text('{"limit_mib": 800}')
    monkeypatch.setenv("ELASTIC_SIMULATED_DEVICES", str(tmp_path))
    monkeypatch.setenv("ELASTIC_MEMORY_DIR", str(tmp_path))
    try:
        job, model = small(global_batch_size=10, reduction="exact", shards=2)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=10))
        for x, _y, _i in job.steps(3):
            (tmp_path / "limit.json").write_text('{"limit_mib": 250}')
            job.backward(model(x).mean())
            model.zero_grad()
            assert len(x) == 5
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert "this worker cannot yield" in caplog.text


def train_asking_for_its_place(plan: Plan, index: int, directory: Path, gate: Any) -> None:
    """What scripts ask for, where they ask for it; a wrong answer ends the worker."""
    torch.set_num_threads(1)
    job, model = small(global_batch_size=plan.global_batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=plan.global_batch))
    assert not job.is_leader
    for _epoch in job.epochs(plan.epochs):
        for x, _y, _i in loader:
            before = job.step
            if gate:
                gate.pass_through(index, before)
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            assert (job.step, job.position.step) == (before, before + 1)
            assert job.is_leader == (job.rank == 0)
            assert job.mean(job.rank) == (job.world_size - 1) / 2
            assert torch.distributed.get_world_size() == job.world_size
            ones = torch.ones(1)
            torch.distributed.all_reduce(ones)
            assert float(ones) == job.world_size
    torch.save({"model": model.state_dict(), "step": job.step}, directory / f"final-{index}.pt")


def test_step_leader_mean_and_the_default_group_are_right_with_one_worker_and_with_two(tmp_path: Path) -> None:
    with Cluster(tmp_path, Plan(body=train_asking_for_its_place, epochs=2)) as cluster:
        cluster.start(0, step=2)
        cluster.resize(0, 1, up_to=5)
        cluster.wait_until_at(5, 0, 1)
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        first, second = cluster.finals().values()
        assert first["step"] == second["step"]
        torch.testing.assert_close(first["model"], second["model"])
