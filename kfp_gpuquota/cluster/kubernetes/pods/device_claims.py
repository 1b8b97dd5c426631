"""Counts the devices that pods claim (Dynamic Resource Allocation) as GPUs, as QuotaPolicy lists them.

| the pod's claim                                             | the pod                                            |
|-------------------------------------------------------------|----------------------------------------------------|
| or its template does not exist yet                          | waits, with that reason, and holds nothing         |
| requests a class of `gpuResources`                          | counts its devices, and waits for its turn         |
| requests a class of `otherResources`, or an unlisted one in | counts nothing for it                              |
| a namespace with a label that allows it                     |                                                    |
| requests any other class, or devices without a number       | waits, with the reason                             |
| requests a class whose devices several nodes can reach      | waits, with the reason: none of them is planned    |
| requests parts of GPUs by an extended resource, not a claim | waits, with the reason                             |
| is shared, and another pod counts its devices               | counts nothing for it, once that pod has started   |
| is shared by pods that start together                       | waits, with the reason: they can never start       |

A pod without anything that counts is let through: its gate is removed, and kube-scheduler alone places it.

Workers of an ElasticJob have no gate: what the templates that they name request is a part of the job's request
(`of_job`), and a job with a worker whose claim requests anything else returns to the queue.

A released pod is annotated with the classes that it claimed then. One whose claim is exchanged for a class that is not
counted is evicted (a worker: its job fails), but not one whose class an administrator no longer lists.

Invariants. A pod's view is a function of the objects: the pod, its claims and their templates, the classes, the table.
A claim's devices count as long as a pod that uses it exists, and once: if the pod that counts them ends before another
that shares them, the other one counts them from then on. What a running pod's claims request is counted even if a
claim was exchanged after the pod's admission: the specification of a claim is immutable, but its name is not.

Rejected: to read claims when a pod is created, as owners of groups are. Their names can be reused, and a claim outlives
pods, so what is counted would depend on when it was read. Rejected: to let unlisted classes through. Any class may
select GPUs, and that no administrator has listed it does not mean that it is free.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from kfp_gpuquota.api.resources import GPU_PART_PREFIX, WHOLE_GPU, part_weights
from kfp_gpuquota.cluster.kubernetes.convert.claimed_devices import ClaimedDevices, Demand, claimed_devices
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import CLAIM_TEMPLATE
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.device_types import CLASS_PREFIX
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kfp_gpuquota.api.resources import Resources as Amounts
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import DeviceClaim, PodView
    from kfp_gpuquota.cluster.kubernetes.convert.published_devices import PublishedDevices
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, Namespace
    from kfp_gpuquota.cluster.kubernetes.objects.device_types import (
        DeviceClass,
        ResourceClaim,
        ResourceClaimTemplate,
    )
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules

V = TypeVar("V")
Key = tuple[str, str]  # namespace and name


class Resolved(NamedTuple):
    """What a pod's claims request of resources that count, the GPUs that one of each counts as, or why it waits."""

    amounts: Amounts = ()
    weights: Amounts = ()
    waits: str = ""
    missing: bool = False  # a claim or its template does not exist, or a device that it has is not published now
    classes: tuple[str, ...] = ()  # all DeviceClasses of which they request devices
    refused: str = ""  # why it may not hold the devices of one of these, which are not counted


class CountedNames:
    """A container of the names of resources that count, and of templates whose devices do, after CLAIM_TEMPLATE."""

    def __init__(self, counts: Callable[[str], bool]) -> None:
        self._counts = counts

    def __contains__(self, name: object) -> bool:
        return self._counts(str(name))


class Named(dict[Key, V]):
    """Values of objects by namespace and name; a deletion is of the object with that uid, not of its successor."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, Key] = {}
        self._uids: dict[Key, str] = {}

    def put(self, meta: Metadata, value: V) -> Key | None:
        """Add or update an object; return its key if its value has changed."""
        key = meta.namespace, meta.name
        changed = self.get(key) != value
        self[key], self._keys[meta.uid], self._uids[key] = value, key, meta.uid
        return key if changed else None

    def remove(self, uid: str) -> Key | None:
        """Remove a deleted object; return its key if it is no longer there."""
        key = self._keys.pop(uid, None)
        if key is None or self._uids.get(key) != uid:
            return None
        del self._uids[key]
        del self[key]
        return key


class DeviceClaims:
    """All pods with claims, by uid, and what they claim. `changed()` is called when pods are `outdated`.

    `jobs_outdated(namespace)` is called when what `of_job` returns may have changed there, "" in all namespaces.

    Before `start` pods are only collected: no gate is removed by a part of the objects.
    """

    def __init__(
        self,
        rules: CurrentRules,
        devices: PublishedDevices,
        changed: Callable[[], None],
        jobs_outdated: Callable[[str], None],
    ) -> None:
        self._rules, self._changed, self._jobs_outdated, self._started = rules, changed, jobs_outdated, False
        self._published = devices
        self._pods: dict[str, PodView] = {}  # as their objects have them
        self._resolved: dict[str, PodView] = {}
        self._waits: dict[str, str] = {}  # why a pod cannot be planned
        self._claims: Named[ClaimedDevices] = Named()
        self._templates: Named[ClaimedDevices] = Named()
        self._extended: Named[str] = Named()  # of classes, the extended resource
        self._unrestricted: set[str] = set()  # namespaces whose claims of unlisted classes are allowed
        self._users: dict[Key, dict[str, None]] = {}  # uids of pods by each claim and template that they name
        self._counting: dict[Key, str] = {}  # uid of the pod that counts a claim
        self._outdated: dict[str, None] = {}

    # Pods

    def put(self, pod: PodView) -> PodView | None:
        """Return the pod with its claimed devices; None before `start`."""
        if not pod.device_claims and not pod.gpu_weights:
            return pod
        before = self._pods.get(pod.uid)
        self._pods[pod.uid] = pod
        if before is None or before.device_claims != pod.device_claims:
            self._use(pod, before)
        if before is None or _rank(before) != _rank(pod) or before.device_claims != pod.device_claims:
            for key in _claim_keys(pod):
                self._recount(key, pod)
        if not self._started:
            return None
        self._outdated.pop(pod.uid, None)
        return self._resolve(pod)

    def follows(self, uid: str) -> bool:
        """Return whether the pod has claims, or requests other resources that count, which devices may be."""
        return uid in self._pods

    def drop(self, uid: str) -> None:
        """Remove a deleted pod."""
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        self._resolved.pop(uid, None)
        self._waits.pop(uid, None)
        self._outdated.pop(uid, None)
        self._leave(pod)

    def start(self) -> list[PodView]:
        """Return all pods with their claimed devices, after all objects were listed."""
        self._started = True
        self._outdated.clear()
        return [self._resolve(pod) for pod in list(self._pods.values())]

    def outdated(self) -> Iterator[PodView]:
        """Yield the pods whose claims count differently, or wait for something else, since they were returned last."""
        while self._started and self._outdated:
            uid = next(iter(self._outdated))
            del self._outdated[uid]
            before = self._resolved.get(uid), self._waits.get(uid)
            if (pod := self._pods.get(uid)) is not None:
                after = self._resolve(pod)
                if (after, self._waits.get(uid)) != before:
                    yield after

    def unknown(self) -> Iterator[tuple[PodView, str]]:
        """Yield the pods whose claims cannot be planned, and why."""
        for uid, why in self._waits.items():
            if self._pods[uid].stage is Stage.WAITING:
                yield self._pods[uid], why

    def unknown_reason(self, uid: str) -> str:
        """Return why the pod cannot be planned; "" if it can."""
        return self._waits.get(uid, "")

    def uncounted(self, uid: str) -> PodView | None:
        """Return the pod if it is gated, and its claims and containers request nothing that counts."""
        pod, resolved = self._pods.get(uid), self._resolved.get(uid)
        if pod is None or resolved is None or uid in self._waits or resolved.counted:
            return None
        return msgspec.structs.replace(pod, claimed=resolved.claimed) if pod.stage is Stage.WAITING else None

    def exchanged(self, uid: str) -> tuple[PodView, str] | None:
        """Return the pod, and why it may not keep devices that it claims since it was released; None if it may.

        Pods that an earlier version released are kept: what they claimed then is unknown.
        """
        pod = self._pods.get(uid)
        if pod is None or pod.job_uid or pod.claimed is None or pod.stage not in {Stage.OUTSIDE, Stage.ASSIGNED}:
            return None
        why = self._count(pod).refused
        return (pod, f"its ResourceClaims were exchanged after it was admitted: {why}") if why else None

    def counted_in(self, namespace: str) -> CountedNames:
        """Return the resources that count, and the templates of the namespace whose devices do."""
        return CountedNames(partial(self._counts, namespace))

    def of_job(self, namespace: str, claims: Iterable[DeviceClaim], others: Amounts) -> tuple[Amounts, Amounts]:
        """Return what each worker of an ElasticJob requests with its claims, and the weights of what counts as GPUs.

        `others` are the requests of its containers. Raises InvalidFieldError for claims that cannot be counted.
        """
        claims = tuple(claims)
        if named := next((one.claim for one in claims if one.claim), ""):
            raise InvalidFieldError(
                "resourceClaimName", named, "its workers cannot share a claim: they start together",
                hint="name a template (resourceClaimTemplateName), of which each worker gets a claim of its own",
            )  # fmt: skip
        devices = (self._template(namespace, one.template) for one in claims)
        found = self._counted(namespace, devices, gpus=False)
        if found.waits:
            raise InvalidFieldError("resourceClaims", ", ".join(one.template for one in claims), found.waits)
        amounts = dict(others)
        for name, amount in found.amounts:
            amounts[name] = amounts.get(name, 0) + amount
        weights = tuple(row for row in self._rules.rules.gpu_weights if amounts.get(row[0]))
        if why := self._divided_request(weights):
            raise InvalidFieldError("resources.limits", weights[0][0], why)
        parts = part_weights(amounts)
        if divided := [name for name, _ in parts if amounts[name] % WHOLE_GPU]:
            raise InvalidFieldError(
                "resourceClaims", ", ".join(one.template for one in claims),
                f"each worker would claim {amounts[divided[0]] / WHOLE_GPU:g} GPUs, a part of one",
                hint="workers of an ElasticJob claim whole GPUs; for parts of GPUs use a Job",
            )  # fmt: skip
        return tuple(sorted(amounts.items())), (*weights, *parts)

    def classes_of(self, namespace: str, claims: Iterable[DeviceClaim]) -> tuple[str, ...]:
        """Return the DeviceClasses of which the templates of these claims request devices."""
        devices = (self._template(namespace, one.template) for one in claims)
        return self._counted(namespace, devices, gpus=False).classes

    def rules_changed(self) -> None:
        """Count all claims by another table."""
        self._outdate(self._pods)
        self._notify()
        self._outdate_jobs("")

    def sizes_changed(self, pool: tuple[str, str] | None) -> None:
        """Count claims with devices of a pool again, all if it is None: what these count as has changed."""
        if pool is None:
            self.rules_changed()
            return
        claims = [key for key, found in self._claims.items() if any(_is_of(pool, one) for one in found.demands)]
        for namespace, name in claims:
            self._outdate(self._users.get((namespace, f"claim/{name}"), ()))
        self._notify()

    def _outdate_jobs(self, namespace: str) -> None:
        if self._started:
            self._jobs_outdated(namespace)

    def _counts(self, namespace: str, name: str) -> bool:
        template = name.removeprefix(CLAIM_TEMPLATE)
        if template == name:
            return any(name == counted for counted, _ in self._rules.rules.gpu_weights)
        devices = self._templates.get((namespace, template), ClaimedDevices())
        return any(self._resource_of(device_class) for device_class, _ in devices.amounts)

    # Objects

    def put_namespace(self, namespace: Namespace) -> None:
        """Add or update a namespace."""
        name, allowed = namespace.metadata.name, namespace.metadata.labels.get(labels.ALLOWS_CLAIMS) == "true"
        if allowed is not (name in self._unrestricted):
            (self._unrestricted.add if allowed else self._unrestricted.discard)(name)
            self._outdate([uid for uid, pod in self._pods.items() if pod.namespace == name])
            self._outdate_jobs(name)
            self._notify()

    def put_class(self, device_class: DeviceClass) -> None:
        """Add or update a DeviceClass."""
        if self._extended.put(device_class.metadata, device_class.spec.extended_resource_name):
            self.rules_changed()

    def drop_class(self, uid: str) -> None:
        """Remove a deleted DeviceClass."""
        if self._extended.remove(uid):
            self.rules_changed()

    def put_claim(self, claim: ResourceClaim) -> None:
        """Add or update a claim."""
        self._outdate_users(self._claims.put(claim.metadata, claimed_devices(claim.spec, claim.results)), "claim")

    def drop_claim(self, uid: str) -> None:
        """Remove a deleted claim."""
        self._outdate_users(self._claims.remove(uid), "claim")

    def put_template(self, template: ResourceClaimTemplate) -> None:
        """Add or update a template."""
        self._outdate_users(self._templates.put(template.metadata, claimed_devices(template.spec.spec)), "template")
        self._outdate_jobs(template.metadata.namespace)

    def drop_template(self, uid: str) -> None:
        """Remove a deleted template."""
        key = self._templates.remove(uid)
        self._outdate_users(key, "template")
        if key is not None:
            self._outdate_jobs(key[0])

    def _outdate_users(self, key: Key | None, kind: str) -> None:
        if key is not None:
            self._outdate(self._users.get((key[0], f"{kind}/{key[1]}"), ()))
            self._notify()

    def _outdate(self, uids: Iterable[str]) -> None:
        self._outdated.update(dict.fromkeys(uids))

    def _notify(self) -> None:
        if self._started and self._outdated:
            self._changed()

    # Which pod counts a shared claim

    def _use(self, pod: PodView, before: PodView | None) -> None:
        if before is not None:
            self._leave(before)
        for key in _keys(pod):
            self._users.setdefault(key, {})[pod.uid] = None

    def _leave(self, pod: PodView) -> None:
        for key in _keys(pod):
            users = self._users.get(key, {})
            users.pop(pod.uid, None)
            if not users:
                self._users.pop(key, None)
            if self._counting.get(key) == pod.uid:
                self._recount(key)

    def _recount(self, key: Key, changed: PodView | None = None) -> None:
        """Decide again which pod counts a claim after a pod has `changed`; without it, after that pod has left."""
        before = self._counting.get(key)
        current = self._pods.get(before or "")
        if changed is not None and current is not None and before != changed.uid:
            after = changed.uid if _rank(changed) < _rank(current) else before
        else:
            users = (self._pods[uid] for uid in self._users.get(key, ()) if uid in self._pods)
            first = min((pod for pod in users if pod.stage is not Stage.ENDED), key=_rank, default=None)
            after = None if first is None else first.uid
        if after is None:
            self._counting.pop(key, None)
        else:
            self._counting[key] = after
        if after != before or (changed is not None and changed.uid == after):
            self._outdate(self._users.get(key, ()))

    # What a pod's claims count as

    def _resolve(self, pod: PodView) -> PodView:
        found = Resolved() if pod.stage is Stage.ENDED else self._count(pod)
        if not pod.job_uid:
            found = found._replace(waits=found.waits or self._divided_request(pod.gpu_weights))
        if found.missing and pod.holds and (before := self._resolved.get(pod.uid)) is not None:
            stage = Stage.OUTSIDE if before.stage is Stage.OUTSIDE else pod.stage
            return msgspec.structs.replace(pod, needs=before.needs, gpu_weights=before.gpu_weights, stage=stage)
        self._waits.pop(pod.uid, None)
        if found.waits and not pod.holds:
            self._waits[pod.uid] = found.waits
        if pod.stage is Stage.WAITING and pod.device_claims:
            pod = msgspec.structs.replace(pod, claimed=found.classes)
        self._resolved[pod.uid] = view = _with(pod, found)
        return view

    def _requested_of_classes(self, weights: Amounts) -> list[tuple[str, str]]:
        """Return the DeviceClasses whose extended resource is requested, each after the resource."""
        classes = {f"{CLASS_PREFIX}{name}": name for _, name in self._extended}
        classes |= {extended: name for (_, name), extended in self._extended.items() if extended}
        return [(name, classes[name]) for name, _ in weights if name in classes] if weights else []

    def _divided_request(self, weights: Amounts) -> str:
        """Return why a pod waits that requests parts of GPUs by an extended resource; "" if it need not.

        Which part kube-scheduler would give it is known only afterwards.
        """
        for resource, device_class in self._requested_of_classes(weights):
            if self._published.part_of(Demand(device_class), resource) is not None:
                return (
                    f"it requests {resource}, whose devices are parts of GPUs: how large a part it gets is not known "
                    f"before it starts; claim one of DeviceClass {device_class} by a ResourceClaimTemplate instead"
                )
        return ""

    def _count(self, pod: PodView) -> Resolved:
        devices = (self._devices_of(pod, claim) for claim in _distinct(pod.device_claims))
        return self._counted(pod.namespace, devices, gpus=pod.gpus > 0, allowed=pod.claimed or ())

    def _counted(
        self,
        namespace: str,
        claimed: Iterable[tuple[ClaimedDevices | None, str]],
        *,
        gpus: bool,
        allowed: tuple[str, ...] = (),
    ) -> Resolved:
        """Return the sum of what claims request in the namespace, of a pod that also requests `gpus`.

        It was released with devices of the `allowed` classes, which it keeps whatever the table says now.
        """
        amounts: dict[str, int] = {}
        classes: dict[str, None] = {}
        waits, missing, refused = "", False, ""
        for devices, why in claimed:
            waits, missing = waits or why, missing or devices is None
            if devices is None:
                continue
            classes |= dict.fromkeys(name for name, _ in (*devices.amounts, *devices.uncountable))
            for demand in devices.demands:
                name = demand.device_class
                resource = self._resource_of(name)
                if resource:
                    missing |= demand.device is not None and not self._published.is_published(demand.device)
                    self._add(amounts, demand, resource)
                    waits = waits or self._reached(name)
                elif name not in allowed and self._is_refused(namespace, name):
                    refused = refused or (
                        f"DeviceClass {name}, of which its claim requests devices, is not counted by the quota; an "
                        f"administrator can count it (QuotaPolicy, gpuResources: {CLASS_PREFIX}{name}), or allow it by "
                        "otherResources"
                    )
                    waits = waits or refused
            for name, reason in devices.uncountable:
                unlisted = not self._resource_of(name)
                if unlisted and (name in allowed or not self._is_refused(namespace, name)):
                    continue
                waits = waits or f"the devices of DeviceClass {name} that it claims cannot be counted: {reason}"
                refused = refused or (waits if unlisted else "")
        if amounts and gpus:
            waits = waits or (
                f"it requests {labels.GPU_RESOURCE}, or a share of a GPU, and claims "
                f"{next(iter(amounts)).replace(GPU_PART_PREFIX, 'GPUs of ')} as well; "
                "leave out one of the two"
            )
        weights = dict(self._rules.rules.gpu_weights) | dict(part_weights(amounts))
        counted = tuple(sorted(amounts.items()))
        rows = tuple((name, weights[name]) for name, _ in counted if name in weights)
        return Resolved(counted, rows, waits, missing, tuple(sorted(classes)), refused)

    def _devices_of(self, pod: PodView, claim: DeviceClaim) -> tuple[ClaimedDevices | None, str]:
        """Return what one of the pod's claims requests, None if it does not exist, and why it cannot be planned yet."""
        found = self._claims.get((pod.namespace, claim.claim))
        if found is None and claim.template:
            return self._template(pod.namespace, claim.template)
        if found is None:
            return (
                None,
                f"its ResourceClaim {claim.claim} does not exist yet; the pod can start when it has been created",
            )
        counting = self._pods.get(self._counting.get((pod.namespace, f"claim/{claim.claim}"), pod.uid), pod)
        if counting.uid == pod.uid:
            return found, ""
        if counting.holds:
            return ClaimedDevices(), ""
        why = f"it shares ResourceClaim {claim.claim} with pod {counting.name}, which starts first"
        if _may_start_together(pod, counting):
            why += (
                "; pods that start together cannot share a claim: name a ResourceClaimTemplate "
                "(resourceClaimTemplateName), of which each pod gets a claim of its own"
            )
        return ClaimedDevices(), why

    def _template(self, namespace: str, name: str) -> tuple[ClaimedDevices | None, str]:
        """Return what claims of the template request, None if it does not exist, and why a pod waits for it."""
        found = self._templates.get((namespace, name))
        return found, "" if found is not None else _absent(f"ResourceClaimTemplate {name}")

    def _reached(self, device_class: str) -> str:
        """Return why a pod waits that claims devices which several nodes can reach; "" if it need not."""
        if not self._published.only_reached_by_several(device_class):
            return ""
        return (
            f"several nodes can reach the devices of DeviceClass {device_class} that it claims, and the quota plans "
            "devices of one node only; claim devices of another class"
        )

    def _add(self, amounts: dict[str, int], demand: Demand, resource: str) -> None:
        """Add what a demand for devices of a class that counts as `resource` counts as."""
        part = self._published.part_of(demand, resource)
        for name, amount in ((resource, 1),) if part is None else part:
            amounts[name] = amounts.get(name, 0) + amount * demand.number

    def _resource_of(self, device_class: str) -> str:
        """Return the resource of the table as which the devices of a class count; "" if they do not."""
        implicit, extended = f"{CLASS_PREFIX}{device_class}", self._extended.get(("", device_class), "")
        counted = {name for name, _ in self._rules.rules.gpu_weights}
        return next((name for name in (implicit, extended) if name in counted), "")

    def _is_refused(self, namespace: str, device_class: str) -> bool:
        allowed = self._rules.rules.other_resources
        return namespace not in self._unrestricted and f"{CLASS_PREFIX}{device_class}" not in allowed


def counts_differently(before: PodView | None, after: PodView) -> bool:
    """Return whether a tracked pod has to be removed and added again, to be counted by what it claims now.

    A waiting pod is submitted again by itself, and an ended one counts nothing.
    """
    if after.stage is Stage.ENDED:
        return False
    if before is None:
        return after.stage is not Stage.OUTSIDE
    if (before.stage is Stage.OUTSIDE) is not (after.stage is Stage.OUTSIDE):
        return True
    return after.holds and (before.needs.others, before.gpu_weights) != (after.needs.others, after.gpu_weights)


def _rank(pod: PodView) -> tuple[bool, bool, bool, float, str]:
    """Return the order in which pods count a claim that they share: first the pod that was admitted with it."""
    return pod.stage is Stage.ENDED, not pod.reserved_on, not pod.holds, pod.created, pod.uid


def _is_of(pool: tuple[str, str], demand: Demand) -> bool:
    return demand.device is not None and demand.device[:2] == pool


def _absent(what: str) -> str:
    return f"its {what} does not exist yet; the pod can start when it has been created"


def _may_start_together(pod: PodView, other: PodView) -> bool:
    """Return whether pods that share a claim may be of one gang: its size is known after their owner was read."""
    if pod.group or other.group:
        return pod.group == other.group
    return pod.owner is not None and pod.owner == other.owner


def _distinct(claims: tuple[DeviceClaim, ...]) -> list[DeviceClaim]:
    """Return each claim once; without a name each reference to a template is a claim of its own."""
    return [*dict.fromkeys(one for one in claims if one.claim), *(one for one in claims if not one.claim)]


def _claim_keys(pod: PodView) -> Iterator[Key]:
    return ((pod.namespace, f"claim/{one.claim}") for one in pod.device_claims if one.claim)


def _keys(pod: PodView) -> list[Key]:
    templates = [(pod.namespace, f"template/{one.template}") for one in pod.device_claims if one.template]
    return [*_claim_keys(pod), *templates]


def _with(pod: PodView, found: Resolved) -> PodView:
    """Return the pod with the claimed devices added to what it requests; outside the quota if it requests nothing."""
    if pod.job_uid and found.waits and not found.missing:
        return msgspec.structs.replace(pod, problem=found.waits)
    if pod.job_uid and not found.amounts:
        return pod  # it holds what its job counts
    held_back = bool(found.waits) and not pod.holds
    if not found.amounts or held_back:
        counted = pod.counted and not held_back
        return pod if counted or pod.stage is Stage.ENDED else msgspec.structs.replace(pod, stage=Stage.OUTSIDE)
    others, share = dict(pod.needs.others), pod.share
    for name, amount in found.amounts:
        others[name] = others.get(name, 0) + amount
    weights = dict(pod.gpu_weights) | dict(found.weights)
    if pod.gpus:  # it holds both, since a claim was exchanged after its admission
        others[labels.GPU_RESOURCE] = pod.gpus
        weights[labels.GPU_RESOURCE] = WHOLE_GPU
        share = ()
    needs = pod.needs._replace(others=tuple(sorted(others.items())))
    return msgspec.structs.replace(pod, needs=needs, share=share, gpu_weights=tuple(sorted(weights.items())))
