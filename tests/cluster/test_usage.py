"""What projects borrowed, read off the history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, JobStatus, Order, Phase, Project, Worker, WorkerPhase
from kfp_gpuquota.api.job import USER_LABEL
from kfp_gpuquota.api.wire import Event, EventKind
from kfp_gpuquota.cluster.local.devices import ClusterConfig, discover_nodes
from kfp_gpuquota.cluster.local.storage.recalled_usage import recalled
from kfp_gpuquota.cluster.local.storage.state import ClusterState
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
from kfp_gpuquota.scheduler.state.usage import key_of, used_by
from tests.conftest import EmbeddedCluster, running_cluster
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

PROJECTS = {
    "department": Project(name="department", guaranteed=2),
    "a": Project(name="a", guaranteed=1, parent="department"),
    "b": Project(name="b"),
}
LONG = 1e12
HALF_LIFE_S = 3600.0


def change(at: float, gpus: float, project: str = "a") -> Event:
    kind = EventKind.WORKER_STARTED if gpus > 0 else EventKind.WORKER_GONE
    return Event(revision=0, at=at, kind=kind, project=project, gpus=gpus)


def borrowed(*history: Event, now: float, half_life_s: float = LONG) -> dict[str, float]:
    events = recalled(history, PROJECTS, now, half_life_s)
    return {event.project: round(event.gpu_seconds, 3) for event in events}


def test_only_what_is_above_the_guarantee_is_borrowed_at_every_level() -> None:
    history = [change(0.0, 4), change(100.0, -4), change(0.0, 0.5, "b"), change(10.0, -0.5, "b")]
    assert borrowed(*history, now=1000.0) == pytest.approx({"department": 200.0, "a": 300.0, "b": 5.0}, rel=1e-3)


def test_what_still_runs_counts_until_now_and_old_usage_fades() -> None:
    assert borrowed(change(0.0, 2, "b"), now=50.0)["b"] == pytest.approx(100.0, rel=1e-3)
    faded = borrowed(change(0.0, 2, "b"), change(1.0, -2, "b"), now=1001.0, half_life_s=1000.0)
    assert faded["b"] == pytest.approx(1.0, rel=1e-2)


def test_what_users_used_is_by_project_and_user() -> None:
    history = [
        msgspec.structs.replace(change(at, gpus, project), user=user)
        for at, gpus, project, user in (
            (0.0, 2, "a", "ann"),
            (50.0, -2, "a", "ann"),
            (0.0, 1, "b", "ann"),
            (90.0, 1, "a", ""),
        )
    ]
    events = {event.project: event.users for event in recalled(history, PROJECTS, 100.0, LONG)}
    assert events["a"] == pytest.approx({key_of("a", "ann"): 100.0, key_of("a", ""): 10.0}, rel=1e-3)
    assert events["b"] == pytest.approx({key_of("b", "ann"): 100.0}, rel=1e-3)


def test_a_worker_whose_start_names_no_user_or_was_deleted_takes_nothing_from_one() -> None:
    """The daemon of an earlier version wrote the start, or it is older than what is kept."""

    def entry(at: float, gpus: float, user: str, worker: str) -> Event:
        return msgspec.structs.replace(change(at, gpus), user=user, worker=worker)

    upgraded = [entry(0.0, 2, "", "old"), entry(50.0, -2, "ann", "old")]
    kept = [entry(50.0, -2, "ann", "older"), entry(60.0, 1, "ann", "new")]
    (a,) = (event.users for event in recalled([*upgraded, *kept], PROJECTS, 100.0, LONG) if event.project == "a")
    assert a == pytest.approx({key_of("a", ""): 100.0, key_of("a", "ann"): 40.0}, rel=1e-3)


def test_a_project_that_is_gone_is_left_out() -> None:
    assert set(borrowed(change(0.0, 2, "gone"), now=1.0)) == set(PROJECTS)


def sizes(cluster: EmbeddedCluster) -> tuple[float, float]:
    allocated = {view.project.name: view.allocated for view in cluster.client.list_projects()}
    return allocated["team-a"], allocated["team-b"]


def test_who_borrowed_yields_to_who_did_not_also_after_the_daemon_was_killed(tmp_path: Path) -> None:
    """A borrowed both GPUs for a while; B, which never did, then has both, and not one of them."""
    config = ClusterConfig(gpus_per_node=2, usage_half_life_s=3600.0)
    with running_cluster(tmp_path / "home", config) as cluster:
        for team in ("team-a", "team-b"):
            cluster.project(team, 0)
        for name in ("a1", "a2"):
            cluster.submit(name, project="team-a")
            cluster.wait_for_phase(name, "Running", "team-a")
        cluster.kill_daemon()
        for name in ("b1", "b2"):
            cluster.submit(name, project="team-b")
        deadline = time.monotonic() + TIMEOUT_S
        while sizes(cluster) != (0, 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sizes(cluster) == (0, 2)


def test_users_of_a_project_take_turns_also_after_the_daemon_was_killed(tmp_path: Path) -> None:
    """Ann's job has used all GPUs for seconds: Bob's, which was submitted later, comes before her next one."""
    config = ClusterConfig(gpus_per_node=8, usage_half_life_s=300.0)
    with running_cluster(tmp_path / "home", config) as cluster:
        cluster.client.create_project(Project(name="team-a", guaranteed=8, order=Order.FAIR_USERS))
        ann, bob = ({USER_LABEL: user} for user in ("ann", "bob"))
        cluster.submit("a1", gpus=8, labels=ann)
        cluster.wait_for_phase("a1", "Running", "team-a")
        cluster.submit("a2", gpus=8, labels=ann)
        cluster.submit("b1", gpus=8, labels=bob)
        job = cluster.wait_for("a2", lambda job: job.status.reason is not None and "bob" in job.status.reason.message)
        assert job.status.reason is not None
        assert "; user ann uses 8 of the 8 GPUs of team-a" in job.status.reason.message
        assert job.status.reason.message.endswith("so bob's job b1 comes first")
        cluster.kill_daemon()
        cluster.client.delete_job("team-a", "a1")
        cluster.wait_for_phase("b1", "Running", "team-a")
        assert cluster.job("a2").status.phase is Phase.PENDING


class Restarted:
    """A store whose state is opened again as after a restart. Each job has one GPU, which its team borrows."""

    def __init__(self, path: Path) -> None:
        self.store, self.now = Store(path), 0.0
        self.state = self.opened()
        self.state.commit(Change(projects={name: Project(name=name) for name in ("a", "b")}))

    def opened(self) -> ClusterState:
        nodes = discover_nodes(ClusterConfig(gpus_per_node=8))
        return ClusterState(self.store, nodes, HALF_LIFE_S, clock=lambda _: lambda: self.now)

    def start(self, name: str, project: str, at: float) -> None:
        """Start a job of the project."""
        self.now = at
        spec = JobSpec(name=name, project=project, command=("true",), gpus=1)
        job = JobRecord(uid=name, spec=spec, request_id=name, status=JobStatus(phase=Phase.RUNNING), attempt=1)
        node, device = next(iter(self.state.nodes)), len(self.state.workers)
        worker = Worker(id=f"{name}-0", job_uid=name, index=0, node=node, devices=(device,), started_at=at)
        record = WorkerRecord(worker=worker, attempt=1)
        started = msgspec.structs.replace(change(at, 1, project), worker=worker.id)
        self.state.commit(Change(jobs={name: job}, workers={worker.id: record}, events=[started]))

    def end(self, name: str, at: float) -> None:
        """End the job's worker."""
        self.now = at
        before = self.state.workers[f"{name}-0"]
        worker = msgspec.structs.replace(before.worker, phase=WorkerPhase.GONE)
        gone = msgspec.structs.replace(change(at, -1, self.state.jobs[name].spec.project), worker=worker.id)
        records = {worker.id: msgspec.structs.replace(before, worker=worker)}
        self.state.commit(Change(workers=records, events=[gone]))

    def run(self, statement: str) -> None:
        with self.store.transaction():
            self.store._db.execute(statement)

    def used(self, state: ClusterState) -> dict[str, float]:
        queues = state.scheduler.ledger.queues
        return {name: round(used_by(queues[name], self.now, HALF_LIFE_S), 3) for name in ("a", "b")}


def test_after_an_upgrade_what_was_used_is_stored_of_one_project_and_computed_of_the_others(tmp_path: Path) -> None:
    old = Restarted(tmp_path / "state.db")
    old.start("a1", "a", 1000.0)
    old.start("b1", "b", 1000.0)
    old.end("b1", 1500.0)
    old.run("DELETE FROM meta WHERE key GLOB 'past-use/*'")  # an earlier version stored nothing
    old.now = 2000.0
    old.state = old.opened()
    before = old.used(old.state)
    old.start("a2", "a", 2000.0)
    assert old.used(old.opened()) == before


def test_what_was_stored_before_an_earlier_version_ran_for_a_while_does_not_count(tmp_path: Path) -> None:
    both = Restarted(tmp_path / "state.db")
    both.start("a1", "a", 1000.0)
    before = both.store.load_past_use()
    both.start("a2", "a", 2000.0)
    both.now = 3000.0
    expected = both.used(both.state)
    with both.store.transaction():
        for event in before:  # as the earlier version left it
            both.store.save_past_use(event)
    assert both.used(both.opened()) == pytest.approx(expected, abs=1.0)


def test_what_cannot_be_read_of_past_use_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Restarted(tmp_path / "state.db")
    kept.start("a1", "a", 1000.0)
    kept.now = 2000.0
    kept.run("UPDATE meta SET value = '{' WHERE key GLOB 'past-use/a@'")
    assert kept.used(kept.opened()) == pytest.approx(kept.used(kept.state), abs=1.0)
    assert "past-use/a@ cannot be read" in caplog.text
