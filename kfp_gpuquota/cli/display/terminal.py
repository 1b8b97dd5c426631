"""Text for a terminal: what others have written is shown, and commands nothing.

A job's name, command, reason or log may hold what a terminal obeys: move the cursor over other lines, set the title, or
write to the clipboard (OSC 52). Such characters are shown as escapes, `\\x1b]52;...`. Line ends and tabs stay, and so
do colors in a log; a log that does not go to a terminal is passed on byte for byte.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import stat
import sys
from typing import TYPE_CHECKING

import typer

from kfp_gpuquota.api.control_characters import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

_COLOR = re.compile("\x1b\\[[0-9;]{0,40}m")


def visible_log(text: str) -> str:
    """Return a log's text likewise; colors, and the carriage returns of progress bars, stay."""
    parts = _COLOR.split(text)
    colors = [*_COLOR.findall(text), ""]
    return "".join(
        "\r".join(visible(line) for line in part.split("\r")) + color for part, color in zip(parts, colors, strict=True)
    )


def echo(text: str, *, err: bool = False) -> None:
    """Print text, made visible, and a line's end."""
    typer.echo(visible(text), err=err)


def echo_data(text: str) -> None:
    """Print JSON or YAML: made visible on a terminal, else as it is."""
    typer.echo(visible(text) if sys.stdout.isatty() else text)


def make_output_private() -> None:
    """Let nobody else read the file to which the shell has redirected stdout, if it is one."""
    with contextlib.suppress(OSError, ValueError):  # another user's file, or no file at all
        descriptor = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)


def write_log(chunks: Iterable[bytes]) -> bool:
    """Write a log to stdout: made visible on a terminal, else byte for byte. Return whether there was anything."""
    written = False
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in chunks:
        if sys.stdout.isatty():
            sys.stdout.write(visible_log(decoder.decode(chunk)))
        else:
            sys.stdout.buffer.write(chunk)
        sys.stdout.flush()
        written = written or bool(chunk)
    return written
