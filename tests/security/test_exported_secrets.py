"""What is exported of a cluster has no values of environment variables, unless they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api.redaction import REDACTED, is_redacted, redacted
from kfp_gpuquota.errors import InvalidFieldError
from tests.polling import TIMEOUT_S
from tests.security.other_user import NOBODY, as_root

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import EmbeddedCluster

SECRET = "hunter-2-hunter"
CLI = "from kfp_gpuquota.cli.entry import main; main()"


def test_an_exported_file_has_no_values_of_variables_and_is_its_users_alone(
    embedded_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train", environment={"PASSWORD": SECRET})
    for options, expected in (((), False), (("--with-secrets",), True)):
        path = tmp_path / f"export-{expected}.json"
        before = os.umask(0o022)
        try:
            with path.open("wb") as output:
                command = [sys.executable, "-c", CLI, "cluster", "export", *options]
                environment = {**os.environ, "GPUQUOTA_HOME": str(embedded_cluster.home.root)}
                subprocess.run(command, stdout=output, env=environment, check=True, timeout=TIMEOUT_S)
        finally:
            os.umask(before)
        text = path.read_text()
        assert (SECRET in text) is expected
        assert "PASSWORD" in text
        assert "train" in text
        assert path.stat().st_mode & 0o777 == 0o600


def test_values_of_variables_are_found_wherever_an_object_has_them() -> None:
    env = [{"name": "A", "value": SECRET}, {"name": "B", "valueFrom": {}}]
    item = {
        "spec": {
            "template": {"spec": {"containers": [{"env": env}]}},
            "runtime_env": {"env_vars": {"C": SECRET}},
        },
        "environment": {"D": SECRET},
    }
    found = redacted(item)
    assert SECRET not in str(found)
    assert all(name in str(found) for name in "ABCD")
    assert (is_redacted(found), is_redacted(item)) == (True, False)
    assert found["environment"] == {"D": REDACTED}


@pytest.mark.parametrize("directory", ["/proc/1/root/none", "/x\0y", "/" + "x" * 5000])
def test_a_working_directory_that_cannot_be_used_is_refused_with_the_reason(
    embedded_cluster: EmbeddedCluster, directory: str
) -> None:
    embedded_cluster.project("team-a", 1)
    with pytest.raises(InvalidFieldError, match="working_directory is"):
        embedded_cluster.submit("train", working_directory=directory)


@as_root
def test_a_working_directory_that_may_not_be_entered_is_the_users_mistake() -> None:
    check = "from kfp_gpuquota.cluster.local.workers.runtime import _check_directory as check"
    script = f"import os; {check}; os.setgid({NOBODY}); os.setuid({NOBODY}); check('/proc/1/root')"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert (
        "InvalidFieldError: working_directory is '/proc/1/root', but it cannot be used on this machine" in found.stderr
    )
