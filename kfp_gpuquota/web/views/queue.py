"""The Queue page: every job with the sentence why it waits, its place, and what comes before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kfp_gpuquota.api import Kind, Phase, ReasonCode
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.arrays import groups_of, name_of, reason_of
from kfp_gpuquota.api.label_selector import selects
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.query import ListChoices, Query, Slice
from kfp_gpuquota.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.web.views.board import Board

SIZES: Final = (25, 100, 250, 1000)
STATES: Final = {
    "active": "not ended",
    "waiting": "waiting",
    "running": "running",
    "suspended": "suspended",
    "ended": "ended",
    "all": "all",
}


def _progress(job: Job) -> float:
    progress = job.status.progress
    if progress is None:
        return -1.0
    return progress.step / progress.total_steps if progress.total_steps else 0.0


SORTS: Final[Mapping[str, tuple[str, Callable[[Job], Any]]]] = {
    "job": ("name", lambda job: (job.spec.name, job.spec.project)),
    "project": ("project", lambda job: job.spec.project),
    "state": ("state", lambda job: job.status.phase.value),
    "gpus": ("GPUs", lambda job: (job.status.gpus, job.spec.gpus)),
    "progress": ("progress", _progress),
    "reason": ("why", lambda job: job.status.reason.code.value if job.status.reason else ""),
    "submitted": ("time of submission", lambda job: job.status.submitted_at),
}
_RUNNING: Final = frozenset({Phase.STARTING.value, Phase.RUNNING.value, Phase.STOPPING.value})
_IN_STATE: Final[Mapping[str, Callable[[Job], bool]]] = {
    "active": lambda job: not job.status.phase.final,
    "waiting": lambda job: job.status.phase is Phase.PENDING,
    "running": lambda job: job.status.phase.value in _RUNNING,
    "suspended": lambda job: job.status.phase is Phase.SUSPENDED,
    "ended": lambda job: job.status.phase.final,
}


@dataclass(frozen=True, kw_only=True)
class Filter(ListChoices):
    """Which jobs are shown: of a project, a kind, a state, with a word in the name, a label, a reason, a GPU, a user.

    `gpu` is a type of GPUs on which a job runs, or for which it asks. Jobs of an array that wait, or have ended alike,
    are one row, unless it is the `array` that is chosen.
    """

    KEYS: ClassVar = (
        "project", "kind", "state", "word", "array", "selector", "reason", "gpu", "user", "sort", "size", "page",
    )  # fmt: skip

    kind: str = ""
    state: str = "active"
    array: str = ""
    reason: str = ""
    user: str = ""
    size: int = 100

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filter:
        """Return the filter of a query string."""
        query = Query(given)
        return cls(
            **cls.common(query, SORTS, max(SIZES)),
            kind=query.choice("kind", list(Kind)),
            state=query.choice("state", STATES, "active"),
            array=query.text("array"),
            reason=query.choice("reason", list(ReasonCode)),
            user=query.text("user"),
            problems=tuple(query.problems),
        )

    @property
    def further(self) -> bool:
        """Whether a choice of the form's second part is made."""
        return bool(self.reason or self.gpu or self.user or self.sort or self.size != Filter.size)

    def conditions(self, models: Mapping[str, frozenset[str]]) -> Iterator[Callable[[Job], object]]:
        """Yield what a job has to meet to be shown; `models` are the types of each node's GPUs."""
        if self.state != "all":
            yield _IN_STATE[self.state]
        if self.project:
            yield lambda job: job.spec.project == self.project
        if self.kind:
            yield lambda job: job.spec.kind == self.kind
        if self.word:
            yield lambda job: self.word in job.spec.name.lower()
        if self.array:
            yield lambda job: job.spec.array is not None and job.spec.array.name == self.array
        if self.reason:
            yield lambda job: job.status.reason is not None and job.status.reason.code == self.reason
        if self.user:
            yield lambda job: job.owner == self.user
        if self.selector:
            yield lambda job: self.required and selects(self.required, job.spec.labels)
        if self.gpu:
            yield lambda job: self.gpu in _models(job, models)


class Rows:
    """Rendered rows of jobs; one is rendered again when its job or its place has changed."""

    def __init__(self, base: str, most: int = 4 * max(SIZES)) -> None:
        self._base, self._most = base, most
        self._rows: dict[str, tuple[Job, str, str]] = {}

    def of(self, groups: Iterable[list[Job]], place: Callable[[Job], str], wanted: Filter) -> dict[str, str]:
        """Return HTML by element id, in the order given: of each job, or of jobs of an array together."""
        if len(self._rows) > self._most:
            self._rows.clear()
        found = dict[str, str]()
        for jobs in groups:
            job = jobs[0]
            if len(jobs) == 1:
                found[f"job-{job.uid}"] = self._row(job, place(job))
            else:
                found[f"array-{job.uid}"] = self._array_row(jobs, wanted)
        return found

    def _array_row(self, jobs: list[Job], wanted: Filter) -> str:
        job = jobs[0]
        assert job.spec.array is not None
        return render(
            "array_row.html",
            job=job,
            jobs=jobs,
            name=name_of(jobs),
            reason=reason_of(jobs),
            link=wanted.link(array=job.spec.array.name, project=job.spec.project),
        )

    def _row(self, job: Job, place: str) -> str:
        found = self._rows.get(job.uid)
        if found is None or found[0] is not job or found[1] != place:
            found = self._rows[job.uid] = (job, place, render("job_row.html", job=job, place=place, base=self._base))
        return found[2]


def elements(board: Board, wanted: Filter, rows: Rows) -> Elements:
    """Return what the page shows."""
    shown = admitted(board, wanted)
    groups = [[job] for job in shown] if wanted.array else groups_of(shown)
    part = Slice.of(wanted, len(groups))
    waiting = sum(job.status.phase is Phase.PENDING for job in shown)
    total = len(board.facts.jobs)
    counts = render("job_counts.html", part=part, jobs=len(shown), total=total, waiting=waiting, chosen=wanted)
    pager = render("pager.html", part=part, chosen=wanted, sizes=SIZES, things="jobs")
    listed = rows.of(groups[part.begin : part.end], board.places(), wanted)
    return Elements({"counts": counts, "pager": pager}, {"jobs": listed})


def admitted(board: Board, wanted: Filter) -> Sequence[Job]:
    """Return the jobs that the filter admits, in the order that it asks for; those that are equal in it as queued."""
    models = {view.node.name: frozenset(view.types) for view in board.nodes() if wanted.gpu}
    found: list[Job] = list(board.facts.in_order)
    for condition in wanted.conditions(models):
        found = [job for job in found if condition(job)]
    column = wanted.sort.removeprefix("-")
    if column:
        found.sort(key=SORTS[column][1], reverse=wanted.sort.startswith("-"))
    return found


def _models(job: Job, models: Mapping[str, frozenset[str]]) -> frozenset[str]:
    running = [models.get(worker.node, frozenset()) for worker in job.status.workers]
    return frozenset().union({job.spec.node_selector.get(GPU_PRODUCT, "")}, job.spec.gpu_types, *running)
