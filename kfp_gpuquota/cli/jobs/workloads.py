"""`gpuquota training ...` and `workspace ...`: the groups of Run:ai's command line, version 2.

Each has the commands on jobs under the same names; `workspace submit` is `submit --interactive`, and the lists are of
the one type.
"""

from __future__ import annotations

from typing import Any

import typer

from kfp_gpuquota.cli.arguments.option_errors import Command
from kfp_gpuquota.cli.jobs import access, lifecycle, listing, logs, show, update
from kfp_gpuquota.cli.jobs.submit import SubmitCommand, submit


class _SubmitWorkspace(SubmitCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--interactive", *args])


class _ListTrainings(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--type=train", *args])


class _ListWorkspaces(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--type=build", *args])


def _group(help_text: str, submit_class: type[Command], list_class: type[Command]) -> typer.Typer:
    app = typer.Typer(help=help_text, no_args_is_help=True)
    app.command("submit", short_help="Submit a job.", cls=submit_class)(submit)
    app.command("list", short_help="List jobs.", cls=list_class)(listing.list_things)
    for module in (show, logs, lifecycle, access, update):
        app.registered_commands += module.app.registered_commands
    return app


training = _group("Trainings, in Run:ai's words: the same as submit, list, ...", SubmitCommand, _ListTrainings)
workspace = _group(
    "Interactive sessions, in Run:ai's words: the same as submit --interactive, ...", _SubmitWorkspace, _ListWorkspaces
)
