"""`gpuquota doctor`: what is wrong with a cluster, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kfp_gpuquota.cli.arguments.options import OutputOption  # noqa: TC001 (typer reads the annotations)
from kfp_gpuquota.cli.display.output import Format, show, table
from kfp_gpuquota.cluster.check_results import Level, worst

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.check_results import Finding

app = typer.Typer()


@app.command("doctor", short_help="Check an installation and show remedies.")
def doctor(output: OutputOption = Format.TABLE) -> None:
    """Check the cluster: its programs, webhook, kinds, policies, rights, clocks, GPUs, and other quotas in the way.

    Nothing is changed: the webhook is asked with a trial pod that is not stored. The exit status is 1 if a check fails,
    and 0 with warnings.

    Examples:
      gpuquota doctor
      gpuquota --context NAME doctor -o json
    """
    from kfp_gpuquota.cluster.connect import operations  # noqa: PLC0415

    show_findings(operations().check(), output)


def show_findings(findings: tuple[Finding, ...], output: str) -> None:
    """Show the findings with their remedies. Raises Exit with 1 if a check fails."""
    show(findings, output, "\n".join(_lines(findings)))
    if worst(findings) is Level.FAIL:
        raise typer.Exit(1)


def _lines(findings: tuple[Finding, ...]) -> Iterator[str]:
    yield table(("RESULT", "CHECK", "FOUND"), [(found.level, found.check, found.message) for found in findings])
    wrong = [found for found in findings if found.remedy]
    if wrong:
        yield ""
    for found in wrong:
        yield f"{found.check}: {found.remedy}"
    counts = {level: sum(found.level is level for found in findings) for level in Level}
    yield ""
    yield ", ".join(f"{count} {level}" for level, count in counts.items() if count)
