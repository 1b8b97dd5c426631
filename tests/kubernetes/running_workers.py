"""Workers of ElasticJobs beside KWOK's pods: the real client of `elastic_runtime`, one for each pod that runs.

And an observer, which watches the pods as anybody can, and notes whatever must never be seen.
"""

from __future__ import annotations

import base64
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_runtime.membership.coordinator_client import Coordinator
from elastic_runtime.membership.environment import Environment
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.controlled import gpus_of, is_leaving, is_over
from tools.devcluster import ApiError

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_runtime.errors import ElasticError
    from elastic_runtime.membership.orders import Order
    from tools.devcluster import DevCluster

Object = dict[str, Any]


class Worker:
    """One worker's end: it follows its orders, and computes nothing."""

    def __init__(self, pod: Object, folder: Path) -> None:
        values = {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}
        self.id = values["ELASTIC_WORKER_ID"]
        self.generation, self.refused = 0, ""
        self.members: tuple[str, ...] = ()
        self.orders = 0
        environment = Environment(
            worker_id=self.id,
            coordinator=values["ELASTIC_COORDINATOR"],
            token_file=str(folder / "token"),
            ca_file=str(folder / "ca.crt"),
        )
        self._end = Coordinator(environment, self._obey, self._standing, self._give_up)
        self._end.start()

    def _obey(self, order: Order) -> None:
        self.orders += 1
        if order.kind in {"Recover", "Propose"} and order.generation > self.generation:
            self.generation, self.members = order.generation, order.members
            self._end.send("GenerationPrepared", generation=order.generation)
            self._end.send("GenerationAdopted", generation=order.generation, step=0, members=list(order.members))

    def _standing(self) -> list[dict[str, Any]]:
        about = {"worker": self.id}
        if not self.generation:
            return [{"event": "WorkerJoined", **about}, {"event": "WorkerReady", **about}]
        known = {"generation": self.generation, "members": list(self.members), "step": 1}
        return [{"event": "WorkerReconnected", **about, **known}]

    def _give_up(self, error: ElasticError) -> None:
        self.refused = str(error)

    def report(self, event: str, **fields: Any) -> None:
        """Send an event of the training."""
        self._end.send(event, **fields)

    def close(self) -> None:
        """End without waiting."""
        self._end.close(timeout_s=0.05)


@dataclass
class Observer:
    """What is seen of the pods of some teams, by their watch. `wrong` holds what must never be seen."""

    cluster: DevCluster
    limits: dict[str, int]
    pods: dict[str, Object] = field(default_factory=dict)  # by uid
    wrong: list[str] = field(default_factory=list)
    admitted: dict[str, str] = field(default_factory=dict)  # by uid: where and on what
    may_end: set[str] = field(default_factory=set)  # names of pods that the test deletes

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, at the next event or after the watch's time."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.pods.clear()  # what exists comes first
            try:
                for kind, pod in self.cluster.api.watch("/api/v1/pods", timeout_s=600):
                    self._see(kind, pod)
                    if self._stop.is_set():
                        return
            except (OSError, ApiError):
                continue

    def _see(self, kind: str, pod: Object) -> None:
        meta = pod["metadata"]
        if meta["namespace"] not in self.limits:
            return
        uid, name = meta["uid"], f"{meta['namespace']}/{meta['name']}"
        ends = kind == "DELETED" or is_leaving(pod) or is_over(pod)
        if ends and labels.JOB in meta.get("labels", {}) and meta["name"] not in self.may_end:
            self.wrong.append(f"worker {name} was ended")
        if kind == "DELETED":
            self.pods.pop(uid, None)
            return
        self.pods[uid] = pod
        self._check_admission(uid, name, pod)
        self._check_amounts()

    def _check_admission(self, uid: str, name: str, pod: Object) -> None:
        if pod["spec"].get("schedulingGates"):
            return
        devices = pod["metadata"].get("annotations", {}).get(labels.DEVICES, "")
        where = f"{pod['spec'].get('affinity')} {devices}"
        if self.admitted.setdefault(uid, where) != where:
            self.wrong.append(f"{name} was admitted twice: {self.admitted[uid]}, then {where}")

    def _check_amounts(self) -> None:
        held: dict[str, int] = {}
        devices: dict[tuple[str, str], str] = {}
        for uid, pod in self.pods.items():
            if pod["spec"].get("schedulingGates") or is_over(pod):
                continue
            meta = pod["metadata"]
            held[meta["namespace"]] = held.get(meta["namespace"], 0) + gpus_of(pod)
            for device in filter(None, meta.get("annotations", {}).get(labels.DEVICES, "").split(",")):
                place = (pod["spec"].get("nodeName", ""), device)
                if place[0] and devices.setdefault(place, uid) != uid:
                    self.wrong.append(f"device {place} was given twice")
        for team, gpus in held.items():
            if gpus > self.limits[team]:
                self.wrong.append(f"{team} holds {gpus} of {self.limits[team]}")


class RunningWorkers:
    """A worker for each of a job's pods that runs; its Secret's files follow as a kubelet has them follow."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.workers: dict[str, Worker] = {}  # by the pod's uid
        self._secrets: dict[str, Path] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def start(self, pod: Object) -> Worker:
        """Start the pod's program."""
        (secret,) = [v["secret"]["secretName"] for v in pod["spec"]["volumes"] if v["name"] == "gpuquota-membership"]
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{secret}"
        if path not in self._secrets:
            folder = self._folder / secret
            folder.mkdir()
            self._write(path, folder)
            self._secrets[path] = folder
        worker = self.workers[pod["metadata"]["uid"]] = Worker(pod, self._secrets[path])
        return worker

    def trained(self) -> bool:
        """Every worker is in a generation."""
        return all(worker.generation for worker in self.workers.values())

    def refused(self) -> list[str]:
        """Return the messages to workers that gave up."""
        return [f"{worker.id}: {worker.refused}" for worker in self.workers.values() if worker.refused]

    def heard_since(self, before: dict[str, int]) -> bool:
        """Every worker was sent an order since `orders` returned `before`."""
        return all(worker.orders > before[worker.id] for worker in self.workers.values())

    def orders(self) -> dict[str, int]:
        """How many orders each was sent: one comes with each connection."""
        return {worker.id: worker.orders for worker in self.workers.values()}

    def stop(self) -> None:
        """End all workers."""
        self._stop.set()
        for worker in self.workers.values():
            worker.close()

    def _follow(self) -> None:
        while not self._stop.wait(1.0):
            for path, folder in list(self._secrets.items()):
                self._write(path, folder)

    def _write(self, path: str, folder: Path) -> None:
        try:
            found = self._cluster.api.get(path)["data"]
        except (ApiError, OSError):
            return  # a kubelet keeps what it has
        for name, text in found.items():
            content = base64.b64decode(text)
            file = folder / name
            if not file.exists() or file.read_bytes() != content:
                (folder / f".{name}").write_bytes(content)
                (folder / f".{name}").replace(file)
