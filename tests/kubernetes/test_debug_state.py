"""/debug/state of a controller: who reads it, and that it is replayed with the same plan and explanations."""

from __future__ import annotations

import asyncio
import http.client
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Project
from kfp_gpuquota.api.wire import Supposition
from kfp_gpuquota.cli.arguments.dumps import DumpedCluster
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import from_file
from kfp_gpuquota.cluster.kubernetes.controller.controller import Controller
from kfp_gpuquota.cluster.kubernetes.controller.debug_state import _is_local
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import PodSettings
from kfp_gpuquota.cluster.kubernetes.user_client import debug_state
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.errors import UnauthorizedError
from kfp_gpuquota.scheduler import planner
from kfp_gpuquota.scheduler.dump import decode_dump, replay, take_dump
from tests.kubernetes.test_uninstall import gpuquota
from tests.kubernetes.users import connection_of
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.kubernetes.controlled import Controlled
    from tools.devcluster import DevCluster

RIGHTS = Path(__file__).parents[2] / "manifests" / "base" / "debug-rbac.yaml"
SYSTEM = debug_state.SYSTEM
GROUPS = {"ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts"}
SECRET = "hunter2-of-a-team"
REMOTES = {
    "127.0.0.1": True,
    "::1": True,
    "::ffff:127.0.0.1": True,
    "10.0.0.7": False,
    "::ffff:10.0.0.7": False,
    "fd00::1": False,
    "": False,
    None: False,
}
REFUSED = [(None, 401), ("Basic YTpi", 401), ("Bearer ", 401), ("Bearer nobody.knows.it", 401)]


@pytest.fixture
def with_rights(system_cluster: DevCluster) -> Iterator[DevCluster]:
    """The cluster with the account, the roles and the binding of the manifests."""
    made = []
    for one in yaml.safe_load_all(RIGHTS.read_text()):
        kind = one["kind"].lower() + "s"
        where = "/apis/rbac.authorization.k8s.io/v1/" + ("" if "cluster" in kind else f"namespaces/{SYSTEM}/") + kind
        folder = GROUPS.get(one["kind"], where)
        system_cluster.api.create(folder, one)
        made.append(f"{folder}/{one['metadata']['name']}")
    yield system_cluster
    for path in made:
        system_cluster.api.delete(path)


def url_of(controlled: Controlled) -> str:
    """The address of the controller's metrics and of the state."""
    ports = re.findall(r"metrics and probes on port (\d+)", controlled.log())
    return f"http://127.0.0.1:{ports[-1]}"


def status_of(url: str, authorization: str | None) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/debug/state", headers={"Authorization": authorization} if authorization else {})
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_state_is_read_by_whom_rbac_allows_and_explains_what_users_see(
    with_rights: DevCluster, controlled: Controlled
) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=2, limit=3)
    controlled.start("--leader-elect", f"--namespace={SYSTEM}")
    container = {"name": "main", "image": "none", "env": [{"name": "PASSWORD", "value": SECRET}]}
    template = {"spec": {"containers": [container]}}
    controlled.until_phase(controlled.job(team, "runs", template, gpus=2, gpusPerWorker=1), "Running")
    waiting = controlled.job(team, "waits", template, gpus=2, gpusPerWorker=1)
    message = controlled.until(waiting, lambda job: job.get("status", {}).get("message"))["status"]["message"]
    url, calls = url_of(controlled), Calls(connection_of(with_rights.kubeconfig), retry_for_s=10)

    for authorization, status in REFUSED:
        assert status_of(url, authorization) == status, authorization
    other = with_rights.service_account_token(team, "default")
    with pytest.raises(UnauthorizedError, match="may not get /debug/state; bind the ClusterRole gpuquota-debug-state"):
        debug_state.fetch(url, other)
    content = debug_state.fetch(url, debug_state.token_of(calls))

    assert SECRET.encode() not in content
    dump = decode_dump(content)
    replayed = replay(dump)
    assert replayed.same
    names = {job.uid: job.name for job in dump.jobs if job.queue == team}
    assert {names[uid]: str(reason) for uid, reason in replayed.plan.waiting.items() if uid in names} == {
        "waits": message
    }
    supposed = Supposition(projects=(Project(name=team, guaranteed=4),))
    assert [effect.job for effect in DumpedCluster(dump).what_if(supposed).starts] == ["waits"]
    (ran,) = (job for job in dump.jobs if job.name == "runs" and job.queue == team)
    assert len(ran.workers) == 2
    assert debug_state.leader(calls)


def test_the_command_prints_what_the_leaders_pod_answers_and_simulate_replays_it(
    with_rights: DevCluster, controlled: Controlled, kubectl: Callable[[str], Path], tmp_path: Path
) -> None:
    """Through a program in place of kubectl: the controller runs beside the cluster, in no pod that it could reach."""
    controlled.start("--leader-elect", f"--namespace={SYSTEM}")
    url, token = url_of(controlled), debug_state.token_of(Calls(connection_of(with_rights.kubeconfig)))
    controlled.wait(lambda: status_of(url, f"Bearer {token}") == 200, "a leader")
    kubectl(f"echo 'Forwarding from {url.removeprefix('http://')} -> 8080'; exec sleep 60")
    code, shown = gpuquota(with_rights, tmp_path, "debug", "state")
    assert code == 0, shown
    (tmp_path / "state.json").write_text(shown)
    code, shown = gpuquota(with_rights, tmp_path, "simulate", "--state", str(tmp_path / "state.json"))
    assert "The cluster makes the same plan of this state." in shown
    code, shown = gpuquota(with_rights, tmp_path, "what-if", "--without-node", "nowhere")
    assert (code, "node 'nowhere' does not exist" in shown) == (2, True), shown


def test_a_replica_that_does_not_lead_has_no_state(with_rights: DevCluster, controlled: Controlled) -> None:
    controlled.start("--leader-elect", f"--namespace={SYSTEM}")
    controlled.start("--leader-elect", f"--namespace={SYSTEM}")
    token = debug_state.token_of(Calls(connection_of(with_rights.kubeconfig), retry_for_s=10))
    assert status_of(url_of(controlled), f"Bearer {token}") == 503


def test_only_the_pods_own_loopback_interface_is_answered() -> None:
    assert {remote: _is_local(remote) for remote in REMOTES} == REMOTES


def test_every_plan_of_a_controller_is_made_again_from_its_dump(
    controlled: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team borrows, another one takes back what is guaranteed to it, and the first one grows again."""
    plans: list[tuple[bytes, scheduler.Plan]] = []

    def recorded(state: scheduler.State, now: float) -> scheduler.Plan:
        dump = msgspec.json.encode(take_dump(state, now, "0"))
        plans.append((dump, planner.plan(state, now)))
        return plans[-1][1]

    monkeypatch.setattr(scheduler, "plan", recorded)
    controlled.add_nodes(1, gpus=4)
    asyncio.run(reclaimed(controlled))

    decided = [kind for _, plan in plans for kind in ("bind", "evict", "resize", "nominate") if getattr(plan, kind)]
    assert {"bind", "resize"} <= set(decided)
    for dump, plan in plans:
        assert replay(decode_dump(dump)).plan == plan


async def reclaimed(controlled: Controlled) -> None:
    """Run a controller in this process through the scenario."""
    async with Connection(from_file(controlled.cluster.kubeconfig)) as connection:
        controller = Controller(connection, PodSettings(coordinator="https://127.0.0.1:1"))
        running = asyncio.create_task(controller.run())
        try:
            await asyncio.to_thread(borrow_and_return, controlled)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def borrow_and_return(controlled: Controlled) -> None:
    lender, borrower = controlled.team("lender", guaranteed=2), controlled.team("borrower", guaranteed=2)
    elastic = controlled.job(borrower, "elastic", gpus=2, minGpus=1, maxGpus=4, gpusPerWorker=1, gracePeriodSeconds=1)

    def has(gpus: int) -> Any:
        return lambda job: job.get("status", {}).get("gpus") == gpus

    controlled.until(elastic, has(4))
    pod = controlled.pod(lender, "session", gpus=2)
    controlled.until_bound(pod)
    controlled.until(elastic, has(2))
