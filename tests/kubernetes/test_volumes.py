"""Pods are planned only where their volumes can be mounted: the first place is the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_gpuquota.api.affinity import NodeTerm, Operator, Requirement, within
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

VOLUMES = "/api/v1/persistentvolumes"
HOSTNAME = "kubernetes.io/hostname"


def term(key: str, *values: str) -> NodeTerm:
    return NodeTerm((Requirement(key, Operator.IN, values),))


def test_alternatives_of_both_sides_are_combined() -> None:
    east, west, big = term("zone", "east"), term("zone", "west"), term("size", "big")
    assert within((), (east,)) == (east,)
    assert within((east,), ()) == (east,)
    both = within((east, west), (big,))
    assert [one.admits("n", {"zone": "west", "size": "big"}) for one in both] == [False, True]
    assert not any(one.admits("n", {"zone": "west", "size": "small"}) for one in both)
    assert within(both, (big,)) == both


def make_volume(controlled: Controlled, team: str, node: str) -> str:
    """A volume that can be mounted on one node only, and a claim of the team's that is bound to it; the claim."""
    name = f"{team}-disk"
    expression = {"key": HOSTNAME, "operator": "In", "values": [node]}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "local": {"path": "/disk"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
        "claimRef": {"namespace": team, "name": name},
    }
    api = controlled.cluster.api
    api.create(VOLUMES, {"metadata": {"name": name}, "spec": spec})
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "volumeName": name,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    claims = f"/api/v1/namespaces/{team}/persistentvolumeclaims"
    api.create(claims, {"metadata": {"name": name}, "spec": claim})
    api.until(f"{claims}/{name}", lambda found: found["status"].get("phase") == "Bound")
    return name


def test_pods_and_workers_go_where_their_volume_is(controlled: Controlled) -> None:
    nodes = sorted(controlled.add_nodes(3, gpus=2))
    team = controlled.team(guaranteed=6)
    hostname = controlled.cluster.api.get(f"/api/v1/nodes/{nodes[2]}")["metadata"]["labels"][HOSTNAME]
    claim = make_volume(controlled, team, hostname)
    volume = {"name": "disk", "persistentVolumeClaim": {"claimName": claim}}
    controlled.start()
    try:
        bound = controlled.until_bound(controlled.pod(team, "pod", volumes=[volume]))
        assert bound["spec"]["nodeName"] == nodes[2]
        spec: dict[str, Any] = {"containers": [{"name": "main", "image": "none"}], "volumes": [volume]}
        controlled.job(team, "job", {"spec": spec}, gpus=1)
        controlled.wait(lambda: len(controlled.bound(team)) == 2, controlled.log)
        (worker,) = controlled.bound(team) - {"pod"}
        assert controlled.pods(team)[worker]["spec"]["nodeName"] == nodes[2]
        assert "PlaceTaken" not in controlled.log()
        assert labels.DEVICES in bound["metadata"]["annotations"]
    finally:
        controlled.cluster.api.delete(f"{VOLUMES}/{claim}")
