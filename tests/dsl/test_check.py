"""What is found out about a compiled pipeline before it runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.api import Device, Node, Project
from kfp_gpuquota.cli.pipeline import _row
from kfp_gpuquota.dsl.pipelines.check import Cluster, PipelineCheck, check_pipeline
from kfp_gpuquota.errors import DefinitionError

GOLDEN = Path(__file__).parent / "golden"
NODE = Node(name="node-0", devices=tuple(Device(index=index) for index in range(4)))


def _spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = next(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))
    return spec


def _cluster(**quota: Any) -> Cluster:
    return Cluster(projects={"team-a": Project(name="team-a", **quota)}, nodes=(NODE,))


def _check(name: str, **more: Any) -> PipelineCheck:
    return check_pipeline(_spec(name), **more)


def _sizes(found: PipelineCheck) -> dict[str, tuple[int | None, int | None, int | None]]:
    return {step.step: (step.gpus, step.min_gpus, step.max_gpus) for step in found.routed}


def test_every_routed_step_is_listed_with_its_size_and_project() -> None:
    found = _check("sizes")
    assert _sizes(found) == {"train": (1, 1, 2), "train-2": (4, 4, 8), "train-3": (2, 2, 2)}
    assert {step.project for step in found.routed} == {"team-a"}
    assert (found.pipeline, found.unrouted, found.problems) == ("sizes", (), ())


def test_steps_inside_loops_conditions_and_nested_pipelines_are_named_by_their_way() -> None:
    found = _check("control-flow")
    assert [step.step for step in found.routed] == [
        "exit-handler-1/condition-2/train",
        "exit-handler-1/for-loop-4/train-2",
        "exit-handler-1/inner/train",
    ]
    assert found.unrouted == ("say",)


def test_a_size_that_only_the_run_knows_is_not_made_up() -> None:
    assert _sizes(_check("accelerators", cluster=_cluster(limit=1)))["train-2"] == (None, None, None)


def test_a_part_of_a_gpu_is_shown_as_such() -> None:
    spec = _spec("sizes")
    container = spec["deploymentSpec"]["executors"]["exec-train"]["container"]
    container["env"] = [{"name": "GPUQUOTA_FRACTION", "value": "0.5"}]
    found = check_pipeline(spec, "team-a")
    assert [step.request for step in found.routed] == ["0.5", "4", "2"]
    assert _row(found.routed[0])[2:5] == ["0.5", "0.5", "0.5"]
    assert _row(found.routed[1])[2:5] == [4, 4, 8]


def test_an_interactive_step_is_of_another_kind() -> None:
    assert [step.kind for step in _check("container").routed] == ["build"]


def test_a_step_without_a_project_takes_the_configured_one_and_else_is_a_problem() -> None:
    assert [step.project for step in _check("bare-function", configured="team-b").routed] == ["team-b"]
    assert [step.project for step in _check("bare-function", project="team-c").routed] == ["team-c"]
    (problem,) = _check("bare-function").problems
    assert problem.startswith("step 'bare': it names no project; add --project PROJECT")


def test_an_unknown_project_is_a_problem_of_each_step() -> None:
    cluster = Cluster(projects={}, nodes=(NODE,))
    found = _check("sizes", cluster=cluster)
    assert len(found.problems) == 3
    assert found.problems[0] == (
        "step 'train': project 'team-a' does not exist; create it with: gpuquota project create team-a --guaranteed N"
    )


def test_more_than_the_projects_limit_names_the_step_and_the_limit() -> None:
    (problem,) = _check("sizes", cluster=_cluster(limit=2)).problems
    assert problem == (
        "step 'train-2': gpus is 4, but project 'team-a' may hold at most 2 GPUs; ask for less, or raise its limit: "
        "gpuquota project set team-a --limit 4"
    )


def test_an_elastic_step_within_the_limit_at_its_smallest_is_no_problem() -> None:
    assert _check("lightweight", cluster=_cluster(limit=1)).problems == ()


def test_a_session_beyond_the_guaranteed_quota_would_wait_for_ever() -> None:
    (problem,) = _check("container", cluster=_cluster()).problems
    assert "cannot be preempted, so it stays inside the quota, and its 1 GPUs are more than the 0 guaranteed" in problem
    assert _check("container", cluster=_cluster(guaranteed=1)).problems == ()


def test_every_problem_is_found_not_only_the_first() -> None:
    spec = copy.deepcopy(_spec("accelerators"))
    for label in ("exec-train-3", "exec-train-4"):
        container = spec["deploymentSpec"]["executors"][label]["container"]
        container["resources"] = {"accelerator": {"resourceType": "NVIDIA_TESLA_K80", "resourceCount": "1"}}
    spec["deploymentSpec"]["executors"]["exec-train"]["container"]["env"] = [{"name": "GPUQUOTA_GPUS", "value": "many"}]
    problems = check_pipeline(spec, "team-a").problems
    assert [problem.partition(":")[0].partition(" asks")[0] for problem in problems] == [
        "step 'train'",
        "step 'train-3'",
        "step 'train-4'",
    ]


def test_a_project_that_cannot_be_one_is_the_callers_mistake() -> None:
    with pytest.raises(DefinitionError, match="project is 'Team A'"):
        _check("sizes", project="Team A")


def test_the_pipeline_checked_is_not_changed() -> None:
    spec = _spec("accelerators")
    before = copy.deepcopy(spec)
    check_pipeline(spec, "team-b", cluster=_cluster())
    assert spec == before
