"""Shares of GPUs: valid requests, and the messages for invalid ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kfp_gpuquota.api import Device, JobSpec, Node, Project, Worker
from kfp_gpuquota.api.node import SharingRules
from kfp_gpuquota.api.share import compute_variables
from kfp_gpuquota.cluster.admission import check_fits
from kfp_gpuquota.errors import InvalidFieldError


def spec(**fields: Any) -> JobSpec:
    return JobSpec(**{"name": "train", "project": "team-a", "command": ("true",), **fields})


def test_a_share_is_one_worker_with_that_part_of_each_of_its_devices() -> None:
    job = spec(gpu_fraction=0.5, gpu_devices=8, gpu_fraction_limit=1)
    assert (job.shared, job.gpus, job.worker_gpus, job.smallest, job.largest) == (True, 8, 8, 8, 8)
    assert (job.share_of(0), job.asks) == (0.5, "8 x 0.5")


def test_memory_is_a_part_of_the_device_that_is_held() -> None:
    job = spec(gpu_memory_mib=40960, gpu_devices=8, gpu_memory_limit_mib=81920)
    assert (job.share_of(81920), job.asks) == (0.5, "8 x 40Gi")
    assert job.share_of(20480) > 1
    assert job.share_of(0) > 1


def test_a_share_counts_as_the_larger_part_of_memory_and_computing_power() -> None:
    assert spec(gpu_fraction=0.25, gpu_compute=0.55).share_of(0) == 0.55
    assert spec(gpu_fraction=0.25, gpu_compute=0.1).share_of(0) == 0.25
    assert spec(gpu_memory_mib=4096, gpu_compute=0.5).share_of(16384) == 0.5
    assert spec(gpu_memory_mib=12288, gpu_compute=0.5).share_of(16384) == 0.75


def test_the_part_of_the_computing_power_is_a_percentage_for_mps() -> None:
    assert compute_variables(None) == {}
    assert compute_variables(0.125) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.500"}
    assert compute_variables(0.29) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "29.00"}


def test_whole_gpus_are_no_share() -> None:
    assert (spec(gpus=2).shared, spec(gpus=2).share_of(100), spec(gpus=2).asks) == (False, 1.0, "2")


@pytest.mark.parametrize("fields", [{"gpu_fraction": 0.25}, {"gpu_memory_mib": 4096, "gpu_devices": 8}])
def test_a_share_survives_the_wire(fields: dict[str, Any]) -> None:
    job = spec(**fields)
    assert msgspec.json.decode(msgspec.json.encode(job), type=JobSpec) == job


def test_a_worker_counts_as_its_part_of_its_devices() -> None:
    worker = Worker(id="w", job_uid="j", index=0, node="n", devices=(0, 3), share=0.3)
    assert worker.gpus == 0.6
    assert Worker(id="w", job_uid="j", index=0, node="n", devices=(0, 3)).gpus == 2


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"gpu_fraction": 0}, "gpu_fraction", "gpu_fraction is 0, but it must be more than 0 and less than 1"),
    ({"gpu_fraction": -0.5}, "gpu_fraction", "it must be more than 0 and less than 1"),
    ({"gpu_fraction": float("nan")}, "gpu_fraction", "it must be more than 0 and less than 1"),
    ({"gpu_fraction": 1}, "gpu_fraction", "less than 1; ask for whole GPUs with gpus"),
    ({"gpu_fraction": 1.5}, "gpu_fraction", "less than 1; ask for whole GPUs with gpus"),
    ({"gpu_fraction": "0.5"}, "gpu_fraction", "it must be a number, such as 0.25"),
    ({"gpu_fraction": True}, "gpu_fraction", "it must be a number, such as 0.25"),
    ({"gpu_fraction_limit": 0.8}, "gpu_fraction_limit", "there is no gpu_fraction of which it is the limit"),
    ({"gpu_fraction": 0.5, "gpu_fraction_limit": 0.4}, "gpu_fraction_limit", "between gpu_fraction, which is 0.5,"),
    ({"gpu_fraction": 0.5, "gpu_fraction_limit": 1.1}, "gpu_fraction_limit", "between gpu_fraction, which is 0.5,"),
    ({"gpu_memory_mib": 0}, "gpu_memory_mib", "gpu_memory_mib is 0, but it must be at least 1 MiB"),
    ({"gpu_memory_mib": 1 << 41}, "gpu_memory_mib", "it must be at most"),
    ({"gpu_memory_limit_mib": 5}, "gpu_memory_limit_mib", "there is no gpu_memory_mib of which it is the limit"),
    ({"gpu_memory_mib": 2048, "gpu_memory_limit_mib": 5}, "gpu_memory_limit_mib", "which is 2048 (2Gi)"),
    ({"gpu_fraction": 0.5, "gpu_memory_mib": 5}, "gpu_memory_mib", "already asks for gpu_fraction 0.5; ask for"),
    ({"gpu_fraction": 0.5, "gpu_memory_limit_mib": 5}, "gpu_memory_limit_mib", "there is no gpu_memory_mib"),
    ({"gpu_devices": 2}, "gpu_devices", "the GPUs of which a job holds a share, and there is none"),
    ({"gpu_compute": 0.5}, "gpu_compute", "it limits a job's share of a GPU, and there is none"),
    ({"gpu_fraction": 0.5, "gpu_compute": 1}, "gpu_compute", "it must be more than 0 and less than 1"),
    ({"gpu_fraction": 0.5, "gpu_compute": "half"}, "gpu_compute", "it must be a number, such as 0.25"),
    ({"gpu_fraction": 0.5, "gpu_devices": 0}, "gpu_devices", "it must be at least 1 GPU"),
    ({"gpu_fraction": 0.5, "gpus": 2}, "gpus", "whole GPUs, and the job asks for a share of them (gpu_fraction)"),
    ({"gpu_memory_mib": 5, "gpus": 2}, "gpus", "for the same share of several GPUs of a node give gpu_devices"),
    ({"gpu_fraction": 0.5, "max_gpus": 2}, "max_gpus", "it counts whole GPUs"),
    ({"gpu_fraction": 0.5, "gpus_per_worker": 1}, "gpus_per_worker", "it counts whole GPUs"),
    ({"cpu": 0}, "cpu", "it must be between 0.001 and 1000000 cores"),
    ({"memory_mib": 0}, "memory_mib", "it must be at least 1 MiB"),
    ({"node_selector": {"a b": "x"}}, "node_selector", "a label's key is [PREFIX/]NAME"),
    ({"node_selector": {"zone": "a b"}}, "node_selector.zone", "a label's value is up to 63 letters"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "sentence"), REFUSED)
def test_what_cannot_be_asked_for_is_refused_with_the_rule(fields: dict[str, Any], field: str, sentence: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        spec(**fields)
    assert refused.value.field == field
    assert sentence in refused.value.message


@pytest.mark.parametrize(
    ("smallest", "asked", "refused"),
    [
        (0.01, {"gpu_fraction": 0.009}, "gpu_fraction is 0.009, but the smallest share of a GPU is 0.01 here"),
        (0.001, {"gpu_fraction": 0.009}, ""),
        (0.01, {"gpu_memory_mib": 163}, "the smallest share of a GPU is 0.01 here, which is 164 MiB"),
        (0.01, {"gpu_memory_mib": 164}, ""),
        (0.25, {"gpu_memory_mib": 4000, "gpu_compute": 0.5}, "which is 4096 MiB"),
    ],
)
def test_the_administrator_sets_the_smallest_share(smallest: float, asked: dict[str, Any], refused: str) -> None:
    node = SharingRules(smallest_share=smallest, memory_reserve=0).on(
        Node(name="n", devices=(Device(index=0, memory_mib=16384),))
    )
    message = ""
    try:
        check_fits(spec(**asked), Project(name="team-a"), (node,))
    except InvalidFieldError as error:
        message = error.message
    assert refused in message
    assert bool(refused) == bool(message)
