"""`gpuquota`: its commands, and how errors end.

Only the module of the command that is run is imported: all of them take a tenth of a second.
"""

from __future__ import annotations

import errno
import gc
import importlib
import inspect
import io
import os
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kfp_gpuquota.cli.arguments.option_errors import Command
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import GpuQuotaError
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

GROUPS: Final = {
    "cluster": ("admin.cluster", "app"),
    "project": ("admin.projects", "app"),
    "pipeline": ("pipeline", "app"),
    "policy": ("admin.policies", "app"),
    "debug": ("admin.debug", "app"),
    "config": ("admin.projects", "config"),
    "training": ("jobs.workloads", "training"),
    "workspace": ("jobs.workloads", "workspace"),
}
"""Groups of commands: the module and the name in it that define each."""

COMMANDS: Final = {
    "jobs.submit": ("submit",),
    "jobs.run": ("run",),
    "jobs.update": ("update",),
    "jobs.listing": ("list", "get", "events"),
    "jobs.show": ("describe", "explain"),
    "jobs.top": ("top",),
    "jobs.logs": ("logs",),
    "jobs.lifecycle": ("suspend", "resume", "cancel", "wait", "delete"),
    "jobs.access": ("exec", "bash", "attach", "port-forward"),
    "admin.simulate": ("simulate",),
    "admin.twin": ("twin",),
    "jobs.whatif": ("what-if",),
    "admin.doctor": ("doctor",),
    "admin.report": ("report",),
    "admin.migrate": ("migrate",),
    "admin.uninstall": ("uninstall",),
    "admin.ui": ("ui",),
}
"""Modules, and the commands that each defines."""

COLLECTED_AFTER: Final = 100_000
"""New objects before a pass of the garbage collector: most commands end before, and drop nothing that it would find."""

_MODULES: Final = {command: module for module, commands in COMMANDS.items() for command in commands}


def application(words: Sequence[str] = ()) -> typer.Typer:
    """Return the program: all of it, or as much as the command line `words` needs."""
    app = typer.Typer(
        name="gpuquota",
        help="GPU quotas, borrowing and elastic training: on this machine, or on Kubernetes.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(choose_cluster)
    first = _first_word(words)
    groups, modules = list(GROUPS), list(COMMANDS)
    if "_GPUQUOTA_COMPLETE" not in os.environ and first in {*GROUPS, *_MODULES}:
        groups = [first] if first in GROUPS else []
        modules = [_MODULES[first]] if first in _MODULES else []
    for group in groups:
        name, attribute = GROUPS[group]
        app.add_typer(getattr(_imported(name), attribute), name=group)
    for name in modules:
        app.registered_commands += _imported(name).app.registered_commands
    _prepare(app)
    return app


def _imported(module: str) -> ModuleType:
    return importlib.import_module(f"kfp_gpuquota.cli.{module}")


def _first_word(words: Sequence[str]) -> str:
    """The command: the first word that is neither an option nor the value of --context."""
    remaining = iter(words)
    for word in remaining:
        if word == "--context":
            next(remaining, None)
        elif not word.startswith("-"):
            return word
        elif not word.startswith("--context="):
            return ""
    return ""


def _show_version(*, wanted: bool) -> None:
    if wanted:
        echo(f"gpuquota {__version__}")
        raise typer.Exit


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


def _prepare(commands: typer.Typer) -> None:
    """Report mistakes in the words of the command line, and print examples line by line.

    A backspace before the lines of an example prevents click from filling them like a paragraph.
    """
    for command in commands.registered_commands:
        assert command.callback is not None
        if not issubclass(command.cls or object, Command):
            command.cls = Command
        command.help = (
            inspect.cleandoc(command.callback.__doc__ or "").replace("\b\n", "").replace("\nExample", "\n\b\nExample")
        )
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        _prepare(group.typer_instance)


def main() -> None:
    """Run a command: errors are one sentence on stderr, and the exit code is 1 (it failed) or 2 (a mistake)."""
    gc.set_threshold(COLLECTED_AFTER)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal's encoding lacks as in JSON; a pipe's reader sees each line while the command runs.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        try:
            application(sys.argv[1:])()
        finally:
            sys.stdout.flush()
    except GpuQuotaError as error:
        echo(f"Error: {error.message}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        _end_of_output(error)


def _end_of_output(error: OSError) -> None:
    """Exit if the reader has closed (141, as for SIGPIPE in a shell), or if the output cannot be written (1)."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 (a number that stdout's flush at exit can use)
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        sys.exit(141)
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
        echo(f"Error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", err=True)
        sys.exit(1)
    echo(f"Error: the output cannot be written: {error.strerror}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
