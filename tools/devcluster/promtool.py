"""Promtool: the machine's (Debian's package prometheus has one), else built once into the cache folder, in minutes.

promtool/go.mod names the version that is built, without service discoveries: rules do not need these, and they are most
of Prometheus' dependencies.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tools.devcluster import go_program

if TYPE_CHECKING:
    from collections.abc import Mapping


def provide(environment: Mapping[str, str] = os.environ) -> Path:
    """The program. Raises UnavailableError where it is neither there nor can be built."""
    if found := shutil.which("promtool", path=environment.get("PATH")):
        return Path(found)
    return go_program.provide("promtool", "", "-tags", "remove_all_sd", environment=environment)
