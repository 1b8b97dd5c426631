"""Files that the product makes are readable by their user only, whatever the umask is."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from kfp_gpuquota.server.cluster_api import follow_log
from tests.conftest import running_cluster
from tests.web.conftest import visitor_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def opened_to_others(folder: Path) -> Iterator[str]:
    """Yield what anybody but its user could read, with its mode."""
    for path in (folder, *folder.rglob("*")):
        facts = path.lstat()
        if not stat.S_ISLNK(facts.st_mode) and facts.st_mode & 0o077:
            yield f"{path.relative_to(folder)} {stat.filemode(facts.st_mode)}"


def test_every_file_of_a_cluster_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with running_cluster(tmp_path / "home", new_interpreter=True) as cluster:
            cluster.project("team-a", 1)
            secret = {"PASSWORD": "x"}
            umask = "import os; before = os.umask(0); print(f'umask {before:o}')"
            cluster.submit("job", command=("python3", "-c", umask), environment=secret)
            cluster.wait_for_phase("job", "Succeeded")
            visitor_of(cluster)
            assert sorted(opened_to_others(cluster.home.root)) == []
            assert b"umask 22" in b"".join(follow_log(cluster.client, "team-a", "job")), "a job has the usual one"
    finally:
        os.umask(before)
