"""Simulated device memory that several processes hold."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import pytest

from elastic_runtime.process.simulated_memory import (
    SimulatedDevice,
    SimulatedOutOfMemoryError,
    create_device,
    entries,
)
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event
    from pathlib import Path


def hold(path: Path, mib: int, holds: Event) -> None:
    SimulatedDevice(path).allocate(mib)
    holds.set()
    signal.pause()


def test_what_a_killed_process_held_is_free_and_its_entry_is_removed(tmp_path: Path) -> None:
    device = create_device(tmp_path / "gpu", 1000)
    fork = multiprocessing.get_context("fork")
    holds = fork.Event()
    other = fork.Process(target=hold, args=(tmp_path / "gpu", 700, holds))
    other.start()
    assert holds.wait(TIMEOUT_S)
    device.allocate(200)
    assert dict(entries(device.directory)) == {other.pid: 700, os.getpid(): 200}
    with pytest.raises(SimulatedOutOfMemoryError, match="cannot allocate 101 MiB: 100 of 1000 MiB are free on gpu"):
        device.allocate(101)
    other.kill()
    other.join()
    assert device.free_mib == 800
    assert dict(entries(device.directory)) == {os.getpid(): 200}
    assert [path.name.partition("-")[0] for path in (device.directory / "processes").iterdir()] == [str(os.getpid())]


def test_what_is_no_process_or_was_never_written_counts_for_nothing(tmp_path: Path) -> None:
    device = create_device(tmp_path / "gpu", 1000)
    (device.directory / "processes" / "notes.txt").touch()
    assert (device.used_mib, device.free_mib) == (0, 1000)
    device.allocate(300)
    device.release(500)
    assert (device.used_mib, device.free_mib) == (0, 1000)
    assert create_device(tmp_path / "gpu", 1000).total_mib == 1000
