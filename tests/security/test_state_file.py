"""The state file: what is refused leaves no trace, what is damaged does not keep the rest away, and copies work."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pytest
from typer.testing import CliRunner

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import JobSpec, JobStatus, Phase, Project
from kfp_gpuquota.cli.main import application
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.start import await_stop
from kfp_gpuquota.cluster.local.storage.database import MIGRATIONS, SCHEMA_VERSION, back_up, restore, salvage
from kfp_gpuquota.cluster.local.storage.retention import outdated
from kfp_gpuquota.cluster.local.storage.state import ClusterState
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.records import JobRecord, Owner
from kfp_gpuquota.errors import ConflictError, InvalidFieldError, StateFileError
from tests.conftest import running_cluster
from tests.polling import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import EmbeddedCluster


def row(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement, values)


def stop(cluster: EmbeddedCluster) -> None:
    cluster.client.stop_cluster()
    await_stop(cluster.home)


# What is refused


def test_a_circle_of_departments_is_refused_and_the_cluster_starts_again(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("top", 1)
    embedded_cluster.project("middle", 1, parent="top")
    embedded_cluster.project("low", 1, parent="middle")
    with pytest.raises(InvalidFieldError, match="their own departments: top -> low -> middle -> top"):
        embedded_cluster.client.set_project(Project(name="top", guaranteed=1, parent="low"))
    embedded_cluster.kill_daemon()
    assert embedded_cluster.client.get_project("top").project.parent is None


def test_departments_nest_so_many_levels_and_no_more(embedded_cluster: EmbeddedCluster) -> None:
    parent = None
    for level in range(16):
        embedded_cluster.project(f"level-{level}", 0, parent=parent)
        parent = f"level-{level}"
    with pytest.raises(InvalidFieldError, match="nest at most 16 levels deep"):
        embedded_cluster.project("level-16", 0, parent=parent)
    embedded_cluster.project("above", 0)
    with pytest.raises(InvalidFieldError, match="nest at most 16 levels deep"):
        embedded_cluster.client.set_project(Project(name="level-0", parent="above"))


def test_what_the_scheduler_refuses_is_not_stored_and_nothing_else_suffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "state.db")
    state = ClusterState(store, ())
    state.commit(Change(projects={"a": Project(name="a")}))

    def refuse(*_: object) -> None:
        raise RecursionError("too deep")

    with monkeypatch.context() as patched:
        patched.setattr(type(state.scheduler), "apply", refuse)
        patched.setattr(state, "_rebuild_scheduler", lambda: None)
        with pytest.raises(ConflictError, match="too deep"):
            state.commit(Change(projects={"b": Project(name="b")}))
    state._rebuild_scheduler()
    state.commit(Change(projects={"c": Project(name="c")}))
    assert sorted(state.projects) == sorted(state.scheduler.projects) == ["a", "c"]
    store.close()
    assert [project.name for project in Store(tmp_path / "state.db").load_projects()] == ["a", "c"]


# What cannot be loaded


@pytest.mark.parametrize("half_life_s", [None, 3600.0])
def test_a_job_that_the_scheduler_refuses_is_set_aside_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_life_s: float | None
) -> None:
    store = Store(tmp_path / "state.db")
    state = ClusterState(store, (), half_life_s)
    state.commit(Change(projects={"a": Project(name="a")}))
    for name in ("refused", "whole"):
        spec = JobSpec(name=name, project="a", command=("true",))
        state.commit(Change(jobs={name: JobRecord(uid=name, spec=spec, request_id=name, status=JobStatus())}))
    works = scheduler.State.apply

    def apply(self: scheduler.State, event: scheduler.Event) -> None:
        if isinstance(event, scheduler.JobSubmitted) and event.uid == "refused":
            raise RecursionError("too deep")
        works(self, event)

    monkeypatch.setattr(scheduler.State, "apply", apply)
    assert list(ClusterState(store, (), half_life_s).jobs) == ["whole"]


def test_a_circle_that_is_stored_is_cut_and_said(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("a", 1)
    embedded_cluster.project("b", 1, parent="a")
    stop(embedded_cluster)
    body = json.dumps({"name": "a", "guaranteed": 1, "parent": "b"})
    row(embedded_cluster.home.database, "UPDATE projects SET body = ? WHERE name = 'a'", body)
    assert embedded_cluster.client.get_project("a").project.parent is None
    assert "set aside" in embedded_cluster.home.log_file.read_text()


@pytest.mark.parametrize("body", ["{", "[]", '{"uid": 1}', '{"uid": "x", "spec": {}, "status": {}}'])
def test_a_job_that_cannot_be_read_is_set_aside_its_worker_ended_and_the_rest_served(
    embedded_cluster: EmbeddedCluster, body: str
) -> None:
    embedded_cluster.project("team-a", 2)
    broken, whole = embedded_cluster.submit("broken"), embedded_cluster.submit("whole")
    for name in ("broken", "whole"):
        embedded_cluster.wait_for_phase(name, "Running")
    stop(embedded_cluster)
    row(embedded_cluster.home.database, "UPDATE jobs SET body = ? WHERE uid = ?", body, broken.uid)
    assert [job.uid for job in embedded_cluster.client.list_jobs().jobs] == [whole.uid]
    until(lambda: not any(broken.uid in line for line in embedded_cluster.processes()), embedded_cluster.processes)
    embedded_cluster.submit("next", "true")
    embedded_cluster.wait_for_phase("next", "Succeeded")
    shown = CliRunner().invoke(
        application(), ["cluster", "repair"], env={"GPUQUOTA_HOME": str(embedded_cluster.home.root)}
    )
    assert broken.uid in shown.output


def test_what_was_set_aside_can_be_discarded(embedded_cluster: EmbeddedCluster) -> None:
    stop(embedded_cluster)
    row(embedded_cluster.home.database, "INSERT INTO projects VALUES ('broken', '{')")
    assert embedded_cluster.client.list_projects() == ()
    environment = {"GPUQUOTA_HOME": str(embedded_cluster.home.root)}
    refused = CliRunner().invoke(application(), ["cluster", "repair", "--discard"], env=environment)
    assert isinstance(refused.exception, ConflictError)
    stop(embedded_cluster)
    assert "1 record" in CliRunner().invoke(application(), ["cluster", "repair", "--discard"], env=environment).output
    assert "nothing is set aside" in CliRunner().invoke(application(), ["cluster", "repair"], env=environment).output


# The file itself


def test_a_file_of_the_format_before_is_copied_and_migrated(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"{MIGRATIONS[0]} PRAGMA user_version = 1;")
    row(path, "INSERT INTO projects VALUES ('a', ?)", '{"name": "a"}')
    assert [project.name for project in Store(path).load_projects()] == ["a"]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    with closing(sqlite3.connect(tmp_path / "state.db.format1")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)


def test_a_damaged_file_is_left_alone_and_what_can_be_read_of_it_is_salvaged(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(path)
    with store.transaction():
        for number in range(2000):
            store.save_project(Project(name=f"project-{number}"))
    store.close()
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 5000] = b"x" * 5000
    path.write_bytes(content)
    with pytest.raises(StateFileError, match="gpuquota cluster repair"):
        Store(path)
    assert path.read_bytes() == content
    damaged, kept = salvage(path)
    assert damaged.read_bytes() == content
    assert 500 < kept["projects"] < 2000
    assert len(Store(path).load_projects()) >= 500


def test_a_backup_of_a_running_cluster_is_restored_and_what_it_does_not_have_is_ended(
    embedded_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    environment = {"GPUQUOTA_HOME": str(embedded_cluster.home.root)}
    embedded_cluster.project("team-a", 2)
    embedded_cluster.submit("before")
    embedded_cluster.wait_for_phase("before", "Running")
    copy = tmp_path / "copy.db"
    assert CliRunner().invoke(application(), ["cluster", "backup", str(copy)], env=environment).exit_code == 0
    later = embedded_cluster.submit("later")
    embedded_cluster.wait_for_phase("later", "Running")
    refused = CliRunner().invoke(application(), ["cluster", "restore", str(copy)], env=environment)
    assert isinstance(refused.exception, ConflictError)
    stop(embedded_cluster)
    assert CliRunner().invoke(application(), ["cluster", "restore", str(copy)], env=environment).exit_code == 0
    assert [job.spec.name for job in embedded_cluster.client.list_jobs().jobs] == ["before"]
    assert embedded_cluster.job("before").status.phase is Phase.RUNNING
    until(lambda: not any(later.uid in line for line in embedded_cluster.processes()), embedded_cluster.processes)


@pytest.mark.parametrize("content", [b"", b"no database at all" * 300])
def test_what_is_no_backup_is_not_restored(tmp_path: Path, content: bytes) -> None:
    Store(tmp_path / "state.db").close()
    before = (tmp_path / "state.db").read_bytes()
    (tmp_path / "copy.db").write_bytes(content)
    with pytest.raises(StateFileError):
        restore(tmp_path / "copy.db", tmp_path / "state.db")
    assert (tmp_path / "state.db").read_bytes() == before


def test_a_backup_is_private(tmp_path: Path) -> None:
    Store(tmp_path / "state.db").close()
    back_up(tmp_path / "state.db", tmp_path / "copy.db")
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600


def test_an_export_is_json_of_all_that_a_user_has_made(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 2)
    embedded_cluster.submit("job", "true")
    embedded_cluster.wait_for_phase("job", "Succeeded")
    environment = {"GPUQUOTA_HOME": str(embedded_cluster.home.root)}
    exported = json.loads(CliRunner().invoke(application(), ["cluster", "export"], env=environment).output)
    assert [project["name"] for project in exported["projects"]] == ["team-a"]
    assert [job["spec"]["name"] for job in exported["jobs"]] == ["job"]


def test_a_backup_of_no_cluster_says_where_one_would_be(tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match=f"{tmp_path} holds no cluster; name its directory in GPUQUOTA_HOME"):
        back_up(tmp_path / "state.db", tmp_path / "copy.db")


# What ended


def ended(name: str, at: float) -> JobRecord:
    spec = JobSpec(name=name, project="a", command=("true",))
    return JobRecord(uid=name, spec=spec, status=JobStatus(phase=Phase.SUCCEEDED, submitted_at=0.0, finished_at=at))


def test_jobs_that_ended_long_ago_or_beyond_a_number_are_outdated() -> None:
    jobs = [ended("oldest", 10.0), ended("old", 50.0), ended("new", 90.0), ended("newest", 95.0)]
    assert [job.uid for job in outdated(jobs, 100.0, keep_s=60.0, keep_jobs=10)] == ["oldest"]
    assert [job.uid for job in outdated(jobs, 100.0, keep_s=60.0, keep_jobs=2)] == ["old", "oldest"]
    assert outdated(jobs, 0.0, keep_s=60.0, keep_jobs=10) == []


def test_jobs_of_one_user_do_not_make_those_of_another_outdated() -> None:
    eve = Owner(uid=1, name="eve")
    many = [msgspec.structs.replace(ended(f"many-{at}", at=90.0 + at), owner=eve) for at in range(3)]
    hers = msgspec.structs.replace(ended("hers", at=80.0), owner=Owner(uid=2, name="anna"))
    assert [job.uid for job in outdated([hers, *many], 100.0, keep_s=60.0, keep_jobs=2)] == ["many-0"]


def test_outdated_jobs_are_deleted_with_their_directories(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "home", ClusterConfig(keep_ended_jobs=1)) as cluster:
        cluster.project("team-a", 2)
        first = cluster.submit("first", "true")
        cluster.wait_for_phase("first", "Succeeded")
        cluster.submit("second", "true")
        cluster.wait_for_phase("second", "Succeeded")
        stop(cluster)
        assert [job.spec.name for job in cluster.client.list_jobs().jobs] == ["second"]
        assert not cluster.home.job(first.uid).exists()
