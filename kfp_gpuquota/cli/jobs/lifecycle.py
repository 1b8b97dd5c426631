"""`gpuquota suspend`, `resume`, `cancel`, `wait` and `delete`: stopping jobs, and waiting for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.label_selector import parse_selector, selects
from kfp_gpuquota.api.wire import StopAction
from kfp_gpuquota.cli.arguments.completion import complete_job, complete_phase
from kfp_gpuquota.cli.arguments.names import job_names
from kfp_gpuquota.cli.arguments.options import DryRun, DryRunOption, ProjectOption, client, project_or_configured
from kfp_gpuquota.cli.arguments.parsers import seconds
from kfp_gpuquota.cli.display.tables import output_hint, phase_text
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.cli.jobs.arrays import expanded, with_members
from kfp_gpuquota.errors import JobFailedError, NotFoundError, UsageError
from kfp_gpuquota.server.cluster_api import watch_jobs

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job
    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer()


JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB...", autocompletion=complete_job)]
POLL_S = 5.0


@app.command("suspend", short_help="Stop jobs and keep them out of the queue.")
def suspend(jobs: JobsArgument, project: ProjectOption = "") -> None:
    """Stop jobs: a training made with elastic_runtime saves a checkpoint first, and resumes from it.

    Example:
      gpuquota suspend train1 train2
    """
    reached, project = client(), project_or_configured(project)
    names = with_members(reached, project, job_names(jobs), ended=False)
    reached.stop_jobs(project, names, StopAction.SUSPEND)
    for name in names:
        echo(f"job {name} suspended")


@app.command("resume", short_help="Put suspended jobs back into the queue.")
def resume(jobs: JobsArgument, project: ProjectOption = "") -> None:
    """Return suspended jobs to the queue with their age.

    Example:
      gpuquota resume train1
    """
    reached, project = client(), project_or_configured(project)
    for name in with_members(reached, project, job_names(jobs), ended=False):
        reached.resume_job(project, name)
        echo(f"job {name} resumed")


@app.command("cancel", short_help="Stop jobs; they stay listed, with their logs.")
def cancel(jobs: JobsArgument, project: ProjectOption = "") -> None:
    """Stop jobs for good. They stay listed as Cancelled, with their logs, until they are deleted.

    Example:
      gpuquota cancel train1
    """
    reached, project = client(), project_or_configured(project)
    names = with_members(reached, project, job_names(jobs))
    reached.stop_jobs(project, names, StopAction.CANCEL)
    for name in names:
        echo(f"job {name} cancelled")


@app.command("wait", short_help="Wait until jobs have ended, or reached a status.")
def wait(
    jobs: JobsArgument,
    project: ProjectOption = "",
    until: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="STATUS",
            autocompletion=complete_phase,
            help="A status such as Running; else until they have ended.",
        ),
    ] = "",
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Give up after this: 30 or 30s, 5m, 1h.")
    ] = None,
) -> None:
    """Wait for jobs. Ends with 1 when one failed or was cancelled, or when the time is over.

    Examples:
      gpuquota wait train1
      gpuquota wait notebook --for Running --timeout 60s
    """
    wanted = _phase(until)
    reached, project = client(), project_or_configured(project)
    deadline = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
    names = with_members(reached, project, job_names(jobs))
    failed = [
        job
        for job in (_wait_for(reached, project, name, wanted, deadline) for name in names)
        if _is_failure(job, wanted)
    ]
    for job in failed:
        why = f": {job.status.reason.message}" if job.status.reason else ""
        echo(f"job {job.spec.name} {phase_text(job.status.phase)}{why}", err=True)
        if hint := output_hint(job):
            echo(hint, err=True)
    if failed:
        raise typer.Exit(1)


@app.command("delete", short_help="Stop jobs and forget them.")
def delete(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB...]", autocompletion=complete_job)] = None,
    project: ProjectOption = "",
    *,
    ended: Annotated[bool, typer.Option("--ended", help="All jobs of the project that have ended.")] = False,
    all_jobs: Annotated[bool, typer.Option("--all", help="All jobs of the project, also those that run.")] = False,
    selector: Annotated[
        str, typer.Option("--selector", "-l", metavar="K=V,...", help="All jobs of the project with these labels.")
    ] = "",
    ignore_not_found: Annotated[
        bool, typer.Option("--ignore-not-found", help="Pass over jobs that do not exist.")
    ] = False,
    wait_for_end: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when they are deleted.")] = True,
    dry_run: DryRunOption = DryRun.NONE,
) -> None:
    """Stop jobs and forget them, their logs and their checkpoints.

    Examples:
      gpuquota delete elastic1 filler1
      gpuquota delete sweep
      gpuquota delete job/train1
      gpuquota delete --ended
      gpuquota delete jobs -l 'team in (vision, speech)'
    """
    several = ended or all_jobs or bool(selector)
    jobs = [] if several and jobs in (["job"], ["jobs"]) else job_names(jobs or [])
    wanted = parse_selector(selector)
    if bool(jobs) == several:
        raise UsageError("name the jobs, or give --ended for all that have ended: gpuquota delete JOB...")
    reached, project = client(), project_or_configured(project)
    listed = reached.list_jobs(project).jobs
    uids = {job.spec.name: job.uid for job in listed}
    jobs = expanded(jobs, listed) or [
        job.spec.name for job in listed if selects(wanted, job.spec.labels) and (job.status.phase.final or not ended)
    ]
    if ignore_not_found:
        jobs = [name for name in jobs if name in uids]
    if missing := [name for name in jobs if name not in uids]:
        raise NotFoundError(
            f"project {project!r} has no job {', '.join(map(repr, missing))}, and nothing was deleted; see what it has "
            f"with: gpuquota list -p {project}"
        )
    if dry_run is not DryRun.NONE:
        for name in jobs:
            echo(f"job {name} would be deleted (dry run)")
        return
    if several and not jobs:
        echo(f"project {project} has no such job: nothing to delete", err=True)
    if jobs:
        reached.stop_jobs(project, jobs, StopAction.DELETE)
    if wait_for_end:
        _wait_until_deleted(reached, project, {uids[name] for name in jobs})
    for name in jobs:
        echo(f"job {name} deleted")


def _phase(text: str) -> Phase | None:
    if not text:
        return None
    try:
        return Phase(text.capitalize())
    except ValueError:
        raise UsageError(
            f"there is no status {text!r}; there are {', '.join(phase.value for phase in Phase)}"
        ) from None


def _wait_for(reached: ClusterApi, project: str, name: str, wanted: Phase | None, deadline: float | None) -> Job:
    reached.get_job(project, name)
    after: int | None = None
    while True:
        left = POLL_S if deadline is None else deadline - time.monotonic()
        listed = reached.list_jobs(project, after=after, timeout_s=max(0.0, min(left, POLL_S)))
        after = listed.revision
        job = next((job for job in listed.jobs if job.spec.name == name), None)
        if job is None:
            raise NotFoundError(f"job {name!r} was deleted")
        if job.status.phase.final or job.status.phase is wanted:
            return job
        if left <= 0:
            raise JobFailedError(f"job {name!r} is still {job.status.phase.value.lower()} when the time is over")


def _is_failure(job: Job, wanted: Phase | None) -> bool:
    return job.status.phase not in (wanted, Phase.SUCCEEDED)


def _wait_until_deleted(reached: ClusterApi, project: str, uids: set[str]) -> None:
    for listed in watch_jobs(reached, project):
        if not uids.intersection(job.uid for job in listed.jobs):
            return
