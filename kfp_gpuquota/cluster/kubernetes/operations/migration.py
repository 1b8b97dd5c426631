"""Quotas of Kueue or of ResourceQuotas as GpuQuotas, with what cannot be carried over: `gpuquota migrate`. Pure.

| Kueue | here |
|---|---|
| ClusterQueue with LocalQueues in one namespace | the namespace's GpuQuota |
| ClusterQueue with LocalQueues in several | a department with the queue's quota; its namespaces, without a guarantee of their own |
| `nominalQuota`, and with `borrowingLimit` | `guaranteed`, and `limit`; without a cohort `limit` is the nominal quota |
| `fairSharing.weight` | `overQuotaWeight` |
| `stopPolicy` of a ClusterQueue | `stopPolicy` |
| Cohort that is an object | a department |
| several flavors with GPUs | node pools with the names of the flavors |

A quota is that of all resources that count as GPUs, each with its number of GPUs; CPU and memory are in `guaranteedCpu` and
so on. A namespace with a Profile gets the Profile's plugin.

Nothing is written to the cluster: the administrator applies the output, in the order of docs/migrating.md.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.quantity import as_number, parse_quantity
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations.inventory import Kind, name_of
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Json = dict[str, Any]

_KUEUE: Final = ("/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1")
_REQUESTS: Final = ("requests.", "limits.")
_AMOUNTS: Final = {"cpu": ("guaranteedCpu", "limitCpu"), "memory": ("guaranteedMemory", "limitMemory")}
PROFILES: Final = Kind("/apis/kubeflow.org/v1", "profiles")
RESOURCE_QUOTAS: Final = Kind("/api/v1", "resourcequotas", namespaced=True)


class Source(StrEnum):
    """Where the quotas come from."""

    KUEUE = "kueue"
    RESOURCE_QUOTA = "resourcequota"


@dataclass
class Migration:
    """GpuQuotas and changes of Profiles, and a line for each thing that is not carried over."""

    objects: list[Json] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Old:
    """What was read. `weights`: the GPUs that one of each resource counts as; `profiles`: the Profiles by name."""

    weights: Mapping[str, float]
    profiles: Mapping[str, Json] = field(default_factory=dict)
    quotas: list[Json] = field(default_factory=list)  # ResourceQuotas
    cluster_queues: list[Json] = field(default_factory=list)
    local_queues: list[Json] = field(default_factory=list)
    cohorts: list[Json] = field(default_factory=list)
    flavors: list[Json] = field(default_factory=list)
    priorities: list[Json] = field(default_factory=list)


def read(source: Source, listed: Callable[[Kind], list[Json]], weights: Mapping[str, float]) -> Old:
    """Return what the cluster has; `listed(kind)` are its objects of a kind, none where it has no such kind."""
    old = Old({labels.GPU_RESOURCE: 1.0, **weights}, {name_of(one): one for one in listed(PROFILES)})
    if source is Source.RESOURCE_QUOTA:
        old.quotas = listed(RESOURCE_QUOTAS)
        return old
    api = next((api for api in _KUEUE if listed(Kind(api, "clusterqueues"))), _KUEUE[0])
    old.cluster_queues = listed(Kind(api, "clusterqueues"))
    old.local_queues = listed(Kind(api, "localqueues", namespaced=True))
    old.cohorts = listed(Kind(api, "cohorts"))
    old.flavors = listed(Kind(api, "resourceflavors"))
    old.priorities = listed(Kind(api, "workloadpriorityclasses"))
    return old


def migrated(old: Old) -> Migration:
    """Return the new objects, and what is not carried over. Quantities that cannot be read are noted."""
    made = Migration()
    _resource_quotas(old, made)
    _kueue(old, made)
    for one in made.objects:
        one["spec"] = {key: value for key, value in one["spec"].items() if value not in (None, {})}
    made.objects = [_in_profile(old.profiles.get(name_of(one)), one) for one in made.objects]
    return made


# ResourceQuotas


def _resource_quotas(old: Old, made: Migration) -> None:
    by_namespace: dict[str, list[Json]] = defaultdict(list)
    for quota in old.quotas:
        by_namespace[quota["metadata"]["namespace"]].append(quota)
    for namespace, quotas in sorted(by_namespace.items()):
        limited = [quota for quota in quotas if _gpu_lines(quota, old)]
        scoped = [quota for quota in limited if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector")]
        for quota in scoped:
            made.notes.append(f"{namespace}/{name_of(quota)}: its scopes; use the label {labels.PRIORITY} of pods")
        found = [_resource_quota(quota, old, made) for quota in limited if quota not in scoped]
        if found:
            made.objects.append(_quota(namespace, min(found, key=lambda spec: float(spec["guaranteed"]))))
            lines = sorted({line for quota in limited for line in _gpu_lines(quota, old)})
            made.notes.append(f"{namespace}: remove {', '.join(lines)} from its ResourceQuotas: pods would be refused")


def _gpu_lines(quota: Json, old: Old) -> list[str]:
    hard = quota["spec"].get("hard") or {}
    return [line for line in hard if _resource(line) in old.weights and line.startswith(_REQUESTS)]


def _resource(line: str) -> str:
    return line.partition(".")[2]


def _resource_quota(quota: Json, old: Old, made: Migration) -> Json:
    hard, gpus = quota["spec"]["hard"], dict[str, float]()
    for line in _gpu_lines(quota, old):
        number = _number(hard[line], f"{quota['metadata']['namespace']}/{name_of(quota)}", made)
        gpus[_resource(line)] = number * old.weights[_resource(line)]
    total = as_number(sum(gpus.values()))
    return {"guaranteed": total, "limit": total}


# Kueue


def _kueue(old: Old, made: Migration) -> None:
    namespaces: dict[str, list[str]] = defaultdict(list)
    for queue in old.local_queues:
        namespace, policy = queue["metadata"]["namespace"], queue["spec"].get("stopPolicy", "None")
        namespaces[queue["spec"].get("clusterQueue", "")].append(namespace)
        if policy != "None":
            remedy = f"gpuquota project {'hold' if policy == 'Hold' else 'drain'} {namespace}"
            made.notes.append(f"LocalQueue {namespace}/{name_of(queue)}: stopPolicy {policy}; {remedy}")
    departments = _department_names(old, namespaces)
    seen: dict[str, str] = {}
    for queue in sorted(old.cluster_queues, key=name_of):
        name, teams = name_of(queue), sorted(set(namespaces[name_of(queue)]))
        spec = _cluster_queue(queue, old, made)
        if parent := departments.get(("Cohort", _cohort(queue))):
            spec["parent"] = parent
        if not teams:
            made.notes.append(f"ClusterQueue {name}: it has no LocalQueue, so it is no namespace's quota")
            continue
        for team in [team for team in teams if team in seen]:
            made.notes.append(f"namespace {team}: it is in ClusterQueue {seen[team]} and {name}; only the first counts")
        teams = [team for team in teams if seen.setdefault(team, name) == name]
        if len(teams) == 1:
            made.objects.append(_quota(teams[0], spec))
        elif teams:
            department = departments["ClusterQueue", name]
            made.objects.append(_quota(department, spec))
            made.objects += [_quota(team, {"guaranteed": 0, "parent": department}) for team in teams]
            made.notes.append(f"ClusterQueue {name}: it is a department now; give its {len(teams)} teams guarantees")
    for found in sorted(old.cohorts, key=name_of):
        _note_cohort(found, departments, old, made)
    _note_names(departments, made)
    _note_rest(old, made)


def _department_names(old: Old, namespaces: Mapping[str, list[str]]) -> dict[tuple[str, str], str]:
    """Return a name for each queue and cohort that may become a department; namespaces keep theirs."""
    taken, found = {team for teams in namespaces.values() for team in teams}, dict[tuple[str, str], str]()
    for kind, objects in (("ClusterQueue", old.cluster_queues), ("Cohort", old.cohorts)):
        for name in sorted(map(name_of, objects)):
            department = name
            while department in taken:
                department += "-department"
            found[kind, name] = department
            if kind == "Cohort" or len(set(namespaces.get(name, ()))) > 1:
                taken.add(department)
    return found


def _cohort(queue: Json) -> str:
    return str(queue["spec"].get("cohortName") or queue["spec"].get("cohort") or "")


def _cluster_queue(queue: Json, old: Old, made: Migration) -> Json:
    """Return the spec of the quota, and note what the queue has besides."""
    name, spec = f"ClusterQueue {name_of(queue)}", queue["spec"]
    alone, flavors = not _cohort(queue), dict[str, Json]()
    amounts: dict[str, tuple[float, float | None]] = {}
    for flavor, resource in _resources(spec):
        nominal = _number(resource.get("nominalQuota", 0), name, made)
        most = nominal if alone else None
        if resource.get("borrowingLimit") is not None:
            most = nominal + _number(resource["borrowingLimit"], name, made)
        if resource.get("lendingLimit") is not None:
            made.notes.append(f"{name}: lendingLimit of {resource['name']}; idle GPUs are lent, and reclaimed in time")
        if resource["name"] in old.weights:
            weight = old.weights[resource["name"]]
            pool = flavors.setdefault(flavor, {"guaranteed": 0, "limit": 0})
            pool["guaranteed"] += nominal * weight
            pool["limit"] = None if most is None or pool["limit"] is None else pool["limit"] + most * weight
        elif resource["name"] in _AMOUNTS:
            before, limit = amounts.get(resource["name"], (0.0, 0.0))
            amounts[resource["name"]] = before + nominal, None if most is None or limit is None else limit + most
        else:
            made.notes.append(f"{name}: {resource['name']} is no GPU, and has no quota")
    made.notes += [f"{name}: {what}" for what in _unsupported(spec)]
    sums = _sums(flavors, amounts, (spec.get("fairSharing") or {}).get("weight"))
    policy = spec.get("stopPolicy", "None")
    return sums if policy == "None" else {**sums, "stopPolicy": policy}


def _resources(spec: Json) -> Iterable[tuple[str, Json]]:
    groups = spec.get("resourceGroups") or ()
    flavors = (flavor for group in groups for flavor in group.get("flavors") or ())
    return ((flavor["name"], resource) for flavor in flavors for resource in flavor.get("resources") or ())


def _sums(flavors: Mapping[str, Json], amounts: Mapping[str, tuple[float, float | None]], weight: object) -> Json:
    limits = [pool["limit"] for pool in flavors.values()]
    spec: Json = {
        "guaranteed": as_number(sum(pool["guaranteed"] for pool in flavors.values())),
        "limit": None if None in limits else as_number(sum(limits)),
        "overQuotaWeight": None if weight is None else float(parse_quantity("weight", str(weight))),
    }
    if len(flavors) > 1:
        spec["pools"] = {
            name: {key: as_number(value) for key, value in pool.items() if value is not None}
            for name, pool in flavors.items()
        }
    for resource, (guaranteed, limit) in amounts.items():
        names = _AMOUNTS[resource]
        spec[names[0]] = f"{as_number(guaranteed)}"
        spec[names[1]] = None if limit is None else f"{as_number(limit)}"
    return spec


def _unsupported(spec: Json) -> Iterable[str]:
    if spec.get("admissionChecks") or spec.get("admissionChecksStrategy"):
        yield "admission checks; autoscaled pools are declared in the QuotaPolicy"
    if spec.get("queueingStrategy") == "StrictFIFO":
        yield "queueingStrategy StrictFIFO; jobs that fit pass those that do not, unless these wait too long"
    if (spec.get("preemption") or {}).get("reclaimWithinCohort") == "Never":
        yield "reclaimWithinCohort Never; borrowed GPUs are always reclaimed for a guarantee"
    if spec.get("flavorFungibility"):
        yield "flavorFungibility; a job names its node pool, or runs in any"


def _note_cohort(cohort: Json, departments: Mapping[tuple[str, str], str], old: Old, made: Migration) -> None:
    """Make the Cohort a department, with the sum of what is guaranteed in it."""
    spec = cohort.get("spec") or {}
    name = departments["Cohort", name_of(cohort)]
    inside = [one["spec"] for one in made.objects if one["spec"].get("parent") == name]
    guaranteed = as_number(sum(float(one["guaranteed"]) for one in inside))
    above = spec.get("parentName") or spec.get("parent")
    parent = departments.get(("Cohort", str(above)), above)
    made.objects.append(_quota(name, {"guaranteed": guaranteed, "parent": parent}))
    if any(resource["name"] in old.weights for _, resource in _resources(spec)):
        made.notes.append(f"Cohort {name}: its own quota; it is guaranteed the {guaranteed} GPUs of its queues")


def _note_names(departments: Mapping[tuple[str, str], str], made: Migration) -> None:
    there = {name_of(one) for one in made.objects}
    for (kind, name), department in departments.items():
        if name != department and department in there:
            made.notes.append(f"{kind} {name}: its name, which another quota has; the department is {department}")


def _note_rest(old: Old, made: Migration) -> None:
    for flavor in old.flavors:
        spec = flavor.get("spec") or {}
        if spec.get("nodeLabels"):
            chosen = ",".join(f"{key}={value}" for key, value in sorted(spec["nodeLabels"].items()))
            label = f"kubectl label nodes -l {chosen} {labels.POOL}={name_of(flavor)}"
            made.notes.append(f"ResourceFlavor {name_of(flavor)}: nodes need a label, if it is a node pool: {label}")
        if spec.get("topologyName"):
            made.notes.append(f"ResourceFlavor {name_of(flavor)}: its topology; see requiredTopology of an ElasticJob")
    for priority in old.priorities:
        value = priority.get("value", 0)
        made.notes.append(f"WorkloadPriorityClass {name_of(priority)} ({value}): the label {labels.PRIORITY} of pods")


# Objects


def _quota(name: str, spec: Json) -> Json:
    return {"apiVersion": labels.API_VERSION, "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec}


def _in_profile(profile: Json | None, quota: Json) -> Json:
    """Return the fields of the Profile that has the quota as a plugin beside its others; the quota if there is none."""
    if profile is None:
        return quota
    others = [one for one in profile["spec"].get("plugins") or () if one.get("kind") != "GpuQuota"]
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "Profile",
        "metadata": {"name": name_of(quota)},
        "spec": {"plugins": [*others, {"kind": "GpuQuota", "spec": quota["spec"]}]},
    }


def _number(quantity: object, where: str, made: Migration) -> float:
    try:
        return float(parse_quantity("quota", str(quantity)))
    except InvalidFieldError as error:
        made.notes.append(f"{where}: {error.message}; it counts as 0")
        return 0.0
