"""Warns owners of workloads whose GPUs are unused, and suspends the workloads, as policies say.

| of whom | warned by | suspended by |
|---|---|---|
| ElasticJob | its status, an event, a webhook | `spec.suspend` and the annotation with the reason |
| Notebook | an event on it and its pod, a webhook | the annotation by which Kubeflow stops notebooks |
| Job and other owners that have `suspend` | an event on a pod, a webhook | its `suspend`, which its user takes back |
| other pods | the same | never |

A suspension is requested at each look until the pods have ended; a controller that was killed in between begins with
what it finds in the GpuQuota's status. Exporters are asked only while a policy has a rule, and for the nodes of the
pods to which it applies.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.policy import idle_rule_of
from kfp_gpuquota.api.request_paths import collection, join
from kfp_gpuquota.api.wire import EventKind
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import MERGE_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.cluster.kubernetes.suspension.suspending import SUSPENDED_UNUSED
from kfp_gpuquota.cluster.kubernetes.unused_gpus.exporters import OFF_S
from kfp_gpuquota.cluster.kubernetes.unused_gpus.workloads import (
    Stop,
    Workload,
    counted_of,
    elastic_workloads,
    plain_workloads,
    stored,
)
from kfp_gpuquota.engine.records import with_status
from kfp_gpuquota.engine.unused_gpus import Observed, UnusedGpus, fewest
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import ElasticJobs
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, Notebook
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, GpuQuota, UnusedWorkload
    from kfp_gpuquota.cluster.kubernetes.planner.process import Planner
    from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
    from kfp_gpuquota.cluster.kubernetes.pods.pod_actions import PodActions
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies
    from kfp_gpuquota.cluster.kubernetes.unused_gpus.exporters import Exporters
    from kfp_gpuquota.engine.unused_gpus import Warned

UNUSED: Final = "GpusUnused"
USED_AGAIN: Final = "GpusUsed"
NOT_SUSPENDED: Final = "NotSuspended"
NOTEBOOK_VERSION: Final = "kubeflow.org/v1"
NOTEBOOKS: Final = f"/apis/{NOTEBOOK_VERSION}/notebooks"
STOPPED: Final = "kubeflow-resource-stopped"
LAST_ACTIVITY: Final = "notebooks.kubeflow.org/last-activity"

log = logging.getLogger(__name__)


class UnusedWorkloads:
    """One per controller. `state()` is what plans are made of, None before there is one.

    `quota_changed(team)` is called when what is counted of a team has changed; `now()` is in seconds since the epoch.
    """

    def __init__(
        self,
        exporters: Exporters,
        rules: CurrentRules,
        policies: CurrentPolicies,
        plain: PlainPods,
        elastic: ElasticJobs,
        actions: PodActions,
        writer: Writer,
        events: Recorder,
        planner: Planner,
        *,
        state: Callable[[], scheduler.State | None],
        quota_changed: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._exporters, self._rules, self._policies = exporters, rules, policies
        self._plain, self._elastic, self._actions = plain, elastic, actions
        self._writer, self._events, self._planner = writer, events, planner
        self._state, self._quota_changed, self._now = state, quota_changed, now
        self._unused = UnusedGpus()
        self._notebooks: dict[tuple[str, str], Metadata] = {}
        self._reported: set[str] = set()  # workloads whose last event of ours says that they are unused
        self._in_use: set[str] = set()  # unused workloads whose owner has others that are in use
        self._steps: dict[str, int] = {}  # of trainings at the last look
        self._counted: dict[str, set[str]] = {}  # the uids of what is counted, by team

    # Objects

    def put_notebook(self, found: Notebook) -> None:
        """Process a new or changed Notebook."""
        self._notebooks[found.metadata.namespace, found.metadata.name] = found.metadata

    def drop_notebook(self, uid: str) -> None:
        """Process the deletion of a Notebook."""
        for key in [key for key, meta in self._notebooks.items() if meta.uid == uid]:
            del self._notebooks[key]

    def stored_of(self, team: str) -> tuple[UnusedWorkload, ...]:
        """Return what is counted of a team's workloads, for its status."""
        counted = self._unused.counted()
        return stored({uid: counted[uid] for uid in self._counted.get(team, ()) if uid in counted}, self._now())

    # Looking

    def restore(self, quotas: Iterable[GpuQuota]) -> None:
        """Continue what an earlier controller has counted, before any status is written."""
        for quota in quotas:
            self._unused.restore({one.uid: counted_of(one) for one in quota.status.unused})
            self._counted[quota.metadata.name] = {one.uid for one in quota.status.unused}
            self._reported |= {one.uid for one in quota.status.unused if one.warned_at is not None}

    async def run(self) -> None:
        """Look at the workloads again and again."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("workloads whose GPUs are unused are looked at again")
            source = self._rules.rules.gpu_use
            await asyncio.sleep(OFF_S if source is None else source.interval_s)

    async def look(self) -> None:
        """Measure once, and do what follows."""
        source, ruled = self._rules.rules.gpu_use, self._ruled()
        if source is not None:
            self._unused.longest_gap_s = self._unused.unmeasured_s = source.longest_gap_s
            if ruled:
                await self._exporters.look(source, {pod.node for one, _ in ruled.values() for pod in one.pods})
                ruled = self._ruled()  # some have ended in the meantime
        observed = {uid: self._observed(one, policy) for uid, (one, policy) in ruled.items()}
        self._steps = {uid: step for uid in observed if (step := self._step_of(uid)) is not None}
        verdicts = self._unused.observe(observed, self._now())
        self._reported &= ruled.keys()
        for uid in [uid for uid in self._reported if observed[uid].used]:
            self._reported.discard(uid)
            self._record(ruled[uid][0], USED_AGAIN, "its GPUs are used again", warning=False)
        for warned in verdicts.warn:
            self._warn(ruled[warned.uid][0], warned)
        unused = frozenset(pod.uid for warned in verdicts.suspend for pod in ruled[warned.uid][0].pods)
        for warned in verdicts.suspend:
            self._suspend(ruled[warned.uid][0], warned, unused)
        self._in_use &= self._unused.warned.keys()
        self._keep_true()
        self._note_counted(ruled)
        await self._suspend_for_others([(ruled[one.uid][0], one) for one in verdicts.preemptible])

    def _ruled(self) -> dict[str, tuple[Workload, WorkloadPolicy]]:
        """Return the workloads to which a rule applies, if anything measures them."""
        policies = [policy for policy in self._policies.all if policy.idle is not None]
        if not policies or self._rules.rules.gpu_use is None:
            return {}
        found: dict[str, tuple[Workload, WorkloadPolicy]] = {}
        for workloads in (
            plain_workloads(self._plain.holding()),
            elastic_workloads(self._elastic.book, self._elastic.workers.pods),
        ):
            for one in workloads:
                if (policy := idle_rule_of(one.namespace, one.kind, policies)) is not None:
                    found[one.uid] = one, policy
        return found

    def _observed(self, one: Workload, policy: WorkloadPolicy) -> Observed:
        meta = self._notebooks.get(one.notebook) if one.stop is Stop.NOTEBOOK else None
        active_at = max(one.started, 0.0 if meta is None else _activity(meta, self._now()))
        return Observed(self._uses(one), policy.idle, policy.name, active_at)

    def _uses(self, one: Workload) -> bool | None:
        """Return whether a GPU was used, or a training has advanced; None if one of its GPUs was not measured."""
        if (step := self._step_of(one.uid)) is not None and step != self._steps.get(one.uid, step):
            return True
        measured = [self._exporters.used(pod) if pod.running else None for pod in one.pods]
        return True if True in measured else None if None in measured else False

    def _step_of(self, uid: str) -> int | None:
        job = self._elastic.book.jobs.get(uid)
        return None if job is None or job.status.progress is None else job.status.progress.step

    # What follows

    def _warn(self, one: Workload, warned: Warned) -> None:
        reason = _warning(one, warned)
        if one.stop is Stop.ELASTIC_JOB:
            job = self._elastic.book.jobs[one.uid]
            with self._elastic.decisions.decide() as recorder:
                recorder.note(job, EventKind.GPUS_UNUSED, reason=reason)
                recorder.record(with_status(job, reason=reason))
        self._record(one, UNUSED, reason.message)
        self._reported.add(one.uid)

    def _keep_true(self) -> None:
        """Record the warning that holds as the job's reason, and that none does (also one of an earlier controller)."""
        for uid, job in list(self._elastic.book.jobs.items()):
            one = self._unused.warned.get(uid)
            wanted = None if one is None else one.warning
            if job.runs and job.status.reason != wanted and (one is not None or job.status.gpus_unused):
                self._elastic.book.record(with_status(job, reason=wanted))

    def _note_counted(self, ruled: Mapping[str, tuple[Workload, WorkloadPolicy]]) -> None:
        """Have the status written of the teams of whose workloads something is counted, or was."""
        before, self._counted = self._counted, {}
        for uid in self._unused.since:
            self._counted.setdefault(ruled[uid][0].namespace, set()).add(uid)
        for team in before.keys() | self._counted.keys():
            self._quota_changed(team)

    def _suspend(self, one: Workload, warned: Warned, unused: frozenset[str], needed_by: str = "") -> None:
        """Suspend a workload, or an owner of several of which `unused` has all pods."""
        reason = warned.suspension(needed_by).message
        match one.stop:
            case Stop.ELASTIC_JOB:
                self._suspend_job(one, reason)
            case Stop.NOTEBOOK:
                self._stop_notebook(one, reason)
            case Stop.OWNER:
                self._actions.suspend_owner(one.pods, reason, partial(self._not_suspended, one), unused)
            case Stop.NEVER:
                self._unused.forget(one.uid)  # its owner is warned again

    def _suspend_job(self, one: Workload, reason: str) -> None:
        state = self._elastic.book.runtime_states.get(one.uid)
        if state is None or state.object.spec.suspend:
            return
        self._submit(one, elastic_suspension(state.object, reason), reason)

    def _stop_notebook(self, one: Workload, reason: str) -> None:
        meta = self._notebooks.get(one.notebook)
        if meta is None:
            self._not_suspended(one, f"there is no Notebook {one.notebook[1]}")
        elif STOPPED not in (meta.annotations or {}):
            at = datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            notes = {STOPPED: at, labels.SUSPENDED: reason}
            path = join(collection(NOTEBOOK_VERSION, meta.namespace, "notebooks"), meta.name)
            self._submit(one, _patch(path, meta, notes), reason)

    def _submit(self, one: Workload, write: Write, reason: str) -> None:
        done = partial(self._record, one, SUSPENDED_UNUSED, f"{reason}; it is suspended until a user resumes it")
        self._writer.submit(write, lambda _: done(), lambda error: self._failed(one, error))

    def _failed(self, one: Workload, error: Exception) -> None:
        log.warning("%s/%s could not be suspended, and is tried again: %s", one.namespace, one.name, error)

    def _not_suspended(self, one: Workload, why: str, *, in_use: bool = False) -> None:
        if in_use and one.uid in self._in_use:
            return
        if in_use:
            self._in_use.add(one.uid)  # it is requested again until the others are unused, too
        else:
            self._unused.forget(one.uid)  # its owner is warned again
        self._record(one, NOT_SUSPENDED, f"its GPUs are unused, but it cannot be suspended: {why}")

    def _record(self, one: Workload, event: str, message: str, *, warning: bool = True) -> None:
        """Record an event on the objects that the workload's owner looks at."""
        if one.stop is Stop.ELASTIC_JOB:
            if (state := self._elastic.book.runtime_states.get(one.uid)) is not None:
                meta = state.object.metadata
                subject = Subject("ElasticJob", meta.name, meta.namespace, meta.uid, labels.API_VERSION)
                self._events.record(subject, event, message, warning=warning)
            return
        found = self._notebooks.get(one.notebook) if one.stop is Stop.NOTEBOOK else None
        if found is not None:
            subject = Subject("Notebook", found.name, found.namespace, found.uid, NOTEBOOK_VERSION)
            self._events.record(subject, event, message, warning=warning)
        self._events.record(one.pods[0].subject, event, message, warning=warning, copy=found is not None)

    # For others

    async def _suspend_for_others(self, ones: Sequence[tuple[Workload, Warned]]) -> None:
        """Suspend the fewest of these workloads, the longest unused first, that make a waiting job start."""
        ones = [(one, warned) for one, warned in ones if one.stop is not Stop.NEVER]
        state = self._state()
        if not ones or state is None or not state.ledger.has_waiting:
            return
        removals = {warned.uid: self._removal(one) for one, warned in ones}
        now = self._now()

        def compute() -> bytes:
            def starts_without(uids: Sequence[str]) -> tuple[str, ...]:
                events = [event for uid in uids for event in removals[uid]]
                return scheduler.what_if(state, events, now).starts

            needed, starts = fewest([warned.uid for _, warned in ones], starts_without)
            return msgspec.json.encode((tuple(needed), state.jobs[starts[0]].queue.name if starts else ""))

        try:
            answer = await self._planner.aside(compute)
        except (OSError, TimeoutError, ClusterUnavailableError) as error:
            log.warning("no workload is suspended for others: %s", error or type(error).__name__)
            return
        needed, team = msgspec.json.decode(answer, type=tuple[tuple[str, ...], str])
        unused = frozenset(pod.uid for one, _ in ones for pod in one.pods)
        for one, warned in ones:
            if warned.uid in needed and self._unused.warned.get(warned.uid) == warned:
                self._suspend(one, warned, unused, needed_by=team)

    def _removal(self, one: Workload) -> list[scheduler.Event]:
        """Return the events of a suspension: its jobs of the scheduler are removed, and its workers have exited."""
        if one.stop is Stop.ELASTIC_JOB:
            workers = [record.worker.id for record in self._elastic.book.alive_of(one.uid)]
            return [scheduler.JobRemoved(one.uid), *map(scheduler.WorkerGone, workers)]
        members = [self._plain.members[pod.uid] for pod in one.pods if pod.uid in self._plain.members]
        jobs = dict.fromkeys(member.job.uid for member in members if member.job is not None)
        return [*map(scheduler.JobRemoved, jobs), *(scheduler.WorkerGone(member.view.uid) for member in members)]


def elastic_suspension(job: ElasticJob, reason: str) -> Write:
    """Return the patch that suspends an ElasticJob for `reason`, unless it has changed since."""
    meta = job.metadata
    path = paths.job(meta.namespace, meta.name)
    return _patch(path, meta, {labels.SUSPENDED: reason}, spec={"suspend": True})


def _patch(path: str, meta: Metadata, notes: Mapping[str, str], **more: object) -> Write:
    """Return the patch of an object's annotations, and `more`, unless it has changed since."""
    changed = {"uid": meta.uid, "resourceVersion": meta.resource_version, "annotations": notes}
    return Write(
        verb="PATCH",
        path=path,
        about=f"{meta.namespace}/{meta.name}",
        lane=Lane.RELEASE,
        body={"metadata": changed, **more},
        content_type=MERGE_PATCH,
    )


def _activity(meta: Metadata, now: float) -> float:
    """Return when a notebook was last active as Kubeflow has found; 0 if it has not, or the text is no time."""
    try:
        at = datetime.fromisoformat((meta.annotations or {}).get(LAST_ACTIVITY, ""))
    except ValueError:
        return 0.0
    return min(now, at.timestamp()) if at.tzinfo is not None else 0.0


def _warning(one: Workload, warned: Warned) -> Reason:
    reason = warned.warning
    if one.stop is not Stop.NEVER:
        return reason
    text = f"{reason.message.partition(';')[0]}; delete what is not needed: others wait for GPUs"
    return msgspec.structs.replace(reason, message=text)
