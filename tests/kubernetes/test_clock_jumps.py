"""The clock of the controller's machine jumps, on a real API server: neither reclaims nor running jobs mind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kubernetes.controlled import LEASE
from tools.observer.watching import Watching

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.controlled import Controlled

DAY_S = 86_400
JUMPS_S = (DAY_S, -DAY_S, 0, 365 * DAY_S)
CLOCK = """
import pathlib, time
_offset, _time = pathlib.Path(__file__).with_name("offset"), time.time
time.time = lambda: _time() + float(_offset.read_text())
"""
"""A sitecustomize.py: the interpreter imports it before the controller."""


def set_clock(folder: Path, offset_s: float) -> None:
    """Set the controller's clock, from one reading of it to the next."""
    (folder / "next").write_text(str(offset_s))
    (folder / "next").replace(folder / "offset")


@pytest.mark.slow
def test_a_clock_that_jumps_delays_no_reclaim_and_ends_nothing(electing: Controlled, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    set_clock(tmp_path, 0)
    electing.add_nodes(1, gpus=4)
    owner, borrower = (electing.team(prefix, guaranteed=2) for prefix in ("owner", "borrower"))
    process = electing.start(source=tmp_path)
    training = electing.job(borrower, "training", gpus=2, gpusPerWorker=1, preemptible=False)
    electing.until_phase(training, "Running")
    workers = {name: pod["metadata"]["uid"] for name, pod in electing.pods(borrower).items()}
    with Watching(electing.cluster.kubeconfig) as watching:
        for number, jump_s in enumerate(JUMPS_S):
            electing.until_bound(electing.pod(borrower, f"borrows-{number}"))
            electing.until_bound(electing.pod(borrower, f"borrows-too-{number}"))
            set_clock(tmp_path, jump_s)
            renewed = electing.cluster.api.get(LEASE)["spec"]["renewTime"]
            for name in ("a", "b"):
                electing.until_bound(electing.pod(owner, f"{name}-{number}"))
            electing.until(LEASE, lambda lease, renewed=renewed: lease["spec"]["renewTime"] != renewed)  # type: ignore[misc]
            electing.wait(lambda: electing.bound(borrower) == set(workers), electing.log)
            for name in ("a", "b"):
                electing.cluster.api.delete(f"/api/v1/namespaces/{owner}/pods/{name}-{number}")
        found = watching.violations()
    assert not found, "\n".join(map(str, found))
    assert {name: pod["metadata"]["uid"] for name, pod in electing.pods(borrower).items()} == workers
    status = electing.cluster.api.get(training)["status"]
    assert (status["phase"], status["restarts"], status["attempt"]) == ("Running", 0, 1)
    assert electing.cluster.api.get(LEASE)["spec"]["leaseTransitions"] == 0
    assert process.poll() is None
    assert "Traceback" not in electing.log()
