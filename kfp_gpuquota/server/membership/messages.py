"""The messages of workers: each one is decoded, then verified against its job before it is processed.

A job's token opens its own membership only, and a message names only its sender, workers of its job, and generations
that the job was given. Otherwise one job could have another one's workers killed, or make its coordinator remember
without limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError
from kfp_gpuquota.membership import WorkerEvent
from kfp_gpuquota.server.membership.training_reports import ProgressReported, StepsTimed

if TYPE_CHECKING:
    from kfp_gpuquota.membership import Membership

Message = WorkerEvent | ProgressReported | StepsTimed

MAX_WORKERS: Final = 10_000
"""Workers of one job that its coordinator remembers, those that have ended included."""
MAX_STEP: Final = 1 << 53
_LINE = msgspec.json.Decoder(Message)


def decode(line: bytes) -> Message:
    """Return the message of a line. Raises msgspec.DecodeError."""
    message: Message = _LINE.decode(line)
    return message


def check_worker(worker: str, prefix: str, machine: Membership) -> None:
    """Raise InvalidFieldError for an id that is not one of the job's, ClusterUnavailableError for one too many."""
    if not worker.startswith(prefix):
        raise InvalidFieldError("worker", worker, f"the ids of this job's workers begin with {prefix!r}")
    if worker not in machine.members and len(machine.members) >= MAX_WORKERS:
        raise ClusterUnavailableError(f"the job has {MAX_WORKERS} workers already")


def check(message: Message, worker: str, prefix: str, machine: Membership) -> None:
    """Raise InvalidFieldError where a message of `worker` names what is not its own or its job's."""
    if message.worker != worker:
        raise InvalidFieldError("worker", message.worker, f"this connection is that of {worker!r}")
    for name, most in (("generation", machine.highest), ("step", MAX_STEP)):
        number = getattr(message, name, 0)
        if not 0 <= number <= most:
            raise InvalidFieldError(name, number, f"it must be from 0 to {most}")
    members = getattr(message, "members", None) or ()
    if len(members) > MAX_WORKERS:
        raise InvalidFieldError("members", len(members), f"at most {MAX_WORKERS} workers train together")
    for member in members:
        check_worker(member, prefix, machine)
