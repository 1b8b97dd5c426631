"""A shim that holds its worker to a lease."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.workers import shims

if TYPE_CHECKING:
    from pathlib import Path


async def run(directory: Path, lease_s: float) -> int:
    """Return the exit code of a long-running worker under a lease of this many seconds that is not renewed."""
    directory.mkdir()
    (directory / "lease").write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME) + lease_s))
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    watched = shims.Shims(lambda _: None, lambda _, code: ended.set_result(code), lambda *_: None)
    command = shims.WorkerCommand(
        command=("sleep", "1000"), environment={}, working_directory="/", grace_period_s=60.0, lease_s=lease_s
    )
    watched.start("worker", directory, command)
    async with asyncio.timeout(60):
        return await ended


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
