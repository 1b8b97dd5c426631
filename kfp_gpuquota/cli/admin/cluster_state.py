"""`gpuquota cluster backup`, `restore`, `export` and `repair`: the cluster's state in files."""

from __future__ import annotations

import sqlite3
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.cli.arguments.options import on_kubernetes
from kfp_gpuquota.cli.display.output import in_json, table
from kfp_gpuquota.cli.display.terminal import echo, echo_data, make_output_private
from kfp_gpuquota.errors import ConflictError, StateFileError, UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.local.home import Home


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("backup", short_help="Copy the cluster's state to a file.")(backup)
    app.command("restore", short_help="Go back to a copy of the cluster's state.")(restore)
    app.command("export", short_help="Write the cluster's state as JSON.")(export)
    app.command("repair", short_help="Show what of the state cannot be used; repair a damaged file.")(repair)


def backup(file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the copy.")]) -> None:
    """Copy the cluster's state (projects, policies, jobs, history) to a file, also while it runs.

    Logs and checkpoints are not in it: they are in the directory jobs/ of the cluster's directory.

    Example:
      gpuquota cluster backup state-backup.db
    """
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.storage.database import back_up  # noqa: PLC0415

    back_up(embedded_home().database, file.absolute())
    echo(f"the cluster's state is in {file}")


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
    if on_kubernetes():
        _restore_to_kubernetes(file)
        return
    from kfp_gpuquota.cluster.local.storage import database  # noqa: PLC0415

    home = _stopped_home("restored")
    former = database.restore(file.absolute(), home.database)
    echo(f"the state was restored from {file}" + (f"; the former one is {former}" if former else ""))


def _restore_to_kubernetes(file: Path) -> None:
    from kfp_gpuquota.cluster.connect import kube_calls  # noqa: PLC0415
    from kfp_gpuquota.cluster.kubernetes.operations.exporting import restored  # noqa: PLC0415

    for name, outcome in restored(kube_calls(), file.read_text()):
        echo(f"{name} {outcome}")


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
    if on_kubernetes():
        from kfp_gpuquota.cluster.connect import kube_calls  # noqa: PLC0415
        from kfp_gpuquota.cluster.kubernetes.operations import exporting  # noqa: PLC0415

        make_output_private()
        echo_data(in_json(exporting.exported(kube_calls(), jobs=jobs, secrets=with_secrets)))
        return
    if jobs:
        raise UsageError("--jobs is for Kubernetes: on this machine all jobs are exported; leave it out")
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.storage.exporting import exported  # noqa: PLC0415

    make_output_private()
    echo_data(in_json(exported(embedded_home().database, secrets=with_secrets)))


def repair(
    *, discard: Annotated[bool, typer.Option("--discard", help="Delete for good what was set aside.")] = False
) -> None:
    """Show the records that were set aside because they cannot be used; of a damaged file keep what can be read.

    Examples:
      gpuquota cluster repair
      gpuquota cluster repair --discard
    """
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.storage.exporting import quarantined  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.storage.store import Store  # noqa: PLC0415

    home = embedded_home()
    if not home.is_locked():
        _salvage_if_damaged(home)
    if discard:
        store = Store(_stopped_home("repaired").database)
        echo(f"{store.discard_quarantined()} records were deleted")
        store.close()
        return
    rows = [(each.kind, each.key, each.why) for each in quarantined(home.database)]
    echo(table(("KIND", "NAME", "WHY"), rows) if rows else "nothing is set aside")


def _salvage_if_damaged(home: Home) -> None:
    from kfp_gpuquota.cluster.local.storage.database import open_database, salvage  # noqa: PLC0415

    try:
        open_database(home.database).close()
    except (StateFileError, sqlite3.DatabaseError) as error:
        if "newer version" in str(error):
            raise
        damaged, kept = salvage(home.database)
        counts = ", ".join(f"{count} {name}" for name, count in kept.items() if count)
        echo(f"the state file was damaged and is now {damaged}; kept were {counts or 'no records'}")


def _stopped_home(what: str) -> Home:
    """The cluster's directory. Raises ConflictError while its daemon runs."""
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415

    home = embedded_home()
    if home.is_locked():
        raise ConflictError(f"a running cluster cannot be {what}; stop it first: gpuquota cluster stop")
    return home
