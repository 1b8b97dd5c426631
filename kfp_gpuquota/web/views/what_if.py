"""The form "What if I submit this?": what its fields mean, and the answer in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.api.wire import Supposition
from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError, UsageError
from kfp_gpuquota.web.rendering import expected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kfp_gpuquota.api.wire import Effect, OtherTeams
    from kfp_gpuquota.web.source import Source

NAME: Final = "this-job"
MAX_LINES: Final = 100


@dataclass(frozen=True)
class Asked:
    """The form's fields as typed."""

    given: bool
    project: str
    gpus: str
    min_gpus: str
    kind: str

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Asked:
        """Return the fields of a query."""
        kind = "build" if query.get("what-kind") == "build" else "train"
        given = "what-if" in query
        return cls(given, query.get("project", ""), query.get("gpus", "1"), query.get("min_gpus", ""), kind)


async def lines(source: Source, asked: Asked) -> list[str]:
    """Return what would happen, a sentence for each job; or why the job cannot be, or why there is no answer."""
    try:
        spec = JobSpec(
            name=NAME,
            project=asked.project,
            command=("true",),
            gpus=_number("gpus", asked.gpus),
            min_gpus=_number("min_gpus", asked.min_gpus) if asked.min_gpus else None,
            kind=Kind(asked.kind),
        )
        outlook = await source.what_if(Supposition(submit=(spec,)))
    except (UsageError, ClusterUnavailableError) as error:
        return [error.message]
    found = [_sentence(*effect) for effect in outlook.effects()]
    if len(found) > MAX_LINES:
        found[MAX_LINES:] = [f"{len(found) - MAX_LINES} further jobs are not listed."]
    return [*found, *others(outlook.others)] or ["Nothing would change."]


def others(effects: OtherTeams) -> Iterator[str]:
    """Yield a sentence for each kind of effect on jobs that the user may not see."""
    released = effects.shrinks + effects.stops
    if released:
        given = (
            f" {show_gpus(effects.released_gpus)} that they borrow" if effects.released_gpus else " what they borrow"
        )
        stopped = f"; {effects.stops} of them would be stopped" if effects.stops else ""
        yield f"{_jobs(released)} would give back{given}{stopped}"
    for number, verb in (
        (effects.no_longer_starts, "no longer start"),
        (effects.starts, "start"),
        (effects.grows, "grow"),
    ):
        if number:
            yield f"{_jobs(number)} would {verb}"


def _jobs(number: int) -> str:
    return "1 job of another team" if number == 1 else f"{number} jobs of other teams"


def _sentence(verb: str, effect: Effect) -> str:
    who = "It" if effect.job == NAME else f"{effect.job} of {effect.project}"
    why = f": {effect.reason.message}" if effect.reason is not None else ""
    then = "" if effect.expected_start is None else f"; expected start: {expected(effect.expected_start)}"
    return f"{who} {verb}{why}{then}"


def _number(field: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidFieldError(field, text, "it must be a whole number")
    return int(text)
