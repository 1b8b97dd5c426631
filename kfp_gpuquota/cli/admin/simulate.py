"""`gpuquota simulate`: a trace under several policies, as tables and as a picture, or the plan of a cluster's state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.cli.arguments.defragmentation import BudgetOption, PerGpuOption, WindowOption, defragmentation
from kfp_gpuquota.cli.arguments.options import OutputOption  # noqa: TC001 - typer reads it
from kfp_gpuquota.cli.display.output import Format, show, table
from kfp_gpuquota.errors import InvalidFieldError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.api.defragmentation import Defragmentation
    from kfp_gpuquota.simulator import Result, Spread, TraceJob, TraceNode

app = typer.Typer()


NodesOption = Annotated[Path | None, typer.Option("--nodes", metavar="CSV", help="The cluster's nodes.")]
JobsOption = Annotated[
    Path | None, typer.Option("--jobs", metavar="CSV", help="The jobs, with the times of their coming.")
]
StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="JSON", help="Plan once from this file of `gpuquota debug state` instead."),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="NAME", help="gpuquota, fair-users, fifo, ...; may be repeated; else all."),
]
ColumnOption = Annotated[
    str, typer.Option("--project-column", metavar="COLUMN", help="What names a job's project; else project, or qos.")
]
UserColumnOption = Annotated[
    str, typer.Option("--user-column", metavar="COLUMN", help="What names a job's user, for fair-users; else user.")
]
QuotaOption = Annotated[
    list[str] | None,
    typer.Option("--guaranteed", metavar="PROJECT=N", help="May be repeated; the others share the rest by demand."),
]
SpeedOption = Annotated[float, typer.Option("--speed", metavar="FACTOR", help="Jobs come this many times as fast.")]
EveryOption = Annotated[int, typer.Option("--every-node", metavar="N", help="A smaller cluster: every N-th node.")]
ElasticOption = Annotated[
    float, typer.Option("--elastic", metavar="PERCENT", help="So many of the jobs with whole GPUs are made elastic.")
]
PictureOption = Annotated[Path | None, typer.Option("--picture", metavar="PNG", help="Draw the policies side by side.")]


@app.command("simulate", short_help="Replay a trace, or a cluster's state.")
def simulate(
    nodes: NodesOption = None,
    jobs: JobsOption = None,
    state: StateOption = None,
    policy: PolicyOption = None,
    project_column: ColumnOption = "",
    user_column: UserColumnOption = "",
    guaranteed: QuotaOption = None,
    defragment: WindowOption = "",
    defragment_budget: BudgetOption = None,
    defragment_per_gpu: PerGpuOption = None,
    *,
    speed: SpeedOption = 1.0,
    every_node: EveryOption = 1,
    elastic: ElasticOption = 0.0,
    picture: PictureOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Replay a trace with the scheduler that runs clusters, in simulated time, under several policies.

    With --state: show the plan of a running cluster's state, and whether it is the one that the cluster makes.

    Examples:
      gpuquota simulate --nodes nodes.csv --jobs pods.csv
      gpuquota simulate --nodes nodes.csv --jobs pods.csv --every-node 40 --elastic 20 --picture policies.png
      gpuquota simulate --nodes nodes.csv --jobs jobs.csv --policy gpuquota --guaranteed team-a=20
      gpuquota simulate --nodes nodes.csv --jobs jobs.csv --policy gpuquota --defragment 22:00-06:00
      gpuquota simulate --state state.json
    """
    if state is not None:
        _replay(state, nodes or jobs, output)
        return
    if nodes is None or jobs is None:
        raise UsageError("give --nodes CSV and --jobs CSV, or --state JSON")
    from kfp_gpuquota.simulator import make_elastic, read_jobs, read_nodes, sped_up, thinned  # noqa: PLC0415

    _check(speed=speed, every_node=every_node, elastic=elastic)
    cluster = thinned(read_nodes(nodes), every_node)
    trace = make_elastic(sped_up(read_jobs(jobs, project_column, user_column), speed), elastic)
    rule = defragmentation(defragment, defragment_budget, defragment_per_gpu, zone="UTC")
    results = _results(policy or [], cluster, trace, _quotas(guaranteed or []), rule)
    if picture is not None:
        draw(results, picture)
    show(results, output, _tables(results))


def _replay(state: Path, trace: Path | None, output: str) -> None:
    from kfp_gpuquota.cli.admin.replay import show_replay  # noqa: PLC0415 (traces do not need it)

    if trace is not None:
        raise UsageError("--state replays one state; leave out --nodes and --jobs")
    show_replay(state, output)


def _results(
    names: Sequence[str],
    nodes: list[TraceNode],
    jobs: list[TraceJob],
    guaranteed: dict[str, int],
    rule: Defragmentation | None,
) -> list[Result]:
    """Return the result under each policy, and with `rule` that of moves that gather free GPUs."""
    from kfp_gpuquota.simulator import POLICIES, SimulationOptions, defragmenting, simulate  # noqa: PLC0415

    unknown = next((name for name in names if name not in POLICIES), None)
    if unknown is not None:
        raise InvalidFieldError("policy", unknown, f"it must be one of {', '.join(POLICIES)}")
    options = SimulationOptions(clock=time.perf_counter, guaranteed=guaranteed)
    policies = [POLICIES[name] for name in names or POLICIES] + ([defragmenting(rule)] if rule is not None else [])
    return [simulate(nodes, jobs, policy, options) for policy in policies]


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the results side by side. UsageError without matplotlib, InvalidFieldError for an unusable path."""
    try:
        from kfp_gpuquota.simulator import picture  # noqa: PLC0415
    except ImportError as error:
        raise UsageError("pictures need matplotlib; install it with: pip install 'kfp-gpuquota[plots]'") from error
    if not path.parent.is_dir():
        raise InvalidFieldError("picture", str(path), "its directory does not exist")
    try:
        picture.draw(results, path)
    except (OSError, ValueError) as error:
        raise InvalidFieldError("picture", str(path), f"it cannot be written: {error}") from error


def _tables(results: Sequence[Result]) -> str:
    return "\n\n".join((summary(results), _waiting(results)))


def summary(results: Sequence[Result]) -> str:
    """Return a table with a row for each result."""
    columns: tuple[str, ...] = (
        "POLICY", "USED %", "UNUSABLE %", "MEAN JCT", "P95 JCT", "RESIZES", "EVICTIONS", "LOST GPU-H", "DONE", "SECONDS"
    )  # fmt: skip
    moving = any(result.moves for result in results)
    columns += ("MOVES", "FREE NODES %") if moving else ()
    rows = [
        (
            r.policy,
            round(r.utilisation_percent, 1),
            round(r.fragmentation_percent, 1),
            duration(r.completion.mean_s),
            duration(r.completion.p95_s),
            r.resizes,
            r.evictions,
            round(r.lost_gpu_hours, 1),
            f"{r.finished}/{r.jobs}",
            round(r.seconds, 1),
            *((r.moves, round(r.free_nodes_percent, 1)) if moving else ()),
        )
        for r in results
    ]
    return table(columns, rows)


def _waiting(results: Sequence[Result]) -> str:
    columns = ("PROJECT", "JOBS", *(f"{r.policy.upper()} MEAN (P95) WAIT" for r in results))
    rows = [(name, results[0].waiting[name].count, *(_wait(r, name) for r in results)) for name in results[0].waiting]
    return table(columns, rows)


def _wait(result: Result, project: str) -> str:
    return times(result.waiting[project])


def times(of: Spread) -> str:
    """Return their mean and 95 % quantile: "3m (1.5h)"."""
    return f"{duration(of.mean_s)} ({duration(of.p95_s)})"


def duration(seconds: float) -> str:
    """12s, 3m, 1.5h, 2.0d."""
    if seconds < 120:
        return f"{seconds:.0f}s"
    if seconds < 7200:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h" if seconds < 172_800 else f"{seconds / 86_400:.1f}d"


def _quotas(given: Sequence[str]) -> dict[str, int]:
    pairs = [text.partition("=") for text in given]
    for text, (_, _, number) in zip(given, pairs, strict=True):
        if not number.isdecimal():
            raise InvalidFieldError("guaranteed", text, "it is given as PROJECT=N")
    return {name: int(number) for name, _, number in pairs}


def _check(*, speed: float, every_node: int, elastic: float) -> None:
    if not speed > 0:
        raise InvalidFieldError("speed", speed, "it must be above 0")
    if every_node < 1:
        raise InvalidFieldError("every_node", every_node, "it must be at least 1")
    if not 0 <= elastic <= 100:
        raise InvalidFieldError("elastic", elastic, "it must be between 0 and 100 percent")
