"""Derives the ElasticJob of a Job, and the Job's status of the ElasticJob's. Pure."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kfp_gpuquota.api import Phase, ReasonCode
from kfp_gpuquota.api.request_paths import collection, join
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_PRIORITY, MAX_RUNTIME_S, MAX_SECONDS, check_name
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import bounded_number
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.conditions import any_is_true, with_condition
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition, Metadata, Struct
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob

PATH: Final = "/apis/batch/v1/jobs"
MANAGER: Final = labels.ELASTIC
SELECTOR: Final = f"{labels.ELASTIC}=true"
MAX_NODES: Final = 100_000
OPTIONAL_FIELDS: Final = (
    "priority",
    "preemptible",
    "nodePool",
    "maxRestarts",
    "maxRuntimeSeconds",
    "gracePeriodSeconds",
    "checkpoint",
    "requiredTopology",
    "preferredTopology",
    "segmentTopology",
    "segment",
)
"""Fields of the ElasticJob's specification that are left out where the Job says nothing."""
_FIXED: Final = ("gpus", "gpusPerWorker", "minGpus", "maxGpus", "nodePool", *OPTIONAL_FIELDS[-4:])
"""Fields that the API server lets nobody change of an ElasticJob."""
_TOPOLOGY: Final = (
    "kueue.x-k8s.io/podset-required-topology",
    "kueue.x-k8s.io/podset-preferred-topology",
    "kueue.x-k8s.io/podset-slice-required-topology",
)
_SLICE_SIZE: Final = "kueue.x-k8s.io/podset-slice-size"
"""Kueue's annotations of the pod template; a slice is a segment."""
_FINISHED: Final = frozenset({"Complete", "Failed"})


class ManagedJobSpec(Struct, frozen=True):
    """The specification of a Job, as far as it determines its ElasticJob."""

    managed_by: str = ""
    template: msgspec.Raw = msgspec.Raw(b"{}")
    parallelism: int | None = None
    completions: int | None = None
    completion_mode: str = ""
    backoff_limit: int | None = None
    active_deadline_seconds: float | None = None
    suspend: bool = False


class ManagedJobStatus(Struct, frozen=True):
    """The status of a Job, as far as it is kept when it is written."""

    start_time: datetime | None = None
    conditions: tuple[Condition, ...] | None = None


class ManagedJob(Struct, frozen=True):
    """A Job that has the label."""

    metadata: Metadata
    spec: ManagedJobSpec = ManagedJobSpec()
    status: ManagedJobStatus = ManagedJobStatus()

    @property
    def ours(self) -> bool:
        """Return whether it is to be run here."""
        return self.spec.managed_by == MANAGER

    @property
    def has_finished(self) -> bool:
        """Return whether it has completed or failed, which is final."""
        return any_is_true(self.status.conditions, _FINISHED)

    @property
    def path(self) -> str:
        """Return its path."""
        return join(collection("batch/v1", self.metadata.namespace, "jobs"), self.metadata.name)


def elastic_job_of(job: ManagedJob) -> dict[str, Any]:
    """Return the ElasticJob that runs the Job's pods. Raises InvalidFieldError."""
    check_name("name", job.metadata.name)
    template: dict[str, Any] = msgspec.json.decode(job.spec.template)
    spec = _spec(job, template)
    meta = job.metadata
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "labels": {**_of_others(meta.labels), labels.SOURCE: "job"},
            "annotations": {labels.DERIVED: msgspec.json.encode(_digests(spec), order="sorted").decode()},
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": meta.name, "uid": meta.uid, "controller": True}
            ],
        },
        "spec": spec,
    }


class Owner(NamedTuple):
    """A Job as its ElasticJob names it. A user can write any uid, but only of the own namespace does it count."""

    namespace: str
    uid: str


def owner_of(job: ElasticJob) -> Owner | None:
    """Return the Job that the ElasticJob runs for, which has its name; None for any other."""
    owner = job.owning_job
    return None if owner is None else Owner(job.metadata.namespace, owner.uid)


def changed_fields(derived: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to change: the fields whose digests are not those in `derived`; None: a field is removed."""
    before, after = _read_digests(derived), _digests(spec)
    names = {**spec, **dict.fromkeys(OPTIONAL_FIELDS)}
    return {name: spec.get(name) for name in names if before.get(name) != after.get(name) and name not in _FIXED}


def fixed_differences(found: ElasticJob, spec: Mapping[str, Any]) -> list[str]:
    """Return the fields, as "gpus 2", that a changed Job would change of its ElasticJob if they could be changed."""
    own = found.spec
    topology = own.required_topology, own.preferred_topology, own.segment_topology, own.segment
    kept = own.gpus, own.gpus_per_worker, own.min_gpus, own.max_gpus, own.node_pool, *topology
    return [f"{name} {value}" for name, value in zip(_FIXED, kept, strict=True) if value != spec.get(name)]


def _digests(spec: Mapping[str, Any]) -> dict[str, str]:
    encoded = ((name, msgspec.json.encode(value, order="sorted")) for name, value in spec.items() if name not in _FIXED)
    return {name: hashlib.sha256(value).hexdigest()[:16] for name, value in encoded}


def _read_digests(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, RecursionError):
        return {}  # it was changed by a user: all fields count as changed


def _of_others(given: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in given.items() if name.partition("/")[0] != labels.GROUP}


def _spec(job: ManagedJob, template: dict[str, Any]) -> dict[str, Any]:
    """Return the ElasticJob's specification; fields that nothing is said of have its defaults."""
    notes = {**(job.metadata.annotations or {}), **_texts(template, "annotations")}
    named = {**job.metadata.labels, **_texts(template, "labels")}
    per_node, nodes = _gpus_per_node(template), 1 if job.spec.parallelism is None else job.spec.parallelism
    if not 1 <= nodes <= MAX_NODES:
        raise InvalidFieldError("parallelism", nodes, f"it must be from 1 to {MAX_NODES}")
    if job.spec.completions == 0:
        raise InvalidFieldError("completions", 0, "a Job without completions runs nothing")
    least = min(_nodes(notes, labels.MIN_NODES, nodes), nodes)
    most = max(_nodes(notes, labels.MAX_NODES, nodes), nodes)
    priority = bounded_number(named.get(labels.PRIORITY, ""), MAX_PRIORITY)
    preemptible = {"true": True, "false": False}.get(named.get(labels.PREEMPTIBLE, ""))
    claim = notes.get(labels.CHECKPOINT_CLAIM)
    checkpoint = {"claimName": claim} if claim else None
    grace_s = (template.get("spec") or {}).get("terminationGracePeriodSeconds")
    limits = _limits(job.spec, grace_s)
    chosen = dict(
        zip(
            OPTIONAL_FIELDS,
            (priority, preemptible, named.get(labels.POOL), *limits, checkpoint, *_topology(notes)),
            strict=True,
        )
    )
    return {
        "template": template,
        "gpus": nodes * per_node,
        "gpusPerWorker": per_node,
        "minGpus": least * per_node,
        "maxGpus": most * per_node,
        "suspend": job.spec.suspend,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def _topology(notes: Mapping[str, str]) -> tuple[str | int | None, ...]:
    """Return the required, the preferred and the segments' level, and the workers of a segment."""
    size = notes.get(_SLICE_SIZE)
    if size is not None and not bounded_number(size, MAX_NODES):
        raise InvalidFieldError(_SLICE_SIZE, size, f"it must be a number from 1 to {MAX_NODES}")
    return (*map(notes.get, _TOPOLOGY), None if size is None else int(size))


def _texts(template: Mapping[str, Any], field: str) -> dict[str, str]:
    """Return the template's labels or annotations, as far as they are texts."""
    given = template.get("metadata")
    found = given.get(field) if isinstance(given, dict) else None
    texts = found.items() if isinstance(found, dict) else ()
    return {name: text for name, text in texts if isinstance(text, str)}


def _limits(spec: ManagedJobSpec, grace_s: float | None) -> tuple[float | None, ...]:
    """Return restarts, run time and grace period as an ElasticJob may have them: a Job may have more."""
    restarts, runtime_s = spec.backoff_limit, spec.active_deadline_seconds
    return (
        None if restarts is None else min(restarts, MAX_COUNT),
        None if runtime_s is None or runtime_s > MAX_RUNTIME_S else max(1, runtime_s),
        None if grace_s is None else min(grace_s, MAX_SECONDS),
    )


def _gpus_per_node(template: dict[str, Any]) -> int:
    """Return the GPUs of the first container, in which a worker runs."""
    containers = (template.get("spec") or {}).get("containers") or [{}]
    limits = [(one.get("resources") or {}).get("limits") or {} for one in containers]
    if any(limit.get(labels.GPU_RESOURCE) for limit in limits[1:]):
        raise InvalidFieldError("template", "of pods", f"only its first container may ask for {labels.GPU_RESOURCE}")
    count = bounded_number(str(limits[0].get(labels.GPU_RESOURCE, "")), MAX_NODES)
    if not count:
        raise InvalidFieldError(
            "template",
            "of pods",
            f"its first container must have a limit of {labels.GPU_RESOURCE}; a Job without GPUs needs no managedBy",
        )
    return count


def _nodes(notes: Mapping[str, str], name: str, default: int) -> int:
    text = notes.get(name)
    if text is None:
        return default
    found = bounded_number(text, MAX_NODES)
    if not found:
        raise InvalidFieldError(name, text, f"it must be a whole number from 1 to {MAX_NODES}")
    return found


# The Job's status


def job_status_of(job: ManagedJob, elastic: ElasticJob, now: datetime) -> dict[str, Any]:
    """Return the Job's status, by the rules of the API server for Jobs that others manage.

    A finished Job has a start time and no active pods; a start time changes only while the Job is suspended.
    """
    status, phase = elastic.status, Phase(elastic.status.phase)
    active = 0 if phase.final else status.workers
    ended = status.completion_time or now
    suspended = job.spec.suspend and not active
    start = None if suspended and not phase.final else job.status.start_time or status.start_time
    if phase.final and start is None:
        start = ended
    found: dict[str, Any] = {
        "active": active,
        "ready": active if phase is Phase.RUNNING else 0,
        "startTime": None if start is None else _text(start),
    }
    if phase is Phase.SUCCEEDED:
        count = job.spec.completions or job.spec.parallelism or 1
        found |= {"succeeded": count, "completionTime": _text(max(ended, start or ended))}
        if job.spec.completion_mode == "Indexed":
            found["completedIndexes"] = f"0-{count - 1}" if count > 1 else "0"
    elif phase.final:
        found["failed"] = 1
    found["conditions"] = _conditions(job, elastic, phase, now, suspended=suspended)
    return {name: value for name, value in found.items() if value is not None}


def without_times(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Job's status without its times: what is written at once if it changes."""
    conditions = [{**one, "lastTransitionTime": None} for one in status["conditions"]]
    return {**status, "startTime": None, "completionTime": None, "conditions": conditions}


def _conditions(
    job: ManagedJob, elastic: ElasticJob, phase: Phase, now: datetime, *, suspended: bool
) -> list[dict[str, Any]]:
    known: Sequence[Condition] = job.status.conditions or ()
    for wanted in _wanted(elastic, phase, suspended=suspended, resumed=any(c.type == "Suspended" for c in known)):
        known = with_condition(known, wanted, now.timestamp())
    return [msgspec.to_builtins(one) for one in known]


def _wanted(elastic: ElasticJob, phase: Phase, *, suspended: bool, resumed: bool) -> Iterator[Condition]:
    """Yield the conditions to write. `resumed`: it has been suspended before."""
    if suspended:
        yield Condition("Suspended", "True", "JobSuspended", "Job suspended")
    elif resumed:
        yield Condition("Suspended", "False", "JobResumed", "Job resumed")
    message = elastic.status.message
    if phase is Phase.SUCCEEDED:
        yield Condition("SuccessCriteriaMet", "True", "CompletionsReached", message)
        yield Condition("Complete", "True", "CompletionsReached", message)
    elif phase.final:
        reason = _failure(phase, elastic)
        yield Condition("FailureTarget", "True", reason, message)
        yield Condition("Failed", "True", reason, message)


def _failure(phase: Phase, elastic: ElasticJob) -> str:
    """Return the reason as a Job's: rules of JobSet for failed Jobs refer to it."""
    if phase is Phase.CANCELLED:
        return "Cancelled"
    return "DeadlineExceeded" if elastic.status.reason == ReasonCode.RAN_TOO_LONG else "BackoffLimitExceeded"


def _text(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
