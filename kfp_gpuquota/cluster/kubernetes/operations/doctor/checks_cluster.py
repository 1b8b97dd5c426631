"""Checks of the cluster: GPUs, quotas, other quotas and schedulers in the way, autoscaled pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.quantity import as_number, show_gpus
from kfp_gpuquota.api.resources import WHOLE_GPU, part_weights, weighed
from kfp_gpuquota.cluster.check_results import fail, ok, warn
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import counts_as
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import whole_number
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import exporter_of, gpu_resources_of
from kfp_gpuquota.cluster.kubernetes.operations.inventory import is_running, summary
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import EXEMPT_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.check_results import Finding
    from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import Facts

Json = dict[str, Any]

_GPU_LABELS: Final = ("nvidia.com/gpu.present", "nvidia.com/gpu.count")


def gpus(facts: Facts) -> Iterator[Finding]:
    """Check that nodes have GPUs, and that these can be used."""
    holding = [node for node in facts.nodes if _gpus(node, "capacity")]
    total = _total(facts)
    if not total:
        remedy = (
            "install NVIDIA's device plugin or GPU operator; nodes announce nvidia.com/gpu then. Others' GPUs count if"
            " the QuotaPolicy lists their resource (gpuResources)"
        )
        autoscaled = any(_autoscaled(rule) for rule in facts.rules)
        yield (warn if autoscaled else fail)("gpus", "no node has GPUs", remedy)
    else:
        yield ok("gpus", f"{show_gpus(total)} on {sum(bool(_counted(facts, node)) for node in facts.nodes)} nodes")
    yield from _unusable(facts, holding)


def _unusable(facts: Facts, holding: list[Json]) -> Iterator[Finding]:
    if unhealthy := [node for node in holding if _gpus(node, "allocatable") < _gpus(node, "capacity")]:
        lost = sum(_gpus(node, "capacity") - _gpus(node, "allocatable") for node in unhealthy)
        remedy = "see the device plugin's log on these nodes, and nvidia-smi"
        yield warn("gpus", f"{lost} GPUs are not healthy: {_names(unhealthy)}", remedy)
    if away := [node for node in holding if not _is_ready(node) or node["spec"].get("unschedulable")]:
        remedy = "see: kubectl describe node; kubectl uncordon NODE"
        yield warn("gpus", f"nodes with GPUs that take no pods: {_names(away)}", remedy)
    labelled = [
        node for node in facts.nodes if any(_labels(node).get(name) not in {None, "false"} for name in _GPU_LABELS)
    ]
    if silent := [node for node in labelled if not _gpus(node, "capacity")]:
        remedy = "see the device plugin's pods on these nodes"
        yield warn("gpus", f"labelled as nodes with GPUs, but announce none: {_names(silent)}", remedy)


def quotas(facts: Facts) -> Iterator[Finding]:
    """Check that managed namespaces have quotas, and that these fit the cluster."""
    if not facts.programs:
        return
    named = {one["metadata"]["name"] for one in facts.quotas}
    if without := sorted(facts.managed - named):
        remedy = "gpuquota project create NAME --guaranteed N; their pods wait until then"
        yield warn("quotas", f"under the quota, but without a GpuQuota: {', '.join(without[:5])}", remedy)
    invalid = [one for one in facts.quotas if _is_invalid(one)]
    if invalid:
        yield warn("quotas", f"invalid: {_names(invalid)}", "see status.conditions: kubectl describe gpuquotas NAME")
    guaranteed = sum(
        float(one["spec"].get("guaranteed", 0)) for one in facts.quotas if not _is_parent(one, facts.quotas)
    )
    total = _total(facts)
    if guaranteed > total:
        remedy = "lower the guarantees, or add nodes: guarantees cannot all be honoured at once"
        yield warn("quotas", f"{guaranteed:g} GPUs are guaranteed, and {total} are there", remedy)
    elif not without and not invalid:
        yield ok("quotas", f"{guaranteed:g} of {total} GPUs are guaranteed to {len(named)} projects")


def resource_quotas(facts: Facts) -> Iterator[Finding]:
    """Check that no ResourceQuota limits GPUs where the quota does: pods would be refused instead of waiting."""
    both = [
        one
        for one in facts.resource_quotas
        if one["metadata"]["namespace"] in facts.managed
        and any(labels.GPU_RESOURCE in name for name in one["spec"].get("hard") or {})
    ]
    if both:
        remedy = "remove nvidia.com/gpu from them (docs/migrating.md): pods are refused there instead of waiting"
        yield warn("other quotas", f"ResourceQuotas limit GPUs in managed namespaces: {_names(both)}", remedy)
    else:
        yield ok("other quotas", "no ResourceQuota limits GPUs in managed namespaces")


def kueue(facts: Facts) -> Iterator[Finding]:
    """Check that Kueue does not queue the pods of the same namespaces."""
    if both := [one for one in facts.local_queues if one["metadata"]["namespace"] in facts.managed]:
        remedy = "let one of them manage a namespace (docs/migrating.md)"
        yield warn("other quotas", f"Kueue queues pods of managed namespaces: {_names(both)}", remedy)


def unmanaged(facts: Facts) -> Iterator[Finding]:
    """Report the GPUs that pods outside of the quota hold."""
    if not facts.programs:
        return
    exempt = {name for rule in facts.rules for name in rule["spec"].get("exemptNamespaces") or ()}
    outside = [pod for pod in facts.pods if is_running(pod) and _asks(pod) and _is_outside(pod, facts.managed | exempt)]
    if outside:
        remedy = "label their namespaces gpuquota.dev/managed=true, or set unmanaged in the QuotaPolicy"
        held = sum(map(_asks, outside))
        yield warn("unmanaged", f"pods outside of the quota hold {held} GPUs: {_names(outside)}", remedy)


def _is_outside(pod: Json, known: set[str]) -> bool:
    """Return whether neither the pod's namespace nor the pod itself is under the quota."""
    namespace = pod["metadata"]["namespace"]
    if namespace in known or namespace.startswith(EXEMPT_PREFIXES):
        return False
    return labels.DEVICES not in (pod["metadata"].get("annotations") or {}) and labels.JOB not in _labels(pod)


def autoscaled_pools(facts: Facts) -> Iterator[Finding]:
    """Check that pools that grow are declared as they are, and that a cluster that grows declares some."""
    if not facts.programs:
        return
    declared = {name: pool for rule in facts.rules for name, pool in _autoscaled(rule).items()}
    for name, pool in sorted(declared.items()):
        nodes = [node for node in facts.nodes if _labels(node).get(labels.POOL) == name]
        total, each = sum(_gpus(node, "capacity") for node in nodes), pool.get("gpusPerNode")
        others = [node for node in nodes if each and _gpus(node, "capacity") not in {0, each}]
        if others:
            remedy = "set gpusPerNode to what the node group has, then restart the controller"
            yield warn("pools", f"pool {name}: gpusPerNode is {each}, not so on {_names(others)}", remedy)
        elif total > pool["maxGpus"]:
            yield warn(
                "pools", f"pool {name} has {total} GPUs, more than its maxGpus {pool['maxGpus']}", "raise maxGpus"
            )
        else:
            yield ok("pools", f"pool {name}: {total} of {pool['maxGpus']} GPUs are there")
    if not declared and (facts.node_pools or _has_autoscaler(facts)):
        remedy = "declare pools with GPUs that grow in the QuotaPolicy (pools.NAME.autoscaled): gated pods grow none"
        yield warn("pools", "an autoscaler runs here, and no pool is declared as autoscaled", remedy)


def unused_gpus(facts: Facts) -> Iterator[Finding]:
    """Check that rules on unused GPUs have a source: without one they suspend nothing, and say so nowhere."""
    ruled = [one for one in facts.workload_policies if one["spec"].get("idle")]
    if not ruled:
        return
    exporter = next(filter(None, map(exporter_of, facts.rules)), "")
    endpoints = [one for part in facts.exporters for one in part.get("endpoints") or ()]
    if not exporter:
        remedy = "name the Service of dcgm-exporter as gpuUse.exporter in the QuotaPolicy"
        yield warn("unused GPUs", f"nothing measures use for the policies {_names(ruled)}", remedy)
    elif exporter.partition("/")[0] in {one["metadata"]["name"] for one in facts.quotas}:
        remedy = "run dcgm-exporter in a namespace without a GpuQuota"
        yield warn("unused GPUs", f"{exporter} is in the namespace of a team, and is not asked", remedy)
    elif not endpoints and "endpointslices" not in facts.unreadable:
        remedy = f"see: kubectl -n {exporter.partition('/')[0]} get service,endpointslices"
        yield warn("unused GPUs", f"Service {exporter} has no endpoint, so nothing is measured", remedy)
    else:
        yield ok("unused GPUs", f"{exporter} is asked for {len(ruled)} policies")


def _has_autoscaler(facts: Facts) -> bool:
    return any("cluster-autoscaler" in pod["metadata"]["name"] and is_running(pod) for pod in facts.pods)


def _autoscaled(rule: Json) -> dict[str, Json]:
    pools = rule["spec"].get("pools") or {}
    return {name: pool["autoscaled"] for name, pool in pools.items() if pool.get("autoscaled")}


def _total(facts: Facts) -> int | float:
    return as_number(sum(_counted(facts, node) for node in facts.nodes))


def _counted(facts: Facts, node: Json) -> float:
    """Return the node's healthy GPUs, with what the QuotaPolicy counts as GPUs."""
    there = node.get("status", {}).get("allocatable") or {}
    amounts = {name: whole_number(str(amount)) for name, amount in there.items()}
    others = sum(counts_as(row) * amounts.get(row.name, 0) for row in gpu_resources_of(facts))
    return _gpus(node, "allocatable") + others + weighed(amounts, part_weights(amounts)) / WHOLE_GPU


def _gpus(node: Json, part: str) -> int:
    amount = str((node.get("status", {}).get(part) or {}).get(labels.GPU_RESOURCE, "0"))
    return int(amount) if amount.isdecimal() else 0


def _asks(pod: Json) -> int:
    found = 0
    for container in pod["spec"]["containers"]:
        amount = str((container.get("resources", {}).get("limits") or {}).get(labels.GPU_RESOURCE, "0"))
        found += int(amount) if amount.isdecimal() else 0
    return found


def _is_ready(node: Json) -> bool:
    conditions = node.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _is_invalid(quota: Json) -> bool:
    conditions = quota.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Accepted" and one["status"] == "False" for one in conditions)


def _is_parent(quota: Json, found: list[Json]) -> bool:
    """Return whether the quota is a department's, whose guarantee is that of its teams together."""
    return any(one["spec"].get("parent") == quota["metadata"]["name"] for one in found)


def _labels(one: Json) -> dict[str, str]:
    return one["metadata"].get("labels") or {}


def _names(found: list[Json]) -> str:
    return ", ".join(summary(found))
