"""The plot of GPU memory over time: which line belongs to which workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.api.wire import NodeView, ShareView
from kfp_gpuquota.cli.display.memory_plot import Look, by_device, draw

if TYPE_CHECKING:
    from pathlib import Path


def look(at: float, *used: tuple[str, str, int, int]) -> Look:
    """(job, worker, device, MiB) of each that shares a GPU of one node."""
    shares = tuple(
        ShareView(
            worker=worker,
            job=job,
            project="team-a",
            device=device,
            total_mib=16_000,
            used_mib=mib,
            request_mib=4_000,
            limit_mib=8_000,
            granted_mib=8_000,
        )
        for job, worker, device, mib in used
    )
    node = Node(name="node-0", devices=(Device(index=0, memory_mib=16_000), Device(index=1, memory_mib=16_000)))
    return Look(at, (NodeView(node=node, held={}, shares=shares),))


def test_each_job_is_one_line_on_each_device_that_it_shares() -> None:
    looks = [look(0, ("a", "a-0", 0, 100)), look(1, ("a", "a-0", 0, 200), ("b", "b-0", 0, 1), ("a", "a-0", 1, 5))]
    found = by_device(looks)
    assert {device: set(lines) for device, lines in found.items()} == {
        ("node-0", 0): {"team-a/a", "team-a/b"},
        ("node-0", 1): {"team-a/a"},
    }
    assert [(at, share.used_mib) for at, share in found["node-0", 0]["team-a/a"]] == [(0, 100), (1, 200)]


def test_two_workers_of_one_job_on_one_device_are_two_lines() -> None:
    (lines,) = by_device([look(0, ("a", "a-0", 0, 1), ("a", "a-1", 0, 2))]).values()
    assert set(lines) == {"team-a/a (a-0)", "team-a/a (a-1)"}


def test_a_picture_is_drawn_also_of_nothing(tmp_path: Path) -> None:
    assert draw([look(0), look(1)], tmp_path / "nothing.png") == 0
    assert draw([look(0, ("a", "a-0", 0, 1)), look(1, ("a", "a-0", 1, 1))], tmp_path / "two.png") == 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
