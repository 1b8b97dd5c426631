"""The command line, the Python API and the training library of users, on the cluster that they share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from kfp_gpuquota.api.wire import MembersChange
from kfp_gpuquota.cluster.connect import connect, runs_here, shared_socket
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.errors import ClusterUnavailableError, ConflictError
from kfp_gpuquota.server.transport.unix_sockets import listen
from tests.conftest import running_cluster
from tests.polling import until
from tests.shared.people import MARKS, environment_of
from tests.shared.test_jobs_of_users import log_of, submit

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client
    from tests.forked import Completed
    from tests.shared.conftest import SharedCluster, Users
    from tests.shared.people import Person

pytestmark = MARKS


def run(cluster: SharedCluster, person: Person, *words: str) -> Completed:
    return person.gpuquota(*words, variables=environment_of(cluster.socket))


def test_users_submit_follow_and_delete_jobs_by_the_command_line(shared_cluster: SharedCluster, users: Users) -> None:
    done = run(shared_cluster, users.anna, "submit", "hers", "-p", "vision", "-f", "--", "sh", "-c", "id -un; pwd")
    assert (done.returncode, done.stdout) == (0, f"{users.anna.name}\n{users.anna.home}\n"), done.stderr
    listed = run(shared_cluster, users.ben, "list", "-A").stdout.splitlines()
    assert listed[0].split()[:3] == ["USER", "JOB", "PROJECT"]
    assert listed[1].split()[:3] == [users.anna.name, "hers", "vision"]
    refused = run(shared_cluster, users.ben, "delete", "hers", "-p", "vision")
    assert refused.returncode == 2
    assert f"job 'hers' is one of {users.anna.name}" in refused.stderr
    assert run(shared_cluster, users.ben, "logs", "hers", "-p", "vision").returncode == 2
    assert run(shared_cluster, users.anna, "delete", "hers", "-p", "vision").returncode == 0


def test_the_status_says_whose_cluster_it_is(shared_cluster: SharedCluster, users: Users) -> None:
    shown = run(shared_cluster, users.anna, "cluster", "status")
    assert f"shared by users of this machine ({shared_cluster.socket})" in shown.stdout, shown.stderr
    assert "shared by users of this machine" in run(shared_cluster, users.anna, "cluster", "start").stdout
    own = run(shared_cluster, users.anna, "cluster", "start", "--gpus", "2")
    assert "to start one of your own, name its directory in GPUQUOTA_HOME" in own.stderr
    refused = run(shared_cluster, users.eve, "cluster", "status")
    assert refused.returncode == 2
    assert "the cluster that users of this machine share is for those in group" in refused.stderr
    assert "usermod -aG" in refused.stderr
    checked = run(shared_cluster, users.ben, "doctor")
    assert checked.returncode == 0, checked.stdout
    assert run(shared_cluster, users.anna, "ui").stderr.startswith(
        "Error: a cluster that several users share has no web"
    )


def test_administrators_change_members_and_only_they(shared_cluster: SharedCluster, users: Users) -> None:
    created = run(shared_cluster, users.dora, "project", "create", "audio", "-g", "1", "--member", users.cleo.name)
    assert created.stdout.endswith(f"its members are {users.cleo.name}\n"), created.stderr
    assert run(shared_cluster, users.cleo, "submit", "his", "-p", "audio", "--", "true").returncode == 0
    assert f"members      {users.cleo.name}" in run(shared_cluster, users.anna, "describe", "project", "audio").stdout
    changed = run(shared_cluster, users.dora, "project", "set", "audio", "--remove-member", users.cleo.name)
    assert "no members: only administrators submit jobs to it" in changed.stdout
    assert run(shared_cluster, users.cleo, "submit", "more", "-p", "audio", "--", "true").returncode == 2
    unknown = run(shared_cluster, users.dora, "project", "set", "audio", "--member", "nobody-of-that-name")
    assert "this machine has no such user; a group is given as @nobody-of-that-name" in unknown.stderr
    refused = run(shared_cluster, users.anna, "project", "set", "vision", "--member", users.cleo.name)
    assert "only administrators of this cluster may change the members of projects" in refused.stderr


def test_a_project_of_the_same_name_has_none_of_the_members_of_an_earlier_one(
    shared_cluster: SharedCluster, users: Users
) -> None:
    shared_cluster.client.delete_project("vision")
    shared_cluster.project("vision", 1)
    assert shared_cluster.client.get_project("vision").members == ()
    assert run(shared_cluster, users.anna, "submit", "hers", "-p", "vision", "--", "true").returncode == 2


def test_exec_enters_a_job_as_its_owner_also_for_root(
    shared_cluster: SharedCluster, users: Users, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    submit(shared_cluster, users.anna, "hers", environment={"MINE": "1", "PATH": "/usr/bin:/bin"})
    shared_cluster.wait_for_phase("hers", "Running", "vision")
    command = ("exec", "hers", "-p", "vision", "--", "sh", "-c", 'id -un; pwd; echo "$MINE"')
    expected = f"{users.anna.name}\n{users.anna.home}\n1\n"
    assert run(shared_cluster, users.anna, *command).stdout == expected
    refused = run(shared_cluster, users.dora, *command)
    assert f"job 'hers' is one of {users.anna.name}; only {users.anna.name} and root may enter it" in refused.stderr
    assert "only" in run(shared_cluster, users.ben, *command).stderr
    from kfp_gpuquota.cli.jobs.access import execute  # noqa: PLC0415

    monkeypatch.setenv("GPUQUOTA_HOME", str(shared_cluster.home.root))
    with pytest.raises(SystemExit, match=r"^0$"):
        execute("hers", ["sh", "-c", 'id -un; pwd; echo "$MINE"'], "vision")
    assert capfd.readouterr().out == expected


def test_the_python_api_needs_no_more_than_the_socket(shared_cluster: SharedCluster, users: Users) -> None:
    ran = users.anna.run("python_api", "id", "-un", variables=environment_of(shared_cluster.socket))
    assert ran.stdout == f"Succeeded {users.anna.name} {users.anna.name}\n\n", ran.stderr


JOIN = """
import os, socket, sys, http.client
url = os.environ["ELASTIC_COORDINATOR"]
path, _, target = url.removeprefix("unix://").rpartition(":/")
token = open(os.environ["ELASTIC_TOKEN_FILE"]).read() if sys.argv[1] == "own" else "guess"
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
headers = {"Authorization": "Bearer " + token}
connection.request("POST", f"/{target}/store/1/get", b"{}", headers)
print(connection.getresponse().status)
"""


def test_a_worker_reaches_its_membership_with_the_token_of_its_job_only(
    shared_cluster: SharedCluster, users: Users
) -> None:
    for which in ("own", "guessed"):
        submit(shared_cluster, users.anna, which, "python3", "-c", JOIN, which)
        shared_cluster.wait_for_phase(which, "Succeeded", "vision")
    assert log_of(shared_cluster, "guessed") == "401\n"
    assert log_of(shared_cluster, "own") != "401\n"


def test_a_job_outlives_the_daemon_and_the_next_one_serves_the_same_users(
    shared_cluster: SharedCluster, users: Users
) -> None:
    submit(shared_cluster, users.anna, "hers", "sh", "-c", "echo one; exec sleep infinity")
    shared_cluster.wait_for_phase("hers", "Running", "vision")
    pid = shared_cluster.job("hers", "vision").status.workers[0].pid
    stopped = run(shared_cluster, users.dora, "cluster", "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert shared_cluster.client.health().shared
    found = shared_cluster.job("hers", "vision")
    assert (found.owner, found.status.workers[0].pid) == (users.anna.name, pid)
    ((status, _),) = users.anna.ask(shared_cluster.socket, [("DELETE", "/v1/projects/vision/jobs/hers", None)])
    assert status == 204
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_the_own_cluster_is_used_where_it_runs_or_is_named(shared_cluster: SharedCluster, tmp_path: Path) -> None:
    environment = {"GPUQUOTA_SHARED_SOCKET": str(shared_cluster.socket), "XDG_STATE_HOME": str(tmp_path / "state")}
    own = Home(tmp_path / "state" / "gpuquota")
    assert shared_socket(environment) == shared_cluster.socket
    assert runs_here(environment)
    assert connect(environment).health().shared
    assert shared_socket({**environment, "GPUQUOTA_HOME": str(own.root)}) is None
    assert shared_socket({**environment, "GPUQUOTA_SHARED_SOCKET": ""}) is None
    with running_cluster(own.root):
        assert shared_socket(environment) is None
        assert not connect(environment).health().shared


def test_a_cluster_of_one_user_has_no_members_and_shows_none(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "home") as cluster:
        cluster.project("team-a", 1)
        client = cluster.client
        assert isinstance(client.get_project("team-a").members, msgspec.UnsetType)
        with pytest.raises(ConflictError, match="this cluster has one user, so that its projects have no members"):
            cast("Client", client).change_members("team-a", MembersChange(add=("root",)))


def test_of_a_shared_cluster_that_does_not_run_the_remedy_is_its_services(tmp_path: Path) -> None:
    listen(tmp_path / "socket").close()
    client = connect(
        {"GPUQUOTA_SHARED_SOCKET": str(tmp_path / "socket"), "XDG_STATE_HOME": str(tmp_path)}, retry_for_s=0.0
    )
    with pytest.raises(ClusterUnavailableError, match="started by root: systemctl status gpuquota"):
        client.health()
