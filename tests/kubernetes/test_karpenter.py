"""A pool that the real Karpenter grows, with its KWOK provider. `make soak` builds it (ten minutes) and runs this.

`GPUQUOTA_KARPENTER` is the program, built with `go install sigs.k8s.io/karpenter/kwok@VERSION`, and
`GPUQUOTA_KARPENTER_CRDS` the module's folder, which has Karpenter's custom resources.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.conftest import start_or_skip
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import MANIFESTS, NAMESPACE
from tests.polling import TIMEOUT_S
from tools.devcluster import Options
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster

PROGRAM, MODULE = os.environ.get("GPUQUOTA_KARPENTER", ""), Path(os.environ.get("GPUQUOTA_KARPENTER_CRDS", "."))
CRDS = ("pkg/apis/crds", "kwok/apis/crds")
POOL = "burst"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="GPUQUOTA_KARPENTER names no Karpenter; make soak builds one"),
]


def offering(name: str, gpus: int) -> dict[str, Any]:
    """An instance type of KWOK's provider, with GPUs."""
    where = {"karpenter.sh/capacity-type": "on-demand", "topology.kubernetes.io/zone": "zone-a"}
    amounts = {"cpu": "32", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "110"}
    requirements = [{"key": key, "operator": "In", "values": [value]} for key, value in where.items()]
    return {
        "name": name,
        "architecture": "amd64",
        "operatingSystems": ["linux"],
        "resources": {**amounts, "nvidia.com/gpu": gpus},
        "offerings": [{"Price": float(gpus), "Available": True, "Requirements": requirements}],
    }


NODE_CLASS = {
    "apiVersion": "karpenter.kwok.sh/v1alpha1",
    "kind": "KWOKNodeClass",
    "metadata": {"name": "default"},
    "spec": {"nodeRegistrationDelay": "0s"},
}
NODE_POOL = {
    "apiVersion": "karpenter.sh/v1",
    "kind": "NodePool",
    "metadata": {"name": POOL},
    "spec": {
        "disruption": {"consolidateAfter": "Never"},
        "template": {
            "metadata": {"labels": {labels.POOL: POOL}},
            "spec": {
                "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
                "requirements": [{"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["g-2x"]}],
            },
        },
    },
}


@pytest.fixture
def karpenter(tmp_path: Path) -> Iterator[DevCluster]:
    """A cluster whose only nodes are those that Karpenter makes."""
    cluster = start_or_skip(tmp_path / "cluster", Options(kwok_nodes=0))
    types = tmp_path / "instance-types.json"
    types.write_text(json.dumps([offering("g-2x", 2)]))
    for folder in CRDS:
        cluster.kubectl("apply", "-f", str(MODULE / folder))
    cluster.api.until_served("/apis/karpenter.sh/v1/nodepools")
    cluster.api.until_served("/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses")
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.kubeconfig),
        "DISABLE_LEADER_ELECTION": "true",
        "INSTANCE_TYPES_FILE_PATH": str(types),
        "METRICS_PORT": str(free_port()),
        "HEALTH_PROBE_PORT": str(free_port()),
        "SYSTEM_NAMESPACE": "kube-system",
    }
    with (tmp_path / "karpenter.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM], env=environment, stdout=log, stderr=log)
    try:
        cluster.api.create("/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses", NODE_CLASS)
        cluster.api.create("/apis/karpenter.sh/v1/nodepools", NODE_POOL)
        yield cluster
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        cluster.stop()


def test_karpenter_makes_nodes_for_pods_within_quota_and_none_for_those_that_wait(
    karpenter: DevCluster, tmp_path: Path
) -> None:
    karpenter.kubectl("apply", "-k", str(MANIFESTS / "crds"))
    karpenter.make_namespace(NAMESPACE)
    karpenter.api.until_served(f"/apis/{labels.API_VERSION}/quotapolicies")
    world = Controlled(karpenter, tmp_path)
    policy = {"pools": {POOL: {"autoscaled": {"maxGpus": 8, "gpusPerNode": 2}}}}
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}, "spec": policy}
    karpenter.api.apply(f"/apis/{labels.API_VERSION}/quotapolicies/default", body)
    team = world.team(pools={POOL: {"guaranteed": 3}})
    world.start()
    for i in range(6):
        world.pod(team, f"p{i}", labels_={labels.POOL: POOL})
    world.wait(
        lambda: len(world.bound(team)) == 4,
        lambda: world.log()[-3000:] + (tmp_path / "karpenter.log").read_text()[-3000:],
        120.0,
    )
    assert len(karpenter.api.items("/api/v1/nodes")) == 2, "3 GPUs are guaranteed, on nodes of 2"
    assert len(world.waiting(team)) == 2
    world.stop()
