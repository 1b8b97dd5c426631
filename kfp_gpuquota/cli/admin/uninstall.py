"""`gpuquota uninstall`: removes an installation from a Kubernetes cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.cli.display.output import table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.cluster.kubernetes.operations.removal import Removal, Waiting
from kfp_gpuquota.errors import ConflictError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.operations.removal import Step

app = typer.Typer()


WaitingOption = Annotated[
    Waiting,
    typer.Option("--waiting-pods", help="Pods that wait for the quota: keep them pending, or open their gates."),
]


@app.command("uninstall", short_help="Remove gpuquota from a Kubernetes cluster.")
def uninstall(
    waiting: WaitingOption = Waiting.KEEP,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and do nothing.")] = False,
) -> None:
    """Remove the controller, its policies, kinds, labels and namespaces. What runs keeps running, without a quota.

    Quotas, policies and jobs that wait are deleted; `gpuquota cluster export` writes them to a file before. Workers of
    an elastic job that runs go on at their present size, as pods without an owner.

    Examples:
      gpuquota --context NAME uninstall --dry-run
      gpuquota --context NAME uninstall --waiting-pods open --yes
    """
    from kfp_gpuquota.cluster.connect import chosen_calls  # noqa: PLC0415

    calls = chosen_calls()
    if calls is None:
        raise UsageError(
            "uninstall removes an installation from a Kubernetes cluster; choose one with --context NAME. On this "
            "machine: gpuquota cluster stop, then delete the directory that `gpuquota cluster status` shows"
        )
    removal = Removal(calls, waiting)
    if not removal.steps:
        echo(f"nothing of gpuquota is installed in {calls.connection.server}")
        return
    echo(f"cluster: {calls.connection.server}")
    echo(table(("REMOVED", "COUNT", "NAMES"), [_row(step) for step in removal.steps]))
    for line in _consequences(removal):
        echo(line)
    if dry_run:
        return
    if not yes and not _confirmed():
        raise UsageError("nothing was removed; confirm with --yes")
    removal.run(lambda step: echo(f"removing {step.title}: {len(step.objects)}"))
    if left := removal.remaining():
        raise ConflictError(f"still there: {'; '.join(_left(left))}; run the same command again")
    echo("gpuquota is removed" + (f"; {len(removal.unopened)} pods wait at the gate" if removal.unopened else ""))


def _row(step: Step) -> tuple[str, int, str]:
    return step.title, len(step.objects), _names(step.objects)


def _names(objects: list[dict[str, object]]) -> str:
    from kfp_gpuquota.cluster.kubernetes.operations.inventory import summary  # noqa: PLC0415

    return ", ".join(summary(objects))


def _left(left: list[tuple[str, list[dict[str, object]]]]) -> Iterator[str]:
    return (f"{title} ({_names(objects)})" for title, objects in left)


def _consequences(removal: Removal) -> Iterator[str]:
    if opened := len(removal.gated) - len(removal.unopened):
        yield f"{opened} waiting pods start as soon as kube-scheduler finds room, all at once."
    if removal.unopened:
        yield (
            f"{len(removal.unopened)} waiting pods keep their gate and stay pending ({_names(removal.unopened)}): "
            "delete them, or remove spec.schedulingGates by hand."
        )
    if removal.ends:
        yield f"{len(removal.ends)} jobs that wait are deleted and never start ({_names(removal.ends)})."
    if removal.sharers:
        yield (
            f"{len(removal.sharers)} running pods share GPUs ({_names(removal.sharers)}); without reservations "
            "Kubernetes may give their GPUs to other pods. Let them end first."
        )


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        return False
    return typer.confirm("Remove all of this?", default=False, err=True)
