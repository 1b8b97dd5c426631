"""A shim that holds its worker to a lease."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.workers import shims
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path


class Ended:
    """Waits for the end of one worker; it is `ShimEvents`."""

    def __init__(self) -> None:
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def worker_started(self, worker: str) -> None:
        """Its end counts."""

    def worker_ended(self, worker: str, code: int) -> None:
        self.code.set_result(code)

    def worker_not_started(self, worker: str, why: str) -> None:
        self.code.set_exception(RuntimeError(f"{worker}: {why}"))


async def run(directory: Path, lease_s: float) -> int:
    """Return the exit code of a long-running worker under a lease of this many seconds that is not renewed."""
    directory.mkdir()
    (directory / "lease").write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME) + lease_s))
    ended = Ended()
    watched = shims.Shims(ended)
    command = shims.WorkerCommand(
        command=("sleep", "1000"), environment={}, working_directory="/", grace_period_s=60.0, lease_s=lease_s
    )
    watched.start("worker", directory, command)
    async with asyncio.timeout(TIMEOUT_S):
        return await ended.code


def test_a_worker_is_killed_when_its_lease_ends(tmp_path: Path) -> None:
    assert asyncio.run(run(tmp_path / "worker", 1.0)) == 137
    assert shims.lease_ended(tmp_path / "worker")


def test_a_worker_without_a_lease_in_its_directory_does_not_run_on(tmp_path: Path) -> None:
    async def without() -> int:
        running = asyncio.create_task(run(tmp_path / "worker", 60.0))
        await asyncio.sleep(0)
        (tmp_path / "worker" / "lease").unlink()
        return await running

    assert asyncio.run(without()) == 137
