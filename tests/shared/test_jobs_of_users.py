"""A job of a shared cluster runs as its owner, and with the rights of its owner only."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.local.workers.environment import LOGIN
from kfp_gpuquota.server.cluster_api import follow_log
from tests.shared.people import MARKS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.shared.conftest import SharedCluster, Users
    from tests.shared.people import Person

pytestmark = MARKS

WHO = """
import json, os, resource
facts = {
    "ids": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
    "environment": dict(os.environ),
    "umask": os.umask(0),
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "processes": resource.getrlimit(resource.RLIMIT_NPROC),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    "directory": os.getcwd(),
}
print(json.dumps(facts))
"""


def job(name: str, *command: str, **more: object) -> tuple[str, str, dict[str, Any]]:
    """Return the request that submits it."""
    spec: dict[str, object] = {"name": name, "project": "vision", "command": command or ("sleep", "infinity")}
    spec |= {"grace_period_s": 2.0, **more}
    return "POST", "/v1/jobs", {"spec": spec, "request_id": name}


def log_of(cluster: SharedCluster, name: str) -> str:
    return b"".join(follow_log(cluster.client, "vision", name)).decode()


def submit(cluster: SharedCluster, person: Person, name: str, *command: str, **more: object) -> None:
    ((status, answer),) = person.ask(cluster.socket, [job(name, *command, **more)])
    assert status == 201, answer


def test_a_job_has_the_identity_the_login_environment_and_the_limits_of_its_owner(
    shared_cluster: SharedCluster, users: Users
) -> None:
    script = f"""
os.umask(0o027)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400))
resource.setrlimit(resource.RLIMIT_NPROC, (500, 600))
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect({str(shared_cluster.socket)!r})
connection.request("POST", "/v1/jobs", sys.stdin.read())
answer = connection.getresponse()
print(answer.status, answer.read().decode() if answer.status != 201 else "")
"""
    _, _, body = job("who", "python3", "-c", WHO)
    answer = users.anna.python(script, standard_input=json.dumps(body))
    assert answer.startswith("201"), answer
    shared_cluster.wait_for_phase("who", "Succeeded", "vision")
    facts = json.loads(log_of(shared_cluster, "who"))
    anna = users.anna
    assert facts["ids"] == [[anna.uid] * 3, [anna.gid] * 3, sorted(anna.groups)]
    assert facts["umask"] == 0o027
    assert (facts["open_files"], facts["processes"]) == ([300, 400], [500, 600])
    assert facts["descriptors"] == [0, 1, 2]
    assert facts["directory"] == str(anna.home)
    environment = facts["environment"]
    login = {"HOME": str(anna.home), "USER": anna.name, "LOGNAME": anna.name, "SHELL": "/bin/sh"}
    assert login.items() <= environment.items()
    unknown = set(environment) - set(login) - {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONUNBUFFERED"}
    assert {name for name in unknown if not name.startswith(("ELASTIC_", "JOB_", "GLOO_", "NCCL_"))} == {
        "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "POD_INDEX", "RUNAI_NUM_OF_GPUS",
    }  # fmt: skip


def test_a_home_that_cannot_be_entered_is_named_in_the_log(shared_cluster: SharedCluster, users: Users) -> None:
    requests = [
        job("lost", "true", gpus=0, environment={"HOME": "/nowhere"}),
        job("nul", "true", working_directory="/\0"),
    ]
    answers = users.anna.ask(shared_cluster.socket, requests)
    assert [status for status, _ in answers] == [201, 422]
    assert "a path cannot hold a NUL character" in str(answers[1])
    shared_cluster.wait_for_phase("lost", "Failed", "vision")
    assert log_of(shared_cluster, "lost") == "cannot run ['true'] in /nowhere: No such file or directory\n"


ROOTS = "import os, time; os.setresuid(0, 0, 0); print(1, flush=True); time.sleep(0.5)"


def test_a_program_of_root_that_a_users_own_job_leaves_behind_is_waited_for(tmp_path: Path, users: Users) -> None:
    """Its user may not end it, as one that sudo runs; that is no failure of the job."""
    directory, program = tmp_path / "worker", tmp_path / "of-root"
    shutil.copy("/usr/bin/python3", program)
    os.chown(program, 0, users.anna.gid)
    script = f"mkfifo fifo; setsid {program} -c '{ROOTS}' > fifo & read x < fifo; exit 3"
    left = ["sh", "-c", f"cd {directory}; {script}"]
    directory.mkdir()
    spec = {"command": left, "environment": LOGIN, "working_directory": "/", "grace_period_s": 1.0}
    (directory / "spec.json").write_text(json.dumps(spec))
    for path in (directory, directory / "spec.json"):
        os.chown(path, users.anna.uid, users.anna.gid)
    try:
        program.chmod(0o4750)
        assert users.anna.run("shim", str(directory), variables={}).returncode == 0
    finally:
        program.unlink()
    assert json.loads((directory / "exit.json").read_text())["code"] == 3
