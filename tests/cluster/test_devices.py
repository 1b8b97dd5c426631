"""How a machine's GPUs, or its cores, become the devices of nodes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Device, Worker, WorkerPhase
from kfp_gpuquota.cli.arguments.parsers import count_or_gpus
from kfp_gpuquota.cluster.local.daemon import nodes_of
from kfp_gpuquota.cluster.local.devices import ClusterConfig, chosen_gpus, environment_of, lay_out, threads_per_slot
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.engine.records import WorkerRecord
from kfp_gpuquota.errors import ConflictError, InvalidFieldError

if TYPE_CHECKING:
    from pathlib import Path

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


def test_more_gpus_than_the_machine_has_are_refused_and_slots_stand_for_them_where_it_has_none() -> None:
    config = ClusterConfig(nodes=4, gpus_per_node=10)
    with pytest.raises(InvalidFieldError, match=r"4 nodes with 10 GPUs each are more than the 8 GPUs .*--cpu-slots"):
        lay_out(config, GPUS)
    with pytest.raises(InvalidFieldError, match="9 nodes with 1 GPU each are more than the 8 GPUs"):
        lay_out(ClusterConfig(nodes=9), GPUS)
    nodes = lay_out(config, ())
    assert {device.model for node in nodes for device in node.devices} == {"cpu-slot"}
    assert sum(len(node.devices) for node in nodes) == 40


def test_the_gpus_of_a_cluster_are_chosen_by_index_or_uuid() -> None:
    assert [gpu.uuid for gpu in chosen_gpus(("3", "GPU-0"), GPUS)] == ["GPU-3", "GPU-0"]
    assert chosen_gpus((), GPUS) == GPUS
    with pytest.raises(InvalidFieldError, match=r"this machine has no GPU '8'; it has 0 .GPU-0., 1"):
        chosen_gpus(("8",), GPUS)
    with pytest.raises(InvalidFieldError, match="this machine has no GPU '0'; it has no GPU"):
        chosen_gpus(("0",), ())
    with pytest.raises(InvalidFieldError, match="names a GPU twice"):
        chosen_gpus(("3", "GPU-3"), GPUS)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("2", (2, ())), ("0,1,3", (None, ("0", "1", "3"))), ("3,", (None, ("3",))), ("GPU-6a", (None, ("GPU-6a",)))],
)
def test_a_number_of_gpus_and_a_choice_of_them_are_told_apart(
    text: str, meaning: tuple[int | None, tuple[str, ...]]
) -> None:
    assert count_or_gpus(text) == meaning
    for wrong in ("x", "0,,1", ","):
        with pytest.raises(InvalidFieldError):
            count_or_gpus(wrong)


@pytest.mark.parametrize(("devices", "place"), [((1,), r"GPUs \[1\] of node-1"), ((), "node-1")])
def test_a_new_shape_must_have_the_node_of_each_worker(tmp_path: Path, devices: tuple[int, ...], place: str) -> None:
    with contextlib.closing(Store(tmp_path / "state.db")) as store:
        store.save_config(ClusterConfig(nodes=2, cpu_slots=True))
        worker = Worker(id="u-0", job_uid="u", index=0, node="node-1", devices=devices, phase=WorkerPhase.RUNNING)
        store.save_worker(WorkerRecord(worker=worker, attempt=1))
        with pytest.raises(ConflictError, match=f"a worker still runs on {place}, which the new shape does not have"):
            nodes_of(store, ClusterConfig(cpu_slots=True), changed=True)
        assert len(nodes_of(store, ClusterConfig(nodes=3, cpu_slots=True), changed=True)) == 3


def test_a_worker_sees_its_gpus_by_uuid_and_a_slot_sees_none() -> None:
    assert environment_of(GPUS[2:4], threads=4) == {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"}
    (node,) = lay_out(ClusterConfig(gpus_per_node=2), ())
    assert environment_of(node.devices, threads=1) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}


def test_every_slot_has_at_least_one_thread() -> None:
    assert threads_per_slot(lay_out(ClusterConfig(nodes=4, gpus_per_node=1000), ())) == 1
