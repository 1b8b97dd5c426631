"""The observer reports each kind of violation, and nothing while all is well."""

from __future__ import annotations

from typing import Any

from tools.observer.rules import DEVICES, FRACTION, GATE, GPU, RECENT_S, RESERVED_ON, Observer

Object = dict[str, Any]
TERM = "requiredDuringSchedulingIgnoredDuringExecution"


class Cluster:
    """One node with four GPUs and a team, and an observer of them."""

    def __init__(self, **quota: float) -> None:
        self.observer, self.now = Observer(), 0.0
        self.node(4)
        self.quota(**quota)

    def node(self, gpus: int, **spec: Any) -> None:
        ready = {"allocatable": {GPU: str(gpus)}, "conditions": [{"type": "Ready", "status": "True"}]}
        self.see("nodes", {"metadata": {"name": "n"}, "spec": spec, "status": ready})

    def quota(self, **quota: float) -> None:
        self.see("gpuquotas", {"metadata": {"name": "a"}, "spec": quota})

    def pod(self, name: str, gpus: int = 1, *, devices: str = "", bound: bool = True, **status: Any) -> Object:
        """A gated pod, or with `devices` one that was admitted."""
        affinity = {"nodeAffinity": {TERM: {"nodeSelectorTerms": [{"matchFields": [in_("n")]}]}}}
        spec: Object = {"containers": [{"resources": {"limits": {GPU: str(gpus)}}}]}
        spec |= {"affinity": affinity} if devices else {"schedulingGates": [{"name": GATE}]}
        spec |= {"nodeName": "n"} if devices and bound else {}
        meta = {"name": name, "namespace": "a", "uid": name, "annotations": {DEVICES: devices} if devices else {}}
        return {"metadata": meta, "spec": spec, "status": {"phase": "Running", **status}}

    def see(self, kind: str, found: Object, event: str = "MODIFIED") -> None:
        self.observer.see(kind, event, found, self.now)

    def admit(self, name: str, devices: str, gpus: int = 1, **more: Any) -> None:
        self.see("pods", self.pod(name, gpus))
        self.see("pods", self.pod(name, gpus, devices=devices, **more))

    def evict(self, name: str, devices: str, gpus: int = 1) -> None:
        disrupted = [{"type": "DisruptionTarget", "status": "True"}]
        self.see("pods", self.pod(name, gpus, devices=devices, conditions=disrupted))

    def passes(self, seconds: int) -> list[str]:
        for _ in range(seconds):
            self.now += 1
            self.observer.look(self.now)
        return [violation.what for violation in self.observer.violations]


def in_(node: str) -> Object:
    return {"key": "metadata.name", "operator": "In", "values": [node]}


def test_what_is_well_is_not_reported() -> None:
    cluster = Cluster(guaranteed=2, limit=4)
    cluster.admit("p", "0")
    cluster.admit("q", "1,2", 2)
    cluster.see("pods", cluster.pod("large", 4))
    assert cluster.passes(100) == []


def test_a_node_that_holds_more_than_it_has() -> None:
    cluster = Cluster(guaranteed=8)
    cluster.admit("p", "0,1,2", 3)
    cluster.node(2)
    assert cluster.passes(10) == ["capacity"]


def test_a_device_that_two_pods_hold() -> None:
    cluster = Cluster(guaranteed=8)
    cluster.admit("p", "0")
    cluster.admit("q", "0")
    assert cluster.passes(10) == ["device"]


def share(cluster: Cluster, name: str, part: str, device: str) -> None:
    """See a pod that waits for a part of a GPU, and then holds it."""
    for devices in ("", device):
        pod = cluster.pod(name, 0, devices=devices)
        pod["metadata"].setdefault("annotations", {})[FRACTION] = part
        cluster.see("pods", pod)


def test_parts_of_a_device_count_as_that() -> None:
    cluster = Cluster(guaranteed=1, limit=1.25)
    share(cluster, "p", "0.5", "0")
    share(cluster, "q", "0.5", "0")
    share(cluster, "r", "0.25", "1")
    assert cluster.observer.held("a") == 1.25
    assert cluster.passes(10) == []
    share(cluster, "s", "0.25", "1")
    assert cluster.passes(1) == ["limit"]


def test_a_device_of_which_pods_hold_more_than_there_is() -> None:
    cluster = Cluster(guaranteed=4)
    share(cluster, "p", "0.75", "0")
    share(cluster, "q", "0.5", "0")
    assert cluster.passes(10) == ["share"]


def test_pods_without_a_pin_hold_what_is_reserved_for_them() -> None:
    cluster = Cluster(guaranteed=4)
    for name in ("p", "q"):
        pod = cluster.pod(name, devices="0", bound=False)
        pod["metadata"]["annotations"][RESERVED_ON] = "n" if name == "p" else ""
        pod["spec"].pop("affinity")
        cluster.see("pods", pod)
    assert cluster.observer.held("a") == 2
    assert cluster.passes(100) == []


def test_an_admission_above_the_limit_but_not_below_an_earlier_one() -> None:
    cluster = Cluster(guaranteed=1, limit=2)
    cluster.admit("p", "0,1", 2)
    assert cluster.passes(1) == []
    cluster.quota(guaranteed=1, limit=1)
    cluster.admit("q", "2")
    assert "limit" in cluster.passes(1)


def test_an_eviction_within_the_guarantee_unless_the_pod_moves() -> None:
    for moves in (False, True):
        cluster = Cluster(guaranteed=2)
        cluster.admit("p", "0")
        cluster.see("pods", cluster.pod("other", 4))
        cluster.passes(1)
        cluster.evict("p", "0")
        if moves:
            event = {
                "metadata": {"name": "e", "namespace": "a"},
                "reason": "Evicted",
                "message": "moved from n to n1: x needs 1 GPU",
            }
            cluster.see("events", {**event, "involvedObject": {"uid": "p"}})
        assert ("guarantee" in cluster.passes(20)) is not moves


def test_an_eviction_that_an_earlier_guarantee_explains() -> None:
    for later_s, found in ((2, False), (int(RECENT_S) + 2, True)):
        cluster = Cluster(guaranteed=0)
        cluster.admit("p", "0")
        cluster.see("pods", cluster.pod("other", 4))
        cluster.quota(guaranteed=2)
        cluster.passes(later_s)
        cluster.evict("p", "0")
        assert ("guarantee" in cluster.passes(20)) is found


def test_a_move_to_a_node_that_the_pod_excludes() -> None:
    cluster = Cluster(guaranteed=0)
    pod = cluster.pod("p", devices="0")
    pod["spec"]["nodeSelector"] = {"zone": "a"}
    cluster.see("pods", pod)
    event = {
        "metadata": {"name": "e", "namespace": "a"},
        "reason": "Evicted",
        "message": "moved from m to n: x needs 1",
    }
    cluster.see("events", {**event, "involvedObject": {"uid": "p"}})
    assert cluster.passes(1) == ["destination"]


def test_an_eviction_while_nothing_waits() -> None:
    cluster = Cluster(guaranteed=0)
    cluster.admit("p", "0")
    cluster.passes(30)
    cluster.evict("p", "0")
    assert cluster.passes(1) == ["cause"]


def test_a_pod_that_waits_beside_idle_gpus_for_long() -> None:
    cluster = Cluster(guaranteed=0)
    cluster.see("pods", cluster.pod("p"))
    assert cluster.passes(20) == []
    assert cluster.passes(20) == ["idle"]
    cordoned = Cluster(guaranteed=0)
    cordoned.node(4, unschedulable=True)
    cordoned.see("pods", cordoned.pod("p"))
    assert cordoned.passes(60) == []


def test_an_admitted_pod_that_is_not_bound() -> None:
    cluster = Cluster(guaranteed=2)
    cluster.admit("p", "0", bound=False)
    assert cluster.passes(100) == ["unbound"]


def test_an_eviction_for_a_pod_that_has_just_come_has_a_cause() -> None:
    cluster = Cluster(guaranteed=0, limit=4)
    cluster.admit("borrows", "0")
    cluster.now += 1000
    cluster.see("pods", cluster.pod("waits"))
    cluster.evict("borrows", "0")
    assert not cluster.observer.violations


def test_a_job_that_has_failed_by_the_loss_of_pods() -> None:
    cluster = Cluster(guaranteed=1)
    meta = {"name": "j", "namespace": "a", "uid": "j"}
    for reason, failed in (("DeadlineExceeded", []), ("BackoffLimitExceeded", ["failed"])):
        cluster.see("jobs", {"metadata": meta, "status": {"conditions": [{"type": "Failed", "reason": reason}]}})
        assert cluster.passes(1) == failed
