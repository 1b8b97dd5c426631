"""Default requests of containers: as the API server writes them into pods, and as ElasticJobs are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import LimitRanges, completed
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import resource_requests_of
from kfp_gpuquota.cluster.kubernetes.objects.core_types import LimitRange, Pod, PodSpec
from tests.polling import until

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled
    from tools.devcluster import DevCluster

Object = dict[str, Any]


def limit_range(name: str, *items: Object) -> Object:
    return {"metadata": {"name": name}, "spec": {"limits": list(items)}}


def container(name: str, requests: Object | None = None, limits: Object | None = None) -> Object:
    return {"name": name, "image": "none", "resources": {"requests": requests or {}, "limits": limits or {}}}


DEFAULTS = {
    "requests": [limit_range("a", {"type": "Container", "defaultRequest": {"cpu": "2", "memory": "1Gi"}})],
    "limits only": [limit_range("a", {"type": "Container", "default": {"cpu": "3"}})],
    "both": [limit_range("a", {"type": "Container", "default": {"cpu": "3"}, "defaultRequest": {"cpu": "500m"}})],
    "a maximum": [limit_range("a", {"type": "Container", "max": {"cpu": "8"}})],  # which is a default, too
    "of claims": [limit_range("a", {"type": "PersistentVolumeClaim", "max": {"storage": "1Ti"}})],
    "two": [
        limit_range("a", {"type": "Container", "defaultRequest": {"cpu": "2"}}),
        limit_range("b", {"type": "Container", "defaultRequest": {"memory": "5Gi"}}),
    ],
}
SPECS: list[Object] = [
    {
        "containers": [
            container("says-nothing"),
            container("asks", {"cpu": "1"}),
            container("bound", None, {"cpu": "4"}),
        ]
    },
    {"containers": [container("one", {"memory": "7Gi"})], "initContainers": [container("first"), container("second")]},
]


def until_applied(cluster: DevCluster, pods: str, given: list[Object]) -> None:
    """Wait for the API server's own cache of LimitRanges, from which its admission reads."""
    items = [item for body in given for item in body["spec"]["limits"] if item["type"] == "Container"]
    wanted = {name for item in items for field in ("default", "defaultRequest", "max") for name in item.get(field, {})}

    def applied() -> bool:
        probe = {"metadata": {"name": "probe"}, "spec": {"containers": [container("main")]}}
        created = cluster.api.create(pods, probe, dryRun="All")
        return wanted <= set(created["spec"]["containers"][0]["resources"].get("requests", {}))

    until(applied, f"defaults for {sorted(wanted)}")


@pytest.mark.parametrize("given", DEFAULTS.values(), ids=DEFAULTS)
def test_a_pod_needs_what_the_api_server_makes_of_it(cluster: DevCluster, namespace: str, given: list[Object]) -> None:
    ranges = LimitRanges(lambda _: None)
    for body in given:
        made = cluster.api.create(f"/api/v1/namespaces/{namespace}/limitranges", body)
        ranges.put(msgspec.convert(made, LimitRange))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    until_applied(cluster, pods, given)
    for number, spec in enumerate(SPECS):
        body = {"metadata": {"name": f"p{number}"}, "spec": {**spec, "schedulingGates": [{"name": "example.com/stay"}]}}
        created = cluster.api.create(pods, body)
        expected = resource_requests_of(msgspec.convert(created, Pod).spec)
        assert (
            resource_requests_of(completed(msgspec.convert(spec, PodSpec), ranges.requests_in(namespace))) == expected
        )


def test_a_range_that_is_gone_adds_nothing_and_says_where() -> None:
    reported: list[str] = []
    ranges = LimitRanges(reported.append)
    body = limit_range("a", {"type": "Container", "defaultRequest": {"cpu": "2"}})
    body["metadata"] |= {"namespace": "team", "uid": "u"}
    ranges.put(msgspec.convert(body, LimitRange))
    assert (ranges.requests_in("team"), ranges.requests_in("other")) == ({"cpu": "2"}, {})
    ranges.drop("u")
    assert ranges.requests_in("team") == {}
    assert reported == ["team", "team"]


def test_an_elastic_job_is_planned_with_the_requests_that_its_pods_will_be_given(controlled: Controlled) -> None:
    nodes = controlled.add_nodes(2, gpus=4)  # of 64 cores each
    team = controlled.team(guaranteed=8)
    path = f"/api/v1/namespaces/{team}/limitranges"
    controlled.cluster.api.create(path, limit_range("a", {"type": "Container", "defaultRequest": {"cpu": "100"}}))
    controlled.start()
    job = controlled.job(team, "wide", gpus=2, gpusPerWorker=1)
    controlled.until(job, lambda j: "200 CPUs" in j.get("status", {}).get("message", ""))
    smaller = {"spec": {"limits": [{"type": "Container", "defaultRequest": {"cpu": "40"}}]}}
    controlled.cluster.api.patch(f"{path}/a", smaller)
    controlled.until_phase(job, "Running")
    controlled.wait(lambda: len(controlled.bound(team)) == 2)
    assert {pod["spec"]["nodeName"] for pod in controlled.pods(team).values()} == set(nodes)
