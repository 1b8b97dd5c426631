"""`gpuquota cluster start`: the options that shape a cluster, and its start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kfp_gpuquota.api.quantity import parse_gpu_memory, parse_mib, whole_number
from kfp_gpuquota.cli.admin.cluster_status import status
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
)
from kfp_gpuquota.cli.arguments.defragmentation import BudgetOption, PerGpuOption, WindowOption, defragmentation
from kfp_gpuquota.cli.arguments.options import client
from kfp_gpuquota.cli.arguments.parsers import count_or_gpus, pairs
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import ClusterStartError, ConflictError, UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.api.node import SharingRules
    from kfp_gpuquota.cluster.local.devices import ClusterConfig
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.local.shared.config import SharedConfig
    from kfp_gpuquota.cluster.ray.config import RayConfig
    from kfp_gpuquota.fractions import Policy

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
    defragment: WindowOption = "",
    defragment_budget: BudgetOption = None,
    defragment_per_gpu: PerGpuOption = None,
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
      gpuquota cluster start --defragment "Mon-Fri 22:00-06:00" --defragment-budget 300
      gpuquota cluster start --ray auto
      sudo gpuquota cluster start --shared --group gpu --admin-group gpu-admins --install-unit
    """
    from kfp_gpuquota.cluster.connect import embedded_home, shared_socket  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.start import ensure_running  # noqa: PLC0415

    for_users = shared_settings(
        shared=shared,
        group=group,
        admin_group=admin_group,
        jobs_per_user=jobs_per_user,
        service={"--foreground": foreground, "--print-unit": print_unit, "--install-unit": install_unit},
    )
    home = embedded_home()
    count, chosen = count_or_gpus(gpus_per_node)
    shape = _given(
        nodes=nodes,
        gpus_per_node=count,
        gpus=chosen or None,
        cpu_slots=cpu_slots or None,
        gpu_memory_mib=None if gpu_memory is None else parse_gpu_memory("gpu_memory", gpu_memory),
        cpus_per_node=cpus_per_node,
        memory_per_node_mib=None if memory_per_node is None else parse_mib("memory_per_node", memory_per_node),
        pools=None if pool is None else _pools(pool),
    )
    of_ray = _given(
        silence_s=ray_silence,
        warm_s=ray_warm,
        checkpoint_directory=None if ray_checkpoints is None else str(Path(ray_checkpoints).absolute()),
        token_file=None if ray_token_file is None else str(ray_token_file.absolute()),
        port=ray_port or None,
    )
    shape |= _given(ray=_ray_config(ray, of_ray, shape))
    rules = _given(
        usage_half_life_s=None if usage_half_life is None else usage_half_life * 3600,
        log_limit_mib=None if log_limit is None else parse_mib("log_limit", log_limit),
        keep_ended_s=None if keep_ended_days is None else keep_ended_days * 86_400,
        keep_ended_jobs=keep_ended_jobs,
        memory_policy=_memory_policy(killer=gpu_memory_killer, lend_silent=lend_silent),
        sharing=_sharing(
            simulated=gpu_memory is not None,
            max_sharers=max_sharers,
            memory_reserve=memory_reserve,
            smallest_share=smallest_share,
        ),
        moves=moves,
        reserve_after_s=reserve_after,
    )
    if defragment or defragment_budget is not None or defragment_per_gpu is not None:
        former = None if for_users is not None else _former(home).defragmentation
        rules["defragmentation"] = defragmentation(defragment, defragment_budget, defragment_per_gpu, former)
    plain = for_users is None and not shape and not rules
    if for_users is None and (socket := shared_socket()) is not None:
        refuse_beside_shared(socket, plain=plain)
        status()
        return
    if plain:
        ensure_running(home)
    else:
        config = _configuration(home, shape, rules, for_users)
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


def _given(**options: object) -> dict[str, Any]:
    """Return the options that are given."""
    return {name: value for name, value in options.items() if value is not None}


def _pools(given: list[str]) -> dict[str, int]:
    sizes = pairs("pool", given, "a node pool is given as POOL=NODES")
    return {name: whole_number("pool", size, "nodes") for name, size in sizes.items()}


def _memory_policy(**options: bool | None) -> Policy | None:
    from kfp_gpuquota.fractions import Policy  # noqa: PLC0415

    chosen = _given(**options)
    return Policy(**chosen) if chosen else None


def _sharing(*, simulated: bool, **options: float | None) -> SharingRules | None:
    """Return the rules that are given, the others by default; None: no rule is given."""
    from kfp_gpuquota.api.node import SharingRules  # noqa: PLC0415

    chosen = _given(**options)
    return SharingRules(**({"memory_reserve": 0.0} if simulated else {}) | chosen) if chosen else None


def _ray_config(address: str | None, options: dict[str, Any], shape: dict[str, Any]) -> RayConfig | None:
    """Return the Ray cluster that is asked for. Raises UsageError for options that exclude each other."""
    from kfp_gpuquota.cluster.ray.config import RayConfig  # noqa: PLC0415

    if address is None:
        if options:
            raise UsageError("options that begin with --ray- need --ray auto or --ray HOST:PORT")
        return None
    if shape:
        raise UsageError(
            "with --ray the nodes, their GPUs, CPUs and memory are those of the Ray cluster; leave out --nodes, "
            "--gpus-per-node, --cpu-slots, --gpu-memory, --cpus-per-node, --memory-per-node and --pool"
        )
    return RayConfig(address=address, **options)


def _configuration(
    home: Home, shape: dict[str, Any], rules: dict[str, Any], shared: SharedConfig | None
) -> ClusterConfig:
    """Return the configuration with these fields, and else the former values, of the shape only if none is given."""
    from msgspec.structs import asdict, replace  # noqa: PLC0415

    from kfp_gpuquota.cluster.local.devices import SHAPE, ClusterConfig  # noqa: PLC0415

    default = ClusterConfig()
    former = default if shared is not None else _former(home)
    if shape:
        shape = {field: value for field, value in asdict(default).items() if field in SHAPE} | shape
    return replace(former, **shape, **rules, shared=shared)


def _former(home: Home) -> ClusterConfig:
    from kfp_gpuquota.cluster.local.storage.database import stored_config  # noqa: PLC0415

    return stored_config(home.database)


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
