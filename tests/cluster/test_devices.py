"""How a machine's GPUs, or its cores, become the devices of nodes."""

from __future__ import annotations

from kfp_gpuquota.api import Device
from kfp_gpuquota.cluster.local.devices import ClusterConfig, environment_of, lay_out, threads_per_slot

GPUS = tuple(Device(index=index, model="H100", uuid=f"GPU-{index}", memory_mib=81_559) for index in range(8))


def test_a_machine_with_gpus_is_one_node_with_all_of_them() -> None:
    (node,) = lay_out(ClusterConfig(), GPUS)
    assert (node.name, node.devices) == ("node-0", GPUS)


def test_a_machine_without_gpus_has_two_cpu_slots() -> None:
    (node,) = lay_out(ClusterConfig(), ())
    assert [(device.index, device.model, device.uuid) for device in node.devices] == [
        (0, "cpu-slot", ""),
        (1, "cpu-slot", ""),
    ]


def test_simulated_nodes_share_the_gpus_out_and_number_them_anew() -> None:
    nodes = lay_out(ClusterConfig(nodes=2, gpus_per_node=3), GPUS)
    assert [[(device.index, device.uuid) for device in node.devices] for node in nodes] == [
        [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2")],
        [(0, "GPU-3"), (1, "GPU-4"), (2, "GPU-5")],
    ]


def test_where_the_gpus_are_too_few_every_device_is_a_slot() -> None:
    nodes = lay_out(ClusterConfig(nodes=4, gpus_per_node=10), GPUS)
    assert {device.model for node in nodes for device in node.devices} == {"cpu-slot"}
    assert sum(len(node.devices) for node in nodes) == 40


def test_a_worker_sees_its_gpus_by_uuid_and_a_slot_sees_none() -> None:
    assert environment_of(GPUS[2:4], threads=4) == {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"}
    (node,) = lay_out(ClusterConfig(gpus_per_node=2), ())
    assert environment_of(node.devices, threads=1) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}


def test_every_slot_has_at_least_one_thread() -> None:
    assert threads_per_slot(lay_out(ClusterConfig(nodes=4, gpus_per_node=1000), ())) == 1
