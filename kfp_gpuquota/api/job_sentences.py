"""Sentences about jobs that the command line and the web page share. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.quantity import show_gpus, show_mib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo

    from kfp_gpuquota.api.job import ExpectedStart, JobSpec, Phase
    from kfp_gpuquota.api.queue import Queued

NAMED_BEFORE: Final = 3


def over(name: str, phase: Phase) -> str:
    """Return why a change of a job that has ended, or is being stopped permanently, is refused."""
    how = f"has ended ({phase.value})" if phase.final else "is being stopped"
    return f"job {name!r} {how}; submit it again instead"


def name_taken(project: str, name: str) -> str:
    """Return why a job is refused whose name another one has."""
    return (
        f"project {project!r} already has a job {name!r}; choose another name, or delete it first: "
        f"gpuquota delete -p {project} {name}"
    )


def preemption_of(spec: JobSpec) -> str:
    """Return what others may reclaim of the job, as text."""
    if spec.may_be_preempted:
        return "preemptible"
    return f"preemptible above {show_gpus(spec.smallest)}" if spec.elastic else "not preemptible"


def request_of(spec: JobSpec) -> str:
    """Return what the job asks for: "4 GPUs, elastic from 2 to 8", "0.25 of a GPU, up to 0.5 while it is idle"."""
    if spec.shared:
        compute = "" if spec.gpu_compute is None else f", {spec.gpu_compute:g} of the computing power"
        return f"{spec.asks} of {'a GPU' if spec.gpus == 1 else 'GPUs'}{_limit(spec)}{compute}"
    if not spec.elastic:
        return show_gpus(spec.gpus)
    return f"{show_gpus(spec.gpus)}, elastic from {spec.smallest} to {spec.largest}"


def show_field(value: float) -> str:
    """Return a field's value: an amount of memory in MiB as such, a fraction as a number."""
    return show_mib(value) if isinstance(value, int) and value > 1 else f"{value:g}"


def place_of(ordered: Sequence[Queued], index: int) -> str:
    """Return the place of one of a project's waiting jobs and pods, which are in order.

    The last ones before it are named: it starts after them.
    """
    if len(ordered) == 1:
        return "It is the only one that waits in its project."
    if index == 0:
        return f"It is the first of {len(ordered)} that wait in its project."
    before = [each.name for each in ordered[max(0, index - NAMED_BEFORE) : index]]
    more = f"{index - len(before)} others and " if index > len(before) else ""
    return f"It is number {index + 1} of {len(ordered)} that wait in its project, after {more}{', '.join(before)}."


def expected_start_of(expected: ExpectedStart, now: float, zone: tzinfo | None = None, *, accuracy: bool = True) -> str:
    """Return when a waiting job is expected to start: "between 14:10 and 14:40", in the time zone or the local one.

    A time of another day has its date; a range within one minute is one time, and one in the past is "soon". With
    `accuracy` also how many of the latest estimates held, if that is known.
    """
    if expected.latest <= now:
        return "soon"
    today = datetime.fromtimestamp(now, zone).date()

    def shown(at: float) -> str:
        time = datetime.fromtimestamp(at, zone)
        return f"{time:%H:%M}" if time.date() == today else f"{time:%a %d %b %H:%M}"

    earliest, latest = shown(max(now, expected.earliest)), shown(expected.latest)
    held = "" if expected.held is None or not accuracy else f" ({expected.held:.0%} of the latest estimates held)"
    return (f"at about {latest}" if earliest == latest else f"between {earliest} and {latest}") + held


def _limit(spec: JobSpec) -> str:
    """Return the limit as it was given, for a share with a limit above its request."""
    for value in (spec.gpu_fraction_limit, spec.gpu_memory_limit_mib):
        if value is not None:
            return f", up to {show_field(value)} while it is idle"
    return ""
