"""Ray's nodes as the plan's, and when nothing of a node that left runs any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.local.driver import Settings
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.ray.config import RayConfig
from kfp_gpuquota.cluster.ray.messages import NODE_ID, RayNode
from kfp_gpuquota.cluster.ray.nodes import MARGIN_S, Fence, Steady, as_node, node_name, taken_slots, used_elsewhere
from kfp_gpuquota.cluster.ray.runtime import RayRuntime
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from pathlib import Path

SILENCE_S = 10.0


def seen(number: int, address: str = "10.0.0.1", **more: object) -> RayNode:
    fields = {"id": f"{number:056x}", "address": address, "hostname": "Host_1", "gpus": 4, "free": 4.0, **more}
    return RayNode(**fields)  # type: ignore[arg-type]


def test_a_node_has_a_name_that_no_other_one_has_and_its_accelerator_as_a_label() -> None:
    node = as_node(seen(1 << 220, gpu_type="A100", cpus=8, memory_mib=1024), node_name(seen(1 << 220)))
    assert node.name == node_name(seen(1 << 220)) != node_name(seen(1 << 221))
    assert node.name.startswith("host-1-")
    assert node_name(seen(1, name="10.0.0.1")).startswith("host-1-"), "Ray names a node by its address"
    assert node_name(seen(1, name="GPU_box")).startswith("gpu-box-")
    assert node.labels["nvidia.com/gpu.product"] == "A100"
    assert node.labels[NODE_ID] == seen(1 << 220).id
    assert len(node.devices) == 4


def test_nothing_new_is_placed_on_a_node_that_drains() -> None:
    assert not as_node(seen(1, draining=True), "n").ready


@pytest.mark.parametrize(("free", "held", "used"), [(4, 0, 0), (3, 1, 0), (1, 1, 2), (2.5, 1, 1), (4, 1, 0)], ids=str)
def test_what_nobody_has_and_we_do_not_hold_is_used_elsewhere(free: float, held: float, used: int) -> None:
    assert used_elsewhere(seen(1, free=free, held=held)) == used


def test_slots_that_our_workers_hold_are_never_taken() -> None:
    assert taken_slots(seen(1), 2, held={3}) == (1, 2)
    assert taken_slots(seen(1), 4, held={0, 1}) == (2, 3)


def test_a_count_rises_after_a_while_and_falls_at_once() -> None:
    steady = Steady(rises_after_s=1.5)
    assert [steady.update(count, now) for count, now in ((2, 0.0), (2, 1.0), (2, 1.6), (1, 1.7))] == [0, 0, 2, 1]
    assert [steady.update(count, now) for count, now in ((2, 2.0), (1, 3.0), (2, 3.4), (2, 4.0))] == [1, 1, 1, 1]


def test_workers_of_a_node_that_left_are_lost_only_after_its_leases_must_have_ended() -> None:
    fence = Fence(SILENCE_S)
    on = {seen(1).id: "10.0.0.1"}
    fence.observe([seen(1)], on, 0.0)
    fence.observe([], on, 5.0)
    fence.observe([], on, 10.0)
    assert fence.passed(5.0 + SILENCE_S) == set()
    assert fence.passed(5.0 + SILENCE_S + MARGIN_S) == {seen(1).id}


def test_counts_of_nodes_that_left_are_dropped(tmp_path: Path) -> None:
    class Ignored:
        def nodes_changed(self, *_: object) -> None: ...

    async def observe() -> None:
        runtime = RayRuntime(Home(tmp_path), RayConfig(address="auto"), "c", (), Settings())
        runtime._reports = Ignored()  # type: ignore[assignment]
        for nodes in ((seen(1), seen(2)), (seen(2),)):
            runtime._seen = nodes
            runtime._on_nodes()
        runtime._on_nodes()
        assert set(runtime._used) == {seen(2).id}

    asyncio.run(observe())


def test_a_node_that_is_back_starts_its_time_anew() -> None:
    fence = Fence(SILENCE_S)
    on = {seen(1).id: "10.0.0.1"}
    fence.observe([], on, 0.0)
    fence.observe([seen(1)], on, 5.0)
    fence.observe([], on, 11.0)
    assert fence.passed(20.0) == set()


def test_a_new_raylet_on_the_machine_of_one_that_left_waits_for_the_end_of_its_workers() -> None:
    fence = Fence(SILENCE_S)
    on = {seen(1).id: "10.0.0.1"}
    fence.observe([seen(1), seen(2)], on, 0.0)
    fence.observe([seen(2), seen(3), seen(4, "10.0.0.2")], on, 1.0)
    assert fence.held_back == {seen(3).id}
    fence.observe([seen(2), seen(3)], on, 2.0)
    assert fence.held_back == {seen(3).id}
    fence.observe([seen(2), seen(3)], {}, 3.0)
    assert fence.held_back == set()


@pytest.mark.parametrize("address", ["", "somewhere", "ray://host:10001", "host:port"])
def test_an_address_that_ray_would_not_take_is_refused(address: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"ray is .*must be auto, or HOST:PORT"):
        RayConfig(address=address)
