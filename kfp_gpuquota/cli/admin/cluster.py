"""`gpuquota cluster`: the embedded cluster's daemon."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kfp_gpuquota.api.quantity import as_number, parse_gpu_memory, parse_mib, show_gpus
from kfp_gpuquota.cli.admin.shared import (
    AdminGroupOption,
    ForegroundOption,
    GroupOption,
    InstallUnitOption,
    JobsPerUserOption,
    PrintUnitOption,
    SharedOption,
    check_start,
    refuse_beside_shared,
    serve_here,
    shared_settings,
    show_unit,
    stop_shared,
    who_uses_it,
)
from kfp_gpuquota.cli.arguments.amounts import count_or_gpus, pairs, whole_number
from kfp_gpuquota.cli.arguments.options import OutputOption, client, on_kubernetes
from kfp_gpuquota.cli.display.output import Format, age, in_json, show, table
from kfp_gpuquota.cli.display.terminal import echo, echo_data, make_output_private
from kfp_gpuquota.errors import ClusterStartError, ConflictError, StateFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.api.node import SharingRules
    from kfp_gpuquota.cluster.local.devices import ClusterConfig
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.ray.config import RayConfig

app = typer.Typer(help="The embedded cluster on this machine.", no_args_is_help=True)

NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Simulate so many nodes on this machine.")]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus-per-node",
        "--gpus",
        metavar="N|GPU,GPU...",
        help="GPUs of each node, or which GPUs by index (0,1,3) or UUID; else this machine's, or 2 CPU slots.",
    ),
]
CpuSlotsOption = Annotated[
    bool, typer.Option("--cpu-slots", help="CPU slots stand for GPUs, even where the machine has GPUs.")
]
GpuMemoryOption = Annotated[
    str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Simulate GPUs with so much memory each, as 16G.")
]
CpusOption = Annotated[
    float | None, typer.Option("--cpus-per-node", min=0, help="Cores that jobs may ask for; else the machine's.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory-per-node", metavar="SIZE", help="Memory that jobs may ask for; else the machine's."),
]
PoolOption = Annotated[
    list[str] | None,
    typer.Option("--pool", metavar="POOL=NODES", help="Put so many of the nodes into a node pool; may be repeated."),
]
HalfLifeOption = Annotated[
    float | None,
    typer.Option(
        "--usage-half-life", metavar="HOURS", help="Past borrowing reduces a share; it counts half after this time."
    ),
]
KillerOption = Annotated[
    bool | None,
    typer.Option(
        "--gpu-memory-killer/--no-gpu-memory-killer",
        help="End processes that hold GPU memory which an owner needs; else only report.",
    ),
]
LogLimitOption = Annotated[
    str | None, typer.Option("--log-limit", metavar="SIZE", help="Keep so much of each worker's log; else 100Mi.")
]
KeepDaysOption = Annotated[
    float | None, typer.Option("--keep-ended-days", min=0, help="Delete jobs that ended so long ago; else 30.")
]
KeepJobsOption = Annotated[
    int | None, typer.Option("--keep-ended-jobs", min=0, help="Keep so many ended jobs of a user at most; else 5000.")
]
RayOption = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto|HOST:PORT", help="Run on the nodes of this Ray cluster."),
]
RaySilenceOption = Annotated[
    float | None,
    typer.Option("--ray-silence", metavar="SECONDS", help="End workers of a Ray node cut off so long; else 60."),
]
RayWarmOption = Annotated[
    float | None,
    typer.Option("--ray-warm", metavar="SECONDS", help="Hold GPUs so long for the next worker of a Ray node; else 20."),
]
RayDirectoryOption = Annotated[
    str | None, typer.Option("--ray-checkpoints", metavar="PATH", help="Directory for checkpoints on all Ray nodes.")
]
RayTokenOption = Annotated[
    Path | None, typer.Option("--ray-token-file", metavar="FILE", help="Authenticate to Ray with the token in it.")
]
RayPortOption = Annotated[
    int, typer.Option("--ray-port", min=0, max=65_535, help="Port that workers reach the daemon at; else any.")
]
SharersOption = Annotated[
    int | None, typer.Option("--max-sharers", min=1, help="The most jobs that share a GPU (default 16).")
]
ReserveOption = Annotated[
    float | None,
    typer.Option(
        "--memory-reserve",
        min=0.0,
        max=0.5,
        metavar="PART",
        help="The part of each GPU's memory that is the driver's (default 0.02; 0 with --gpu-memory).",
    ),
]
SmallestOption = Annotated[
    float | None,
    typer.Option(
        "--smallest-share",
        min=0.001,
        max=0.5,
        metavar="PART",
        help="The smallest part of a GPU that a job may ask for (default 0.01).",
    ),
]
MovesOption = Annotated[
    bool | None, typer.Option("--moves/--no-moves", help="Move jobs to make room for others (default), or none.")
]
ReserveAfterOption = Annotated[
    float | None,
    typer.Option(
        "--reserve-after",
        min=0,
        metavar="SECONDS",
        help="Keep what a waiting job within its guarantee needs after so long (default 1800).",
    ),
]
LendOption = Annotated[
    bool | None,
    typer.Option(
        "--lend-silent/--no-lend-silent",
        help="Lend also what jobs without elastic_runtime leave of their GPU memory.",
    ),
]


def _sharing(*, simulated: bool, **given: float | None) -> SharingRules | None:
    """Return the rules that are given, the others by default; None: no rule is given."""
    from kfp_gpuquota.api.node import SharingRules  # noqa: PLC0415

    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return None
    return SharingRules(**({"memory_reserve": 0.0} if simulated else {}) | chosen)


@app.command("start", short_help="Start the cluster.")
def start(
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    gpu_memory: GpuMemoryOption = None,
    cpus_per_node: CpusOption = None,
    memory_per_node: MemoryOption = None,
    usage_half_life: HalfLifeOption = None,
    pool: PoolOption = None,
    log_limit: LogLimitOption = None,
    keep_ended_days: KeepDaysOption = None,
    keep_ended_jobs: KeepJobsOption = None,
    ray: RayOption = None,
    ray_silence: RaySilenceOption = None,
    ray_warm: RayWarmOption = None,
    ray_checkpoints: RayDirectoryOption = None,
    ray_token_file: RayTokenOption = None,
    ray_port: RayPortOption = 0,
    max_sharers: SharersOption = None,
    memory_reserve: ReserveOption = None,
    smallest_share: SmallestOption = None,
    reserve_after: ReserveAfterOption = None,
    group: GroupOption = "",
    admin_group: AdminGroupOption = "",
    jobs_per_user: JobsPerUserOption = None,
    *,
    shared: SharedOption = False,
    foreground: ForegroundOption = False,
    print_unit: PrintUnitOption = False,
    install_unit: InstallUnitOption = False,
    cpu_slots: CpuSlotsOption = False,
    moves: MovesOption = None,
    gpu_memory_killer: KillerOption = None,
    lend_silent: LendOption = None,
) -> None:
    """Start the cluster; other commands start it by themselves where it does not run.

    One that runs takes on the shape that is given: its jobs go on, and none of their GPUs may be missing in it.

    What is not given stays: rules one by one, the shape (nodes, GPUs, CPUs, memory, pools, Ray) as a whole. A cluster
    that several users share is as its command line says.

    GPUs are this machine's, or those that --gpus names (one alone with a comma: 3,); where it has none, CPU slots stand
    for them. A simulated node is a label on such slots.

    Examples:
      gpuquota cluster start
      gpuquota cluster start --nodes 4 --gpus-per-node 10
      gpuquota cluster start --gpus 0,1,3
      gpuquota cluster start --gpus 2 --gpu-memory 16G
      gpuquota cluster start --reserve-after 600
      gpuquota cluster start --ray auto
      sudo gpuquota cluster start --shared --group gpu --admin-group gpu-admins --install-unit
    """
    from kfp_gpuquota.cluster.connect import embedded_home, shared_socket  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.devices import (  # noqa: PLC0415
        DEFAULT_KEEP_ENDED_JOBS,
        DEFAULT_KEEP_ENDED_S,
        DEFAULT_LOG_LIMIT_MIB,
        SHAPE,
        ClusterConfig,
    )
    from kfp_gpuquota.cluster.local.start import ensure_running  # noqa: PLC0415
    from kfp_gpuquota.fractions import Policy  # noqa: PLC0415
    from kfp_gpuquota.scheduler import RESERVE_AFTER_S  # noqa: PLC0415

    for_users = shared_settings(
        shared=shared,
        group=group,
        admin_group=admin_group,
        jobs_per_user=jobs_per_user,
        service={"--foreground": foreground, "--print-unit": print_unit, "--install-unit": install_unit},
    )
    home = embedded_home()
    sharing = _sharing(
        simulated=gpu_memory is not None,
        max_sharers=max_sharers,
        memory_reserve=memory_reserve,
        smallest_share=smallest_share,
    )
    shape = (nodes, gpus_per_node, gpu_memory, cpus_per_node, memory_per_node, pool, cpu_slots or None)
    count, chosen = count_or_gpus(gpus_per_node)
    on_ray = _ray_config(ray, shape, ray_silence, ray_warm, ray_checkpoints, ray_token_file, ray_port)
    options: dict[tuple[str, ...], tuple[object, ...]] = {  # by the fields of the configuration that they set
        SHAPE: (*shape, on_ray),
        ("usage_half_life_s",): (usage_half_life,),
        ("log_limit_mib",): (log_limit,),
        ("keep_ended_s",): (keep_ended_days,),
        ("keep_ended_jobs",): (keep_ended_jobs,),
        ("memory_policy",): (gpu_memory_killer, lend_silent),
        ("sharing",): (sharing,),
        ("moves",): (moves,),
        ("reserve_after_s",): (reserve_after,),
    }
    plain = for_users is None and all(option is None for given in options.values() for option in given)
    if for_users is None and (socket := shared_socket()) is not None:
        refuse_beside_shared(socket, plain=plain)
        status()
        return
    if plain:
        ensure_running(home)
    else:
        sizes = pairs("pool", pool or [], "a node pool is given as POOL=NODES")
        pools = {name: whole_number("pool", count, "nodes") for name, count in sizes.items()}
        config = ClusterConfig(
            nodes=nodes or 1,
            gpus_per_node=count,
            gpus=chosen,
            cpu_slots=cpu_slots,
            gpu_memory_mib=None if gpu_memory is None else parse_gpu_memory("gpu_memory", gpu_memory),
            cpus_per_node=cpus_per_node,
            memory_per_node_mib=None if memory_per_node is None else parse_mib("memory_per_node", memory_per_node),
            pools=pools,
            usage_half_life_s=None if usage_half_life is None else usage_half_life * 3600,
            log_limit_mib=DEFAULT_LOG_LIMIT_MIB if log_limit is None else parse_mib("log_limit", log_limit),
            keep_ended_s=DEFAULT_KEEP_ENDED_S if keep_ended_days is None else keep_ended_days * 86_400,
            keep_ended_jobs=DEFAULT_KEEP_ENDED_JOBS if keep_ended_jobs is None else keep_ended_jobs,
            memory_policy=Policy(killer=bool(gpu_memory_killer), lend_silent=bool(lend_silent)),
            ray=on_ray,
            sharing=sharing,
            moves=moves is not False,
            reserve_after_s=RESERVE_AFTER_S if reserve_after is None else reserve_after,
            shared=for_users,
        )
        if for_users is None:
            config = _with_former(home, config, options)
        if for_users is not None and (print_unit or install_unit):
            show_unit(home, for_users, install=install_unit)
            return
        if for_users is None and home.shared_mark.exists():
            raise UsageError(f"{home.root} is a cluster that several users share; add --shared")
        if foreground:
            serve_here(home, config)
        if for_users is not None:
            check_start()
        _start_as(home, config)
    echo(f"the cluster runs in {home.root}")
    status()


def _with_former(
    home: Home, config: ClusterConfig, options: Mapping[tuple[str, ...], Sequence[object]]
) -> ClusterConfig:
    """Return the configuration with the former values of those fields of which no option is given."""
    from msgspec.structs import replace  # noqa: PLC0415

    from kfp_gpuquota.cluster.local.storage.database import stored_config  # noqa: PLC0415

    former = stored_config(home.database)
    kept = [field for fields, given in options.items() if all(one is None for one in given) for field in fields]
    return replace(config, **{field: getattr(former, field) for field in kept})


def _start_as(home: Home, config: ClusterConfig) -> None:
    """Start the cluster in a shape; of one that runs the daemon is started again, and its jobs go on.

    Raises ConflictError where a running job would lose its GPUs: the cluster then keeps its shape.
    """
    from kfp_gpuquota.cluster.local.start import await_stop, ensure_running, start_with  # noqa: PLC0415

    runs = home.is_locked()
    if runs:
        client().stop_cluster()
        await_stop(home)
    try:
        start_with(home, config)
    except ClusterStartError as error:
        if not runs:
            raise
        ensure_running(home)
        raise ConflictError(f"the cluster keeps its shape: {error.args[-1]}") from None


def _ray_config(
    address: str | None,
    shape: tuple[object, ...],
    silence_s: float | None,
    warm_s: float | None,
    checkpoints: str | None,
    token_file: Path | None,
    port: int,
) -> RayConfig | None:
    """Return the Ray cluster that is asked for. Raises UsageError for options that exclude each other."""
    from kfp_gpuquota.cluster.ray.config import DEFAULT_SILENCE_S, DEFAULT_WARM_S, RayConfig  # noqa: PLC0415

    if address is None:
        if any(given is not None for given in (silence_s, warm_s, checkpoints, token_file)) or port:
            raise UsageError("options that begin with --ray- need --ray auto or --ray HOST:PORT")
        return None
    if any(given is not None for given in shape):
        raise UsageError(
            "with --ray the nodes, their GPUs, CPUs and memory are those of the Ray cluster; leave out --nodes, "
            "--gpus-per-node, --cpu-slots, --gpu-memory, --cpus-per-node, --memory-per-node and --pool"
        )
    return RayConfig(
        address=address,
        silence_s=DEFAULT_SILENCE_S if silence_s is None else silence_s,
        warm_s=DEFAULT_WARM_S if warm_s is None else warm_s,
        checkpoint_directory="" if checkpoints is None else str(Path(checkpoints).absolute()),
        token_file="" if token_file is None else str(token_file.absolute()),
        port=port,
    )


@app.command("backup", short_help="Copy the cluster's state to a file.")
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


@app.command("repair", short_help="Show what of the state cannot be used; repair a damaged file.")
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


@app.command("stop", short_help="Stop the cluster's daemon.")
def stop() -> None:
    """Stop the daemon. Jobs go on running; the next command that needs the cluster starts and adopts them.

    One that several users share is stopped by its administrators, and started by root.

    Example:
      gpuquota cluster stop
    """
    from kfp_gpuquota.cluster.connect import embedded_home, shared_socket  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.start import await_stop  # noqa: PLC0415

    if (socket := shared_socket()) is not None:
        stop_shared(socket)
        return
    home = embedded_home()
    if not home.is_locked():
        echo("the cluster does not run")
        return
    reached = client()
    jobs = reached.list_jobs().jobs
    running = [job.spec.name for job in jobs if any(worker.phase != "Gone" for worker in job.status.workers)]
    reached.stop_cluster()
    await_stop(home)
    echo("the cluster has stopped" + (f"; still running: {', '.join(running)}" if running else ""))


@app.command("status", short_help="Show the cluster.")
def status(output: OutputOption = Format.TABLE) -> None:
    """Show whether the cluster runs, where, whose it is, and with how many GPUs.

    Examples:
      gpuquota cluster status
      gpuquota cluster status -o json
    """
    from kfp_gpuquota.cluster.connect import runs_here  # noqa: PLC0415
    from kfp_gpuquota.errors import ClusterUnavailableError  # noqa: PLC0415

    if not runs_here():
        raise ClusterUnavailableError("the cluster does not run; start it with: gpuquota cluster start")
    reached = client()
    health, nodes = reached.health(), reached.list_nodes()
    total = as_number(sum(view.gpus for view in nodes))
    held = as_number(sum(view.gpus_in_use for view in nodes))
    models = ", ".join(sorted({model for view in nodes for model in view.types}))
    rows = [
        ("directory", health.home),
        *who_uses_it(health),
        ("daemon", f"pid {health.pid}, version {health.version}, up {age(health.started_at)}"),
        ("nodes", f"{len(nodes)} with {show_gpus(total)} ({models})"),
        ("in use", f"{held} of {show_gpus(total)}"),
        *([("problem", health.problem)] if health.problem else []),
    ]
    show(
        {"health": health, "nodes": len(nodes), "gpus": total, "held": held},
        output,
        table(("CLUSTER", ""), rows),
    )
