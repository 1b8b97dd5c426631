"""What happens to a shared cluster on a rough day: a burst of pods, and definitions that somebody deletes by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.kubernetes.crd.schemas import custom_resource_definitions
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.conftest import install_crds
from tests.kubernetes.controlled import Controlled, pod_body
from tests.kubernetes.installation import QUOTAS
from tools.observer.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

LEASE = "/apis/coordination.k8s.io/v1/namespaces/gpuquota-system/leases/gpuquota-controller"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
BURST = 2000

pytestmark = pytest.mark.slow


@pytest.fixture
def controlled(system_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    running = Controlled(system_cluster, tmp_path, arguments=["--leader-elect"])
    yield running
    running.close()
    if system_cluster.api.exists(LEASE):
        system_cluster.api.delete(LEASE)


def test_a_burst_of_pods_of_one_team_keeps_no_other_team_waiting_and_costs_no_lease(controlled: Controlled) -> None:
    controlled.add_nodes(2, gpus=4)
    loud, quiet = controlled.team("loud", guaranteed=4), controlled.team("quiet", guaranteed=4)
    controlled.start()
    controlled.until_bound(controlled.pod(quiet, "before"))
    api = controlled.cluster.api

    def create(number: int) -> None:
        body = pod_body(f"burst-{number}", 1)
        body["spec"]["nodeSelector"] = {"shape": f"s{number}"} if number % 2 else {}
        api.create(f"/api/v1/namespaces/{loud}/pods", body)

    with Watching(controlled.cluster.kubeconfig) as watching:
        with ThreadPoolExecutor(8) as pool:
            creating = [pool.submit(create, number) for number in range(BURST)]
            controlled.until_bound(controlled.pod(quiet, "beside"))
            for one in creating:
                one.result()
        controlled.until_bound(controlled.pod(quiet, "after"))
        controlled.wait(lambda: len(controlled.bound(loud)) == 5)
        assert not watching.violations()
    assert api.get(LEASE)["spec"]["leaseTransitions"] == 0


def test_definitions_that_are_deleted_by_hand_end_no_pod_and_are_noticed_when_they_are_back(
    controlled: Controlled,
) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    process = controlled.start()
    api = controlled.cluster.api
    running = controlled.until_bound(controlled.pod(team, "running"))
    try:
        for definition in custom_resource_definitions():
            api.delete(f"{DEFINITIONS}/{definition['metadata']['name']}")
        controlled.wait(lambda: "gpuquotas is not installed" in controlled.log(), controlled.log)
        waits = controlled.pod(team, "waits")
    finally:
        for definition in custom_resource_definitions():
            api.until_gone(f"{DEFINITIONS}/{definition['metadata']['name']}")
        install_crds(controlled.cluster)
    quota = {
        "apiVersion": labels.API_VERSION,
        "kind": "GpuQuota",
        "metadata": {"name": team},
        "spec": {"guaranteed": 4},
    }
    api.create(QUOTAS, quota)
    controlled.until_bound(waits)
    (still,) = [pod for name, pod in controlled.pods(team).items() if name == "running"]
    assert still["metadata"]["uid"] == running["metadata"]["uid"]
    assert "deletionTimestamp" not in still["metadata"]
    assert process.poll() is None
