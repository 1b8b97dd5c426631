"""A training that shares its GPU leaves to others what it does not need, and asks before it grows."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from elastic_runtime.plan.batch_sizes import MicroBatchLimit
from elastic_runtime.process import device_memory
from elastic_runtime.process.device_memory import LOOK_EVERY_STEPS, MemoryFollower
from tests.elastic_runtime.test_loops import DATA, small

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


@dataclass
class Allocator:
    """A device's memory as a caching allocator has it: it grows to what iterations need, and fails above the limit."""

    limit_mib: int = 0
    peak_mib: int | None = 0
    limits: list[int] = field(default_factory=list)

    @property
    def used_mib(self) -> int:
        return self.peak_mib or 0

    def limit_to(self, mib: int) -> float:
        part = mib / max(self.used_mib, 1)
        self.limit_mib, self.peak_mib = mib, 0
        self.limits.append(mib)
        return part

    def take(self, mib: int) -> None:
        if mib > self.limit_mib:
            raise torch.OutOfMemoryError(f"{mib} MiB do not fit into {self.limit_mib}")
        self.peak_mib = max(self.used_mib, mib)


def set_limit(directory: Path, mib: int) -> None:
    (directory / "new").write_text(json.dumps({"limit_mib": mib}))
    (directory / "new").rename(directory / "limit.json")


def output(directory: Path) -> dict[str, int | None]:
    found: dict[str, int | None] = json.loads((directory / "usage.json").read_text())
    return found


def steps(follower: MemoryFollower, device: Allocator, mib: int, count: int = LOOK_EVERY_STEPS) -> None:
    for _ in range(count):
        device.take(mib)
        follower.follow()


def test_what_steps_do_not_need_is_left_to_others_once_they_have_shown_it(tmp_path: Path) -> None:
    set_limit(tmp_path, 1000)
    device = Allocator()
    follower = MemoryFollower(str(tmp_path), MicroBatchLimit(8), device)
    follower.follow()
    steps(follower, device, 400, LOOK_EVERY_STEPS - 1)
    assert output(tmp_path) == {"follows_mib": 1000, "wanted_mib": None}, "too early for a measurement"
    steps(follower, device, 400, 1)
    assert output(tmp_path) == {"follows_mib": 1000, "wanted_mib": 450}
    set_limit(tmp_path, 450)
    steps(follower, device, 400, 3 * LOOK_EVERY_STEPS)
    assert output(tmp_path) == {"follows_mib": 450, "wanted_mib": 450}, "it stays so"


def test_one_that_needs_nearly_all_wants_all(tmp_path: Path) -> None:
    set_limit(tmp_path, 1000)
    device = Allocator()
    follower = MemoryFollower(str(tmp_path), MicroBatchLimit(8), device)
    follower.follow()
    steps(follower, device, 850, 2 * LOOK_EVERY_STEPS)
    assert output(tmp_path)["wanted_mib"] is None


def test_it_wants_more_before_it_is_at_the_end_of_what_it_has(tmp_path: Path) -> None:
    set_limit(tmp_path, 1000)
    device = Allocator()
    follower = MemoryFollower(str(tmp_path), MicroBatchLimit(8), device)
    follower.follow()
    steps(follower, device, 400)
    set_limit(tmp_path, 450)
    steps(follower, device, 444, 2 * LOOK_EVERY_STEPS)
    assert output(tmp_path) == {"follows_mib": 450, "wanted_mib": 499}


def test_while_it_is_made_smaller_by_others_it_wants_all_that_it_may(tmp_path: Path) -> None:
    set_limit(tmp_path, 1000)
    device, limit = Allocator(), MicroBatchLimit(8)
    follower = MemoryFollower(str(tmp_path), limit, device)
    follower.follow()
    steps(follower, device, 400)
    limit.note(8)
    set_limit(tmp_path, 200)
    follower.follow()
    steps(follower, device, 150, 2 * LOOK_EVERY_STEPS)
    assert not limit.whole
    assert output(tmp_path) == {"follows_mib": 200, "wanted_mib": None}


def test_an_iteration_that_does_not_fit_into_what_it_left_itself_is_repeated_whole_when_the_rest_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Allocator()
    monkeypatch.setenv("ELASTIC_MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(device_memory, "device_of", lambda _variables: device)
    set_limit(tmp_path, 1000)
    ended = threading.Event()

    def agent() -> None:
        """Grant the demand, or the whole limit if there is none."""
        while not ended.wait(0.01):
            wanted = output(tmp_path)["wanted_mib"] if (tmp_path / "usage.json").exists() else None
            set_limit(tmp_path, 1000 if wanted is None else wanted)

    thread = threading.Thread(target=agent)
    thread.start()
    try:
        job, model = small(global_batch_size=10, max_batch_per_gpu=10)
        job.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(DATA, batch_size=10),
        )
        sizes: dict[int, list[int]] = {}
        large = -1
        for x, _y, _i in job.steps(3 * LOOK_EVERY_STEPS):
            sizes.setdefault(job.step, []).append(len(x))
            if device.limit_mib == 450 and large < 0:
                large = job.step
            with job.retrying():
                device.take(900 if job.step == large else 400)
                job.backward(model(x).mean())
                model.zero_grad()
    finally:
        ended.set()
        thread.join()
    assert 450 in device.limits, "it left what it did not need"
    assert sizes[large] == [10, 10], "once in vain, and again: not in halves"
    assert device.limits[device.limits.index(450) + 1 :] == [1000], (
        "it has misjudged itself, and leaves nothing any more"
    )
    assert {sizes[step][0] for step in sizes} == {10}
