"""`gpuquota submit --rehearse`: an elastic training script is tried on this machine before its job is submitted."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import typer

from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def rehearse_here(command: Sequence[str], environment: Mapping[str, str], directory: str | None) -> None:
    """Run the command here with ELASTIC_REHEARSE=1, and return where it exits with 0.

    Exits with the command's code otherwise. UsageError for a command that cannot be started.
    """
    if not command:
        raise UsageError("--rehearse needs the command, after --: gpuquota submit NAME --rehearse -- python train.py")
    echo(f"rehearsing: {' '.join(command)}", err=True)
    variables = {**os.environ, **environment, "ELASTIC_REHEARSE": "1"}
    try:
        code = subprocess.run(command, env=variables, cwd=directory, check=False).returncode
    except OSError as error:
        raise UsageError(f"--rehearse: {command[0]!r} cannot be started here: {error.strerror}") from error
    if code != 0:
        echo(f"the rehearsal ended with exit code {code}; nothing was submitted", err=True)
        raise typer.Exit(code if code > 0 else 1)
