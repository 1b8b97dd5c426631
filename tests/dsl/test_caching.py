"""Other scheduling options: a cache hit. Other code, image or inputs: not.

KFP's backend makes a step's cache key from its inputs and outputs, its container's image, command and arguments, and
its volume claims (backend/src/v2/cacheutils). kfp.local has a rule of its own, which counts the environment as well.
"""

# mypy: disable-error-code="untyped-decorator"

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from kfp.local.cache import LocalCache

import kfp_gpuquota as gpuquota
from tests.dsl import pipelines

OTHER_OPTIONS: list[dict[str, Any]] = [
    {"gpus": 4},
    {"gpus": 2, "min_gpus": 1, "max_gpus": 8},
    {"interactive": True},
    {"priority": 10, "preemptible": False},
    {"max_runtime": "1h", "name": "other"},
]


def _container(component: pipelines.Component) -> dict[str, Any]:
    executors = json_format.MessageToDict(component.pipeline_spec.deployment_spec)["executors"]
    return next(iter(executors.values()))["container"]  # type: ignore[no-any-return]


def _counted_by_the_backend(component: pipelines.Component) -> tuple[Any, ...]:
    container = _container(component)
    root = json_format.MessageToDict(component.pipeline_spec)["components"]
    return container["image"], container["command"], container["args"], root


@pytest.mark.parametrize("options", OTHER_OPTIONS)
def test_other_scheduling_options_are_a_cache_hit(options: dict[str, Any]) -> None:
    first = gpuquota.component(gpus=1)(pipelines.plain_train)
    second = gpuquota.component(**options)(pipelines.plain_train)
    assert _counted_by_the_backend(first) == _counted_by_the_backend(second)
    assert _container(first)["env"] != _container(second)["env"]


def test_another_project_is_a_cache_hit() -> None:
    containers = [
        json_format.MessageToDict(gpuquota.pipeline(project=team)(pipelines.inner).pipeline_spec.deployment_spec)
        for team in ("team-a", "team-b")
    ]
    first, second = (spec["executors"]["exec-train"]["container"] for spec in containers)
    assert first.pop("env") != second.pop("env")
    assert first == second


def test_other_code_or_another_image_is_no_cache_hit() -> None:
    def train(epochs: int) -> float:
        return 2.0 / epochs

    mine = gpuquota.component(gpus=1)(pipelines.plain_train)
    other_code = gpuquota.component(gpus=1)(pipelines.lightweight(train))
    other_image = gpuquota.component(pipelines.train, base_image="python:3.12", install_kfp_package=False)
    keys = [_counted_by_the_backend(each)[:3] for each in (mine, other_code, other_image)]
    assert all(keys.count(key) == 1 for key in keys)


def test_the_routed_and_the_plain_step_do_not_share_a_result() -> None:
    """They would give the same outputs, but the plain one was never under the quota."""
    routed = gpuquota.component(gpus=1)(pipelines.plain_train)
    assert _counted_by_the_backend(routed) != _counted_by_the_backend(pipelines.plain_train)


def test_kfp_local_tells_runs_of_one_definition_to_be_the_same(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path))

    def key(component: pipelines.Component) -> str:
        container = _container(component)
        command = [*container["command"], *container["args"]]
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        return str(cache.compute_key("comp-train", container["image"], command, {"epochs": 1}, environment))

    twice = [gpuquota.component(gpus=1)(pipelines.plain_train) for _ in range(2)]
    assert key(twice[0]) == key(twice[1])
