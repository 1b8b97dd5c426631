"""Random clusters and pods with the constraints of the Kubernetes API, for a comparison with kube-scheduler alone.

A case is a few nodes, pods that run there already, and equal pods under test. It is made of a seed and a set of
features, each of which adds one constraint: a case that fails is shrunk by leaving features out. Cases are independent
of each other (a node label and a namespace of their own), so one control plane tries hundreds of them at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tools.devcluster.fake_nodes import fake_node

if TYPE_CHECKING:
    from collections.abc import Callable

Object = dict[str, Any]

CASE: Final = "case"
ZONE: Final = "topology.kubernetes.io/zone"
HOST: Final = "kubernetes.io/hostname"
GPU: Final = "nvidia.com/gpu"
WAITS_FOR_A_POD: Final = "wait-for-pod"


@dataclass
class Case:
    """What is created: `nodes`, `others` (pods that run outside the quota), and `copies` of the `pod` under test."""

    name: str
    seed: int
    features: tuple[str, ...]
    nodes: list[Object] = field(default_factory=list)
    others: list[Object] = field(default_factory=list)
    volumes: list[Object] = field(default_factory=list)
    claims: list[Object] = field(default_factory=list)
    pod: Object = field(default_factory=dict)
    copies: int = 1

    def without(self, feature: str, name: str) -> Case:
        """Return the case without a feature, under another name."""
        return made(name, self.seed, tuple(one for one in self.features if one != feature))


def made(name: str, seed: int, features: tuple[str, ...]) -> Case:
    """Return the case of the seed with these features. A feature draws from a source of its own."""
    drawn = random.Random(seed)
    case = Case(name, seed, features, copies=drawn.choice((1, 1, 2, 3)))
    for number in range(drawn.randint(2, 4)):
        gpus = drawn.choice((2, 4))
        node = fake_node(f"{name}-{number}", gpus)
        node["metadata"]["labels"] |= {CASE: name, ZONE: f"zone-{number % 2}", "rank": str(number)}
        case.nodes.append(node)
    container = {"name": "main", "image": "none", "resources": {"limits": {GPU: "1"}}}
    spec = {"nodeSelector": {CASE: name}, "terminationGracePeriodSeconds": 1, "containers": [container]}
    case.pod = {"metadata": {"labels": {"app": "tested"}}, "spec": spec}
    for feature in features:
        FEATURES[feature](case, random.Random(f"{seed}/{feature}"))
    return case


def drawn_case(name: str, seed: int) -> Case:
    """Return a case with one to three random features; each feature is the first one of some seed."""
    names = sorted(FEATURES)
    drawn = random.Random(f"features of {seed}")
    more = drawn.sample(names, drawn.choice((0, 0, 1, 2)))
    return made(name, seed, tuple(dict.fromkeys((names[seed % len(names)], *more))))


# Helpers


def _container(case: Case) -> Object:
    found: Object = case.pod["spec"]["containers"][0]
    return found


def _request(case: Case, resource: str, amount: str) -> None:
    resources = _container(case)["resources"]
    resources.setdefault("requests", {})[resource] = amount
    resources["limits"][resource] = amount


def _affinity(case: Case) -> Object:
    found: Object = case.pod["spec"].setdefault("affinity", {})
    return found


def _requirements(case: Case) -> list[Object]:
    """Return the requirements of the pod's only required node selector term, to be extended."""
    node = _affinity(case).setdefault("nodeAffinity", {})
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
    found: list[Object] = required["nodeSelectorTerms"][0].setdefault("matchExpressions", [])
    return found


def _other(case: Case, node: Object, app: str, **spec: Any) -> Object:
    """Add a pod without GPUs that runs on the node."""
    container: Object = {"name": "main", "image": "none"}
    pod: Object = {
        "metadata": {"name": f"other-{len(case.others)}", "labels": {"app": app}},
        "spec": {"nodeName": node["metadata"]["name"], "containers": [container], **spec},
    }
    case.others.append(pod)
    return pod


def _some(case: Case, drawn: random.Random) -> list[Object]:
    """Return some nodes, but not all."""
    return drawn.sample(case.nodes, drawn.randint(1, len(case.nodes) - 1))


def _offer(node: Object, resource: str, amount: str) -> None:
    node["status"]["allocatable"][resource] = node["status"]["capacity"][resource] = amount


# Features


def _selects_zone(case: Case, drawn: random.Random) -> None:
    case.pod["spec"]["nodeSelector"][ZONE] = drawn.choice(("zone-0", "zone-1"))


def _node_affinity(case: Case, drawn: random.Random) -> None:
    operator = drawn.choice(("In", "NotIn", "Gt", "Lt", "Exists", "DoesNotExist"))
    values = {"In": ["0", "1"], "NotIn": ["0"], "Gt": ["0"], "Lt": ["1"]}.get(operator)
    key = "accelerator" if operator == "DoesNotExist" else "rank"
    _requirements(case).append({"key": key, "operator": operator, **({"values": values} if values else {})})


def _preferred_node(case: Case, drawn: random.Random) -> None:
    term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": [drawn.choice(("zone-0", "zone-1"))]}]}
    node = _affinity(case).setdefault("nodeAffinity", {})
    node["preferredDuringSchedulingIgnoredDuringExecution"] = [{"weight": 50, "preference": term}]


def _taints(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        node["spec"] = {
            "taints": [{"key": "reserved", "value": "yes", "effect": drawn.choice(("NoSchedule", "PreferNoSchedule"))}]
        }
    if drawn.random() < 0.5:
        case.pod["spec"]["tolerations"] = [{"key": "reserved", "operator": "Exists"}]


def _term(app: str, topology: str) -> Object:
    return {"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": topology}


def _anti_affinity(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        _other(case, node, "loud")
    terms = [_term("loud", drawn.choice((HOST, HOST, ZONE)))]
    _affinity(case)["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}


def _apart(case: Case, drawn: random.Random) -> None:
    terms = [_term("tested", HOST)]
    anti = _affinity(case).setdefault("podAntiAffinity", {})
    anti.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).extend(terms)
    case.copies = drawn.randint(2, 3)


def _pod_affinity(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        _other(case, node, "cache")
    terms = [_term("cache", drawn.choice((HOST, HOST, ZONE)))]
    _affinity(case)["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}


def _refused_by_others(case: Case, drawn: random.Random) -> None:
    """Run pods whose own anti-affinity keeps the tested ones away."""
    anti = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_term("tested", HOST)]}}
    for node in _some(case, drawn):
        _other(case, node, "shy", affinity=anti)


def _spread(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        _other(case, node, "tested")
    how = drawn.choice(("DoNotSchedule", "DoNotSchedule", "ScheduleAnyway"))
    constraint = {
        "maxSkew": 1,
        "topologyKey": drawn.choice((HOST, ZONE)),
        "whenUnsatisfiable": how,
        "labelSelector": {"matchLabels": {"app": "tested"}},
    }
    case.pod["spec"]["topologySpreadConstraints"] = [constraint]


def _host_port(case: Case, drawn: random.Random) -> None:
    ports = [
        {"containerPort": 8080, "hostPort": 8080, **extra}
        for extra in ({}, {"protocol": "UDP"}, {"hostIP": "127.0.0.9"})
    ]
    for node in _some(case, drawn):
        _other(case, node, "server")["spec"]["containers"][0]["ports"] = [drawn.choice(ports)]
    _container(case)["ports"] = [drawn.choice(ports)]


def _extended_resource(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        _offer(node, "rdma/hca", "2")
        if drawn.random() < 0.4:
            other = _other(case, node, "network")
            other["spec"]["containers"][0]["resources"] = {"limits": {"rdma/hca": "2"}}
    _request(case, "rdma/hca", "1")


def _ephemeral_storage(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        other = _other(case, node, "cache")
        other["spec"]["containers"][0]["resources"] = {"requests": {"ephemeral-storage": "600Gi"}}
    _request(case, "ephemeral-storage", drawn.choice(("300Gi", "700Gi")))


def _huge_pages(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        _offer(node, "hugepages-2Mi", "64Mi")
    _request(case, "hugepages-2Mi", "64Mi")
    _request(case, "cpu", "1")


def _pod_slots(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        _offer(node, "pods", "1")
        if drawn.random() < 0.7:
            _other(case, node, "small")


def _cpu_and_memory(case: Case, drawn: random.Random) -> None:
    for node in _some(case, drawn):
        other = _other(case, node, "large")
        other["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "60", "memory": "400Gi"}}
    _request(case, *drawn.choice((("cpu", "8"), ("memory", "200Gi"))))


def _sidecar(case: Case, drawn: random.Random) -> None:
    """Request CPUs in a restartable init container, and more in one that ends before the pod starts."""
    sidecar = {"name": "proxy", "image": "none", "restartPolicy": "Always", "resources": {"requests": {"cpu": "20"}}}
    first = {"name": "copy", "image": "none", "resources": {"requests": {"cpu": drawn.choice(("30", "50"))}}}
    case.pod["spec"]["initContainers"] = [sidecar, first]
    _request(case, "cpu", "20")
    for node in _some(case, drawn):
        _other(case, node, "busy")["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "10"}}


def _claim(case: Case, drawn: random.Random, **volume: Any) -> Object:
    """Add a volume that is on one node, and a claim to it."""
    node = drawn.choice(case.nodes)["metadata"]["name"]
    name = f"{case.name}-{len(case.volumes)}"
    term = {"matchExpressions": [{"key": HOST, "operator": "In", "values": [node]}]}
    body: Object = {
        "metadata": {"name": name, "labels": {CASE: case.name}},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "local": {"path": "/data"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
            "persistentVolumeReclaimPolicy": "Delete",
            **volume,
        },
    }
    case.volumes.append(body)
    claim: Object = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "selector": {"matchLabels": {CASE: case.name}},
        },
    }
    case.claims.append(claim)
    case.pod["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    return claim


def _volume_on_a_node(case: Case, drawn: random.Random) -> None:
    claim = _claim(case, drawn, storageClassName="")
    claim["spec"]["storageClassName"] = ""


def _volume_bound_by_the_pod(case: Case, drawn: random.Random) -> None:
    claim = _claim(case, drawn, storageClassName=WAITS_FOR_A_POD)
    claim["spec"]["storageClassName"] = WAITS_FOR_A_POD


def _priority(case: Case, _drawn: random.Random) -> None:
    case.pod["spec"]["priorityClassName"] = "important"


def _several_gpus(case: Case, drawn: random.Random) -> None:
    _container(case)["resources"]["limits"][GPU] = drawn.choice(("2", "4"))


FEATURES: Final[dict[str, Callable[[Case, random.Random], None]]] = {
    one.__name__.removeprefix("_"): one
    for one in (
        _selects_zone,
        _node_affinity,
        _preferred_node,
        _taints,
        _anti_affinity,
        _apart,
        _pod_affinity,
        _refused_by_others,
        _spread,
        _host_port,
        _extended_resource,
        _ephemeral_storage,
        _huge_pages,
        _pod_slots,
        _cpu_and_memory,
        _sidecar,
        _volume_on_a_node,
        _volume_bound_by_the_pod,
        _priority,
        _several_gpus,
    )
}
