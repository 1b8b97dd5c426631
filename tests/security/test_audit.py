"""The audit log has the requester of each change, and the answer."""

from __future__ import annotations

import getpass
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api.wire import JobUpdate, StopAction
from kfp_gpuquota.cluster.local import audit_log
from kfp_gpuquota.cluster.local.audit_log import AuditLog
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError, StateFileError, UnauthorizedError
from kfp_gpuquota.server.audit import AuditEntry, Writing
from kfp_gpuquota.server.client import Client
from tests.conftest import running_cluster
from tests.security.other_user import as_root
from tests.security.test_full_machine import fill, small_disk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import EmbeddedCluster


def entries(cluster: EmbeddedCluster) -> list[dict[str, Any]]:
    return lines_of(cluster.home.audit_file)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_change_is_written_with_who_asked_and_what_became_of_it(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train")
    embedded_cluster.client.list_jobs("team-a")
    with pytest.raises(GpuQuotaError):
        embedded_cluster.submit("huge", gpus=99)
    embedded_cluster.client.delete_job("team-a", "train")
    with pytest.raises(NotFoundError):
        embedded_cluster.client.stop_jobs("team-a", ["one", "two"], StopAction.DELETE)
    asked = [(one["request"].split()[0], one.get("target", ""), one["status"]) for one in entries(embedded_cluster)]
    assert asked == [
        ("POST", "team-a", 201),
        ("POST", "team-a/train", 201),
        ("POST", "team-a/huge", 422),
        ("DELETE", "", 204),
        ("POST", "one,two", 404),
    ]
    for one in entries(embedded_cluster):
        assert (one["uid"], one["user"], one["pid"]) == (os.getuid(), getpass.getuser(), os.getpid())
        assert one["program"]
    refused, deleted = entries(embedded_cluster)[2:4]
    assert "gpus is 99" in refused["error"]
    assert deleted["request"].endswith("/team-a/jobs/train")
    assert embedded_cluster.home.audit_file.stat().st_mode & 0o777 == 0o600


def test_a_wrong_token_is_written_too(embedded_cluster: EmbeddedCluster) -> None:
    intruder = Client(lambda: (embedded_cluster.home.socket_file, "wrong"), retry_for_s=1.0)
    with pytest.raises(UnauthorizedError):
        intruder.delete_job("team-a", "train")
    (one,) = entries(embedded_cluster)
    assert (one["status"], one["pid"]) == (401, os.getpid())


def entry(status: int, number: int = 0, error: str = "") -> AuditEntry:
    return AuditEntry(at="", uid=0, user="", pid=1, program="", request=f"POST /{number}", status=status, error=error)


@as_root
def test_on_a_full_disk_no_change_is_made_without_its_line(tmp_path: Path) -> None:
    """The state file has free pages of its own, so many small changes succeed there."""
    made: list[str] = []
    with small_disk(tmp_path / "disk", "size=32m") as disk, running_cluster(disk / "home") as cluster:
        client = cluster.client
        cluster.project("team-a", 2)
        for number in range(4):
            cluster.submit(f"job-{number}", gpus=2)
        before = len(entries(cluster))
        fill(disk)

        def attempt(name: str, change: Callable[..., object], *arguments: object) -> None:
            try:
                change("team-a", name.split()[1].split("/", maxsplit=1)[0], *arguments)
            except StateFileError:
                return
            made.append(name)

        for number in range(30):
            job = f"job-{number % 4}"
            attempt(f"POST {job}/update", client.update_job, JobUpdate(priority=number))
            attempt(f"POST {job}/suspend", client.suspend_job)
            attempt(f"POST {job}/resume", client.resume_job)
        attempt("DELETE job-0", client.delete_job)
        written = [
            one["request"].replace("/v1/projects/team-a/jobs/", "")
            for one in entries(cluster)[before:]
            if one["status"] < 300
        ]
        (disk / "filler").unlink()
    assert made[-1] == "DELETE job-0"
    assert written == made


def test_a_line_is_in_the_file_before_its_change_and_the_answer_in_the_same_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log")
    first = log.begin(entry(0, 1), Writing.FIRST)
    second = log.begin(entry(0, 2), Writing.FIRST)
    assert [one["status"] for one in lines_of(tmp_path / "log")] == [0, 0]
    log.finish(second, entry(0, 2), entry(422, 2, "gpus is 99; " * 100))
    log.finish(first, entry(0, 1), entry(201, 1))
    log.close()
    one, two = lines_of(tmp_path / "log")
    assert (one["request"], one["status"]) == ("POST /1", 201)
    assert (two["request"], two["status"]) == ("POST /2", 422)
    assert two["error"].startswith("gpus is 99")
    assert two["error"].endswith("…")


def test_a_line_that_a_kill_has_cut_off_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"status":201}\n{"sta')
    log = AuditLog(path)
    log.write(entry(204))
    log.close()
    assert [one["status"] for one in lines_of(path)] == [201, 204]


@given(st.lists(st.sampled_from(["begin", "finish", "write"]), max_size=40), st.integers(200, 2000))
@settings(max_examples=50, deadline=None)
def test_no_line_is_lost_or_torn_when_files_are_rotated(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], max_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_log, "MAX_BYTES", max_bytes)
        patch.setattr(audit_log, "KEPT_FILES", 50)
        log, open_lines, expected = AuditLog(folder / "log"), [], {}
        for number, step in enumerate(steps):
            if step == "write":
                log.write(entry(401, number))
                expected[number] = 401
            elif step == "begin":
                open_lines.append((log.begin(entry(0, number), Writing.FIRST), number))
                expected[number] = 0
            elif open_lines:
                position, begun = open_lines.pop(0)
                log.finish(position, entry(0, begun), entry(200, begun))
                expected[begun] = 200
        log.close()
    files = sorted(folder.iterdir(), key=lambda path: -int(path.suffix[1:] or 0))
    found = {one["request"]: one["status"] for path in files for one in lines_of(path)}
    assert found == {f"POST /{number}": status for number, status in expected.items()}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
