"""Lists what an installation has put into a cluster: its own objects, and its labels on objects of others.

An object is the installation's if it has the label `app.kubernetes.io/part-of: gpuquota`. Of cluster-scoped kinds,
which only administrators make, so is one whose name begins with `gpuquota-` (0.1.0 left the label out of some), and of
bindings one that grants a role of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.cluster.kubernetes.convert.published_devices import PublishedDevices
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

Json = dict[str, Any]

PART_OF: Final = "app.kubernetes.io/part-of=gpuquota"
PREFIX: Final = f"{labels.GROUP}/"
RESERVATIONS: Final = "gpuquota-reservations"
KEYS: Final = "gpuquota-keys"
AGENTS: Final = "gpuquota-node-agents"
_OURS: Final = "gpuquota"
_HELM: Final = "meta.helm.sh/release-"


@dataclass(frozen=True)
class Kind:
    """A kind of object: the API's prefix, the plural, whether its objects are in namespaces."""

    api: str
    plural: str
    namespaced: bool = False

    def path(self, name: str = "", namespace: str = "") -> str:
        """Return the path of an object, or of all objects of a namespace, or of the cluster."""
        inside = ("namespaces", namespace) if namespace else ()
        return join(self.api, *inside, self.plural, *((name,) if name else ()))


_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"

POLICY_BINDINGS: Final = Kind(_ADMISSION, "validatingadmissionpolicybindings")
POLICIES: Final = Kind(_ADMISSION, "validatingadmissionpolicies")
WEBHOOKS: Final = Kind(_ADMISSION, "mutatingwebhookconfigurations")
DEPLOYMENTS: Final = Kind("/apis/apps/v1", "deployments", namespaced=True)
STATEFUL_SETS: Final = Kind("/apis/apps/v1", "statefulsets", namespaced=True)
DAEMON_SETS: Final = Kind("/apis/apps/v1", "daemonsets", namespaced=True)
DEFINITIONS: Final = Kind("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions")
JOBS: Final = Kind(paths.GROUP, "elasticjobs", namespaced=True)
PODS: Final = Kind("/api/v1", "pods", namespaced=True)
NODES: Final = Kind("/api/v1", "nodes")
SECRETS: Final = Kind("/api/v1", "secrets", namespaced=True)
NETWORK_POLICIES: Final = Kind("/apis/networking.k8s.io/v1", "networkpolicies", namespaced=True)
NAMESPACE_KIND: Final = Kind("/api/v1", "namespaces")
WORKLOADS: Final = (DEPLOYMENTS, STATEFUL_SETS, DAEMON_SETS)
RIGHTS: Final = (
    Kind(_RBAC, "rolebindings", namespaced=True),
    Kind(_RBAC, "clusterrolebindings"),
    Kind(_RBAC, "clusterroles"),
)
SETTINGS: Final = (
    Kind("/apis/flowcontrol.apiserver.k8s.io/v1", "flowschemas"),
    Kind("/apis/scheduling.k8s.io/v1", "priorityclasses"),
)


def name_of(found: Json) -> str:
    """Return `namespace/name` of an object, or its name alone."""
    metadata = found["metadata"]
    namespace = metadata.get("namespace", "")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


def marks(found: Json, part: str) -> list[str]:
    """Return the names of our labels or annotations (`part`) on an object."""
    return [name for name in found["metadata"].get(part) or {} if name.startswith(PREFIX)]


def is_gated(pod: Json) -> bool:
    """Return whether the pod waits at the gate."""
    return any(gate["name"] == labels.QUOTA_GATE for gate in pod["spec"].get("schedulingGates") or ())


def is_alive(pod: Json) -> bool:
    """Return whether the pod has neither ended nor been deleted."""
    ended = pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    return not ended and not pod["metadata"].get("deletionTimestamp")


def is_running(pod: Json) -> bool:
    """Return whether the pod holds resources of a node."""
    return bool(pod["spec"].get("nodeName")) and is_alive(pod)


def add_devices(nodes: Iterable[Json], devices: PublishedDevices) -> None:
    """Add the devices of DRA drivers to what nodes have, of which their kubelets have announced none."""
    for node in nodes:
        for part in ("capacity", "allocatable"):
            announced = node.setdefault("status", {}).get(part) or {}
            found = {name: str(amount) for name, amount in devices.amounts(name_of(node)).items()}
            more = {name: amount for name, amount in found.items() if announced.get(name, "0") == "0"}
            node["status"][part] = {**announced, **more}


class Inventory:
    """Reads the objects of an installation. Each call lists them again."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def listed(self, kind: Kind, namespace: str = "", **query: str) -> list[Json]:
        """Return all objects of a kind; none where the cluster has no such kind."""
        try:
            return list(self._calls.get(kind.path(namespace=namespace), **query)["items"])
        except NotFoundError:
            return []

    def ours(self, kind: Kind) -> list[Json]:
        """Return the installation's objects of a kind."""
        return [found for found in self.listed(kind) if _is_ours(found, by_name=not kind.namespaced)]

    def definitions(self) -> list[Json]:
        """Return our kinds."""
        return [one for one in self.listed(DEFINITIONS) if one["spec"]["group"] == labels.GROUP]

    def namespaces(self) -> list[Json]:
        """Return the installation's own namespaces."""
        return [one for one in self.listed(NAMESPACE_KIND) if _is_own_namespace(one)]

    def marked_namespaces(self) -> list[Json]:
        """Return other namespaces with labels of ours."""
        found = self.listed(NAMESPACE_KIND)
        return [one for one in found if marks(one, "labels") and not _is_own_namespace(one)]

    def marked_nodes(self) -> list[Json]:
        """Return the nodes with labels or annotations of ours."""
        return [one for one in self.listed(NODES) if _is_marked(one)]

    def pods(self) -> list[Json]:
        """Return the pods outside of our namespaces that are gated, of an ElasticJob, or have labels or annotations."""
        own = {one["metadata"]["name"] for one in self.namespaces()}
        found = (one for one in self.listed(PODS) if one["metadata"]["namespace"] not in own)
        return [one for one in found if is_gated(one) or _owned_by_job(one) or _is_marked(one)]

    def reservations(self) -> list[Json]:
        """Return the pods that hold shared GPUs."""
        return self.listed(PODS, RESERVATIONS)

    def job_secrets(self) -> list[Json]:
        """Return the Secrets of ElasticJobs' workers: those that an ElasticJob owns."""
        return [
            one
            for one in self.listed(SECRETS, fieldSelector="type=Opaque")
            if one["metadata"]["name"].endswith("-membership") and _owned_by_job(one)
        ]

    def job_network_policies(self) -> list[Json]:
        """Return the NetworkPolicies of ElasticJobs' workers: those that an ElasticJob owns."""
        return [one for one in self.listed(NETWORK_POLICIES) if _owned_by_job(one)]

    def releases(self) -> list[Json]:
        """Return the Secrets in which Helm keeps its record of the installation."""
        found = {
            (notes[f"{_HELM}namespace"], notes[f"{_HELM}name"])
            for kind in (*WORKLOADS, WEBHOOKS, POLICIES)
            for one in self.ours(kind)
            if f"{_HELM}name" in (notes := one["metadata"].get("annotations") or {})
        }
        return [
            one
            for namespace, name in sorted(found)
            for one in self.listed(SECRETS, namespace, labelSelector=f"owner=helm,name={name}")
        ]


def _owned_by_job(found: Json) -> bool:
    owners = found["metadata"].get("ownerReferences") or ()
    return any(owner["kind"] == "ElasticJob" and owner["apiVersion"].startswith(PREFIX) for owner in owners)


def _is_marked(found: Json) -> bool:
    return bool(marks(found, "labels") or marks(found, "annotations"))


def _is_ours(found: Json, *, by_name: bool) -> bool:
    name, granted = str(found["metadata"]["name"]), str(found.get("roleRef", {}).get("name", ""))
    if _is_labelled(found) or granted.startswith(f"{_OURS}-"):
        return True
    return by_name and (name == _OURS or name.startswith(f"{_OURS}-"))


def _is_labelled(found: Json) -> bool:
    key, _, value = PART_OF.partition("=")
    return bool((found["metadata"].get("labels") or {}).get(key) == value)


def _is_own_namespace(namespace: Json) -> bool:
    return _is_labelled(namespace) or namespace["metadata"]["name"] in {RESERVATIONS, KEYS, AGENTS}


def summary(objects: list[Json], most: int = 3) -> Iterator[str]:
    """Yield the names of the first objects, and how many more there are."""
    yield from (name_of(one) for one in objects[:most])
    if len(objects) > most:
        yield f"{len(objects) - most} more"
