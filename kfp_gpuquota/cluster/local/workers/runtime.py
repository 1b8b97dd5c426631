"""The interface of the driver to workers' processes: on this machine, or on the nodes of a Ray cluster.

The driver decides and records; a runtime starts, signals and watches processes, and reads what they leave behind. All
calls come from the event loop, return at once, and are safe to repeat: a worker id runs at most once. What happens is
reported to `Reports` from the event loop, after the call that caused it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.api.validation import check_no_runtime_env
from kfp_gpuquota.cluster.local.shared.files import Removals
from kfp_gpuquota.cluster.local.workers import shims
from kfp_gpuquota.cluster.local.workers.cgroups import ADVICE, NONE
from kfp_gpuquota.cluster.local.workers.environment import worker_environment
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kfp_gpuquota.api import JobSpec, Node, Worker
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.local.workers.cgroups import Cgroups
    from kfp_gpuquota.engine.records import JobRecord

LOG_CHUNK: Final = 1 << 18

log = logging.getLogger(__name__)


class Reports(shims.ShimEvents, Protocol):
    """The events of a runtime."""

    def worker_lost(self, worker: str, why: str) -> None:
        """The worker runs no more, and its own program is not the cause."""

    def nodes_changed(self, nodes: Iterable[Node], taken: Mapping[str, tuple[int, ...]]) -> None:
        """The cluster's nodes are these from now on; of some, others than this cluster's workers use devices."""


class WorkerRuntime(Protocol):
    """Starts, watches, signals and adopts the workers' processes."""

    def check(self, spec: JobSpec) -> None:
        """Raise InvalidFieldError for a job that this runtime cannot run."""

    def start(self, job: JobRecord, worker: Worker) -> None:
        """Start the worker. Raises OSError when the machine cannot; then nothing was started."""

    def adopt(self, job: JobRecord, worker: Worker, *, wanted: bool) -> shims.Found:
        """Return what became of a worker that an earlier daemon recorded, and watch it where it runs.

        ASKED: the answer is reported later; a worker that never ran is then started where it is `wanted`, and else
        reported as lost.
        """

    def prevent(self, worker: Worker) -> bool:
        """Make sure that a worker which never started never will; False when it just has."""

    def terminate(self, worker: str) -> None:
        """SIGTERM now, SIGKILL after the worker's grace period."""

    def kill(self, worker: str) -> None:
        """Send SIGKILL to the worker immediately."""

    def watches(self, worker: str) -> bool:
        """Whether the worker's end will be reported."""

    def exit_code(self, worker: Worker) -> int:
        """Return the exit code of a worker for which `adopt` returned ENDED."""

    def ended_at(self, worker: Worker) -> float | None:
        """Return when the worker has ended, in seconds since 1970 by its machine's clock; None where it is unknown."""

    def why_ended(self, spec: JobSpec, worker: Worker) -> Reason | None:
        """Return why the machine ended the worker; None where it did not."""

    def last_error(self, worker: Worker) -> str:
        """Return the error that ended the worker, as it reported itself; "" if it did not."""

    def process_id(self, worker: Worker) -> int | None:
        """Return the process id of a worker on its node; None where it is not available."""

    def end_unrecorded(self, tracked: Collection[str]) -> None:
        """End workers of this cluster that run and are not among `tracked`: the state was restored from a copy."""

    async def read_log(self, worker: Worker, offset: int) -> tuple[bytes, int]:
        """Return a piece of the log, and its offset: `offset` (below 0: from the end), or later if that was dropped."""

    def remove_job(self, uid: str) -> None:
        """Delete logs, checkpoints and directories of a job without workers."""

    def close(self) -> None:
        """Stop watching; running workers continue."""


class LocalRuntime:
    """The workers are processes of this machine, each below a shim."""

    def __init__(
        self,
        home: Home,
        nodes: Mapping[str, Node],
        reports: Reports,
        *,
        open_files: int = 0,
        log_limit: int = 0,
        device_locks: tuple[int, ...] = (),
        cgroups: Cgroups = NONE,
        shared: bool = False,
    ) -> None:
        self._home, self._nodes, self._cgroups = home, nodes, cgroups
        self._shared, self._removals = shared, Removals(home)
        self._removals.resume()
        self._open_files, self._log_limit = open_files, log_limit
        self._shims = shims.Shims(reports, device_locks)

    def check(self, spec: JobSpec) -> None:
        """Raise InvalidFieldError for a limit that cannot be enforced, or a directory that a job could not start in."""
        refuse_limits(spec, self._cgroups.unavailable)
        check_no_runtime_env(spec.runtime_env, instead="install what the job needs on this machine")
        if spec.resource_claim_template:
            why = "only Kubernetes has ResourceClaimTemplates; leave it out"
            raise InvalidFieldError("resource_claim_template", spec.resource_claim_template, why)
        if self._shared:
            refuse_shares(spec)
        directory = spec.working_directory
        if directory and not Path(directory).is_absolute():
            raise InvalidFieldError("working_directory", directory, "it must be an absolute path")
        if "\0" in directory:
            raise InvalidFieldError("working_directory", directory, "a path cannot hold a NUL character")
        if directory and not self._shared:  # with the rights of root it would reveal what the user may not see
            _check_directory(directory)

    def start(self, job: JobRecord, worker: Worker) -> None:
        """Start the worker under a shim. Raises OSError."""
        cgroup, cgroup_files = self._cgroups.of(worker.id, job.spec)
        command = shims.WorkerCommand(
            command=job.spec.command,
            environment=worker_environment(self._home, job, worker, self._nodes),
            working_directory=job.spec.working_directory or ("" if job.owner else str(self._home.job(job.uid))),
            grace_period_s=job.spec.grace_period_s,
            open_files=self._open_files,
            log_limit=self._log_limit,
            cgroup=cgroup,
            cgroup_files=cgroup_files,
            owner=job.owner,
        )
        self._shims.start(worker.id, self._directory(worker), command)

    def adopt(self, job: JobRecord, worker: Worker, *, wanted: bool) -> shims.Found:  # noqa: ARG002 (the protocol's)
        """Read the worker's directory, and watch its shim where it lives."""
        return self._shims.adopt(worker.id, self._directory(worker))

    def prevent(self, worker: Worker) -> bool:
        """Acquire the worker's lock and record its end, so that it never starts."""
        return shims.prevent(self._directory(worker))

    def terminate(self, worker: str) -> None:
        """Pass SIGTERM to the worker's shim."""
        self._shims.terminate(worker)

    def kill(self, worker: str) -> None:
        """Make the worker's shim kill it."""
        self._shims.kill(worker)

    def watches(self, worker: str) -> bool:
        """Whether the worker's shim is watched."""
        return self._shims.watches(worker)

    def exit_code(self, worker: Worker) -> int:
        """Return the exit code that the worker's shim recorded."""
        return shims.exit_code(self._directory(worker))

    def ended_at(self, worker: Worker) -> float | None:
        """Return the time that the worker's shim recorded."""
        return shims.ended_at(self._directory(worker))

    def why_ended(self, spec: JobSpec, worker: Worker) -> Reason | None:
        """Return that the kernel ended it for its memory limit, if it did."""
        if spec.memory_limit_mib is None or not shims.ran_out_of_memory(self._directory(worker)):
            return None
        message = f"worker {worker.index} used more than its memory limit of {show_mib(spec.memory_limit_mib)}"
        return Reason(code=ReasonCode.WORKER_FAILED, message=message, details={"worker": worker.id})

    def last_error(self, worker: Worker) -> str:
        """Return what the worker wrote."""
        return shims.last_error(self._directory(worker))

    def process_id(self, worker: Worker) -> int | None:
        """Return what the worker's shim wrote."""
        return shims.process_id(self._directory(worker))

    def end_unrecorded(self, tracked: Collection[str]) -> None:
        """Kill their processes."""
        for worker in shims.without_record(self._home.jobs, tracked):
            log.error("worker %s runs, but no job of this cluster has it: it is ended", worker)
            shims.end_leftovers(worker)

    async def read_log(self, worker: Worker, offset: int) -> tuple[bytes, int]:
        """Return the log's content from the offset."""
        return read_from(self._directory(worker) / "log", offset)

    def remove_job(self, uid: str) -> None:
        """Delete the job's directory, and what is left of its workers' cgroups."""
        with contextlib.suppress(OSError):
            for directory in self._home.job(uid).glob("workers/*"):
                shims.remove_cgroup(directory)
        if self._shared:
            self._removals.add(uid)
        else:
            self._home.remove_job(uid)

    def close(self) -> None:
        """Stop watching the shims."""
        self._shims.close()
        self._removals.close()

    def _directory(self, worker: Worker) -> Path:
        return self._home.worker(worker.job_uid, worker.id)


def refuse_limits(spec: JobSpec, why: str) -> None:
    """Raise InvalidFieldError where the job has limits and there is a reason why they cannot be enforced."""
    if not why:
        return
    hint = "or leave the limit out" if why.endswith(ADVICE) else "leave the limit out"
    for field in ("memory_limit_mib", "cpu_limit"):
        if (value := getattr(spec, field)) is not None:
            raise InvalidFieldError(field, value, f"it cannot be enforced: {why}", hint=hint)


def refuse_shares(spec: JobSpec) -> None:
    """Raise InvalidFieldError for a part of a GPU: between users nothing protects its memory."""
    if spec.shared:
        field = "gpu_fraction" if spec.gpu_fraction is not None else "gpu_memory_mib"
        raise InvalidFieldError(
            field, getattr(spec, field), "several users share this cluster, and a GPU is used by one of them at a time",
            hint="ask for whole GPUs with -g",
        )  # fmt: skip


def read_from(path: Path, offset: int) -> tuple[bytes, int]:
    """Return a piece of a log and the offset at which it begins; a negative `offset` counts from the log's end.

    What was given back to the file system before the offset is left out.
    """
    try:
        with path.open("rb") as file:
            if offset < 0:
                offset = max(0, os.fstat(file.fileno()).st_size + offset)
            try:
                begin = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:  # at or beyond the end
                begin = offset
            file.seek(begin)
            return file.read(LOG_CHUNK), begin
    except FileNotFoundError:
        return b"", max(0, offset)


def _check_directory(directory: str) -> None:
    try:
        found = Path(directory).is_dir()
    except OSError as error:  # a part of it may not be entered
        rule = f"it cannot be used on this machine: {error.strerror}"
        raise InvalidFieldError("working_directory", directory, rule) from None
    if not found:
        raise InvalidFieldError("working_directory", directory, "there is no such directory on this machine")
