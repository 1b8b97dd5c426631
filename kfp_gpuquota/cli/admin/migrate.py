"""`gpuquota migrate`: the quotas of Kueue or of ResourceQuotas as objects of this project."""

from __future__ import annotations

from typing import Annotated

import typer
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import counts_as
from kfp_gpuquota.cluster.kubernetes.operations import migration
from kfp_gpuquota.errors import UsageError

app = typer.Typer()


@app.command("migrate", short_help="Convert quotas of Kueue or ResourceQuotas.")
def migrate(
    source: Annotated[migration.Source, typer.Option("--from", help="What to convert.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the objects; nothing else is possible.")] = False,
) -> None:
    """Print the GpuQuotas and Profiles that the cluster's present quotas amount to, as YAML. Nothing is changed.

    What cannot be carried over is in comments before them. Read docs/migrating.md before you apply them.

    Examples:
      gpuquota --context NAME migrate --from kueue --dry-run > quotas.yaml
      gpuquota --context NAME migrate --from resourcequota --dry-run
    """
    if not dry_run:
        raise UsageError("migrate changes nothing; add --dry-run, and apply its output: kubectl apply -f FILE")
    made = _migrated(source)
    for note in made.notes:
        echo(f"# not carried over: {note}")
    echo(yaml.safe_dump_all(made.objects, sort_keys=False).rstrip() if made.objects else "# no quota was found")


def _migrated(source: migration.Source) -> migration.Migration:
    from kfp_gpuquota.cluster.connect import chosen_calls  # noqa: PLC0415
    from kfp_gpuquota.cluster.kubernetes.operations.inventory import Inventory  # noqa: PLC0415
    from kfp_gpuquota.cluster.kubernetes.user_client.projects import ProjectCalls  # noqa: PLC0415

    calls = chosen_calls()
    if calls is None:
        raise UsageError("migrate reads a Kubernetes cluster; choose one with --context NAME")
    weights = {row.name: counts_as(row) for row in ProjectCalls(calls).gpu_resources()}
    return migration.migrated(migration.read(source, Inventory(calls).listed, weights))
