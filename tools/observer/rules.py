"""What must hold at all times, checked against the objects that the watches have delivered. Pure.

| violation | what was seen |
|---|---|
| capacity | pods that were sent to a node request more GPUs than it has |
| device | two pods hold the same device of a node, and not in parts |
| share | the parts of a device that pods hold are more than one device |
| limit | an admission brought a team above its limit |
| guarantee | a pod was evicted from a team within its guarantee, and not to move |
| destination | a pod was evicted to move to a node that it excludes |
| failed | a Job has failed by the loss of pods |
| cause | a pod was evicted while no pod and no job waited |
| idle | a pod waits beside a node that has the GPUs that it requests, within its team's limit |
| unbound | a pod that was admitted to a node was not bound |

A part of a GPU (`gpu-fraction`) counts as that; amounts of GPU memory are not counted.

The watches of different kinds are not in one order, so a state counts only after it has lasted for its number of
seconds (LASTS_S). A violation is reported once for each object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

Object = dict[str, Any]

GROUP: Final = "gpuquota.dev"
GATE: Final = f"{GROUP}/quota"
DEVICES: Final = f"{GROUP}/devices"
RESERVES: Final = f"{GROUP}/reserves"
RESERVED_ON: Final = f"{GROUP}/reserved-on"
GPU: Final = "nvidia.com/gpu"
BACKOFF: Final = "BackoffLimitExceeded"
INDEX: Final = "batch.kubernetes.io/job-completion-index"  # of a Job's pods, which start together
FRACTION, FRACTION_DEVICES = "gpu-fraction", "gpu-fraction-num-devices"
SHARES: Final = (FRACTION, "gpu-memory", f"{GROUP}/{FRACTION}", f"{GROUP}/gpu-memory")
ROUNDING: Final = 1e-6
BLOCKING: Final = frozenset({"NoSchedule", "NoExecute"})
MOVED: Final = re.compile(r"moved from \S+ to ([^:]+):")
LASTS_S: Final = {"capacity": 3.0, "device": 3.0, "share": 3.0, "idle": 30.0, "unbound": 60.0}
RECENT_S: Final = 10.0
"""How long an earlier limit, an earlier guarantee or a pod that waited still explains a decision."""


class Violation(NamedTuple):
    """One violation: `what` is a word of the table, `about` names the object."""

    at: float
    what: str
    about: str
    why: str


@dataclass(slots=True)
class SeenPod:
    """What the rules need of a pod.

    `gpus` of one with parts of devices is their sum. `pinned`: it was admitted to one node, and is not bound yet.
    """

    key: str
    team: str
    gpus: float
    node: str
    bound: bool
    gated: bool
    simple: bool
    shared: bool
    pinned: bool
    devices: tuple[int, ...]
    selector: dict[str, str]
    ended: bool
    leaving: bool
    evicted: bool
    reservation: bool

    @property
    def holds(self) -> bool:
        """Return whether it holds GPUs, or was sent to a node that keeps them for it."""
        return not self.ended and not self.gated and bool(self.node or self.devices)


@dataclass(slots=True)
class SeenNode:
    """What the rules need of a node."""

    gpus: int
    labels: dict[str, str]
    usable: bool


@dataclass
class Observer:
    """All objects as last seen, and the violations so far."""

    pods: dict[str, SeenPod] = field(default_factory=dict)
    nodes: dict[str, SeenNode] = field(default_factory=dict)
    quotas: dict[str, Object] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)  # phases of ElasticJobs
    violations: list[Violation] = field(default_factory=list)
    evictions: int = 0
    admissions: int = 0
    _quotas: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)  # (seen at, limit, guaranteed)
    _waited_at: float = -RECENT_S
    _moved: set[str] = field(default_factory=set)
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _suspected: dict[str, tuple[float, str]] = field(default_factory=dict)

    def see(self, kind: str, event: str, found: Object, at: float) -> None:
        """Process one event of a watch, received at `at` (seconds of any steady clock)."""
        gone = event == "DELETED"
        meta = found["metadata"]
        name = meta["name"] if "namespace" not in meta else f"{meta['namespace']}/{meta['name']}"
        if kind == "pods":
            self._see_pod(meta["uid"], None if gone else seen_pod(found), at)
        elif kind == "nodes":
            self._put(self.nodes, name, None if gone else seen_node(found))
        elif kind == "gpuquotas":
            self._put(self.quotas, name, None if gone else found["spec"])
            self._quotas.setdefault(name, []).append((at, self._limit(name), self._guaranteed(name)))
        elif kind == "elasticjobs":
            self._put(self.jobs, name, None if gone else found.get("status", {}).get("phase", "Pending"))
        elif kind == "jobs":
            if any(one.get("reason") == BACKOFF for one in found.get("status", {}).get("conditions") or ()):
                self._report(at, "failed", meta["uid"], f"Job {name} has failed: {BACKOFF}")
        elif kind == "events" and found.get("reason") == "Evicted":
            self._see_move(found["involvedObject"].get("uid", ""), found.get("message", ""), at)

    def look(self, at: float) -> None:
        """Check what must not last."""
        self._see_waiting(at)
        held: dict[str, float] = {}
        for pod in self.pods.values():
            if pod.holds and not pod.shared:
                held[pod.node] = held.get(pod.node, 0) + pod.gpus
        seen = {
            ("capacity", node) for node, gpus in held.items() if node in self.nodes and gpus > self.nodes[node].gpus
        }
        seen |= {("device", where) for where in self._doubled()}
        seen |= {("share", where) for where in self._overfull()}
        seen |= {("unbound", uid) for uid, pod in self.pods.items() if pod.holds and pod.pinned and not pod.leaving}
        seen |= {("idle", uid) for uid, pod in self.pods.items() if pod.gated and self._could_start(pod, held)}
        self._since = {key: self._since.get(key, at) for key in seen}
        for (what, about), since in self._since.items():
            if at - since >= LASTS_S[what]:
                self._report(at, what, about, f"for {at - since:.0f} s")
        for uid, (when, why) in list(self._suspected.items()):
            if at - when >= RECENT_S:  # the event that explains it may come later than the eviction
                del self._suspected[uid]
                if uid not in self._moved:
                    self._report(at, "guarantee", uid, why)

    @property
    def moves(self) -> int:
        """Return how many pods were evicted to move."""
        return len(self._moved)

    def held(self, team: str) -> float:
        """Return the GPUs that a team holds, those of pods that are being deleted included."""
        return sum(pod.gpus for pod in self.pods.values() if pod.team == team and pod.holds)

    def _see_move(self, uid: str, message: str, at: float) -> None:
        match = MOVED.match(message)
        if match is None or uid in self._moved:
            return
        self._moved.add(uid)
        pod, node = self.pods.get(uid), self.nodes.get(match[1])
        if pod is not None and node is not None and not pod.selector.items() <= node.labels.items():
            self._report(at, "destination", uid, f"{message}; but it selects {pod.selector}")

    def _put(self, known: dict[str, Any], name: str, value: object) -> None:
        if value is None:
            known.pop(name, None)
        else:
            known[name] = value

    def _see_pod(self, uid: str, pod: SeenPod | None, at: float) -> None:
        before = self.pods.get(uid)
        if pod is not None and not pod.reservation and pod.holds and (before is None or before.gated):
            self.pods[uid] = pod
            self._admitted(uid, pod, at)
        if pod is not None and pod.evicted and before is not None and not before.evicted and before.holds:
            self._evicted(uid, pod, at)
        self._put(self.pods, uid, pod)

    def _admitted(self, uid: str, pod: SeenPod, at: float) -> None:
        self.admissions += 1
        limit = max(quota[1] for quota in self._recent(pod.team, at))
        if pod.team in self.quotas and self.held(pod.team) > limit + ROUNDING:
            self._report(at, "limit", uid, f"{pod.key}: team {pod.team} holds {self.held(pod.team):g} of {limit:g}")

    def _evicted(self, uid: str, pod: SeenPod, at: float) -> None:
        self.evictions += 1
        guaranteed = min(quota[2] for quota in self._recent(pod.team, at))
        kept = sum(p.gpus for p in self.pods.values() if p.team == pod.team and p.holds and not p.leaving) + pod.gpus
        if pod.team in self.quotas and kept <= guaranteed + ROUNDING and pod.gpus:
            self._suspected[uid] = at, f"{pod.key}: team {pod.team} holds {kept:g} of its guaranteed {guaranteed:g}"
        self._see_waiting(at)
        if at - self._waited_at > RECENT_S:
            self._report(at, "cause", uid, f"{pod.key}: nothing waits since {at - self._waited_at:.0f} s")

    def _see_waiting(self, at: float) -> None:
        jobs_wait = not {"Pending", "Starting"}.isdisjoint(self.jobs.values())
        if jobs_wait or any(pod.gated for pod in self.pods.values()):
            self._waited_at = at

    def _doubled(self) -> set[str]:
        """Return the devices that two pods hold as a whole."""
        taken: set[str] = set()
        doubled: set[str] = set()
        for pod in self.pods.values():
            if pod.holds and not pod.shared and not pod.reservation:
                mine = {f"{pod.node}/{device}" for device in pod.devices}
                doubled |= mine & taken
                taken |= mine
        return doubled

    def _overfull(self) -> set[str]:
        """Return the devices of which pods hold more parts than there are."""
        taken: dict[str, float] = {}
        for pod in self.pods.values():
            for device in pod.devices if pod.holds and pod.shared else ():
                where = f"{pod.node}/{device}"
                taken[where] = taken.get(where, 0.0) + pod.gpus / len(pod.devices)
        return {where for where, part in taken.items() if part > 1 + ROUNDING}

    def _could_start(self, pod: SeenPod, held: dict[str, float]) -> bool:
        """Return whether a pod without anything special fits on a node, within its team's limit."""
        if not pod.simple or pod.leaving or pod.team not in self.quotas:
            return False
        if self.held(pod.team) + pod.gpus > self._limit(pod.team):
            return False
        return any(
            node.usable and pod.selector.items() <= node.labels.items() and node.gpus - held.get(name, 0) >= pod.gpus
            for name, node in self.nodes.items()
        )

    def _recent(self, team: str, at: float) -> list[tuple[float, float, float]]:
        """Return the team's quotas that were in force in the last RECENT_S."""
        seen = self._quotas.get(team, [])
        ends = [later[0] for later in seen[1:]]
        earlier = [quota for quota, end in zip(seen, ends, strict=False) if at - end < RECENT_S]
        return [*earlier, (at, self._limit(team), self._guaranteed(team))]

    def _guaranteed(self, team: str) -> float:
        return float(self.quotas.get(team, {}).get("guaranteed", 0))

    def _limit(self, team: str) -> float:
        return float(self.quotas.get(team, {}).get("limit", "inf"))

    def _report(self, at: float, what: str, about: str, why: str) -> None:
        if (what, about) not in self._reported:
            self._reported.add((what, about))
            name = self.pods[about].key if about in self.pods else about
            self.violations.append(Violation(at, what, name, why))


def seen_pod(found: Object) -> SeenPod:
    """Return what the rules need of a pod."""
    meta, spec, status = found["metadata"], found.get("spec", {}), found.get("status", {})
    notes, labels = meta.get("annotations") or {}, meta.get("labels") or {}
    whole = sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in spec.get("containers", []))
    shared, reserved = any(name in notes for name in SHARES), notes.get(RESERVED_ON)
    gpus = _parts(notes) if shared else whole
    devices = tuple(int(one) for one in notes.get(DEVICES, "").split(",") if one.isdecimal())
    conditions = status.get("conditions") or []
    grouped = f"{GROUP}/group" in labels or "ray.io/group" in labels or INDEX in notes
    ordinary = not spec.get("affinity") and not spec.get("volumes") and not grouped and not shared
    node = spec.get("nodeName") or reserved or _pin(spec)
    return SeenPod(
        key=f"{meta['namespace']}/{meta['name']}",
        team=meta["namespace"],
        gpus=gpus,
        node=node,
        bound=bool(spec.get("nodeName")),
        gated=any(gate["name"] == GATE for gate in spec.get("schedulingGates") or []),
        simple=ordinary and gpus > 0 and labels.get(f"{GROUP}/kind", "train") == "train",
        shared=shared,
        pinned=reserved is None and not spec.get("nodeName"),
        devices=devices if reserved is None or reserved == node else (),
        selector=spec.get("nodeSelector") or {},
        ended=status.get("phase") in {"Succeeded", "Failed"},
        leaving="deletionTimestamp" in meta,
        evicted=any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in conditions),
        reservation=RESERVES in labels,
    )


def _parts(notes: Object) -> float:
    """Return the sum of the parts of devices that the annotations request; 0 for amounts of memory."""
    try:
        return float(notes.get(FRACTION, 0)) * int(notes.get(FRACTION_DEVICES, 1))
    except ValueError:
        return 0.0


def _pin(spec: Object) -> str:
    """Return the node that every required term names last; "" without one."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    fields = terms[0].get("matchFields") or [] if terms else []
    return str(fields[-1]["values"][0]) if fields and fields[-1].get("operator") == "In" else ""


def seen_node(found: Object) -> SeenNode:
    """Return what the rules need of a node."""
    spec, status = found.get("spec", {}), found.get("status", {})
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])
    tainted = any(taint.get("effect") in BLOCKING for taint in spec.get("taints") or [])
    return SeenNode(
        gpus=int((status.get("allocatable") or {}).get(GPU, 0)),
        labels=found["metadata"].get("labels") or {},
        usable=ready and not tainted and not spec.get("unschedulable"),
    )
