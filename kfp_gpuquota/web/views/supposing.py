"""The form "What if I submit this?": what its fields mean, and the answer in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.wire import Supposition
from kfp_gpuquota.errors import InvalidFieldError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.api.wire import Effect
    from kfp_gpuquota.web.source import Source

NAME = "this-job"


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


def lines(source: Source, asked: Asked) -> list[str]:
    """Return what would happen, a sentence for each job; or why the job cannot be."""
    try:
        spec = JobSpec(
            name=NAME,
            project=asked.project,
            command=("true",),
            gpus=_number("gpus", asked.gpus),
            min_gpus=_number("min_gpus", asked.min_gpus) if asked.min_gpus else None,
            kind=Kind(asked.kind),
        )
        found = [_sentence(*effect) for effect in source.what_if(Supposition(submit=(spec,))).effects()]
    except UsageError as error:
        return [error.message]
    return found or ["Nothing would change."]


def _sentence(verb: str, effect: Effect) -> str:
    who = "It" if effect.job == NAME else f"{effect.job} of {effect.project}"
    why = f": {effect.reason.message}" if effect.reason is not None else ""
    return f"{who} {verb}{why}"


def _number(field: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidFieldError(field, text, "it must be a whole number")
    return int(text)
