"""`gpuquota policy`: what admission gives, bounds or forces for the workloads of a project, of a kind, or of all."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads annotations at run time)
from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.api import Kind  # noqa: TC001 (typer reads annotations at run time)
from kfp_gpuquota.api.durations import text_of
from kfp_gpuquota.api.policy import IdleRule, MemoryRule, PartRule, WorkloadPolicy
from kfp_gpuquota.api.quantity import parse_gpu_memory, show_mib
from kfp_gpuquota.cli.arguments.options import OutputOption, client
from kfp_gpuquota.cli.arguments.parsers import seconds
from kfp_gpuquota.cli.display.output import Format, show, table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(help="What admission gives, bounds or forces.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
_PART = "of a GPU, for workloads that ask for a fraction"
_SIZE = "for workloads that ask for GPU memory, as 8G"


@app.command("set", short_help="Make or change a policy.")
def set_policy(
    name: NameArgument,
    project: Annotated[str | None, typer.Option("--project", "-p", help="For this project only; else for all.")] = None,
    kind: Annotated[Kind | None, typer.Option("--kind", help="For sessions (build) or training (train) only.")] = None,
    gpu_limit: Annotated[
        float | None, typer.Option("--gpu-limit", help=f"The limit, where none is given: a part {_PART}.")
    ] = None,
    gpu_limit_most: Annotated[
        float | None, typer.Option("--gpu-limit-most", help=f"The highest limit: a part {_PART}.")
    ] = None,
    gpu_limit_forced: Annotated[
        float | None, typer.Option("--gpu-limit-forced", help=f"The limit, whatever is given: a part {_PART}.")
    ] = None,
    gpu_memory_limit: Annotated[
        str | None, typer.Option("--gpu-memory-limit", help=f"The limit, where none is given, {_SIZE}.")
    ] = None,
    gpu_memory_limit_most: Annotated[
        str | None, typer.Option("--gpu-memory-limit-most", help=f"The highest limit, {_SIZE}.")
    ] = None,
    gpu_memory_limit_forced: Annotated[
        str | None, typer.Option("--gpu-memory-limit-forced", help=f"The limit, whatever is given, {_SIZE}.")
    ] = None,
    idle_warn: Annotated[
        str | None,
        typer.Option(
            "--idle-warn", metavar="TIME", help="The owner is warned when no GPU was used for so long, as 30m."
        ),
    ] = None,
    idle_suspend: Annotated[
        str | None,
        typer.Option("--idle-suspend", metavar="TIME", help="The job is suspended when no GPU was used for so long."),
    ] = None,
    idle_preempt: Annotated[
        str | None,
        typer.Option(
            "--idle-preempt",
            metavar="TIME",
            help="The job is suspended for a waiting one once no GPU was used for so long.",
        ),
    ] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create or replace a policy; a more specific policy is applied first.

    Limits apply to later submissions, the idle times to what runs, too.

    Examples:
      gpuquota policy set sessions -p research-vision1 --kind build --gpu-limit 1
      gpuquota policy set tight --gpu-limit-most 0.8 --gpu-memory-limit-most 40G
      gpuquota policy set sessions --kind build --idle-warn 30m --idle-suspend 1h
      gpuquota policy set sessions --kind build --idle-warn 30m --idle-preempt 40m --idle-suspend 4h
    """
    parts = PartRule(default=gpu_limit, most=gpu_limit_most, forced=gpu_limit_forced)
    amounts = MemoryRule(
        default=_mib("gpu_memory_limit", gpu_memory_limit),
        most=_mib("gpu_memory_limit_most", gpu_memory_limit_most),
        forced=_mib("gpu_memory_limit_forced", gpu_memory_limit_forced),
    )
    policy = WorkloadPolicy(
        name=name,
        project=project,
        kind=kind,
        gpu_fraction_limit=None if parts == PartRule() else parts,
        gpu_memory_limit_mib=None if amounts == MemoryRule() else amounts,
        idle=_idle(idle_warn, idle_preempt, idle_suspend),
    )
    show(client().set_policy(policy), output, _table((policy,)))


@app.command("list", short_help="List policies.")
def list_policies(*, output: OutputOption = Format.TABLE) -> None:
    """List policies, by name.

    Examples:
      gpuquota policy list
    """
    policies = client().list_policies()
    show(policies, output, _table(policies))


@app.command("check", short_help="Check a QuotaPolicy in a file.")
def check_policy(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON with the object of kind QuotaPolicy.")],
    *,
    output: OutputOption = Format.TABLE,
) -> None:
    """Check the rules of a Kubernetes cluster before they are applied. Nothing is stored.

    With a cluster the API server checks them as a trial, and nodes and namespaces are compared with them; else the file
    alone is checked. The exit status is 1 if the policy would be refused or a field ignored.

    Examples:
      gpuquota --context NAME policy check quota-policy.yaml
    """
    from kfp_gpuquota.cli.admin.doctor import show_findings  # noqa: PLC0415
    from kfp_gpuquota.cluster.connect import chosen_calls  # noqa: PLC0415
    from kfp_gpuquota.cluster.kubernetes.operations import policy_check  # noqa: PLC0415

    try:
        policy = policy_check.policy_in(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    show_findings(policy_check.examine(policy, chosen_calls()), output)


@app.command("delete", short_help="Delete a policy.")
def delete_policy(name: NameArgument) -> None:
    """Delete a policy. Limits that it has set for jobs that exist stay.

    Examples:
      gpuquota policy delete sessions
    """
    client().delete_policy(name)
    echo(f"policy {name} deleted")


def _table(policies: tuple[WorkloadPolicy, ...]) -> str:
    columns = ("POLICY", "PROJECT", "KIND", "RULES")
    return table(columns, ([p.name, p.project or "all", p.kind or "all", ", ".join(_rules(p))] for p in policies))


def _rules(policy: WorkloadPolicy) -> Iterator[str]:
    words = {"default": "is", "most": "at most", "forced": "always"}
    for name, rule in (("gpu limit", policy.gpu_fraction_limit), ("gpu memory limit", policy.gpu_memory_limit_mib)):
        for field, word in words.items():
            value = getattr(rule, field, None)
            if value is not None:
                yield f"{name} {word} {show_mib(value) if isinstance(rule, MemoryRule) else f'{value:g}'}"
    if (idle := policy.idle) is not None:
        preempted = "" if idle.preempt_after_s is None else f"for others after {text_of(idle.preempt_after_s)}, "
        times = f"warned after {text_of(idle.warn_after_s)}, {preempted}suspended after {text_of(idle.suspend_after_s)}"
        yield f"unused GPUs: {times}"


def _idle(warn: str | None, preempt: str | None, suspend: str | None) -> IdleRule | None:
    """Return the rule of these times. Raises UsageError for one without a warning or a suspension."""
    if warn is None and suspend is None and preempt is None:
        return None
    if warn is None or suspend is None:
        raise UsageError("--idle-warn and --idle-suspend go together: nobody is suspended without a warning")
    return IdleRule(
        warn_after_s=seconds("idle_warn", warn),
        suspend_after_s=seconds("idle_suspend", suspend),
        preempt_after_s=None if preempt is None else seconds("idle_preempt", preempt),
    )


def _mib(field: str, text: str | None) -> int | None:
    return None if text is None else parse_gpu_memory(field, text)
