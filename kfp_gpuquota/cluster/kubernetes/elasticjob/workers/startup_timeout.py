"""Releases the GPUs of workers that do not start, and requests them again after a pause.

Invariant: a release is written to the job's status first, and carried out after the watch has delivered that status. So
a controller that is killed at any moment leaves either nothing, or a release that the next controller carries out.

A pod's status does not show that a volume cannot be mounted or that the network cannot be set up; only the kubelet's
events do. They are read for a worker without a reported failure after a while, for one worker of a job at a time.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Project, Reason, ReasonCode
from kfp_gpuquota.cluster.admission import check_fits
from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import last_warning, list_warnings_request
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers import startup_backoff
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_backoff import (
    LateWorkers,
    ReadyRules,
    Retry,
    StartingWorker,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import ElasticJobEvents, StatusRequests
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_events import WorkerPodEvents
    from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_manager import WorkerPods
    from kfp_gpuquota.engine.decisions import Decisions
    from kfp_gpuquota.engine.records import JobRecord

LOOK_AFTER_S: Final = 0.5  # simultaneous changes are processed together
READ_EVENTS_AFTER_S: Final = 30.0
READ_EVENTS_AGAIN_S: Final = 60.0
AT_FAULT_FROM: Final = 2  # from this attempt on nodes may be at fault, even if no worker is up elsewhere

log = logging.getLogger(__name__)


class Readiness:
    """Startup timeouts of all jobs."""

    def __init__(
        self,
        book: ElasticJobStore,
        writer: Writer,
        workers: WorkerPods,
        decisions: Decisions,
        pod_events: WorkerPodEvents,
        rules: ReadyRules,
        *,
        statuses: StatusRequests,
        events: ElasticJobEvents,
    ) -> None:
        self._book, self._writer, self._pods, self._rules = book, writer, workers.pods, rules
        self._decisions, self._pod_events = decisions, pod_events
        self._statuses, self._events = statuses, events

    def look_soon(self, uid: str) -> None:
        """Check the job's workers soon, after a change."""
        self._look_in(uid, LOOK_AFTER_S)

    def announce(self, uid: str) -> None:
        """Defer a job that was submitted again until its retry time."""
        state = self._book.runtime_states[uid]
        last = max(filter(None, (state.requeue, state.grow)), key=lambda retry: retry.until or 0.0, default=None)
        if last is not None and (last.until or 0.0) > self._book.clock():
            self._defer(uid, last)

    def start_again(self, uid: str) -> None:
        """Reset the job's retries after its user resumed it or changed its template."""
        state, job = self._book.runtime_states[uid], self._book.jobs[uid]
        if (state.requeue is None and state.grow is None) or job.over:
            return
        state.requeue = state.grow = None
        self._book.emit(scheduler.JobDeferred(uid, 0.0, _reason("")))
        self._statuses.decided(uid)

    # Checks

    def _look_in(self, uid: str, delay_s: float) -> None:
        state, loop = self._book.runtime_states.get(uid), asyncio.get_running_loop()
        if state is None:
            return
        if state.look is not None:
            if state.look.when() <= loop.time() + delay_s:
                return
            state.look.cancel()
        state.look = loop.call_later(max(0.0, delay_s), self._look, uid)

    def _look(self, uid: str) -> None:
        state, job, now = self._book.runtime_states.get(uid), self._book.jobs.get(uid), self._book.clock()
        if state is None:
            return
        state.look = None
        if job is None or job.status.phase.final or job.intent is not Intent.RUN:
            return
        workers = self._workers_of(job, state, now)
        self._reset_retries(job, state, workers)
        self._read_events(job, state, workers, now)
        rules = self._rules_of(state)
        if not rules.timeout_s:
            return
        trains = bool(job.members)
        # A finished training needs no more workers: it ends with the last worker that still starts.
        needed = 0 if trains and job.completing else _needed(job)
        lost = startup_backoff.given_up(workers, needed=needed, trains=trains, timeout_s=rules.timeout_s, now=now)
        if lost is not None:
            self._record_release(job, state, lost, len(workers), rules, now)
        elif (over_at := startup_backoff.next_look(workers, rules.timeout_s)) is not None:
            self._look_in(uid, over_at - now)

    def _workers_of(self, job: JobRecord, state: RuntimeState, now: float) -> list[StartingWorker]:
        before, state.complaints = state.complaints, {}
        found = [
            self._starting_worker(state, record.worker.id, record.worker.index, before, now)
            for record in self._book.alive_of(job.uid)
            if not record.released and record.worker.id in self._pods
        ]
        if before != state.complaints:
            self._statuses.changed(job.uid)
        return found

    def _starting_worker(
        self, state: RuntimeState, worker: str, index: int, before: dict[int, tuple[float, str]], now: float
    ) -> StartingWorker:
        pod = self._pods[worker]
        if pod.running:
            return StartingWorker(index, pod.node, up=True)
        if pod.start_failure:
            since = before[index][0] if index in before else now
            state.complaints[index] = since, pod.start_failure
            return StartingWorker(index, pod.chosen_node, up=False, since=since, start_failure=pod.start_failure)
        silent_since = None if pod.prepared else pod.created
        reported = state.last_warnings.get(worker, "") if pod.bound else "kube-scheduler has not bound it"
        return StartingWorker(index, pod.chosen_node, up=False, since=silent_since, start_failure=reported)

    def _reset_retries(self, job: JobRecord, state: RuntimeState, workers: list[StartingWorker]) -> None:
        """Reset the retries after workers have started."""
        if state.requeue is not None and startup_backoff.has_started(workers, _needed(job)):
            state.requeue = None
            self._statuses.changed(job.uid)
        grown = [w for w in workers if w.up and state.grow and self._created(job, w.index) > state.grow.at]
        if grown:
            state.grow = None
            self._statuses.changed(job.uid)

    def _created(self, job: JobRecord, index: int) -> float:
        return self._pods[f"{job.uid}-{index}"].created

    def _rules_of(self, state: RuntimeState) -> ReadyRules:
        own = state.object.spec.workers_ready_timeout_seconds
        return self._rules if own is None else msgspec.structs.replace(self._rules, timeout_s=own)

    # Events of workers without a reported failure

    def _read_events(self, job: JobRecord, state: RuntimeState, workers: list[StartingWorker], now: float) -> None:
        silent = [w for w in workers if w.since is not None and not w.start_failure]
        if not silent:
            return
        oldest = min(silent, key=lambda w: w.since or 0.0)
        silence_s = min(READ_EVENTS_AFTER_S, self._rules_of(state).timeout_s / 2 or READ_EVENTS_AFTER_S)
        at = max((oldest.since or 0.0) + silence_s, state.events_read_at + min(READ_EVENTS_AGAIN_S, silence_s))
        if now < at:
            self._look_in(job.uid, at - now)
            return
        state.events_read_at = now
        worker = f"{job.uid}-{oldest.index}"
        read = list_warnings_request(self._pods[worker].namespace, self._pods[worker].uid)
        self._writer.submit(read, partial(self._on_warnings, job.uid, worker), lambda _: self.look_soon(job.uid))

    def _on_warnings(self, uid: str, worker: str, answer: bytes) -> None:
        state = self._book.runtime_states.get(uid)
        if state is not None and worker in self._pods and (reported := last_warning(answer)):
            state.last_warnings[worker] = state.start_failure[worker] = reported
            self._statuses.changed(uid)
        self.look_soon(uid)

    # Decisions

    def _record_release(
        self, job: JobRecord, state: RuntimeState, lost: LateWorkers, workers: int, rules: ReadyRules, now: float
    ) -> None:
        """Record the release in the status; `carry_out` performs it after it was stored."""
        late = {worker.index for worker in lost.late}
        if lost.whole:
            if state.requeue is not None and state.requeue.attempt == job.attempt:
                return
            state.requeue = startup_backoff.requeued(lost, workers, state.requeue, rules, job.attempt, now)
        else:
            if state.grow is not None and late <= set(state.grow.workers):
                return
            state.grow = startup_backoff.shrunk(lost, state.grow, rules, now)
        self._statuses.decided(job.uid)

    def carry_out(self, uid: str) -> None:
        """Carry out a release that the API server has stored."""
        state, job = self._book.runtime_states.get(uid), self._book.jobs.get(uid)
        if state is None or job is None or job.status.phase.final or job.intent is not Intent.RUN:
            return
        stored = state.object.status
        if state.requeue and stored.requeue_state and state.requeue.attempt == job.attempt:
            if stored.requeue_state.count == state.requeue.count:
                self._stop(job, state, state.requeue)
        elif state.grow and stored.grow_state and stored.grow_state.workers == state.grow.workers:
            self._shrink(job, state, state.grow)

    def _stop(self, job: JobRecord, state: RuntimeState, retry: Retry) -> None:
        pods = self._not_released(job)
        if sum(pod.running for pod in pods) >= _needed(job):
            self.look_soon(job.uid)  # it has started in the meantime
        elif retry.until is None:
            self._warn_user(state, retry.message)
            self._decisions.stop(job, Intent.FAIL, _reason(retry.message))
        elif pods:
            self._warn_user(state, retry.message)
            self._note_nodes(job, state, pods, retry.count)
            self._defer(job.uid, retry)
            self._decisions.stop(job, Intent.REQUEUE, _reason(retry.message))

    def _shrink(self, job: JobRecord, state: RuntimeState, retry: Retry) -> None:
        pods = self._not_released(job)
        late = [pod for pod in pods if pod.index in retry.workers and not pod.running]
        if not late:
            return
        self._warn_user(state, retry.message)
        self._note_nodes(job, state, pods, retry.count)
        self._defer(job.uid, retry)
        self._decisions.explain(job.uid, _reason(retry.message))
        for pod in late:
            self._pod_events.remake(pod)

    def _not_released(self, job: JobRecord) -> list[PodView]:
        alive = (record for record in self._book.alive_of(job.uid) if not record.released)
        return [self._pods[record.worker.id] for record in alive if record.worker.id in self._pods]

    def _note_nodes(self, job: JobRecord, state: RuntimeState, pods: list[PodView], count: int) -> None:
        """Exclude the nodes of failed workers if they may be at fault and the job fits on the other nodes."""
        if count < AT_FAULT_FROM and not any(pod.running for pod in pods):
            return
        nodes = [node for node in self._book.nodes.values() if node.ready]
        for pod in (pod for pod in pods if not pod.running and pod.chosen_node):
            left = [node for node in nodes if node.name != pod.node and node.name not in state.excluded_nodes]
            try:
                check_fits(job.spec, Project(name=job.spec.project), left)
            except InvalidFieldError:
                continue
            self._events.node_failed(pod)

    def _defer(self, uid: str, retry: Retry) -> None:
        self._book.emit(scheduler.JobDeferred(uid, retry.until or 0.0, _reason(retry.message)))

    def _warn_user(self, state: RuntimeState, message: str) -> None:
        meta = state.object.metadata
        job = Subject("ElasticJob", meta.name, meta.namespace, meta.uid, labels.API_VERSION)
        self._events.workers_not_ready(job, message)


def _needed(job: JobRecord) -> int:
    """Return the number of workers with which the job starts."""
    return job.spec.workers_of(job.spec.smallest)


def _reason(message: str) -> Reason:
    return Reason(code=ReasonCode.PODS_NOT_READY, message=message)
