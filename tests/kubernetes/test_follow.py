"""`gpuquota submit --follow` on a real node: a job's log and exit status as those of a command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests import forked, programs
from tests.kubernetes.conftest import address_of
from tests.kubernetes.controlled import Controlled
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

    from tools.devcluster import DevCluster


pytestmark = pytest.mark.slow  # on a real node


def test_a_jobs_log_and_exit_status_are_the_commands(kubelet_system: DevCluster, tmp_path: Path) -> None:
    controlled = Controlled(kubelet_system, tmp_path, address=address_of(kubelet_system))
    try:
        team = controlled.team(guaranteed=1)
        controlled.start()
        done = forked.run(
            *(programs.gpuquota, "submit", "x", "-f", "-p", team),
            *("-i", "localhost/base:1", "--", "sh", "-c", "echo one; exit 3"),
            environment={**os.environ, "KUBECONFIG": str(kubelet_system.kubeconfig), "GPUQUOTA_CONTEXT": "."},
            timeout=2 * TIMEOUT_S,
        )
        assert (done.returncode, done.stdout) == (3, "one\n"), done.stderr
        assert done.stderr.splitlines()[-1].endswith("worker 0 ended with exit code 3: one"), done.stderr
    finally:
        controlled.close()
