"""Jobs from Python: `kfp_gpuquota.submit(...)` and the handle that it returns.

    import kfp_gpuquota

    job = kfp_gpuquota.submit(["python", "train.py"], gpus=1, project="team-a")
    print(job.wait().phase)
    print(job.logs())

The structs are those of the API (`kfp_gpuquota.api`), the cluster is the one that `gpuquota` would use.
"""

from __future__ import annotations

import codecs
import re
import secrets
import shlex
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import JobSpec, JobStatus, Phase
from kfp_gpuquota.api.durations import seconds
from kfp_gpuquota.api.quantity import parse_gpu_memory
from kfp_gpuquota.cluster.connect import connect, current_project, kube_context
from kfp_gpuquota.cluster.local.environment import forwarded_environment
from kfp_gpuquota.errors import InvalidFieldError, JobFailedError, NotFoundError, UnauthorizedError, UsageError
from kfp_gpuquota.server.cluster_api import follow_log, log_so_far

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.server.cluster_api import ClusterApi

_POLL_S: Final = 5.0
_NAME_LENGTH: Final = 40


class JobHandle:
    """A job that was submitted. Each method asks the cluster; none of them changes the handle."""

    def __init__(self, client: ClusterApi, project: str, name: str) -> None:
        self.project, self.name = project, name
        self._client = client

    def __repr__(self) -> str:
        return f"JobHandle(project={self.project!r}, name={self.name!r})"

    def job(self) -> Job:
        """Return the job as it is now. Raises NotFoundError once it is deleted."""
        return self._client.get_job(self.project, self.name)

    @property
    def status(self) -> JobStatus:
        """The status as it is now."""
        return self.job().status

    def wait(
        self, *, until: Phase | str | None = None, timeout_s: float | None = None, check: bool = True
    ) -> JobStatus:
        """Return the status once the job has ended, or has reached the phase `until`.

        Raises JobFailedError where it failed or was cancelled, unless `check` is false, and TimeoutError after
        `timeout_s`.
        """
        wanted = None if until is None else Phase(until)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        after: int | None = None
        while True:
            left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            listed = self._client.list_jobs(self.project, name=self.name, after=after, timeout_s=max(0.0, left))
            after = listed.revision
            if not listed.jobs:
                raise NotFoundError(f"job {self.name!r} of project {self.project!r} does not exist (any more)")
            status = listed.jobs[0].status
            if status.phase is wanted or status.phase.final:
                return self._checked(status, wanted) if check else status
            if left <= 0:
                raise TimeoutError(f"job {self.name!r} is still {status.phase.value.lower()} after {timeout_s:g} s")

    def logs(self, *, worker: str = "") -> str:
        """Return what the first worker, or the one named by its index or id, has printed so far."""
        return b"".join(log_so_far(self._client, self.project, self.name, worker)).decode(errors="replace")

    def follow_logs(self, *, worker: str = "") -> Iterator[str]:
        """Yield what a worker prints, as it comes, until it has ended."""
        pieces = follow_log(self._client, self.project, self.name, worker=worker)
        return codecs.iterdecode(pieces, "utf-8", errors="replace")

    def suspend(self) -> None:
        """Stop it after a checkpoint, and keep it out of the queue."""
        self._client.suspend_job(self.project, self.name)

    def resume(self) -> None:
        """Put it back into the queue, with its age."""
        self._client.resume_job(self.project, self.name)

    def cancel(self) -> None:
        """Stop it; it stays listed."""
        self._client.cancel_job(self.project, self.name)

    def delete(self) -> None:
        """Stop it, then forget it, its logs and its checkpoints."""
        self._client.delete_job(self.project, self.name)

    def _checked(self, status: JobStatus, wanted: Phase | None) -> JobStatus:
        if status.phase in {wanted, Phase.SUCCEEDED}:
            return status
        why = f": {status.reason.message}" if status.reason else ""
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        raise JobFailedError(f"job {self.name!r} has ended as {status.phase.value.lower()}{code}{why}")


def submit(
    command: str | Sequence[str],
    *,
    name: str = "",
    project: str = "",
    gpus: float = 1,
    elastic: bool = False,
    gpu_memory: str | None = None,
    environment: Mapping[str, str] | None = None,
    working_directory: str | Path | None = None,
    image: str = "",
    begin: datetime | timedelta | None = None,
    after: str | JobHandle | Iterable[str | JobHandle] = (),
    max_runtime: float | str | None = None,
    client: ClusterApi | None = None,
    **fields: Any,
) -> JobHandle:
    """Submit a job, and return a handle of it.

    `command` is a list of words, or a line that is split as a shell would. Without a `name` one is made of the
    command; without a `project` it is the configured one. `gpus` below 1 is a part of a GPU; `gpu_memory` ("4G") asks
    for memory instead. `elastic`: from 1 GPU up to what the project may hold. The job runs in this directory (else in
    `working_directory`), with PATH, PYTHONPATH and the like of this process and `environment`.

    It is queued at `begin`, a time (without a time zone: local time) or so long from now, when the jobs `after` have
    succeeded (handles or names; "any:NAME": have ended), and ends with a failure when it has run for `max_runtime`
    (seconds, or "2h"). `fields` are any others of `kfp_gpuquota.api.JobSpec`. Raises the errors of
    `kfp_gpuquota.errors`.
    """
    reached = client or connect(image=image)
    here = kube_context() is None
    words = tuple(shlex.split(command) if isinstance(command, str) else command)
    project = current_project(project)
    is_part = isinstance(gpus, int | float) and 0 < gpus < 1
    shared = {"gpu_fraction": float(gpus)} if is_part else {"gpus": gpus}
    if gpu_memory is not None:
        shared = {"gpu_memory_mib": parse_gpu_memory("gpu_memory", gpu_memory)}
    if elastic:
        fields = {"min_gpus": 1, "max_gpus": most_gpus(reached, project, gpus), **fields}
    fields = {**_conditions(begin, after, max_runtime), **fields}
    if "runtime_env" in fields:
        fields = {**fields, "runtime_env": with_absolute_paths(fields["runtime_env"])}
    given = {
        "name": name or generated_name(words),
        "project": project,
        "command": words,
        "environment": {**(forwarded_environment() if here else {}), **(environment or {})},
        "working_directory": str(Path(working_directory or ".").absolute()) if here else str(working_directory or ""),
        **shared,
        **fields,
    }
    try:
        spec = msgspec.convert(given, JobSpec, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(given, error) from None
    reached.submit(spec)
    return JobHandle(reached, project, spec.name)


def _conditions(
    begin: datetime | timedelta | None,
    after: str | JobHandle | Iterable[str | JobHandle],
    max_runtime: float | str | None,
) -> dict[str, Any]:
    """Return the fields of JobSpec for when the job starts and ends. Raises InvalidFieldError."""
    found: dict[str, Any] = {}
    if begin is not None:
        if not isinstance(begin, datetime | timedelta):
            raise InvalidFieldError("begin", begin, "it must be a datetime, or a timedelta from now")
        at = datetime.now(UTC) + begin if isinstance(begin, timedelta) else begin
        found["begin_at"] = at.timestamp()
    names = [after] if isinstance(after, str | JobHandle) else list(after)
    if names:
        found["after"] = tuple(one.name if isinstance(one, JobHandle) else one for one in names)
    if max_runtime is not None:
        longest = seconds(max_runtime) if isinstance(max_runtime, str) else max_runtime
        if longest is None:
            raise InvalidFieldError("max_runtime", max_runtime, "a time is written as 30, 30s, 5m or 1h30m")
        found["max_runtime_s"] = longest
    return found


def _invalid(given: dict[str, Any], error: msgspec.ValidationError) -> UsageError:
    """Return the error in the words of a caller, who wrote `given`."""
    what, _, path = str(error).partition(" - at `$.")
    field = path.rstrip("`")
    if field not in given:
        return UsageError(f"the job cannot be submitted: {error}")
    expected = re.sub(r"Expected `(.+?)`, got `.+?`", r"it must be of type \1", what)
    return InvalidFieldError(field, given[field], expected)


def get_job(name: str, *, project: str = "", client: ClusterApi | None = None) -> JobHandle:
    """Return a handle of a job that exists. Raises NotFoundError."""
    handle = JobHandle(client or connect(), current_project(project), name)
    handle.job()
    return handle


def generated_name(command: Sequence[str]) -> str:
    """Return a name for a job that was given none: its program's, and what makes it unique."""
    program = Path(command[0]).name.lower() if command else "job"
    stem = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in program)
    return f"{stem.strip('-')[:_NAME_LENGTH] or 'job'}-{secrets.token_hex(3)}"


def with_absolute_paths(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ray's runtime environment with the absolute paths of its local directories and lists of packages."""
    given = dict(runtime_env)
    for name in ("working_dir", "pip", "uv", "conda"):
        value = given.get(name)
        named = name == "conda" and not str(value).endswith((".yaml", ".yml"))  # an environment, by its name
        if isinstance(value, str | Path) and not named:
            given[name] = _absolute(value)
    if isinstance(given.get("py_modules"), list):
        given["py_modules"] = [_absolute(one) for one in given["py_modules"]]
    return given


def _absolute(path: object) -> object:
    local = isinstance(path, Path) or (isinstance(path, str) and "://" not in path)
    return str(Path(str(path)).absolute()) if local else path


def most_gpus(reached: ClusterApi, project: str, gpus: float) -> int:
    """Return the most GPUs of an elastic job that asks for `gpus`: the project's limit, or all that there are.

    Raises InvalidFieldError for a job without GPUs.
    """
    if gpus == 0:
        raise InvalidFieldError("elastic", value=True, rule="the job asks for no GPU: gpus is 0", hint="leave it out")
    limit = reached.get_project(project).project.limit
    try:
        everything = sum(len(view.node.devices) for view in reached.list_nodes())
    except UnauthorizedError:
        if limit is None:
            raise UsageError(
                "--elastic means up to all GPUs that there are, which you may not see on this cluster; say how many it "
                "makes use of: --max-gpus N"
            ) from None
        everything = int(limit)
    return max(int(gpus), everything if limit is None else int(min(limit, everything)))
