"""What a pod takes of a node beside GPUs, as kube-scheduler adds it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api.node import SharingRules
from kfp_gpuquota.api.resources import CountedJobSpec
from kfp_gpuquota.cluster.kubernetes.convert import resource_requests
from kfp_gpuquota.cluster.kubernetes.convert.nodes import node_of
from kfp_gpuquota.cluster.kubernetes.convert.non_gpu_pods import NodeUsage, NonGpuPods
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import (
    ResourceRequests,
    millicores,
    requested,
    resource_requests_of,
    whole_bytes,
)
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node, PodSpec
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import QuotaPolicyObject
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import rules_of
from kfp_gpuquota.scheduler.state.intake import request_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container

GI = 1 << 30
MANY = 10_000


def asks(cpu: str = "", limit: str = "", **more: Any) -> dict[str, Any]:
    resources = {"requests": {"cpu": cpu} if cpu else {}, "limits": {"cpu": limit} if limit else {}}
    return {"name": "x", "resources": resources, **more}


def sidecar(cpu: str) -> dict[str, Any]:
    return asks(cpu, restartPolicy="Always")


@pytest.mark.parametrize(
    ("spec", "milli"),
    [
        ({"containers": [asks("500m"), asks("2")]}, 2500),
        ({"containers": [asks()]}, 0),
        ({"containers": [asks(limit="3")]}, 3000),
        ({"containers": [asks("1", limit="3")]}, 1000),
        ({"containers": [asks("1")], "initContainers": [asks("3"), asks("2")]}, 3000),
        ({"containers": [asks("1")], "initContainers": [sidecar("2"), asks("3")]}, 5000),
        ({"containers": [asks("1")], "initContainers": [asks("3"), sidecar("2")]}, 3000),
        ({"containers": [asks("2")], "initContainers": [asks("3"), sidecar("2")]}, 4000),
        ({"containers": [asks("1")], "overhead": {"cpu": "250m"}}, 1250),
        ({"containers": [asks("1")], "resources": {"requests": {"cpu": "4"}}, "overhead": {"cpu": "1"}}, 5000),
        ({"containers": [asks("100u")]}, 1),
        ({"containers": [{"resources": {"requests": {"cpu": 2}}}, {"resources": {"limits": {"cpu": 0.5}}}]}, 2500),
    ],
)
def test_a_pod_needs_what_kube_scheduler_would_count(spec: dict[str, Any], milli: int) -> None:
    assert resource_requests_of(msgspec.convert(spec, PodSpec)).cpu == milli


def test_memory_is_counted_in_bytes_and_planned_in_whole_mebibytes() -> None:
    spec = {"containers": [{"name": "x", "resources": {"requests": {"memory": "1G"}}}]}
    needs = resource_requests_of(msgspec.convert(spec, PodSpec))
    assert needs == ResourceRequests(0, 10**9)
    assert needs.constraints() == {"cpu": None, "memory_mib": 954, "resources": ()}


@given(st.integers(0, 1 << 70), st.integers(0, 1 << 70))
def test_whatever_a_pod_asks_for_is_a_job_that_can_be(cpu: int, memory: int) -> None:
    CountedJobSpec(name="x", project="x", command=("x",), **ResourceRequests(cpu, memory).constraints())


@given(st.integers(1, 10**7))
def test_no_thousandth_of_a_core_is_counted_that_was_not_asked_for(milli: int) -> None:
    spec = CountedJobSpec(name="x", project="x", command=("x",), **ResourceRequests(milli).constraints())
    assert request_of(spec).cpu == milli


def node(gpus: str, pods: str = "250") -> Node:
    allocatable = {"cpu": "64", "memory": "512Gi", "pods": pods, "nvidia.com/gpu": gpus}
    return msgspec.convert({"metadata": {"name": "n"}, "status": {"allocatable": allocatable}}, Node)


def test_what_bystanders_take_of_a_node_is_gone() -> None:
    seen = node_of(node("2"), taken=NodeUsage(cpu=60_500, memory=500 * GI + 1, pods=3))
    assert (seen.cpu, seen.memory_mib, seen.max_workers) == (3.5, 12 * 1024 - 1, None)
    over = node_of(node("2"), taken=NodeUsage(cpu=65_000, memory=513 * GI))
    assert (over.cpu, over.memory_mib) == (0, 0)


def test_places_are_counted_where_they_can_run_out() -> None:
    assert node_of(node("2", pods="10"), taken=NodeUsage(pods=9)).max_workers == 1
    assert node_of(node("2", pods="10"), taken=NodeUsage(pods=11)).max_workers == 0


def test_a_node_without_gpus_adds_nothing_to_what_teams_share() -> None:
    seen = node_of(node("0"))
    assert (seen.cpu, seen.memory_mib) == (0, 0)


MOVES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "a", "b"]), st.integers(0, 3)), max_size=30)


@given(MOVES)
def test_what_is_taken_is_what_those_who_are_there_take(moves: list[tuple[int, str, int]]) -> None:
    books, there = NonGpuPods(), dict[str, tuple[str, int]]()
    for pod, where, cpu in moves:
        if where:
            books.put(str(pod), where, ResourceRequests(cpu, 2 * cpu))
            there[str(pod)] = where, cpu
        else:
            books.drop(str(pod))
            there.pop(str(pod), None)
        for name in "ab":
            here = [cpu for at, cpu in there.values() if at == name]
            assert books.on(name) == NodeUsage(sum(here), 2 * sum(here), len(here))


CONTAINERS = st.lists(
    st.tuples(
        st.booleans(),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 5), max_size=2),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 5), max_size=2),
    ),
    max_size=4,
)


def of_one_resource(spec: PodSpec, name: str) -> int:
    """Kubernetes' rule, in a sum for each time at which containers run together."""

    def amount(one: Container) -> int:
        return int(one.resources.requests.get(name) or one.resources.limits.get(name) or 0)

    def sidecars(before: int) -> int:
        return sum(amount(one) for one in spec.init_containers[:before] if one.restart_policy == "Always")

    starting = [sidecars(at) + amount(one) for at, one in enumerate(spec.init_containers)]
    return max([sidecars(len(spec.init_containers)) + sum(map(amount, spec.containers)), *starting])


@given(CONTAINERS, CONTAINERS, st.dictionaries(st.sampled_from("ab"), st.sampled_from(["0", "0m", "7"])))
def test_each_resource_is_counted_as_if_it_were_the_only_one(first: Any, then: Any, whole: dict[str, str]) -> None:
    init = [
        {"resources": {"requests": requests, "limits": limits}, "restartPolicy": "Always" if stays else ""}
        for stays, requests, limits in first
    ]
    containers = [{"resources": {"requests": requests, "limits": limits}} for _, requests, limits in then]
    given = {"containers": containers, "initContainers": init, "resources": {"requests": whole}}
    spec = msgspec.convert({**given, "overhead": {"c": "1"}}, PodSpec)
    found = dict(resource_requests_of(spec).others)
    for name in "abc":
        plain = of_one_resource(spec, name)
        expected = {"7": 7, "0m": 0}.get(whole.get(name, ""), plain) + (name == "c")
        assert found.get(name, 0) == expected


@pytest.mark.parametrize("containers", ["containers", "initContainers"])
def test_ten_thousand_resources_of_a_pod_are_each_read_once(containers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may create such a pod: compared with each container, its resources took minutes."""
    read = list[str]()

    def counting(requests: Mapping[str, Any], limits: Mapping[str, Any], name: str) -> str:
        read.append(name)
        assert len(read) <= 2 * MANY
        return requested(requests, limits, name)

    monkeypatch.setattr(resource_requests, "requested", counting)
    many = [{"resources": {"limits": {f"example.com/r{number}": "1"}}} for number in range(MANY)]
    found = resource_requests_of(msgspec.convert({containers: many}, PodSpec))
    assert len(found.others) == MANY


def test_an_amount_that_cannot_be_read_or_is_negative_counts_for_nothing() -> None:
    assert [millicores(text) for text in ("1500m", "0.0001", "-2", "much")] == [1500, 1, 0, 0]
    assert [whole_bytes(text) for text in ("1Ki", "-1Ki", "much")] == [1024, 0, 0]


def test_the_policy_sets_how_gpus_are_shared_and_whether_jobs_are_moved() -> None:
    spec = {"sharing": {"maxSharers": 4, "memoryReserve": 0.1, "smallestShare": 0.1}, "moves": False}
    stored = msgspec.convert({"metadata": {"name": "default"}, "spec": spec}, QuotaPolicyObject)
    rules = rules_of(stored)
    assert (rules.sharing, rules.moves) == (
        SharingRules(max_sharers=4, memory_reserve=0.1, smallest_share=0.1),
        False,
    )
    seen = node_of(node("2"), sharing=rules.sharing)
    assert (seen.max_sharers, seen.memory_reserve, seen.smallest_share) == (4, 0.1, 0.1)
    assert rules_of(msgspec.convert({"metadata": {"name": "default"}}, QuotaPolicyObject)).sharing == SharingRules()
