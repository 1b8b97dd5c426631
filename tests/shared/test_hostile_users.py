"""Users of a shared cluster who try to read and to change what is not theirs: by files, links and processes."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from kfp_gpuquota.api.wire import MembersChange
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.shared import files
from kfp_gpuquota.cluster.local.shared.config import SharedConfig
from kfp_gpuquota.cluster.local.shared.files import Removals, make_owners_directory
from kfp_gpuquota.cluster.local.workers import shim
from kfp_gpuquota.cluster.local.workers.environment import LOGIN
from kfp_gpuquota.engine.records import Owner
from kfp_gpuquota.server.transport.connections import SHARED_LIMITS
from kfp_gpuquota.server.users_memory import MOST_BYTES
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S, until
from tests.security.other_user import open_to_everybody
from tests.shared import people
from tests.shared.people import MARKS
from tests.shared.test_jobs_of_users import job, log_of, submit

if TYPE_CHECKING:
    import pytest

    from kfp_gpuquota.server.client import Client
    from tests.shared.conftest import SharedCluster, Users
    from tests.shared.people import Person

pytestmark = MARKS

READ_ALL = """
found = []
def try_to_read(path):
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            for name in os.listdir(path):
                try_to_read(os.path.join(path, name))
        else:
            open(path, "rb").close()
            found.append(path)
    except OSError:
        pass
for path in json.loads(sys.argv[1]):
    try_to_read(path)
print(json.dumps(found))
"""


def readable(person: Person, cluster: SharedCluster) -> list[str]:
    """Return what of all files below the cluster's directory the user can open, given all their names."""
    names = [str(path) for path in (cluster.home.root, *cluster.home.root.rglob("*"))]
    found = set(json.loads(person.python(READ_ALL, json.dumps(names))))
    return sorted(os.path.relpath(path, cluster.home.root) for path in found)


def owners(cluster: SharedCluster, name: str) -> Path:
    return cluster.home.owners(cluster.job(name, "vision").uid)


def test_a_user_reads_the_token_and_the_checkpoints_of_the_own_jobs_and_no_other_file(
    shared_cluster: SharedCluster, users: Users
) -> None:
    write = 'echo saved > "$ELASTIC_CHECKPOINT_DIR/state"; cat "$ELASTIC_TOKEN_FILE" > /dev/null && echo read'
    submit(shared_cluster, users.anna, "hers", "sh", "-c", write)
    shared_cluster.wait_for_phase("hers", "Succeeded", "vision")
    assert log_of(shared_cluster, "hers") == "read\n"
    own = f"jobs/{shared_cluster.job('hers', 'vision').uid}/owner"
    assert readable(users.anna, shared_cluster) == [f"{own}/checkpoints/state", f"{own}/token"]
    for person in (users.ben, users.dora, users.eve):
        assert readable(person, shared_cluster) == []
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in shared_cluster.home.root.rglob("*")}
    passable = {"home", "jobs", shared_cluster.job("hers", "vision").uid}
    assert not [
        (path, oct(mode)) for path, mode in modes.items()
        if not path.is_symlink() and mode & 0o077 and path.stat().st_uid == 0 and path.name not in passable
    ]  # fmt: skip


def test_what_only_root_may_enter_read_or_run_a_job_may_not_either(
    shared_cluster: SharedCluster, users: Users, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "program").write_text("#!/bin/sh\necho stolen\n")
    (secret / "program").chmod(0o700)
    attempts: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
        "directory": (("pwd",), {"working_directory": str(secret)}),
        "missing": (("pwd",), {"working_directory": str(secret / "no such directory")}),
        "program": ((str(secret / "program"),), {}),
        "shadow": (("cat", "/etc/shadow"), {}),
        "path": (("program",), {"environment": {"PATH": str(secret)}}),
        "home": (("cat", f"{users.ben.home}/notes"), {}),
    }
    (users.ben.home / "notes").write_text("stolen")
    requests = [job(name, *command, gpus=0, **more) for name, (command, more) in attempts.items()]
    answers = users.anna.ask(shared_cluster.socket, requests)
    assert {status for status, _ in answers} == {201}, "whether a directory exists is not revealed"
    for name in attempts:
        shared_cluster.wait_for_phase(name, "Failed", "vision")
        log = log_of(shared_cluster, name)
        assert "denied" in log, (name, log)
        assert "stolen" not in log
    assert log_of(shared_cluster, "directory").replace(str(secret), "") == log_of(shared_cluster, "missing").replace(
        str(secret / "no such directory"), ""
    )


def test_links_in_the_owners_directory_lead_root_nowhere(
    shared_cluster: SharedCluster, users: Users, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    swap = f"""
cd "$ELASTIC_CHECKPOINT_DIR/.." && rm -r checkpoints token && ln -s {victim} checkpoints && ln -s /etc/shadow token
mkfifo "report-$ELASTIC_WORKER_ID.jsonl"; i=0; while [ $i -lt 1500 ]; do mkdir d && cd d || exit; i=$((i+1)); done
"""
    submit(shared_cluster, users.anna, "hers", "sh", "-c", swap + "sleep infinity")
    owned = owners(shared_cluster, "hers")
    until((owned / "token").is_symlink)
    shared_cluster.kill_daemon()
    assert shared_cluster.job("hers", "vision").status.phase == "Running", "the next daemon adopts it"
    token = shared_cluster.home.job_token_file(shared_cluster.job("hers", "vision").uid)
    assert len(token.read_text()) == 43, "root has its own copy"
    users.anna.ask(shared_cluster.socket, [("DELETE", "/v1/projects/vision/jobs/hers", None)])
    until(lambda: not list(shared_cluster.home.jobs.iterdir()))
    assert (victim / "kept").read_text() == "kept"
    assert Path("/etc/shadow").exists()


def test_a_directory_that_its_owner_has_is_never_written_to_again(tmp_path: Path, users: Users) -> None:
    home = Home(tmp_path / "home")
    home.create()
    (home.job("uid")).mkdir()
    make_owners_directory(home, "uid", users.anna.uid, "first")
    (home.owners("uid") / "token").unlink()
    (home.owners("uid") / "token").symlink_to(tmp_path / "planted")
    make_owners_directory(home, "uid", users.anna.uid, "second")
    assert not (tmp_path / "planted").exists()
    interrupted = home.job("other")
    interrupted.mkdir()
    (interrupted / "owner.partial").mkdir()
    make_owners_directory(home, "other", users.ben.uid, "token")
    facts = home.owners("other").stat()
    assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (users.ben.uid, 0o700)


def test_a_job_cannot_end_its_shim_and_ends_with_it(shared_cluster: SharedCluster, users: Users) -> None:
    script = 'kill -9 $PPID; echo "status $?"; exec sleep infinity'
    submit(shared_cluster, users.anna, "hers", "sh", "-c", script)
    until(lambda: "status" in log_so_far(shared_cluster, "hers"))
    assert "status 1" in log_so_far(shared_cluster, "hers")
    worker = shared_cluster.job("hers", "vision").status.workers[0]
    stat_line = Path(f"/proc/{worker.pid}/stat").read_text()
    os.kill(int(stat_line.rpartition(")")[2].split()[1]), 9)
    until(lambda: not Path(f"/proc/{worker.pid}").exists())
    shared_cluster.wait_for("hers", lambda found: found.status.workers[0].exit_code == 137, "vision")


def log_so_far(cluster: SharedCluster, name: str) -> str:
    return cluster.client.read_log("vision", name).text.decode()


FLOOD = """
resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
held, closed = [], 0
for _ in range(int(sys.argv[2])):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(sys.argv[1])
for one in held[-50:]:
    one.settimeout(30)
    try:
        closed += one.recv(1) == b""
    except OSError:
        closed += 1
print(closed, flush=True)
sys.stdin.read()
"""


def test_one_user_cannot_keep_the_others_out_by_connections(shared_cluster: SharedCluster, users: Users) -> None:
    with users.cleo.start(FLOOD, shared_cluster.socket, SHARED_LIMITS.per_source + 50) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == "50\n"
        ((status, _),) = users.anna.ask(shared_cluster.socket, [("GET", "/v1/projects", None)])
        assert status == 200
        flood.kill()


READ_NO_ANSWERS = """
path, count = sys.argv[1], int(sys.argv[2])
held = []
for _ in range(count):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(path)
    held[-1].sendall(b"GET /v1/jobs HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
print([one.recv(12).decode().split()[1] for one in held])
"""


def test_answers_that_a_user_does_not_read_do_not_fill_the_memory(shared_cluster: SharedCluster, users: Users) -> None:
    large = [job(f"large-{n}", "true", "x" * 1_000_000, gpus=0) for n in range(10)]
    assert {status for status, _ in users.anna.ask(shared_cluster.socket, large)} == {201}
    answers = ast.literal_eval(users.anna.python(READ_NO_ANSWERS, shared_cluster.socket, 10))
    assert answers == ["200"] * 6 + ["503"] * 4
    until(lambda: users.anna.ask(shared_cluster.socket, [("GET", "/v1/jobs", None)])[0][0] == 200)


BEGIN_BODIES = """
path, count = sys.argv[1], int(sys.argv[2])
held = []
for _ in range(count):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(path)
    held[-1].sendall(b"POST /v1/jobs HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 1000000\\r\\n\\r\\n")
print(held[-1].recv(12).decode())
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
connection.request("GET", "/v1/nodes")
print(connection.getresponse().status)
"""


def test_bodies_that_a_user_does_not_finish_do_not_fill_the_memory(shared_cluster: SharedCluster, users: Users) -> None:
    most = MOST_BYTES // 1_000_000
    assert users.cleo.python(BEGIN_BODIES, shared_cluster.socket, most + 1) == "HTTP/1.1 503\n200\n"
    ((status, _),) = users.anna.ask(shared_cluster.socket, [job("hers", "true", "x" * 500_000, gpus=0)])
    assert status == 201, "each user has as much"


def test_a_user_without_an_account_runs_nothing(shared_cluster: SharedCluster, users: Users) -> None:
    client = cast("Client", shared_cluster.client)
    client.change_members("vision", MembersChange(add=(f"@{people.ACCESS}",)))
    stranger = people.Person("stranger", 54321, 54321, users.anna.groups, Path("/"))
    ((status, answer),) = stranger.ask(shared_cluster.socket, [job("unknown")])
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert "has no account on this machine" in answer["error"]["message"]


FORK_FASTER_THAN_THEY_ARE_KILLED = """
import ctypes, os, signal, time
if os.fork():
    time.sleep(0.2)
    os._exit(0)
os.setsid()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
fork = ctypes.CDLL(None).fork
while True:
    fork()
"""

SESSION_KEYRING = f"""
import ctypes
print(ctypes.CDLL(None).syscall({shim.KEYCTL[os.uname().machine]}, 0, -3, 0))
"""


def run_as(person: Person, directory: Path, program: str, **limits: tuple[int, int]) -> str:
    """Run a script under a shim, and return what it printed."""
    owner = msgspec.to_builtins(Owner(uid=person.uid, name=person.name, limits=limits))
    command = {"command": ["python3", "-c", program], "environment": LOGIN, "working_directory": "/"}
    (directory / "spec.json").write_text(json.dumps({**command, "grace_period_s": 1.0, "owner": owner}))
    subprocess.run([sys.executable, "-I", "-S", shim.__file__, directory], check=True, timeout=TIMEOUT_S)
    assert json.loads((directory / "exit.json").read_text())["code"] == 0, (directory / "log").read_text()
    return (directory / "log").read_text()


def test_a_program_that_forks_without_end_ends_with_its_job(tmp_path: Path, users: Users) -> None:
    run_as(users.anna, tmp_path, FORK_FASTER_THAN_THEY_ARE_KILLED, RLIMIT_NPROC=(150, 150))
    owners = [path.stat().st_uid for path in Path("/proc").iterdir() if path.name.isdecimal()]
    assert users.anna.uid not in owners


def test_jobs_do_not_share_the_keys_of_the_daemons_session(tmp_path: Path, users: Users) -> None:
    program = [sys.executable, "-c", SESSION_KEYRING]
    own = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert run_as(users.anna, tmp_path, SESSION_KEYRING) != own or own == "-1\n"


def test_a_job_does_not_run_as_a_user_who_has_the_number_of_its_owner_now(tmp_path: Path, users: Users) -> None:
    owner = Owner(uid=users.anna.uid, name="somebody")
    command = {"command": ["id"], "environment": {}, "working_directory": "/", "grace_period_s": 1.0}
    (tmp_path / "spec.json").write_text(json.dumps({**command, "owner": msgspec.to_builtins(owner)}))
    subprocess.run([sys.executable, "-I", "-S", shim.__file__, tmp_path], check=True)
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == shim.EXIT_CANNOT_EXECUTE
    assert f"user {users.anna.uid} is not somebody any more" in (tmp_path / "log").read_text()


def test_one_user_cannot_fill_the_cluster_with_jobs(users: Users, tmp_path: Path) -> None:
    shared = SharedConfig(socket=str(tmp_path / "run" / "socket"), jobs_per_user=2, admin_group=people.ADMINS)
    with running_cluster(tmp_path / "home", ClusterConfig(gpus_per_node=2, shared=shared)) as cluster:
        cluster.project("vision", 1)
        cast("Client", cluster.client).change_members("vision", MembersChange(add=(users.anna.name, users.ben.name)))
        requests = [job("one"), job("two"), job("three")]
        answers = users.anna.ask(Path(shared.socket), requests)
        assert [status for status, _ in answers] == [201, 201, 409]
        assert "has 2 jobs that have not ended, the most that a user of this cluster may have" in str(answers[2])
        for person in (users.ben, users.dora):
            others = [job(f"{name}-of-{person.uid}") for name in ("one", "two")]
            assert {status for status, _ in person.ask(Path(shared.socket), others)} == {201}
        more = [("POST", "/v1/projects/vision/jobs/one/cancel", None), job("three")]
        assert [status for status, _ in users.anna.ask(Path(shared.socket), more)] == [200, 201]


def test_the_directories_of_many_jobs_are_deleted_also_when_the_daemon_ends_at_once(
    tmp_path: Path, users: Users
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    jobs = [f"job-{number}" for number in range(300)]
    for name in jobs:
        home.job(name).mkdir()
        make_owners_directory(home, name, users.anna.uid, "token")
    removals = Removals(home)
    for name in jobs:
        removals.add(name)
    removals.close()
    until(lambda: not list(home.jobs.iterdir()))


WRITE_AFTER_THE_END = """
os.chdir(sys.argv[1])
print("entered", flush=True)
sys.stdin.readline()
os.mkdir("late")
"""


def test_what_a_user_writes_while_a_job_is_deleted_is_deleted_later(
    tmp_path: Path, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    open_to_everybody(home.jobs / "one")
    home.job("hers").mkdir()
    make_owners_directory(home, "hers", users.anna.uid, "token")
    writer = users.anna.start(WRITE_AFTER_THE_END, home.owners("hers") / "checkpoints")
    assert writer.stdout is not None
    assert writer.stdout.readline() == "entered\n"
    with monkeypatch.context() as killed:
        killed.setattr(files, "_REMOVE", ("true",))  # rm(1) is over before the user writes
        removals = Removals(home)
        removals.add("hers")
        removals.close()
    assert not home.job("hers").exists(), "nobody finds it by its name any more"
    writer.communicate("\n", timeout=TIMEOUT_S)
    assert list(home.jobs.rglob("late"))
    Removals(home).resume()
    until(lambda: not list(home.jobs.iterdir()))
