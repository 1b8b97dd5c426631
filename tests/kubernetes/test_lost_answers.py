"""A worker's pod is created, the answer is lost, and the write is repeated, while the watch of pods is late."""

from __future__ import annotations

import asyncio

import pytest

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from tests.kubernetes import detached as watches
from tests.kubernetes.twin_world import Answering, Twin, World
from tests.polling import until_async


class Repeated(Answering):
    """Answers the creation of a pod as if it was repeated; the watch reports nothing yet."""

    owner = ""
    """The uid of the pod's owner, if it is another one's."""

    def answer(self, verb: str, path: str, body: object) -> bytes:
        if verb != "POST" or not path.endswith("/pods"):
            return super().answer(verb, path, body)
        twin, self.world.twin = self.world.twin, None
        super().answer(verb, path, body)
        if self.owner:
            for pod in self.world.objects[watches.PODS].values():
                pod["metadata"]["ownerReferences"][0]["uid"] = self.owner
        self.world.twin = twin
        raise ApiError(409, "AlreadyExists", "it exists")


@pytest.mark.parametrize(("owner", "ours"), [("", True), ("another", False)])
def test_a_worker_whose_pod_exists_is_given_up_only_if_it_is_another_ones(owner: str, *, ours: bool) -> None:
    """Its GPU was given to others half a second later, and the pod was deleted when the watch reported it."""

    async def scenario() -> None:
        world = World()
        resources = {"nvidia.com/gpu": "1", "cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"allocatable": resources, "conditions": [{"type": "Ready", "status": "True"}]}
        world.put(watches.NODES, {"metadata": {"name": "n0"}, "spec": {}, "status": status})
        world.put(watches.QUOTAS, {"metadata": {"name": "a"}, "spec": {"guaranteed": 1}})
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        meta = {"name": "j", "namespace": "a", "uid": "j", "generation": 1}
        world.put(watches.JOBS, {"metadata": meta, "spec": {"gpus": 1, "template": template}})
        twin = Twin(world)
        connection = Repeated(world)
        connection.owner = owner
        twin.controller._connection = twin.controller._writer._connection = connection
        for path, bodies in world.objects.items():
            for body in bodies.values():
                twin.see(path, body)
        await twin.start()
        book = twin.controller.elastic.book
        try:
            await until_async(lambda: any(verb == "GET" and "/pods/" in path for verb, path, _ in connection.asked))
            await until_async(lambda: bool(twin.controller.elastic.workers.pods) if ours else len(book.workers) > 1)
            (pod, *others) = [record for record in book.workers.values() if record.alive]
            assert (pod.worker.index == 0, others) == (ours, [])
        finally:
            twin.controller._stop_timers()
            await twin.controller._writer.close()

    asyncio.run(scenario())
