"""Two versions side by side on a real API server: the Lease passes between them, and nothing happens to anybody."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.version import __version__
from tests.effort import effort
from tests.kubernetes.controlled import LEASE
from tests.polling import TIMEOUT_S
from tools.observer.watching import Watching

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

ROOT = Path(__file__).parents[2]
RELEASE = "e24a8985d1cf3e7217f7acf8fca8b4fcb79d4743"
"""The commit with which the changelog begins 0.2.0."""

PASSES = effort(2, 8)
"""Of each two, one version ends orderly, and the other one is killed."""


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The packages of the last release. A checkout without its commit has today's, with another version string."""
    source = tmp_path / "older"
    source.mkdir()
    archive = subprocess.run(
        ["git", "archive", RELEASE, "kfp_gpuquota", "elastic_runtime"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode == 0:
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
        return source
    for package in ("kfp_gpuquota", "elastic_runtime"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    version = source / "kfp_gpuquota" / "version.py"
    version.write_text(version.read_text().replace(__version__, f"{__version__}.older"))
    return source


def holder(electing: Controlled) -> str:
    """Return the identity of the leader."""
    if not electing.cluster.api.exists(LEASE):
        return ""
    return str(electing.cluster.api.get(LEASE)["spec"].get("holderIdentity") or "")


def fixed(electing: Controlled, team: str) -> dict[str, tuple[str, str, str]]:
    """Return the uid, the node and the devices of the team's pods."""
    return {
        name: (pod["metadata"]["uid"], pod["spec"].get("nodeName", ""), pod["metadata"]["annotations"][labels.DEVICES])
        for name, pod in electing.pods(team).items()
        if pod["spec"].get("nodeName")
    }


@pytest.mark.slow
def test_the_lease_passes_between_two_versions_and_no_pod_notices(electing: Controlled, older: Path) -> None:
    """Each of them ends in turn, orderly and killed, while pods come and go within their teams' guarantees."""
    electing.add_nodes(2, gpus=4)
    teams = [electing.team("sides", guaranteed=4, limit=4) for _ in range(2)]
    sources = [older, None]
    running = [electing.start(source=older), electing.start()]
    training = electing.job(teams[0], "training", gpus=2, gpusPerWorker=1)
    electing.until_bound(electing.pod(teams[1], "steady"))
    electing.until_phase(training, "Running")
    lasting = [fixed(electing, team) for team in teams]
    assert [len(pods) for pods in lasting] == [2, 1]
    leaders = [holder(electing)]
    with Watching(electing.cluster.kubeconfig) as watching:
        for number in range(PASSES):
            for team in teams:
                electing.pod(team, f"before-{number}")
            leader = running.pop(0)
            (leader.kill if number % 2 else leader.terminate)()
            leader.wait(TIMEOUT_S)
            for team in teams:
                electing.pod(team, f"after-{number}")
            for team in teams:
                new = {f"before-{number}", f"after-{number}"}
                electing.wait(partial(lambda team, new: new <= electing.bound(team), team, new), electing.log)
            leaders.append(holder(electing))
            running.append(electing.start(source=sources[number % 2]))
            for team in teams:
                for name in (f"before-{number}", f"after-{number}"):
                    electing.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/{name}")
        for team, pods in zip(teams, lasting, strict=True):
            electing.wait(partial(lambda team, pods: fixed(electing, team) == pods, team, pods), electing.log)
        found = watching.violations()
    assert not found, "\n".join(map(str, found))
    assert len(set(leaders)) == PASSES + 1, leaders
    assert watching.observer.evictions == 0
    assert watching.observer.admissions == sum(map(len, lasting)) + PASSES * 4, "each pod once"
    status = electing.cluster.api.get(training)["status"]
    assert (status["phase"], status["restarts"], status["attempt"]) == ("Running", 0, 1)
    assert "Traceback" not in electing.log()
