"""The controller's metrics of usage, in the process and without an API server."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.history import OTHER_USERS
from kfp_gpuquota.api.wire import ProjectView
from kfp_gpuquota.cluster.kubernetes.controller import metrics as controller_metrics
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.web.views.teams import tree
from tests.kubernetes.detached import QUOTAS, Detached, detached
from tests.polling import until_async

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.controller.metrics import Metrics

TEAM = {"project": "team"}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"gpuquota_{name}", labels)


async def started(test: Detached, gpus: int) -> Metrics:
    """A team with 4 guaranteed GPUs on a node with 8, whose pod asks for so many."""
    test.node(gpus=8)
    test.team("team")
    uid = test.pod("team", "pod", gpus)
    await test.start()
    await until_async(lambda: test.sent(uid))
    metrics = test.controller.metrics
    metrics.look(test.controller)
    return metrics


def test_gpu_seconds_are_added_up_by_kind() -> None:
    async def scenario() -> None:
        async with detached() as test:
            metrics = await started(test, 6)
            assert value(metrics, "held_gpus", **TEAM) == 6
            assert value(metrics, "borrowed_gpus", **TEAM) == 2
            assert value(metrics, "gpus") == 8
            kinds = {kind: value(metrics, "gpu_seconds_total", kind=kind, **TEAM) or 0.0 for kind in KINDS}
            idle = value(metrics, "idle_gpu_seconds_total") or 0.0
            now = (metrics._accounted_at or 0.0) + 10.0
            metrics.account(test.controller.snapshot, now)
            metrics.account(test.controller.snapshot, now + 0.5)  # too early
            for kind, gpus in KINDS.items():
                assert value(metrics, "gpu_seconds_total", kind=kind, **TEAM) == kinds[kind] + 10 * gpus
            assert value(metrics, "idle_gpu_seconds_total") == idle + 20

    asyncio.run(scenario())


KINDS = {"guaranteed": 4, "borrowed": 2}


def test_gpu_seconds_are_added_up_by_user_and_type_and_too_many_users_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with detached() as test:
            test.node(gpus=8, labels={GPU_PRODUCT: "H100"})
            test.team("team")
            uids = [
                test.pod("team", f"pod-{user}", 2, metadata={"labels": {labels.USER: user}}) for user in ("eve", "bob")
            ]
            uids.append(test.pod("team", "pod", 1))
            await test.start()
            await until_async(lambda: all(map(test.sent, uids)))
            metrics, snapshot = test.controller.metrics, test.controller.snapshot
            monkeypatch.setattr(controller_metrics, "MOST_HOLDERS", 2)
            metrics.account(snapshot, begin := time.monotonic() + 100.0)
            metrics._holders.clear()
            metrics.user_gpu_seconds.clear()
            metrics.account(snapshot, begin + 20.0)
            metrics.account(snapshot, begin + 21.0)  # too early
            given = (sample for family in metrics.user_gpu_seconds.collect() for sample in family.samples)
            sums = {tuple(one.labels.values()): one.value for one in given if one.name.endswith("_total")}
            assert sum(sums.values()) == pytest.approx(20 * 5)
            assert len(sums) == 3
            assert {user for _, user, _ in sums} > {OTHER_USERS}
            assert {(project, gpu_type) for project, _, gpu_type in sums} == {("team", "H100")}

    asyncio.run(scenario())


def test_what_is_held_below_a_department_counts_once() -> None:
    """The department had it again: on the page, in the GPU-seconds, and less of the cluster was idle."""

    async def scenario() -> None:
        async with detached() as test:
            test.node(gpus=8)
            for name, spec in {"research": {"guaranteed": 4}, "a": {"guaranteed": 2}, "b": {"guaranteed": 1}}.items():
                parent = {} if name == "research" else {"parent": "research"}
                test.see(QUOTAS, {"metadata": {"name": name, "uid": name}, "spec": {**spec, **parent}})
            uids = [test.pod("a", f"p{number}") for number in range(3)] + [test.pod("b", "q")]
            await test.start()
            await until_async(lambda: all(map(test.sent, uids)))
            snapshot, metrics = test.controller.snapshot, test.controller.metrics
            views = [
                ProjectView(project=project, allocated=held.gpus, over_quota=held.borrowed, requested=held.requested)
                for name, project in snapshot.projects.items()
                if (held := snapshot.held(name))
            ]
            shown = {team.name: (team.amounts.held, team.amounts.borrowed) for team in tree(views)}
            assert shown == {"research": (4, 0), "a": (3, 1), "b": (1, 0)}
            metrics.account(snapshot)
            idle = value(metrics, "idle_gpu_seconds_total") or 0.0
            metrics.account(snapshot, (metrics._accounted_at or 0.0) + 10.0)
            assert value(metrics, "idle_gpu_seconds_total") == idle + 40

    asyncio.run(scenario())


def test_the_wait_until_the_first_start_is_observed_once_for_each_job() -> None:
    async def scenario() -> None:
        async with detached() as test:
            metrics = await started(test, 1)
            assert value(metrics, "wait_seconds_count", **TEAM) == 1
            (job,) = test.controller.snapshot.state.jobs.values()
            job.started_at = time.time()
            metrics.started(job, time.time())
            assert value(metrics, "wait_seconds_count", **TEAM) == 1, "it has run before"
            assert value(metrics, "unmet_guarantee_gpus", **TEAM) == 0

            def on_time() -> bool:
                metrics.look(test.controller)
                return value(metrics, "plan_overdue_seconds") == 0

            await until_async(on_time)  # a plan that decides something is followed by another one
            assert value(metrics, "lists", path="/api/v1/pods") is not None

    asyncio.run(scenario())


def test_what_is_asked_for_within_the_guarantee_and_not_held_is_unmet() -> None:
    async def scenario() -> None:
        async with detached() as test:
            test.team("team")
            test.pod("team", "pod", 3)  # there is no node
            await test.start()
            metrics = test.controller.metrics

            def unmet() -> float | None:
                metrics.look(test.controller)
                return value(metrics, "unmet_guarantee_gpus", **TEAM)

            await until_async(unmet)
            assert value(metrics, "unmet_guarantee_gpus", **TEAM) == 3
            assert value(metrics, "waiting_jobs", **TEAM) == 1

    asyncio.run(scenario())
