"""Reconciles ElasticJobs: creates and deletes their pods as planned, and records the results.

    objects, pods ─► records ─► scheduler's events                   reconciler, pod_events
    plans ─► records ─► pods created and deleted, membership target  the engine's decisions, pod_manager
    membership ─► records ─► status                                  the engine's notices, status
    time ─► records                                                  timers

Invariant: a pod that is being deleted, by any client, is a released worker. To release a worker its pod is deleted at
once with the job's grace period: the membership lets it leave, the kubelet kills it after the grace period, and the
deletion is the persistent record of the decision. Rejected: an annotation first, which would need a second write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase, Reason, ReasonCode
from kfp_gpuquota.api.project import check_run_time
from kfp_gpuquota.api.resources import WHOLE_GPU, counted_amounts, part_weights
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import MERGE_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import StatusWriter
from kfp_gpuquota.cluster.kubernetes.convert.elastic_jobs import claims_devices, uncounted
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.reporting import JobMembership
from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.conversion import record_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.job_status import job_status
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.size_history import expected_start_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.timers import ElasticJobTimers
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_events import WorkerPodEvents
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_manager import WorkerPods
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_timeout import Readiness
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.conditions import any_is_true
from kfp_gpuquota.engine import requests
from kfp_gpuquota.engine.decisions import Decisions
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.lifecycle import missing_workers, settled
from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kfp_gpuquota.api import Project, Worker
    from kfp_gpuquota.api.resources import Resources as Amounts
    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import Built
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.convert.elastic_jobs import CountedOf
    from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import LimitRanges
    from kfp_gpuquota.cluster.kubernetes.convert.volumes import Volumes
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import ElasticJobEvents
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import PodSettings
    from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_backoff import ReadyRules
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import PodSpec
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
    from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.cluster.kubernetes.sharing.reservations import Reservations
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord


CLAIMS_CHANGED: Final = "the ResourceClaims of its workers request other devices than it counts"
REQUEUED_FOR_CLAIMS: Final = Reason(code=ReasonCode.USER, message=f"{CLAIMS_CHANGED}; it returns to the queue")
LONGEST_WHY: Final = 500  # of a suspension: a user may write the annotation, too


class ElasticJobs:
    """All ElasticJobs. All methods run in the event loop.

    `limits` and `volumes` add default requests and volumes' nodes to a job's specification, `counted` what it requests
    of resources that count as GPUs, `classes` the DeviceClasses of which it claims devices, `rules` cap its grace
    period, `projects` its run time. `page_url` is the address of the web page. Its parts report to it as
    `JobPartEvents`.
    """

    def __init__(
        self,
        book: ElasticJobStore,
        allocator: DeviceAllocator,
        writer: Writer,
        settings: PodSettings,
        reservations: Reservations,
        unpinned: UnpinnedPods,
        *,
        limits: LimitRanges,
        volumes: Volumes,
        rules: CurrentRules,
        projects: Mapping[str, Project],
        ready: ReadyRules,
        written_pods: WrittenPods,
        events: ElasticJobEvents,
        counted: CountedOf = uncounted,
        classes: Callable[[ElasticJob], Sequence[str]] = lambda _: (),
        epoch: int = 0,
        page_url: str = "",
    ) -> None:
        self._claimed, self._writer = counted, writer
        self.book, self._settings, self._page_url = book, settings, page_url
        self._limits, self._volumes, self._rules, self._projects = limits, volumes, rules, projects
        self.statuses = statuses = StatusWriter(writer, self._status)
        book.changed, book.decided = statuses.changed, self._decided
        self.workers = WorkerPods(
            book,
            writer,
            settings,
            reservations,
            unpinned,
            rules=rules,
            written_pods=written_pods,
            statuses=statuses,
            events=self,
            classes=classes,
        )
        self.membership = JobMembership(book, settings, self.workers, statuses, epoch=epoch)
        self.decisions = Decisions(book, self.membership.service, self)
        self._timers = ElasticJobTimers(book, writer, self.decisions, self)
        self.pod_events = WorkerPodEvents(book, allocator, self.workers, self.decisions, statuses=statuses)
        self.readiness = Readiness(
            book, writer, self.workers, self.decisions, self.pod_events, ready, statuses=statuses, events=events
        )

    def _status(self, uid: str) -> Built | None:
        return job_status(self.book, self.membership, uid, self._page_url)

    def start(self) -> None:
        """Continue the work of an earlier controller, after all objects have been listed."""
        self.book.listed()
        self.pod_events.start()
        self.book.examine_conditions()
        self.membership.begin_epoch()
        for uid, job in list(self.book.jobs.items()):
            alive = self.book.alive_of(uid)
            if alive:
                self.membership.open(job)
                self.workers.renew_secret(uid)
                self.workers.isolate(uid)
            elif not job.status.phase.final and job.attempt and job.status.phase is not Phase.SUSPENDED:
                self.book.record(settled(job, (), self.book.clock()))
            if alive and job.intent is not Intent.RUN:
                self.decisions.release([record.worker.id for record in alive])
            elif alive and (missing := missing_workers(job, len(alive), len(self.book.runtime_states[uid].ended))):
                self.decisions.stop(job, Intent.REQUEUE, requests.workers_missing(job, missing))
            self._decided(uid)
            self._follow_spec(uid)
            for record in alive:
                if (pod := self.workers.pods.get(record.worker.id)) is not None:
                    self._check_claims(pod)
            self.readiness.carry_out(uid)
            self.readiness.look_soon(uid)
            if self.book.runtime_states[uid].object.metadata.deletion_timestamp is not None:
                self.drop_job(uid)

    def close(self) -> None:
        """Cancel all timers: what is due is the next controller's."""
        self.statuses.close()
        self._timers.close()

    def trust(self, authority: bytes) -> None:
        """Use another certificate authority: replace the Secrets of running jobs."""
        self._settings.authority = authority
        for uid in self.book.jobs if self.pod_events.started else ():
            if self.book.alive_of(uid):
                self.workers.renew_secret(uid)

    def rules_changed(self) -> None:
        """Apply the cluster's rules to running jobs: they are isolated from now on, if the rules ask for it."""
        for uid in self.book.jobs if self.pod_events.started else ():
            if self.book.alive_of(uid):
                self.workers.isolate(uid)
        for uid in list(self.book.jobs):
            self._follow_user(uid)

    def owns(self, pod: PodView) -> bool:
        """Return whether the pod is a worker of a tracked job, which only one of the job's namespace can be."""
        job = self.book.jobs.get(pod.job_uid)
        return job is not None and job.spec.project == pod.namespace

    def stop_unowned(self, pod: PodView) -> None:
        """Delete a worker with claims whose job was refused since it started: nobody counts what its claims request."""
        state = self.book.runtime_states.get(pod.job_uid)
        if state is not None and state.refused and pod.device_claims and pod.stage is Stage.ASSIGNED:
            self.workers.delete_pod(pod, pod.grace_s)

    def accounted(self, pod: PodView) -> bool:
        """Return whether an earlier controller has processed the worker's exit."""
        state = self.book.runtime_states.get(pod.job_uid)
        return state is not None and pod.stage is Stage.ENDED and pod.index in state.ended

    def avoid(self, uid: str, nodes: tuple[str, ...]) -> None:
        """Exclude these nodes for the job's next workers, instead of those excluded before."""
        if (state := self.book.runtime_states.get(uid)) is not None and uid in self.book.jobs:
            state.excluded_nodes = nodes
            self._emit_excluded_nodes(uid)

    def _emit_excluded_nodes(self, uid: str) -> None:
        job = self.book.jobs[uid]
        if not job.over:
            self.book.emit(scheduler.NodesBarred(uid, self.book.runtime_states[uid].excluded_nodes))

    # Objects

    def put_job(self, job: ElasticJob) -> bool:
        """Add or update a job; return whether more than its status has changed.

        One that was dropped exists until the finalizers of others have been removed.
        """
        uid = job.metadata.uid
        state = self.book.runtime_states.get(uid)
        if state is None:
            if job.metadata.deletion_timestamp is None or not self.pod_events.started:
                self._take_in(job)
            return True
        before, state.object = state.object, job
        if job.spec.lease != before.spec.lease:
            self._timers.renewed(uid)
        if state.refused:
            self._take_in(job)
            return True
        if job.spec.template != before.spec.template or (before.spec.suspend and not job.spec.suspend):
            self.readiness.start_again(uid)
        if job.spec != before.spec:
            self._follow_spec(uid)
            self._timers.set(uid)
            self.readiness.look_soon(uid)
        if job.metadata.deletion_timestamp is not None:
            self.drop_job(uid)
            return True
        self.readiness.carry_out(uid)
        return job.spec != before.spec

    def drop_job(self, uid: str) -> None:
        """Process a job's deletion: stop its workers; the job is dropped when all have exited."""
        state, job = self.book.runtime_states.get(uid), self.book.jobs.get(uid)
        if state is None:
            return
        if state.look is not None:
            state.look.cancel()
        if job is None:
            self.forget_job(uid)
        elif job.intent is not Intent.DELETE:
            self.decisions.stop(job, Intent.DELETE, requests.DELETED)

    def limits_changed(self, namespace: str) -> None:
        """Update the namespace's jobs ("": all) after its default requests, volumes or what counts as GPUs changed."""
        for uid, state in list(self.book.runtime_states.items()):
            if namespace not in {"", state.object.metadata.namespace}:
                continue
            if uid in self.book.jobs:
                self._follow_spec(uid)
            elif state.refused:
                self._take_in(state.object)

    def _take_in(self, job: ElasticJob) -> None:
        uid = job.metadata.uid
        state = self.book.runtime_states.setdefault(uid, RuntimeState(job))
        state.object, state.refused = job, ""
        try:
            record = self._record_of(job)
        except (GpuQuotaError, ValueError) as error:
            state.refused = str(error)
            self.statuses.changed(uid)
            return
        self.book.commit(Change(jobs={uid: record}))
        if record.status.phase is Phase.PENDING and (expected := expected_start_of(job.status.expected_start)):
            self.book.expected_starts[uid] = expected  # an earlier controller's, until there is one of this one
        if not record.over:
            self.readiness.announce(uid)
        self._follow_spec(uid)

    def _record_of(self, job: ElasticJob) -> JobRecord:
        """Return the job's record, with its grace period and run time by the rules of the cluster and its team.

        Raises InvalidFieldError.
        """
        record = self._with_run_time(
            job, record_of(job, self._limits.requests_in(job.metadata.namespace), self._volumes.terms, self._counted)
        )
        if counted_amounts(record.spec):
            self._rules.rules.refuse_shares_in(record.spec.node_pool)
        longest = self._rules.rules.reclaim.max_grace_s
        record = msgspec.structs.replace(record, user=self._rules.rules.user_of(job.metadata.labels))
        if record.spec.grace_period_s <= longest:
            return record
        spec = msgspec.structs.replace(record.spec, grace_period_s=longest)
        return msgspec.structs.replace(record, spec=spec)

    def _counted(self, job: ElasticJob, template: PodSpec, others: Amounts) -> tuple[Amounts, Amounts]:
        """Return what each worker requests, and its weights; of a restored job what it was accepted with.

        A template of claims that was deleted or exchanged meanwhile is then judged as by a controller that never
        stopped. Rejected: only with workers in the status, which is written after their pods.
        """
        had = job.status.counted_resources or {}
        restored = job.metadata.uid not in self.book.jobs and not self.pod_events.started
        if not restored or not had:
            try:
                return self._claimed(job, template, others)
            except GpuQuotaError:
                if not restored or not job.status.workers:
                    raise
        weights = dict(self._rules.rules.gpu_weights)
        amounts = tuple(sorted((dict(others) | had).items()))
        weights |= part_weights(had)
        return amounts, tuple((name, weights.get(name, WHOLE_GPU)) for name in sorted(had))

    def _with_run_time(self, job: ElasticJob, record: JobRecord) -> JobRecord:
        """Return the record with the run time that its team had for jobs without one when this one was accepted.

        Raises InvalidFieldError for a given one that is new, and longer than the team may have.
        """
        state, before = self.book.runtime_states[record.uid], self.book.jobs.get(record.uid)
        given, project = record.spec.max_runtime_s, self._projects.get(record.spec.project)
        accepted = before is not None or any_is_true(job.status.conditions, ("Accepted",))
        if not accepted:
            state.default_runtime_s = None if project is None else project.usual_runtime_s
        if given is None:
            spec = msgspec.structs.replace(record.spec, max_runtime_s=state.default_runtime_s)
            return msgspec.structs.replace(record, spec=spec)
        changed = given != before.spec.max_runtime_s if before is not None else not accepted
        if project is not None and changed:
            check_run_time("maxRuntimeSeconds", given, project)
        return record

    def _follow_spec(self, uid: str) -> None:
        """Apply changes of the specification: suspend, resume, and fields that may change while the job waits.

        Not before all pods are listed: a job that was suspended meanwhile would count as one without workers.
        """
        if self.book.jobs[uid].over or not self.pod_events.started:
            return
        self._resubmit(uid)
        job, suspend = self.book.jobs[uid], self.book.runtime_states[uid].object.spec.suspend
        why = (self.book.runtime_states[uid].object.metadata.annotations or {}).get(labels.SUSPENDED, "")[:LONGEST_WHY]
        if suspend and not job.suspended and not job.over:
            unused = Reason(code=ReasonCode.GPUS_UNUSED, message=why)
            self.decisions.stop(job, Intent.SUSPEND, unused if why else requests.SUSPENDED)
        elif job.suspended and not suspend:
            with self.decisions.decide() as recorder:
                recorder.resume(job)
        if why and not suspend:
            self._forget_suspension(uid)

    def _follow_user(self, uid: str) -> None:
        """Count the job as one of the user that its labels name now."""
        job = self.book.jobs[uid]
        user = self._rules.rules.user_of(self.book.runtime_states[uid].object.metadata.labels)
        if user != job.user:
            self.book.put_job(msgspec.structs.replace(job, user=user))
            if not job.over:
                self.book.emit(scheduler.UserChanged(uid, user))

    def _forget_suspension(self, uid: str) -> None:
        """Remove why the controller has suspended the job: its user has resumed it."""
        write = forgotten_suspension(self.book.runtime_states[uid].object)
        self._writer.submit(write, lambda _: None, lambda _: None)  # a job that has changed is read again

    def _resubmit(self, uid: str) -> None:
        """Apply a changed specification; a waiting job is submitted again with it, and keeps its age."""
        self._follow_user(uid)
        before, state = self.book.jobs[uid], self.book.runtime_states[uid]
        try:
            spec = self._record_of(state.object).spec
        except GpuQuotaError as error:
            state.held_back = error.message
            counts = claims_devices(state.object) or counted_amounts(before.spec)
            if counts and not self.book.alive_of(uid) and not state.uncountable:
                state.uncountable = True
                self.book.emit(scheduler.JobSuspended(uid))
            return
        if state.uncountable:
            state.uncountable, state.held_back = False, ""
            self.book.emit(scheduler.JobResumed(uid))
        if spec == before.spec:
            return
        if self.book.alive_of(uid):
            with self.decisions.decide() as recorder:
                recorder.update(before, spec)
            if counted_amounts(spec) != counted_amounts(before.spec):
                self._stop_for_claims(uid)
            return
        self.book.submit_again(msgspec.structs.replace(before, spec=spec))
        self.readiness.announce(uid)
        if self.book.runtime_states[uid].excluded_nodes:
            self._emit_excluded_nodes(uid)

    # Workers

    def put_pod(self, pod: PodView) -> None:
        """Process a new or changed pod of a worker."""
        self.pod_events.put_pod(pod)
        self._check_claims(pod)
        self.readiness.look_soon(pod.job_uid)

    def _check_claims(self, pod: PodView) -> None:
        """Return the job to the queue if its worker's claims request other devices than the job counts.

        A tenant may replace a template or a claim by another one of the same name at any time.
        """
        job = self.book.jobs.get(pod.job_uid)
        if not self.pod_events.started or not pod.device_claims or not pod.holds or job is None:
            return
        expected, actual = counted_amounts(job.spec), dict(pod.needs.others)
        claimed = {name: actual[name] for name in (*expected, *dict(pod.gpu_weights)) if actual.get(name)}
        if expected.keys() - dict((*self._rules.rules.gpu_weights, *part_weights(expected))).keys():
            return  # an administrator has removed it from the table: its workers stay
        refused = pod.problem and (expected or pod.claimed is not None or not pod.running)
        if refused or (claimed and claimed != expected):
            self._stop_for_claims(job.uid, pod.problem)

    def _stop_for_claims(self, uid: str, why: str = "") -> None:
        """Return the job to the queue, to be counted by what its template requests now; fail it if that is invalid."""
        job, state = self.book.jobs[uid], self.book.runtime_states[uid]
        if job.intent is not Intent.RUN or job.over:
            return
        try:
            self._record_of(state.object)
        except GpuQuotaError as error:
            why = why or error.message
        reason = Reason(code=ReasonCode.USER, message=f"{CLAIMS_CHANGED}: {why}") if why else None
        self.decisions.stop(job, Intent.FAIL if why else Intent.REQUEUE, reason or REQUEUED_FOR_CLAIMS)

    def drop_pod(self, pod: PodView) -> None:
        """Process the deletion of a worker's pod."""
        self.pod_events.drop_pod(pod)

    # Decisions

    def plan(self, plan: scheduler.Plan) -> None:
        """Carry out the plan's decisions about ElasticJobs, and record what its moves cost; others are ignored here."""
        jobs = self.book.jobs
        own = scheduler.Plan(
            bind=tuple(b for b in plan.bind if b.job in jobs),
            resize=tuple(r for r in plan.resize if r.job in jobs),
            evict=tuple(e for e in plan.evict if e.job in jobs),
            move=tuple(m for m in plan.move if m.job in jobs),
            promises=plan.promises,
            victims=plan.victims,
            waiting={uid: reason for uid, reason in plan.waiting.items() if uid in jobs},
            defragmented=plan.defragmented,
        )
        self.decisions.plan(own)

    # As `engine.protocols.Workers`

    def start_workers(self, job: JobRecord, workers: Sequence[WorkerRecord]) -> None:
        """Create the workers' pods, and open the job's membership at its start."""
        if not self.membership.service.is_open(job.uid):
            self.book.runtime_states[job.uid].start_again()
            self.membership.open(job)
        self.workers.make(job.uid, [record.worker for record in workers])

    def ask_to_leave(self, record: WorkerRecord) -> None:
        """Delete the worker's pod with the job's grace period."""
        worker = record.worker
        self.workers.delete(worker.id, self.book.jobs[worker.job_uid].spec.grace_period_s)

    def forget_job(self, uid: str) -> None:
        """Drop the state of a job that was deleted."""
        self._timers.forget(uid)
        del self.book.runtime_states[uid]

    # As `JobPartEvents`

    def job_read(self, job: ElasticJob) -> None:
        """Process a job's object that was read beside the watch."""
        self.put_job(job)

    def pod_not_created(self, worker: Worker) -> None:
        """Process that no pod was created for the worker."""
        self.pod_events.never_made(worker)

    def _decided(self, uid: str) -> None:
        """Write the job's status at once, and recompute its deadlines."""
        if self.pod_events.started:
            self.statuses.decided(uid)
            self._timers.set(uid)


def forgotten_suspension(job: ElasticJob) -> Write:
    """Return the patch that removes why the controller has suspended the job, unless it has changed since."""
    meta = job.metadata
    notes = {labels.SUSPENDED: None}
    body = {"metadata": {"uid": meta.uid, "resourceVersion": meta.resource_version, "annotations": notes}}
    path, about = paths.job(meta.namespace, meta.name), f"{meta.namespace}/{meta.name}"
    return Write(verb="PATCH", path=path, about=about, body=body, content_type=MERGE_PATCH)
