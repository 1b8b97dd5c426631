"""How answers are shown: tables for people, JSON and YAML for programs, and `--watch`."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.table import Table


class Format(StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def show(content: object, output: Format, tabulate: Table | None = None) -> None:
    """Print `content` (structs) as JSON or YAML, or the table made of it."""
    match output:
        case Format.JSON:
            typer.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
        case Format.YAML:
            typer.echo(msgspec.yaml.encode(msgspec.to_builtins(content)).decode().rstrip())
        case _ if tabulate is not None:
            print_table(tabulate)


def print_table(made: Table) -> None:
    """To the terminal's width; where there is no terminal, as wide as the content."""
    from rich.console import Console  # noqa: PLC0415

    Console(width=None if sys.stdout.isatty() else 1000).print(made)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A plain table; numbers are aligned to the right."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    rows = [list(row) for row in rows]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=index == 0)
    for row in rows:
        made.add_row(*("" if cell is None else str(cell) for cell in row))
    return made


def watch_tables(tables: Iterator[Table]) -> None:
    """Redraw in place on a terminal, print one after the other elsewhere; until Ctrl-C."""
    if not sys.stdout.isatty():
        for made in tables:
            print_table(made)
        return
    from rich.live import Live  # noqa: PLC0415

    with Live(auto_refresh=False) as live:
        for made in tables:
            live.update(made, refresh=True)


def age(since: float | None, until: float | None = None) -> str:
    """A duration as kubectl shows it: 45s, 12m, 3h5m, 2d4h; '' when there is none."""
    if since is None:
        return ""
    seconds = int(max(0.0, (until or time.time()) - since))
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    if seconds < 172_800:
        return f"{seconds // 3600}h{seconds % 3600 // 60}m"
    return f"{seconds // 86_400}d{seconds % 86_400 // 3600}h"
