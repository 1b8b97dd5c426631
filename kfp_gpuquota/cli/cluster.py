"""`gpuquota cluster`: the embedded cluster's daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from kfp_gpuquota.api.quantity import as_number, parse_mib
from kfp_gpuquota.cli.amounts import pairs, whole_number
from kfp_gpuquota.cli.options import OutputOption, client
from kfp_gpuquota.cli.output import Format, age, show, table

app = typer.Typer(help="The embedded cluster on this machine.", no_args_is_help=True)

NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Simulate so many nodes on this machine.")]
GpusOption = Annotated[
    int | None,
    typer.Option("--gpus-per-node", "--gpus", min=1, help="GPUs of each node; else this machine's, or 2 CPU slots."),
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
        "--usage-half-life", metavar="HOURS", help="Who borrowed borrows less; half of it is forgotten in this time."
    ),
]
KillerOption = Annotated[
    bool,
    typer.Option(
        "--gpu-memory-killer", help="End processes that hold GPU memory which an owner needs; else only tell."
    ),
]
LendOption = Annotated[
    bool, typer.Option("--lend-silent", help="Lend also what jobs without elastic_runtime leave of their GPU memory.")
]


@app.command("start", short_help="Start the cluster.")
def start(
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    gpu_memory: GpuMemoryOption = None,
    cpus_per_node: CpusOption = None,
    memory_per_node: MemoryOption = None,
    usage_half_life: HalfLifeOption = None,
    pool: PoolOption = None,
    *,
    gpu_memory_killer: KillerOption = False,
    lend_silent: LendOption = False,
) -> None:
    """Start the cluster; other commands start it by themselves where it does not run.

    GPUs are this machine's; where it has none, CPU slots stand for them. A simulated node is a label on such slots.

    Examples:
      gpuquota cluster start
      gpuquota cluster start --nodes 4 --gpus-per-node 10
      gpuquota cluster start --gpus 2 --gpu-memory 16G
    """
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.devices import ClusterConfig  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.start import ensure_running, start_with  # noqa: PLC0415
    from kfp_gpuquota.errors import ConflictError  # noqa: PLC0415
    from kfp_gpuquota.fractions import Policy  # noqa: PLC0415

    home = embedded_home()
    amounts = (nodes, gpus_per_node, gpu_memory, cpus_per_node, memory_per_node, usage_half_life, pool)
    if all(given is None for given in amounts) and not gpu_memory_killer and not lend_silent:
        ensure_running(home)
    elif home.is_locked():
        raise ConflictError("the cluster already runs; stop it first to give it another shape: gpuquota cluster stop")
    else:
        sizes = pairs("pool", pool or [], "a node pool is given as POOL=NODES")
        pools = {name: whole_number("pool", count, "nodes") for name, count in sizes.items()}
        config = ClusterConfig(
            nodes=nodes or 1,
            gpus_per_node=gpus_per_node,
            gpu_memory_mib=None if gpu_memory is None else parse_mib("gpu_memory", gpu_memory),
            cpus_per_node=cpus_per_node,
            memory_per_node_mib=None if memory_per_node is None else parse_mib("memory_per_node", memory_per_node),
            pools=pools,
            usage_half_life_s=None if usage_half_life is None else usage_half_life * 3600,
            memory_policy=Policy(killer=gpu_memory_killer, lend_silent=lend_silent),
        )
        start_with(home, config)
    typer.echo(f"the cluster runs in {home.root}")
    status()


@app.command("stop", short_help="Stop the cluster's daemon.")
def stop() -> None:
    """Stop the daemon. Jobs go on running; the next command that needs the cluster starts and adopts them.

    Example:
      gpuquota cluster stop
    """
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.start import await_stop  # noqa: PLC0415

    home = embedded_home()
    if not home.is_locked():
        typer.echo("the cluster does not run")
        return
    reached = client()
    running = [job.spec.name for job in reached.list_jobs().jobs if job.status.gpus]
    reached.stop_cluster()
    await_stop(home)
    typer.echo("the cluster has stopped" + (f"; still running: {', '.join(running)}" if running else ""))


@app.command("status", short_help="Show the cluster.")
def status(output: OutputOption = Format.TABLE) -> None:
    """Show whether the cluster runs, where, and with how many GPUs.

    Examples:
      gpuquota cluster status
      gpuquota cluster status -o json
    """
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.errors import ClusterUnavailableError  # noqa: PLC0415

    if not embedded_home().is_locked():
        raise ClusterUnavailableError("the cluster does not run; start it with: gpuquota cluster start")
    reached = client()
    health, nodes = reached.health(), reached.list_nodes()
    total = sum(len(view.node.devices) for view in nodes)
    held = as_number(sum(sum(view.used.values()) for view in nodes))
    rows = [
        ("directory", health.home),
        ("daemon", f"pid {health.pid}, version {health.version}, up {age(health.started_at)}"),
        (
            "nodes",
            f"{len(nodes)} with {total} GPUs ({', '.join(sorted({d.model for v in nodes for d in v.node.devices}))})",
        ),
        ("in use", f"{held} of {total} GPUs"),
    ]
    show(
        {"health": health, "nodes": len(nodes), "gpus": total, "held": held},
        output,
        table(("CLUSTER", ""), rows),
    )
