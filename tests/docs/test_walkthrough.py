"""The documentation's walk-through, typed as it stands; and links between pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    text = (ROOT / "docs/tutorials/walkthrough.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.slow
def test_every_command_of_the_walk_through_succeeds(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "GPUQUOTA_HOME": str(home.root), "PATH": path}
    typed = commands()
    assert len(typed) > 50
    try:
        for command in typed:
            words = shlex.split(command)
            done = subprocess.run(
                words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False
            )
            assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    finally:
        _clean_up(home)
    log = home.log_file.read_text()
    assert "Traceback" not in log, log


def _clean_up(home: Home) -> None:
    client = connect({"GPUQUOTA_HOME": str(home.root)})
    for job in client.list_jobs().jobs:
        client.delete_job(job.spec.project, job.spec.name)
    while client.list_jobs().jobs:
        client.list_jobs(after=client.list_jobs().revision, timeout_s=1.0)
    client.stop_cluster()
    await_stop(home)


def test_every_page_that_is_linked_exists() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
