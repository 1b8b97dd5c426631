"""What a terminal obeys is shown as text: in tables, messages and, on a terminal, in logs."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api.control_characters import visible
from kfp_gpuquota.cli.display.output import Format, rendered, table
from kfp_gpuquota.cli.display.terminal import visible_log
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e4\u6f22 text\tand\nlines", "plain \u00e4\u6f22 text\tand\nlines"),
        (CLIPBOARD, "\\x1b]52;c;cm0gLXJmIH4=\\x07"),
        ("\x1b[2J\x9b2J", "\\x1b[2J\\x9b2J"),
        ("one\rtwo\x08\x7f", "one\\x0dtwo\\x08\\x7f"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
    ],
)
def test_what_a_terminal_obeys_is_shown_as_text(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_log_keeps_its_colors_and_its_progress_bars_and_nothing_else() -> None:
    text = f"\x1b[31mred\x1b[0m 1%\r2% {CLIPBOARD} \x1b[2J"
    assert visible_log(text) == "\x1b[31mred\x1b[0m 1%\r2% \\x1b]52;c;cm0gLXJmIH4=\\x07 \\x1b[2J"


def test_a_cell_of_a_table_is_one_line_of_text() -> None:
    shown = table(("NAME", "WHY"), [("a", f"x\ny{CLIPBOARD}")])
    assert shown.splitlines()[1] == "a      x\\x0ay\\x1b]52;c;cm0gLXJmIH4=\\x07"


@pytest.mark.parametrize("output", [Format.JSON, Format.YAML])
def test_json_and_yaml_hold_no_control_characters(output: Format) -> None:
    shown = rendered({"why": f"{CLIPBOARD}\x9b2J"}, output, "")
    assert not any(ord(character) < 32 and character != "\n" for character in shown)
    assert "\x9b" not in shown


def on_a_terminal(environment: dict[str, str], *arguments: str) -> str:
    """What a command writes to a terminal."""
    here, there = pty.openpty()
    code = "from kfp_gpuquota.cli.main import main; main()"
    command = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, stdout=there, stderr=there)
    os.close(there)
    shown = b""
    try:
        while data := os.read(here, 4096):
            shown += data
    except OSError:
        pass  # the other end is closed
    os.close(here)
    command.wait(TIMEOUT_S)
    return shown.decode()


def test_a_jobs_command_reason_and_log_do_not_reach_the_terminal_as_commands(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("job", "sh", "-c", f"printf '%s' '{CLIPBOARD}'; exit 3")
    embedded_cluster.wait_for_phase("job", "Failed")
    for arguments in (("describe", "job"), ("list", "--ended"), ("logs", "job"), ("explain", "job")):
        shown = on_a_terminal(embedded_cluster.environment, *arguments, "-p", "team-a")
        assert "\x1b]" not in shown, arguments
        assert "\x07" not in shown, arguments
    assert "\\x1b]52" in on_a_terminal(embedded_cluster.environment, "logs", "job", "-p", "team-a")
    assert "\\x1b]52" in on_a_terminal(embedded_cluster.environment, "describe", "job", "-p", "team-a")
