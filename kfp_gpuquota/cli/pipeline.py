"""`gpuquota pipeline`: route, check and run Kubeflow pipelines. Only these commands need kfp."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from kfp_gpuquota.cli.arguments.options import OutputOption  # noqa: TC001  # typer reads annotations at run time
from kfp_gpuquota.cli.display.output import Format, show, table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import ClusterUnavailableError, DefinitionError, UnauthorizedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.dsl.pipelines.check import Cluster, PipelineCheck, StepCheck
    from kfp_gpuquota.dsl.pipelines.kfp_server import KfpServer
    from kfp_gpuquota.dsl.pipelines.pipeline_file import Package

app = typer.Typer(help="Kubeflow pipelines under the quota.", no_args_is_help=True)

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A compiled pipeline, or the Python that defines it.")
]
ProjectOption = Annotated[
    str, typer.Option("--project", "-p", metavar="PROJECT", help="For steps that name no project themselves.")
]
NameOption = Annotated[
    str, typer.Option("--pipeline", metavar="NAME", help="Which one, where a Python file defines several.")
]
LauncherImageOption = Annotated[
    str,
    typer.Option(
        "--launcher-image", envvar="GPUQUOTA_LAUNCHER_IMAGE", help="For a KFP backend: the image with this package."
    ),
]
_UNKNOWN: Final = "at run"


@app.command("route", short_help="Send a pipeline's GPU steps through the quota.")
def route(
    file: FileArgument,
    project: ProjectOption = "",
    pipeline: NameOption = "",
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; else it is printed.")
    ] = None,
    launcher_image: LauncherImageOption = "",
) -> None:
    """Write the pipeline with every step that asks for GPUs routed through the quota; all else stays as it is.

    For pipelines that are already compiled: upload the result to KFP as before.

    \b
    Examples:
      gpuquota pipeline route pipeline.yaml --project team-a -o routed.yaml
      gpuquota pipeline route pipeline.yaml | diff pipeline.yaml -
    """
    routed = _loaded(file, pipeline).routed(project or None, launcher_image or None)
    if out is None:
        typer.echo(routed.text(), nl=False)
        return
    from kfp_gpuquota.dsl.pipelines.check import check_pipeline  # noqa: PLC0415

    try:
        out.write_text(routed.text(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {str(out)!r}: {error.strerror}") from error
    steps = [step.step for step in check_pipeline(routed.spec).routed]
    echo(f"{out}: {_steps(len(steps))} routed{': ' if steps else ''}{', '.join(steps)}")


@app.command("check", short_help="Show what will be routed, and what is wrong.")
def check(
    file: FileArgument, project: ProjectOption = "", pipeline: NameOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Show each step that will be routed, its project, size and quota, and every problem, before anything runs.

    Quotas are those of the cluster, where one runs. Ends with 2 when there is a problem.

    \b
    Examples:
      gpuquota pipeline check pipeline.py
      gpuquota pipeline check pipeline.yaml --project team-a -o json
      gpuquota --context prod pipeline check pipeline.yaml
    """
    loaded, (cluster, unchecked) = _loaded(file, pipeline), _cluster()
    found = _checked(loaded, project, cluster)
    show(found, output, _report(found, unchecked))
    if found.problems:
        raise typer.Exit(DefinitionError.exit_code)


@app.command("run", short_help="Run a pipeline, here or on a KFP server.")
def run(
    file: FileArgument,
    arguments: Annotated[
        list[str] | None, typer.Option("--arg", "-a", metavar="NAME=VALUE", help="A parameter; may be repeated.")
    ] = None,
    project: ProjectOption = "",
    pipeline: NameOption = "",
    *,
    local: Annotated[bool, typer.Option("--local", help="On this machine, with kfp.local; the default.")] = False,
    host: Annotated[str, typer.Option("--host", metavar="URL", help="On the KFP server at this address.")] = "",
    kubeflow: Annotated[
        bool, typer.Option("--kubeflow", help="On the KFP of the kubeconfig's context, by kubectl port-forward.")
    ] = False,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="The Profile in which it runs; else the project.")
    ] = "",
    root: Annotated[
        str, typer.Option("--root", metavar="DIR|URI", help="Where its artifacts go; else where KFP puts them.")
    ] = "",
    launcher_image: LauncherImageOption = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="A file with the token that identifies you.")
    ] = None,
    existing_token: Annotated[
        str, typer.Option("--existing-token", envvar="KFP_TOKEN", metavar="TOKEN", help="The token itself.")
    ] = "",
    cookie: Annotated[
        str, typer.Option("--cookie", metavar="NAME=VALUE", help="The session's cookie, as the dashboard set it.")
    ] = "",
    header: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="A header; may be repeated.")
    ] = None,
    ca_cert: Annotated[
        str, typer.Option("--ca-cert", metavar="FILE", help="The authority that vouches for the server.")
    ] = "",
    kubeflow_namespace: Annotated[
        str, typer.Option("--kubeflow-namespace", metavar="NAME", help="With --kubeflow: where KFP is installed.")
    ] = "kubeflow",
    service_account: Annotated[
        str, typer.Option("--service-account", metavar="NAME", help="With --kubeflow: the account in the Profile.")
    ] = "default-editor",
) -> None:
    """Run a pipeline with its GPU steps under the quota, and show its outputs.

    A parameter's value is read as the pipeline declares it; lists and objects are JSON.

    \b
    Examples:
      gpuquota pipeline run pipeline.py --project team-a --arg epochs=3
      gpuquota pipeline run pipeline.yaml --host http://localhost:8080 -a 'layers=[64, 10]'
      gpuquota pipeline run pipeline.py -p team-a --host https://kubeflow.lab/pipeline --token-file token
      gpuquota --context prod pipeline run pipeline.py -p team-a --kubeflow
    """
    if local + bool(host) + kubeflow > 1:
        raise UsageError("--local, --host and --kubeflow are places to run at; give one of them")
    loaded = _loaded(file, pipeline).routed(project or None, launcher_image or None)
    from kfp_gpuquota.dsl.pipelines.arguments import arguments_from  # noqa: PLC0415

    values = arguments_from(loaded.spec, arguments or [])
    if host or kubeflow:
        from kfp_gpuquota.dsl.pipelines.kfp_server import KfpServer  # noqa: PLC0415

        token = _token(token_file, existing_token)
        server = KfpServer(host, token=token, cookie=cookie, headers=_headers(header or []), ca_cert=ca_cert)
        with _reached(server, kubeflow_namespace if kubeflow else "", namespace or project, service_account) as found:
            run_id = found.submit(loaded, values, root=root, namespace=namespace)
        echo(f"run {run_id} submitted to {host or f'the Kubeflow in namespace {kubeflow_namespace}'}")
        return
    from kfp_gpuquota.dsl.pipelines import run as runs  # noqa: PLC0415

    if problems := _checked(loaded, project, _cluster()[0]).problems:
        more = f" (and {len(problems) - 1} more; see: gpuquota pipeline check {file})" if len(problems) > 1 else ""
        raise DefinitionError(problems[0] + more)
    for name, value in runs.run_locally(loaded, values, root).items():
        echo(f"{name}: {value}")


@contextlib.contextmanager
def _reached(server: KfpServer, kubeflow: str, profile: str, service_account: str) -> Iterator[KfpServer]:
    """The server; with `kubeflow`, the namespace of KFP, that of the kubeconfig's context, as the Profile's account."""
    if not kubeflow:
        yield server
        return
    from kfp_gpuquota.cluster.connect import kube_calls, kubeconfig_context  # noqa: PLC0415
    from kfp_gpuquota.dsl.pipelines.port_forward import forwarded, profile_token  # noqa: PLC0415

    with forwarded(kubeconfig_context(), kubeflow) as host:
        found = replace(server, host=host)
        if not (found.token or found.cookie or found.headers) and profile and found.has_several_users():
            found = replace(found, token=profile_token(kube_calls(), profile, service_account))
        yield found


def _token(file: Path | None, given: str) -> str:
    if file is None:
        return given
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"cannot read --token-file {str(file)!r}: {error.strerror}") from error


def _headers(given: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = [text.partition("=") for text in given]
    for (name, equals, _), text in zip(pairs, given, strict=True):
        if not (name and equals):
            raise UsageError(f"--header is {text!r}, but it must be NAME=VALUE")
    return tuple((name, value) for name, _, value in pairs)


def _loaded(file: Path, name: str) -> Package:
    if importlib.util.find_spec("kfp") is None:
        raise UsageError(
            "this needs kfp, which is not installed here; install it with: pip install 'kfp-gpuquota[kfp]'"
        )
    if name and file.suffix != ".py":
        raise UsageError(f"--pipeline chooses among the pipelines of a Python file, and {file} holds one pipeline")
    from kfp_gpuquota.dsl.pipelines.source import load  # noqa: PLC0415

    return load(file, name)


def _checked(loaded: Package, project: str, cluster: Cluster | None) -> PipelineCheck:
    from kfp_gpuquota.cluster.connect import PROJECT_VARIABLE, load_settings  # noqa: PLC0415
    from kfp_gpuquota.dsl.pipelines.check import check_pipeline  # noqa: PLC0415

    configured = os.environ.get(PROJECT_VARIABLE) or load_settings().project
    found = check_pipeline(loaded.spec, project or None, configured=configured, cluster=cluster, platform=loaded.more)
    return with_unknown_project(found, project, cluster)


def with_unknown_project(found: PipelineCheck, project: str, cluster: Cluster | None) -> PipelineCheck:
    """Return what was found, with a problem where `--project` names a project that the cluster does not have.

    Steps that name their own project do not use it, so it is not part of their problems.
    """
    if cluster is None or not project or project in cluster.projects or any(project in p for p in found.problems):
        return found
    problem = f"--project is {project}, and there is no such project; see them with: gpuquota project list"
    return msgspec.structs.replace(found, problems=(problem, *found.problems))


def _cluster() -> tuple[Cluster | None, str]:
    """Return (its limits, ""), or (None, why they are unknown). Checking a file does not start a cluster."""
    from kfp_gpuquota.cluster.connect import URL_VARIABLE, connect, kube_context, runs_here  # noqa: PLC0415
    from kfp_gpuquota.dsl.pipelines.check import Cluster  # noqa: PLC0415

    if kube_context() is None and not os.environ.get(URL_VARIABLE) and not runs_here():
        return None, "no cluster runs here; start it with: gpuquota cluster start"
    try:
        reached = connect(retry_for_s=2.0)
        projects = {view.project.name: view.project for view in reached.list_projects()}
        return Cluster(projects=projects, nodes=tuple(view.node for view in reached.list_nodes())), ""
    except ClusterUnavailableError as error:
        url = os.environ.get(URL_VARIABLE)
        return None, f"the cluster at {url} does not answer" if url else error.message
    except UnauthorizedError as error:
        return None, error.message


def _report(found: PipelineCheck, unchecked: str) -> str:
    columns = ["STEP", "PROJECT", "GPUS", "MIN", "MAX", "KIND"] + ["GUARANTEED", "LIMIT"] * (not unchecked)
    parts = [table(columns, (_row(step)[: len(columns)] for step in found.routed))] if found.routed else []
    if found.unrouted:
        parts.append(f"{_steps(len(found.unrouted))} without GPUs, not routed: {', '.join(found.unrouted)}")
    if unchecked:
        parts.append(f"quotas were not checked: {unchecked}")
    parts += [f"problem: {problem}" for problem in found.problems] or [_no_problems(found, unchecked)]
    return "\n".join(parts)


def _no_problems(found: PipelineCheck, unchecked: str) -> str:
    limits = ", as far as can be checked without quotas and projects" if unchecked else ""
    return f"no problems in pipeline {found.pipeline}{limits}"


def _row(step: StepCheck) -> list[object]:
    shared = step.gpus is not None and step.request != str(step.gpus)  # a part of GPUs has one size
    found = [step.request] * 3 if shared else [step.gpus, step.min_gpus, step.max_gpus]
    sizes = [_UNKNOWN if size is None else size for size in found]
    limit = "none" if step.quota is None or step.quota.limit is None else step.quota.limit
    quota = [step.quota.guaranteed, limit] if step.quota else ["", ""]
    return [step.step, step.project, *sizes, step.kind.value, *quota]


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
