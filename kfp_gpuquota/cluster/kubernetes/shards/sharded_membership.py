"""The leader's end: the membership service for `JobMembership`, with the jobs' state machines in other processes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

import aiohttp
import msgspec

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.shards.messages import (
    CONTROL_PATH,
    SILENCE_S,
    Committed,
    Finished,
    FromShard,
    Hello,
    JobClosed,
    JobState,
    KillNeeded,
    NumberNeeded,
    Outbox,
    Progressed,
    Released,
    Synced,
    control_token,
    lines,
)
from kfp_gpuquota.errors import NotFoundError, RunError
from kfp_gpuquota.server.membership.service import NotStoredYetError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kfp_gpuquota.membership import Limits
    from kfp_gpuquota.server.membership.service import Notices

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0

log = logging.getLogger(__name__)


class _Job:
    """The changing part of one job's state in its shard."""

    def __init__(self, state: JobState, shard: int) -> None:
        self.state, self.shard = state, shard


class ShardedJobs(Protocol):
    """The jobs whose memberships are in shards."""

    @property
    def authority(self) -> bytes:
        """Return the certificate with which the shards' own are signed."""

    def shard_of(self, uid: str, /) -> int:
        """Return the number of the job's shard."""

    def reopen(self, uid: str, /) -> None:
        """Open a job that its shard has lost."""


class ShardedMembership:
    """Memberships of `jobs` in shards at `urls`, which report to `notices`."""

    def __init__(self, jobs: ShardedJobs, notices: Notices, urls: Sequence[str], key: bytes, epoch: int) -> None:
        self._owner, self._notices = jobs, notices
        self._jobs: dict[str, _Job] = {}
        self._links = [_Link(self, jobs, number, url, control_token(key), epoch) for number, url in enumerate(urls)]

    # As `server.membership.MembershipService` has it

    def open(
        self,
        job_uid: str,
        _token: str,
        *,
        min_workers: int,
        first_generation: int,
        running: Sequence[str],
        limits: Limits,
        trained: Sequence[str],
        worker_prefix: str,
        attempt: int,
        stored: int,
    ) -> None:
        """Open the job in its shard. A shard that serves this attempt already keeps its state."""
        state = JobState(
            uid=job_uid,
            attempt=attempt,
            min_workers=min_workers,
            first_generation=first_generation,
            stored=stored,
            leave_s=limits.leave_s,
            alive=tuple(running),
            wanted=tuple(running),
            trained=tuple(trained),
            ended={},
            worker_prefix=worker_prefix,
        )
        self._jobs[job_uid] = _Job(state, self._owner.shard_of(job_uid))
        self._send(job_uid)

    def close(self, job_uid: str) -> None:
        """Close a job."""
        if job := self._jobs.pop(job_uid, None):
            self._links[job.shard].send(JobClosed(job_uid))

    def is_open(self, job_uid: str) -> bool:
        """Return whether the job is open."""
        return job_uid in self._jobs

    def set_target(self, job_uid: str, workers: Sequence[str]) -> None:
        """Set the workers that the job should have. Raises NotFoundError for a job that is not open."""
        job = self._jobs.get(job_uid)
        if job is None:
            raise NotFoundError(f"no elastic job {job_uid!r} is open")
        ended = job.state.ended
        alive = dict.fromkeys([*job.state.alive, *(worker for worker in workers if worker not in ended)])
        self._change(job_uid, wanted=tuple(workers), alive=tuple(alive))

    def worker_exited(self, job_uid: str, worker: str, *, finished: bool = False) -> None:
        """Report to the shard that the worker's process has exited."""
        if job := self._jobs.get(job_uid):
            alive = tuple(one for one in job.state.alive if one != worker)
            self._change(job_uid, alive=alive, ended={**job.state.ended, worker: finished})

    def resume(self, job_uid: str, stored: int = 0) -> None:
        """Allow generation numbers up to `stored`."""
        if (job := self._jobs.get(job_uid)) and stored > job.state.stored:
            self._change(job_uid, stored=stored)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep the connections to all shards open."""
        tasks = [asyncio.create_task(link.run()) for link in self._links]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connected(self) -> int:
        """Return the number of connected shards."""
        return sum(link.connected for link in self._links)

    def _change(self, job_uid: str, **fields: object) -> None:
        job = self._jobs[job_uid]
        after = msgspec.structs.replace(job.state, **fields)
        if after != job.state:
            job.state = after
            self._send(job_uid)

    def _send(self, job_uid: str) -> None:
        job = self._jobs[job_uid]
        self._links[job.shard].send(job.state)

    # For the links

    def restarted(self, shard: int) -> None:
        """Open the jobs of a restarted shard again, with generation numbers that were never used."""
        for uid in [uid for uid, job in self._jobs.items() if job.shard == shard]:
            self._owner.reopen(uid)

    def all_of(self, shard: int) -> list[JobState]:
        """Return the state of each of the shard's jobs."""
        return [job.state for job in self._jobs.values() if job.shard == shard]

    def take(self, message: FromShard) -> None:
        """Process a notice of the shard; notices about closed jobs are dropped."""
        if isinstance(message, Hello) or message.uid not in self._jobs:
            return
        uid, notices = message.uid, self._notices
        match message:
            case NumberNeeded(generation=generation):
                try:
                    notices.generation_reserved(uid, generation)
                except NotStoredYetError:
                    return  # `resume` follows
                self._change(uid, stored=max(generation, self._jobs[uid].state.stored))
            case Committed(commit=commit):
                notices.generation_committed(uid, commit)
            case Released(worker=worker, step=step):
                notices.worker_released(uid, worker, step)
            case KillNeeded(worker=worker, why=why):
                notices.kill_requested(uid, worker, why)
            case Progressed(worker=worker, progress=progress):
                notices.progress_reported(uid, worker, progress)
            case Finished(worker=worker, step=step):
                notices.training_finished(uid, worker, step)


class _Link:
    """The connection to one shard: it is reopened when it fails, and all jobs are sent on each connection."""

    def __init__(
        self,
        membership: ShardedMembership,
        jobs: ShardedJobs,
        number: int,
        url: str,
        token: str,
        epoch: int,
    ) -> None:
        self._jobs = jobs
        self._membership, self._number, self._url = membership, number, url.rstrip("/") + CONTROL_PATH
        self._headers = {"Authorization": f"Bearer {token}"}
        self._epoch = epoch
        self._outbox: Outbox | None = None
        self._process = ""  # the shard's, as last seen

    @property
    def connected(self) -> bool:
        """Return whether all jobs of the shard were sent on the current connection."""
        return self._outbox is not None

    def send(self, message: JobState | JobClosed) -> None:
        """Send a message if the shard is connected; otherwise all jobs are sent on the next connection."""
        if self._outbox is not None:
            self._outbox.put(message)

    async def run(self) -> None:
        """Keep the connection open until cancelled."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await self._converse()
            except (aiohttp.ClientError, OSError, TimeoutError, RunError, msgspec.DecodeError, ssl.SSLError) as error:
                log.warning("membership shard %s: %s", self._url, error or type(error).__name__)
            finally:
                if self._outbox is not None:  # it was connected
                    backoff.reset()
                self._outbox = None
            await asyncio.sleep(backoff.next_s())

    async def _converse(self) -> None:
        outbox = Outbox()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                self._url,
                params={"epoch": str(self._epoch)},
                headers=self._headers,
                data=aiter(outbox),
                ssl=self._trust(),
            ) as response,
        ):
            if response.status != 200:
                raise RunError(f"it answered {response.status}: {(await response.text())[:200]}")
            async for line in lines(response.content):
                if line:
                    self._take(msgspec.json.decode(line, type=FromShard), outbox)
        raise RunError("it closed the connection")

    def _take(self, message: FromShard, outbox: Outbox) -> None:
        if not isinstance(message, Hello):
            self._membership.take(message)
            return
        known, self._process = self._process, message.process
        if known not in {"", message.process}:
            self._membership.restarted(self._number)
        self._outbox = outbox
        for state in self._membership.all_of(self._number):
            outbox.put(state)
        outbox.put(Synced())
        log.info("membership shard %s is connected, process %s", self._url, message.process)

    def _trust(self) -> ssl.SSLContext | bool:
        authority = self._jobs.authority
        return ssl.create_default_context(cadata=authority.decode()) if self._url.startswith("https:") else True
