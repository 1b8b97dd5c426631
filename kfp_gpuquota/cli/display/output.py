"""The output of commands: tables for people, JSON and YAML for programs, and `--watch`."""

from __future__ import annotations

import csv
import io
import re
import shutil
import sys
import textwrap
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Job
from kfp_gpuquota.api.control_characters import visible
from kfp_gpuquota.api.wire import NodeView, ProjectView
from kfp_gpuquota.cli.display.jsonpath import JsonPath
from kfp_gpuquota.cli.display.terminal import echo, echo_data
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


LAST_COLUMN: Final = 20
"""Characters of the last column, a sentence, that must fit beside the others; else it stands below its row."""


class Format(StrEnum):
    """The values of `-o`; beside them `jsonpath=TEMPLATE`, a JsonPath."""

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


def parse_format(text: str) -> str:
    """Return the Format or the JsonPath that `-o` asks for. Raises UsageError."""
    if text in set(Format):
        return Format(text)
    kind, equals, template = text.partition("=")
    if kind == "jsonpath" and equals:
        return JsonPath(template)
    raise UsageError(f"--output is {text!r}, but it must be one of {', '.join(Format)}, jsonpath=TEMPLATE")


def is_tabular(output: str) -> bool:
    """Return whether `-o` asks for a table, not for data or names."""
    return output in {Format.TABLE, Format.WIDE}


def show(content: object, output: str, tabulated: str = "") -> None:
    """Print `content` (structs) as the Format or JsonPath `output`, or the table made of it."""
    if text := rendered(content, output, tabulated):
        (echo if is_tabular(output) or output is Format.NAME else echo_data)(text)


def rendered(content: object, output: str, tabulated: str) -> str:
    """Return `content` (structs) as JSON, YAML, names or what a JsonPath selects, or the table made of it."""
    if isinstance(output, JsonPath):
        return output.of(msgspec.to_builtins(content, str_keys=True)).rstrip("\n")
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


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the rows as CSV, with a line of the columns' names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None, headers: bool = True
) -> str:
    """Aligned columns as kubectl prints them, numbers to the right; longer lines are cut to `width`, where given.

    If that leaves the last column fewer than LAST_COLUMN characters, its text stands below its row, on as many lines as
    it needs.

    Not rich's table: a thousand jobs take it half a second, and a script cannot cut its frames.
    """
    rows = [list(row) for row in rows]
    shown = [["" if cell is None else visible(str(cell)).replace("\n", "\\x0a") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    right = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(columns))]
    lines = [list(columns), *shown] if headers else shown
    if width is not None and sum(widths[:-1]) + 3 * len(widths[:-1]) + min(LAST_COLUMN, widths[-1]) > width:
        return "\n".join(part for line in lines for part in _with_last_below(line, widths, right, width))
    return "\n".join(_cut(_line(line, widths, right), width) for line in lines)


def _with_last_below(cells: list[str], widths: list[int], right: list[bool], width: int) -> Iterator[str]:
    yield _cut(_line(cells[:-1], widths[:-1], right[:-1]), width)
    yield from textwrap.wrap(cells[-1], width, initial_indent="  ", subsequent_indent="  ")


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


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
    return duration((until or time.time()) - since)


def duration(seconds: float) -> str:
    """Return a number of seconds as kubectl shows it: 45s, 12m, 3h5m, 2d4h."""
    seconds = int(max(0.0, seconds))
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    if seconds < 172_800:
        return f"{seconds // 3600}h{seconds % 3600 // 60}m"
    return f"{seconds // 86_400}d{seconds % 86_400 // 3600}h"


def timestamp(at: float) -> str:
    """Return a time in UTC as Kubernetes writes it: 2026-01-31T12:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
