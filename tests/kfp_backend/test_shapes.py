"""The double's objects are those of a real backend."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kfp_backend import shapes
from tests.kfp_backend.argo import FINAL, Nodes, assessed

RECORDINGS = "GPUQUOTA_KFP_RECORDINGS"
recorded_only = pytest.mark.skipif(
    not os.environ.get(RECORDINGS), reason=f"{RECORDINGS} names no recordings of a KFP backend"
)
Json = dict[str, Any]
# What the API server, admission and the kubelet add to a pod, and what depends on the run.
ADDED_TO_POD = {
    "dnsPolicy", "enableServiceLinks", "nodeName", "preemptionPolicy", "priority", "schedulerName", "serviceAccount",
    "terminationGracePeriodSeconds", "tolerations",
}  # fmt: skip
OF_THE_RUN = {"--pipeline_name", "--run_id", "--execution_id", "--executor_input", "--component_spec"}


def recording(name: str) -> Any:
    return json.loads((Path(os.environ[RECORDINGS]) / name).read_text())


def made_from(pod: Json) -> Json:
    """The pod that the double makes for the recorded one's node."""
    owner = pod["metadata"]["ownerReferences"][0]
    workflow = shapes.workflow(owner["name"], pod["metadata"]["labels"]["pipeline/runid"])
    workflow["metadata"]["uid"] = owner["uid"]
    main = container(pod, "main")
    given = {
        "image": main["image"],
        "command": main["args"],
        "env": [entry for entry in main["env"] if not entry["name"].startswith(("KFP_", "ARGO_"))],
        "resources": main["resources"],
    }
    node = pod["metadata"]["annotations"]["workflows.argoproj.io/node-name"]
    return shapes.executor_pod(workflow, node, shapes.Step("make", given))


def container(pod: Json, name: str) -> Json:
    return next(one for one in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]) if one["name"] == name)


def plain(one: Json) -> Json:
    """A container without what differs from run to run, and from cluster to cluster."""
    command = list(one.get("command", []))
    for option in OF_THE_RUN & set(command):
        command[command.index(option) + 1] = "..."
    mounts = [mount for mount in one["volumeMounts"] if not mount["name"].startswith("kube-api-access")]
    env = [_reference(entry) for entry in one.get("env", []) if not entry["name"].startswith(_NOT_COMPARED)]
    return {**one, "command": command, "volumeMounts": mounts, "env": env, "imagePullPolicy": "IfNotPresent"}


_NOT_COMPARED = ("ARGO_TEMPLATE", "ARGO_WORKFLOW_", "ARGO_ARTIFACT_PLUGIN_NAMES")


def _reference(entry: Json) -> Json:
    """A field reference without the default that the API server fills in."""
    if "fieldRef" in entry.get("valueFrom", {}):
        return {"name": entry["name"], "fieldPath": entry["valueFrom"]["fieldRef"]["fieldPath"]}
    return entry


@recorded_only
def test_a_steps_pod_is_as_recorded() -> None:
    pod = recording("pods.json")["plain, executor pod, running"]
    made = made_from(pod)
    added = {"creationTimestamp", "generation", "namespace", "uid"}
    assert made["metadata"] == {name: value for name, value in pod["metadata"].items() if name not in added}
    assert set(made["spec"]) == set(pod["spec"]) - ADDED_TO_POD
    for name in ("main", "wait", "init", "kfp-launcher"):
        assert plain(container(made, name)) == plain(container(pod, name)), name
    volumes = {one["name"]: next(kind for kind in one if kind != "name") for one in pod["spec"]["volumes"]}
    ours = {one["name"]: next(kind for kind in one if kind != "name") for one in made["spec"]["volumes"]}
    assert ours == {name: kind for name, kind in volumes.items() if not name.startswith("kube-api-access")}


@recorded_only
def test_node_ids_and_pod_names_are_as_recorded() -> None:
    for one in recording("node-names.json"):
        workflow = one["node_id"].rpartition("-")[0]
        assert shapes.node_id(workflow, one["node_name"]) == one["node_id"]
        template = one["pod_name"].removeprefix(f"{workflow}-").rpartition("-")[0]
        assert shapes.pod_name(workflow, one["node_name"], template) == one["pod_name"]


@recorded_only
@pytest.mark.parametrize("which", ["plain, running", "long, running, just after Terminate in KFP"])
def test_a_runs_workflow_is_as_recorded(which: str) -> None:
    recorded = recording("workflows.json")[which]
    made = shapes.workflow(recorded["metadata"]["name"], recorded["metadata"]["labels"]["pipeline/runid"])
    ended = {"activeDeadlineSeconds": 0} if "Terminate" in which else {}
    assert {**made["spec"], **ended} == recorded["spec"]
    assert made["metadata"]["generateName"] == recorded["metadata"]["generateName"]
    assert made["metadata"]["labels"].items() <= recorded["metadata"]["labels"].items()
    assert set(made["metadata"]["annotations"]) <= set(recorded["metadata"]["annotations"])


# (recorded Workflow, its step, whether Argo has the defaults, set_retry, what becomes of each attempt's pod)
DELETED = None
SUCCEEDED, FAILED = (
    {
        "phase": phase,
        "containerStatuses": [{"name": "main", "state": {"terminated": {"exitCode": code, "reason": why}}}],
    }
    for phase, code, why in (("Succeeded", 0, "Completed"), ("Failed", 1, "Error"))
)
CASES = [
    ("workflows.json", "fails, failed", "fail", True, None, [FAILED]),
    ("workflows.json", "deleted, succeeded with second attempts", "say-it", True, None, [DELETED, SUCCEEDED]),
    ("workflows.json", "retry, failed: set_retry(2) with KFP's templateDefaults", "fail-once", True, 2, [FAILED]),
    ("workflow-shapes-no-defaults.json", "", "fail-once", False, 2, [FAILED, SUCCEEDED]),
    ("workflow-shapes-no-defaults.json", "", "numbers", False, None, [SUCCEEDED]),
]


@recorded_only
@pytest.mark.parametrize(("file", "which", "step", "defaults", "retries", "ends"), CASES)
def test_a_steps_nodes_are_as_recorded(
    file: str, which: str, step: str, defaults: bool, retries: int | None, ends: list[Json | None]
) -> None:
    found = recording(file)
    workflow = found[which] if which else next(iter(found.values()))
    name = workflow["metadata"]["name"]
    nodes = played(shapes.Step(step, {}, retries=retries), ends, name=name, defaults=defaults)
    assert nodes.root.phase in FINAL
    recorded = {node["name"]: node for node in workflow["status"]["nodes"].values()}
    # the step may lie deeper in the recorded run than the double's steps do
    inside = next(one for one in recorded if one.rpartition(".")[2] == f"{step}{'(0)' if defaults else ''}")
    prefix = f"{name}(0).root(0)." if defaults else f"{name}.root."
    made = {one["name"]: one for one in nodes.status().values()}
    steps_own = [one for one in made if one.startswith(f"{prefix}{step}")]
    assert len(steps_own) >= 2
    for one in steps_own:
        theirs = recorded[inside.rpartition(f"{step}")[0] + one.removeprefix(prefix)]
        for field in ("type", "phase", "templateName", "message", "nodeFlag", "outputs", "displayName"):
            if not (field == "templateName" and retries is not None):
                assert made[one].get(field) == theirs.get(field), (one, field)


def played(step: shapes.Step, ends: list[Json | None], *, name: str = "r-x", defaults: bool = True) -> Nodes:
    """Return the nodes of a run with one step whose attempts' pods end like this."""
    nodes, attempts = Nodes(name, [step], defaults=defaults), iter(ends)
    pods: dict[str, Json] = {}
    for now in range(10):
        for wanted in nodes.operate(pods, float(now)):
            end = next(attempts)
            pods.update({wanted.node: {"status": end}} if end is not None else {})
    assert next(attempts, "none is left") == "none is left"
    return nodes


def test_a_pod_that_is_deleted_is_an_error_and_made_again_and_one_that_failed_is_not() -> None:
    assert played(shapes.Step("s", {}), [DELETED, DELETED, SUCCEEDED]).root.phase == "Succeeded"
    assert played(shapes.Step("s", {}), [DELETED, FAILED]).root.phase == "Failed"


def test_a_failed_pods_message_is_that_of_its_main_container() -> None:
    status = {"exitCode": 1, "reason": "Error", "message": "the job failed"}
    pod = {"status": {"phase": "Failed", "containerStatuses": [{"name": "main", "state": {"terminated": status}}]}}
    assert assessed(pod) == ("Failed", "main: Error (exit code 1): the job failed", 1)


def test_a_run_that_is_terminated_makes_no_further_attempt() -> None:
    nodes = Nodes("r-x", [shapes.Step("s", {})], defaults=True)
    nodes.operate({}, 0.0)
    assert nodes.operate({}, 1.0, ended=True) == []
    assert nodes.root.phase in FINAL
    assert "deadline" in nodes.root.message
