"""`python -m kfp_gpuquota.cluster.kubernetes.sharing.node_agent`: the memory agent of one node (docs/fractions.md).

It watches its node's pods, samples the shared GPUs, writes to their reservations which sharers may start, writes each
workload's memory allowance, and, only with --killer, ends processes that hold memory that an owner needs.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import MERGE_PATCH, Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.client.process import logging_setup, probes
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import until_stopped
from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write, pods_path
from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod, Subject
from kfp_gpuquota.cluster.kubernetes.sharing import gpu_ledger, reservation_pods
from kfp_gpuquota.cluster.kubernetes.sharing.node_shares import NodeShares
from kfp_gpuquota.errors import DeviceError, GpuQuotaError
from kfp_gpuquota.fractions import Kill, Policy, Round
from kfp_gpuquota.fractions.agent import Agent, code_of, explain, what_it_can_do
from kfp_gpuquota.fractions.devices import NvmlMemory, SimulatedMemory
from kfp_gpuquota.fractions.processes import container_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationView
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
    from kfp_gpuquota.fractions import Row
    from kfp_gpuquota.fractions.devices import DeviceMemory
    from kfp_gpuquota.fractions.processes import ContainerIdentity


_ROUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)


class AgentMetrics:
    """Metrics of one node's agent. Gauges have a series for each pod and GPU."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of = ["namespace", "pod", "gpu"]
        self.used = Gauge("gpuquota_gpu_memory_used_mib", "GPU memory in use", of, registry=self.registry)
        self.request = Gauge("gpuquota_gpu_memory_request_mib", "GPU memory guaranteed", of, registry=self.registry)
        self.limit = Gauge("gpuquota_gpu_memory_limit_mib", "The most it may ever use", of, registry=self.registry)
        self.granted = Gauge("gpuquota_gpu_memory_granted_mib", "What it may use now", of, registry=self.registry)
        self.ended = Counter(
            "gpuquota_gpu_memory_ended_processes",
            "Processes ended (or reported, with the killer off) for holding GPU memory that others have requested, or "
            "above their limit",
            ["namespace", "pod", "reason", "beneficiary", "carried_out"],
            registry=self.registry,
        )
        self.over = Counter(
            "gpuquota_gpu_memory_over_mib", "By how much they were over", ["namespace", "pod"], registry=self.registry
        )
        self.rounds = Histogram(
            "gpuquota_gpu_memory_round_seconds", "Time of a round", buckets=_ROUNDS, registry=self.registry
        )

    def show(self, rows: Iterable[Row], notes: Mapping[str, ShareNote]) -> None:
        """Update the gauges when they are scraped: in each round that would cost as much as the round."""
        gauges = (self.used, self.request, self.limit, self.granted)
        for gauge in gauges:
            gauge.clear()
        for row in rows:
            if (note := notes.get(row.workload)) is not None and note.uid:
                of = (note.project, note.pod.partition("/")[2], row.device)
                amounts = (row.used_mib, row.request_mib, row.limit_mib, row.granted_mib)
                for gauge, mib in zip(gauges, amounts, strict=True):
                    gauge.labels(*of).set(mib)


NAME: Final = "gpuquota-node-agent"
INTERVAL_S: Final = 0.1
SOONEST_S: Final = 0.005  # simultaneous changes are processed together
LEDGER_EVERY_S: Final = 5.0
AFTER_TROUBLE_S: Final = 5.0
REMEMBERED: Final = 4096

log = logging.getLogger(__name__)


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an agent. `simulated`: a folder of simulated devices, for a node without GPUs."""

    node: str
    kubeconfig: str | None = None
    context: str | None = None
    reservation_namespace: str = reservation_pods.NAMESPACE
    kubelet_root: str = "/var/lib/kubelet"
    simulated: str = ""
    metrics_port: int = 0
    policy: Policy = Policy()


class NodeAgent:
    """The agent of one node. `owner_of(pid)` returns the owner of a process, by default by its cgroup."""

    def __init__(
        self,
        connection: Connection,
        options: AgentOptions,
        memory: DeviceMemory,
        owner_of: Callable[[int], str] | None = None,
    ) -> None:
        self._options, self._memory = options, memory
        self._shares = NodeShares(options.reservation_namespace, Path(options.kubelet_root))
        self._agent = Agent(memory, owner_of or self._owner_of, options.policy)
        self._writer = Writer(connection)
        self._events = Recorder(self._writer, NAME)
        self._pods = Reflector(
            connection,
            "/api/v1/pods",
            Pod,
            changed=self._pod_changed,
            deleted=self._pod_deleted,
            fields=f"spec.nodeName={options.node}",
        )
        self._pod = msgspec.json.Decoder(Pod)
        self._writing: set[str] = set()
        self._shown: dict[str, tuple[str, float]] = {}  # uid of a reservation -> (ledger on it, when it was written)
        self._totals: dict[str, int] = {}
        self._last = Round()
        self._places: dict[int, ContainerIdentity] = {}
        self._next: asyncio.TimerHandle | None = None
        self.metrics = AgentMetrics()

    async def run(self) -> None:
        """Run until cancelled."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._writer.close)
            stack.callback(self._agent.close)
            stack.callback(self._cancel)
            serving = probes.serving(
                self.metrics, self._options.metrics_port, ready=self._pods.synced.is_set, refresh=self._look
            )
            log.info("metrics and probes on port %d", await stack.enter_async_context(serving))
            log.info("on node %s it %s", self._options.node, what_it_can_do(self._options.policy))
            await self._pods.run()

    def _owner_of(self, pid: int) -> str:
        """Return the owner of a new process, and keep its location for messages after its exit."""
        if len(self._places) >= REMEMBERED:
            self._places.clear()
        self._places[pid] = container_of(pid)
        return self._shares.owner_of(self._places[pid])

    # Observed changes

    def put(self, pod: Pod) -> None:
        """Add or update a pod of the node."""
        self._shares.put(pod)

    def _pod_changed(self, pod: Pod) -> None:
        if self._shares.put(pod) or self._next is None:
            self._schedule(SOONEST_S)

    def _pod_deleted(self, uid: str) -> None:
        self._shown.pop(uid, None)
        if uid in self._shares.reservations:
            self._schedule(SOONEST_S)
        self._shares.drop(uid)

    # The rounds

    def _schedule(self, delay_s: float) -> None:
        self._cancel()
        self._next = asyncio.get_running_loop().call_later(delay_s, self._round)

    def _cancel(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = None

    def _round(self) -> None:
        """Sample, unless no GPU is shared or the pods have not been listed yet."""
        self._next = None
        if not self._shares.reservations or not self._pods.synced.is_set():
            self._note(Round())
            if not self._pods.synced.is_set():
                self._schedule(INTERVAL_S)
            return
        try:
            with self.metrics.rounds.time():
                self.round()
        except (DeviceError, OSError) as error:
            log.error("GPU memory cannot be read, so no process that shares a GPU starts: %s", error)
            self._schedule(AFTER_TROUBLE_S)
        else:
            self._schedule(INTERVAL_S)

    def round(self) -> None:
        """Sample memory, decide, act, and report. Raises DeviceError, OSError."""
        self._totals = self._memory.totals()
        done = self._agent.round(self._shares.shares(self._totals), time.monotonic())
        self._note(done)
        for view in self._shares.reservations.values():
            if not view.leaving and view.uid not in self._writing:  # one write for it at a time
                self._report(view, done)

    def _report(self, view: ReservationView, done: Round) -> None:
        """Write which sharers may start at once, and the ledger every few seconds if it has changed."""
        now, notes = time.monotonic(), {}
        if (ready := self._shares.ready_on(view, done.ready)) != view.ready:
            notes[labels.READY] = ",".join(sorted(ready))
        before, at = self._shown.get(view.uid, ("", -LEDGER_EVERY_S))
        if now - at >= LEDGER_EVERY_S:
            shown = gpu_ledger.written(done.rows, view.gpu, self._shares.notes(), self._totals.get(view.gpu, 0))
            self._shown[view.uid] = (shown, now)
            if shown != before:
                notes[labels.LEDGER] = shown
        if notes:
            self._write(view, notes)

    def _write(self, view: ReservationView, notes: dict[str, str]) -> None:
        self._writing.add(view.uid)
        body = {"metadata": {"uid": view.uid, "annotations": notes}}
        namespace = self._options.reservation_namespace
        write = Write(
            verb="PATCH",
            path=join(pods_path(namespace), view.name),
            about=f"{namespace}/{view.name}",
            body=body,
            content_type=MERGE_PATCH,
        )
        self._writer.submit(write, partial(self._written, view.uid), partial(self._not_written, view.uid))

    def _written(self, uid: str, answer: bytes) -> None:
        self._writing.discard(uid)
        self._pods.note(self._pod.decode(answer))

    def _not_written(self, uid: str, error: Exception) -> None:
        log.warning("a reservation could not be updated with the sharers that may start: %s", error)
        self._shown.pop(uid, None)
        asyncio.get_running_loop().call_later(INTERVAL_S, self._writing.discard, uid)

    # Metrics and events

    def _look(self) -> None:
        self.metrics.show(self._last.rows, self._shares.notes())

    def _note(self, done: Round) -> None:
        self._last = done
        notes = self._shares.notes() if done.kills else {}
        for kill in done.kills:
            note, other = notes.get(kill.workload), notes.get(kill.beneficiary)
            if note is not None and not kill.force:
                self._record(kill, note.uid, note.pod, "" if other is None else other.pod)

    def _record(self, kill: Kill, uid: str, pod: str, beneficiary: str) -> None:
        reason = "".join(word.capitalize() for word in code_of(kill).split("-"))
        namespace, _, name = pod.partition("/")
        place = self._places.get(kill.process.pid)
        message = explain(kill, f"pod {beneficiary}", self._shares.container_of(place) if place else "")
        self._events.record(Subject("Pod", name, namespace, uid), reason, message, warning=True)
        self.metrics.ended.labels(namespace, name, reason, beneficiary, str(not kill.only_reported).lower()).inc()
        self.metrics.over.labels(namespace, name).inc(kill.over_mib)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until a signal arrives; return the exit code."""
    options = _parser().parse_args(arguments)
    logging_setup.configure("text", options.log_level)
    given = {name: value for name, value in vars(options).items() if name != "log_level"}
    rules = {name: given.pop(name) for name in ("killer", "lend_silent", "yield_s", "term_s", "slack_mib")}
    try:
        return asyncio.run(_serve(AgentOptions(**given, policy=Policy(**rules))))
    except GpuQuotaError as error:
        log.error("%s", error.message)
        return error.exit_code


async def _serve(options: AgentOptions) -> int:
    async with Connection(load_credentials(options.kubeconfig, options.context)) as connection:
        await until_stopped(NodeAgent(connection, options, _memory(options)).run())
    return 0


def _memory(options: AgentOptions) -> DeviceMemory:
    if not options.simulated:
        return NvmlMemory()
    folders = {folder.name: folder for folder in sorted(Path(options.simulated).iterdir()) if folder.is_dir()}
    log.warning("GPUs are simulated: %s", ", ".join(folders) or "none")
    return SimulatedMemory(folders)


def _parser() -> argparse.ArgumentParser:
    default = Policy()
    parser = argparse.ArgumentParser(prog=NAME)
    parser.add_argument("--node", default=os.environ.get("NODE_NAME"), help="name of the node; by default $NODE_NAME")
    parser.add_argument("--kubeconfig", help="by default $KUBECONFIG, the pod's service account or ~/.kube/config")
    parser.add_argument("--context", help="context of the kubeconfig; by default the current one")
    parser.add_argument("--reservation-namespace", default=reservation_pods.NAMESPACE)
    parser.add_argument("--kubelet-root", default="/var/lib/kubelet", help="where the kubelet keeps pods' volumes")
    parser.add_argument(
        "--simulated", default="", metavar="FOLDER", help="folder of simulated devices, instead of NVML"
    )
    parser.add_argument("--metrics-port", type=int, default=0, help="0: any free port")
    parser.add_argument(
        "--killer",
        action=argparse.BooleanOptionalAction,
        default=default.killer,
        help="end processes that hold what an owner needs, or that are over their limit; needs CAP_KILL",
    )
    parser.add_argument("--lend-silent", action=argparse.BooleanOptionalAction, default=default.lend_silent)
    parser.add_argument(
        "--yield-s", type=float, default=default.yield_s, help="seconds that a listening borrower has to free memory"
    )
    parser.add_argument("--term-s", type=float, default=default.term_s, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--slack-mib", type=int, default=default.slack_mib, help="MiB allowed above a limit")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
