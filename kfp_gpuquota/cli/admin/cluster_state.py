"""`gpuquota cluster backup`, `restore`, `export` and `repair`: the cluster's state in files."""

from __future__ import annotations

import getpass
import time
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer

from kfp_gpuquota.cli.display.output import in_json, table
from kfp_gpuquota.cli.display.terminal import echo, echo_data, make_output_private
from kfp_gpuquota.errors import RunError, UsageError

app = typer.Typer()


@app.command("backup", short_help="Copy the cluster's state to a file.")
def backup(file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the copy.")]) -> None:
    """Copy the cluster's state (projects, policies, jobs, history) to a file, also while it runs.

    Logs and checkpoints are not in it: they are in the directory jobs/ of the cluster's directory.

    Example:
      gpuquota cluster backup state-backup.db
    """
    from kfp_gpuquota.cluster.connect import operations  # noqa: PLC0415

    operations().back_up(file)
    echo(f"the cluster's state is in {file}")


@app.command("restore", short_help="Go back to a copy of the cluster's state.")
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `cluster backup` wrote; on Kubernetes `export`.")],
) -> None:
    """Replace the cluster's state by a backup; the cluster must be stopped.

    Jobs that the copy does not have are ended when the cluster starts. The former state is kept beside it.

    On Kubernetes: create the quotas and policies of a file that `cluster export` wrote, or give those that exist the
    file's content. What the file does not have stays.

    Examples:
      gpuquota cluster restore state-backup.db
      gpuquota --context NAME cluster restore quotas.json
    """
    from kfp_gpuquota.cluster.connect import operations  # noqa: PLC0415

    for sentence in operations().restore(file):
        echo(sentence)


@app.command("export", short_help="Write the cluster's state as JSON.")
def export(
    *,
    jobs: Annotated[bool, typer.Option("--jobs", help="On Kubernetes: jobs that have not ended, too.")] = False,
    with_secrets: Annotated[
        bool, typer.Option("--with-secrets", help="With the values of the jobs' environment variables.")
    ] = False,
) -> None:
    """Write projects, policies, jobs and history as JSON to stdout. A file that receives it gets mode 0600.

    Values of environment variables are left out, unless --with-secrets is given.

    On Kubernetes: quotas, policies, the cluster's rules and the labels of namespaces, as a List that `cluster restore`
    and kubectl read. Quotas of Profiles are in the Profiles.

    Examples:
      gpuquota cluster export > state.json
      gpuquota --context NAME cluster export > quotas.json
    """
    from kfp_gpuquota.cluster.connect import operations  # noqa: PLC0415

    make_output_private()
    echo_data(in_json(operations().export(jobs=jobs, secrets=with_secrets)))


@app.command("repair", short_help="Show what of the state cannot be used; repair a damaged file.")
def repair(
    *, discard: Annotated[bool, typer.Option("--discard", help="Delete for good what was set aside.")] = False
) -> None:
    """Show the records that were set aside because they cannot be used; of a damaged file keep what can be read.

    Examples:
      gpuquota cluster repair
      gpuquota cluster repair --discard
    """
    from kfp_gpuquota.cluster.connect import operations  # noqa: PLC0415

    chosen = operations()
    if repaired := chosen.repair():
        echo(repaired)
    if discard:
        echo(f"{chosen.discard_set_aside()} records were deleted")
        return
    rows = chosen.set_aside()
    echo(table(("KIND", "NAME", "WHY"), rows) if rows else "nothing is set aside")


@app.command("test-notifications", short_help="Send a test message to each receiver.")
def try_receivers(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="With other files than those of the cluster of this machine."),
    ] = None,
) -> None:
    """Send a test message to each webhook and mail address that a file names, once, from here, and show the result.

    Files that cannot be used are named with the reason. On a shared cluster root may read them; for those of a Secret
    on Kubernetes, name the folder that it is made of.

    Examples:
      gpuquota cluster test-notifications
      gpuquota cluster test-notifications --folder receivers
    """
    import asyncio  # noqa: PLC0415 (other commands do without it)

    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.cluster.notifications import tried  # noqa: PLC0415

    where = embedded_home().notifications if folder is None else folder
    if not any(where.glob("*.json")):
        raise UsageError(f"{where} has no file NAME.json that names a receiver; see docs/guides/notifications.md")
    problems = asyncio.run(tried(where, getpass.getuser(), time.time(), private=folder is None))
    for name, problem in problems.items():
        echo(f"{name}: {problem or 'sent'}")
    if failed := [name for name, problem in problems.items() if problem]:
        raise RunError(f"{len(failed)} of {len(problems)} receivers did not get the message")
