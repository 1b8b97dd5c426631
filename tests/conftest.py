"""Shared fixtures: a real embedded cluster in its own directory, checked when the test ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, settings

from kfp_gpuquota.api import Job, JobSpec, Project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home, private
from kfp_gpuquota.cluster.local.start import READY, await_stop, start_with
from kfp_gpuquota.errors import NotFoundError
from tests import forked, programs, script_server
from tests.distribution import Distribution
from tests.polling import TIMEOUT_S, until
from tests.reporting import Reporting

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from kfp_gpuquota.server.cluster_api import ClusterApi


# The duration of an example depends on the load of the machine, not on the code.
# The examples are the same in each run, so that a failure is a change's; `--hypothesis-profile=random` draws others.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("random", UNTIMED)
settings.register_profile("untimed", UNTIMED, derandomize=True)
settings.load_profile("untimed")

forked.preload("tests.programs", "kfp_gpuquota.cluster.local.daemon")

os.environ["GPUQUOTA_SHARED_SOCKET"] = ""  # tests do not find the cluster that users of this machine share

# A shell that starts tests in the background lets them ignore SIGINT, and they pass that on to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class EmbeddedCluster:
    """A running cluster, the client to it, and what tests do with both."""

    home: Home
    client: ClusterApi

    @property
    def environment(self) -> dict[str, str]:
        """For processes that are to use this cluster."""
        return {**os.environ, "GPUQUOTA_HOME": str(self.home.root)}

    def project(self, name: str, guaranteed: int, **more: object) -> None:
        """Create a project."""
        self.client.create_project(Project(name=name, guaranteed=guaranteed, **more))  # type: ignore[arg-type]

    def submit(self, name: str, *command: str, project: str = "team-a", **more: object) -> Job:
        """Submit a job; without a command one that sleeps until it is stopped."""
        spec = {"name": name, "project": project, "command": command or ("sleep", "infinity"), "grace_period_s": 2.0}
        return self.client.submit(msgspec.convert({**spec, **more}, JobSpec, str_keys=True))

    def job(self, name: str, project: str = "team-a") -> Job:
        """A job as it is now."""
        return self.client.get_job(project, name)

    def wait_for(self, name: str, condition: Callable[[Job], bool], project: str = "team-a") -> Job:
        """The job, as soon as `condition` holds for it; fails the test when it does not in time."""
        deadline = time.monotonic() + TIMEOUT_S
        after: int | None = None
        while time.monotonic() < deadline:
            listed = self.client.list_jobs(project, after=after, timeout_s=0.0 if after is None else 1.0)
            after = listed.revision
            for job in listed.jobs:
                if job.spec.name == name and condition(job):
                    return job
        pytest.fail(f"not within {TIMEOUT_S:g} s: {self.job(name, project)}")

    def wait_for_phase(self, name: str, phase: str, project: str = "team-a") -> Job:
        """The job, as soon as it is in `phase`."""
        return self.wait_for(name, lambda job: job.status.phase == phase, project)

    def kill_daemon(self) -> None:
        """Kill the daemon with SIGKILL, and return when it has exited."""
        os.kill(self.client.health().pid, signal.SIGKILL)
        await_stop(self.home)

    def processes(self) -> list[str]:
        """Command lines of all processes that belong to this cluster."""
        return [f"{pid}: {line}" for pid, line in processes_of(self.home.root)]

    def kill_everything(self) -> None:
        """What an orderly end has left, for a test that fails must not disturb those after it."""
        kill_processes_of(self.home.root)


def kill_processes_of(folder: Path) -> None:
    """SIGKILL to each."""
    for pid, _ in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> Iterator[tuple[int, str]]:
    """(pid, command line) of the processes whose command line or environment names the folder or what is in it."""
    root = str(folder).encode()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                line, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
                if line and (root + b"\0" in line or root + b"/" in line + environment):
                    yield int(process.name), line.replace(bytes(1), b" ").decode(errors="replace")


@contextlib.contextmanager
def running_cluster(
    root: Path, config: ClusterConfig | None = None, *, new_interpreter: bool = False
) -> Iterator[EmbeddedCluster]:
    """A cluster that is stopped at the end, with all its jobs; fails when a process is left.

    `new_interpreter`: the environment affects the interpreter or the loader of its daemon.
    """
    home, config = Home(root), config or ClusterConfig(gpus_per_node=2)
    if config.gpus_per_node is not None:  # the same on a machine with GPUs
        config = msgspec.structs.replace(config, cpu_slots=True)
    if new_interpreter:
        start_with(home, config)
    daemon = None if new_interpreter else start_daemon(home, config)
    cluster = EmbeddedCluster(home, connect({"GPUQUOTA_HOME": str(root)}))
    try:
        yield cluster
    finally:
        try:
            _shut_down(cluster)
            if daemon is not None:
                daemon.wait(TIMEOUT_S)
        finally:
            if daemon is not None:
                daemon.kill()
            cluster.kill_everything()


def start_daemon(home: Home, config: ClusterConfig) -> forked.Program:
    """Start the daemon as `start_with` does, but forked; returns when it serves."""
    home.create()
    read, write = os.pipe()
    with os.fdopen(read) as answer, open(home.log_file, "ab", opener=private) as log:
        try:
            daemon = forked.Program(
                programs.daemon,
                *(str(home.root), msgspec.json.encode(config).decode()),
                stdout=log.fileno(),
                stderr=log.fileno(),
                cwd="/",
                new_session=True,
                inherited=write,
            )
        finally:
            os.close(write)
        assert answer.readline().strip() == READY, home.log_file.read_text()
    return daemon


def _shut_down(cluster: EmbeddedCluster) -> None:
    for job in cluster.client.list_jobs().jobs:
        with contextlib.suppress(NotFoundError):  # one that the test deleted has ended by now
            cluster.client.delete_job(job.spec.project, job.spec.name)
    until(lambda: not cluster.client.list_jobs().jobs, "the end of its jobs")
    cluster.client.stop_cluster()
    await_stop(cluster.home)
    until(lambda: not cluster.processes(), lambda: f"the end of {cluster.processes()}")
    log = cluster.home.log_file.read_text()
    assert "Traceback" not in log, log


@pytest.fixture
def embedded_cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """One node with 2 slots, no projects."""
    with running_cluster(tmp_path / "home") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """What begins the command of a script with torch, in place of the interpreter: its process is a forked one."""
    with script_server.running(tmp_path_factory.mktemp("scripts") / "socket") as python:
        yield python


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Distribution(config))
    config.pluginmanager.register(Reporting())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m slow` import the modules only that have slow tests: each worker would import three times as many."""
    alone = config.option.markexpr == "slow" and collection_path.name.startswith("test_")
    return (alone and not may_be_slow(collection_path)) or None


def may_be_slow(module: Path) -> bool:
    """Return whether a module has slow tests: by a mark, or by a fixture that makes them slow."""
    text = module.read_text()
    return any(word in text for word in ("slow", "kubelet_cluster"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail if `-m slow` would leave out a slow test."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    if left_out := sorted(str(path) for path in slow if not may_be_slow(path)):
        raise pytest.UsageError(f"`may_be_slow` does not know why tests are slow in: {', '.join(left_out)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all modules without garbage collections, an eighth of the time: what they make is kept."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what all test modules have loaded from garbage collections, in this process and in those forked from it."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plans", type=int, default=5, help="how often the Kubernetes controller is killed while it plans"
    )
    parser.addoption("--workers", type=int, default=10, help="simulated workers that outlive failovers")
    parser.addoption("--failovers", type=int, default=7, help="how many kinds of failovers, of 7")
    parser.addoption("--away", type=float, default=8.0, help="seconds for which the API server is away")
    parser.addoption("--histories", default="0:60", help="seeds of the simulated histories, from:to")
    parser.addoption("--seeds", default="1", help="seeds of the random histories, separated by commas")
