"""Workers of an ElasticJob that their node or the cluster ends are no failures of the job, and are not counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kubernetes import detached as watches
from tests.kubernetes.test_restarts import make_node, pod_body, set_quota
from tests.kubernetes.twin_world import World, running

DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": "low on memory"}

REJECTED = {"phase": "Failed", "reason": "TopologyAffinityError", "message": "Pod was rejected: no devices are aligned"}


async def status_after(workers: int = 1, **ended: Any) -> dict[str, Any]:
    """The status of a plain job, one of whose workers ended in this way."""
    world = World()
    make_node(world, "n0")
    set_quota(world, "a", 4)
    async with running(world) as twin:
        world.twin = twin
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        spec = {"gpus": workers, "minGpus": workers, "maxGpus": workers, "gpusPerWorker": 1, "template": template}
        meta = {"name": "job", "namespace": "a", "uid": "job", "generation": 1}
        world.put(watches.JOBS, {"metadata": meta, "spec": spec})
        await twin.settle()
        world.run_pods()
        await twin.settle()
        pod = next(iter(world.objects[watches.PODS].values()))
        pod["status"] = {"phase": "Failed", **ended}
        world.put(watches.PODS, pod)
        await twin.settle()
        world.end_terminating()
        await twin.settle()
        status: dict[str, Any] = next(iter(world.objects[watches.JOBS].values()))["status"]
        return status


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_its_kubelet_evicts_returns_its_job_to_the_queue(workers: int) -> None:
    status = asyncio.run(status_after(workers, conditions=[DISRUPTED]))
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Starting", 2, 0)


@pytest.mark.parametrize("code", [1, 137])
def test_a_worker_that_fails_by_itself_ends_a_plain_job(code: int) -> None:
    terminated = {"name": "main", "state": {"terminated": {"exitCode": code}}}
    status = asyncio.run(status_after(containerStatuses=[terminated]))
    assert (status["phase"], status["exitCode"]) == ("Failed", code)


async def after_rejections(nodes: int) -> tuple[list[str], dict[str, Any]]:
    """The nodes to which a job's worker was sent while the kubelet of each rejects it, and the job's status."""
    world = World()
    for index in range(nodes):
        make_node(world, f"n{index}")
    set_quota(world, "a", 4)
    async with running(world) as twin:
        world.twin = twin
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        spec = {"gpus": 1, "minGpus": 1, "maxGpus": 1, "gpusPerWorker": 1, "maxRestarts": 0, "template": template}
        meta = {"name": "job", "namespace": "a", "uid": "job", "generation": 1}
        world.put(watches.JOBS, {"metadata": meta, "spec": spec})
        await twin.settle()
        sent: list[str] = []
        for _ in range(nodes + 2):
            world.run_pods(start=False)
            for pod in [one for one in world.objects[watches.PODS].values() if one["status"] != REJECTED]:
                sent.append(pod["spec"]["nodeName"])
                world.put(watches.PODS, {**pod, "status": REJECTED})
            await twin.settle()
            world.end_terminating()
            await twin.settle()
        status: dict[str, Any] = next(iter(world.objects[watches.JOBS].values()))["status"]
        return sent, status


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_whose_kubelet_rejects_a_worker_gets_no_other_of_its_job_and_the_job_waits(nodes: int) -> None:
    sent, status = asyncio.run(after_rejections(nodes))
    assert sorted(sent) == [f"n{index}" for index in range(nodes)]
    assert (status["phase"], status["restarts"]) == ("Pending", 0)


async def bound_after_a_rejection() -> list[tuple[str, str]]:
    """The nodes of two pods of different users, which have no owner; the kubelet has rejected the first one."""
    world = World()
    make_node(world, "n0")
    set_quota(world, "a", 4)
    set_quota(world, "b", 4)
    async with running(world) as twin:
        world.twin = twin
        bound = []
        for namespace in ("a", "b"):
            world.put(watches.PODS, pod_body({}, name="p", namespace=namespace, uid=f"pod-{namespace}"))
            await twin.settle()
            world.run_pods(start=False)
            (pod,) = (one for one in world.objects[watches.PODS].values() if one["metadata"]["namespace"] == namespace)
            bound.append((namespace, pod["spec"].get("nodeName", "")))
            world.put(watches.PODS, {**pod, "status": REJECTED})
            await twin.settle()
        return bound


def test_a_node_that_rejects_a_pod_without_an_owner_is_not_kept_from_other_users() -> None:
    assert asyncio.run(bound_after_a_rejection()) == [("a", "n0"), ("b", "n0")]
