"""The kinds of owners that can be suspended, and what is read of their objects. Pure.

| kind | `suspend` | who creates the pods |
|---|---|---|
| Job (batch/v1) | spec | the Job |
| JobSet (jobset.x-k8s.io/v1alpha2) | spec | its Jobs |
| TrainJob (trainer.kubeflow.org/v1alpha1) | spec | the Jobs of its JobSet |
| MPIJob (kubeflow.org/v2beta1) | spec.runPolicy | itself, and a Job for the launcher |
| PyTorchJob and the other kinds of the training operator (kubeflow.org/v1) | spec.runPolicy | itself |
| AppWrapper (workload.codeflare.dev/v1beta2) | spec | what it wraps, or itself |

The status of all of them has a condition `Suspended`, that of an AppWrapper a phase. A Job's controller sets it after
it has deleted the pods, those of JobSet and TrainJob as soon as they have read the spec, possibly before a Job below
was suspended. So whether pods have ended is read of the pods (`Kind.owns`). An AppWrapper deletes what it wraps, and
creates it again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kfp_gpuquota.api.request_paths import collection, is_object_name, join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import MERGE_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.convert.owners import JOBSET_LABEL
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.conditions import any_is_true
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition, Metadata, Struct

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import OwnerReference

KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_KUEUE: Final = "kueue.x-k8s.io/"
_UPSTREAM: Final = re.compile(r"([a-z-]+[.])*(kubernetes[.]io|k8s[.]io|kubeflow[.]org|codeflare[.]dev)/")
"""Managers (`managedBy`) that are the kinds' own controllers, which report that they have suspended."""


class Kind(NamedTuple):
    """A kind of owners. `within_policy`: its `suspend` is in `spec.runPolicy`.

    `name_label` is the label with its name on pods of which another object is the managing owner.
    """

    api_version: str
    kind: str
    plural: str
    within_policy: bool = False
    name_label: str = ""

    @property
    def path(self) -> str:
        """Return the path of all objects of the kind."""
        return join("/apis", *self.api_version.split("/"), self.plural)

    def path_of(self, namespace: str, name: str) -> str:
        """Return the path of one object."""
        return join(collection(self.api_version, namespace, self.plural), name)

    def owns(self, meta: Metadata, pod: PodView) -> bool:
        """Return whether the suspension of the object ends the pod."""
        if pod.namespace != meta.namespace:
            return False
        return pod.controller_uid == meta.uid or (
            bool(self.name_label) and pod.labels.get(self.name_label) == meta.name
        )


EVICTED: Final = "DisruptionTarget"
"""The condition of a pod that is evicted."""
BACKOFF_LIMIT: Final = 6
"""The default of a Job's `backoffLimit`."""
INDEX_FAILURES: Final = "batch.kubernetes.io/job-index-failure-count"
_EXIT_CODES: Final = (137, 143)
"""Of containers that SIGKILL or SIGTERM has ended."""
_WRAPPER_LABEL: Final = "workload.codeflare.dev/appwrapper"
_TRAINING_LABEL: Final = "training.kubeflow.org/job-name"
KINDS: Final = (
    Kind("batch/v1", "Job", "jobs"),
    Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", name_label=JOBSET_LABEL),
    Kind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", name_label=JOBSET_LABEL),
    Kind("kubeflow.org/v2beta1", "MPIJob", "mpijobs", within_policy=True, name_label=_TRAINING_LABEL),
    *(
        Kind("kubeflow.org/v1", kind, f"{kind.lower()}s", within_policy=True, name_label=_TRAINING_LABEL)
        for kind in ("PyTorchJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob", "MPIJob")
    ),
    Kind("workload.codeflare.dev/v1beta2", "AppWrapper", "appwrappers", name_label=_WRAPPER_LABEL),
)
_BY_NAME: Final = {(kind.api_version, kind.kind): kind for kind in KINDS}
_NAMES: Final = frozenset(f"{kind.api_version.partition('/')[0]}/{kind.kind}" for kind in KINDS)
_FINISHED: Final = frozenset({"Complete", "Completed", "Succeeded", "Failed"})
_STARTERS: Final = frozenset({"batch/v1/CronJob"})
"""Owners that create suspendable objects and leave them alone afterwards."""


class _Policy(Struct, frozen=True):
    suspend: bool | None = None
    managed_by: str | None = None


class _PodCondition(Struct, frozen=True):
    type: str = ""
    status: str = "True"


class _ExitCodes(Struct, frozen=True):
    operator: str = ""
    values: tuple[int, ...] | None = None

    @property
    def of_evictions(self) -> bool:
        """Return whether it may match a container that an eviction ends."""
        listed = [code in (self.values or ()) for code in _EXIT_CODES]
        return any(listed) if self.operator == "In" else not all(listed)


class _FailureRule(Struct, frozen=True):
    action: str = ""
    on_pod_conditions: tuple[_PodCondition, ...] | None = None
    on_exit_codes: _ExitCodes | None = None


class _FailurePolicy(Struct, frozen=True):
    rules: tuple[_FailureRule, ...] | None = None


class _Spec(Struct, frozen=True):
    suspend: bool | None = None
    managed_by: str | None = None
    run_policy: _Policy | None = None
    backoff_limit: int | None = None
    backoff_limit_per_index: int | None = None
    pod_failure_policy: _FailurePolicy | None = None
    pod_replacement_policy: str | None = None
    elastic_policy: Any = None  # of a PyTorchJob


class _Status(Struct, frozen=True):
    conditions: tuple[Condition, ...] | None = None
    phase: str = ""
    failed: Any = None  # numbers of a Job's pods
    terminating: Any = None


class Suspendable(Struct, frozen=True):
    """An object of any of the kinds, or a pod, whose owners are read."""

    metadata: Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def suspended(self) -> bool:
        """Return whether it is to be suspended, by anybody."""
        policy = self.spec.run_policy
        return bool(self.spec.suspend or (policy is not None and policy.suspend))

    @property
    def has_suspended(self) -> bool:
        """Return whether its controller has read that it is to be suspended."""
        return self.status.phase == "Suspended" or any_is_true(self.status.conditions, {"Suspended"})

    @property
    def has_finished(self) -> bool:
        """Return whether it has completed or failed: its controller suspends and resumes nothing any more."""
        return self.status.phase in _FINISHED or any_is_true(self.status.conditions, _FINISHED)

    @property
    def index_failures(self) -> int | None:
        """Return how often the pod's index of its Job has failed before; None if its Job does not count that."""
        text = (self.metadata.annotations or {}).get(INDEX_FAILURES, "")
        return int(text) if text.isascii() and text.isdigit() else None

    def survives(self, kind: Kind, evictions: int, index_failures: int | None = None) -> bool:
        """Return whether the owner of pods goes on after these evictions of them, of which each is a failure for a Job.

        `index_failures` of the one pod that is evicted; None: any number that the Job's status permits. Of other kinds
        that is known of elastic PyTorchJobs only: the loss of a worker fails the others, or counts as a retry.
        """
        if kind.kind != "Job":
            return self.spec.elastic_policy is not None
        spec, status = self.spec, self.status
        action = self._action_on_eviction()
        if action in {"Ignore", "FailJob", "FailIndex"}:
            return action == "Ignore"
        failed = _number(status.failed)
        if spec.pod_replacement_policy == "Failed":  # else pods count from their deletion on
            failed += _number(status.terminating)
        per_index = spec.backoff_limit_per_index
        if per_index is not None and (failed if index_failures is None else index_failures) >= per_index:
            return False
        return failed + evictions <= (BACKOFF_LIMIT if spec.backoff_limit is None else spec.backoff_limit)

    def _action_on_eviction(self) -> str:
        """Return the action of the first rule that applies to a failure by eviction; "" if none does."""
        policy = self.spec.pod_failure_policy
        for rule in (policy.rules if policy is not None else None) or ():
            codes, conditions = rule.on_exit_codes, rule.on_pod_conditions or ()
            if codes is not None and rule.action != "Ignore" and codes.of_evictions:
                return rule.action
            if any(one.type == EVICTED and one.status == "True" for one in conditions):
                return rule.action
        return ""

    @property
    def by_controller(self) -> bool:
        """Return whether it was suspended by a decision of ours, and is to be resumed."""
        return self.metadata.labels.get(labels.SUSPENDED) == "true"

    @property
    def managed_elsewhere(self) -> bool:
        """Return whether Kueue suspends and resumes it, or a controller of unknown behavior does the work."""
        policy = self.spec.run_policy
        managers = (self.spec.managed_by, policy.managed_by if policy is not None else None)
        foreign = any(name and (name.startswith(_KUEUE) or not _UPSTREAM.match(name)) for name in managers)
        return KUEUE_QUEUE in self.metadata.labels or foreign

    @property
    def owner(self) -> OwnerReference | None:
        """Return the reference to the owner that manages it, if any that would undo a change of it."""
        found = next((one for one in self.metadata.owner_references if one.controller), None)
        return None if found is None or f"{found.api_version}/{found.kind}" in _STARTERS else found


def _number(found: object) -> int:
    return found if isinstance(found, int) else 0


def owner_key(pod: PodView) -> tuple[str, str]:
    """Return the namespace and the owner whose pods are suspended together: all Jobs of a JobSet are one."""
    jobset = pod.owner.group if pod.owner is not None and pod.owner.kind == "JobSet" else ""
    return pod.namespace, jobset or pod.controller_uid


def together_name(pod: PodView) -> str:
    """Return the name of the pods of which the loss of one may fail all, or restart all; "" if it is alone in that."""
    if pod.owner is not None and pod.owner.kind == "LeaderWorkerSet":
        return pod.owner.group  # by default its controller creates all pods of a replica again
    if not may_be_suspended(pod.controller_kind):
        return ""
    wrapper = pod.labels.get(_WRAPPER_LABEL)
    return f"AppWrapper/{wrapper}" if wrapper else owner_key(pod)[1]


def may_be_suspended(controller_kind: str) -> bool:
    """Return whether owners of this API group and kind can be suspended."""
    return controller_kind in _NAMES


def kind_of(owner: OwnerReference) -> Kind | None:
    """Return the kind of the owner; None if it cannot be suspended, or if no object can have its name."""
    return _BY_NAME.get((owner.api_version, owner.kind)) if is_object_name(owner.name) else None


def suspension(kind: Kind, found: Suspendable, reason: str | None, *, resumes: bool = True) -> Write:
    """Return the patch that suspends the object for `reason`, or resumes it (None), unless it has changed since.

    Without `resumes` it has no label by which the controller resumes it.
    """
    suspend = {"suspend": reason is not None}
    spec = {"runPolicy": suspend} if kind.within_policy else suspend
    return _marking(kind, found, reason, Lane.ADMIT if reason is None else Lane.RELEASE, resumes=resumes, spec=spec)


def without_marks(kind: Kind, found: Suspendable) -> Write:
    """Return the patch that removes the label and the annotation of an object that a user has resumed."""
    return _marking(kind, found, None, Lane.OTHER)


def _marking(
    kind: Kind, found: Suspendable, reason: str | None, lane: Lane, *, resumes: bool = True, **more: object
) -> Write:
    """Return the patch of `more` with our marks, or without them, unless the object has changed since."""
    meta = found.metadata
    body: dict[str, Any] = {
        "metadata": {
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
            "labels": {labels.SUSPENDED: None if reason is None or not resumes else "true"},
            "annotations": {labels.SUSPENDED: reason},
        },
        **more,
    }
    return Write(
        verb="PATCH",
        path=kind.path_of(meta.namespace, meta.name),
        about=f"{meta.namespace}/{meta.name}",
        lane=lane,
        body=body,
        content_type=MERGE_PATCH,
    )
