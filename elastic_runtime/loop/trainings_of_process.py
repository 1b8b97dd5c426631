"""The jobs and trainings of this process: a cluster's worker has one, a notebook may have several of one model."""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_runtime.errors import UsageError
from elastic_runtime.loop.error_notes import note_on_lightning
from elastic_runtime.process.process_exit import end_with, failed

if TYPE_CHECKING:
    import torch

    from elastic_runtime.loop.job import Job
    from elastic_runtime.loop.session import Session

UNTRAINED = (
    "the script called elastic_runtime.init() and ended without a step of job.epochs(...) or job.steps(...): nothing "
    "was shared, each worker did the same work by itself, and job.is_leader was False on all of them; write: model, "
    "optimizer, loader = job.prepare(model, optimizer, loader), iterate over job.epochs(N), and call job.backward(loss)"
)

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_coordinated: list[Job] = []  # the newest job that has a coordinator: what the process is for
_directories: dict[str, weakref.ref[Job]] = {}  # of checkpoints: the job of this process whose they are
_trained: list[Job] = []  # the first job of this process whose loop began, if a coordinator manages it


def current_job() -> Job | None:
    """Return the job that this process is a worker of, for integrations that do not make it; None without one."""
    return _coordinated[0] if _coordinated else None


def note_coordinated(job: Job) -> None:
    """Note a job that has a coordinator."""
    _coordinated[:] = [job]


def check_only_one(job: Job) -> None:
    """Raise UsageError for a second training in a cluster's process: the job has ended with the first one."""
    if _trained and _trained[0] is not job:
        raise UsageError(
            "this process has trained another job already: a cluster runs one training for each process, and ends "
            "the job with it; submit a job for each training (fold, seed), as gpuquota submit fold-1 --elastic -- "
            "python train.py --fold 1"
        )


def note_training(job: Job, directory: str, *, coordinated: bool) -> None:
    """Note that the job's loop begins. `directory`: of its checkpoints, or "".

    UsageError for the second one of a cluster's process, for one of it in a thread, and for one that would continue
    from the checkpoints of another training of this process.
    """
    if coordinated:
        check_only_one(job)
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "the training runs in a thread, but SIGTERM and the end of a worker that leaves its job are events of "
                "the main thread: the rest of the script would run as if the training had finished; call it in the "
                "main thread, and the rest of the script in a thread"
            )
        _trained[:] = [job]
    elif directory and _directories.setdefault(str(Path(directory).resolve()), weakref.ref(job))() is not job:
        raise UsageError(
            f"another training of this process has its checkpoints in ELASTIC_CHECKPOINT_DIR {directory!r}, from which "
            "this one would continue; give each its own (a fold, a seed), before elastic_runtime.init(): "
            'os.environ["ELASTIC_CHECKPOINT_DIR"] = f"checkpoints/fold-{fold}"'
        )


def fail_untrained() -> None:
    """Fail at the exit of a cluster's worker whose loop never began, for each worker would have done all the work by
    itself, and none would have been the one that saves.
    """
    if failed() or _trained:
        return
    print(f"{UsageError.__name__}: {UNTRAINED}{note_on_lightning()}", file=sys.stderr, flush=True)  # noqa: T201  (there is no caller)
    end_with(UsageError.exit_code)


def note_session(session: Session) -> None:
    """Note that the session's model is trained."""
    _sessions.add(session)


def take_from_others(model: torch.nn.Module) -> None:
    """Release the model from an earlier job: a notebook makes a job again for the same model."""
    for session in list(_sessions):
        if session.owns(model.parameters()):
            session.release()
