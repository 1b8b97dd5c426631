"""Checks a QuotaPolicy in a file as a whole, before it is applied: `gpuquota policy check`.

| check | of the file alone | with a cluster |
|---|---|---|
| fields | names and types by the definition's schema | |
| rules | all rules, converted as the controller converts them | the API server's, by a dry run |
| change | | which fields differ from the policy in force |
| resources | | announced by nodes; nodes' resources that look like GPUs and are in no list |
| pools, namespaces | | named objects exist; what `unmanaged` changes for pods that run |
"""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.check_results import fail, ok, warn
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import QuotaPolicyObject
from kfp_gpuquota.cluster.kubernetes.operations import inventory
from kfp_gpuquota.cluster.kubernetes.operations.definitions import schema_of_kind
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import NAME, Unmanaged, rules_of
from kfp_gpuquota.cluster.kubernetes.user_client.projects import ProjectCalls
from kfp_gpuquota.errors import GpuQuotaError, InvalidFieldError, NotFoundError, UnauthorizedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.check_results import Finding
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import ClusterRules
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

Json = dict[str, Any]

KIND: Final = "QuotaPolicy"
_MANAGES: Final = {Unmanaged.DENY: "refused", Unmanaged.DEFAULT_QUOTA: "held until its namespace has its default quota"}
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


def policy_in(text: str) -> Json:
    """Return the QuotaPolicy in YAML or JSON, alone or in a List. Raises UsageError."""
    try:
        found = msgspec.yaml.decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"the file is neither YAML nor JSON: {error}") from None
    items = (found.get("items", [found]) or []) if isinstance(found, dict) else []
    policies = [one for one in items if isinstance(one, dict) and one.get("kind") == KIND]
    if len(policies) != 1:
        raise UsageError(f"the file has {len(policies)} objects of kind {KIND}; it must have one, named {NAME}")
    return policies[0]


def examine(policy: Json, calls: Calls | None = None) -> tuple[Finding, ...]:
    """Return the findings; without `calls` of the file alone."""
    fields = tuple(_fields(policy))
    if fields:
        return fields
    try:
        stored = msgspec.convert(policy, QuotaPolicyObject)
        rules = rules_of(stored)
    except (msgspec.ValidationError, InvalidFieldError) as error:
        message = error.message if isinstance(error, InvalidFieldError) else str(error)
        return (fail("rules", message, "the controller would keep the previous policy in force"),)
    if calls is None:
        here = "rules of several fields are checked by the API server"
        return (
            ok("fields", "all are known"),
            warn("rules", f"valid as far as a file shows: {here}", "choose a cluster"),
        )
    refused = tuple(_dry_run(policy, calls))
    return (ok("fields", "all are known"), *refused, *_changes(policy, calls), *_in_cluster(policy, rules, calls))


# The file alone


def _fields(policy: Json) -> Iterator[Finding]:
    if policy.get("apiVersion") != labels.API_VERSION:
        remedy = f"write apiVersion: {labels.API_VERSION}"
        yield fail("fields", f"apiVersion is {policy.get('apiVersion')!r}", remedy)
    meta = policy.get("metadata")
    if not isinstance(meta, dict) or meta.get("name") != NAME:
        yield fail("fields", f"the cluster has one policy, whose name is {NAME}", f"write metadata: {{name: {NAME}}}")
    yield from _unknown(schema_of_kind(KIND)["properties"]["spec"], policy.get("spec", {}), "spec")


def _unknown(schema: Json, value: object, path: str) -> Iterator[Finding]:
    """Yield a finding for each field that the schema does not have, or that is of another type."""
    kind = schema.get("type", "")
    if not isinstance(value, _TYPES.get(kind, (object,))) or (isinstance(value, bool) and kind != "boolean"):
        yield fail(
            "fields", f"{path} is {value!r}, but must be of type {kind}", f"see: kubectl explain quotapolicy.{path}"
        )
    elif isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        for name, inner in value.items():
            if name in known or isinstance(more, dict):
                yield from _unknown(known.get(name, more), inner, f"{path}.{name}")
            elif known:
                close = get_close_matches(str(name), known, 1)
                remedy = f"write {close[0]}" if close else f"its fields are: {', '.join(sorted(known))}"
                yield fail("fields", f"{path}.{name} is no field, and would be ignored", remedy)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _unknown(schema["items"], inner, f"{path}[{number}]")


# With a cluster


def _dry_run(policy: Json, calls: Calls) -> Iterator[Finding]:
    """Replace the policy as a trial, which is not stored."""
    spec: Json = {**dict.fromkeys(schema_of_kind(KIND)["properties"]["spec"]["properties"]), **policy.get("spec", {})}
    try:
        try:
            calls.patch(join(paths.QUOTA_POLICIES, NAME), {"spec": spec}, dry_run=True)
        except NotFoundError:
            calls.create(paths.QUOTA_POLICIES, policy, dry_run=True)
    except GpuQuotaError as error:
        yield fail("rules", error.message, "change the file; nothing was stored")
    else:
        yield ok("rules", "the API server would store it")


def _changes(policy: Json, calls: Calls) -> Iterator[Finding]:
    try:
        before = calls.get(join(paths.QUOTA_POLICIES, NAME)).get("spec", {})
    except NotFoundError:
        before = {}
    after = policy.get("spec", {})
    schema = schema_of_kind(KIND)["properties"]["spec"]["properties"]
    differ = [name for name in schema if _value(before, name, schema) != _value(after, name, schema)]
    yield ok("change", f"differs from the policy in force in: {', '.join(differ)}" if differ else "changes nothing")


def _value(spec: Json, name: str, schema: Json) -> object:
    """Return a field's value, by default the schema's, with those of the fields in it."""
    value, default = spec.get(name), schema[name].get("default")
    if isinstance(default, dict):
        return {**default, **(value or {})}
    return (value if value is not None else default) or None


def _in_cluster(policy: Json, rules: ClusterRules, calls: Calls) -> Iterator[Finding]:
    found = inventory.Inventory(calls)
    nodes, namespaces = found.listed(inventory.NODES), found.listed(inventory.NAMESPACE_KIND)
    counted = {labels.GPU_RESOURCE, *(name for name, _ in rules.gpu_weights)}
    with suppress(NotFoundError, UnauthorizedError):  # an older API server has no such kinds
        inventory.add_devices(nodes, ProjectCalls(calls).published_devices(counted))
    yield from _resources(policy, nodes)
    yield from _pools(rules, nodes)
    there = {inventory.name_of(one) for one in namespaces}
    if absent := sorted(rules.exempt_namespaces - there):
        yield warn("namespaces", f"exemptNamespaces do not exist: {', '.join(absent)}", "see: kubectl get namespaces")
    if rules.unmanaged in _MANAGES:
        yield from _unmanaged(rules, namespaces, found.listed(inventory.PODS))


def _resources(policy: Json, nodes: list[Json]) -> Iterator[Finding]:
    spec = policy.get("spec", {})
    announced = {name for node in nodes for name in (node.get("status", {}).get("allocatable") or {})}
    counted = [row["name"] for row in spec.get("gpuResources") or ()]
    for name in counted:
        if name not in announced:
            remedy = "see its device plugin's pods, and: kubectl get nodes -o yaml"
            yield warn("resources", f"{name} counts as GPUs, but no node has it", remedy)
    listed = {labels.GPU_RESOURCE, *counted, *(spec.get("otherResources") or ())}
    for name in sorted(announced - listed):
        if name.startswith(f"{labels.VENDOR}/") or ("/" in name and "gpu" in name.lower()):
            remedy = "count it in gpuResources, or name it in otherResources if it is no GPU"
            yield warn("resources", f"nodes have {name}, which pods of managed namespaces may not request", remedy)


def _pools(rules: ClusterRules, nodes: list[Json]) -> Iterator[Finding]:
    pools = [(node["metadata"].get("labels") or {}).get(labels.POOL, "") for node in nodes]
    for pool in rules.pools:
        gpus = pools.count(pool.name) * pool.gpus_per_node
        if gpus > pool.max_gpus:
            message = f"pool {pool.name} has {gpus} GPUs by gpusPerNode, more than its maxGpus {pool.max_gpus}"
            yield warn("pools", message, "raise maxGpus, or lower the autoscaler's maximum")


def _unmanaged(rules: ClusterRules, namespaces: list[Json], pods: list[Json]) -> Iterator[Finding]:
    """Find the pods of namespaces that `unmanaged` would concern."""
    free = {
        inventory.name_of(one)
        for one in namespaces
        if (one["metadata"].get("labels") or {}).get(labels.MANAGED) != "true"
        and not rules.exempts(inventory.name_of(one))
    }
    counted = {labels.GPU_RESOURCE, *(name for name, _ in rules.gpu_weights)}
    here = sorted({one["metadata"]["namespace"] for one in pods if _requests(one, counted)} & free)
    if here:
        shown = ", ".join(here[:5]) + (", ..." if len(here) > 5 else "")
        what = _MANAGES[rules.unmanaged]
        remedy = "create their GpuQuotas first, or add those of GPU operators to exemptNamespaces"
        yield warn("namespaces", f"a new GPU pod would be {what} in: {shown}", remedy)


def _requests(pod: Json, names: set[str]) -> bool:
    limits = ((one.get("resources") or {}).get("limits") or {} for one in pod["spec"].get("containers", ()))
    return inventory.is_alive(pod) and any(name in names for given in limits for name in given)
