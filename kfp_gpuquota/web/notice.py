"""What another program than the scheduler has reported about a job: on Kubernetes an Event."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """`at` is the last time (seconds since the epoch) of `count`; `about` is a worker, "" for the job itself."""

    at: float
    about: str
    reason: str
    message: str
    warning: bool = False
    count: int = 1
