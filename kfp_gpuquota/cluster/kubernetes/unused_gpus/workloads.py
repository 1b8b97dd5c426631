"""Groups the pods that hold GPUs by what can be suspended as a whole, and converts what is counted of it. Pure."""

from __future__ import annotations

from enum import Enum
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api import Kind
from kfp_gpuquota.api.policy import IdleRule
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import UnusedWorkload
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import may_be_suspended, owner_key
from kfp_gpuquota.engine.unused_gpus import Counted, Warned
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore

MOST_STORED: Final = 100
"""Of one team: its status must not grow without bound. The longest unused are stored."""
STORED_AFTER_S: Final = 30.0


class Stop(Enum):
    """How a workload is suspended."""

    ELASTIC_JOB = "spec.suspend of the ElasticJob"
    NOTEBOOK = "the annotation by which Kubeflow stops notebooks"
    OWNER = "suspend of the pods' topmost owner"
    NEVER = "it cannot be: its owner is only warned"


class Workload(NamedTuple):
    """What is warned and suspended together: the pods of one ElasticJob, notebook or other owner, or one pod."""

    uid: str
    namespace: str
    kind: Kind
    stop: Stop
    pods: tuple[PodView, ...]

    @property
    def started(self) -> float:
        """Return when the last one of its pods was started: a resumed workload is counted again."""
        return max(pod.started for pod in self.pods)

    @property
    def notebook(self) -> tuple[str, str]:
        """Return the namespace and the name of its Notebook, if it is one."""
        return self.namespace, self.pods[0].labels.get(labels.NOTEBOOK, "")

    @property
    def name(self) -> str:
        """Return the name that its team uses."""
        return self.notebook[1] if self.stop is Stop.NOTEBOOK else self.pods[0].name


def plain_workloads(pods: Iterable[PodView]) -> Iterator[Workload]:
    """Yield the workloads of pods that are no workers of ElasticJobs, each with all its pods that hold GPUs."""
    grouped: dict[tuple[str, str], list[PodView]] = {}
    for pod in pods:
        namespace, owner = owner_key(pod)
        grouped.setdefault((namespace, owner or pod.uid), []).append(pod)
    for (namespace, owner), members in grouped.items():
        members.sort(key=lambda pod: pod.name)
        kind = Kind.BUILD if all(pod.kind is Kind.BUILD for pod in members) else Kind.TRAIN
        yield Workload(_uid(namespace, owner, members), namespace, kind, _stop_of(members), tuple(members))


def _uid(namespace: str, owner: str, pods: Sequence[PodView]) -> str:
    """Return a key that everybody may read: a JobSet's name is in none."""
    if owner not in {pods[0].controller_uid, pods[0].uid}:
        owner = sha256(f"{namespace}/{owner}".encode()).hexdigest()[:32]
    return f"{namespace}/{owner}"


def _stop_of(pods: list[PodView]) -> Stop:
    first = pods[0]
    notebook = first.labels.get(labels.NOTEBOOK)
    if notebook and first.controller_kind == "apps/StatefulSet" and [pod.name for pod in pods] == [f"{notebook}-0"]:
        return Stop.NOTEBOOK
    return Stop.OWNER if may_be_suspended(first.controller_kind) else Stop.NEVER


def elastic_workloads(book: ElasticJobStore, pods: Mapping[str, PodView]) -> Iterator[Workload]:
    """Yield the ElasticJobs that run, with their workers' pods; one of whose pods is not there is left out."""
    for job in book.jobs.values():
        if job.runs:
            workers = [pods.get(record.worker.id) for record in book.alive_of(job.uid)]
            found = tuple(pod for pod in workers if pod is not None)
            if found and len(found) == len(workers):
                yield Workload(job.uid, job.spec.project, job.spec.kind, Stop.ELASTIC_JOB, found)


def stored(counted: Mapping[str, Counted], now: float) -> tuple[UnusedWorkload, ...]:
    """Return what is counted of one team's workloads, for its status."""
    lasting = [
        (one.since, uid, one)
        for uid, one in counted.items()
        if one.warned is not None or now - one.since >= STORED_AFTER_S
    ]
    oldest = sorted(lasting, key=lambda each: (each[2].warned is None, *each[:2]))[:MOST_STORED]
    return tuple(_stored(uid, one) for _, uid, one in oldest)


def _stored(uid: str, one: Counted) -> UnusedWorkload:
    seen = UnusedWorkload(uid=uid, since=round(one.since, 3), observed_at=round(one.observed_at, 3))
    if (warned := one.warned) is None:
        return seen
    rule = warned.rule
    return UnusedWorkload(
        uid=uid,
        since=seen.since,
        observed_at=seen.observed_at,
        warned_at=round(warned.at, 3),
        policy=warned.policy,
        warn_after_seconds=rule.warn_after_s,
        preempt_after_seconds=rule.preempt_after_s,
        suspend_after_seconds=rule.suspend_after_s,
    )


def counted_of(found: UnusedWorkload) -> Counted:
    """Return what an earlier controller has counted. A warning with an invalid rule does not hold."""
    warned = None
    if found.warned_at is not None and found.warn_after_seconds and found.suspend_after_seconds:
        try:
            rule = IdleRule(
                warn_after_s=found.warn_after_seconds,
                suspend_after_s=found.suspend_after_seconds,
                preempt_after_s=found.preempt_after_seconds,
            )
            warned = Warned(found.uid, found.since, found.warned_at, rule, found.policy)
        except InvalidFieldError:
            pass
    return Counted(found.since, found.observed_at, warned)
