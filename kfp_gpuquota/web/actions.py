"""What a person may do to a job from its page: suspend, resume, resize, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.wire import JobUpdate
from kfp_gpuquota.errors import InvalidFieldError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.web.source import Source


STOPPING: Final = frozenset({"suspend", "delete"})
"""The actions that free what a job holds, disk space included."""


class Actions:
    """The actions of one cluster, by the word in their address."""

    def __init__(self, source: Source, base: str) -> None:
        self._source, self._base = source, base

    async def do(self, action: str, project: str, name: str, form: Mapping[str, str]) -> str:
        """Carry out an action and return the address where that shows. Raises what the cluster raises."""
        match action:
            case "suspend":
                await self._source.suspend(project, name)
            case "resume":
                await self._source.resume(project, name)
            case "update":
                await self._source.update(project, name, _changes(form))
            case "delete":
                await self._source.delete(project, name)
                return f"{self._base}/queue"
            case _:
                raise NotFoundError(f"a job has no action {action!r}; it has suspend, resume, update and delete")
        return join(self._base, "jobs", project, name)


def _changes(form: Mapping[str, str]) -> JobUpdate:
    """Return the fields that were filled in. Raises InvalidFieldError for what is no number."""
    given: dict[str, int] = {}
    for field in ("min_gpus", "max_gpus", "priority"):
        text = form.get(field, "").strip()
        if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise InvalidFieldError(field, text, "it must be a whole number")
        if text:
            given[field] = int(text)
    return JobUpdate(**given)
