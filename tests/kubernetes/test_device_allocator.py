"""No node is planned with more free devices than it has, whichever devices are held, fail or come back."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.convert.nodes import node_of
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("foreign"), st.integers(6, 8), st.integers(1, 3)),
        st.tuples(st.just("release"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("resize"), st.integers(0, 8), st.just(0)),
    ),
    max_size=30,
)


def node(gpus: int) -> Node:
    body: dict[str, Any] = {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}
    return msgspec.convert(body, Node)


@given(STEPS)
def test_free_devices_are_those_of_the_node_less_those_held(steps: list[tuple[str, int, int]]) -> None:
    allocator, count = DeviceAllocator(), 8
    allocator.resize("n", count)
    for step, number, amount in steps:
        holder = str(number)
        if step == "release":
            allocator.release(holder)
        elif step == "resize":
            allocator.resize("n", count := number)
        elif allocator.held(holder) is None:
            allocator.take(holder, "n", amount, None, foreign=step == "foreign")
        planned = {device.index for device in node_of(node(count), allocator.unplanned("n")).devices}
        held = [index for number in range(9) for index in (allocator.held(str(number)) or ("", ()))[1]]
        assert len(held) == len(set(held))
        assert len(planned - set(held)) == max(0, count - len(held))
