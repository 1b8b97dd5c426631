"""The log of a job's first worker, as the step's own log."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import WorkerPhase
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.api import Job, Worker
    from kfp_gpuquota.server.client import Client

TAIL_LINES: Final = 20
_LONG_POLL_S: Final = 10.0


class LogFollower(threading.Thread):
    """Follows one worker at a time, over a connection of its own: the first, and when that one ends the next.

    A worker that has run beside the one followed before is joined where its log stands; a new one from its beginning.
    """

    def __init__(self, connect: Callable[[], Client], job: Job, write: Callable[[str], None]) -> None:
        super().__init__(name="log", daemon=True)
        self._connect, self._write = connect, write
        self._changed = threading.Condition()
        self._job = job
        self.followed: dict[str, None] = {}

    def see(self, job: Job) -> None:
        """The job's newest state."""
        with self._changed:
            self._job = job
            self._changed.notify()

    def run(self) -> None:
        """Until the job has ended and what its followed worker said is written."""
        client = self._connect()
        while worker := self._next_worker():
            beside = bool(self.followed) and worker.started_at <= self._last_seen_start
            self.followed[worker.id] = None
            self._last_seen_start = max(w.started_at for w in self._job.status.workers)
            try:
                self._follow(client, worker, skip=beside)
            except GpuQuotaError as error:
                self._write(f"gpuquota: the log of worker {worker.index} cannot be read: {error.message}")

    _last_seen_start = 0.0

    def _next_worker(self) -> Worker | None:
        with self._changed:
            while not (found := next(iter(self._candidates()), None)):
                if self._job.status.phase.final:
                    return None
                self._changed.wait()
            return found

    def _candidates(self) -> list[Worker]:
        final = self._job.status.phase.final
        phases = set(WorkerPhase) if final and not self.followed else {WorkerPhase.RUNNING}
        left = [w for w in self._job.status.workers if w.phase in phases and w.id not in self.followed]
        return sorted(left, key=order)

    def _follow(self, client: Client, worker: Worker, *, skip: bool) -> None:
        rank = order(worker)[1]
        text = ""
        for chunk in _chunks(client, self._job, worker.id, skip=skip):
            *lines, text = (text + chunk).split("\n")
            for line in lines:
                self._write(f"[{rank}] {line}")
        if text:
            self._write(f"[{rank}] {text}")


def order(worker: Worker) -> tuple[bool, int]:
    """Ranked workers first, by rank; the others by index."""
    return (worker.rank is None, worker.index if worker.rank is None else worker.rank)


def tail(client: Client, job: Job, worker: Worker, lines: int = TAIL_LINES) -> list[str]:
    """The end of a worker's log."""
    text = "".join(_chunks(client, job, worker.id, skip=False))
    return [f"[{order(worker)[1]}] {line}" for line in text.splitlines()[-lines:]]


def _chunks(client: Client, job: Job, worker: str, *, skip: bool) -> Iterator[str]:
    """Pieces of a worker's log until it has ended; with `skip` only what comes from now on."""
    offset, more = 0, True
    while more:
        wait_s = 0.0 if skip else _LONG_POLL_S
        piece = client.read_log(job.spec.project, job.spec.name, worker=worker, offset=offset, timeout_s=wait_s)
        offset, more = piece.next_offset, piece.more
        if piece.text and not skip:
            yield piece.text.decode(errors="replace")
        skip = skip and bool(piece.text)
