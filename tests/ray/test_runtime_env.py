"""Jobs with Ray's `runtime_env`, on the nodes of a real Ray cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.ray.conftest import log_of

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.api import Job
    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

PRINTS = "import os, helper; print(os.getcwd(), open('data').read(), helper.NAME, os.environ['COLOR'])"


def ended(cluster: EmbeddedCluster, name: str) -> Job:
    return cluster.wait_for(name, lambda job: job.status.phase.final)


def test_a_worker_runs_where_ray_has_set_up_its_files_modules_and_variables_and_the_next_job_has_none_of_it(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").write_text("uploaded")
    (tmp_path / "helper").mkdir()
    (tmp_path / "helper" / "__init__.py").write_text("NAME = 'module'")
    runtime_env = {
        "working_dir": str(tmp_path / "work"),
        "py_modules": [str(tmp_path / "helper")],
        "env_vars": {"COLOR": "blue"},
    }
    cluster.submit("set-up", sys.executable, "-c", PRINTS, runtime_env=runtime_env)
    assert ended(cluster, "set-up").status.exit_code == 0, log_of(cluster, "set-up")
    directory, *printed = log_of(cluster, "set-up").split()
    assert printed == ["uploaded", "module", "blue"]
    assert directory != str(tmp_path / "work")
    (tmp_path / "work" / "data").write_text("edited")
    cluster.submit("again", sys.executable, "-c", PRINTS, runtime_env=runtime_env)
    assert ended(cluster, "again").status.exit_code == 0, log_of(cluster, "again")
    assert log_of(cluster, "again").split()[1] == "edited"
    cluster.submit("plain", "sh", "-c", "echo ${COLOR:-none}; ls data", working_directory=str(tmp_path))
    assert ended(cluster, "plain").status.exit_code != 0
    assert log_of(cluster, "plain").startswith("none\n")


@pytest.mark.parametrize(
    ("runtime_env", "why"),
    [
        ({"working_dir": "/no/such/directory"}, "/no/such/directory"),
        ({"pip": 5}, "pip"),
        ({"image_uri": "example.invalid/training:1"}, "podman"),
    ],
    ids=["working_dir", "pip", "image_uri"],
)
def test_a_job_whose_environment_cannot_be_set_up_fails_and_says_what_ray_says(
    cluster: EmbeddedCluster, runtime_env: dict[str, Any], why: str
) -> None:
    cluster.submit("fails", "true", runtime_env=runtime_env)
    status = ended(cluster, "fails").status
    assert (status.phase, status.exit_code) == ("Failed", 126), status
    assert status.reason is not None
    assert status.reason.message.startswith("Ray could not set up its runtime environment: ")
    assert why in status.reason.message
