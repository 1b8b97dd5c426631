"""The messages of workers: each one is decoded, then verified against its job before it is processed.

A job's token opens its own membership only, and a message names only its sender, workers of its job, and generations
that the job was given. Otherwise one job could have another one's workers killed, or make its coordinator remember
without limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError
from kfp_gpuquota.membership import WorkerEvent
from kfp_gpuquota.server.membership.training_reports import MAX_STEP, ProgressReported, StepsTimed

if TYPE_CHECKING:
    from collections.abc import Collection

    from kfp_gpuquota.membership import Membership

T = TypeVar("T")
Message = WorkerEvent | ProgressReported | StepsTimed

MAX_WORKERS: Final = 10_000
"""Workers of one job that its coordinator remembers, those that have ended included."""
MAX_UNNAMED: Final = 256
"""Those of them that the cluster has not named: a worker may connect before the cluster's plan has arrived."""
MAX_ID_LENGTH: Final = 512
MAX_INCARNATION_LENGTH: Final = 64
_LINE = msgspec.json.Decoder(Message)


def decode(line: bytes) -> Message:
    """Return the message of a line. Raises msgspec.DecodeError."""
    message: Message = decoded(_LINE, line)
    return message


def decoded(decoder: msgspec.json.Decoder[T], text: bytes) -> T:
    """Return what the decoder reads. Raises msgspec.DecodeError, also for text that is nested too deeply."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise msgspec.DecodeError("the JSON is nested too deeply") from None


def check_worker(worker: str, prefix: str, machine: Membership) -> None:
    """Raise InvalidFieldError for an id that is not one of the job's, ClusterUnavailableError for one too many."""
    _check_workers((worker,), prefix, machine)


def check(message: Message, worker: str, prefix: str, machine: Membership) -> None:
    """Raise InvalidFieldError where a message of `worker` names what is not its own or its job's."""
    if message.worker != worker:
        raise InvalidFieldError("worker", message.worker[:80], f"this connection is that of {worker!r}")
    for name, most in (("generation", machine.highest), ("step", MAX_STEP)):
        number = getattr(message, name, 0)
        if not 0 <= number <= most:
            raise InvalidFieldError(name, number, f"it must be from 0 to {most}")
    members = getattr(message, "members", None) or ()
    if len(members) > MAX_WORKERS:
        raise InvalidFieldError("members", len(members), f"at most {MAX_WORKERS} workers train together")
    _check_workers(members, prefix, machine)


def _check_workers(workers: Collection[str], prefix: str, machine: Membership) -> None:
    for worker in workers:
        if not worker.startswith(prefix):
            raise InvalidFieldError("worker", worker[:80], f"the ids of this job's workers begin with {prefix!r}")
        if len(worker) > MAX_ID_LENGTH:
            raise InvalidFieldError("worker", worker[:80], f"an id has {MAX_ID_LENGTH} characters at most")
    unnamed = sum(worker not in machine.members for worker in workers)
    if unnamed and len(machine.members) + unnamed > MAX_WORKERS:
        raise ClusterUnavailableError(f"the job has {MAX_WORKERS} workers already")
    if unnamed and machine.unnamed + unnamed > MAX_UNNAMED:
        raise ClusterUnavailableError(f"the job has {MAX_UNNAMED} workers that its cluster has not named")
