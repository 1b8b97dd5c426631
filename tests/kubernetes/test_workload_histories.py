"""Random histories of workloads of all kinds beside each other, on the real API server with the webhook.

An independent observer watches them. At the end there is a node for everything: what its user wants to run must run,
what its user has suspended must not, and no Job has failed. `WORKLOADS=17:18` plays the history of seed 17 alone.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.device_types import CLASS_PREFIX
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import ACCOUNT, KEYS, NAMESPACE, QUOTAS
from tests.kubernetes.test_suspended_owners import job_spec
from tests.kubernetes.test_webhook import MANAGED
from tests.kubernetes.trainer import AppWrappers, LeaderWorkers, Notebooks, Trainer, TrainingOperator, install_kinds
from tests.kubernetes.workloads import CLAIMED, OTHER_GPUS, Workloads
from tools.observer.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

SEEDS = range(*map(int, os.environ.get("WORKLOADS", "0:1").split(":")))
STEPS = 80
KILLED_EVERY = 13
SETTLED_EVERY = 3
RECLAIMED_S = 3.0
"""Until the next operation a team is served whose guarantee others hold, if that is possible at all."""
SETTLED_S = 90.0
DEVICES = "/apis/resource.k8s.io/v1"
DRIVER = "gold.example.com"
TABLE = {"gpuResources": [{"name": OTHER_GPUS}, {"name": f"{CLASS_PREFIX}{CLAIMED}"}]}


@pytest.fixture
def mixed(kubeflow_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    """A controller with its own account, for clusters with GPUs of two vendors, and of a DRA driver."""
    cluster = kubeflow_cluster
    install_kinds(cluster.api)
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    cluster.api.apply(f"{QUOTA_POLICIES}/default", {**body, "spec": TABLE})
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    cluster.api.create(f"{DEVICES}/deviceclasses", {"metadata": {"name": CLAIMED}, "spec": {"selectors": [selector]}})
    kubeconfig = cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT)
    made = Controlled(cluster, tmp_path, arguments=[f"--keys-namespace={KEYS}"], kubeconfig=kubeconfig)
    yield made
    made.close()
    cluster.api.delete(f"{DEVICES}/deviceclasses/{CLAIMED}")
    cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"gpuResources": None}})


def add_nodes(mixed: Controlled, count: int, gpus: int) -> None:
    """Add nodes, each with so many GPUs of one vendor, of another one, and of a DRA driver."""
    api = mixed.cluster.api
    for name in mixed.add_nodes(count, gpus):
        amounts = {OTHER_GPUS: str(gpus)}
        api.patch(f"/api/v1/nodes/{name}/status", {"status": {"capacity": amounts, "allocatable": amounts}})
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        devices = [{"name": f"d{number}"} for number in range(gpus)]
        spec: dict[str, Any] = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": devices}
        api.create(f"{DEVICES}/resourceslices", {"metadata": {"name": f"{name}-gold"}, "spec": spec})
        mixed.on_close.append(partial(api.delete, f"{DEVICES}/resourceslices/{name}-gold"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_workloads_of_all_kinds_are_in_the_end_as_their_users_want_them(mixed: Controlled, seed: int) -> None:
    api = mixed.cluster.api
    add_nodes(mixed, 2, gpus=4)
    teams = [mixed.team("mixed", guaranteed=4), mixed.team("mixed", guaranteed=2), mixed.team("mixed", limit=6)]
    for team in teams:
        api.patch(f"/api/v1/namespaces/{team}", {"metadata": {"labels": MANAGED}})
        trainer = Trainer(api, team, job_spec(2, completionMode="Indexed", gated=False))
        mixed.on_close.append(trainer.close)
        for double in (AppWrappers, LeaderWorkers, Notebooks, TrainingOperator):
            mixed.on_close.append(double(api, team).close)
    mixed.start()
    workloads = Workloads(api, teams, seed)
    with Watching(mixed.cluster.kubeconfig) as watching:
        for number in range(STEPS):
            workloads.step()
            if number % SETTLED_EVERY == 0:
                mixed.wait(workloads.settled, mixed.log)
                with suppress(TimeoutError):
                    mixed.wait(workloads.served, "", RECLAIMED_S)
            if number % KILLED_EVERY == KILLED_EVERY - 1:
                mixed.kill()
                mixed.start()
        for budget in workloads.budgets:
            api.delete(budget)
        for team in teams:
            api.patch(f"{QUOTAS}/{team}", {"spec": {"guaranteed": 200, "limit": None}})
        add_nodes(mixed, 2, gpus=60)
        try:
            mixed.wait(lambda: not workloads.wrong(), workloads.wrong, SETTLED_S)
        except BaseException as error:
            error.add_note("\n".join([f"WORKLOADS={seed}:{seed + 1}", *workloads.done]))
            raise
        found, seen = watching.violations(), watching.observer
    suspended = len(re.findall("Suspended: ", mixed.log()))
    sys.stderr.write(f"{seen.admissions} admissions, {seen.evictions} evictions, {suspended} suspensions\n")
    assert not found, "\n".join([*map(str, found), *workloads.done])
