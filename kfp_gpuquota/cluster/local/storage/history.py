"""What the cluster keeps of the past for charts and reports: figures of trainings, and GPUs held by each project.

Both are bounded. Of a training's reports every one is stored until there are `MOST_REPORTS`; then every second one is
deleted, and from then on every second one stored, and so on: the n-th report is stored if n is a multiple of the
stride, which follows from the newest n alone. Of a training that has ended fewer are kept. Usage is added up in
intervals of several widths, each kept for a time of its own; what a daemon had measured of an interval when it ended is
added to by the next one.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.history import Report, counted_as, gpu_hours_of, held_hours_of
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.api.history import GpuHours, HeldHours, Holder
    from kfp_gpuquota.api.wire import NodeView, ProjectView
    from kfp_gpuquota.cluster.local.storage.store import Store
    from kfp_gpuquota.engine.job_book import Change
    from kfp_gpuquota.engine.records import JobRecord

MOST_REPORTS: Final = 400
MOST_REPORTS_OF_ENDED: Final = 100
"""Thousands of ended jobs may be kept."""
MOST_METRICS: Final = 8
LONGEST_NAME: Final = 60
CACHED_JOBS: Final = 64
SAMPLE_S: Final = 10.0
MEMORY_SAMPLES: Final = 90
KEPT_S: Final = {30: 3600, 600: 86_400, 3600: 8 * 86_400, 86_400: 400 * 86_400}
"""Widths of usage intervals, and for how long those of each width are kept, in seconds."""
MOST_HOLDERS: Final = 500
"""Holders of an interval that are distinguished: jobs name their users as they like."""

log = logging.getLogger(__name__)


def stride_of(number: int, most: int = MOST_REPORTS) -> int:
    """Return of how many reports one is stored when `number` is the newest, counted from 0."""
    stride = 1
    while number >= most * stride:
        stride *= 2
    return stride


class ReportHistory:
    """The stored reports of trainings. Those of the jobs that were last used are kept in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loaded: OrderedDict[str, list[tuple[int, Report]]] = OrderedDict()
        self._next: dict[str, int] = {}

    def write(self, change: Change, before: Mapping[str, JobRecord]) -> None:
        """Store the reports of a change, within its transaction; `before` are the jobs without it."""
        for uid, job in change.jobs.items():
            if job is None:
                self._loaded.pop(uid, None)
                self._next.pop(uid, None)
                continue
            former = before.get(uid)
            progress = job.status.progress
            if progress is not None and former is not None and former.status.progress is not progress:
                self._add(uid, _report(progress))
            if former is not None and job.status.phase.final and not former.status.phase.final:
                self._thin(uid, stride_of(self._newest(uid), MOST_REPORTS_OF_ENDED))

    def of(self, uid: str) -> list[Report]:
        """Return a training's stored reports, oldest first."""
        return [report for _, report in self._reports(uid)]

    def _add(self, uid: str, report: Report) -> None:
        reports = self._reports(uid)
        number = self._newest(uid) + 1
        self._next[uid] = number + 1
        stride = stride_of(number)
        if stride != stride_of(number - 1):
            self._thin(uid, stride)
        if number % stride == 0:
            self._store.save_report(uid, number, report)
            reports.append((number, report))

    def _newest(self, uid: str) -> int:
        """Return the number of the last report, whether it is stored or not; -1 before the first."""
        reports = self._reports(uid)
        return self._next.get(uid, reports[-1][0] + 1 if reports else 0) - 1

    def _thin(self, uid: str, stride: int) -> None:
        """Keep the reports whose number is a multiple of the stride."""
        if stride > 1:
            self._store.thin_reports(uid, stride)
            reports = self._reports(uid)
            reports[:] = [(number, kept) for number, kept in reports if number % stride == 0]

    def _reports(self, uid: str) -> list[tuple[int, Report]]:
        found = self._loaded.get(uid)
        if found is None:
            found = self._loaded[uid] = self._store.load_reports(uid)
            while len(self._loaded) > CACHED_JOBS:
                dropped, _ = self._loaded.popitem(last=False)
                self._next.pop(dropped, None)
        self._loaded.move_to_end(uid)
        return found


class UsageHistory:
    """GPUs of each project over time, and of each user and type of GPU in it, sampled."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sampled_at: float | None = None

    def sample(self, projects: Iterable[ProjectView], held: Mapping[Holder, float], now: float) -> None:
        """Add what projects and users hold at `now` (seconds since the epoch) for the time since the sample before.

        A longer time than two samples was not measured: the daemon was stopped, or the machine asleep.
        """
        before, self._sampled_at = self._sampled_at, now
        if before is None or not 0 < now - before <= 2 * SAMPLE_S:
            return
        seconds = now - before
        rows = [
            (
                width_s,
                int(now // width_s) * width_s,
                view.project.name,
                seconds,
                view.allocated * seconds,
                view.over_quota * seconds,
                view.requested * seconds,
                view.project.guaranteed_in_all * seconds,
            )
            for view in projects
            if view.allocated or view.requested or view.project.guaranteed_in_all
            for width_s in KEPT_S
        ]
        if not rows:
            return
        try:
            with self._store.transaction(durable=False):
                self._store.add_usage(rows)
                for width_s in KEPT_S:
                    self._add_held(width_s, int(now // width_s) * width_s, held, seconds)
                for width_s, kept_s in KEPT_S.items():
                    self._store.forget_usage(width_s, now - kept_s - width_s)
        except StateFileError as error:
            log.error("the projects' usage of %.0f s is not recorded: %s", seconds, error)

    def _add_held(self, width_s: int, at: int, held: Mapping[Holder, float], seconds: float) -> None:
        if not held:
            return
        known = self._store.holders(width_s, at)
        self._store.add_held(
            (width_s, at, *counted_as(one, known, MOST_HOLDERS), gpus * seconds) for one, gpus in held.items()
        )


def gpu_hours(store: Store, now: float, since_s: float) -> tuple[GpuHours, ...]:
    """Return the projects' GPU-hours of the last `since_s` seconds, the most first.

    They are read from the narrowest intervals that are kept for so long; the first one may begin up to its width
    earlier.
    """
    return gpu_hours_of(store.load_usage(_width_for(since_s), now - since_s))


def held_hours(store: Store, now: float, since_s: float) -> tuple[HeldHours, ...]:
    """Return the GPU-hours of each user and type of GPU of the last `since_s` seconds, as `gpu_hours`."""
    return held_hours_of(store.load_held(_width_for(since_s), now - since_s))


def _width_for(since_s: float) -> int:
    return next((width for width, kept_s in KEPT_S.items() if since_s <= kept_s), max(KEPT_S))


class MemoryHistory:
    """Memory that workers used of the GPUs that they share, sampled; in memory only, of workers that run."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def sample(self, nodes: Iterable[NodeView], now: float) -> None:
        """Add what each worker uses at `now` (seconds since the epoch)."""
        shares = {(share.worker, share.device): share for view in nodes for share in view.shares}
        self._used = {key: self._used.get(key, deque(maxlen=MEMORY_SAMPLES)) for key in shares}  # the others have ended
        for key, share in shares.items():
            self._used[key].append((now, share.used_mib))

    def of(self, worker: str, device: int) -> tuple[tuple[float, int], ...]:
        """Return (time, MiB) of one worker on one device, oldest first."""
        return tuple(self._used.get((worker, device), ()))


def _report(progress: Progress) -> Report:
    named = [(name, value) for name, value in progress.metrics.items() if math.isfinite(value)][:MOST_METRICS]
    strange = list(progress.not_finite.items())[: MOST_METRICS - len(named)]
    return Report(
        at=progress.at,
        step=progress.step,
        metrics={name[:LONGEST_NAME]: value for name, value in named},
        throughput=progress.throughput,
        workers=progress.workers,
        checkpoint_at=progress.checkpoint_at,
        not_finite={name[:LONGEST_NAME]: value for name, value in strange},
        noise_scale=progress.noise_scale,
    )
