"""`gpuquota`: its commands, and how errors end."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Annotated

import typer

from kfp_gpuquota.cli import cluster, jobs, logs, pipeline, policies, projects, show, simulate, submit, whatif
from kfp_gpuquota.cli.terminal import say
from kfp_gpuquota.errors import GpuQuotaError
from kfp_gpuquota.version import __version__

app = typer.Typer(
    name="gpuquota",
    help="GPU quotas, borrowing and elastic training: on this machine, or on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.add_typer(cluster.app, name="cluster")
app.add_typer(projects.app, name="project")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(policies.app, name="policy")
app.add_typer(projects.config, name="config")
submit.register(app)
show.register(app)
logs.register(app)
jobs.register(app)
simulate.register(app)
whatif.register(app)


def _show_version(*, wanted: bool) -> None:
    if wanted:
        say(f"gpuquota {__version__}")
        raise typer.Exit


@app.callback()
def choose_cluster(
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            help='The cluster: a context of your kubeconfig, "." its current one, "embedded".',
        ),
    ] = "",
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=lambda value: _show_version(wanted=value), is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """GPU quotas, borrowing and elastic training: on this machine, or on Kubernetes."""
    del version
    if context:
        os.environ["GPUQUOTA_CONTEXT"] = context


def keep_examples(commands: typer.Typer) -> None:
    """The lines of an example are not to be filled like a paragraph: a backspace before them says so to click."""
    for command in commands.registered_commands:
        assert command.callback is not None
        command.help = (
            inspect.cleandoc(command.callback.__doc__ or "").replace("\b\n", "").replace("\nExample", "\n\b\nExample")
        )
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        keep_examples(group.typer_instance)


keep_examples(app)
command = typer.main.get_command(app)


def main() -> None:
    """Run a command: errors are one sentence on stderr, and the exit code is 1 (it failed) or 2 (a mistake)."""
    try:
        command()
    except GpuQuotaError as error:
        say(f"Error: {error.message}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
