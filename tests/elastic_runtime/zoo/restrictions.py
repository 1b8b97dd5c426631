"""The part of docs/reference/restrictions.md that is made of the refusals' own messages.

Each row is a script that is refused and the message with which it ended, alone. So a message that changes, or a script
that is no longer refused, changes the page, and a test compares the two.

Usage: python -m tests.elastic_runtime.zoo.restrictions
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tests.elastic_runtime.zoo import driver, shards, silent
from tests.elastic_runtime.zoo.generated.lives import History, play
from tests.elastic_runtime.zoo.generated.parts import KINDS
from tests.elastic_runtime.zoo.generated.recipes import PREFIX, Recipe
from tests.elastic_runtime.zoo.parts import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main", "page", "section", "shards", "silent"]

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "restrictions.md"
BEGIN, END = "<!-- refusals: begin -->\n", "<!-- refusals: end -->\n"
_SHAPE = re.compile(r"shape \([^)]*\)")
_FIGURE = re.compile(r"\d+\.\d{4,}")
"""Of another machine's last digits."""


def refusals() -> Iterator[tuple[str, str, str]]:
    """Yield (the script in words, the kind of error, its message) of all that are refused alone."""
    with tempfile.TemporaryDirectory() as directory:
        for number, script in enumerate(each for each in SCRIPTS.values() if each.refused):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                message = driver.refusal(script, script.modes[0], Path(directory) / str(number))
            yield words(script.name), " or ".join(f'"{mode}"' for mode in script.modes), message
        for number, part in enumerate(part for parts in KINDS.values() for part in parts.values() if part.refused):
            recipe = Recipe.of([part.name])
            history = History.parse(part.refused_in)
            place = Path(directory) / f"part-{number}"
            errors = [each for each in play(f"{PREFIX}{recipe}", recipe.modes[0], history, place) if each.code]
            yield words(part.name), " or ".join(f'"{mode}"' for mode in recipe.modes), errors[0].message


def words(name: str) -> str:
    """Return a script's name as words."""
    return name.replace("_", " ")


def section() -> str:
    """Return the text between the marks of the page."""
    lines = ["| a script with | `reduction` | ends with |", "|---|---|---|"]
    for name, modes, message in sorted(refusals()):
        text = _FIGURE.sub("...", _SHAPE.sub("shape (...)", message)).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {name} | {modes} | {textwrap.shorten(text, 4000)} |")
    return "\n".join(lines) + "\n"


def page(text: str, content: str) -> str:
    """Return the page's text with this content between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{content}{END}{after}"


def main(_arguments: list[str] | None = None) -> None:
    """Print the section."""
    sys.stdout.write(section())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), section()))
    sys.stdout.write(f"{PAGE} is written\n")
