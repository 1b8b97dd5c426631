"""The form of a job: what its fields mean, what would happen if it were submitted, and what is submitted.

A job that is like another one takes over all that the form does not show, above all its environment. Those values stay
on the server: the page shows only that there are some, as `gpuquota describe` does.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Job, JobSpec, Kind, pipeline_labels
from kfp_gpuquota.api.control_characters import visible
from kfp_gpuquota.api.quantity import gpus_or_fraction, show_gpus, whole_number
from kfp_gpuquota.api.validation import MAX_NAME_LENGTH
from kfp_gpuquota.api.wire import Supposition
from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError, NotFoundError, UsageError
from kfp_gpuquota.web.rendering import expected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kfp_gpuquota.api.wire import Effect, OtherTeams
    from kfp_gpuquota.web.source import Source

NAME: Final = "this-job"
MAX_LINES: Final = 100


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The form's fields as typed; `like` is PROJECT/NAME of the job that it was filled from."""

    given: bool = False
    project: str = ""
    name: str = ""
    command: str = ""
    gpus: str = "1"
    min_gpus: str = ""
    max_gpus: str = ""
    kind: str = Kind.TRAIN.value
    image: str = ""
    working_dir: str = ""
    like: str = ""

    @classmethod
    def of(cls, form: Mapping[str, str]) -> Asked:
        """Return the fields of a query or of a form."""
        kind = Kind.BUILD if form.get("what-kind") == "build" else Kind.TRAIN
        names = ("project", "name", "command", "min_gpus", "max_gpus", "image", "working_dir", "like")
        texts = {name: form.get(name, "").replace("\r\n", "\n").strip() for name in names}
        return cls(given="what-if" in form, kind=kind.value, gpus=form.get("gpus", "1").strip(), **texts)

    @classmethod
    def again(cls, source: Source, like: str) -> Asked:
        """Return the form with the values of a job, under the next name. Raises NotFoundError."""
        spec = _job(source, like).spec
        return cls(
            project=spec.project,
            name=next_name(source, spec.project, spec.name),
            command=_command(spec),
            gpus=_gpus(spec),
            min_gpus="" if spec.min_gpus is None else str(spec.min_gpus),
            max_gpus="" if spec.max_gpus is None else str(spec.max_gpus),
            kind=spec.kind.value,
            working_dir=spec.working_directory,
            like=like,
        )

    def request_id(self, form: Mapping[str, str]) -> str:
        """Return the id of the request: the same for a form that is sent twice, another one after any change of it."""
        fields = "\0".join([form.get("request", ""), *map(str, msgspec.to_builtins(self).values())])
        return hashlib.sha256(fields.encode(errors="replace")).hexdigest()[:32]

    def original(self, source: Source) -> Job | None:
        """Return the job that the new one is like. Raises NotFoundError."""
        return _job(source, self.like) if self.like else None

    def spec(self, like: JobSpec | None, *, name: str = "", command: str = "") -> JobSpec:
        """Return the job; `name` and `command` stand for those that are not given. Raises InvalidFieldError."""
        fields: dict[str, Any] = {
            "name": self.name or name,
            "project": self.project,
            "command": like.command if like and self.command == _command(like) else _words(self.command or command),
            "kind": Kind(self.kind),
            "min_gpus": whole_number("min_gpus", self.min_gpus) if self.min_gpus else None,
            "max_gpus": whole_number("max_gpus", self.max_gpus) if self.max_gpus else None,
            "working_directory": self.working_dir,
        }
        if like is None:
            gpus, fraction = gpus_or_fraction(self.gpus or None, memory=None)
            return JobSpec(**fields, gpus=gpus, gpu_fraction=fraction)
        if self.gpus != _gpus(like):
            gpus, fraction = gpus_or_fraction(self.gpus or None, memory=None)
            fields |= dict.fromkeys(_SHARES) | {"gpus": gpus, "gpu_fraction": fraction}
        hidden = {pipeline_labels.RUN, pipeline_labels.TASK, pipeline_labels.NAME}
        labels = {key: value for key, value in like.labels.items() if key not in hidden}
        return msgspec.structs.replace(like, **fields, labels=labels, array=None, after=(), begin_at=None)


_SHARES: Final = (
    "gpu_fraction", "gpu_fraction_limit", "gpu_memory_mib", "gpu_memory_limit_mib", "gpu_compute", "gpu_devices",
)  # fmt: skip


def next_name(source: Source, project: str, name: str) -> str:
    """Return the first name of the project that no job has: train-2 after train, train-3 after train-2."""
    stem, _, number = name.rpartition("-")
    stem, begin = (stem, int(number) + 1) if stem and number.isascii() and number.isdecimal() else (name, 2)
    taken = {job.spec.name for job in source.jobs() if job.spec.project == project}
    for i in range(begin, begin + len(taken) + 1):
        found = f"{stem[: MAX_NAME_LENGTH - len(str(i)) - 1]}-{i}"
        if found not in taken:
            return found
    return name


def carried(spec: JobSpec) -> str:
    """Return what a job that is like this one takes over without being shown, in words."""
    parts = ["resources, placement, priority and limits"]
    if spec.environment:
        number = len(spec.environment)
        parts.append(f"the values of {number} environment variables" if number > 1 else "one environment variable")
    return " and ".join(parts)


def _job(source: Source, like: str) -> Job:
    project, slash, name = like.partition("/")
    if not slash:
        raise NotFoundError(f"there is no job {like!r}: one is named PROJECT/JOB")
    return source.job(project, name)


def _command(spec: JobSpec) -> str:
    """Return the command as it is typed in a shell, and shown in the form."""
    return visible(shlex.join(spec.command)).strip()


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidFieldError("command", command, f"it must be as typed in a shell: {error}") from None


def _gpus(spec: JobSpec) -> str:
    """Return the GPUs that a job asks for as `gpuquota submit -g` takes them; "" for GPU memory."""
    if spec.gpu_memory_mib is not None:
        return ""
    return str(spec.gpus) if spec.gpu_fraction is None else f"{spec.gpu_fraction:g}"


async def lines(source: Source, asked: Asked) -> list[str]:
    """Return what would happen, a sentence for each job; or why the job cannot be, or why there is no answer."""
    try:
        like = asked.original(source)
        spec = asked.spec(None if like is None else like.spec, name=NAME, command="true")
        if spec.name != NAME:
            spec = msgspec.structs.replace(spec, name=NAME)
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
