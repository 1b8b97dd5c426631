"""Statuses on an API server whose kinds are older than this release, and lack fields that it writes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import from_file
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import Built, StatusWriter
from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
from tests.kubernetes.installation import jobs_of
from tests.kubernetes.test_crds import job
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from tools.devcluster import DevCluster


def test_each_field_that_the_kind_lacks_costs_one_call(crds_cluster: DevCluster, namespace: str) -> None:
    crds_cluster.api.create(jobs_of(namespace), job())
    path = f"{jobs_of(namespace)}/a"
    lacking = {f"later{index}": index for index in range(8)}
    about = {"apiVersion": "gpuquota.dev/v1alpha1", "kind": "ElasticJob"}
    answers: list[int] = []

    async def write() -> None:
        stored = asyncio.Event()
        body = {**about, "metadata": {"name": "a"}, "status": {"phase": "Pending", **lacking}}
        built = Built(path, f"{namespace}/a", body, urgent="Pending", stored=stored.set)
        credentials = from_file(crds_cluster.kubeconfig)
        async with Connection(credentials, count=lambda _, status: answers.append(status)) as connection:
            writer = Writer(connection)
            statuses = StatusWriter(writer, lambda _: built)
            statuses.changed("a")
            async with asyncio.timeout(TIMEOUT_S):
                await stored.wait()
            statuses.close()
            await writer.close()

    asyncio.run(write())
    assert answers == [500] * len(lacking) + [200]
    assert crds_cluster.api.get(path)["status"] == {"phase": "Pending"}
