"""What happens to a shared cluster on a rough day: a burst of pods, and definitions that somebody deletes by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations.definitions import custom_resource_definitions
from tests.effort import effort
from tests.kubernetes.conftest import install_crds
from tests.kubernetes.controlled import LEASE, Controlled, pod_body
from tests.kubernetes.installation import QUOTAS
from tools.observer.watching import Watching

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
BURST = effort(400, 1200)

pytestmark = pytest.mark.slow


def test_a_burst_of_pods_of_one_team_keeps_no_other_team_waiting_and_costs_no_lease(electing: Controlled) -> None:
    electing.add_nodes(2, gpus=4)
    loud, quiet = electing.team("loud", guaranteed=4), electing.team("quiet", guaranteed=4)
    electing.start()
    electing.until_bound(electing.pod(quiet, "before"))
    api = electing.cluster.api

    def create(number: int) -> None:
        body = pod_body(f"burst-{number}", 1)
        body["spec"]["nodeSelector"] = {"shape": f"s{number}"} if number % 2 else {}
        api.create(f"/api/v1/namespaces/{loud}/pods", body)

    with Watching(electing.cluster.kubeconfig) as watching:
        with ThreadPoolExecutor(8) as pool:
            creating = [pool.submit(create, number) for number in range(BURST)]
            electing.until_bound(electing.pod(quiet, "beside"))
            for one in creating:
                one.result()
        electing.until_bound(electing.pod(quiet, "after"))
        electing.wait(lambda: len(electing.bound(loud)) == 5)
        assert not watching.violations()
    assert api.get(LEASE)["spec"]["leaseTransitions"] == 0


def test_definitions_that_are_deleted_by_hand_end_no_pod_and_are_noticed_when_they_are_back(
    electing: Controlled,
) -> None:
    electing.add_nodes(1, gpus=4)
    team = electing.team(guaranteed=4)
    process = electing.start()
    api = electing.cluster.api
    running = electing.until_bound(electing.pod(team, "running"))
    try:
        for definition in custom_resource_definitions():
            api.delete(f"{DEFINITIONS}/{definition['metadata']['name']}")
        electing.wait(lambda: "gpuquotas is not installed" in electing.log(), electing.log)
        waits = electing.pod(team, "waits")
    finally:
        for definition in custom_resource_definitions():
            api.until_gone(f"{DEFINITIONS}/{definition['metadata']['name']}")
        install_crds(electing.cluster)
    quota = {
        "apiVersion": labels.API_VERSION,
        "kind": "GpuQuota",
        "metadata": {"name": team},
        "spec": {"guaranteed": 4},
    }
    api.create(QUOTAS, quota)
    electing.until_bound(waits)
    (still,) = [pod for name, pod in electing.pods(team).items() if name == "running"]
    assert still["metadata"]["uid"] == running["metadata"]["uid"]
    assert "deletionTimestamp" not in still["metadata"]
    assert process.poll() is None
