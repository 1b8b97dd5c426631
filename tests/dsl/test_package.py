"""The package's front door: one list of names, and nothing heavy behind it until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kfp_gpuquota

NAMES = [
    "GpuQuotaError",
    "JobHandle",
    "component",
    "connect",
    "get_job",
    "pipeline",
    "route_pipeline",
    "set_gpus",
    "submit",
]


def _python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_these_are_the_public_names_and_all_of_them_are_there() -> None:
    assert kfp_gpuquota.__all__ == NAMES
    assert dir(kfp_gpuquota) == NAMES
    assert all(callable(getattr(kfp_gpuquota, name)) for name in NAMES)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kfp_gpuquota' has no attribute 'componet'"):
        kfp_gpuquota.componet  # noqa: B018  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["kfp_gpuquota", "kfp_gpuquota.cluster.connect", "kfp_gpuquota.cli"])
def test_whoever_is_no_pipeline_author_never_imports_kfp(module: str) -> None:
    assert _python(f"import sys, {module}; print('kfp' in sys.modules)") == "False\n"


def test_a_launcher_imports_neither_kfp_nor_what_only_servers_and_the_scheduler_need() -> None:
    launcher, cluster = "kfp_gpuquota.dsl.launcher", "kfp_gpuquota.cluster.kubernetes"
    modules = f"{launcher}.main, {launcher}.pod_workers, {cluster}.user_client.client"
    heavy = ("kfp", "kubernetes", "aiohttp", "asyncio", "numpy", "kfp_gpuquota.scheduler", "kfp_gpuquota.membership")
    program = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    assert _python(program).strip() == "[]"
