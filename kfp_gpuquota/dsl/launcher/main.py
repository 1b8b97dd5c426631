"""The launcher, which a routed step runs instead of its command: `python3 -m kfp_gpuquota.dsl.launcher ... -- COMMAND`.

It submits the command as a job, renews the job's lease, writes the job's log and state changes to the step's log,
publishes the job's outputs and exits with the job's exit code. It never imports kfp, and it does not exit when a worker
is preempted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from kfp_gpuquota.api import Phase, ReasonCode
from kfp_gpuquota.api.wire import Lease
from kfp_gpuquota.cluster.connect import connect, kube_context
from kfp_gpuquota.dsl.launcher.job_messages import JobMessages, conclusion, progress_of, succeeded
from kfp_gpuquota.dsl.launcher.log_stream import LogFollower, tail
from kfp_gpuquota.dsl.launcher.step import Step, step_from
from kfp_gpuquota.dsl.launcher.submission import claim
from kfp_gpuquota.dsl.launcher.worker_location import in_pods, worker_location
from kfp_gpuquota.dsl.spec.lease import AFTER_STOP_S, RENEWALS, LeaseKeeper
from kfp_gpuquota.dsl.worker import start
from kfp_gpuquota.errors import ClusterUnavailableError, GpuQuotaError, JobFailedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from types import FrameType

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.dsl.launcher.staging import Staging
    from kfp_gpuquota.dsl.launcher.worker_location import WorkerLocation
    from kfp_gpuquota.server.cluster_api import ClusterApi

T = TypeVar("T")

LONG_POLL_S: Final = 20.0
# A restart or an upgrade of the cluster takes less than this; a job that was submitted keeps running meanwhile.
CLUSTER_TIMEOUT_S: Final = 600.0
_SAID_AFTER_S: Final = 5.0
_LOG_ENDS_WITHIN_S: Final = 60.0
_NO_DEVICES: Final = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
TERMINATION_LOG: Final = Path("/dev/termination-log")
_MESSAGE_LENGTH: Final = 1000  # of the 4,096 bytes that the kubelet reads
# Neither success, because this attempt does not publish the job's outputs, nor the job's failure.
EXIT_TAKEN_OVER: Final = os.EX_TEMPFAIL
_output = threading.Lock()


class _StoppedError(BaseException):
    """The launcher has received a signal to stop. Not an Exception, so that no handler of failures catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _TakenOverError(Exception):
    """Another attempt of this step has become the holder of the job's lease."""


class _CurrentLease:
    """The lease of the step's current job, released when the pipeline's run is terminated."""

    def __init__(self) -> None:
        self._keeper: LeaseKeeper | None = None
        self._ended = ""
        self._lock = threading.Lock()

    def keep(self, keeper: LeaseKeeper) -> LeaseKeeper:
        """Start renewing this lease, and return its keeper."""
        with self._lock:
            self._keeper = keeper
            ended = self._ended
        keeper.start()
        if ended:
            keeper.shorten(0.0, ended)
        return keeper

    def end(self, reason: str) -> None:
        """Release the lease because the run is over: the cluster stops the job's workers at once."""
        with self._lock:
            self._ended = reason
        log_line(f"{reason}: the job is cancelled")
        self.shorten(0.0, reason)

    def shorten(self, after_s: float, reason: str = "") -> None:
        """Let the job live only `after_s` seconds longer, unless another attempt takes it over."""
        with self._lock:
            keeper = self._keeper
        if keeper is not None:
            keeper.shorten(after_s, reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step and return the exit code.

    It is the job's exit code, 1 or 2 for an error of the launcher, 75 when another attempt of the step has taken the
    job over, and 128 + N for signal N.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_signal)
    try:
        return _run(step_from(_parsed(arguments), os.environ))
    except GpuQuotaError as error:
        _report_failure(f"error: {error.message}")
        return error.exit_code
    except _TakenOverError:
        _print_last("another attempt of this step has taken over the job and continues it; this attempt exits")
        return EXIT_TAKEN_OVER
    except _StoppedError as stopped:
        return 128 + stopped.number


def log_line(text: str) -> None:
    """Write one line of the launcher to the step's log."""
    _write(f"gpuquota: {text}")


def _run(step: Step) -> int:
    if step.on_cpu:
        return _run_on_cpu(step)
    client = connect(retry_for_s=_SAID_AFTER_S)
    lease = Lease(holder=os.environ.get("KFP_POD_UID") or uuid.uuid4().hex, duration_s=step.lease_s)
    location = _answered(lambda: worker_location(client))
    step = location.with_identity(step)
    held = _CurrentLease()
    location.watch_run(held.end)
    try:
        while (job := _job_of(client, location, step, lease, held)) is None:
            log_line("the job or its outputs were lost before this launcher took it over: submitting a new job")
    except _StoppedError as stopped:
        # Ctrl-C is the user's wish to end the job. After the stop of a pod, a new pod may take the job over.
        timeout = location.timeout()
        follows = stopped.number != signal.SIGINT and not timeout and location.prepare_next_attempt()
        held.shorten(AFTER_STOP_S if follows else 0.0, timeout)
        if timeout:
            _report_failure(f"cancelled: {timeout}")
        raise
    location.close()
    code = _exit_code(job)
    (_report_failure if code else log_line)(conclusion(job))
    return code


def _run_on_cpu(step: Step) -> int:
    """Run a step that asks for no GPU, without a job."""
    log_line("the step asks for 0 GPUs: it runs on the CPU, without quota")
    if not step.image or kube_context() is None:
        _run_here(step)
    from kfp_gpuquota.dsl.launcher import cpu_pod  # noqa: PLC0415 (on one machine none of it is needed)

    client = connect(retry_for_s=CLUSTER_TIMEOUT_S)
    location = worker_location(client)
    try:
        code = cpu_pod.run(in_pods(client), location.with_identity(step), _write)
    except _StoppedError as stopped:
        if stopped.number != signal.SIGINT and not location.timeout():
            location.prepare_next_attempt()
        raise
    (_report_failure if code else log_line)(f"failed with exit code {code}" if code else "succeeded")
    return code


def _run_here(step: Step) -> NoReturn:
    """Replace this process, which runs in the step's image, by the step's command."""
    argv = [start.resolved(element, step.executor_input) for element in step.argv]
    for folder in start.output_folders(step.executor_input):
        Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        start.become(argv, {**step.environment, **_NO_DEVICES})
    except OSError as error:
        raise UsageError(f"cannot run {argv[0]!r}: {error.strerror}") from None


def _job_of(client: ClusterApi, location: WorkerLocation, step: Step, lease: Lease, held: _CurrentLease) -> Job | None:
    """Run the step's job, publish its outputs, and return its final state; None where a new job must be started."""
    job, staging = _answered(lambda: claim(client, location, step, lease, log_line))
    keeper = held.keep(LeaseKeeper(connect, lease, job.spec, log_line))
    try:
        job = _followed(client, location, job, step, keeper)
    except JobFailedError:
        staging.discard()
        raise
    keeper.stop()
    if _is_lost(location, job, staging):
        return None
    if job.status.result_worker:
        staging.publish_outputs(job.status.result_worker)
    else:
        staging.discard()
    return job


def _is_lost(location: WorkerLocation, job: Job, staging: Staging) -> bool:
    """Return whether a new job must replace this one: it was already being stopped when this launcher took it over, or
    its outputs were uploaded to the pod of an earlier attempt.
    """
    reason = job.status.reason
    if job.status.phase is Phase.CANCELLED:
        return reason is not None and reason.code is ReasonCode.LEASE_ENDED
    return job.status.phase is Phase.SUCCEEDED and not _answered(lambda: location.has_outputs(job, staging))


def _followed(client: ClusterApi, location: WorkerLocation, job: Job, step: Step, keeper: LeaseKeeper) -> Job:
    """Write the job's log and state changes to the step's log, and return its final state. Raises _TakenOverError."""
    messages = JobMessages(zone=UTC)
    follower = LogFollower(connect, job, _write)
    follower.start()
    for state in _states(client, job, step):
        if keeper.taken_over.is_set() and not state.status.phase.final:
            raise _TakenOverError
        for line in messages.lines(state, time.monotonic()):
            log_line(line)
        follower.update(state)
        job = state
        if not job.status.phase.final and (result := location.result_worker_of(job)):
            follower.await_end_of(result, _LOG_ENDS_WITHIN_S)
            return succeeded(job, result, time.time())
        location.publish_state(messages.state, progress_of(job))
    follower.join(_LOG_ENDS_WITHIN_S)
    for line in _failure_log(client, job, follower.followed):
        _write(line)
    return job


def _states(client: ClusterApi, job: Job, step: Step) -> Iterator[Job]:
    """Yield each new state of a job up to the final one, and its present state at each lease renewal."""
    project, name, after = job.spec.project, job.spec.name, None
    long_poll_s = min(LONG_POLL_S, step.lease_s / RENEWALS)
    while not job.status.phase.final:
        wait_s = 0.0 if after is None else long_poll_s
        listed = _answered(partial(client.list_jobs, project, name=name, after=after, timeout_s=wait_s))
        after = listed.revision
        found = next((each for each in listed.jobs if each.uid == job.uid), None)
        if found is None:
            raise JobFailedError(f"the job {job.spec.name!r} was deleted")
        job = found
        yield job


def _answered(call: Callable[[], T]) -> T:
    """Return what a call returns; while the cluster is unavailable, repeat it for CLUSTER_TIMEOUT_S seconds."""
    give_up_at = time.monotonic() + CLUSTER_TIMEOUT_S
    while True:
        try:
            return call()
        except ClusterUnavailableError as error:
            if time.monotonic() > give_up_at:
                raise
            log_line(f"this step waits for the cluster, and a job that it has submitted keeps running: {error.message}")


def _failure_log(client: ClusterApi, job: Job, followed: Container[str]) -> list[str]:
    """Return the end of the log of the worker that failed first, where the step's log did not follow that worker."""
    failed = [worker for worker in job.status.workers if worker.exit_code and worker.id not in followed]
    if job.status.phase is not Phase.FAILED or not failed:
        return []
    first = min(failed, key=lambda worker: worker.finished_at or 0.0)
    return _answered(lambda: tail(client, job, first))


def _exit_code(job: Job) -> int:
    """Return 0 for a job that succeeded, else its exit code, or 1 where it has none."""
    if job.status.phase is Phase.SUCCEEDED:
        return 0
    return job.status.exit_code or 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kfp_gpuquota.dsl.launcher", description=__doc__)
    parser.add_argument("--stands-in-for", help="KFP's executor, which kfp.local requires in the command")
    parser.add_argument("--task", required=True, help="RUN/NAME; on a KFP backend read from the step's pod")
    parser.add_argument("--gpus", help="the requested GPUs, where they are a parameter of the run")
    parser.add_argument("--image", default="", help="the step's own image, where the launcher runs in another")
    parser.add_argument("--pod-resources", help="CPU and memory of a worker, where they are a parameter")
    parser.add_argument("--volumes", help="the volumes of a worker's pod, which the launcher does not mount")
    parser.add_argument("--executor-input", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    separator = given.index("--")  # by hand: argparse's own handling of -- changes with Python's version
    return parser.parse_args(given[:separator], argparse.Namespace(argv=given[separator + 1 :]))


def _write(line: str) -> None:
    with _output:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _report_failure(text: str) -> None:
    """Write why the step fails to its log and to its container's termination message.

    KFP's own launcher exits with 1 for every failure. Argo shows this message next to that code at the step's node.
    """
    log_line(text)
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(f"gpuquota: {text}"[:_MESSAGE_LENGTH], encoding="utf-8")


def _print_last(text: str) -> None:
    """Write the step's last line; the lock stays held, so that the log's thread writes nothing after it."""
    log_line(text)
    _output.acquire()


def _on_signal(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the last request
    raise _StoppedError(number)
