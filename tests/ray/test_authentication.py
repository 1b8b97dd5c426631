"""A Ray cluster with token authentication."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import start_with
from kfp_gpuquota.cluster.ray.config import RayConfig
from kfp_gpuquota.errors import ClusterStartError
from tests.ray.conftest import cluster_on
from tests.security.other_user import NOBODY, as_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ray.conftest import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SERVE = """
import sys
from tests.ray.conftest import ray_nodes
with ray_nodes(head_gpus=1) as nodes:
    print(nodes.address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "token"
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture(scope="module")
def address(token_file: Path) -> Iterator[str]:
    with serving(token_file) as address:
        yield address


@contextlib.contextmanager
def serving(token_file: Path) -> Iterator[str]:
    """The address of a Ray cluster in a process of its own: Ray reads once for a process whether it authenticates."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as serving:
        assert serving.stdout is not None
        assert serving.stdin is not None
        yield serving.stdout.readline().strip()
        serving.stdin.close()


def test_a_token_opens_a_ray_cluster_that_is_closed_without_it(address: str, token_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterStartError, match="it may want a token"):
        start_with(Home(tmp_path / "home"), ClusterConfig(ray=RayConfig(address=address)))
    nodes: Any = SimpleNamespace(address=address)
    with cluster_on(nodes, token_file=str(token_file)) as cluster:
        cluster.project("team-a", 1)
        cluster.submit("hello", "true")
        cluster.wait_for_phase("hello", "Succeeded")


def test_rays_own_token_is_used_for_the_cluster_that_is_found(
    token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(
        token_file.read_text()
    )  # where `ray.init()` and `ray get-auth-token` store it
    monkeypatch.setenv("HOME", str(tmp_path))
    nodes: Any = SimpleNamespace(address="auto")
    with serving(token_file) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with cluster_on(nodes) as cluster:
            cluster.project("team-a", 1)
            cluster.submit("hello", "true")
            cluster.wait_for_phase("hello", "Succeeded")


READ = f"""
import os, sys
from ray._raylet import GcsClient  # before root's rights are given up
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
print("keys", len(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10)), flush=True)
"""


@as_root
def test_with_a_token_another_user_of_the_machine_does_not_reach_ray_and_without_one_does(
    address: str, nodes: RayCluster
) -> None:
    """Ray runs what a client asks for as its own user: the reason why docs/security.md demands a token."""

    def read(of: str) -> str:
        environment = {**os.environ, "HOME": "/nonexistent", "RAY_gcs_rpc_server_connect_timeout_s": "1"}
        command = [sys.executable, "-c", READ, of]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    assert "keys" not in read(address)
    assert "keys" in read(nodes.address)
