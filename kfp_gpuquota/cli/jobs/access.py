"""`gpuquota exec`, `bash`, `attach` and `port-forward`: reaching into a running job."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kfp_gpuquota.cli.arguments.options import JobArgument, ProjectOption, client, project_or_configured
from kfp_gpuquota.cli.jobs.arrays import one_job
from kfp_gpuquota.cli.jobs.logs import follow_to_the_end
from kfp_gpuquota.errors import ConflictError, UnauthorizedError, UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job, Worker

app = typer.Typer()


TerminalOption = Annotated[
    bool, typer.Option("--stdin", "-i", "--tty", "-t", help="As kubectl has it: a terminal is passed on in any case.")
]
WorkerOption = Annotated[int | None, typer.Option("--worker", help="The worker's index; else the first.")]


@app.command("exec", short_help="Run a command beside a job's worker.")
def execute(
    job: JobArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARG]")],
    project: ProjectOption = "",
    worker: WorkerOption = None,
    *,
    terminal: TerminalOption = False,  # noqa: ARG001 (what it asks for is done anyway)
) -> None:
    """Run a command with the environment, the directory and the GPUs of a running worker.

    Examples:
      gpuquota exec train1 -- nvidia-smi
      gpuquota exec -it train1 -- bash
    """
    found, running = _running_worker(project, job, worker)
    sys.exit(_run_beside(found, running, command))


@app.command("bash", short_help="Open a shell beside a job's worker.")
def bash(job: JobArgument, project: ProjectOption = "", worker: WorkerOption = None) -> None:
    """Open a shell with the environment, the directory and the GPUs of a running worker.

    Example:
      gpuquota bash train1
    """
    found, running = _running_worker(project, job, worker)
    sys.exit(_run_beside(found, running, ["bash"]))


@app.command("attach", short_help="Follow a running job's log, and end with its status.")
def attach(job: JobArgument, project: ProjectOption = "") -> None:
    """Show what a job prints until it has ended, and end with its exit status; Ctrl-C only stops that.

    A job's standard input is empty: to type something into it, open a shell beside it with `gpuquota bash`.

    Example:
      gpuquota attach train1
    """
    raise typer.Exit(follow_to_the_end(client(), project_or_configured(project), job))


@app.command("port-forward", short_help="Reach a port of a job from this machine.")
def port_forward(
    job: JobArgument,
    ports: Annotated[list[str] | None, typer.Argument(metavar="[LOCAL:]REMOTE...")] = None,
    project: ProjectOption = "",
    worker: WorkerOption = None,
    port: Annotated[
        list[str] | None, typer.Option("--port", metavar="[LOCAL:]REMOTE", help="The same, as an option.")
    ] = None,
) -> None:
    """Listen on a local port and pass what comes on to a port of a job's worker, until Ctrl-C.

    Jobs of the embedded cluster run on this machine, so that their ports can be reached without this as well.

    Examples:
      gpuquota port-forward notebook 8888
      gpuquota port-forward notebook 9000:8888
    """
    from kfp_gpuquota.cli.jobs import forwarding  # noqa: PLC0415 (only this command listens)

    pairs = [forwarding.port_pair(text) for text in [*(ports or []), *(port or [])]]
    if not pairs:
        raise UsageError(f"name a port of the job: gpuquota port-forward {job} [LOCAL:]REMOTE")
    found, running = _running_worker(project, job, worker)
    if not client().runs_here:
        sys.exit(_kubectl("port-forward", found, [running.id, *(f"{local}:{remote}" for local, remote in pairs)]))
    forwarding.forward(pairs)


def _running_worker(project: str, job: str, index: int | None) -> tuple[Job, Worker]:
    found = one_job(client(), project_or_configured(project), job)
    running = [w for w in found.status.workers if w.phase == "Running" and index in (None, w.index)]
    if not running:
        raise ConflictError(f"job {job!r} has no such worker running; see its workers with: gpuquota describe {job}")
    return found, running[0]


def _run_beside(job: Job, worker: Worker, command: list[str]) -> int:
    if client().runs_here:
        return _exec_here(job, worker, command)
    streams = "-it" if sys.stdin.isatty() and sys.stdout.isatty() else "-i"
    return _kubectl("exec", job, [streams, worker.id, "--", *command])


def kubectl_line(context: str, namespace: str, verb: str, words: list[str]) -> list[str]:
    """Return the words of a kubectl command."""
    named = [f"--context={context}"] if context else []
    return ["kubectl", *named, verb, f"--namespace={namespace}", *words]


def _kubectl(verb: str, job: Job, words: list[str]) -> int:
    """Run kubectl, to reuse its handling of terminals and streams, and return its exit status."""
    from kfp_gpuquota.cluster.connect import kube_context  # noqa: PLC0415

    line = kubectl_line(kube_context() or "", job.spec.project, verb, words)
    try:
        return _status(subprocess.run(line, check=False))
    except OSError as error:
        raise UsageError(f"kubectl, which does this, cannot be run ({error.strerror}): {shlex.join(line)}") from error


def _exec_here(job: Job, worker: Worker, command: list[str]) -> int:
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415

    if job.owner:
        return _exec_as_owner(job, worker, command)
    spec = json.loads((embedded_home().worker(job.uid, worker.id) / "spec.json").read_text())
    return _run(command, env=spec["environment"], cwd=spec["working_directory"])


def _exec_as_owner(job: Job, worker: Worker, command: list[str]) -> int:
    """Run the command with what the kernel shows of the worker's process, always as the job's owner.

    Root becomes that user first: a job's variables, as PATH, are words of its owner.
    """
    owner, uid = pwd.getpwnam(job.owner), os.geteuid()
    refusal = UnauthorizedError(f"job {job.spec.name!r} is one of {job.owner}; only {job.owner} and root may enter it")
    if worker.pid is None or uid not in {0, owner.pw_uid}:
        raise refusal
    process = Path(f"/proc/{worker.pid}")
    try:
        content = (process / "environ").read_bytes().decode(errors="surrogateescape")
        environment = dict(line.split("=", 1) for line in content.split("\0") if "=" in line)
        if process.stat().st_uid != owner.pw_uid or environment.get("ELASTIC_WORKER_ID") != worker.id:
            raise refusal
    except OSError:
        raise ConflictError(f"job {job.spec.name!r} has no such worker running any more") from None
    groups = os.getgrouplist(job.owner, owner.pw_gid)
    become = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": groups} if uid == 0 else {}
    return _run(command, env=environment, cwd=str(process / "cwd"), **become)


def _run(command: list[str], **more: Any) -> int:
    try:
        return _status(subprocess.run(command, check=False, **more))
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}") from error


def _status(ended: subprocess.CompletedProcess[bytes]) -> int:
    """Return the exit status as a shell reports it: 128 + the signal where one ended the process."""
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
