"""Runs in a kernel of its own, as its first process, on the files of this machine: PYTHON SCRIPT FILE.

Starts a cluster there with jobs that have limits, and writes what became of them to FILE, as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from kfp_gpuquota.cluster.local.workers import cgroups

BURN = """
import pathlib, time
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
own = pathlib.Path("/proc/self/cgroup").read_text().strip().removeprefix("0::")
print(pathlib.Path(f"/sys/fs/cgroup{own}/cpu.stat").read_text())
"""
HIERARCHY = Path("/sys/fs/cgroup")


def gpuquota(*words: str, check: bool = True) -> str:
    """Run a command, and return what it prints; CalledProcessError where that is checked."""
    command = [str(Path(sys.executable).with_name("gpuquota")), *words]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=check).stdout


def jobs_with_limits() -> dict[str, Any]:
    """A job that uses more memory than it may, and one that would use more CPU, on a cluster in the root cgroup."""
    gpuquota("cluster", "start", "--nodes", "1", "--gpus-per-node", "2")
    try:
        gpuquota("project", "create", "team", "--guaranteed", "2")
        use_memory = "x = bytearray(300 << 20)"
        gpuquota("submit", "hungry", "-p", "team", "--memory-limit", "100Mi", "--", sys.executable, "-c", use_memory)
        gpuquota("submit", "busy", "-p", "team", "--cpu-limit", "250m", "--", sys.executable, "-c", BURN)
        gpuquota("wait", "busy", "-p", "team")
        gpuquota("wait", "hungry", "-p", "team", check=False)
        hungry = json.loads(gpuquota("describe", "hungry", "-p", "team", "-o", "json"))
        used = dict(line.split() for line in gpuquota("logs", "busy", "-p", "team").splitlines() if line)
        left = [path.name for path in (HIERARCHY / cgroups.WORKERS).iterdir() if path.is_dir()]
        return {"hungry": hungry, "busy": used, "left": left}
    finally:
        gpuquota("cluster", "stop")


def of_a_user(delegated: bool) -> dict[str, Any]:
    """What a user's process learns in a cgroup that holds a second process, delegated to the user or not."""
    group = HIERARCHY / ("delegated" if delegated else "shared")
    group.mkdir()
    (HIERARCHY / "cgroup.subtree_control").write_text("+cpu +memory")
    if delegated:
        os.setxattr(group, "user.delegate", b"1")
        for path in (group, *group.iterdir()):
            os.chown(path, 1000, 1000)
    other = subprocess.Popen(["sleep", "600"])
    (group / "cgroup.procs").write_text(str(other.pid))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        (group / "cgroup.procs").write_text("0")
        os.setgid(1000)
        os.setuid(1000)
        found = cgroups.prepare()
        os.write(write, json.dumps([str(found.directory), found.unavailable]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    directory, unavailable = json.loads(os.read(read, 1 << 16))
    other.kill()
    other.wait()
    return {"directory": directory, "unavailable": unavailable}


def main(result: str) -> None:
    """Prepare what an init process has to, and write the results."""
    for kind, place in (("proc", "/proc"), ("tmpfs", "/run"), ("cgroup2", str(HIERARCHY))):
        subprocess.run(["/bin/mount", "-t", kind, kind, place], check=True)
    subprocess.run(["/bin/ip", "link", "set", "lo", "up"], check=True)
    os.environ.update(PATH=f"{os.defpath}:/usr/sbin:/sbin", HOME="/run", TMPDIR="/run", GPUQUOTA_HOME="/run/cluster")
    found: dict[str, Any]
    try:
        found = {"user": of_a_user(delegated=True), "shared": of_a_user(delegated=False), "jobs": jobs_with_limits()}
    except subprocess.CalledProcessError as error:
        found = {"error": f"{error.cmd}: {error.stdout}"}
    except BaseException:  # noqa: BLE001  (it is reported where the kernel was started)
        found = {"error": traceback.format_exc()}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    finally:
        os.sync()
        Path("/proc/sysrq-trigger").write_text("o")  # power off
        signal.pause()
