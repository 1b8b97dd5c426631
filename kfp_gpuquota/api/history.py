"""The bounded history of a cluster: reports of trainings, and GPUs held by each project."""

from __future__ import annotations

import msgspec


class Report(msgspec.Struct, frozen=True, array_like=True):
    """One report of a training; `at` and `checkpoint_at` are in seconds since the epoch, `throughput` in samples/s."""

    at: float
    step: int
    metrics: dict[str, float] = {}
    throughput: float | None = None
    workers: int | None = None
    checkpoint_at: float | None = None


class GpuHours(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours of a project over a time: within its guarantee, borrowed, and both together.

    `unused`: those in which the GPUs did nothing while the project held them; None where that was not measured.
    """

    project: str
    guaranteed: float = 0.0
    borrowed: float = 0.0
    total: float = 0.0
    unused: float | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A project's mean GPUs in an interval: held, held beyond the guarantee, asked for, guaranteed.

    The interval begins at `at` (seconds since the epoch) and is `width_s` long, of which `seconds` were measured.
    """

    project: str
    at: int
    width_s: int
    seconds: float
    held: float
    borrowed: float
    wanted: float
    guaranteed: float
