"""`gpuquota logs`, and what `submit --follow` does: what a job's workers printed."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kfp_gpuquota.api import Phase
from kfp_gpuquota.cli.arguments.options import JobArgument, ProjectOption, client, project_or_configured
from kfp_gpuquota.cli.display.terminal import echo, write_log
from kfp_gpuquota.cli.jobs.arrays import one_job
from kfp_gpuquota.errors import NotFoundError, UsageError
from kfp_gpuquota.server.cluster_api import follow_log, log_so_far, watch_jobs

PREVIOUS: Final = "previous"
"""In the place of a worker: the first one of the run before the present one."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer()


@app.command("logs", short_help="Show what a job printed.")
def logs(
    job: JobArgument,
    project: ProjectOption = "",
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, metavar="N", help="Begin with the last N lines.")] = None,
    worker: Annotated[str, typer.Option("--worker", help="The worker's index or id; else the first.")] = "",
    previous: Annotated[bool, typer.Option("--previous", help="What it printed before its last restart.")] = False,
) -> None:
    """Show what a job's first worker printed; with -f, go on with another one where that one leaves before the others.

    Examples:
      gpuquota logs train1
      gpuquota logs train1 -f --tail 20
      gpuquota logs train1 -f --worker 2
      gpuquota logs train1 --previous
    """
    if previous and (worker or follow):
        raise UsageError("--previous shows the first worker before the last restart; leave out --worker and --follow")
    reached, project = client(), project_or_configured(project)
    found = one_job(reached, project, job)
    _say_if_not_started(found)
    worker = PREVIOUS if previous else worker

    def begin(which: str) -> tuple[bytes, int]:
        return (b"", 0) if tail is None else _tail(reached, project, job, which, tail)

    if follow and not worker:
        chunks = _job_log(reached, project, job, begin)
    else:
        text, offset = begin(worker)
        rest = (follow_log if follow else log_so_far)(reached, project, job, worker, offset)
        chunks = itertools.chain((text,), rest)
    written = write_log(chunks)
    if not written and not follow and not worker and min((w.index for w in found.status.workers), default=0):
        echo(
            f"nothing was printed since job {job} was started again; see what it printed before with: "
            f"gpuquota logs {job} -p {project} --previous",
            err=True,
        )


def last_lines(reached: ClusterApi, job: Job, count: int) -> list[str]:
    """Return the last lines that a failed job's worker printed, without empty ones; none if it has no log."""
    reason = job.status.reason
    worker = str(reason.details.get("worker", "")) if reason else ""
    project, name = job.spec.project, job.spec.name
    try:
        text = _tail(reached, project, name, worker, 2 * count)[0].decode(errors="replace")
    except NotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def follow_to_the_end(reached: ClusterApi, project: str, name: str, *, outlives_interrupt: bool = True) -> int:
    """Show a job's log on stdout and its progress on stderr until it has ended; return its exit status.

    The result is 1 for a job that ended without an exit status, and 130 after an interrupt. With `outlives_interrupt`
    the job then continues, and a message says so.
    """
    from kfp_gpuquota.dsl.launcher.job_messages import JobMessages, conclusion  # noqa: PLC0415

    messages = JobMessages()

    def report(job: Job) -> None:
        for line in messages.lines(job, time.monotonic()):
            echo(line, err=True)

    try:
        write_log(_job_log(reached, project, name, lambda _: (b"", 0), report))
        ended = reached.get_job(project, name)
    except NotFoundError:
        echo(f"job {name} was deleted", err=True)
        return 1
    except KeyboardInterrupt:
        if not outlives_interrupt:
            return 130
        again, stop = f"gpuquota logs {name} -p {project} -f", f"gpuquota delete {name} -p {project}"
        echo(f"\njob {name} goes on; follow it again with: {again}; stop it with: {stop}", err=True)
        return 130
    echo(f"job {name} {conclusion(ended)}", err=True)
    return exit_status(ended)


def exit_status(job: Job) -> int:
    """Return the exit status of a command for a job that has ended."""
    return 0 if job.status.phase is Phase.SUCCEEDED else job.status.exit_code or 1


def _tail(reached: ClusterApi, project: str, name: str, worker: str, lines: int) -> tuple[bytes, int]:
    """Return the last `lines` lines of a worker's log, and the offset behind them."""
    kept, offset = b"", 0
    while (chunk := reached.read_log(project, name, worker=worker, offset=offset)).text:
        kept, offset = last_of(kept + chunk.text, lines), chunk.next_offset
    return kept, offset


def last_of(text: bytes, lines: int) -> bytes:
    """Return the last `lines` lines of a text; an unterminated last line counts."""
    if not lines:
        return b""
    end = b"\n" if text.endswith(b"\n") else b""
    return b"\n".join(text.removesuffix(b"\n").split(b"\n")[-lines:]) + end


def _say_if_not_started(job: Job) -> None:
    if not job.status.workers and job.status.phase in {Phase.PENDING, Phase.SUSPENDED}:
        why = f": {job.status.reason.message}" if job.status.reason else ""
        echo(f"job {job.spec.name} has not started and is {job.status.phase.value.lower()}{why}", err=True)


def _job_log(
    reached: ClusterApi,
    project: str,
    name: str,
    begin: Callable[[str], tuple[bytes, int]],
    seen: Callable[[Job], None] = lambda _: None,
) -> Iterator[bytes]:
    """Yield one worker's log after another's until the job ends; the first one's as `begin` returns it, and the rest.

    `seen(job)` receives the job while no worker is followed, and after each followed worker.
    """
    from kfp_gpuquota.dsl.launcher.log_stream import to_follow  # noqa: PLC0415

    reached.get_job(project, name)
    followed: list[str] = []
    for listed in watch_jobs(reached, project):
        found = next((job for job in listed.jobs if job.spec.name == name), None)
        if found is not None:
            seen(found)
        while found is not None and (left := to_follow(found, followed)):
            if followed:
                echo(f"worker {left[0].index} goes on:", err=True)
            worker = left[0].id
            text, offset = (b"", 0) if followed else begin(worker)
            followed.append(worker)
            yield text
            yield from follow_log(reached, project, name, worker=worker, offset=offset)
            found = reached.get_job(project, name)
            seen(found)
        if found is None or found.status.phase.final:
            return
