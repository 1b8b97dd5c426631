"""What a routed step does with what a real backend creates: nested pipelines, a workspace, a run again, a lost pod."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.dsl.spec import step_pod
from kfp_gpuquota.dsl.spec.naming import job_name
from kfp_gpuquota.dsl.spec.pod_template import worker_template
from kfp_gpuquota.dsl.worker import start
from tests.kfp_backend import shapes
from tests.kfp_backend.argo import Nodes
from tests.kfp_backend.test_shapes import SUCCEEDED, container, recorded_only, recording

Json = dict[str, Any]
NESTED = [
    ("workflow-shapes.json", "shapes-mfwd6"),
    ("workflow-shapes-again.json", "shapes-n6gw6"),
    ("workflow-shapes-no-defaults.json", "shapes-no-defaults-nxq7k"),
]
AGAIN = ("shapes-mfwd6", "shapes-n6gw6")


def tasks_of(run: str) -> dict[str, set[str]]:
    """The nodes of a recorded run's executors, by the task that a launcher reads from its pod."""
    found = defaultdict(set)
    for one in recording("node-names.json"):
        if one["node_name"].startswith((f"{run}.", f"{run}(")) and ".executor" in one["node_name"]:
            annotations = {"workflows.argoproj.io/node-name": one["node_name"]}
            found[step_pod.task({"metadata": {"name": one["pod_name"], "annotations": annotations}})].add(
                one["node_name"]
            )
    return found


def jobs_of(run: str, run_id: str) -> dict[str, str]:
    """The name of the job of each task, without its run's name."""
    return {
        task.removeprefix(run): job_name(step_pod.name(task), run_id=run_id, task=task, executor_input={})
        for task in tasks_of(run)
    }


@recorded_only
@pytest.mark.parametrize(("file", "run"), NESTED)
def test_each_step_of_nested_pipelines_and_loops_has_a_job_of_its_own_over_all_attempts(file: str, run: str) -> None:
    tasks = tasks_of(run)
    assert len({name.split("-", 1)[1] for name in jobs_of(run, "1").values()}) == len(tasks) >= 3
    for nodes in tasks.values():
        assert len({workflows.without_attempts(node) for node in nodes}) == 1
    inside = [task for task in tasks if ".inner" in task]
    assert inside, "a nested pipeline has steps"
    (workflow,) = recording(file).values()
    ran = {**workflow, "status": {**workflow["status"], "phase": "Running", "finishedAt": None}}
    for task in inside:
        assert not workflows.awaits(workflows.read(ran), workflow["metadata"]["uid"], task), "it has ended"
    running = {"name": f"{inside[0]}.executor(1)", "phase": "Running"}
    status = {**ran["status"], "nodes": {**ran["status"]["nodes"], "again": running}}
    assert workflows.awaits(workflows.read({**ran, "status": status}), workflow["metadata"]["uid"], inside[0])


@recorded_only
def test_a_run_that_is_cloned_has_jobs_of_its_own() -> None:
    first, second = (jobs_of(run, run_id) for run, run_id in zip(AGAIN, "12", strict=True))
    same = first.keys() & second.keys()
    assert len(same) >= 3
    assert not {first[task] for task in same} & {second[task] for task in same}


@recorded_only
def test_workers_mount_the_runs_workspace_where_its_files_are_expected() -> None:
    pod = recording("pods.json")["workspace, executor pod, running"]
    artifact = {"uri": "minio://mlpipeline/v2/data", "metadata": {"_kfp_workspace": True}}
    executor_input = {
        "inputs": {"artifacts": {"data": {"artifacts": [artifact]}}},
        "outputs": {"outputFile": "/tmp/kfp_outputs/output_metadata.json"},
    }
    template = worker_template(pod, "trainer:1", "job-relay", folders=start.folders_of(executor_input))
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "kfp-workspace"]
    assert volume == next(one for one in pod["spec"]["volumes"] if one["name"] == "kfp-workspace")
    mounts = container({"spec": template["spec"]}, "main")["volumeMounts"]
    (path,) = [one["mountPath"] for one in mounts if one["name"] == "kfp-workspace"]
    assert start.input_path(artifact).startswith(f"{path}/")
    ours = [one["mountPath"] for one in mounts if one["name"] == "gpuquota-folders"]
    assert ours == ["/tmp/kfp_outputs"], "nothing is mounted over the workspace"


@recorded_only
@pytest.mark.parametrize(
    "which", ["k8s-settings, executor pod, running", "plain, executor pod, running", "workspace, executor pod, running"]
)
def test_workers_have_kfps_variables_with_their_own_pods_values(which: str) -> None:
    pod = recording("pods.json")[which]
    (worker,) = worker_template(pod, "trainer:1", "s")["spec"]["containers"]
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in worker["env"]
        if "fieldRef" in one.get("valueFrom", {}) and one["name"].startswith("KFP_")
    }
    assert fields == {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid"}
    assert worker["envFrom"] == container(pod, "main")["envFrom"]
    assert not [one["name"] for one in worker["env"] if one["name"].startswith("ARGO_")]


@recorded_only
def test_a_plain_step_whose_pod_was_reclaimed_runs_again_as_a_new_pod_with_the_same_place() -> None:
    """A step that is not routed, on borrowed GPUs: to reclaim them, its pod is deleted."""
    recorded = recording("workflows.json")["deleted, succeeded with second attempts"]
    name = recorded["metadata"]["name"]
    nodes = Nodes(name, [shapes.Step("say-it", {}), shapes.Step("say-it-2", {})], defaults=True)
    first = nodes.operate({}, 0.0)
    second = nodes.operate({}, 1.0)  # both were deleted
    places = [{workflows.place_of(one.node) for one in wanted} for wanted in (first, second)]
    assert places == [{f"{name}.root.say-it", f"{name}.root.say-it-2"}] * 2
    nodes.operate({one.node: {"status": SUCCEEDED} for one in second}, 2.0)
    assert nodes.root.phase == "Succeeded"
    played = {node.name: (node.phase, node.message) for node in nodes.by_name.values() if node.type == "Pod"}
    theirs = {one["name"]: (one["phase"], one.get("message", "")) for one in recorded["status"]["nodes"].values()}
    assert played.items() <= theirs.items()
