"""Quotas of Kueue or of ResourceQuotas as GpuQuotas, with what cannot be carried over: `gpuquota migrate`. Pure.

| Kueue | here |
|---|---|
| ClusterQueue with LocalQueues in one namespace | the namespace's GpuQuota |
| ClusterQueue with LocalQueues in several | a department with the queue's quota; its namespaces, without a guarantee of their own |
| `nominalQuota` | `guaranteed` |
| `borrowingLimit`, `lendingLimit` | `limit`: the most that the queue could hold in Kueue (cohorts.py) |
| `fairSharing.weight` | `overQuotaWeight` |
| `stopPolicy` of a ClusterQueue | `stopPolicy` |
| Cohort, also one that is only named by several queues | a department, whose limit is all that is in it |
| several flavors with GPUs in the cluster | node pools with the names of the flavors; outside of them there is no quota |

A quota is that of all resources that count as GPUs, each with its number of GPUs; CPU and memory are in `guaranteedCpu` and
so on. A namespace with a Profile gets the Profile's plugin.

Nothing is written to the cluster: the administrator applies the output, in the order of docs/migrating.md.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.quantity import as_number, parse_quantity
from kfp_gpuquota.api.validation import MAX_PRIORITY
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota
from kfp_gpuquota.cluster.kubernetes.objects.device_types import CLASS_PREFIX
from kfp_gpuquota.cluster.kubernetes.operations.cohorts import Member, Quota
from kfp_gpuquota.cluster.kubernetes.operations.inventory import Kind, name_of
from kfp_gpuquota.cluster.kubernetes.quota.quotas import project_of, without_nones
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Json = dict[str, Any]

_KUEUE: Final = ("/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1")
_REQUESTS: Final = "requests."
_CLAIMED: Final = ".deviceclass.resource.k8s.io/devices"
_GPUS: Final = "GPUs of flavor "
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
        one["spec"] = without_nones(one["spec"])
    made.objects = [one for one in made.objects if _is_valid(one, made)]
    made.objects = [_in_profile(old.profiles.get(name_of(one)), one) for one in made.objects]
    return made


def _given(one: Json) -> Json:
    """Return an object's specification, which each of these kinds may lack."""
    found: Json = one.get("spec") or {}
    return found


# ResourceQuotas


def _resource_quotas(old: Old, made: Migration) -> None:
    by_namespace: dict[str, list[Json]] = defaultdict(list)
    for quota in old.quotas:
        by_namespace[quota["metadata"]["namespace"]].append(quota)
    for namespace, quotas in sorted(by_namespace.items()):
        hard = dict[str, float]()
        limited = [quota for quota in quotas if _gpu_lines(quota, old)]
        for quota in limited:
            if scopes := _scopes(quota):
                made.notes.append(
                    f"{namespace}/{name_of(quota)}: it counts only pods with the scope {scopes}, and a GpuQuota counts "
                    f"all; jobs can be ordered by the label {labels.PRIORITY} of pods"
                )
                continue
            for line in _gpu_lines(quota, old):  # several quotas of a namespace all hold
                number = _number(quota["spec"]["hard"][line], f"{namespace}/{name_of(quota)}", made)
                hard[_resource(line)] = min(number, hard.get(_resource(line), number))
        if hard:
            total = as_number(sum(number * old.weights[resource] for resource, number in hard.items()))
            made.objects.append(_quota(namespace, {"guaranteed": total, "limit": total}))
            if len(hard) > 1:
                made.notes.append(f"{namespace}: its limits of {', '.join(sorted(hard))} are one number, their sum")
        if limited:
            lines = sorted({line for quota in limited for line in _gpu_lines(quota, old)})
            made.notes.append(f"{namespace}: remove {', '.join(lines)} from its ResourceQuotas: pods would be refused")


def _scopes(quota: Json) -> str:
    """Return the scopes of a ResourceQuota in words; "" without any."""
    chosen = [str(scope) for scope in _given(quota).get("scopes") or ()]
    for one in (_given(quota).get("scopeSelector") or {}).get("matchExpressions") or ():
        words = (one.get("scopeName"), one.get("operator"), ", ".join(one.get("values") or ()))
        chosen.append(" ".join(str(word) for word in words if word))
    return " and ".join(chosen)


def _gpu_lines(quota: Json, old: Old) -> list[str]:
    hard = _given(quota).get("hard") or {}
    return [line for line in hard if _resource(line) in old.weights]


def _resource(line: str) -> str:
    """Return the resource whose requests a line of a quota limits, also by claims for devices; "" for other lines."""
    if line.endswith(_CLAIMED):
        return f"{CLASS_PREFIX}{line.removesuffix(_CLAIMED)}"
    return line.removeprefix(_REQUESTS) if line.startswith(_REQUESTS) else ""


# Kueue


def _kueue(old: Old, made: Migration) -> None:
    namespaces = _namespaces(old, made)
    queues, cohorts = _tree(old, made)
    flavors = sorted({name.removeprefix(_GPUS) for one in (*queues, *cohorts) for name in one.quotas if _GPUS in name})
    names = _department_names(queues, cohorts, namespaces)
    stopped = {name_of(one): _given(one).get("stopPolicy", "None") for one in old.cluster_queues}
    seen: dict[str, str] = {}
    for queue in queues:
        name, teams = queue.name, sorted(set(namespaces[queue.name]))
        spec = _spec(queue, flavors, names)
        if stopped[name] != "None":
            spec["stopPolicy"] = stopped[name]
        if not teams:
            made.notes.append(f"ClusterQueue {name}: it has no LocalQueue, so it is no namespace's quota")
            continue
        for team in [team for team in teams if team in seen]:
            made.notes.append(f"namespace {team}: it is in ClusterQueue {seen[team]} and {name}; only the first counts")
        teams = [team for team in teams if seen.setdefault(team, name) == name]
        if len(teams) == 1:
            made.objects.append(_quota(teams[0], spec))
        elif teams:
            department = names["ClusterQueue", name]
            made.objects.append(_quota(department, spec))
            made.objects += [_quota(team, {"guaranteed": 0, "parent": department}) for team in teams]
            made.notes.append(f"ClusterQueue {name}: it is a department now; give its {len(teams)} teams guarantees")
    made.objects += [_quota(names["Cohort", one.name], _spec(one, flavors, names)) for one in cohorts]
    _note_names(names, made)
    _note_lending(cohorts, made)
    _note_pools([*queues, *cohorts], flavors, made)
    _note_rest(old, flavors, made)


def _namespaces(old: Old, made: Migration) -> dict[str, list[str]]:
    """Return the namespaces with a LocalQueue of each ClusterQueue."""
    found: dict[str, list[str]] = defaultdict(list)
    there = set(map(name_of, old.cluster_queues))
    for queue in old.local_queues:
        namespace, policy = queue["metadata"]["namespace"], _given(queue).get("stopPolicy", "None")
        named = str(_given(queue).get("clusterQueue", ""))
        if named not in there:
            made.notes.append(f"LocalQueue {namespace}/{name_of(queue)}: ClusterQueue {named!r} does not exist")
            continue
        found[named].append(namespace)
        if policy != "None":
            remedy = f"gpuquota project {'hold' if policy == 'Hold' else 'drain'} {namespace}"
            made.notes.append(f"LocalQueue {namespace}/{name_of(queue)}: stopPolicy {policy}; {remedy}")
    return found


def _tree(old: Old, made: Migration) -> tuple[list[Member], list[Member]]:
    """Return the ClusterQueues and the Cohorts by name; one that is no object and has one member is left out."""
    queues, cohorts = list[Member](), dict[str, Member]()
    members = [("Cohort", one) for one in old.cohorts] + [("ClusterQueue", one) for one in old.cluster_queues]
    for kind, found in members:
        one = Member(kind, name_of(found), _quotas(kind, found, old, made), _weight(kind, found, made))
        queues.append(one) if kind == "ClusterQueue" else cohorts.update({one.name: one})
    own = set(cohorts)
    for (_, found), one in zip(members, [*cohorts.values(), *queues], strict=True):
        if above := _cohort(found.get("spec") or {}):
            one.join(cohorts.setdefault(above, Member("Cohort", above)))
    for one in sorted(cohorts.values(), key=lambda cohort: cohort.name):
        if one.parent is not None and any(above is one for above in one.above()):
            made.notes.append(f"{one.title}: it is above itself, and Kueue admits nothing there; it has no parent here")
            one.parent.members.remove(one)
            one.parent = None
        elif one.name not in own and len(one.members) == 1:
            one.members[0].parent = None
            del cohorts[one.name]
    return sorted(queues, key=lambda one: one.name), sorted(cohorts.values(), key=lambda one: one.name)


def _cohort(spec: Json) -> str:
    return str(next((spec[name] for name in ("cohortName", "cohort", "parentName", "parent") if spec.get(name)), ""))


def _weight(kind: str, found: Json, made: Migration) -> float | None:
    weight = ((found.get("spec") or {}).get("fairSharing") or {}).get("weight")
    return None if weight is None else _number(weight, f"{kind} {name_of(found)}: fairSharing.weight", made)


def _department_names(
    queues: Iterable[Member], cohorts: Iterable[Member], namespaces: Mapping[str, list[str]]
) -> dict[tuple[str, str], str]:
    """Return a name for each queue and cohort that may become a department; namespaces keep theirs."""
    taken, found = {team for teams in namespaces.values() for team in teams}, dict[tuple[str, str], str]()
    for one in (*queues, *cohorts):
        department = one.name.replace(".", "-")
        while department in taken:
            department += "-department"
        found[one.kind, one.name] = department
        if one.kind == "Cohort" or len(set(namespaces.get(one.name, ()))) > 1:
            taken.add(department)
    return found


def _quotas(kind: str, found: Json, old: Old, made: Migration) -> dict[str, Quota]:
    """Return the quotas of GPUs by flavor, of CPU and memory, and note what there is besides."""
    title, spec, quotas = f"{kind} {name_of(found)}", found.get("spec") or {}, dict[str, Quota]()
    there = set(map(name_of, old.flavors))
    for flavor in dict.fromkeys(flavor for flavor, _ in _resources(spec)):
        if flavor not in there:
            made.notes.append(f"{title}: ResourceFlavor {flavor} does not exist, so Kueue admits nothing with it")
    for flavor, resource in _resources(spec):
        name = str(resource["name"])
        amount = f"{_GPUS}{flavor}" if name in old.weights else name
        if name not in old.weights and name not in _AMOUNTS:
            made.notes.append(f"{title}: {name} is no GPU, and has no quota")
            continue
        weight = old.weights.get(name, 1.0)
        given = (resource.get(field) for field in ("nominalQuota", "borrowingLimit", "lendingLimit"))
        nominal, borrowing, lending = (
            None if number is None else weight * _number(number, title, made) for number in given
        )
        quota = Quota(nominal or 0.0, borrowing, lending)
        if amount in quotas:
            where = f"flavor {flavor}" if amount.startswith(_GPUS) else f"several flavors, of {name},"
            made.notes.append(f"{title}: its quotas in {where} are one number, their sum")
            quota = quotas[amount].plus(quota)
        quotas[amount] = quota
    made.notes += [f"{title}: {what}" for what in _unsupported(spec)]
    return quotas


def _resources(spec: Json) -> Iterable[tuple[str, Json]]:
    groups = spec.get("resourceGroups") or ()
    flavors = (flavor for group in groups for flavor in group.get("flavors") or ())
    return ((flavor["name"], resource) for flavor in flavors for resource in flavor.get("resources") or ())


def _spec(one: Member, flavors: Sequence[str], names: Mapping[tuple[str, str], str]) -> Json:
    """Return the quota of a ClusterQueue or Cohort: with several flavors all GPUs are in node pools of their names."""
    spec: Json = {"guaranteed": 0, "limit": 0}
    if len(flavors) > 1:
        spec["pools"] = {_pool(flavor): _bounds(one, f"{_GPUS}{flavor}") for flavor in flavors}
    else:
        spec |= _bounds(one, *(f"{_GPUS}{flavor}" for flavor in flavors))
        for resource, (guaranteed, limit) in _AMOUNTS.items():
            if one.has(resource):
                bounds = _bounds(one, resource)
                spec[guaranteed], spec[limit] = (
                    None if (value := bounds.get(key)) is None else f"{value}" for key in ("guaranteed", "limit")
                )
    if one.weight is not None:
        spec["overQuotaWeight"] = one.weight
    if one.parent is not None:
        spec["parent"] = names["Cohort", one.parent.name]
    return spec


def _bounds(one: Member, amount: str = "") -> Json:
    limit = one.limit(amount)
    found: Json = {"guaranteed": as_number(one.guaranteed(amount))}
    return {**found, "limit": None if limit is None else as_number(limit)}


def _pool(flavor: str) -> str:
    return flavor.replace(".", "-")


def _unsupported(spec: Json) -> Iterable[str]:
    if spec.get("admissionChecks") or spec.get("admissionChecksStrategy"):
        yield "admission checks; autoscaled pools are declared in the QuotaPolicy"
    if spec.get("queueingStrategy") == "StrictFIFO":
        yield "queueingStrategy StrictFIFO; jobs that fit pass those that do not, unless these wait too long"
    if (spec.get("preemption") or {}).get("reclaimWithinCohort") == "Never":
        yield "reclaimWithinCohort Never; borrowed GPUs are always reclaimed for a guarantee"
    if spec.get("flavorFungibility"):
        yield "flavorFungibility; a job names its node pool"


def _note_names(departments: Mapping[tuple[str, str], str], made: Migration) -> None:
    there = {name_of(one) for one in made.objects}
    for (kind, name), department in departments.items():
        if name != department and department in there:
            why = "no quota's name has dots" if "." in name else "another quota has its name"
            made.notes.append(f"{kind} {name}: the department is {department}, since {why}")


def _note_lending(cohorts: Iterable[Member], made: Migration) -> None:
    """Note where limits cannot have the effect of lendingLimit."""
    for one in cohorts:
        amounts = {amount for member in one.members for amount in member.quotas}
        pair = len(one.members) <= 2 and one.parent is None and not any(member.members for member in one.members)
        if not pair and any(member.keeps(amount) for amount in amounts for member in one.members):
            made.notes.append(
                f"{one.title}: lendingLimit; none of its members holds more than in Kueue, but several together may, "
                "of what another one does not lend and does not use: it is reclaimed in time"
            )


def _note_pools(members: Iterable[Member], flavors: Sequence[str], made: Migration) -> None:
    if len(flavors) < 2:
        return
    made.notes.append(
        f"flavors {', '.join(flavors)}: a job names its node pool (label {labels.POOL}, nodePool of an ElasticJob), "
        "where Kueue tried one after the other"
    )
    for one in members:
        if resources := [name for name in _AMOUNTS if name in one.quotas]:
            made.notes.append(f"{one.title}: {', '.join(resources)}; such quotas apply to nodes without a pool only")


def _note_rest(old: Old, flavors: Sequence[str], made: Migration) -> None:
    for flavor in old.flavors:
        spec, title = flavor.get("spec") or {}, f"ResourceFlavor {name_of(flavor)}"
        chosen = ",".join(f"{key}={value}" for key, value in sorted((spec.get("nodeLabels") or {}).items()))
        if len(flavors) > 1 and name_of(flavor) in flavors:
            nodes = f"-l {chosen}" if chosen else "NODE"
            made.notes.append(
                f"{title}: its nodes need a label: kubectl label nodes {nodes} {labels.POOL}={_pool(name_of(flavor))}"
            )
        elif chosen:
            made.notes.append(f"{title}: its node labels; pods that must run there need the node selector {chosen}")
        if spec.get("nodeTaints"):
            taints = ", ".join(
                f"{one.get('key')}={one.get('value', '')}:{one.get('effect')}" for one in spec["nodeTaints"]
            )
            made.notes.append(
                f"{title}: its taints ({taints}); pods that tolerate them run there, whatever their queue"
            )
        if spec.get("tolerations"):
            made.notes.append(f"{title}: its tolerations, which Kueue adds to pods; add them to the pod templates")
        if spec.get("topologyName"):
            made.notes.append(f"{title}: its topology; see requiredTopology of an ElasticJob")
    for priority in old.priorities:
        value = int(priority.get("value", 0))
        ours = min(MAX_PRIORITY, max(0, value))
        made.notes.append(
            f"WorkloadPriorityClass {name_of(priority)} ({value}): the label {labels.PRIORITY}: {str(ours)!r} of pods"
        )


# Objects


def _is_valid(quota: Json, made: Migration) -> bool:
    """Return whether the quota would be accepted; note why it would not."""
    try:
        project_of(msgspec.convert(quota, GpuQuota))
    except InvalidFieldError as error:
        made.notes.append(f"the quota {name_of(quota)!r}: {error.message}")
        return False
    return True


def _quota(name: str, spec: Json) -> Json:
    return {"apiVersion": labels.API_VERSION, "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec}


def _in_profile(profile: Json | None, quota: Json) -> Json:
    """Return the fields of the Profile that has the quota as a plugin beside its others; the quota if there is none."""
    if profile is None:
        return quota
    others = [one for one in _given(profile).get("plugins") or () if one.get("kind") != "GpuQuota"]
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
