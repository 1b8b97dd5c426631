"""`gpuquota project` and `gpuquota config`: quotas, and what a user has set once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kfp_gpuquota.api import Order, PoolQuota, Project, StopPolicy
from kfp_gpuquota.api.project import stopped_by
from kfp_gpuquota.api.quantity import as_number, gpu_quota, parse_cores, parse_mib, show_gpus
from kfp_gpuquota.cli.arguments.completion import complete_project
from kfp_gpuquota.cli.arguments.options import OutputOption, client
from kfp_gpuquota.cli.arguments.parsers import pairs, seconds
from kfp_gpuquota.cli.display.output import Format, show
from kfp_gpuquota.cli.display.project_table import project_table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import ConflictError, GpuQuotaError, InvalidFieldError, UnauthorizedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api.wire import ProjectView
    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer(help="Projects and their quotas.", no_args_is_help=True)
config = typer.Typer(help="What other commands use where nothing is given.", no_args_is_help=True)

NewNameArgument = Annotated[str, typer.Argument(metavar="NAME")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete_project)]
NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=complete_project)]
GuaranteedOption = Annotated[
    float | None,
    typer.Option("--guaranteed", "-g", metavar="N", help="GPUs the project can always get back; 0.5 is half of one."),
]
LimitOption = Annotated[
    str | None, typer.Option("--limit", "-l", help="The most GPUs it may hold: a number, or 'none' to borrow all idle.")
]
PriorityOption = Annotated[int | None, typer.Option("--priority", help="Higher borrows first (default 100).")]
WeightOption = Annotated[
    float | None, typer.Option("--weight", help="Its share of what is idle, within one priority (default 1).")
]
CpuOption = Annotated[
    str | None,
    typer.Option("--cpu", metavar="CORES", help="CPU cores guaranteed, for jobs that ask for some; or 'all'."),
]
CpuLimitOption = Annotated[
    str | None, typer.Option("--cpu-limit", metavar="CORES", help="The most CPU cores, or 'none'.")
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Main memory guaranteed, as 64Gi; or 'all'.")
]
MemoryLimitOption = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="The most main memory, or 'none'.")
]
PoolOption = Annotated[
    list[str] | None,
    typer.Option("--pool", metavar="POOL=N[:LIMIT]", help="The quota in a node pool; may be repeated."),
]
ParentOption = Annotated[str | None, typer.Option("--parent", help="The department it belongs to, or 'none'.")]
DefaultTimeOption = Annotated[
    str | None,
    typer.Option("--default-time", metavar="TIME", help="The --time of jobs submitted without one, as 8h; or 'none'."),
]
MaxTimeOption = Annotated[
    str | None, typer.Option("--max-time", metavar="TIME", help="The longest --time of a job, as 2d; or 'none'.")
]
MinRuntimeOption = Annotated[
    str | None,
    typer.Option("--min-runtime", metavar="TIME", help="Its jobs are not preempted before, as 1h; or 'none'."),
]
ReserveAfterOption = Annotated[
    str | None,
    typer.Option(
        "--reserve-after",
        metavar="TIME",
        help="After so long GPUs are kept for its first waiting job; or 'none': as the cluster's.",
    ),
]
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--order",
        metavar="ORDER",
        help="Of its waiting jobs: 'fair' (by age), 'fair-users' (who uses less is first), 'shortest' (by expected run"
        " time), 'strict' (by age, and none passes the first).",
    ),
]
MemberOption = Annotated[
    list[str] | None,
    typer.Option(
        "--member", metavar="USER|@GROUP", help="On a shared cluster: may submit jobs to it; may be repeated."
    ),
]
RemoveMemberOption = Annotated[
    list[str] | None, typer.Option("--remove-member", metavar="USER|@GROUP", help="Is a member no longer.")
]


@app.command("create", short_help="Create a project.")
def create(
    name: NewNameArgument,
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    priority: PriorityOption = None,
    weight: WeightOption = None,
    parent: ParentOption = None,
    cpu: CpuOption = None,
    cpu_limit: CpuLimitOption = None,
    memory: MemoryOption = None,
    memory_limit: MemoryLimitOption = None,
    pool: PoolOption = None,
    default_time: DefaultTimeOption = None,
    max_time: MaxTimeOption = None,
    min_runtime: MinRuntimeOption = None,
    reserve_after: ReserveAfterOption = None,
    order: OrderOption = None,
    member: MemberOption = None,
) -> None:
    """Create a project with its quota.

    Without a limit it may borrow every idle GPU; a limit that equals the guaranteed quota is a static allocation.

    Examples:
      gpuquota project create team-a --guaranteed 2
      gpuquota project create team-b --guaranteed 20 --limit 30
      gpuquota project create static --guaranteed 4 --limit 4
      gpuquota project create team-c --guaranteed 8 --cpu 64 --memory-limit 512Gi
      gpuquota project create team-d --pool h100=8:16 --pool t4=4
      gpuquota project create vision --guaranteed 2 --member anna --member @students
    """
    others = _amounts(cpu, cpu_limit, memory, memory_limit) | _order(order)
    others |= _times(default_time, max_time, min_runtime, reserve_after)
    given = _given(guaranteed, limit, priority, weight, parent)
    project = Project(name=name, **given, **others, pools=_pools(pool or []))
    reached = client()
    view = reached.create_project(project)
    if member:
        view = _with_members(reached, name, member, [], undo=partial(reached.delete_project, name))
    echo(f"project {name} created: {_quota(view)}{_members(view)}")
    for note in (reached.quota_gap(name), _overcommitted(reached)):
        _note(note)


@app.command("set", short_help="Change a project's quota.")
def set_quota(
    name: NameArgument,
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    priority: PriorityOption = None,
    weight: WeightOption = None,
    parent: ParentOption = None,
    cpu: CpuOption = None,
    cpu_limit: CpuLimitOption = None,
    memory: MemoryOption = None,
    memory_limit: MemoryLimitOption = None,
    pool: PoolOption = None,
    default_time: DefaultTimeOption = None,
    max_time: MaxTimeOption = None,
    min_runtime: MinRuntimeOption = None,
    reserve_after: ReserveAfterOption = None,
    order: OrderOption = None,
    member: MemberOption = None,
    remove_member: RemoveMemberOption = None,
) -> None:
    """Change what is given; the rest stays as it is. With nothing but a name, work in that project from now on.

    Examples:
      gpuquota project set team-a --guaranteed 4
      gpuquota project set team-a --limit none
      gpuquota project set team-a --parent none
      gpuquota project set team-a --default-time 8h --max-time 2d
      gpuquota project set team-a --order fair-users
      gpuquota project set team-a --order strict --min-runtime 1h --reserve-after 10m
      gpuquota project set team-a --member ben --remove-member anna
      gpuquota project set team-a
    """
    changed = _given(guaranteed, limit, priority, weight, parent) | _amounts(cpu, cpu_limit, memory, memory_limit)
    changed |= _times(default_time, max_time, min_runtime, reserve_after) | _order(order)
    quota, members = bool(changed or pool), bool(member or remove_member)
    if not quota and not members:
        config_project(name)
        return
    reached = client()
    before = reached.get_project(name).project
    if quota:
        view = _changed(reached, name, changed, _pools(pool or []))
    if members:
        undo = partial(reached.set_project, before) if quota else None
        view = _with_members(reached, name, member or [], remove_member or [], undo)
    echo(f"project {name} changed: {_quota(view)}{_members(view)}")
    _note(_overcommitted(reached))


def _with_members(
    reached: ClusterApi, name: str, add: list[str], remove: list[str], undo: Callable[[], object] | None
) -> ProjectView:
    """Change a project's members; where it fails, undo what the command has changed before. Raises ConflictError."""
    from kfp_gpuquota.api.wire import MembersChange  # noqa: PLC0415 (other commands do without it)

    try:
        return reached.change_members(name, MembersChange(add=tuple(add), remove=tuple(remove)))
    except GpuQuotaError:
        if undo:
            undo()
        raise


def _members(view: ProjectView) -> str:
    if isinstance(view.members, msgspec.UnsetType):
        return ""
    if not view.members:
        return "; no members: only administrators submit jobs to it"
    return f"; its members are {', '.join(view.members)}"


def _changed(reached: ClusterApi, name: str, changed: dict[str, Any], pools: dict[str, PoolQuota]) -> ProjectView:
    """Change some fields, on top of what others change at the same time. ConflictError as `set_project`."""
    before = reached.get_project(name).project
    while True:
        after = msgspec.structs.replace(before, **changed, pools={**before.pools, **pools})
        try:
            return reached.set_project(after, expected=before)
        except ConflictError:
            found = reached.get_project(name).project
            if found == before:  # it was refused for another reason
                raise
            before = found


@app.command("hold", short_help="Start nothing of projects.")
def hold(names: NamesArgument) -> None:
    """Start nothing of projects and of those below them; what runs goes on, at its size.

    Jobs may still be submitted. They wait with their age until: gpuquota project resume

    Example:
      gpuquota project hold team-a
    """
    _set_stop_policy(names, StopPolicy.HOLD, "held: none of its jobs starts")


@app.command("drain", short_help="Start nothing of projects, and stop what runs.")
def drain(names: NamesArgument) -> None:
    """Start nothing of projects and of those below them, and stop what runs, after it has saved a checkpoint.

    Stopped jobs wait with their age until: gpuquota project resume. Sessions, and others that cannot be preempted, run
    until they end.

    Example:
      gpuquota project drain team-a team-b
    """
    _set_stop_policy(names, StopPolicy.HOLD_AND_DRAIN, "drained: none of its jobs starts, and what runs is stopped")


@app.command("resume", short_help="Let projects start jobs again.")
def resume(names: NamesArgument) -> None:
    """Let projects start jobs again that were held or drained; not those of which one above is.

    Example:
      gpuquota project resume team-a
    """
    _set_stop_policy(names, StopPolicy.NONE, "resumed: its jobs start again")


def _set_stop_policy(names: list[str], policy: StopPolicy, done: str) -> None:
    reached = client()
    for name in names:
        project = _changed(reached, name, {"stop_policy": policy}, {}).project
        by = _stopped_above(reached, project) if policy is StopPolicy.NONE and project.parent else None
        if by is None:
            echo(f"project {name} is {done}")
        else:
            echo(
                f"project {name} has no stop policy any more, but {by.name} above it has {by.stop_policy}: none of its "
                f"jobs starts until: gpuquota project resume {by.name}"
            )


def _stopped_above(reached: ClusterApi, project: Project) -> Project | None:
    projects = {view.project.name: view.project for view in reached.list_projects()}
    return stopped_by(project, projects.get)


@app.command("list", short_help="List projects.")
def list_projects(output: OutputOption = Format.TABLE) -> None:
    """List projects with their quota and what they hold.

    Examples:
      gpuquota project list
      gpuquota project list -o json
    """
    views = client().list_projects()
    show(views, output, project_table(views, wide=output is Format.WIDE))


@app.command("delete", short_help="Delete empty projects.")
def delete(names: NamesArgument) -> None:
    """Delete projects that have no jobs.

    Example:
      gpuquota project delete team-a
    """
    reached = client()
    from kfp_gpuquota.cluster.connect import load_settings, save_settings  # noqa: PLC0415

    for name in names:
        reached.delete_project(name)
        echo(f"project {name} deleted")
        if load_settings().project == name and reached.runs_here:
            save_settings(msgspec.structs.replace(load_settings(), project=""))
            _note("it was the project to work in; choose another one with: gpuquota config project NAME")


@config.command("project", short_help="Set the project to work in.")
def config_project(
    name: Annotated[str, typer.Argument(metavar="[NAME]", autocompletion=complete_project)] = "",
) -> None:
    """Set the project that other commands use; without a name, show it.

    Examples:
      gpuquota config project team-a
      gpuquota config project
    """
    from kfp_gpuquota.cluster.connect import current_project, load_settings, save_settings  # noqa: PLC0415

    if not name:
        echo(current_project())
        return
    reached = client()
    if not reached.runs_here:
        raise UsageError(
            "on Kubernetes the project is the namespace of your context, as for kubectl; set it with: "
            f"kubectl config set-context --current --namespace={name}"
        )
    reached.get_project(name)
    save_settings(msgspec.structs.replace(load_settings(), project=name))
    echo(f"project {name} is used from now on")


@config.command("context", short_help="Set the cluster to work with.")
def config_context(name: Annotated[str, typer.Argument(metavar="[NAME]")] = "") -> None:
    """Set the cluster that other commands use; without a name, show it.

    A context of your kubeconfig, "." for its current one, "embedded" for the cluster of this machine.

    Examples:
      gpuquota config context production
      gpuquota config context embedded
    """
    from kfp_gpuquota.cluster.connect import EMBEDDED, kube_context, load_settings, save_settings  # noqa: PLC0415

    if not name:
        context = kube_context()
        echo(EMBEDDED if context is None else context or "the current context")
        return
    save_settings(msgspec.structs.replace(load_settings(), context=name))
    client().health()
    echo(f"context {name} is used from now on")


def _note(text: str) -> None:
    if text:
        echo(f"note: {text}", err=True)


def _overcommitted(reached: ClusterApi) -> str:
    """A sentence where more is guaranteed than there is, which cannot all be kept. Pools stand for themselves."""
    try:
        nodes = reached.list_nodes()
    except UnauthorizedError:
        return ""
    there = as_number(sum(view.gpus for view in nodes if not view.node.pool))
    projects = (view.project for view in reached.list_projects())
    guaranteed = as_number(sum(project.guaranteed for project in projects if project.parent is None))
    if guaranteed <= there:
        return ""
    return f"{show_gpus(guaranteed)} are guaranteed to all projects together, and the cluster has {there}"


def _quota(view: ProjectView) -> str:
    limit = view.project.limit
    most = "may borrow what is idle" if limit is None else f"at most {limit}"
    return f"{show_gpus(view.project.guaranteed)} guaranteed, {most}"


def _given(
    guaranteed: float | None, limit: str | None, priority: int | None, weight: float | None, parent: str | None
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "guaranteed": guaranteed,
        "priority": priority,
        "over_quota_weight": weight,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if parent is not None:
        given["parent"] = None if parent == "none" else parent
    if limit is not None:
        given["limit"] = None if limit == "none" else gpu_quota("limit", limit)
    return given


def _amounts(cpu: str | None, cpu_limit: str | None, memory: str | None, memory_limit: str | None) -> dict[str, Any]:
    """Quotas of CPU and memory; 'all' and 'none' take them away."""
    given: dict[str, Any] = {}
    for field, text, parse in (
        ("guaranteed_cpu", cpu, parse_cores),
        ("limit_cpu", cpu_limit, parse_cores),
        ("guaranteed_memory_mib", memory, parse_mib),
        ("limit_memory_mib", memory_limit, parse_mib),
    ):
        if text is not None:
            given[field] = None if text in {"all", "none"} else parse(field, text)
    return given


def _times(default: str | None, most: str | None, least: str | None, reserve_after: str | None) -> dict[str, Any]:
    """The run times of a project's jobs, and the time until GPUs are kept for one; 'none' takes them away."""
    given = (
        ("default_runtime_s", "default_time", default),
        ("max_runtime_s", "max_time", most),
        ("min_runtime_s", "min_runtime", least),
        ("reserve_after_s", "reserve_after", reserve_after),
    )
    return {field: None if text == "none" else seconds(name, text) for field, name, text in given if text is not None}


_ORDERS = {
    "fair": Order.FAIR,
    "fair-users": Order.FAIR_USERS,
    "shortest": Order.SHORTEST,
    "strict": Order.STRICT,
}


def _order(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    order = _ORDERS.get(text) or next((one for one in Order if one.value == text), None)  # or as it is shown
    if order is None:
        raise InvalidFieldError("order", text, f"it must be one of {', '.join(_ORDERS)}")
    return {"order": order}


def _pools(given: list[str]) -> dict[str, PoolQuota]:
    """POOL=N, or POOL=N:LIMIT."""
    quotas = {}
    for name, text in pairs(
        "pool", given, "a node pool's quota is given as POOL=GUARANTEED or POOL=GUARANTEED:LIMIT"
    ).items():
        guaranteed, _, limit = text.partition(":")
        most = None if limit in {"", "none"} else gpu_quota("pool", limit)
        quotas[name] = PoolQuota(guaranteed=gpu_quota("pool", guaranteed), limit=most)
    return quotas
