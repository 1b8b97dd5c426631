"""The life of ElasticJobs: their pods are made and told to go as plans say, and what becomes of them is recorded.

    objects, pods ─► records ─► scheduler's events                   here, elastic_worker_news
    plans ─► records ─► pods made and deleted, membership told       elastic_decisions, elastic_workers
    membership ─► records ─► status                                  elastic_membership, elastic_status
    time ─► records                                                  elastic_clock

A worker that is told to go has its pod deleted with the job's grace period, at once: the membership lets it leave by
agreement, the kubelet kills it when the grace is over, and the deletion is the record of the decision. So a pod that is
being deleted, by whomever, is a worker that was told to go.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase, Reason, ReasonCode, Worker
from kfp_gpuquota.cluster.job_book import Change
from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.elasticjob.decisions import Decisions
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import JobMembership
from kfp_gpuquota.cluster.kubernetes.elasticjob.pod_events import WorkerNews
from kfp_gpuquota.cluster.kubernetes.elasticjob.pod_manager import WorkerPods
from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import Facts
from kfp_gpuquota.cluster.kubernetes.elasticjob.startup_timeout import Readiness
from kfp_gpuquota.cluster.kubernetes.elasticjob.status import record_of, unmanaged_size, without_pods
from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
from kfp_gpuquota.cluster.kubernetes.elasticjob.timers import JobClock
from kfp_gpuquota.cluster.records import Intent, with_status
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.api.affinity import NodeTerm
    from kfp_gpuquota.cluster.kubernetes.client.event_recorder import Subject
    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import Seats
    from kfp_gpuquota.cluster.kubernetes.elasticjob.pod_builder import PodSettings
    from kfp_gpuquota.cluster.kubernetes.elasticjob.startup_backoff import ReadyRules
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
    from kfp_gpuquota.cluster.records import JobRecord


class ElasticJobs:
    """All ElasticJobs; also what the membership service tells its news to. All of it runs in the event loop.

    `noted(pod)` gets the answers of writes, `changed(uid)` is called where a job's status is to be written,
    `decided(uid)` where that is urgent, `requests_in(namespace)` is what containers request there that say nothing,
    `volume_terms(namespace, claims)` the nodes on which these volumes can be mounted,
    `avoided(pod)` keeps its job's next workers off its node, and `told(subject, message)` warns users.
    """

    def __init__(
        self,
        tell: Callable[[scheduler.Event], None],
        seats: Seats,
        nodes: Mapping[str, Node],
        writer: Writer,
        settings: PodSettings,
        *,
        ready: ReadyRules,
        noted: Callable[[Pod], None],
        changed: Callable[[str], None],
        decided: Callable[[str], None],
        requests_in: Callable[[str], Mapping[str, Any]],
        volume_terms: Callable[[str, tuple[str, ...]], tuple[NodeTerm, ...]],
        avoided: Callable[[PodView], None],
        told: Callable[[Subject, str], None],
        epoch: int = 0,
    ) -> None:
        self._requests_in, self._volume_terms, self._settings = requests_in, volume_terms, settings
        self.max_grace_s: Callable[[], float] = lambda: math.inf  # of a worker that is told to go
        self.book = Book(tell, seats, nodes)
        self._tell, self._changed, self._decided = tell, changed, decided
        self.membership = JobMembership(self.book, settings, kill=self._kill, changed=changed, epoch=epoch)
        self.workers = WorkerPods(
            self.book, writer, settings, tell=tell, noted=noted, changed=changed, given_up=self._never_made
        )
        parts = self.membership, self.workers
        self.decisions = Decisions(self.book, *parts, changed=changed, decided=self._after_change)
        self.news = WorkerNews(self.book, seats, *parts, self.decisions, changed=changed, moved=self._workers_changed)
        self.readiness = Readiness(
            self.book,
            writer,
            self.workers.pods,
            self.decisions,
            self.news,
            ready,
            tell=tell,
            told=told,
            avoid=avoided,
            changed=changed,
            decided=decided,
        )
        self._clock = JobClock(self.book, writer, stop=self.decisions.stop, found=self.put_job)

    def start(self) -> None:
        """All has been listed: take up what an earlier controller left."""
        self.news.started = True
        self.membership.begin_epoch()
        for uid, job in list(self.book.jobs.items()):
            alive = self.book.alive_of(uid)
            if alive:
                self.membership.open(job)
                self.workers.renew_secret(uid)
            elif not job.status.phase.final and job.attempt and job.status.phase is not Phase.SUSPENDED:
                self.book.record(without_pods(job, time.time()))
            if alive and job.intent is not Intent.RUN:
                self.decisions.stop_all([record.worker.id for record in alive])
            self._after_change(uid)
            self.readiness.carry_out(uid)
            self.readiness.look_soon(uid)

    def trust(self, authority: bytes) -> None:
        """The workers' connections are served with a certificate of another authority from now on."""
        self._settings.authority = authority
        for uid in self.book.jobs if self.news.started else ():
            if self.book.alive_of(uid):
                self.workers.renew_secret(uid)

    def knows(self, pod: PodView) -> bool:
        """The pod is a worker of a job that is known here."""
        return pod.job_uid in self.book.jobs

    def accounted(self, pod: PodView) -> bool:
        """An earlier controller has drawn its conclusions from the worker's end."""
        facts = self.book.facts.get(pod.job_uid)
        return facts is not None and pod.stage is Stage.OVER and pod.index in facts.ended

    def avoid(self, uid: str, nodes: tuple[str, ...]) -> None:
        """No worker of the job is sent to these nodes from now on, instead of those named before."""
        if (facts := self.book.facts.get(uid)) is not None and uid in self.book.jobs:
            facts.avoids = nodes
            self._tell_avoided(uid)

    def _tell_avoided(self, uid: str) -> None:
        job = self.book.jobs[uid]
        if not (job.status.phase.final or job.ending):
            self._tell(scheduler.NodesBarred(uid, self.book.facts[uid].avoids))

    # Objects

    def put_job(self, job: ElasticJob) -> None:
        """A job is as given."""
        uid = job.metadata.uid
        facts = self.book.facts.get(uid)
        if facts is None:
            self._take_in(job)
            return
        before, facts.object = facts.object, job
        if job.spec.lease != before.spec.lease:
            facts.lease_seen_at = time.time()
        if facts.refused:
            self._take_in(job)
            return
        if job.spec.template != before.spec.template or (before.spec.suspend and not job.spec.suspend):
            self.readiness.begin_anew(uid)
        if job.spec != before.spec:
            self._follow_spec(uid)
            self._clock.set(uid)
            self.readiness.look_soon(uid)
        if job.metadata.deletion_timestamp is not None:
            self.drop_job(uid)
        else:
            self.readiness.carry_out(uid)

    def drop_job(self, uid: str) -> None:
        """A job's object is gone: its pods follow; it is forgotten when they are gone."""
        facts, job = self.book.facts.get(uid), self.book.jobs.get(uid)
        if facts is None:
            return
        for timer in filter(None, (facts.timer, facts.look)):
            timer.cancel()
        if job is None or not self.book.alive_of(uid):
            self._forget(uid)
            return
        if job.intent is not Intent.DELETE:
            self.decisions.stop(job, Intent.DELETE, Reason(code=ReasonCode.USER, message="deleted by a user"))

    def limits_changed(self, namespace: str) -> None:
        """Pods that say nothing are given other requests there: jobs that wait are planned with these."""
        here = (uid for uid, facts in self.book.facts.items() if facts.object.metadata.namespace == namespace)
        for uid in [uid for uid in here if uid in self.book.jobs]:
            self._follow_spec(uid)

    def _take_in(self, job: ElasticJob) -> None:
        uid = job.metadata.uid
        facts = self.book.facts.setdefault(uid, Facts(job, time.time()))
        facts.object, facts.refused = job, ""
        try:
            record = self._record_of(job)
        except (GpuQuotaError, ValueError) as error:
            facts.refused = str(error)
            self._changed(uid)
            return
        self.book.commit(Change(jobs={uid: record}))
        if not (record.status.phase.final or record.ending):
            self.readiness.announce(uid)
        self._follow_spec(uid)
        self._after_change(uid)

    def _record_of(self, job: ElasticJob) -> JobRecord:
        """Return the job's record, its grace period as long as the cluster's rules allow. Raises InvalidFieldError."""
        record = record_of(job, self._requests_in(job.metadata.namespace), self._volume_terms)
        if record.spec.grace_period_s <= self.max_grace_s():
            return record
        spec = msgspec.structs.replace(record.spec, grace_period_s=self.max_grace_s())
        return msgspec.structs.replace(record, spec=spec)

    def _follow_spec(self, uid: str) -> None:
        """The user's wishes that may change: whether it is suspended, and what its waiting is judged by."""
        job, spec = self.book.jobs[uid], self.book.facts[uid].object.spec
        if job.status.phase.final or job.ending:
            return
        suspended = job.status.phase is Phase.SUSPENDED or job.intent is Intent.SUSPEND
        if spec.suspend and not suspended:
            reason = Reason(code=ReasonCode.SUSPENDED, message="suspended by a user")
            self.decisions.stop(job, Intent.SUSPEND, reason)
        elif suspended and not spec.suspend:
            job = (
                msgspec.structs.replace(job, intent=Intent.REQUEUE)
                if job.intent is Intent.SUSPEND and self.book.alive_of(uid)
                else with_status(msgspec.structs.replace(job, intent=Intent.RUN), phase=Phase.PENDING, reason=None)
            )
            self.book.record(job)
        else:
            self._ask_anew(uid)

    def _ask_anew(self, uid: str) -> None:
        """A priority or a time limit was changed while it waits: it is submitted again, with its age."""
        before, job = self.book.jobs[uid], self.book.facts[uid].object
        try:
            spec = self._record_of(job).spec
        except GpuQuotaError as error:
            self.book.facts[uid].held_back = error.message
            return
        if spec == before.spec:
            return
        after = msgspec.structs.replace(before, spec=spec)
        if self.book.alive_of(uid):
            self.book.jobs[uid] = after  # the scheduler goes by it from the next start on
            return
        self.book.commit(Change(jobs={uid: None}))
        self.book.commit(Change(jobs={uid: after}))
        self.readiness.announce(uid)
        if self.book.facts[uid].avoids:
            self._tell_avoided(uid)

    def _forget(self, uid: str) -> None:
        self.membership.service.close(uid)
        if uid in self.book.jobs:
            self.book.commit(Change(jobs={uid: None}))
        del self.book.facts[uid]

    # Workers

    def put_pod(self, pod: PodView) -> None:
        """A worker's pod is as given."""
        self.news.put_pod(pod)
        self.readiness.look_soon(pod.job_uid)

    def drop_pod(self, pod: PodView) -> None:
        """A worker's pod is gone."""
        self.news.drop_pod(pod)

    def _kill(self, worker: str) -> None:
        self.news.kill(worker)

    def _never_made(self, worker: Worker) -> None:
        self.news.never_made(worker)

    def _workers_changed(self, uid: str) -> None:
        job = self.book.jobs[uid]
        if not self.news.started:
            return
        if not self.book.alive_of(uid):
            self.membership.service.close(uid)
            if job.intent is Intent.DELETE:
                self._forget(uid)
                return
        else:
            self.membership.update_target(uid)
            self.book.record(unmanaged_size(job, self.book.alive_of(uid), time.time()))
        self._after_change(uid)

    def _after_change(self, uid: str) -> None:
        """Write its status, and set the clock for what waits for time."""
        self._decided(uid)
        self._clock.set(uid)
