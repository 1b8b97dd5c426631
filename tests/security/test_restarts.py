"""What is counted against a job, and what a restart of the machine does to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Phase
from kfp_gpuquota.cluster.local.start import await_stop
from kfp_gpuquota.cluster.local.workers.shim import start_time
from kfp_gpuquota.engine.lifecycle import INCIDENT_S, after_worker_exited
from kfp_gpuquota.engine.records import Intent
from tests.cluster.test_lifecycle import job, worker

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job
    from tests.conftest import EmbeddedCluster


def test_workers_that_are_lost_together_are_one_incident_and_later_ones_others() -> None:
    record = job(managed=True)
    for now in (100.0, 101.0, 100.0 + INCIDENT_S):
        record = after_worker_exited(record, worker(0, 137), [worker(0, 137), worker(1)], now)
    assert (record.status.restarts, record.intent) == (1, Intent.RUN)
    record = after_worker_exited(record, worker(0, 137), [worker(0, 137), worker(1)], 101.0 + INCIDENT_S)
    assert record.status.restarts == 2
    failed = after_worker_exited(record, worker(0, 137), [worker(0, 137), worker(1)], 200.0)
    assert failed.intent is Intent.FAIL


def test_restarts_of_long_ago_are_not_counted_any_more() -> None:
    record = job(managed=True)
    for now in (100.0, 200.0):
        record = after_worker_exited(record, worker(0, 137), [worker(0, 137), worker(1)], now)
    record = after_worker_exited(
        record, worker(0, 137), [worker(0, 137), worker(1)], 200.0 + record.spec.restart_window_s
    )
    assert (record.status.restarts, record.intent) == (1, Intent.RUN)


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_restart_of_the_machine_jobs_return_to_the_queue_and_no_other_process_is_taken_for_theirs(
    embedded_cluster: EmbeddedCluster, workers: int
) -> None:
    embedded_cluster.project("team-a", 2)
    embedded_cluster.submit("job", gpus=workers, gpus_per_worker=1)
    before = embedded_cluster.wait_for("job", lambda job: len(running(job)) == workers)
    embedded_cluster.client.stop_cluster()
    await_stop(embedded_cluster.home)
    with subprocess.Popen(["sleep", "infinity"]) as other, contextlib.ExitStack() as cleanup:
        cleanup.callback(other.kill)
        for each in before.status.workers:
            path = embedded_cluster.home.worker(before.uid, each.id) / "process.json"
            identity = json.loads(path.read_text())
            os.kill(identity["shim_pid"], signal.SIGKILL)
            reused = {"shim_pid": other.pid, "shim_start": start_time(other.pid), "boot_id": "an earlier one"}
            path.write_text(json.dumps({**identity, **reused}))
        again = embedded_cluster.wait_for("job", lambda job: job.status.phase is Phase.RUNNING and rerun(job, before))
        assert again.status.restarts == 0
        assert other.poll() is None


def rerun(found: Job, before: Job) -> bool:
    return bool(running(found)) and not running(found) & {worker.id for worker in before.status.workers}


def running(job: Job) -> set[str]:
    return {worker.id for worker in job.status.workers if worker.phase == "Running"}
