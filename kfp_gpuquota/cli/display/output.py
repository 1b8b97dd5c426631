"""The output of commands: tables for people, JSON and YAML for programs, and `--watch`."""

from __future__ import annotations

import re
import shutil
import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Job
from kfp_gpuquota.api.control_characters import visible
from kfp_gpuquota.api.wire import NodeView, ProjectView
from kfp_gpuquota.cli.display.terminal import echo, echo_data
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Format(StrEnum):
    """The values of `-o`."""

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


def show(content: object, output: Format, tabulated: str = "") -> None:
    """Print `content` (structs) as JSON or YAML, or the table made of it."""
    if text := rendered(content, output, tabulated):
        (echo_data if output in {Format.JSON, Format.YAML} else echo)(text)


def rendered(content: object, output: Format, tabulated: str) -> str:
    """Return `content` (structs) as JSON, YAML or names, or the table made of it."""
    if output is Format.NAME:
        return "\n".join(_names(content))
    if output is Format.JSON:
        return in_json(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    if output is Format.YAML:
        return msgspec.yaml.encode(msgspec.to_builtins(content)).decode().rstrip()
    return tabulated


def _names(content: object) -> Iterator[str]:
    """ "job/train1" for each job, project or node, as kubectl prints names. UsageError for what has none."""
    for each in content if isinstance(content, list | tuple) else (content,):
        if isinstance(each, Job):
            yield f"job/{each.spec.name}"
        elif isinstance(each, ProjectView):
            yield f"project/{each.project.name}"
        elif isinstance(each, NodeView):
            yield f"node/{each.node.name}"
        else:
            raise UsageError("-o name is for jobs, projects and nodes; choose one of table, wide, json, yaml here")


def in_json(text: str) -> str:
    """JSON escapes ASCII's control characters by itself; others may be written as escapes as well."""
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None, headers: bool = True
) -> str:
    """Aligned columns as kubectl prints them, numbers to the right; longer lines are cut to `width`, where given.

    Not rich's table: a thousand jobs take it half a second, and a script cannot cut its frames.
    """
    rows = [list(row) for row in rows]
    shown = [["" if cell is None else visible(str(cell)).replace("\n", "\\x0a") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    right = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(columns))]
    lines = (_line(line, widths, right) for line in ((list(columns), *shown) if headers else shown))
    return "\n".join(line if width is None or len(line) <= width else line[: width - 1] + "…" for line in lines)


def _line(cells: list[str], widths: list[int], right: list[bool]) -> str:
    aligned = (
        cell.rjust(width) if to_the_right else cell.ljust(width)
        for cell, width, to_the_right in zip(cells, widths, right, strict=True)
    )
    return "   ".join(aligned).rstrip()


def watch(pictures: Iterator[str]) -> None:
    """Redraw in place on a terminal, print one after the other elsewhere; until Ctrl-C."""
    if not sys.stdout.isatty():
        for picture in pictures:
            echo(picture)
        return
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    with Live(auto_refresh=False) as live:
        for picture in pictures:
            live.update(Text(visible(picture), no_wrap=True, overflow="ellipsis"), refresh=True)


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
