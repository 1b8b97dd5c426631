"""The bounded history of a cluster: reports of trainings, and GPUs held by each project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GPU_USE_WIDTH_S: Final = 30.0
GPU_USE_KEPT_S: Final = 7200.0
"""The use of each GPU is kept in memory for so long, in intervals of that width."""
OTHER_USERS: Final = "(others)"
"""Stands for the users of a project beyond the number that is distinguished."""
_HOUR_S: Final = 3600.0


class Report(msgspec.Struct, frozen=True, array_like=True):
    """One report of a training; `at` and `checkpoint_at` are in seconds since the epoch, `throughput` in samples/s.

    `not_finite` has the metrics for which JSON has no number: "nan", "inf" or "-inf". `noise_scale` is in samples.
    """

    at: float
    step: int
    metrics: dict[str, float] = {}
    throughput: float | None = None
    workers: int | None = None
    checkpoint_at: float | None = None
    not_finite: dict[str, str] = {}
    noise_scale: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """All metrics as numbers, those that are not finite included."""
        return self.metrics | {name: float(value) for name, value in self.not_finite.items()}


class UsePoint(msgspec.Struct, frozen=True, array_like=True):
    """The use of one GPU in the interval that begins at `at`: percent of its time, and at most so much memory."""

    at: float
    percent: float
    used_mib: int | None = None

    @property
    def until(self) -> float:
        """Return the end of the interval."""
        return self.at + GPU_USE_WIDTH_S


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one device of a node over time, oldest first."""

    node: str
    device: int
    model: str = ""
    memory_mib: int = 0
    points: tuple[UsePoint, ...] = ()


class GpuHours(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours of a project over a time: within its guarantee, borrowed, and both together.

    `unused`: those in which the GPUs did nothing while the project held them; None where that was not measured.
    """

    project: str
    guaranteed: float = 0.0
    borrowed: float = 0.0
    total: float = 0.0
    unused: float | None = None


class HeldHours(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours that the jobs of one user held in a project, on GPUs of one type.

    `user` is "" where jobs name none, `gpu_type` as in the label that NVIDIA's GPU feature discovery writes.
    """

    project: str
    user: str = ""
    gpu_type: str = ""
    gpu_hours: float = 0.0


class Holder(NamedTuple):
    """Whose jobs hold GPUs, and of which type."""

    project: str
    user: str
    gpu_type: str


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


def gpu_hours_of(usage: Iterable[Usage]) -> tuple[GpuHours, ...]:
    """Return the projects' GPU-hours in these intervals, the most first. The parts as shown add up to the total."""
    held: dict[str, tuple[float, float]] = {}
    for one in usage:
        total, borrowed = held.get(one.project, (0.0, 0.0))
        held[one.project] = total + one.held * one.seconds, borrowed + one.borrowed * one.seconds
    rows = []
    for project, (total, borrowed) in held.items():
        hours, over = round(total / _HOUR_S, 2), round(borrowed / _HOUR_S, 2)
        rows.append(GpuHours(project=project, guaranteed=round(hours - over, 2), borrowed=over, total=hours))
    return tuple(sorted(rows, key=lambda row: (-row.total, row.project)))


def counted_as(holder: Holder, known: set[Holder], most: int) -> Holder:
    """Return the holder, or all other users of its project if `most` are `known` without it; it is known then."""
    if holder not in known and len(known) >= most:
        holder = holder._replace(user=OTHER_USERS)
    known.add(holder)
    return holder


def held_hours_of(held_s: Mapping[Holder, float]) -> tuple[HeldHours, ...]:
    """Return GPU-seconds as GPU-hours, the most first."""
    rows = (
        HeldHours(project=one.project, user=one.user, gpu_type=one.gpu_type, gpu_hours=round(seconds / _HOUR_S, 4))
        for one, seconds in held_s.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.gpu_hours, row.project, row.user, row.gpu_type)))
