"""`gpuquota doctor` on the embedded cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.security.other_user import NOBODY, as_root

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


def test_a_cluster_that_runs_is_fine_and_one_that_does_not_is_named(cli: Cli) -> None:
    found = {one["check"]: one for one in json.loads(cli("doctor -o json"))}
    assert {one["level"] for one in found.values()} == {"ok"}
    assert found.keys() == {"directory", "daemon", "gpus", "state"}
    cli("cluster stop")
    shown = cli("doctor")
    assert "the cluster does not run" in shown
    assert "daemon: start it: gpuquota cluster start" in shown
    assert shown.rstrip().endswith("2 ok, 1 warn")


AS_NOBODY = f"""
import os
from pathlib import Path
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.operations import _directory
os.setgid({NOBODY}); os.setuid({NOBODY})
print(*_directory(Home(Path("/usr/no-such-directory"))))
"""


@as_root
def test_a_directory_that_cannot_be_written_is_named_as_that_and_not_as_full() -> None:
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, check=True)
    assert "/usr cannot be written to" in done.stdout
    assert "fail" in done.stdout
    assert "GiB" not in done.stdout


def test_a_damaged_state_file_fails_with_the_command_that_repairs_it(cli: Cli) -> None:
    cli("cluster stop")
    database = cli.cluster.home.database
    good = database.read_bytes()
    database.write_bytes(b"x" * 4096)
    answer = cli.run("doctor")
    database.write_bytes(good)
    assert answer.code == 1
    assert "gpuquota cluster repair" in answer.out
