"""How the pod of a step without GPUs has ended."""

from __future__ import annotations

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.dsl.launcher.cpu_pod import exit_code_of
from kfp_gpuquota.errors import JobFailedError


def pod(phase: str, **status: object) -> Pod:
    return msgspec.convert({"metadata": {"name": "step"}, "status": {"phase": phase, **status}}, Pod)


def ended(code: int, message: str = "") -> list[object]:
    return [{"name": "main", "state": {"terminated": {"exitCode": code, "message": message}}}]


def test_a_pod_has_the_exit_code_of_its_container_and_has_failed_without_the_programs_last_line() -> None:
    assert exit_code_of(pod("Running")) is None
    assert exit_code_of(pod("Running", containerStatuses=ended(137))) == 137
    assert exit_code_of(pod("Succeeded", containerStatuses=ended(0))) == 1


def test_a_pod_that_the_kubelet_has_not_admitted_fails_the_step_with_its_reason() -> None:
    with pytest.raises(JobFailedError, match="the step's pod did not start its command: OutOfcpu: too few"):
        exit_code_of(pod("Failed", reason="OutOfcpu", message="too few"))


def test_a_pod_whose_init_container_fails_does_so_too() -> None:
    waiting = [{"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}]
    failed = pod("Failed", initContainerStatuses=ended(1, "no space left"), containerStatuses=waiting)
    with pytest.raises(JobFailedError, match="did not start its command: no space left"):
        exit_code_of(failed)
