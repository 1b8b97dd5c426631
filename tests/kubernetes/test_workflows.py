"""Whether a run still waits for a step: what a job lives by while no launcher holds it."""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from tests.kfp_backend.argo import Nodes
from tests.kfp_backend.shapes import Step, workflow

RECORDINGS = "GPUQUOTA_KFP_RECORDINGS"
FAILED = {
    "phase": "Failed",
    "containerStatuses": [{"name": "main", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}],
}


def run(nodes: Nodes | None = None, **spec: Any) -> dict[str, Any]:
    made = workflow("digits-x", "8c")
    made["metadata"]["uid"] = "u"
    made["spec"] |= spec
    status = {"phase": "Running", "nodes": nodes.status() if nodes else {}}
    return {**made, "status": status}


def waits(found: dict[str, Any], place: str = "digits-x.root.train", uid: str = "u") -> bool:
    return workflows.awaits(workflows.read(found), uid, place)


def after(*ends: dict[str, Any] | None) -> Nodes:
    """The nodes of a run of two steps, one of which runs on, after these ends of the other's pods (None: deleted)."""
    nodes = Nodes("digits-x", [Step("train", {}), Step("other", {})], defaults=True)
    pods: dict[str, Any] = {}
    nodes.operate(pods, 0.0)
    other = next(name for name in nodes.by_name if ".other" in name and nodes.by_name[name].type == "Pod")
    pods[other] = {"status": {"phase": "Running"}}
    for now, end in enumerate(ends):
        pods |= {f"digits-x(0).root(0).train(0).executor({now})": {"status": end}} if end else {}
        nodes.operate(pods, now + 1.0)
    return nodes


def test_a_step_is_waited_for_while_its_pod_runs_and_between_two_attempts() -> None:
    assert waits(run(after({"phase": "Running"})))
    assert waits(run(after(None)))
    assert waits(run(after(None, None)))


def test_a_step_that_failed_for_good_is_not_waited_for_though_others_of_its_run_go_on() -> None:
    nodes = after(None, FAILED)
    assert nodes.root.phase == "Running"
    assert not waits(run(nodes))
    assert waits(run(nodes), "digits-x.root.other")


@pytest.mark.parametrize("spec", [{"activeDeadlineSeconds": 0}, {"shutdown": "Terminate"}, {"shutdown": "Stop"}])
def test_a_run_that_was_terminated_waits_for_nothing(spec: dict[str, Any]) -> None:
    assert not waits(run(after(None), **spec))


def test_a_run_with_a_deadline_of_its_own_is_not_a_terminated_one() -> None:
    assert waits(run(after(None), activeDeadlineSeconds=3600))


def test_a_run_that_has_ended_or_is_deleted_or_another_of_its_name_waits_for_nothing() -> None:
    found = run(after(None))
    assert not waits({**found, "status": {**found["status"], "phase": "Failed"}})
    assert not waits({**found, "metadata": {**found["metadata"], "deletionTimestamp": "2026-11-22T12:41:49Z"}})
    assert not waits(found, uid="another")


def test_nodes_that_argo_has_compressed_are_read_and_those_that_are_elsewhere_count_as_waiting() -> None:
    nodes = after(None, FAILED)
    packed = base64.b64encode(gzip.compress(json.dumps(nodes.status()).encode())).decode()
    assert not waits({**run(), "status": {"phase": "Running", "compressedNodes": packed}})
    assert waits({**run(), "status": {"phase": "Running", "offloadNodeStatusVersion": "fnv:1"}})
    assert waits({**run(), "status": {"phase": "Running", "compressedNodes": "%%"}})


@pytest.mark.skipif(not os.environ.get(RECORDINGS), reason=f"{RECORDINGS} names no recordings of a KFP backend")
@pytest.mark.parametrize(
    ("which", "place", "expected"),
    [
        ("plain, running", "make", True),
        ("fails, failed", "fail", False),
        ("long, running, just after Terminate in KFP", "say-it", False),
        ("deleted, succeeded with second attempts", "say-it", False),
    ],
)
def test_recorded_runs(which: str, place: str, expected: bool) -> None:
    found = json.loads((Path(os.environ[RECORDINGS]) / "workflows.json").read_text())[which]
    name, uid = found["metadata"]["name"], found["metadata"]["uid"]
    assert waits(found, f"{name}.root.{place}", uid) is expected
