"""Reflectors against the real API server, and against one that loses history, disconnects and lacks the kind."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import Credentials, from_file
from kfp_gpuquota.cluster.kubernetes.client.reflector import LARGE_BYTES, Reflector
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Namespace, Profile, WatchLine
from tests.kubernetes.faulty_proxy import FaultyProxy
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
    from pathlib import Path

    import pytest

    from tools.devcluster import DevCluster

    Test = Callable[[Reflector[Namespace], "Seen"], Coroutine[None, None, None]]

CONFIG_MAPS = "/api/v1/namespaces/{}/configmaps"
DEADLINE_S = 60.0


class Seen:
    """The events of a reflector."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.reported = 0
        self.news = asyncio.Event()

    def changed(self, found: Namespace | Profile) -> None:
        meta = found.metadata
        assert int(self.versions.get(meta.uid, "0")) < int(meta.resource_version), "nothing older is told"
        self.versions[meta.uid], self.names[meta.uid] = meta.resource_version, meta.name
        self.reported += 1
        self.news.set()

    def gone(self, uid: str) -> None:
        del self.versions[uid], self.names[uid]
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


def reflecting(
    kubeconfig: Path,
    path: str,
    test: Callable[[Reflector[Namespace], Seen], Coroutine[None, None, None]],
    *,
    optional: bool = False,
) -> None:
    """Run `test` beside a reflector."""

    async def run() -> None:
        async with Connection(from_file(kubeconfig), retry_for_s=5.0, seed=1) as connection:
            seen = Seen()
            reflector = Reflector(
                connection,
                path,
                Namespace,
                changed=seen.changed,
                deleted=seen.gone,
                not_installed_s=0.1,
                optional=optional,
            )
            task = asyncio.create_task(reflector.run())
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await reflector.synced.wait()
                await test(reflector, seen)
            finally:
                task.cancel()

    asyncio.run(run())


def make(cluster: DevCluster, namespace: str, name: str) -> None:
    cluster.api.create(CONFIG_MAPS.format(namespace), {"metadata": {"name": name}})


def test_what_is_there_comes_first_then_what_changes_and_goes(cluster: DevCluster, namespace: str) -> None:
    make(cluster, namespace, "first")

    async def test(_: Reflector[Namespace], seen: Seen) -> None:
        assert "first" in seen.names.values()
        await asyncio.to_thread(make, cluster, namespace, "second")
        await seen.until(lambda: "second" in seen.names.values())
        await asyncio.to_thread(cluster.api.delete, f"{CONFIG_MAPS.format(namespace)}/first")
        await seen.until(lambda: "first" not in seen.names.values())

    reflecting(cluster.kubeconfig, CONFIG_MAPS.format(namespace), test)


def test_a_copy_is_whole_again_after_any_fault(cluster: DevCluster, namespace: str, tmp_path: Path) -> None:
    with FaultyProxy(cluster, tmp_path, 0.5, seed=3) as proxy:

        async def test(reflector: Reflector[Namespace], seen: Seen) -> None:
            for i in range(30):
                await asyncio.to_thread(make, cluster, namespace, f"c{i}")
                if i % 3 == 0:
                    await asyncio.to_thread(cluster.api.delete, f"{CONFIG_MAPS.format(namespace)}/c{i}")
            expected = {f"c{i}" for i in range(30) if i % 3}
            await seen.until(lambda: {n for n in seen.names.values() if n.startswith("c")} == expected)
            assert reflector.synced.is_set()

        reflecting(proxy.kubeconfig, CONFIG_MAPS.format(namespace), test)


class LateLists(Connection):
    """The real API server's answers, with a change between the creation of a list and its delivery."""

    meanwhile: Callable[[Connection], Coroutine[None, None, None]] | None = None

    async def call(self, verb: str, path: str, body: object = None, **more: Any) -> bytes:
        answer = await super().call(verb, path, body, **more)
        if "limit" in (more.get("params") or {}) and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile(self)
        return answer


def test_what_is_made_while_a_list_is_on_its_way_is_not_taken_for_gone(cluster: DevCluster, namespace: str) -> None:
    path = CONFIG_MAPS.format(namespace)

    async def run() -> None:
        async with LateLists(from_file(cluster.kubeconfig)) as connection:
            seen, gone = Seen(), list[str]()
            reflector = Reflector(connection, path, Namespace, changed=seen.changed, deleted=gone.append)

            async def create(connection: Connection) -> None:
                answer = await connection.call("POST", path, {"metadata": {"name": "new"}})
                reflector.note(msgspec.json.decode(answer, type=Namespace))

            connection.meanwhile = create
            task = asyncio.create_task(reflector.run())
            async with asyncio.timeout(DEADLINE_S):
                await reflector.synced.wait()
            assert "new" in seen.names.values()
            assert not gone
            task.cancel()

    asyncio.run(run())


def test_a_kind_that_is_not_installed_has_no_objects_until_it_is(cluster: DevCluster) -> None:
    group = f"g{uuid.uuid4().hex[:6]}.example.com"
    path = f"/apis/{group}/v1/things"

    def install() -> None:
        schema = {"openAPIV3Schema": {"type": "object"}}
        version = {"name": "v1", "served": True, "storage": True, "schema": schema}
        names = {"kind": "Thing", "plural": "things", "singular": "thing", "listKind": "ThingList"}
        cluster.api.create(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            {
                "metadata": {"name": f"things.{group}"},
                "spec": {"group": group, "scope": "Cluster", "names": names, "versions": [version]},
            },
        )
        cluster.api.until_served(path)
        cluster.api.create(path, {"apiVersion": f"{group}/v1", "kind": "Thing", "metadata": {"name": "one"}})

    async def test(reflector: Reflector[Namespace], seen: Seen) -> None:
        assert not reflector.installed
        await asyncio.to_thread(install)
        await seen.until(lambda: "one" in seen.names.values())
        crd = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/things.{group}"
        await asyncio.to_thread(cluster.api.delete, crd)
        await seen.until(lambda: not seen.names)

    reflecting(cluster.kubeconfig, path, test)


def test_a_writes_answer_is_known_before_the_watch_tells_and_never_brings_back_the_dead(
    cluster: DevCluster, namespace: str
) -> None:
    async def test(reflector: Reflector[Namespace], seen: Seen) -> None:
        collection = CONFIG_MAPS.format(namespace)
        made = await asyncio.to_thread(cluster.api.create, collection, {"metadata": {"name": "mine"}})
        found = msgspec.convert(made, Namespace, strict=False)
        reflector.note(found)
        assert "mine" in seen.names.values()
        reported = seen.reported
        await asyncio.to_thread(cluster.api.delete, f"{collection}/mine")
        await seen.until(lambda: "mine" not in seen.names.values())
        assert seen.reported <= reported + 1
        reflector.note(found)
        assert "mine" not in seen.names.values()

    reflecting(cluster.kubeconfig, CONFIG_MAPS.format(namespace), test)


def test_what_was_read_is_kept_while_a_starting_server_refuses_everybody(
    crds_cluster: DevCluster, namespace: str, tmp_path: Path
) -> None:
    make(crds_cluster, namespace, "first")
    with FaultyProxy(crds_cluster, tmp_path, rate=0, seed=1) as proxy:

        async def test(reflector: Reflector[Namespace], seen: Seen) -> None:
            assert "first" in seen.names.values()
            before = set(seen.names)
            proxy.restart(refusals=2)
            make(crds_cluster, namespace, "second")
            await seen.until(lambda: "second" in seen.names.values())
            assert before <= set(seen.names)
            assert reflector.installed
            assert proxy.injected["GET", "403"] == 2

        reflecting(proxy.kubeconfig, CONFIG_MAPS.format(namespace), test, optional=True)


def test_what_was_read_is_kept_while_a_load_balancer_finds_no_server(
    crds_cluster: DevCluster, namespace: str, tmp_path: Path
) -> None:
    """Its 404 is not the API server's, which would mean that the kind is not installed any more."""
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    crds_cluster.api.create(leases, {"metadata": {"name": "first"}})
    with FaultyProxy(crds_cluster, tmp_path, rate=0, seed=1) as proxy:

        async def test(reflector: Reflector[Namespace], seen: Seen) -> None:
            before = set(seen.names)
            proxy.load_balancer = 404
            proxy.restart(refusals=0)
            await asyncio.to_thread(until, lambda: proxy.injected["GET", "404"] > 1)
            proxy.load_balancer = 0
            await asyncio.to_thread(crds_cluster.api.create, leases, {"metadata": {"name": "second"}})
            await seen.until(lambda: "second" in seen.names.values())
            assert before <= set(seen.names)
            assert reflector.lists == 1

        reflecting(proxy.kubeconfig, leases, test)


class EndsAtOnce(Connection):
    """A server, or a proxy before it, that answers each watch with 200 and ends it."""

    async def call(self, *_: Any, **__: Any) -> bytes:
        """Return an empty list."""
        return b'{"metadata": {"resourceVersion": "1"}, "items": []}'

    async def stream(self, path: str, params: Mapping[str, str]) -> AsyncIterator[list[bytes]]:
        """Yield no line."""
        del path, params
        empty: list[list[bytes]] = []
        for lines in empty:
            yield lines


def test_a_watch_that_ends_at_once_is_opened_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        if len([pause for pause in pauses if pause]) == 6:
            raise asyncio.CancelledError

    async def run() -> None:
        monkeypatch.setattr(asyncio, "sleep", slept)
        connection = EndsAtOnce(Credentials(server="https://nowhere.invalid"))
        reflector = Reflector(connection, "/x", Namespace, changed=lambda _: None, deleted=lambda _: None)
        with contextlib.suppress(asyncio.CancelledError):
            await reflector.run()

    asyncio.run(run())
    grown = [pause for pause in pauses if pause]
    assert min(grown) >= 0.1
    assert grown[-1] > 5 * grown[0]


def test_large_objects_that_change_in_a_loop_delay_no_other() -> None:
    """Of each the newest version is processed, in a tenth of the time; a deleted one never comes back."""

    def line(event: str, uid: str, version: int, *, large: bool = True) -> WatchLine:
        metadata = {"uid": uid, "name": uid, "resourceVersion": str(version), "labels": {}}
        if large:
            metadata["labels"] = {"more": "x" * LARGE_BYTES}
        return WatchLine(event, msgspec.Raw(msgspec.json.encode({"metadata": metadata})))

    async def scenario() -> None:
        seen = Seen()
        nowhere = Connection(Credentials(server="https://nowhere.invalid"))
        reflector = Reflector(nowhere, "/x", Namespace, changed=seen.changed, deleted=seen.gone)
        for version in range(1, 100):
            reflector._take(line("MODIFIED", "a", version))
            reflector._take(line("MODIFIED", "b", 1000 + version))
        reflector._take(line("ADDED", "small", 2000, large=False))
        assert seen.versions == {"small": "2000"}
        reflector._take(line("ADDED", "gone", 2001))
        reflector._take(line("DELETED", "gone", 2002))
        reflector._take(line("MODIFIED", "b", 2003, large=False))
        await seen.until(lambda: "a" in seen.versions)
        assert (seen.versions, seen.reported) == ({"a": "99", "b": "2003", "small": "2000"}, 3)
        reflector._take(line("MODIFIED", "a", 2004))
        reflector._take(line("DELETED", "small", 2005))
        await seen.until(lambda: seen.versions == {"a": "2004", "b": "2003"})
        assert reflector._version == "2005"

    asyncio.run(scenario())
