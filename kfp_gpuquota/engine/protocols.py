"""What the engine uses of a cluster: a store of its records, and what acts on workers' processes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kfp_gpuquota.engine.change_recorder import ChangeRecorder
from kfp_gpuquota.engine.job_book import Change, JobBook
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
    from kfp_gpuquota.membership import Limits

log = logging.getLogger(__name__)


class Store(JobBook, ABC):
    """The records, and where they are stored. `clock` returns the time of all records, in seconds since 1970."""

    clock: Callable[[], float]

    @abstractmethod
    def commit(self, change: Change, *, durable: bool = True) -> None:
        """Store a change, apply it, and pass its events to the scheduler. Raises StateFileError; nothing changed then.

        `durable`: it is stored when this returns, if the store can; else soon.
        """

    @abstractmethod
    def reserve_generation(self, uid: str, generation: int) -> None:
        """Store a generation's number of a job before it is sent to a worker.

        Raises NotStoredYetError where that takes time.
        """

    @abstractmethod
    def note_waiting(self, uid: str, reason: Reason | None) -> None:
        """Record why a job waits. The next plan computes it again, so it need not be stored at once."""

    @contextmanager
    def noting(self, what: str, *, durable: bool = False) -> Iterator[ChangeRecorder]:
        """Record facts that are learned again: a full disk delays them, and must not stop the cluster's process."""
        change = Change()
        yield ChangeRecorder(self, change, self.clock())
        try:
            self.commit(change, durable=durable)
        except StateFileError as error:
            log.error("%s: %s", what, error)


class KillsWorkers(Protocol):
    """Ends workers' processes."""

    def kill(self, worker: str, /) -> None:
        """Kill the worker's process, which counts as a failure."""


class Workers(Protocol):
    """Starts and ends workers' processes, as recorded."""

    def start_workers(self, job: JobRecord, workers: Sequence[WorkerRecord], /) -> None:
        """Start these workers of a job, and open its membership if it is not open."""

    def ask_to_leave(self, record: WorkerRecord, /) -> None:
        """Ask the worker to end within its grace period; it was removed from the target of its membership."""

    def forget_job(self, uid: str, /) -> None:
        """Delete what is left of a job whose record was deleted."""


class Memberships(Protocol):
    """The memberships of elastic jobs; implemented by `server.membership.service.MembershipService`."""

    def open(
        self,
        job_uid: str,
        token: str,
        /,
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
        """Serve the job's workers: those `running` may run, those `trained` were in the generation in force."""

    def is_open(self, job_uid: str, /) -> bool:
        """Return whether the job is open."""

    def set_target(self, job_uid: str, workers: Sequence[str], /) -> None:
        """Set the workers that the job should have. Raises NotFoundError for a job that is not open."""

    def worker_exited(self, job_uid: str, worker: str, /, *, finished: bool) -> None:
        """Report that the worker's process has ended; `finished`: with 0, and without a request to leave."""

    def close(self, job_uid: str, /) -> None:
        """Serve the job's workers no more."""
