"""Finds the owner that determines how many pods start together (its gang size), and reads that size. Pure.

| owner of the pod | found by | pods that start together |
|---|---|---|
| PodGroup (scheduling.x-k8s.io, Volcano) | label, annotation | `minMember` of them |
| JobSet | label | all replicas of all its jobs |
| LeaderWorkerSet | label | the leader and its workers: each replica is a group of its own |
| PodGroup (scheduling.k8s.io) | the pod's `schedulingGroup` | `gang.minCount` of them; with policy `basic` each alone |
| PyTorchJob, MPIJob, ... (kubeflow.org) | owner | all replicas, or `runPolicy.schedulingPolicy.minAvailable` |
| RayCluster | owner | all replicas, or `minReplicas` where Ray scales it |
| Job | owner | all, where it is Indexed and runs all its indexes at once |
| any other Job, ReplicaSet, StatefulSet | owner | all pods with a group label; without one, each pod alone |

Only pods that request GPUs count, or a resource that counts as GPUs (`counted`): others are not gated. Pods that have
succeeded are not created again, so they do not count either. A Job that processes a work queue is not a gang: each of
its pods makes progress alone.

Some controllers create pods only after others are ready. Then those start together that can have been created so far,
and quota is reserved for the rest: a JobSet with startup policy InOrder or `dependsOn`, a StatefulSet with
OrderedReady, a LeaderWorkerSet with LeaderReady, an MPIJob whose launcher waits for its workers. Pods that are created
only when others have completed are a gang of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kfp_gpuquota.api.request_paths import collection, is_api_version, is_kind, is_object_name, join
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import gpus_of, requests_any
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, PodSpec, Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod

    Reader = Callable[[msgspec.Raw, msgspec.Raw, Container[str]], "GangSize"]

JOB_LABEL: Final = "batch.kubernetes.io/job-name"
JOBSET_LABEL: Final = "jobset.sigs.k8s.io/jobset-name"
JOBSET_UID_LABEL: Final = "jobset.sigs.k8s.io/jobset-uid"
LEADER_WORKER_LABEL: Final = "leaderworkerset.sigs.k8s.io/name"
REPLICA_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-index"
NATIVE_VERSIONS: Final = ("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha2")  # Kubernetes 1.37, 1.36
POD_GROUP_LABEL: Final = "scheduling.x-k8s.io/pod-group"
VOLCANO_ANNOTATION: Final = "scheduling.k8s.io/group-name"
INDEX_ANNOTATION: Final = "batch.kubernetes.io/job-completion-index"
_ONE_BY_ONE: Final = frozenset({"Job", "ReplicaSet", "StatefulSet"})  # without a group label and without an index


class Owner(NamedTuple):
    """An owner in the pod's namespace. `replica`: the group of pods, if the owner creates several groups."""

    api_version: str
    kind: str
    namespace: str
    name: str
    replica: str = ""

    @property
    def path(self) -> str:
        """Return the owner's API path."""
        return join(collection(self.api_version, self.namespace, f"{self.kind.lower()}s"), self.name)

    @property
    def is_native(self) -> bool:
        """Return whether it is a PodGroup of Kubernetes' own, for which kube-scheduler waits, too."""
        return self.api_version in NATIVE_VERSIONS

    @property
    def group(self) -> str:
        """Return the name of the group of its pods. It has a '/', which no label's value has."""
        return f"{self.kind}/{self.name}" + (f"/{self.replica}" if self.replica else "")


class Rest(NamedTuple):
    """Pods of a group that its controller creates only after those that exist are ready."""

    pods: int
    gpus: int


class GangSize(NamedTuple):
    """How many of an owner's pods start together: by default, and if a label makes them a group. 1: each alone.

    `rest` are pods that are created later, for which quota is reserved when the others start.
    """

    pods: int = 1
    labelled: int = 1
    rest: tuple[Rest, ...] = ()


ALONE: Final = GangSize()


def owner_of(pod: Pod) -> Owner | None:
    """Return the owner that determines the pod's gang size; None if there is none.

    What tenants wrote is checked first: a label, an annotation or a reference that no object can have names no owner.
    """
    owner = _named_owner(pod)
    if owner is None or not (is_api_version(owner.api_version) and is_kind(owner.kind) and is_object_name(owner.name)):
        return None
    return owner


def _named_owner(pod: Pod) -> Owner | None:
    meta = pod.metadata
    namespace, written, notes = meta.namespace, meta.labels, meta.annotations or {}
    if name := written.get(POD_GROUP_LABEL):
        return Owner("scheduling.x-k8s.io/v1alpha1", "PodGroup", namespace, name)
    if name := notes.get(VOLCANO_ANNOTATION):
        return Owner("scheduling.volcano.sh/v1beta1", "PodGroup", namespace, name)
    if name := written.get(JOBSET_LABEL):
        return Owner("jobset.x-k8s.io/v1alpha2", "JobSet", namespace, name)
    if name := written.get(LEADER_WORKER_LABEL):
        replica = written.get(REPLICA_LABEL, "")
        return Owner("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", namespace, name, replica)
    if (native := pod.spec.scheduling_group) is not None and native.pod_group_name:
        return Owner(NATIVE_VERSIONS[0], "PodGroup", namespace, native.pod_group_name)
    owner = next((o for o in meta.owner_references if o.controller), None)
    if owner is None or _reader(owner.api_version, owner.kind) is None:
        return None
    if owner.kind in _ONE_BY_ONE and not (labels.POD_GROUP in written or INDEX_ANNOTATION in notes):
        return None
    return Owner(owner.api_version, owner.kind, namespace, owner.name)


def gang_size(owner: Owner, answer: bytes, counted: Container[str] = ()) -> GangSize:
    """Return the gang size that the owner's object specifies; ALONE if it cannot be decoded.

    `counted` are the names of the other resources that count as GPUs.
    """
    read = _reader(owner.api_version, owner.kind)
    if read is None:
        return ALONE
    try:
        found = msgspec.json.decode(answer, type=_Object)
        return read(found.spec, found.status, counted)
    except (msgspec.DecodeError, ValueError):
        return ALONE


def job_of_group(group: Owner, answer: bytes) -> Owner | None:
    """Return the Job whose controller made this PodGroup of Kubernetes' own; None if a user or another kind did."""
    try:
        references = msgspec.json.decode(answer, type=_Object).metadata.owner_references
    except (msgspec.DecodeError, ValueError):
        return None
    owner = next((one for one in references if one.controller and one.kind == "Job"), None)
    if owner is None or not (owner.api_version == "batch/v1" and is_object_name(owner.name)):
        return None
    return Owner(owner.api_version, owner.kind, group.namespace, owner.name)


def _reader(api_version: str, kind: str) -> Reader | None:
    group = api_version.partition("/")[0]
    if group == "kubeflow.org" and kind.endswith("Job"):
        return _training_job
    return _READERS.get((group, kind))


class _Object(Struct, frozen=True):
    metadata: Metadata = Metadata()
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")


class _Template(Struct, frozen=True):
    spec: PodSpec = PodSpec()

    @property
    def gpus(self) -> int:
        """Return the GPUs of each of the template's pods."""
        return gpus_of(self.spec)

    def counts(self, counted: Container[str]) -> bool:
        """Return whether the template's pods request GPUs, or a resource that counts as GPUs."""
        return self.gpus > 0 or requests_any(self.spec, counted)


class _Job(Struct, frozen=True):
    parallelism: int | None = None
    completions: int | None = None
    completion_mode: str = ""
    template: _Template = _Template()

    @property
    def at_once(self) -> int:
        parallel = 1 if self.parallelism is None else self.parallelism
        return parallel if self.completions is None else min(parallel, self.completions)


class _JobStatus(Struct, frozen=True):
    succeeded: int = 0
    failed_indexes: str = ""


class _JobTemplate(Struct, frozen=True):
    spec: _Job = _Job()


class _DependsOn(Struct, frozen=True):
    name: str = ""
    status: str = ""


class _Replicated(Struct, frozen=True):
    name: str = ""
    replicas: int = 1
    template: _JobTemplate = _JobTemplate()
    depends_on: tuple[_DependsOn, ...] = ()


class _StartupPolicy(Struct, frozen=True):
    startup_policy_order: str = ""


class _JobSet(Struct, frozen=True):
    replicated_jobs: tuple[_Replicated, ...] = ()
    startup_policy: _StartupPolicy | None = None


class _ReplicatedStatus(Struct, frozen=True):
    name: str = ""
    ready: int = 0
    succeeded: int = 0


class _JobSetStatus(Struct, frozen=True):
    replicated_jobs_status: tuple[_ReplicatedStatus, ...] = ()


class _Replicas(Struct, frozen=True):
    replicas: int | None = None
    min_replicas: int | None = None
    num_of_hosts: int = 1
    pod_management_policy: str = ""
    template: _Template = _Template()


class _RayCluster(Struct, frozen=True):
    enable_in_tree_autoscaling: bool = False
    head_group_spec: _Replicas = _Replicas()
    worker_group_specs: tuple[_Replicas, ...] = ()


class _SchedulingPolicy(Struct, frozen=True):
    min_available: int | None = None


class _RunPolicy(Struct, frozen=True):
    scheduling_policy: _SchedulingPolicy | None = None


class _ReplicaStatus(Struct, frozen=True):
    succeeded: int = 0


class _TrainingStatus(Struct, frozen=True):
    replica_statuses: dict[str, _ReplicaStatus] = msgspec.field(default_factory=dict)


class _LeaderAndWorkers(Struct, frozen=True):
    size: int = 1
    worker_template: _Template = _Template()
    leader_template: _Template | None = None


class _LeaderWorkerSet(Struct, frozen=True):
    startup_policy: str = ""
    leader_worker_template: _LeaderAndWorkers = _LeaderAndWorkers()


class _PodGroup(Struct, frozen=True):
    min_member: int = 1


class _Gang(Struct, frozen=True):
    min_count: int = 1


class _GroupPolicy(Struct, frozen=True):
    gang: _Gang = _Gang()


class _NativePodGroup(Struct, frozen=True):
    scheduling_policy: _GroupPolicy = _GroupPolicy()


def _job(spec: msgspec.Raw, status: msgspec.Raw, counted: Container[str]) -> GangSize:
    job, done = msgspec.json.decode(spec, type=_Job), msgspec.json.decode(status, type=_JobStatus)
    left = job.at_once
    if job.completions is not None:
        left = max(0, min(left, job.completions - done.succeeded - _indexes(done.failed_indexes)))
    size = left if job.template.counts(counted) else 1
    whole = job.completion_mode == "Indexed" and job.at_once == job.completions
    return GangSize(max(1, size) if whole else 1, max(1, size))


def _indexes(ranges: str) -> int:
    """Return the number of indexes in a list such as '1,3-5'."""
    bounds = (part.partition("-") for part in ranges.split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in bounds)


def _job_set(spec: msgspec.Raw, status: msgspec.Raw, counted: Container[str]) -> GangSize:
    found = msgspec.json.decode(spec, type=_JobSet)
    states = {one.name: one for one in msgspec.json.decode(status, type=_JobSetStatus).replicated_jobs_status}
    in_order = found.startup_policy is not None and found.startup_policy.startup_policy_order == "InOrder"
    jobs = {one.name: one for one in found.replicated_jobs}
    size, rest, waits = 0, list[Rest](), False
    for one in found.replicated_jobs:
        state = states.get(one.name, _ReplicatedStatus())
        unmet = [need.status for need in one.depends_on if not _is_met(need, jobs, states)]
        pod = one.template.spec
        pods = (one.replicas - state.succeeded) * pod.at_once if pod.template.counts(counted) else 0
        if "Complete" in unmet or pods <= 0:
            pass
        elif waits or unmet:
            rest.append(Rest(pods, pod.template.gpus))
        else:
            size += pods
        waits = waits or (in_order and state.ready + state.succeeded < one.replicas)
    return _all(size, tuple(rest))


def _is_met(need: _DependsOn, jobs: Mapping[str, _Replicated], states: Mapping[str, _ReplicatedStatus]) -> bool:
    state = states.get(need.name, _ReplicatedStatus())
    there = state.succeeded if need.status == "Complete" else state.succeeded + state.ready
    return need.name not in jobs or there >= jobs[need.name].replicas


def _training_job(spec: msgspec.Raw, status: msgspec.Raw, counted: Container[str]) -> GangSize:
    """Return the gang size of a training job; kinds differ in a field's name (pytorchReplicaSpecs, mpiReplicaSpecs)."""
    fields = msgspec.json.decode(spec, type=dict[str, msgspec.Raw])
    policy = msgspec.json.decode(fields.get("runPolicy", msgspec.Raw(b"{}")), type=_RunPolicy).scheduling_policy
    last = fields.get("launcherCreationPolicy") == msgspec.Raw(b'"WaitForWorkersReady"')
    roles = (raw for name, raw in fields.items() if name.endswith("ReplicaSpecs"))
    done = msgspec.json.decode(status, type=_TrainingStatus).replica_statuses
    size, rest = 0, list[Rest]()
    for name, part in (item for raw in roles for item in msgspec.json.decode(raw, type=dict[str, _Replicas]).items()):
        pods = _count(part.replicas) - done.get(name, _ReplicaStatus()).succeeded
        if not part.template.counts(counted) or pods <= 0:
            continue
        if last and name == "Launcher":
            rest.append(Rest(pods, part.template.gpus))
        else:
            size += pods
    least = policy.min_available if policy is not None else None
    return _all(size if least is None else min(size, least), tuple(rest))


def _ray_cluster(spec: msgspec.Raw, _status: msgspec.Raw, counted: Container[str]) -> GangSize:
    cluster = msgspec.json.decode(spec, type=_RayCluster)
    scaled = cluster.enable_in_tree_autoscaling
    workers = sum(
        part.num_of_hosts * _count(part.min_replicas if scaled and part.min_replicas is not None else part.replicas)
        for part in cluster.worker_group_specs
        if part.template.counts(counted)
    )
    return _all(workers + cluster.head_group_spec.template.counts(counted))


def _leader_worker_set(spec: msgspec.Raw, _status: msgspec.Raw, counted: Container[str]) -> GangSize:
    """Return the gang size of one replica; with startup policy LeaderReady its workers come after its leader."""
    found = msgspec.json.decode(spec, type=_LeaderWorkerSet)
    group = found.leader_worker_template
    leader = group.leader_template or group.worker_template
    workers = (group.size - 1) * group.worker_template.counts(counted)
    if found.startup_policy == "LeaderReady" and leader.counts(counted) and workers:
        return _all(1, (Rest(workers, group.worker_template.gpus),))
    return _all(leader.counts(counted) + workers)


def _replicas(spec: msgspec.Raw, _status: msgspec.Raw, counted: Container[str]) -> GangSize:
    found = msgspec.json.decode(spec, type=_Replicas)
    return GangSize(1, max(1, _count(found.replicas)) if found.template.counts(counted) else 1)


def _stateful_set(spec: msgspec.Raw, status: msgspec.Raw, counted: Container[str]) -> GangSize:
    found = msgspec.json.decode(spec, type=_Replicas)
    replicas = _count(found.replicas)
    if found.pod_management_policy == "Parallel" or not found.template.counts(counted) or replicas <= 1:
        return _replicas(spec, status, counted)
    return GangSize(1, 1, (Rest(replicas - 1, found.template.gpus),))


def _pod_group(spec: msgspec.Raw, _status: msgspec.Raw, _counted: Container[str]) -> GangSize:
    return _all(msgspec.json.decode(spec, type=_PodGroup).min_member)


def _native_pod_group(spec: msgspec.Raw, _status: msgspec.Raw, _counted: Container[str]) -> GangSize:
    return _all(msgspec.json.decode(spec, type=_NativePodGroup).scheduling_policy.gang.min_count)


def _all(size: int, rest: tuple[Rest, ...] = ()) -> GangSize:
    return GangSize(max(1, size), max(1, size), rest)


def _count(replicas: int | None) -> int:
    """Return the number of replicas, which defaults to one."""
    return 1 if replicas is None else replicas


_READERS: Final[dict[tuple[str, str], Reader]] = {
    ("batch", "Job"): _job,
    ("jobset.x-k8s.io", "JobSet"): _job_set,
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): _leader_worker_set,
    ("ray.io", "RayCluster"): _ray_cluster,
    ("scheduling.k8s.io", "PodGroup"): _native_pod_group,
    ("scheduling.x-k8s.io", "PodGroup"): _pod_group,
    ("scheduling.volcano.sh", "PodGroup"): _pod_group,
    ("apps", "ReplicaSet"): _replicas,
    ("apps", "StatefulSet"): _stateful_set,
}


def owner_kind(api_version: str, kind: str) -> str:
    """Return the owner's API group and kind as in the QuotaPolicy, for example apps/ReplicaSet, without the version."""
    group, slash, _ = api_version.rpartition("/")
    return f"{group if slash else 'core'}/{kind}"
