"""A shard's end: its jobs, the leader's requests for them, and the notices for the leader."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import token_of
from kfp_gpuquota.cluster.kubernetes.shards.messages import (
    Committed,
    Finished,
    FromLeader,
    JobClosed,
    JobState,
    KillNeeded,
    Notice,
    NumberNeeded,
    Progressed,
    Released,
)
from kfp_gpuquota.server.membership.service import MembershipService, NotStoredYetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.cluster.kubernetes.shards.messages import Outbox
    from kfp_gpuquota.membership import AnnounceCommit, Limits

PREFETCH = 16
"""More numbers are requested this far before the last stored one, so that a resize does not wait for the API server."""

log = logging.getLogger(__name__)


class ShardJob:
    """One job: its leader's last request, and the notices that a next leader must receive as well."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self.seen: set[str] = set(state.alive)
        self.commit: Committed | None = None
        self.needed: NumberNeeded | None = None
        self.progress: Progressed | None = None
        self.of_workers: dict[tuple[type, str], Notice] = {}  # kills, releases, ends of training

    def standing(self) -> Iterator[Notice]:
        """Yield all notices that the leader may not have received; some may be sent twice."""
        for notice in (self.needed, self.commit, self.progress):
            if notice is not None:
                yield notice
        alive = set(self.state.alive)
        yield from (notice for (_, worker), notice in self.of_workers.items() if worker in alive)


class ShardJobs:
    """All jobs of one shard. `limits` apply to each job, except for the time in which a worker may leave."""

    def __init__(self, key: bytes, limits: Limits) -> None:
        self.key, self._limits = key, limits
        self.service = MembershipService(self)
        self.jobs: dict[str, ShardJob] = {}
        self.synced = False
        self._outbox: Outbox | None = None
        self._listed: set[str] = set()

    # The leader's requests

    def connect(self, outbox: Outbox) -> None:
        """Begin with a connected leader, which sends all jobs before `Synced`."""
        self._outbox, self._listed = outbox, set()

    def disconnect(self, outbox: Outbox) -> None:
        """Record that the leader's connection has ended; the jobs are still served."""
        if self._outbox is outbox:
            self._outbox = None

    def take(self, message: FromLeader) -> None:
        """Process a message of the leader."""
        match message:
            case JobState():
                self._listed.add(message.uid)
                self._put(message)
            case JobClosed(uid=uid):
                self._close(uid)
            case _:
                self._sync()

    def _sync(self) -> None:
        for uid in [uid for uid in self.jobs if uid not in self._listed]:
            self._close(uid)
        self.synced = True
        for job in self.jobs.values():
            for notice in job.standing():
                self._send(notice)
        log.info("a leader is connected: %d jobs", len(self.jobs))

    def _put(self, state: JobState) -> None:
        job, uid = self.jobs.get(state.uid), state.uid
        if job is None or job.state.attempt != state.attempt:
            self.jobs[uid] = job = ShardJob(state)
            self.service.open(
                uid,
                token_of(uid, self.key),
                min_workers=state.min_workers,
                first_generation=state.first_generation,
                running=state.alive,
                limits=dataclasses.replace(self._limits, leave_s=state.leave_s),
                trained=state.trained,
                worker_prefix=state.worker_prefix,
            )
        elif state.stored < job.state.stored:
            state = msgspec.structs.replace(
                state, stored=job.state.stored
            )  # a later leader has not read what an earlier one stored
        before, job.state = job.state, state
        for worker in job.seen - set(state.alive):
            self.service.worker_exited(uid, worker, finished=state.ended.get(worker, False))
        job.seen = set(state.alive)
        if before is state or before.wanted != state.wanted:
            self.service.set_target(uid, state.wanted)
        if job.needed is not None and job.needed.generation <= state.stored:
            job.needed = None
        self.service.resume(uid)

    def _close(self, uid: str) -> None:
        self.jobs.pop(uid, None)
        self.service.close(uid)

    # `server.membership.Notices`

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Request that the number be stored; raise NotStoredYetError until it is."""
        job = self.jobs[job_uid]
        if generation + PREFETCH > job.state.stored and job.needed is None:
            job.needed = NumberNeeded(job_uid, max(generation, job.state.stored + 1))
            self._send(job.needed)
        if generation > job.state.stored:
            raise NotStoredYetError(f"generation {generation} of job {job_uid}")

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """Report a committed generation."""
        self.jobs[job_uid].commit = notice = Committed(job_uid, commit)
        self._send(notice)

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """Report a worker's training progress."""
        self.jobs[job_uid].progress = notice = Progressed(job_uid, worker, progress)
        self._send(notice)

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """Report that a worker left the membership."""
        self._note(job_uid, worker, Released(job_uid, worker, step))

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Request that a worker's process be killed."""
        self._note(job_uid, worker, KillNeeded(job_uid, worker, why))

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """Report that a worker applied the training's last step."""
        self._note(job_uid, worker, Finished(job_uid, worker, step))

    def _note(self, job_uid: str, worker: str, notice: Notice) -> None:
        self.jobs[job_uid].of_workers[type(notice), worker] = notice
        self._send(notice)

    def _send(self, notice: Notice) -> None:
        if self._outbox is not None and self.synced:
            self._outbox.put(notice)
