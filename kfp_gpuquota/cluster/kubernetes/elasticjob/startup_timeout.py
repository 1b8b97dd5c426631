"""Workers of ElasticJobs that do not come up: their GPUs are given back, and asked for again after a while.

What is given up stands in the job's status before anything is deleted, and is carried out when the API server has told
so. Thus a controller that is killed at any moment leaves either nothing, or what the next one carries out.

Of a volume that cannot be mounted, or a network that cannot be made, a pod's status says nothing: only the kubelet's
events do. These are asked for where a worker has been silent for a while, one worker of a job at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Project, Reason, ReasonCode
from kfp_gpuquota.cluster.admission import check_fits
from kfp_gpuquota.cluster.kubernetes.client.event_recorder import Subject, last_warning, warnings_of
from kfp_gpuquota.cluster.kubernetes.elasticjob import startup_backoff
from kfp_gpuquota.cluster.kubernetes.elasticjob.startup_backoff import GivenUp, ReadyRules, Retry, Waits
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.records import Intent, with_status
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView
    from kfp_gpuquota.cluster.kubernetes.elasticjob.decisions import Decisions
    from kfp_gpuquota.cluster.kubernetes.elasticjob.pod_events import WorkerNews
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import Facts
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.cluster.records import JobRecord

LOOK_AFTER_S: Final = 0.5  # what comes together is looked at together
ASK_AFTER_S: Final = 30.0
ASK_AGAIN_S: Final = 60.0
AT_FAULT_FROM: Final = 2  # the try from which on the nodes may be at fault, even if no worker is up elsewhere

log = logging.getLogger(__name__)


class Readiness:
    """`avoid(pod)` sends its job's next workers elsewhere, `told(subject, message)` warns users of an object,
    `changed(uid)` and `decided(uid)` have a job's status written, the second one at once.
    """

    def __init__(
        self,
        book: Book,
        writer: Writer,
        pods: dict[str, PodView],
        decisions: Decisions,
        news: WorkerNews,
        rules: ReadyRules,
        *,
        tell: Callable[[scheduler.Event], None],
        told: Callable[[Subject, str], None],
        avoid: Callable[[PodView], None],
        changed: Callable[[str], None],
        decided: Callable[[str], None],
    ) -> None:
        self._book, self._writer, self._pods, self._rules = book, writer, pods, rules
        self._decisions, self._news = decisions, news
        self._tell, self._told, self._avoid = tell, told, avoid
        self._changed, self._decided = changed, decided

    def look_soon(self, uid: str) -> None:
        """Something of its workers has changed."""
        self._look_in(uid, LOOK_AFTER_S)

    def announce(self, uid: str) -> None:
        """The scheduler knows the job anew: until when it is deferred."""
        facts = self._book.facts[uid]
        last = max(filter(None, (facts.requeue, facts.grow)), key=lambda retry: retry.until or 0.0, default=None)
        if last is not None and (last.until or 0.0) > time.time():
            self._defer(uid, last)

    def begin_anew(self, uid: str) -> None:
        """Its user has resumed it, or changed its template: what went wrong before says nothing any more."""
        facts, job = self._book.facts[uid], self._book.jobs[uid]
        if (facts.requeue is None and facts.grow is None) or job.status.phase.final or job.ending:
            return
        facts.requeue = facts.grow = None
        self._tell(scheduler.JobDeferred(uid, 0.0, _reason("")))
        self._decided(uid)

    # What is seen

    def _look_in(self, uid: str, delay_s: float) -> None:
        facts, loop = self._book.facts.get(uid), asyncio.get_running_loop()
        if facts is None:
            return
        if facts.look is not None:
            if facts.look.when() <= loop.time() + delay_s:
                return
            facts.look.cancel()
        facts.look = loop.call_later(max(0.0, delay_s), self._look, uid)

    def _look(self, uid: str) -> None:
        facts, job, now = self._book.facts.get(uid), self._book.jobs.get(uid), time.time()
        if facts is None:
            return
        facts.look = None
        if job is None or job.status.phase.final or job.intent is not Intent.RUN:
            return
        workers = self._workers_of(job, facts, now)
        self._forgive(job, facts, workers)
        self._ask(job, facts, workers, now)
        rules = self._rules_of(facts)
        if not rules.timeout_s:
            return
        trains = bool(facts.ranks)
        # A training that is over needs nobody more: it ends with the last of those that still start.
        needed = 0 if trains and job.completing else _needed(job)
        lost = startup_backoff.given_up(workers, needed=needed, trains=trains, timeout_s=rules.timeout_s, now=now)
        if lost is not None:
            self._give_up(job, facts, lost, len(workers), rules, now)
        elif (over_at := startup_backoff.next_look(workers, rules.timeout_s)) is not None:
            self._look_in(uid, over_at - now)

    def _workers_of(self, job: JobRecord, facts: Facts, now: float) -> list[Waits]:
        before, facts.complaints = facts.complaints, {}
        found = [
            self._waits(facts, record.worker.id, record.worker.index, before, now)
            for record in self._book.alive_of(job.uid)
            if not record.released and record.worker.id in self._pods
        ]
        if before != facts.complaints:
            self._changed(job.uid)
        return found

    def _waits(self, facts: Facts, worker: str, index: int, before: dict[int, tuple[float, str]], now: float) -> Waits:
        pod = self._pods[worker]
        if pod.running:
            return Waits(index, pod.node, up=True)
        if pod.trouble:
            since = before[index][0] if index in before else now
            facts.complaints[index] = since, pod.trouble
            return Waits(index, pod.node, up=False, since=since, trouble=pod.trouble)
        silent_since = None if pod.prepared else pod.created
        said = facts.heard.get(worker, "") if pod.bound else "kube-scheduler has not bound it"
        return Waits(index, pod.node, up=False, since=silent_since, trouble=said)

    def _forgive(self, job: JobRecord, facts: Facts, workers: list[Waits]) -> None:
        """What has come up at last begins counting anew."""
        if facts.requeue is not None and startup_backoff.has_come_up(workers, _needed(job)):
            facts.requeue = None
            self._changed(job.uid)
        grown = [w for w in workers if w.up and facts.grow and self._created(job, w.index) > facts.grow.at]
        if grown:
            facts.grow = None
            self._changed(job.uid)

    def _created(self, job: JobRecord, index: int) -> float:
        return self._pods[f"{job.uid}-{index}"].created

    def _rules_of(self, facts: Facts) -> ReadyRules:
        own = facts.object.spec.workers_ready_timeout_seconds
        return self._rules if own is None else msgspec.structs.replace(self._rules, timeout_s=own)

    # What nobody says

    def _ask(self, job: JobRecord, facts: Facts, workers: list[Waits], now: float) -> None:
        silent = [w for w in workers if w.since is not None and not w.trouble]
        if not silent:
            return
        oldest = min(silent, key=lambda w: w.since or 0.0)
        patience_s = min(ASK_AFTER_S, self._rules_of(facts).timeout_s / 2 or ASK_AFTER_S)
        at = max((oldest.since or 0.0) + patience_s, facts.asked_at + min(ASK_AGAIN_S, patience_s))
        if now < at:
            self._look_in(job.uid, at - now)
            return
        facts.asked_at = now
        worker = f"{job.uid}-{oldest.index}"
        read = warnings_of(self._pods[worker].namespace, self._pods[worker].uid)
        self._writer.submit(read, partial(self._heard, job.uid, worker), lambda _: self.look_soon(job.uid))

    def _heard(self, uid: str, worker: str, answer: bytes) -> None:
        facts = self._book.facts.get(uid)
        if facts is not None and worker in self._pods and (said := last_warning(answer)):
            facts.heard[worker] = facts.trouble[worker] = said
            self._changed(uid)
        self.look_soon(uid)

    # What is decided

    def _give_up(
        self, job: JobRecord, facts: Facts, lost: GivenUp, workers: int, rules: ReadyRules, now: float
    ) -> None:
        """Written first; `carry_out` does it."""
        late = {worker.index for worker in lost.late}
        if lost.whole:
            if facts.requeue is not None and facts.requeue.attempt == job.attempt:
                return
            facts.requeue = startup_backoff.requeued(lost, workers, facts.requeue, rules, job.attempt, now)
        else:
            if facts.grow is not None and late <= set(facts.grow.workers):
                return
            facts.grow = startup_backoff.shrunk(lost, facts.grow, rules, now)
        self._decided(job.uid)

    def carry_out(self, uid: str) -> None:
        """What the API server knows of what was given up is done."""
        facts, job = self._book.facts.get(uid), self._book.jobs.get(uid)
        if facts is None or job is None or job.status.phase.final or job.intent is not Intent.RUN:
            return
        stored = facts.object.status
        if facts.requeue and stored.requeue_state and facts.requeue.attempt == job.attempt:
            if stored.requeue_state.count == facts.requeue.count:
                self._stop(job, facts, facts.requeue)
        elif facts.grow and stored.grow_state and stored.grow_state.workers == facts.grow.workers:
            self._shrink(job, facts, facts.grow)

    def _stop(self, job: JobRecord, facts: Facts, retry: Retry) -> None:
        pods = self._not_told_to_go(job)
        if sum(pod.running for pod in pods) >= _needed(job):
            self.look_soon(job.uid)  # it has come up in the last moment
        elif retry.until is None:
            self._tell_user(facts, retry.message)
            self._decisions.stop(job, Intent.FAIL, _reason(retry.message))
        elif pods:
            self._tell_user(facts, retry.message)
            self._note_nodes(job, facts, pods, retry.count)
            self._defer(job.uid, retry)
            self._decisions.stop(job, Intent.REQUEUE, _reason(retry.message))

    def _shrink(self, job: JobRecord, facts: Facts, retry: Retry) -> None:
        pods = self._not_told_to_go(job)
        late = [pod for pod in pods if pod.index in retry.workers and not pod.running]
        if not late:
            return
        self._tell_user(facts, retry.message)
        self._note_nodes(job, facts, pods, retry.count)
        self._defer(job.uid, retry)
        self._book.record(with_status(job, reason=_reason(retry.message)))
        for pod in late:
            self._news.remake(pod)

    def _not_told_to_go(self, job: JobRecord) -> list[PodView]:
        alive = (record for record in self._book.alive_of(job.uid) if not record.released)
        return [self._pods[record.worker.id] for record in alive if record.worker.id in self._pods]

    def _note_nodes(self, job: JobRecord, facts: Facts, pods: list[PodView], count: int) -> None:
        """The next workers go elsewhere, where the node may be at fault and the others have room for the job."""
        if count < AT_FAULT_FROM and not any(pod.running for pod in pods):
            return
        nodes = [node for node in self._book.nodes.values() if node.ready]
        for pod in (pod for pod in pods if not pod.running and pod.node):
            left = [node for node in nodes if node.name != pod.node and node.name not in facts.avoids]
            try:
                check_fits(job.spec, Project(name=job.spec.project), left)
            except InvalidFieldError:
                continue
            self._avoid(pod)

    def _defer(self, uid: str, retry: Retry) -> None:
        self._tell(scheduler.JobDeferred(uid, retry.until or 0.0, _reason(retry.message)))

    def _tell_user(self, facts: Facts, message: str) -> None:
        meta = facts.object.metadata
        self._told(Subject("ElasticJob", meta.name, meta.namespace, meta.uid, labels.API_VERSION), message)


def _needed(job: JobRecord) -> int:
    """With so many workers it starts."""
    return job.spec.smallest // job.spec.worker_gpus


def _reason(message: str) -> Reason:
    return Reason(code=ReasonCode.PODS_NOT_READY, message=message)
