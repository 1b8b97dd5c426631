"""Why a user's request, or the end of a launcher, stops a job; the same sentences on every kind of cluster."""

from __future__ import annotations

from typing import Final

from kfp_gpuquota.api import Reason, ReasonCode

DELETED: Final = Reason(code=ReasonCode.USER, message="deleted by a user")
SUSPENDED: Final = Reason(code=ReasonCode.SUSPENDED, message="suspended by a user")
CANCELLED: Final = Reason(code=ReasonCode.USER, message="cancelled by a user")


def ran_too_long(max_runtime_s: float) -> Reason:
    """Return why a job fails that has run for its `max_runtime_s`."""
    message = f"it has run for {max_runtime_s:g} s, which is its maximum run time"
    return Reason(code=ReasonCode.RAN_TOO_LONG, message=message)


def lease_ended(duration_s: float) -> Reason:
    """Return why a job is cancelled whose lease of `duration_s` was not renewed."""
    message = f"its lease of {duration_s:g} s has expired: its launcher has ended, and none has taken over"
    return Reason(code=ReasonCode.LEASE_ENDED, message=message)
