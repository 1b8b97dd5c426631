"""A shared cluster of root, and four users: two members of a project, an administrator, and two without rights."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from kfp_gpuquota.api.wire import MembersChange
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.shared.config import SharedConfig
from tests.conftest import EmbeddedCluster, running_cluster
from tests.shared import people

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.server.client import Client
    from tests.shared.people import Person


@dataclass(frozen=True)
class Users:
    """`anna` and `ben` are members of vision, `cleo` of no project; `dora` is administrator; `eve` may not connect."""

    anna: Person
    ben: Person
    cleo: Person
    dora: Person
    eve: Person

    def all(self) -> tuple[Person, ...]:
        """Return all of them."""
        return self.anna, self.ben, self.cleo, self.dora, self.eve


@dataclass
class SharedCluster(EmbeddedCluster):
    """The cluster as root's, and the socket that users reach."""

    socket: Path


@contextmanager
def passable() -> Iterator[Path]:
    """A directory that every user may pass. Each run of pytest makes the parent of its own ones private."""
    made = Path(tempfile.mkdtemp(prefix="gpuquota-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Such a directory, in place of pytest's."""
    with passable() as made:
        yield made


@pytest.fixture(scope="session")
def homes() -> Iterator[Path]:
    """The directory of the accounts' homes."""
    with passable() as made:
        yield made


@pytest.fixture(scope="session")
def users(homes: Path) -> Iterator[Users]:
    """The accounts."""
    for group in (people.ACCESS, people.ADMINS):
        subprocess.run(["groupadd", "--system", group], check=True)
    groups = {"anna": [people.ACCESS], "ben": [people.ACCESS], "cleo": [people.ACCESS]}
    groups |= {"dora": [people.ACCESS, people.ADMINS], "eve": []}
    made: list[Person] = []
    try:
        for name, its in groups.items():
            made.append(people.make(name, homes / name, its))
            made[-1].home.chmod(0o700)
        yield Users(*made)
    finally:
        people.remove(made)
        for group in (people.ACCESS, people.ADMINS):
            subprocess.run(["groupdel", group], check=True)


def config(directory: Path) -> ClusterConfig:
    """The shape of a shared cluster with two slots."""
    shared = SharedConfig(socket=str(directory / "run" / "socket"), group=people.ACCESS, admin_group=people.ADMINS)
    return ClusterConfig(gpus_per_node=2, shared=shared)


@pytest.fixture
def shared_cluster(users: Users, tmp_path: Path) -> Iterator[SharedCluster]:
    """The running cluster, with a project of two members."""
    shape = config(tmp_path)
    assert shape.shared is not None
    with running_cluster(tmp_path / "home", shape) as cluster:
        cluster.project("vision", 1)
        client = cast("Client", cluster.client)
        client.change_members("vision", MembersChange(add=(users.anna.name, users.ben.name)))
        yield SharedCluster(cluster.home, cluster.client, Path(shape.shared.socket))
