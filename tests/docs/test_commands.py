"""Each command in the examples of the documentation and of help texts is one that the program accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.main import get_command

from kfp_gpuquota.cli.main import application

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"    +(?:\$ )?(?:sudo )?(?:[A-Z_]+=\S+ )*gpuquota (?![a-z]+:)([^#|>&]*)")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\b[A-Z]\b|\.\.\.")
ACTS = "completion"
"""Options of the program itself that act while they are parsed."""


def examples() -> Iterator[tuple[str, list[str]]]:
    sources = sorted((ROOT / "kfp_gpuquota" / "cli").rglob("*.py"))  # the help texts
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sources):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            found = EXAMPLE.match(line)
            if found and not PLACEHOLDER.search(found[1]) and ACTS not in found[1] and "\\" not in found[1]:
                yield f"{file.relative_to(ROOT)}:{number}", shlex.split(found[1])


def parse(command: Any, words: list[str]) -> None:
    """Parse the words as the command and those below it do, without running any. Raises what they raise."""
    context = command.make_context(command.name, list(words))
    while hasattr(command, "resolve_command"):
        words = [*context._protected_args, *context.args]
        name, below, rest = command.resolve_command(context, words)
        context, command = below.make_context(name, rest, parent=context), below


def test_each_example_is_a_command_that_is_accepted() -> None:
    program, refused, number = get_command(application([])), [], 0
    for place, words in examples():
        number += 1
        try:
            parse(program, words)
        except Exception as error:  # noqa: BLE001 - every one is a finding
            refused.append(f"{place}: {shlex.join(words)}: {getattr(error, 'message', error)}")
    assert number > 200
    assert refused == []
