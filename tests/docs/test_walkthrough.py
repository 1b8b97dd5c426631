"""The tutorials, typed as they stand; and links between pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop
from tests.polling import TIMEOUT_S

ROOT = Path(__file__).parents[2]


PAGES = ("walkthrough", "elastic_script", "first_pipeline")


def files_of(page: str) -> dict[str, str]:
    """Return the contents of the files that a reader saves, by name."""
    return dict(re.findall(r"[Ss]ave this as `([\w.]+)`.*?```python\n(.*?)```", page, re.DOTALL))


def commands_of(page: str) -> list[str]:
    """Return the commands that a reader types."""
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_tutorial_succeeds(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
    home, typed, files = Home(tmp_path / "home"), commands_of(page), files_of(page)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "GPUQUOTA_HOME": str(home.root), "PATH": path}
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    assert len(typed) >= 3
    try:
        for command in typed:
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=tmp_path if files else ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
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
