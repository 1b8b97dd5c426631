"""`gpuquota submit`: from a command line to a JobSpec."""

from __future__ import annotations

import shlex
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Kind
from kfp_gpuquota.api.durations import text_of
from kfp_gpuquota.api.job import (
    DEFAULT_COOL_DOWN_S,
    DEFAULT_GRACE_PERIOD_S,
    DEFAULT_MAX_RESTARTS,
    DEFAULT_RESTART_WINDOW_S,
)
from kfp_gpuquota.api.quantity import gpus_or_fraction, parse_cores, parse_gpu_memory, parse_mib, show_mib, whole_number
from kfp_gpuquota.cli.arguments.completion import complete_node
from kfp_gpuquota.cli.arguments.option_errors import Command
from kfp_gpuquota.cli.arguments.options import (
    DryRun,
    DryRunOption,
    OutputOption,
    ProjectOption,
    client,
    project_or_configured,
)
from kfp_gpuquota.cli.arguments.parsers import pairs, seconds, toleration_of
from kfp_gpuquota.cli.arguments.start_conditions import array_of, begin_time, dependencies
from kfp_gpuquota.cli.display.output import Format, is_tabular, show
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.cli.jobs.arrays import arrays_in, specs_of, submit_all
from kfp_gpuquota.cli.jobs.logs import follow_to_the_end
from kfp_gpuquota.cli.jobs.rehearsal import rehearse_here
from kfp_gpuquota.cluster.local.environment import forwarded_environment
from kfp_gpuquota.cluster.submission import most_gpus, with_absolute_paths
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer()
Value = TypeVar("Value")

_VARIABLE: Final = "a variable is given as NAME=VALUE"

GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus", "-g", "--gpu-portion-request", metavar="N", help="GPUs it asks for (1), a part of one, as 0.25, or 0."
    ),
]
FractionLimitOption = Annotated[
    float | None,
    typer.Option(
        "--gpu-limit", "--gpu-portion-limit", metavar="PART", help="The part it may use while it is idle, as 0.8."
    ),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory", "--gpu-memory-request", metavar="SIZE", help="GPU memory instead of GPUs, as 4G, or 2500 (MiB)."
    ),
]
GpuMemoryLimitOption = Annotated[
    str | None,
    typer.Option("--gpu-memory-limit", metavar="SIZE", help="The memory it may use while it is idle, as 8G."),
]
GpuComputeOption = Annotated[
    float | None,
    typer.Option("--gpu-compute", metavar="PART", help="With a share: the part of a GPU's computing power, as 0.25."),
]
GpuDevicesOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-devices", "--gpu-devices-request", metavar="N", help="That share of each of so many GPUs of one node."
    ),
]
CpuOption = Annotated[
    str | None, typer.Option("--cpu", metavar="CORES", help="CPU cores of each worker, as 2 or 500m.")
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Main memory of each worker, as 8Gi.")
]
CpuLimitOption = Annotated[
    str | None, typer.Option("--cpu-limit", metavar="CORES", help="The most CPU that a worker gets, as 2 or 500m.")
]
MemoryLimitOption = Annotated[
    str | None,
    typer.Option("--memory-limit", metavar="SIZE", help="The most memory of a worker, as 16Gi; above it is ended."),
]
ElasticOption = Annotated[
    bool, typer.Option("--elastic", help="May run with 1 GPU up to what the project may hold, and change on the way.")
]
MinOption = Annotated[str | None, typer.Option("--min-gpus", metavar="N", help="The fewest GPUs it runs with.")]
MaxOption = Annotated[str | None, typer.Option("--max-gpus", metavar="N", help="The most GPUs it makes use of.")]
PerWorkerOption = Annotated[
    str | None, typer.Option("--gpus-per-worker", metavar="N", help="GPUs of one process, on one node.")
]
InteractiveOption = Annotated[
    bool, typer.Option("--interactive", help="A build session: within quota only, never preempted.")
]
PreemptibleOption = Annotated[
    bool | None,
    typer.Option(
        "--preemptible/--not-preemptible",
        help="Whether others may take its GPUs back; not: at most down to its --min-gpus.",
    ),
]
PriorityOption = Annotated[int | None, typer.Option("--priority", help="Within the project; default 50, sessions 100.")]
NodeOption = Annotated[
    str | None,
    typer.Option("--node", metavar="NAME", autocompletion=complete_node, help="Run on this node only."),
]
SelectorOption = Annotated[
    list[str] | None,
    typer.Option("--node-selector", metavar="K=V", help="A label its nodes must have; may be repeated."),
]
TolerationOption = Annotated[
    list[str] | None,
    typer.Option("--toleration", metavar="K[=V][:EFFECT]", help="A taint that it tolerates; may be repeated."),
]
GpuTypeOption = Annotated[
    str | None,
    typer.Option("--gpu-type", metavar="TYPE[,TYPE]", help="The types of GPUs that it accepts, the best first."),
]
PoolOption = Annotated[str, typer.Option("--node-pool", metavar="POOL", help="Run on nodes of this pool.")]
ClaimTemplateOption = Annotated[
    str,
    typer.Option(
        "--resource-claim-template",
        metavar="NAME",
        help="On Kubernetes: each worker claims its GPUs by this template (DRA).",
    ),
]
RequiredTopologyOption = Annotated[
    str | None,
    typer.Option("--required-topology", metavar="LABEL", help="All workers on nodes with one value of this label."),
]
PreferredTopologyOption = Annotated[
    str | None, typer.Option("--preferred-topology", metavar="LABEL", help="The same, where that is possible.")
]
SegmentOption = Annotated[
    str | None,
    typer.Option("--segment", metavar="WORKERS", help="Each so many workers on nodes with one value of a label."),
]
SegmentTopologyOption = Annotated[
    str | None, typer.Option("--segment-topology", metavar="LABEL", help="The label of --segment, such as a rack.")
]
SpreadOption = Annotated[bool, typer.Option("--spread", help="Workers on as many nodes as possible, not as few.")]
EnvironmentOption = Annotated[
    list[str] | None, typer.Option("--environment", "-e", metavar="K=V", help="Set a variable; may be repeated.")
]
ImageOption = Annotated[str | None, typer.Option("--image", "-i", metavar="IMAGE", help="On Kubernetes; else ignored.")]
DirectoryOption = Annotated[
    str | None, typer.Option("--working-dir", metavar="DIR", help="Where the command runs; else here.")
]
RuntimeEnvOption = Annotated[
    str | None,
    typer.Option("--runtime-env", metavar="FILE", help="On Ray only: YAML or JSON of Ray's runtime_env (pip, ...)."),
]
RuntimeEnvJsonOption = Annotated[
    str | None, typer.Option("--runtime-env-json", metavar="JSON", help="On Ray only: the same as a JSON object.")
]
GraceOption = Annotated[
    float, typer.Option("--grace-period", metavar="SECONDS", help="From SIGTERM to SIGKILL when it must stop.")
]
MaxRestartsOption = Annotated[
    int, typer.Option("--max-restarts", metavar="N", help="Restarts after ends of its own workers before it fails.")
]
RestartWindowOption = Annotated[
    str,
    typer.Option("--restart-window", metavar="TIME", help="After this time without a restart they count from 0."),
]
CoolDownOption = Annotated[
    float, typer.Option("--cool-down", metavar="SECONDS", help="After it has grown, not grown again for this long.")
]
MinRunTimeOption = Annotated[
    float, typer.Option("--min-run-time", metavar="SECONDS", help="Not stopped for others before it has run this long.")
]
MaxRuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--max-runtime", "--time", metavar="TIME", help="It ends with a failure after it has run this long, as 2h."
    ),
]
BeginOption = Annotated[
    str | None,
    typer.Option("--begin", metavar="TIME", help="Not queued before: +2h, 22:00, or 2027-01-31T22:00."),
]
AfterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--after",
        metavar="JOB[,JOB]",
        help="Not queued before these have succeeded; any:JOB: have ended; an array: all of its jobs.",
    ),
]
ArrayOption = Annotated[
    str | None,
    typer.Option("--array", metavar="0-99[%8]", help="A job for each index, at most 8 queued or running at a time."),
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow", "-f", help="Show its log until it has ended, and end with its exit status; Ctrl-C only stops that."
    ),
]
ProgramOption = Annotated[
    str | None,
    typer.Option("--command", metavar="PROGRAM", help="The command; else what follows --."),
]
ProgramArgsOption = Annotated[
    list[str] | None, typer.Option("--args", metavar="ARG", help="With --command: an argument; may be repeated.")
]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="K=V", help="A label of the job; may be repeated.")
]
RehearseOption = Annotated[
    bool,
    typer.Option(
        "--rehearse",
        help="Run the command here with ELASTIC_REHEARSE=1 first; submit it where that finds nothing.",
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
CommandArgument = Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND [ARG]")]


class SubmitCommand(Command):
    """Also takes `--command` without a value, before `--` or another option, as runai does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind `submit`."""
        words = without_bare_command(args)
        behind = words[words.index("--") + 1 :] if "--" in words else []
        left = super().parse_args(ctx, words)
        if len(ctx.params["command"] or ()) < len(behind):  # its first word was taken for the name
            raise UsageError(f"the job has no name: gpuquota submit NAME ... -- {shlex.join(behind)}")
        return left


def without_bare_command(words: list[str]) -> list[str]:
    """Return the words without a `--command` that has no value."""
    end = words.index("--") if "--" in words else len(words)
    options = [*words[: end + 1], "--"]
    bare = {i for i, word in enumerate(words[:end]) if word == "--command" and options[i + 1].startswith("-")}
    return [word for i, word in enumerate(words) if i not in bare]


@app.command("submit", short_help="Submit a job.", cls=SubmitCommand)
def submit(
    name: NameArgument,
    command: CommandArgument = None,
    gpus: GpusOption = None,
    *,
    elastic: ElasticOption = False,
    min_gpus: MinOption = None,
    max_gpus: MaxOption = None,
    gpus_per_worker: PerWorkerOption = None,
    gpu_limit: FractionLimitOption = None,
    gpu_memory: GpuMemoryOption = None,
    gpu_memory_limit: GpuMemoryLimitOption = None,
    gpu_compute: GpuComputeOption = None,
    gpu_devices: GpuDevicesOption = None,
    cpu: CpuOption = None,
    memory: MemoryOption = None,
    cpu_limit: CpuLimitOption = None,
    memory_limit: MemoryLimitOption = None,
    node_selector: SelectorOption = None,
    toleration: TolerationOption = None,
    gpu_type: GpuTypeOption = None,
    node_pool: PoolOption = "",
    resource_claim_template: ClaimTemplateOption = "",
    required_topology: RequiredTopologyOption = None,
    preferred_topology: PreferredTopologyOption = None,
    segment: SegmentOption = None,
    segment_topology: SegmentTopologyOption = None,
    spread: SpreadOption = False,
    interactive: InteractiveOption = False,
    preemptible: PreemptibleOption = None,
    priority: PriorityOption = None,
    node: NodeOption = None,
    environment: EnvironmentOption = None,
    image: ImageOption = None,
    working_dir: DirectoryOption = None,
    runtime_env: RuntimeEnvOption = None,
    runtime_env_json: RuntimeEnvJsonOption = None,
    grace_period: GraceOption = DEFAULT_GRACE_PERIOD_S,
    max_restarts: MaxRestartsOption = DEFAULT_MAX_RESTARTS,
    restart_window: RestartWindowOption = f"{DEFAULT_RESTART_WINDOW_S / 3600:g}h",
    cool_down: CoolDownOption = DEFAULT_COOL_DOWN_S,
    min_run_time: MinRunTimeOption = 0.0,
    max_runtime: MaxRuntimeOption = None,
    begin: BeginOption = None,
    after: AfterOption = None,
    array: ArrayOption = None,
    follow: FollowOption = False,
    label: LabelOption = None,
    rehearse: RehearseOption = False,
    dry_run: DryRunOption = DryRun.NONE,
    program: ProgramOption = None,
    args: ProgramArgsOption = None,
    project: ProjectOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Submit a job: a training, or with --interactive a build session.

    It runs here, in this directory, with PATH, VIRTUAL_ENV, PYTHONPATH and the like of this shell.

    Examples:
      gpuquota submit train1 -g 1 -- python train.py
      gpuquota submit elastic1 -g 1 --elastic -- python train.py
      gpuquota submit elastic1 -g 1 --elastic --rehearse -- python train.py
      gpuquota submit elastic2 -g 2 --min-gpus 1 --max-gpus 4 -- python train.py
      gpuquota submit train2 -g 1 --follow -- python train.py
      gpuquota submit notebook -g 1 --interactive -- jupyter lab
      gpuquota submit quarter -g 0.25 --gpu-limit 0.8 -- python train.py
      gpuquota submit halves --gpu-memory 40G --gpu-memory-limit 80G --gpu-devices 8 -- python train.py
      gpuquota submit claimed -g 1 -i IMAGE --resource-claim-template one-gpu -- python train.py
      gpuquota submit racks -g 8 --gpus-per-worker 1 --segment 4 --segment-topology RACK_LABEL -- python train.py
      gpuquota submit overnight -g 1 --max-runtime 8h -- python train.py
      gpuquota submit tonight -g 1 --begin 22:00 -- python train.py
      gpuquota submit train4 -g 1 --after prepare -- python train.py
      gpuquota submit sweep -g 1 --array 0-99%8 -- python train.py
      gpuquota submit report -g 0 --after any:sweep -- python report.py
      gpuquota submit bounded -g 1 --cpu-limit 4 --memory-limit 16Gi -- python train.py
      gpuquota submit piped -g 1 --runtime-env-json '{"pip": ["einops"]}' -- python train.py
      gpuquota submit sleeper -g 1 --command sleep --args infinity
      gpuquota submit train3 -g 1 --dry-run=server -o yaml -- python train.py
    """
    if follow:
        _check_follow(output, array)
    words = whole_command(command or [], program, args or [])
    variables = pairs("environment", environment or [], _VARIABLE)
    if rehearse:
        rehearse_here(list(words), variables, working_dir)
    reached = client(image or "")
    here = reached.runs_here
    project = project_or_configured(project)
    requested, fraction = gpus_or_fraction(gpus, memory=gpu_memory)
    smallest, largest = _count("min_gpus", min_gpus), _count("max_gpus", max_gpus)
    if elastic:
        smallest = 1 if smallest is None else smallest
        largest = most_gpus(reached, project, requested) if largest is None else largest
    spec = JobSpec(
        name=name,
        project=project,
        command=words,
        gpus=requested,
        min_gpus=smallest,
        max_gpus=largest,
        gpus_per_worker=_count("gpus_per_worker", gpus_per_worker),
        gpu_fraction=fraction,
        gpu_fraction_limit=gpu_limit,
        gpu_memory_mib=_if_given(parse_gpu_memory, "gpu_memory", gpu_memory),
        gpu_memory_limit_mib=_if_given(parse_gpu_memory, "gpu_memory_limit", gpu_memory_limit),
        gpu_compute=gpu_compute,
        gpu_devices=_count("gpu_devices", gpu_devices),
        cpu=_if_given(parse_cores, "cpu", cpu),
        memory_mib=_if_given(parse_mib, "memory", memory),
        cpu_limit=_if_given(parse_cores, "cpu_limit", cpu_limit),
        memory_limit_mib=_if_given(parse_mib, "memory_limit", memory_limit),
        node_selector=pairs("node_selector", node_selector or [], "a label is given as KEY=VALUE"),
        gpu_types=tuple(gpu_type.split(",")) if gpu_type is not None else (),
        node_pool=node_pool,
        resource_claim_template=resource_claim_template,
        required_topology=required_topology,
        preferred_topology=preferred_topology,
        segment=_count("segment", segment, "workers"),
        segment_topology=segment_topology,
        spread=spread,
        tolerations=tuple(toleration_of(text) for text in toleration or []),
        kind=Kind.BUILD if interactive else Kind.TRAIN,
        preemptible=preemptible,
        priority=priority,
        node=node,
        environment={**(forwarded_environment() if here else {}), **variables},
        working_directory=str(Path(working_dir or ".").absolute()) if here else working_dir or "",
        grace_period_s=grace_period,
        max_restarts=max_restarts,
        restart_window_s=seconds("restart_window", restart_window),
        cool_down_s=cool_down,
        min_run_time_s=min_run_time,
        max_runtime_s=_if_given(seconds, "max_runtime", max_runtime),
        begin_at=None if begin is None else begin_time(begin, time.time()),
        after=dependencies(after, arrays_in(reached.list_jobs(project).jobs)) if after else (),
        labels=pairs("label", label or [], "a label is given as KEY=VALUE"),
        runtime_env=_runtime_env(runtime_env, runtime_env_json),
    )
    if here and not _is_found(spec):
        echo(f"warning: this machine has no program {spec.command[0]!r}", err=True)  # a node of a Ray cluster may
    if array is not None:
        _submit_array(reached, specs_of(spec, array_of(array)), dry_run, output)
    elif dry_run is not DryRun.NONE:
        show(_checked(reached, spec, dry_run, output), output)
    else:
        _submit_one(reached, spec, output, follow=follow)


def _submit_one(reached: ClusterApi, spec: JobSpec, output: str, *, follow: bool) -> None:
    """Submit the job and show it; with `follow` show its log to the end, and exit with its status."""
    job = reached.submit(spec)
    if output is Format.TABLE:
        for line in _set_by_others(spec, job):
            echo(line, err=follow)
        see = f"see it with: gpuquota describe {spec.name} -p {spec.project}"
        echo(f"job {spec.name} submitted to project {spec.project}; {see}", err=follow)  # what follows is the job's
    show(job, output)
    if follow:
        raise typer.Exit(follow_to_the_end(reached, spec.project, spec.name))


def _set_by_others(spec: JobSpec, job: Job) -> Iterator[str]:
    """Yield what policies and the project have set of a submitted job."""
    for field, policy in job.status.set_by.items():
        value = getattr(job.spec, field)
        shown = show_mib(value) if field.endswith("_mib") else f"{value:g}"
        yield f"{field} is {shown}: policy {policy} says so"
    if spec.max_runtime_s is None and (longest := job.spec.max_runtime_s) is not None:
        yield f"its maximum run time is {text_of(longest)}: the default of project {spec.project}"


def _check_follow(output: str, array: str | None) -> None:
    if not is_tabular(output):
        raise UsageError(f"--follow shows the job's log where -o {output} shows its record; choose one of them")
    if array is not None:
        raise UsageError("--follow shows the log of one job, and --array submits several; leave one of them out")


def _submit_array(reached: ClusterApi, specs: Sequence[JobSpec], dry_run: DryRun, output: str) -> None:
    if dry_run is not DryRun.NONE:
        show(tuple(_checked(reached, spec, dry_run, output) for spec in specs), output)
        return
    jobs = submit_all(reached, specs)
    if output is Format.TABLE:
        for line in _set_by_others(specs[0], jobs[0]):
            echo(line)
        name, project = specs[0].array.name if specs[0].array else "", specs[0].project
        see = f"see them with: gpuquota list -p {project}"
        echo(f"{len(jobs)} jobs submitted to project {project} as array {name}; {see}")
    show(tuple(jobs), output)


def _checked(reached: ClusterApi, spec: JobSpec, dry_run: DryRun, output: str) -> Job:
    """Return the job as it would be; with `--dry-run=server` as the cluster would queue it."""
    server = dry_run is DryRun.SERVER
    checked = reached.submit(spec, dry_run=True) if server else Job(uid="", spec=spec, status=JobStatus())
    if is_tabular(output):
        by = "server dry run" if server else "dry run"
        echo(f"job {spec.name} would be submitted to project {spec.project} ({by})")
    return checked


def whole_command(words: Sequence[str], program: str | None, args: Sequence[str]) -> tuple[str, ...]:
    """Return the command of what follows `--`, or of --command and --args. Raises UsageError for both."""
    if program is None:
        if args:
            raise UsageError("--args is given without --command: name the program with --command PROGRAM")
        return tuple(words)
    if words:
        raise UsageError(f"--command gives the command, and so does what follows --: {shlex.join(words)}; choose one")
    return (*shlex.split(program), *args)


def _is_found(spec: JobSpec) -> bool:
    """Return whether this machine has the program, as the job's process would look it up."""
    program = spec.command[0]
    if "/" in program:
        return Path(spec.working_directory, program).exists()
    return shutil.which(program, path=spec.environment.get("PATH")) is not None


def _runtime_env(file: str | None, text: str | None) -> dict[str, Any]:
    """Return the object of --runtime-env or --runtime-env-json. Raises UsageError."""
    if file is not None and text is not None:
        raise UsageError("--runtime-env and --runtime-env-json mean the same; give one of them")
    if file is None and text is None:
        return {}
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415  (10 ms that others save)

    try:
        given = yaml.safe_load(text if file is None else Path(file).read_text())
    except OSError as error:
        raise UsageError(f"--runtime-env {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"the runtime environment is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise UsageError('the runtime environment must be an object, as {"pip": ["einops"]}')
    return with_absolute_paths(given)


def _if_given(parse: Callable[[str, str], Value], field: str, text: str | None) -> Value | None:
    return None if text is None else parse(field, text)


def _count(field: str, text: str | None, unit: str = "GPUs") -> int | None:
    return None if text is None else whole_number(field, text, unit)
