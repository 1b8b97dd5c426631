"""Reads what the checks need from the API server, with the administrator's rights. What may not be read is noted.

The time when a certificate expires is read from its DER encoding (RFC 5280, section 4.1). The command line has no
library for certificates, and needs this one date. TBSCertificate is: version [0], serialNumber, signature, issuer,
validity, ...; validity is two times.
"""

from __future__ import annotations

import base64
import ssl
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import divided_of
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuResource
from kfp_gpuquota.cluster.kubernetes.operations import inventory
from kfp_gpuquota.cluster.kubernetes.operations.inventory import Inventory, Kind
from kfp_gpuquota.cluster.kubernetes.user_client.projects import ProjectCalls
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls


_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17


def not_after(pem: str) -> float:
    """Return when the first certificate of a PEM expires, in seconds since 1970. Raises ValueError."""
    end = "-----END CERTIFICATE-----"
    der = ssl.PEM_cert_to_DER_cert(pem.partition(end)[0].strip() + f"\n{end}\n")
    _, certificate, _ = _element(der)
    _, fields, _ = _element(certificate)
    tag, _, rest = _element(fields)
    skipped = 3 if tag == _VERSION else 2  # after the version: serialNumber, signature, issuer
    for _ in range(skipped):
        tag, validity, rest = _element(rest)
    tag, validity, _ = _element(rest)
    if tag != _SEQUENCE:
        raise ValueError("the certificate has no validity")
    _, _, rest = _element(validity)
    tag, text, _ = _element(rest)
    pattern = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), pattern).replace(tzinfo=UTC).timestamp()


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Return the first element's tag and content, and what follows it. Raises ValueError."""
    if len(data) < 2:
        raise ValueError("the certificate is cut off")
    length, start = data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        raise ValueError("the certificate is cut off")
    return data[0], data[start : start + length], data[start + length :]


Json = dict[str, Any]

_SECRET: Final = "gpuquota-webhook"  # noqa: S105 (a name)
_SLICES: Final = Kind("/apis/discovery.k8s.io/v1", "endpointslices", namespaced=True)
CONTROLLER: Final = "gpuquota-controller"
KINDS: Final = {
    "nodes": inventory.NODES,
    "namespaces": inventory.NAMESPACE_KIND,
    "pods": inventory.PODS,
    "definitions": inventory.DEFINITIONS,
    "policies": inventory.POLICIES,
    "bindings": inventory.POLICY_BINDINGS,
    "webhooks": inventory.WEBHOOKS,
    "resource_quotas": Kind("/api/v1", "resourcequotas", namespaced=True),
    "quotas": Kind(paths.GROUP, "gpuquotas"),
    "rules": Kind(paths.GROUP, "quotapolicies"),
    "workload_policies": Kind(paths.GROUP, "workloadpolicies"),
    "local_queues": Kind("/apis/kueue.x-k8s.io/v1beta1", "localqueues", namespaced=True),
    "node_pools": Kind("/apis/karpenter.sh/v1", "nodepools"),
}
"""The fields of `Facts` that are lists of objects."""
RIGHTS: Final = (
    ("list", "", "pods", ""),
    ("patch", "", "pods", ""),
    ("create", "", "pods", "eviction"),
    ("delete", "", "pods", ""),
    ("list", "", "nodes", ""),
    ("watch", labels.GROUP, "elasticjobs", ""),
    ("patch", labels.GROUP, "elasticjobs", "status"),
    ("watch", labels.GROUP, "gpuquotas", ""),
    ("create", "", "secrets", ""),
    ("patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", ""),
)
"""What the controller cannot work without: verb, API group, resource, subresource."""


@dataclass
class Facts:
    """What was read. Lists are of objects as the API server has them."""

    now: float = 0.0  # the API server's clock, in seconds since 1970
    local_now: float = 0.0
    version: tuple[int, int] = (0, 0)
    system: str = "gpuquota-system"
    nodes: list[Json] = field(default_factory=list)
    namespaces: list[Json] = field(default_factory=list)
    pods: list[Json] = field(default_factory=list)
    programs: list[Json] = field(default_factory=list)  # Deployments, StatefulSets and DaemonSets of ours
    definitions: list[Json] = field(default_factory=list)
    policies: list[Json] = field(default_factory=list)
    bindings: list[Json] = field(default_factory=list)
    webhooks: list[Json] = field(default_factory=list)
    resource_quotas: list[Json] = field(default_factory=list)
    quotas: list[Json] = field(default_factory=list)
    rules: list[Json] = field(default_factory=list)
    workload_policies: list[Json] = field(default_factory=list)
    exporters: list[Json] = field(default_factory=list)  # EndpointSlices of the Service in gpuUse
    local_queues: list[Json] = field(default_factory=list)
    node_pools: list[Json] = field(default_factory=list)
    lease: Json | None = None
    certificate_expires: float | None = None  # None: no Secret
    gated: bool = False  # a pod that asks for a GPU, created as a trial
    refusal: str = ""  # of that pod
    denied_rights: list[str] = field(default_factory=list)  # of RIGHTS, that the controller lacks
    unreadable: dict[str, str] = field(default_factory=dict)  # by what was to be read

    @property
    def managed(self) -> set[str]:
        """Return the namespaces under the quota."""
        return {
            one["metadata"]["name"]
            for one in self.namespaces
            if (one["metadata"].get("labels") or {}).get(labels.MANAGED) == "true"
        }


class Reader:
    """Reads the facts of one cluster."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._inventory = calls, Inventory(calls)
        self._facts = Facts(local_now=time.time())

    def read(self) -> Facts:
        """Return the facts. Raises ClusterUnavailableError if the API server does not respond."""
        facts = self._facts
        facts.now = self._clock()
        facts.version = self._version()
        for name, kind in KINDS.items():
            self._try(kind.plural, partial(self._list, name, kind))
        self._try("resourceslices", self._add_devices)
        self._try("endpointslices", self._list_exporters)
        for kind in inventory.WORKLOADS:
            self._try(kind.plural, partial(self._list_programs, kind))
        for one in facts.programs:
            if one["metadata"]["name"] == CONTROLLER:
                facts.system = one["metadata"]["namespace"]
        if facts.programs:
            self._try("leases", self._read_lease)
            self._try(f"Secret {_SECRET}", self._read_certificate)
            self._try("subjectaccessreviews", self._read_rights)
            self._read_gate()
        return facts

    def _list(self, name: str, kind: Kind) -> None:
        setattr(self._facts, name, self._inventory.listed(kind))

    def _add_devices(self) -> None:
        table = gpu_resources_of(self._facts)
        counted = {labels.GPU_RESOURCE, *(row.name for row in table)}
        devices = ProjectCalls(self._calls).published_devices(counted, dict(divided_of(table)))
        inventory.add_devices(self._facts.nodes, devices)

    def _list_exporters(self) -> None:
        for exporter in filter(None, map(exporter_of, self._facts.rules)):
            namespace, _, service = exporter.partition("/")
            selected = {"labelSelector": f"kubernetes.io/service-name={service}"}
            self._facts.exporters += self._inventory.listed(_SLICES, namespace, **selected)

    def _list_programs(self, kind: Kind) -> None:
        self._facts.programs += self._inventory.ours(kind)

    def _try(self, what: str, read: Callable[[], object]) -> None:
        try:
            read()
        except NotFoundError:
            return
        except UnauthorizedError as error:
            self._facts.unreadable[what] = error.message

    def _clock(self) -> float:
        with self._calls.open("/version", timeout_s=15.0) as response:
            response.read()
            return parsedate_to_datetime(response.header("Date")).timestamp()

    def _version(self) -> tuple[int, int]:
        found = self._calls.get("/version")
        return int(found["major"]), int("".join(filter(str.isdigit, found["minor"])))

    def _read_lease(self) -> None:
        path = join("/apis/coordination.k8s.io/v1/namespaces", self._facts.system, "leases", CONTROLLER)
        self._facts.lease = self._calls.get(path)

    def _read_certificate(self) -> None:
        secret = self._calls.get(inventory.SECRETS.path(_SECRET, inventory.KEYS))
        self._facts.certificate_expires = not_after(base64.b64decode(secret["data"]["tls.crt"]).decode())

    def _read_rights(self) -> None:
        user = f"system:serviceaccount:{self._facts.system}:{CONTROLLER}"
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{self._facts.system}", "system:authenticated"]
        for verb, group, resource, subresource in RIGHTS:
            wanted = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
            if resource == "mutatingwebhookconfigurations":
                wanted["name"] = "gpuquota"
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": user, "groups": groups, "resourceAttributes": wanted},
            }
            answer = self._calls.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
            if not answer["status"]["allowed"]:
                self._facts.denied_rights.append(" ".join(filter(None, (verb, resource, subresource))))

    def _read_gate(self) -> None:
        """Create a pod that asks for a GPU as a trial: the webhook reviews it, and nothing is stored."""
        container = {"name": "trial", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
        metadata = {"generateName": "gpuquota-doctor-", "labels": {labels.MANAGED: "true"}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        try:
            made = self._calls.create("/api/v1/namespaces/default/pods", pod, dry_run=True)
        except GpuQuotaError as error:
            self._facts.refusal = error.message
        else:
            self._facts.gated = inventory.is_gated(made)


def seconds(text: str) -> float:
    """Return a time of Kubernetes in seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def gpu_resources_of(facts: Facts) -> list[GpuResource]:
    """Return the QuotaPolicy's table of resources that count as GPUs."""
    rows = (row for rule in facts.rules for row in rule.get("spec", {}).get("gpuResources") or ())
    return [msgspec.convert(row, GpuResource) for row in rows]


def exporter_of(rule: Json) -> str:
    """Return the Service by which a QuotaPolicy has the use of GPUs measured, as NAMESPACE/NAME; "" without one."""
    return str((rule.get("spec", {}).get("gpuUse") or {}).get("exporter", ""))
