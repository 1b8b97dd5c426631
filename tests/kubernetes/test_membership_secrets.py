"""The trust of workers: their job's Secret, the authority and the key, through deletion and renewal."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.admission import server
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import service as membership_service
from kfp_gpuquota.errors import RunError
from tests.kubernetes.installation import NAMESPACE

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled
    from tools.devcluster import DevCluster

SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"


def decoded(secret: dict[str, Any]) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in secret["data"].items()}


def data(cluster: DevCluster, path: str) -> dict[str, bytes]:
    return decoded(cluster.api.get(path))


def secret_of(controlled: Controlled, team: str, job: str) -> str:
    uid = controlled.cluster.api.get(job)["metadata"]["uid"]
    name = job.rpartition("/")[2]
    return f"/api/v1/namespaces/{team}/secrets/{name}-{uid[:8]}-membership"


def running(controlled: Controlled, name: str = "train") -> tuple[str, str]:
    """The path of a job that runs, and that of its Secret."""
    controlled.add_nodes(1, gpus=3)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, name, gpus=2, gpusPerWorker=1)
    controlled.until_phase(job, "Running")
    return job, secret_of(controlled, team, job)


def test_a_leader_that_finds_another_authority_gives_it_to_the_workers_that_run(controlled: Controlled) -> None:
    _, secret = running(controlled)
    before = data(controlled.cluster, secret)
    pods = {name: pod["metadata"]["uid"] for name, pod in controlled.pods(controlled.teams[0]).items()}
    controlled.kill()
    controlled.cluster.api.delete(f"{SECRETS}/{server.SECRET}")
    controlled.start()
    authority = data(controlled.cluster, f"{SECRETS}/{server.SECRET}")["ca.crt"]
    assert authority != before["ca.crt"]
    replaced = controlled.until(secret, lambda found: decoded(found)["ca.crt"] == authority)
    assert decoded(replaced)["token"] == before["token"]
    assert {name: pod["metadata"]["uid"] for name, pod in controlled.pods(controlled.teams[0]).items()} == pods


def test_a_job_whose_secret_is_as_it_should_be_keeps_it_when_another_controller_leads(controlled: Controlled) -> None:
    job, secret = running(controlled)
    controlled.until(job, lambda j: j["status"].get("membershipDigest"))
    uid = controlled.cluster.api.get(secret)["metadata"]["uid"]
    controlled.kill()
    controlled.start()
    controlled.until_bound(controlled.pod(controlled.team(guaranteed=1), "later"))  # it has planned
    assert controlled.cluster.api.get(secret)["metadata"]["uid"] == uid


def in_cluster(cluster: DevCluster, action: Any) -> Any:
    async def run() -> Any:
        async with Connection(load_credentials(str(cluster.kubeconfig), None)) as connection:
            return await action(connection)

    return asyncio.run(run())


def test_an_authority_whose_secret_was_deleted_is_written_anew_and_not_another_one(
    cluster: DevCluster, namespace: str
) -> None:
    async def action(connection: Connection) -> None:
        renewed: list[bytes] = []
        keeper = server.Certificates(connection, namespace, ["127.0.0.1"], renewed=renewed.append)
        before = await keeper.refresh(time.time())
        path = f"/api/v1/namespaces/{namespace}/secrets/{server.SECRET}"
        cluster.api.delete(path)
        assert await keeper.refresh(time.time()) == before
        assert data(cluster, path)["ca.crt"] == before.trusted
        cluster.api.patch(path, {"data": {"ca.key": ""}})
        assert (await keeper.refresh(time.time())).authority == before.authority
        assert not renewed

    in_cluster(cluster, action)


def test_an_authority_that_another_replica_renewed_is_reported_to_those_who_hand_it_on(
    cluster: DevCluster, namespace: str
) -> None:
    async def action(connection: Connection) -> None:
        renewed: list[bytes] = []
        keeper = server.Certificates(connection, namespace, ["127.0.0.1"], renewed=renewed.append)
        await keeper.refresh(time.time())
        other = server.Certificates(connection, namespace, ["127.0.0.1"])
        later = time.time() + 3640 * 86_400.0
        trusted = (await other.refresh(later)).trusted
        await keeper.refresh(later)
        assert renewed == [trusted]

    in_cluster(cluster, action)


def test_a_key_whose_secret_was_deleted_is_written_anew_and_not_another_one(
    cluster: DevCluster, namespace: str
) -> None:
    async def action(connection: Connection) -> None:
        key = await membership_service.read_or_make_key(connection, namespace)
        cluster.api.delete(f"/api/v1/namespaces/{namespace}/secrets/{membership_service.SECRET}")
        assert await membership_service.read_or_make_key(connection, namespace, key) == key
        assert await membership_service.read_or_make_key(connection, namespace) == key

    in_cluster(cluster, action)


def test_a_secret_without_a_key_is_refused_by_name(cluster: DevCluster, namespace: str) -> None:
    """Tokens of an empty key can be computed by anybody."""

    async def action(connection: Connection) -> None:
        path = f"/api/v1/namespaces/{namespace}/secrets"
        contents: tuple[dict[str, str], ...] = ({}, {"key": ""}, {"other": "x"})
        for content in contents:
            cluster.api.create(path, {"metadata": {"name": membership_service.SECRET}, "stringData": content})
            with pytest.raises(RunError, match=f"{namespace}/{membership_service.SECRET} has no key; delete it"):
                await membership_service.read_or_make_key(connection, namespace)
            cluster.api.delete(f"{path}/{membership_service.SECRET}")

    in_cluster(cluster, action)
