"""Workers of an ElasticJob that their node or the cluster ends are no failures of the job, and are not counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kubernetes import detached as watches
from tests.kubernetes.test_restarts import make_node, set_quota
from tests.kubernetes.twin_world import World, running

DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": "low on memory"}


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
