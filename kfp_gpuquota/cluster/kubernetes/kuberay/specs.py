"""Converts RayClusters and RayJobs to the scheduler's jobs. Pure.

| object | its units |
|---|---|
| RayCluster with label gpuquota.dev/elastic=true (RayJobs and RayServices pass their labels on) | one for each worker group with GPUs |
| RayJob with one group that requests GPUs | one; elastic with the label, or where Ray's autoscaler sizes it |
| RayJob with several such groups | one, whose pods all start together |
| any other | none: its pods are a group that starts together (convert/owners.py) |

With Ray's autoscaler a group requests what the autoscaler requests, at most `maxReplicas`.
"""  # noqa: E501 - a table

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert.gang_notes import MAX_GROUP
from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import completed
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job, pod_view, short_name
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import gpus_of, requests_any, weights_text
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, Named, Pod
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import HEAD_GROUP, WorkerGroup
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.api.resources import Resources
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import PodSpec
    from kfp_gpuquota.cluster.kubernetes.objects.ray_types import PodTemplate, RayClusterSpec

_GATES: Final = (Named(labels.QUOTA_GATE),)


class Given(NamedTuple):
    """What determines a unit's requests besides its object.

    `defaults` are a container's default requests in the namespace; `located(pod)` restricts a pod to the nodes of its
    volumes; `weights` are the other resources that count as GPUs, as in CountedJobSpec. `user_of` labels is the user
    that they name.
    """

    name: str
    namespace: str
    defaults: Mapping[str, object]
    located: Callable[[PodView], PodView]
    weights: Resources = ()
    user_of: Callable[[Mapping[str, str]], str] = lambda _labels: ""


class Request(NamedTuple):
    """A unit's job; `gpus` are the devices of each pod by group, and with several groups `parts` has a job for each.

    `user` is the one that the labels of its first pods name.
    """

    spec: JobSpec
    parts: dict[str, JobSpec]
    gpus: dict[str, int]
    user: str = ""


class SizeNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the user requested of a group (`replicas`, `most`), and what the controller wrote instead of it.

    A value that is no longer the one written was set by the user, or by Ray's autoscaler, since.
    """

    replicas: int | None = None
    wrote: int | None = None
    most: int | None = None
    bound: int | None = None


def notes_of(metadata: Metadata) -> dict[str, SizeNote]:
    """Return the annotated sizes by group; {} for an annotation that is not the controller's."""
    try:
        return msgspec.json.decode((metadata.annotations or {}).get(labels.RAY_GROUPS, "{}"), type=dict[str, SizeNote])
    except msgspec.DecodeError:
        return {}


def requested(group: WorkerGroup, note: SizeNote) -> int:
    """Return the replicas that the user requests."""
    return note.replicas if note.replicas is not None and note.wrote == group.replicas else group.replicas


def most_requested(group: WorkerGroup, note: SizeNote) -> int:
    """Return the user's `maxReplicas`."""
    return note.most if note.most is not None and note.bound == group.max_replicas else group.max_replicas


def gpu_groups(spec: RayClusterSpec, weights: Resources = ()) -> list[WorkerGroup]:
    """Return the groups whose pods request GPUs, or what counts as GPUs; the head is a group with one replica."""
    names = {name for name, _ in weights}
    head = WorkerGroup(HEAD_GROUP, 1, 1, 1, template=spec.head_group_spec.template)
    groups = (head, *spec.worker_group_specs)
    return [one for one in groups if has_devices(one) or requests_any(one.template.spec, names)]


def has_devices(group: WorkerGroup) -> bool:
    """Return whether the group's pods request nvidia.com/gpu."""
    return gpus_of(group.template.spec) > 0


def elastic_groups(spec: RayClusterSpec) -> list[WorkerGroup]:
    """Return the worker groups of a labelled cluster that are elastic. Raises InvalidFieldError."""
    found = [group for group in spec.worker_group_specs if gpus_of(group.template.spec)]
    for group in found:
        if group.num_of_hosts > 1:
            raise InvalidFieldError(
                "numOfHosts",
                group.num_of_hosts,
                f"group {group.group_name!r} cannot be elastic: each of its replicas is several pods",
                hint=f"leave the label {labels.ELASTIC} out",
            )
    return found


def group_request(given: Given, group: WorkerGroup, note: SizeNote, *, autoscaled: bool) -> Request:
    """Return the request of an elastic group. Raises InvalidFieldError."""
    least = max(1, min(group.min_replicas, group.replicas) if autoscaled else group.min_replicas)
    limit = max(least, min(most_requested(group, note), MAX_GROUP))  # as KubeRay, which never exceeds maxReplicas
    wanted = min(limit, max(least, group.replicas if autoscaled else requested(group, note)))
    most = wanted if autoscaled else limit
    view = _pod_view(given, group.template)
    one = pod_job(view)
    gpus = one.gpus
    spec = msgspec.structs.replace(
        one,
        name=short_name(f"{given.name}-{group.group_name}"),
        gpus=wanted * gpus,
        min_gpus=least * gpus,
        max_gpus=most * gpus,
        gpus_per_worker=gpus,
    )
    return Request(spec, {}, {group.group_name: gpus}, given.user_of(view.labels))


def fixed_request(given: Given, groups: list[WorkerGroup]) -> Request:
    """Return the request of groups whose pods all start together. Raises InvalidFieldError."""
    views = {group.group_name: _pod_view(given, group.template) for group in groups}
    parts = {
        group.group_name: _times(given, pod_job(views[group.group_name]), group.replicas * group.num_of_hosts)
        for group in groups
        if group.replicas
    }
    gpus = {name: view.gpus for name, view in views.items()}
    first = next(iter(parts.values()))
    user = given.user_of(views[next(iter(parts))].labels)
    return Request(first, parts if len(parts) > 1 else {}, gpus, user)


def _times(given: Given, one: JobSpec, pods: int) -> JobSpec:
    gpus = one.gpus
    name = short_name(given.name)
    return msgspec.structs.replace(one, name=name, gpus=gpus * pods, gpus_per_worker=gpus)


def _pod_view(given: Given, template: PodTemplate) -> PodView:
    """Return one pod of the template, as the webhook would gate it."""
    spec = msgspec.structs.replace(completed(template.spec, given.defaults), scheduling_gates=_GATES)
    meta = Metadata(
        name=given.name,
        namespace=given.namespace,
        labels=template.metadata.labels,
        annotations={**(template.metadata.annotations or {}), **_weights_note(given, spec)},
    )
    return given.located(pod_view(Pod(metadata=meta, spec=spec)))


def _weights_note(given: Given, spec: PodSpec) -> dict[str, str]:
    weights = tuple(row for row in given.weights if requests_any(spec, row[:1]))
    return {labels.GPU_WEIGHTS: weights_text(weights)} if weights else {}
