"""What scripts do beside the loop of the manual, on several workers: each works, or is named."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

import elastic_runtime
from elastic_runtime.membership.coordinator_client import WARN_AFTER_S, Away
from elastic_runtime.state.join_exchange import relay
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Gate, Plan, Points, Record, train, trained_alone
from tests.forked import preload
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from pathlib import Path

preload(__name__)


def loader_for(plan: Plan, index: int) -> DataLoader[Any]:
    """With a sampler that draws by a generator of its own, which each worker has elsewhere, where that is asked for."""
    data = Points(plan.samples)
    sampler = None
    if seed := plan.options.get("own_generator"):
        generator = torch.Generator().manual_seed(int(seed))
        torch.randperm(3 + index, generator=generator)
        sampler = SubsetRandomSampler(range(plan.samples), generator=generator)
    return DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)


class Remembered:
    """A counter of a script, such as the steps since the best loss."""

    best, steps = 1e9, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def scripted(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """Train. `plan.options` has the differences of this script from the documented one."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    asked = plan.options
    job = elastic_runtime.init(global_batch_size=16, max_batch_per_gpu=5)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    if asked.get("unfreezes"):
        model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = loader_for(plan, index)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    remembered = Remembered()
    job.track(remembered=remembered)
    record = Record(job, index, directory, optimizer, dict)
    if asked.get("warms_up"):

        @job.warm_up
        def once(batch: Any) -> torch.Tensor:
            (directory / f"warm-{index}").write_text(str(len(batch[0])))
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for epoch in job.epochs(plan.epochs):
        if asked.get("unfreezes") and epoch == 1:
            model[0].requires_grad_(requires_grad=True)
        for number, (x, y, indices) in enumerate(loader):
            if gate:
                gate.pass_through(index, job.step)
            if asked.get("slow") == index:
                time.sleep(0.04)
            record.computes(indices)
            job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            remembered.steps += job.applied
            job.report(loss=float("nan") if asked.get("reports_nan") else 0.5)
            if asked.get("leaves_early") == index and number == 5:
                break
        remembered.best = min(remembered.best, float(epoch % 2))
    torch.save(
        {"model": model.state_dict(), "step": job.step, "lr": [], "remembered": vars(remembered)},
        directory / f"final-{index}.pt",
    )


@pytest.mark.parametrize("asked", ["unfreezes", "own_generator", "warms_up"])
def test_a_joiner_goes_on_where_the_script_has_changed_what_it_trains(tmp_path: Path, asked: str) -> None:
    """It has not seen the epoch in which layers were unfrozen; its sampler's generator is elsewhere; it has computed a
    step before, which changes nothing. It has the script's counter.
    """
    plan = Plan(body=scripted, options={asked: 5}, epochs=4)
    reference = trained_alone(scripted, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, step=30)
        cluster.resize(0, 1, 2, up_to=40)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        cluster.check_result(reference)
        assert [final["remembered"] for final in cluster.finals().values()] == [reference["remembered"]] * 3
    warmed = {path.name: path.read_text() for path in tmp_path.glob("warm-*")}
    assert warmed == ({f"warm-{index}": "4" for index in range(3)} if asked == "warms_up" else {})


def test_a_loss_that_is_no_number_does_not_cut_the_worker_off(tmp_path: Path) -> None:
    with Cluster(tmp_path, Plan(body=scripted, options={"reports_nan": 1})) as cluster:
        cluster.start(0, 1)
        until(lambda: cluster.progress, "progress")
        cluster.resize(0, 1, 2, up_to=20)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        assert cluster.progress[-1].metrics == {}
        assert "job.report: loss is nan at step" in cluster.logs()
        rows = [json.loads(row) for row in (tmp_path / "report-0.jsonl").read_text().splitlines()]
        assert {row["loss"] for row in rows if row["event"] == "metrics"} == {"nan"}


def test_a_slow_worker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(body=scripted, options={"slow": 1}, epochs=16)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2, step=1)
        cluster.let_go()
        received = until(lambda: next((p for p in cluster.progress if p.stragglers), None), "a straggler")
        assert list(received.stragglers) == ["w1"]
        assert received.stragglers["w1"] > 1.2
        assert (received.step_ms or 0) > 20
        cluster.wait_for_end(0, 1, 2)
        rows = [json.loads(row) for row in (tmp_path / "report-0.jsonl").read_text().splitlines()]
        waited = [row["wait_ms"] for row in rows if row["event"] == "steps"]
        assert max(waited) > 10


def test_workers_at_different_steps_are_told_so(tmp_path: Path) -> None:
    plan = Plan(body=scripted, options={"leaves_early": 1}, epochs=2)
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1)
        for worker in ("w0", "w1"):
            cluster.processes[worker].join(TIMEOUT_S)
        assert {cluster.processes[worker].exitcode for worker in ("w0", "w1")} == {2}
        assert "the workers are not at the same step" in cluster.logs()


def test_three_others_begin_with_the_state_of_the_first(tmp_path: Path) -> None:
    """The state is sent to the second worker, and from both to the others."""
    reference = trained_alone(train, Plan(), tmp_path / "alone")
    with Cluster(tmp_path) as cluster:
        cluster.start(0, 1, 2, 3)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2, 3)
        cluster.check_result(reference)
        for worker in range(1, 4):
            rows = [json.loads(row) for row in (tmp_path / f"report-{worker}.jsonl").read_text().splitlines()]
            joined = next(row for row in rows if row["event"] == "resize")
            assert joined["cause"] == "join"
            assert joined["prepare_ms"] > 0
            assert {"load", "wait", "meet", "state", "adopt"} <= set(joined["phases_ms"])


@pytest.mark.parametrize(("behind", "rounds"), [([1], 1), ([1, 2], 2), ([0, 2, 3], 2), ([1, 2, 3, 4, 5, 6, 7], 3)])
def test_a_state_reaches_n_joiners_in_about_log_n_transfers(behind: list[int], rounds: int) -> None:
    source = next(rank for rank in range(9) if rank not in behind)
    has_it_after = {source: 0}
    busy_until: dict[int, int] = {}
    for sender, to in relay(source, behind):
        at = max(has_it_after[sender], busy_until.get(sender, 0)) + 1
        has_it_after[to] = busy_until[sender] = busy_until[to] = at
    assert set(has_it_after) == {source, *behind}
    assert max(has_it_after.values()) == rounds


# A coordinator that is not one


class Garbage:
    """Answers each connection with something else, where the coordinator is expected."""

    ANSWERS = (
        b"\x00\xff\x13 this is not HTTP\r\n\r\n",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[]\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n42\n\n\r\n",
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{"order": "Dance", "gener',
        b"HTTP/1.1 200 OK\r\n" + b"X" * 70_000,
    )

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1/membership/job"
        self.answered = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(self.ANSWERS[self.answered % len(self.ANSWERS)])
                self.answered += 1

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def test_training_goes_on_while_the_coordinator_answers_garbage_and_grows_when_it_is_back(tmp_path: Path) -> None:
    plan = Plan()
    reference = trained_alone(train, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        garbage = Garbage()
        cluster.coordinator.__exit__(None, None, None)
        ended: Any = contextlib.nullcontext()
        cluster.coordinator = ended
        (tmp_path / "address.new").write_text(garbage.address)
        (tmp_path / "address.new").rename(tmp_path / "address")
        cluster.hold_at(12)
        cluster.wait_until_at(12, 0, 1)
        until(lambda: garbage.answered >= 2 * len(Garbage.ANSWERS), "each answer, to each worker")
        garbage.close()
        cluster.restart_coordinator()
        cluster.resize(0, 1, 2, up_to=25)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        cluster.check_result(reference)


def test_a_coordinator_that_is_long_away_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    away = Away(lambda: now)
    for _ in range(4):
        away.note("connection refused")
        now += WARN_AFTER_S / 2
    away.end()
    away.end()
    away.note("connection refused")
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "the coordinator has been away for 10 s",
        "the coordinator is there again",
    ]
