"""Limits on memory and CPU, enforced by a real kernel: user-mode Linux, since this one may lack the controllers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.cluster.local.workers.cgroups import ADVICE, Cgroups
from kfp_gpuquota.cluster.local.workers.runtime import refuse_limits
from kfp_gpuquota.errors import InvalidFieldError
from tests.user_mode_linux import boot

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(scope="module")
def in_a_kernel(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The results of limits_program, which a kernel of its own has run on the files of this machine."""
    directory = tmp_path_factory.mktemp("kernel")
    result, root = directory / "result.json", Path(__file__).parents[2]
    console = boot(directory, f"cd {root}\nexec {sys.executable} -m tests.cluster.limits_program {result}\n")
    assert result.exists(), console[-4000:]
    found: dict[str, Any] = json.loads(result.read_text())
    assert "error" not in found, found["error"]
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("user-mode-linux")
def test_a_worker_above_its_memory_limit_is_ended_and_the_reason_says_so(in_a_kernel: Mapping[str, Any]) -> None:
    status = in_a_kernel["jobs"]["hungry"]["status"]
    assert status["phase"] == "Failed"
    assert status["reason"]["message"] == "worker 0 used more than its memory limit of 100Mi"


@pytest.mark.slow
@pytest.mark.xdist_group("user-mode-linux")
def test_a_worker_gets_no_more_cpu_than_its_limit(in_a_kernel: Mapping[str, Any]) -> None:
    assert int(in_a_kernel["jobs"]["busy"]["nr_throttled"]) > 0


@pytest.mark.slow
@pytest.mark.xdist_group("user-mode-linux")
def test_cgroups_of_workers_are_removed_when_these_have_ended(in_a_kernel: Mapping[str, Any]) -> None:
    assert in_a_kernel["jobs"]["left"] == []


@pytest.mark.slow
@pytest.mark.xdist_group("user-mode-linux")
def test_a_user_divides_the_cgroup_that_systemd_delegates_and_no_other(in_a_kernel: Mapping[str, Any]) -> None:
    assert in_a_kernel["user"] == {"directory": "/sys/fs/cgroup/delegated/gpuquota-workers", "unavailable": ""}
    assert "is not this user's to divide; start the cluster with: systemd-run" in in_a_kernel["shared"]["unavailable"]


def job(**fields: Any) -> JobSpec:
    return JobSpec(name="bounded", project="team", command=("true",), **fields)


def test_a_limit_that_cannot_be_enforced_is_refused_with_the_reason() -> None:
    with pytest.raises(
        InvalidFieldError, match="memory_limit_mib is 512, but it cannot be enforced: there is no cgroup"
    ):
        refuse_limits(job(memory_limit_mib=512), "there is no cgroup")
    with pytest.raises(InvalidFieldError, match="there is no cgroup; leave the limit out"):
        refuse_limits(job(cpu_limit=1), "there is no cgroup")
    with pytest.raises(InvalidFieldError, match="cluster start; or leave the limit out"):
        refuse_limits(job(cpu_limit=1), f"it cannot be divided; {ADVICE}")
    refuse_limits(job(memory_mib=512, cpu=2), "there is no cgroup")
    refuse_limits(job(memory_limit_mib=512), "")


def test_a_request_that_is_not_given_is_the_limit() -> None:
    spec = job(memory_limit_mib=512, cpu_limit=1.5)
    assert (spec.memory_mib, spec.cpu) == (512, 1.5)
    assert job(memory_limit_mib=512, memory_mib=256).memory_mib == 256


@pytest.mark.parametrize(
    ("field", "limit", "value"), [("cpu", "cpu_limit", 2), ("memory_mib", "memory_limit_mib", 512)]
)
def test_a_limit_below_the_request_is_refused(field: str, limit: str, value: int) -> None:
    with pytest.raises(InvalidFieldError, match=f"{limit} is {value}, but it cannot be below {field}, which is 1024"):
        job(**{field: 1024, limit: value})


def test_files_of_a_cgroup_have_the_units_of_the_kernel() -> None:
    groups = Cgroups(Path("/groups"))
    directory, files = groups.of("w1", job(memory_limit_mib=512, cpu_limit=0.5))
    assert directory == "/groups/w1"
    assert files == {
        "memory.max": "536870912", "memory.swap.max": "0", "memory.oom.group": "1", "cpu.max": "50000 100000"
    }  # fmt: skip
    assert groups.of("w1", job()) == ("", {})
