"""Exports an installation's quotas, policies and rules, and restores them.

The file is a List that `kubectl apply` reads as well. Not in it: status, what the controller derives (GpuQuotas of
Profiles and defaults, ElasticJobs of Jobs) and, unless asked for, other ElasticJobs, whose restoration starts them from
the beginning. Of managed namespaces it has the labels; a namespace that does not exist is not created, since a team
would be without its rights.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.redaction import is_redacted, redacted
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.operations import inventory
from kfp_gpuquota.cluster.kubernetes.operations.inventory import Inventory, Kind, marks
from kfp_gpuquota.errors import AlreadyExistsError, NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

Json = dict[str, Any]

KINDS: Final = {
    "QuotaPolicy": Kind(paths.GROUP, "quotapolicies"),
    "GpuQuota": Kind(paths.GROUP, "gpuquotas"),
    "WorkloadPolicy": Kind(paths.GROUP, "workloadpolicies"),
}
JOB: Final = "ElasticJob"
NAMESPACE: Final = "Namespace"
_OF_OTHER_TOOLS: Final = ("kubectl.kubernetes.io/", "meta.helm.sh/", "helm.sh/")
_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
_ENDED: Final = {"Succeeded", "Failed", "Cancelled"}


class Outcome(StrEnum):
    """What became of an object of the file."""

    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped: there is no such namespace"


def exported(calls: Calls, *, jobs: bool = False, secrets: bool = False) -> str:
    """Return the file's content; without `secrets` the values of the jobs' environment variables are left out."""
    found = Inventory(calls)
    items = [_item(kind, one) for kind, plural in KINDS.items() for one in found.listed(plural) if not _is_derived(one)]
    for namespace in found.marked_namespaces():
        kept = {name: namespace["metadata"]["labels"][name] for name in marks(namespace, "labels")}
        metadata = {"name": namespace["metadata"]["name"], "labels": kept}
        items.append({"apiVersion": "v1", "kind": NAMESPACE, "metadata": metadata})
    if jobs:
        found_jobs = [_item(JOB, one) for one in found.listed(inventory.JOBS) if _goes_on(one) and not _is_derived(one)]
        items += found_jobs if secrets else [redacted(one) for one in found_jobs]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)


def restored(calls: Calls, content: str) -> Iterator[tuple[str, Outcome]]:
    """Create or replace each object of the file; yield its name and the outcome. Raises UsageError for another file."""
    try:
        items = json.loads(content)["items"]
        named = [(one["kind"], one["metadata"]["name"], one) for one in items]
    except (ValueError, KeyError, TypeError):
        raise UsageError("the file is not what `gpuquota --context NAME cluster export` writes") from None
    if unknown := {kind for kind, _, _ in named} - {*KINDS, JOB, NAMESPACE}:
        raise UsageError(f"the file has objects of kind {', '.join(sorted(unknown))}, which are not restored here")
    if without := [name for _, name, one in named if is_redacted(one)]:
        raise UsageError(
            f"the file lacks the values of environment variables of {', '.join(without[:5])}; write one with: "
            "gpuquota --context NAME cluster export --jobs --with-secrets"
        )
    for kind, name, one in named:
        yield f"{kind}/{name}", _restore(calls, kind, one)


def _restore(calls: Calls, kind: str, one: Json) -> Outcome:
    metadata = one["metadata"]
    if kind == NAMESPACE:
        return _label(calls, metadata)
    plural, namespace = KINDS.get(kind, inventory.JOBS), metadata.get("namespace", "")
    try:
        calls.create(plural.path(namespace=namespace), one)
    except AlreadyExistsError:
        return _replace(calls, plural.path(metadata["name"], namespace), one)
    except NotFoundError:
        if not namespace:
            raise
        return Outcome.SKIPPED
    return Outcome.CREATED


def _replace(calls: Calls, path: str, one: Json) -> Outcome:
    before = calls.get(path)
    after = calls.patch(path, [{"op": "replace", "path": "/spec", "value": one["spec"]}])
    return Outcome.UNCHANGED if after["spec"] == before["spec"] else Outcome.CHANGED


def _label(calls: Calls, metadata: Json) -> Outcome:
    path = inventory.NAMESPACE_KIND.path(metadata["name"])
    try:
        before = calls.get(path)["metadata"].get("labels") or {}
    except NotFoundError:
        return Outcome.SKIPPED
    if metadata["labels"].items() <= before.items():
        return Outcome.UNCHANGED
    calls.patch(path, {"metadata": {"labels": metadata["labels"]}})
    return Outcome.CHANGED


def _item(kind: str, one: Json) -> Json:
    metadata = {name: one["metadata"][name] for name in ("name", "namespace") if name in one["metadata"]}
    for part in ("labels", "annotations"):
        kept = {
            name: value
            for name, value in (one["metadata"].get(part) or {}).items()
            if not name.startswith(_OF_OTHER_TOOLS) and name != _MANAGED_BY
        }
        if kept:
            metadata[part] = kept
    return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": metadata, "spec": one["spec"]}


def _is_derived(one: Json) -> bool:
    return labels.SOURCE in (one["metadata"].get("labels") or {})


def _goes_on(job: Json) -> bool:
    return job.get("status", {}).get("phase") not in _ENDED
