"""What a decorated step runs in place of its own command: `python3 -m kfp_gpuquota.dsl.launcher ... -- COMMAND`.

It submits the command as a job, keeps the job's lease, tells in the step's log what becomes of it, brings its outputs
home and ends as the job ended. It never imports kfp, and never ends because a worker was preempted.
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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Phase, ReasonCode
from kfp_gpuquota.api.wire import Lease
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.dsl.launcher.log_stream import LogFollower, tail
from kfp_gpuquota.dsl.launcher.narration import Narrator, conclusion, progress_of, succeeded
from kfp_gpuquota.dsl.launcher.step import Step, step_from
from kfp_gpuquota.dsl.launcher.submission import claim
from kfp_gpuquota.dsl.launcher.worker_location import place_of
from kfp_gpuquota.dsl.spec.lease import AFTER_STOP_S, RENEWALS, LeaseKeeper
from kfp_gpuquota.errors import ClusterUnavailableError, GpuQuotaError, JobFailedError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from types import FrameType

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import JobList
    from kfp_gpuquota.dsl.launcher.staging import Staging
    from kfp_gpuquota.dsl.launcher.worker_location import Place
    from kfp_gpuquota.server.cluster_client import ClusterClient

LONG_POLL_S: Final = 20.0
# A cluster that is restarted or upgraded is back by then; the job goes on meanwhile.
PATIENCE_S: Final = 600.0
_LOG_ENDS_WITHIN_S: Final = 60.0
TERMINATION_LOG: Final = Path("/dev/termination-log")
_MESSAGE_LENGTH: Final = 1000  # of the 4,096 bytes that the kubelet reads
# Neither the job's success, for its outputs are not ours to bring home, nor its failure.
EXIT_TAKEN_OVER: Final = os.EX_TEMPFAIL
_output = threading.Lock()


class _StoppedError(BaseException):
    """The launcher was told to stop. Not an Exception: nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _TakenOverError(Exception):
    """Another attempt of this step holds the job now."""


class _Held:
    """The lease of the job that the step has now, which ends with the pipeline's run."""

    def __init__(self) -> None:
        self._keeper: LeaseKeeper | None = None
        self._run_has_ended = False
        self._lock = threading.Lock()

    def keep(self, keeper: LeaseKeeper) -> LeaseKeeper:
        """Renew this one's lease from now on."""
        with self._lock:
            self._keeper = keeper
            ended = self._run_has_ended
        keeper.start()
        if ended:
            keeper.leave(0.0)
        return keeper

    def end(self) -> None:
        """The run was terminated: the job's workers are stopped at once."""
        with self._lock:
            self._run_has_ended = True
        say("the pipeline's run was terminated: the job is cancelled")
        self.leave(0.0)

    def leave(self, after_s: float) -> None:
        """Let the job live only `after_s` longer, unless another attempt takes it over."""
        with self._lock:
            keeper = self._keeper
        if keeper is not None:
            keeper.leave(after_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step.

    Returns the exit code: the job's, 1 or 2 for an error of ours, 75 when another attempt of the step has taken the
    job over, 128 + N for signal N.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_signal)
    try:
        return _run(step_from(_parsed(arguments), os.environ))
    except GpuQuotaError as error:
        _say_why(f"error: {error.message}")
        return error.exit_code
    except _TakenOverError:
        _say_last("another attempt of this step has taken the job over, and goes on with it; this one ends")
        return EXIT_TAKEN_OVER
    except _StoppedError as stopped:
        return 128 + stopped.number


def say(text: str) -> None:
    """One line of our own in the step's log."""
    _write(f"gpuquota: {text}")


def _run(step: Step) -> int:
    client = connect()
    lease = Lease(holder=os.environ.get("KFP_POD_UID") or uuid.uuid4().hex, duration_s=step.lease_s)
    place = place_of(client)
    step = place.identified(step)
    held = _Held()
    place.watch_run(held.end)
    try:
        while (job := _job_of(client, place, step, lease, held)) is None:
            say("the job was lost before this launcher had it: a new one starts")
    except _StoppedError as stopped:
        # Ctrl-C is a person who wants it to end. A pod that is stopped may come back, and take the job over.
        follows = stopped.number != signal.SIGINT and place.make_way()
        held.leave(AFTER_STOP_S if follows else 0.0)
        raise
    place.close()
    code = _exit_code(job)
    (_say_why if code else say)(conclusion(job))
    return code


def _job_of(client: ClusterClient, place: Place, step: Step, lease: Lease, held: _Held) -> Job | None:
    """The step's job in its final state, its outputs brought home; None where another one must be started for it."""
    job, staging = claim(client, place, step, lease, say)
    keeper = held.keep(LeaseKeeper(connect, lease, job.spec, say))
    try:
        job = _followed(client, place, job, step, keeper)
    except JobFailedError:
        staging.discard()
        raise
    keeper.stop()
    if _is_lost(place, job, staging):
        return None
    if job.status.result_worker:
        staging.bring_home(job.status.result_worker)
    else:
        staging.discard()
    return job


def _is_lost(place: Place, job: Job, staging: Staging) -> bool:
    """Whether the job's end is not the step's: it was being stopped already when it was taken over, or its outputs went
    to the pod of an earlier attempt.
    """
    reason = job.status.reason
    if job.status.phase is Phase.CANCELLED:
        return reason is not None and reason.code is ReasonCode.LEASE_ENDED
    return job.status.phase is Phase.SUCCEEDED and not place.has_outputs(job, staging)


def _followed(client: ClusterClient, place: Place, job: Job, step: Step, keeper: LeaseKeeper) -> Job:
    """The job in its final state; its log and its changes are told on the way. Raises _TakenOverError."""
    max_runtime_s = step.options.max_runtime_s
    narrator = Narrator()
    follower = LogFollower(connect, job, _write)
    follower.start()
    for state in _states(client, job, step):
        if keeper.taken_over.is_set() and not state.status.phase.final:
            raise _TakenOverError
        for line in narrator.lines(state, time.monotonic()):
            say(line)
        follower.see(state)
        job = state
        if not job.status.phase.final and (result := place.result_of(job)):
            follower.await_end_of(result, _LOG_ENDS_WITHIN_S)
            return succeeded(job, result, time.time())
        place.show(narrator.state, progress_of(job))
        if _time_left(job, max_runtime_s, time.time()) <= 0:
            say(f"stopping: it has run for its max_runtime of {max_runtime_s:g} s")
            client.cancel_job(job.spec.project, job.spec.name)
    follower.join(_LOG_ENDS_WITHIN_S)
    for line in _untold_failure(client, job, follower.followed):
        _write(line)
    return job


def _states(client: ClusterClient, job: Job, step: Step) -> Iterator[Job]:
    """Each new state of a job up to the final one; the present one when its time is over, and once a renewal."""
    after: int | None = None
    while not job.status.phase.final:
        left_s = _time_left(job, step.options.max_runtime_s, time.time())
        wait_s = min(LONG_POLL_S, step.lease_s / RENEWALS, max(0.0, left_s))
        listed = _patiently(client, job, after, wait_s)
        after = listed.revision
        found = next((each for each in listed.jobs if each.uid == job.uid), None)
        if found is None:
            raise JobFailedError(f"the job {job.spec.name!r} was deleted")
        job = found
        yield job


def _patiently(client: ClusterClient, job: Job, after: int | None, wait_s: float) -> JobList:
    """The job alone, also through a cluster that is away for a while."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            timeout_s = 0.0 if after is None else wait_s
            return client.list_jobs(job.spec.project, name=job.spec.name, after=after, timeout_s=timeout_s)
        except ClusterUnavailableError:
            if time.monotonic() > give_up_at:
                raise
            say("the cluster does not answer; the job goes on, and so does this step")


def _time_left(job: Job, max_runtime_s: float | None, now: float) -> float:
    """Seconds that a job may still run; waiting in the queue costs nothing."""
    if max_runtime_s is None or job.status.started_at is None or job.status.phase is not Phase.RUNNING:
        return float("inf")
    return job.status.started_at + max_runtime_s - now


def _untold_failure(client: ClusterClient, job: Job, followed: Container[str]) -> list[str]:
    """The end of the log of the worker that failed first, where the step's log did not follow that one."""
    failed = [worker for worker in job.status.workers if worker.exit_code and worker.id not in followed]
    if job.status.phase is not Phase.FAILED or not failed:
        return []
    first = min(failed, key=lambda worker: worker.finished_at or 0.0)
    return tail(client, job, first)


def _exit_code(job: Job) -> int:
    """The job's, where it ended by itself."""
    if job.status.phase is Phase.SUCCEEDED:
        return 0
    return job.status.exit_code or 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kfp_gpuquota.dsl.launcher", description=__doc__)
    parser.add_argument("--stands-in-for", help="KFP's executor, which kfp.local wants to see named")
    parser.add_argument("--task", required=True, help="RUN/NAME; on a KFP backend the step's pod says it")
    parser.add_argument("--gpus", help="the GPUs asked for, where only the run knows them")
    parser.add_argument("--image", default="", help="the step's own image, where the launcher runs in another")
    parser.add_argument("--pod-resources", help="CPU and memory of a worker, where only the run knows them")
    parser.add_argument("--executor-input", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    separator = given.index("--")  # by hand: argparse's own handling of -- changes with Python's version
    return parser.parse_args(given[:separator], argparse.Namespace(argv=given[separator + 1 :]))


def _write(line: str) -> None:
    with _output:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _say_why(text: str) -> None:
    """Why the step fails: a line in its log, and its container's termination message.

    KFP's own launcher ends with 1 for every failure. Argo shows this message beside that code, on the step's node.
    """
    say(text)
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(f"gpuquota: {text}"[:_MESSAGE_LENGTH], encoding="utf-8")


def _say_last(text: str) -> None:
    """The step's last line: the thread that follows the log says nothing after it."""
    say(text)
    _output.acquire()


def _on_signal(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the last call
    raise _StoppedError(number)
