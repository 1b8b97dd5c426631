"""Asks the exporters of nodes what their GPUs do, and remembers which of their answers are new.

The exporters are the endpoints of the one Service that the QuotaPolicy names (EndpointSlices, which have each one's
node). A pod's GPUs are those that the exporter of the pod's own node reports: what another one says of it is ignored. A
Service in the namespace of a team is not asked, since a team could be behind it. Rejected: to find exporters by the
labels of pods, which anybody may set; and Prometheus, where a sample that is missing leaves no sign.

Each answer has a time limit and a size limit; of an exporter that fails the next attempts are after growing pauses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
from yarl import URL

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Struct
from kfp_gpuquota.cluster.kubernetes.unused_gpus.dcgm import MAX_BYTES, Readings, readings_in
from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.fractions.activity import GpuUse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import GpuUseRules

TIMEOUT_S: Final = 5.0
AT_ONCE: Final = 32
LONGEST_PAUSE_S: Final = 300.0
OFF_S: Final = 10.0
"""Until it is looked again whether the QuotaPolicy names exporters."""
PLAIN: Final = {"Accept-Encoding": "identity"}
PORT_NAMES: Final = ("metrics", "gpu-metrics")  # of dcgm-exporter's chart, of NVIDIA's GPU operator
_EXPECTED: Final = (aiohttp.ClientError, OSError, TimeoutError, ValueError)

log = logging.getLogger(__name__)


class _Port(Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Conditions(Struct, frozen=True):
    ready: bool | None = None


class _Endpoint(Struct, frozen=True):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions = _Conditions()
    node_name: str | None = None


class _Slice(Struct, frozen=True):
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


class _Slices(Struct, frozen=True):
    items: tuple[_Slice, ...] = ()


class _Gpu(NamedTuple):
    """The energy counter of a GPU, and when its value was first read."""

    energy: float
    since: float


class Exporters:
    """The exporters' last answers. `now()` is in seconds since the epoch, `is_team(namespace)`: it has a quota."""

    def __init__(self, connection: Connection, now: Callable[[], float], is_team: Callable[[str], bool]) -> None:
        self._connection, self._now, self._is_team = connection, now, is_team
        self._readings: dict[str, Readings] = {}  # by node, of the last look
        self._gpus: dict[tuple[str, str], _Gpu] = {}  # by node and GPU
        self._alive: set[tuple[str, str]] = set()  # those whose counter has changed lately
        self._stale: set[tuple[str, str]] = set()  # those whose counter has stood still for long
        self._pauses: dict[str, tuple[Backoff, float]] = {}
        self._problem = ""

    async def look(self, rules: GpuUseRules, nodes: Collection[str]) -> None:
        """Ask the exporters of these nodes; what was read before is kept no longer."""
        self._readings = {}
        found = await self._addresses(rules, nodes)
        slots = asyncio.Semaphore(AT_ONCE)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            asyncio.TaskGroup() as group,
        ):
            for node, address in found.items():
                if self._pauses.get(node, (None, 0.0))[1] <= self._now():
                    group.create_task(self._ask(session, slots, node, address))
        self._forget(nodes, rules)

    def used(self, pod: PodView) -> bool | None:
        """Return whether one of the pod's GPUs is used; None if one of them was not measured, or the measure is old."""
        found = self._readings.get(pod.node, {}).get((pod.namespace, pod.name), {})
        if any(one.used for one in found.values()):
            return True
        if pod.share or not found or len(found) != pod.gpus:
            return None
        known = all(one.used is False and (pod.node, gpu) in self._alive for gpu, one in found.items())
        return False if known else None

    def figures(self, node: str, namespace: str, name: str) -> list[GpuUse]:
        """Return what each GPU of a pod does, in the order of the node; with two "" those of GPUs that no pod has.

        [] if one of them was not measured, or its values are old.
        """
        found = self._readings.get(node, {}).get((namespace, name), {})
        if any(one.percent is None or (node, gpu) in self._stale for gpu, one in found.items()):
            return []
        ordered = sorted(found.items(), key=lambda item: (item[1].number, item[0]))
        return [GpuUse(one.used, one.percent or 0.0, one.used_mib) for _, one in ordered]

    async def _addresses(self, rules: GpuUseRules, nodes: Collection[str]) -> dict[str, str]:
        """Return the address of the exporter of each of these nodes that has one."""
        if self._is_team(rules.namespace):
            self._report(f"namespace {rules.namespace} is that of a team, so its Service {rules.service} is not asked")
            return {}
        path = join("/apis/discovery.k8s.io/v1/namespaces", rules.namespace, "endpointslices")
        selected = {"labelSelector": f"kubernetes.io/service-name={rules.service}"}
        try:
            slices = await self._connection.read(path, _Slices, selected)
        except (ApiError, ClusterUnavailableError) as error:
            self._report(f"the endpoints of Service {rules.namespace}/{rules.service} cannot be read: {error}")
            return {}
        found: dict[str, str] = {}
        for one in slices.items:
            port = _port_of(one)
            for endpoint in one.endpoints or ():
                host = next((host for each in endpoint.addresses if (host := _host(each))), "")
                node = endpoint.node_name or ""
                if port and host and node in nodes and endpoint.conditions.ready is not False:
                    found[node] = f"{host}:{port}"
        if missing := len(set(nodes)) - len(found):
            lacks = f"Service {rules.namespace}/{rules.service} has no ready endpoint on {missing} of them"
            self._report(f"of {len(set(nodes))} nodes whose GPUs are measured, {lacks}")
        else:
            self._report("")
        return found

    async def _ask(self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, node: str, address: str) -> None:
        try:
            url = URL.build(scheme="http", authority=address, path="/metrics")
            async with slots, session.get(url, headers=PLAIN, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise ValueError(f"it answered {answer.status}")
                readings = readings_in(await _bounded(answer))
        except _EXPECTED as error:
            pauses, _ = self._pauses.get(node) or (Backoff(1.0, LONGEST_PAUSE_S), 0.0)
            pause_s = pauses.next_s()
            self._pauses[node] = pauses, self._now() + pause_s
            why = str(error) or type(error).__name__
            log.warning("the exporter of node %s at %s is asked again in %g s: %s", node, address, pause_s, why[:300])
            return
        self._pauses.pop(node, None)
        self._note(node, readings)

    def _note(self, node: str, readings: Readings) -> None:
        self._readings[node], now = readings, self._now()
        for gpus in readings.values():
            for gpu, reading in gpus.items():
                before = self._gpus.get((node, gpu))
                if reading.energy is None:
                    continue
                if before is None or before.energy != reading.energy:
                    self._gpus[node, gpu] = _Gpu(reading.energy, now)
                    if before is not None:
                        self._alive.add((node, gpu))

    def _forget(self, nodes: Collection[str], rules: GpuUseRules) -> None:
        """Forget GPUs whose counter stands still, and nodes that are not asked any more."""
        oldest = self._now() - rules.longest_gap_s
        gone = {key for key in self._gpus if key[0] not in nodes}
        self._stale = {key for key, one in self._gpus.items() if one.since < oldest} - gone
        self._alive -= self._stale | gone
        for key in gone:
            del self._gpus[key]
        for node in self._pauses.keys() - set(nodes):
            del self._pauses[node]

    def _report(self, problem: str) -> None:
        """Log a problem once, and its end."""
        if problem != self._problem:
            log.warning("use of GPUs: %s", problem or "all exporters are found again")
        self._problem = problem


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body, of a larger one the beginning that `readings_in` refuses."""
    parts, size = list[bytes](), 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            break
    return b"".join(parts)


def _port_of(one: _Slice) -> int | None:
    ports = [port for port in one.ports or () if port.port]
    named = [port.port for port in ports if port.name in PORT_NAMES]
    return next(iter(named), None) or next((port.port for port in ports), None)


def _host(address: str) -> str:
    """Return an address as the host of a URL; "" for a name, which is not looked up."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return f"[{found}]" if found.version == 6 else str(found)
