"""The Queue page: every job with the sentence why it waits, its place, and what comes before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Kind, Phase
from kfp_gpuquota.api.label_selector import Requirement, parse_selector, selects
from kfp_gpuquota.api.queue import queued
from kfp_gpuquota.api.wording import place_of
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.queue import Queued
    from kfp_gpuquota.web.source import Source

PAGE: Final = 1000
STATES: Final = {
    "active": "not ended",
    "waiting": "waiting",
    "running": "running",
    "suspended": "suspended",
    "ended": "ended",
    "all": "all",
}
_ORDER: Final = {
    Phase.PENDING: 0,
    Phase.STARTING: 1,
    Phase.RUNNING: 2,
    Phase.STOPPING: 3,
    Phase.SUSPENDED: 4,
}
_LAST: Final = 5


@dataclass(frozen=True)
class Filter:
    """What is shown: of a project, of a kind, in a state, with a word in its name; from `page` on (0 is the first).

    And with the labels that `selector` requires; `problem` is why it cannot be read, and then nothing is shown.
    """

    project: str = ""
    kind: str = ""
    state: str = "active"
    word: str = ""
    page: int = 0
    selector: str = ""
    required: tuple[Requirement, ...] = ()
    problem: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """Return the filter of a query; values that do not exist count as not given."""
        page, selector, problem = query.get("page", ""), query.get("selector", "").strip(), ""
        required: tuple[Requirement, ...] = ()
        try:
            required = parse_selector(selector)
        except InvalidFieldError as error:
            problem = error.message
        return cls(
            selector=selector,
            required=required,
            problem=problem,
            project=query.get("namespace") or query.get("project", ""),
            kind=query.get("kind", "") if query.get("kind") in set(Kind) else "",
            state=query["state"] if query.get("state") in STATES else "active",
            word=query.get("word", "").strip().lower(),
            page=int(page) if page.isascii() and page.isdecimal() and len(page) <= 6 else 0,
        )

    def admits(self, job: Job) -> bool:
        """Whether the job is shown."""
        return (
            not self.problem
            and (not self.project or job.spec.project == self.project)
            and (not self.kind or job.spec.kind == self.kind)
            and (not self.word or self.word in job.spec.name.lower())
            and selects(self.required, job.spec.labels)
            and _in_state(job.status.phase, self.state)
        )


class Rows:
    """Rendered rows of jobs; one is rendered again when its job or its place has changed."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._rows: dict[str, tuple[Job, str, str]] = {}

    def of(self, jobs: Iterable[Job], places: Mapping[str, str]) -> dict[str, str]:
        """Return HTML by element id, in the order given."""
        return {f"job-{job.uid}": self._row(job, places.get(job.uid, "")) for job in jobs}

    def forget_all_but(self, uids: set[str]) -> None:
        """Drop the rows of jobs that were deleted."""
        if len(self._rows) > len(uids):
            self._rows = {uid: row for uid, row in self._rows.items() if uid in uids}

    def _row(self, job: Job, place: str) -> str:
        found = self._rows.get(job.uid)
        if found is None or found[0] is not job or found[1] != place:
            found = self._rows[job.uid] = (job, place, render("job_row.html", job=job, place=place, base=self._base))
        return found[2]


def elements(source: Source, wanted: Filter, rows: Rows) -> Elements:
    """Return what the page shows."""
    jobs = source.jobs()
    rows.forget_all_but({job.uid for job in jobs})
    shown = sorted((job for job in jobs if wanted.admits(job)), key=_key)
    begin = wanted.page * PAGE
    counts = render(
        "job_counts.html",
        shown=len(shown),
        begin=begin,
        end=min(len(shown), begin + PAGE),
        total=len(jobs),
        waiting=sum(job.status.phase is Phase.PENDING for job in shown),
    )
    return Elements({"counts": counts}, {"jobs": rows.of(shown[begin : begin + PAGE], places(jobs))})


def places(jobs: Iterable[Job]) -> dict[str, str]:
    """Return by uid what comes before each job that waits, in its project's own order."""
    queues: dict[tuple[str, str], list[Queued]] = {}
    for job in jobs:
        if (mine := queued(job)) is not None:
            queues.setdefault((job.spec.project, mine.pool), []).append(mine)
    return {
        each.uid: place_of(ordered, i)
        for waiting in queues.values()
        for ordered in [sorted(waiting, key=lambda one: one.key)]
        for i, each in enumerate(ordered)
    }


def _key(job: Job) -> tuple[int, int, float]:
    order = _ORDER.get(job.status.phase, _LAST)
    if order == _LAST:
        return order, 0, -(job.status.finished_at or 0.0)
    return order, -job.spec.effective_priority, job.status.submitted_at


def _in_state(phase: Phase, state: str) -> bool:
    match state:
        case "active":
            return not phase.final
        case "waiting":
            return phase is Phase.PENDING
        case "running":
            return phase in {Phase.STARTING, Phase.RUNNING, Phase.STOPPING}
        case "suspended":
            return phase is Phase.SUSPENDED
        case "ended":
            return phase.final
        case _:
            return True
