"""Copies the log of rank 0 of a job to the step's own log.

Until the workers have ranks, the log of a running worker is followed, so that early failures are visible. When rank 0
turns out to be another worker, the step's log continues with that worker's log, from its beginning.
"""

from __future__ import annotations

import codecs
import threading
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import WorkerPhase
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kfp_gpuquota.api import Job, Worker
    from kfp_gpuquota.server.cluster_api import ClusterApi

ENDED: Final = "gpuquota: the step's command has ended with exit code "
"""The last line of a worker's log in a pod (`images/launcher/worker`), followed by the code: a reader of the log need
not wait for the end of the pod."""
TAIL_LINES: Final = 20
_LONG_POLL_S: Final = 10.0
_SHORT_POLL_S: Final = 0.5


class LogFollower(threading.Thread):
    """Thread that follows the log of one worker at a time: rank 0 and, when it ends, the next. Has its own connection.

    The log of a worker that ran at the same time as the previous one is followed from its present end; that of a worker
    that started later from its beginning.
    """

    def __init__(self, connect: Callable[[], ClusterApi], job: Job, write: Callable[[str], None]) -> None:
        super().__init__(name="log", daemon=True)
        self._connect, self._write = connect, write
        self._changed = threading.Condition()
        self._job = job
        self.followed: list[str] = []
        self._read: set[str] = set()

    def update(self, job: Job) -> None:
        """Set the job's newest state."""
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def run(self) -> None:
        """Write log lines until the job has ended and the followed worker's log is complete."""
        client = self._connect()
        while found := self._next_worker():
            job, worker = found
            leads = unfollowed_leader(job, self.followed) is worker
            skip = bool(self.followed) and not leads and ran_beside(job, self.followed[-1], worker)
            self.followed.append(worker.id)
            rank = shown_rank(job, worker)
            try:
                for line in lines_of(_chunks(client, job, worker.id, skip=skip, another_leads=self._another_leads)):
                    text, ended, _ = line.partition(ENDED)
                    if text or not ended:
                        self._write(f"[{rank}] {text}")
                    if ended:  # the stream itself ends when the kubelet has seen the container end
                        break
            except GpuQuotaError as error:
                self._write(f"gpuquota: the log of worker {rank} cannot be read: {error.message}")
            with self._changed:
                self._read.add(worker.id)
                self._changed.notify_all()

    def await_end_of(self, worker: str, timeout_s: float) -> None:
        """Wait until the worker's whole log is written, for at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: worker in self._read, timeout_s)

    def _another_leads(self) -> bool | None:
        """Return whether rank 0 is another worker than the one that is followed; None while the ranks are unset.

        The only worker of a job, the usual case, is rank 0: its log is then read with long polls.
        """
        with self._changed:
            job, last = self._job, self.followed[-1]
        rank = next((worker.rank for worker in job.status.workers if worker.id == last), None)
        if rank is None and sum(worker.phase is not WorkerPhase.GONE for worker in job.status.workers) > 1:
            return None
        return unfollowed_leader(job, self.followed) is not None

    def _next_worker(self) -> tuple[Job, Worker] | None:
        with self._changed:
            while not (left := to_follow(self._job, self.followed)):
                if self._job.status.phase.final:
                    return None
                self._changed.wait()
            return self._job, left[0]


def to_follow(job: Job, followed: Sequence[str]) -> list[Worker]:
    """Return the workers whose log may be followed next, in order of preference.

    Running workers come first; else those that have started and exited after the worker that was followed last.
    """
    if (leader := unfollowed_leader(job, followed)) is not None:
        return [leader]
    left = [worker for worker in job.status.workers if worker.id not in followed]
    if running := [worker for worker in left if worker.phase is WorkerPhase.RUNNING]:
        return sorted(running, key=_order)
    exited = [worker for worker in left if worker.phase is WorkerPhase.GONE]
    if followed:
        exited = [worker for worker in exited if not ran_beside(job, followed[-1], worker)]
    newest = max((worker.started_at for worker in exited), default=0.0)
    return sorted((worker for worker in exited if worker.started_at == newest), key=_order)


def unfollowed_leader(job: Job, followed: Sequence[str]) -> Worker | None:
    """Return rank 0 where it is another worker than the one followed last and its log was not followed; else None."""
    last = next((worker for worker in job.status.workers if followed and worker.id == followed[-1]), None)
    if last is None or not last.rank:
        return None
    leaders = [worker for worker in job.status.workers if worker.rank == 0 and worker.id not in followed]
    return max(leaders, key=lambda worker: (worker.phase is WorkerPhase.RUNNING, worker.started_at), default=None)


def _order(worker: Worker) -> tuple[bool, int, int]:
    return (worker.rank is None, worker.rank or 0, worker.index)


def ran_beside(job: Job, followed: str, worker: Worker) -> bool:
    """Return whether `worker` started before the worker `followed` had exited."""
    before = next((each for each in job.status.workers if each.id == followed), None)
    return before is not None and (before.finished_at is None or worker.started_at < before.finished_at)


def shown_rank(job: Job, worker: Worker) -> int:
    """Return a worker's rank; in a job without ranks its position by index among the workers of the same time."""
    if worker.rank is not None:
        return worker.rank
    together = [
        each
        for each in job.status.workers
        if each.phase is not WorkerPhase.GONE or each.started_at >= worker.started_at
    ]
    return sum(each.index < worker.index for each in together)


def tail(client: ClusterApi, job: Job, worker: Worker, lines: int = TAIL_LINES) -> list[str]:
    """Return the last `lines` lines of a worker's log, each with its rank in front."""
    rank = shown_rank(job, worker)
    chunks = _chunks(client, job, worker.id, skip=False, another_leads=lambda: False)
    written = [line for line in lines_of(chunks) if not line.startswith(ENDED)]
    return [f"[{rank}] {line}" for line in written[-lines:]]


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the whole lines of a log that arrives in chunks; after carriage returns (progress bars) the last text."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    unfinished = ""
    for chunk in chunks:
        *lines, unfinished = (unfinished + decoder.decode(chunk)).split("\n")
        yield from map(_last_written, lines)
        unfinished = _last_written(unfinished)
    if unfinished:
        yield unfinished


def _last_written(line: str) -> str:
    return line.removesuffix("\r").rpartition("\r")[2]


def _chunks(
    client: ClusterApi, job: Job, worker: str, *, skip: bool, another_leads: Callable[[], bool | None]
) -> Iterator[bytes]:
    """Yield chunks of a worker's log until it ends or `another_leads()`; `skip` omits what was written before."""
    offset, more = 0, True
    while more and not (another := another_leads()):
        wait_s = 0.0 if skip else _SHORT_POLL_S if another is None else _LONG_POLL_S
        piece = client.read_log(job.spec.project, job.spec.name, worker=worker, offset=offset, timeout_s=wait_s)
        offset, more = piece.next_offset, piece.more
        if piece.text and not skip:
            yield piece.text
        skip = skip and bool(piece.text)
