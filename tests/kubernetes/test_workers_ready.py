"""GPUs of ElasticJobs whose workers do not come up, through the real API server and controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.cluster.kubernetes.client import KubernetesClient
from kfp_gpuquota.cluster.kubernetes.kubeconfig import from_file
from kfp_gpuquota.dsl.narration import Narrator, conclusion
from tests.kubernetes.conftest import address_of
from tests.kubernetes.controlled import Controlled, is_leaving, is_over, pod_body
from tests.kubernetes.test_elastic_job import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

Object = dict[str, Any]
SOON = ("--workers-ready-timeout=2", "--workers-ready-pause=1")
PULL = {"reason": "ImagePullBackOff", "message": "no such image"}


def stuck(**annotations: str) -> Object:
    """A template of pods whose containers do not start on KWOK's nodes, until a test says so."""
    notes = {"devcluster/does-not-start": "yes", **annotations}
    return {"metadata": {"annotations": notes}, "spec": {"containers": [{"name": "main", "image": "none"}]}}


def complain(controlled: Controlled, path: str, waiting: Object | None = None) -> None:
    """The kubelet says of the pod that it does not come up."""
    controlled.until_bound(path)
    status = {"name": "main", "image": "none", "imageID": "", "ready": False, "restartCount": 0}
    statuses = [{**status, "state": {"waiting": waiting or PULL}}]
    controlled.cluster.api.patch(f"{path}/status", {"status": {"containerStatuses": statuses}})


def come_up(controlled: Controlled, path: str) -> None:
    controlled.until_bound(path)
    controlled.cluster.api.patch(f"{path}/status", {"status": {"phase": "Running"}})


def retried(job: Object, state: str = "requeueState") -> Object:
    return job.get("status", {}).get(state) or {}


def alive(controlled: Controlled, team: str) -> set[str]:
    return {name for name, pod in controlled.pods(team).items() if not is_over(pod) and not is_leaving(pod)}


def test_an_image_that_cannot_be_pulled_gives_the_gpus_back_and_the_job_fails_in_the_end(
    controlled: Controlled,
) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start(*SOON, "--workers-ready-tries=2")
    job = controlled.job(team, "typo", stuck())
    complain(controlled, path_of(team, "typo-0"))
    waits = controlled.job(team, "waits")
    first = controlled.until(job, lambda j: retried(j).get("count") == 1 and j["status"]["phase"] == "Pending")
    assert first["status"]["gpus"] == 0
    assert "ImagePullBackOff: no such image; it gave its GPUs back" in retried(first)["message"]
    controlled.until_phase(waits, "Running")
    controlled.cluster.api.delete(waits)
    complain(controlled, path_of(team, "typo-1"))
    failed = controlled.until_phase(job, "Failed")["status"]
    assert "2 times in a row: worker 1 on node" in failed["message"]
    assert (failed["restarts"], failed["evictions"], failed.get("exitCode")) == (0, 0, None)
    shown = KubernetesClient(from_file(controlled.cluster.kubeconfig)).get_job(team, "typo")
    assert "ImagePullBackOff: no such image" in conclusion(shown)
    events = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
    told = [e for e in events if e["involvedObject"]["name"] == "typo" and e["reason"] == "WorkersNotReady"]
    assert {e["type"] for e in told} == {"Warning"}


def test_a_job_that_comes_up_at_last_forgets_what_went_wrong(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start(*SOON)
    job = controlled.job(team, "late", stuck())
    controlled.until(job, lambda j: retried(j).get("count") == 1)
    controlled.wait(lambda: alive(controlled, team) == {"late-1"})
    come_up(controlled, path_of(team, "late-1"))
    up = controlled.until(job, lambda j: j["status"]["phase"] == "Running" and not retried(j))
    assert up["status"]["restarts"] == 0


def test_a_gang_of_which_one_worker_does_not_come_up_returns_to_the_queue_as_a_whole(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start(*SOON, "--workers-ready-pause=600")
    job = controlled.job(team, "gang", stuck(), gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
    come_up(controlled, path_of(team, "gang-0"))
    complain(controlled, path_of(team, "gang-1"))
    given = controlled.until(job, lambda j: j.get("status", {}).get("gpus") == 0 and retried(j))
    assert "1 of its 2 workers did not come up" in given["status"]["message"]
    shown = KubernetesClient(from_file(controlled.cluster.kubeconfig)).get_job(team, "gang")
    assert shown.status.reason is not None
    assert shown.status.reason.code is ReasonCode.PODS_NOT_READY
    (line,) = Narrator().lines(shown, 0.0)
    assert "ImagePullBackOff: no such image; it gave its GPUs back, and is tried again at" in line
    controlled.until_phase(controlled.job(team, "other", gpus=2), "Running")


@pytest.mark.parametrize("way", ["template", "resumed"])
def test_who_mends_the_job_need_not_wait_for_the_next_try(controlled: Controlled, way: str) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start(*SOON, "--workers-ready-pause=600")
    job = controlled.job(team, "typo", stuck())
    controlled.until(job, lambda j: retried(j) and j["status"]["phase"] == "Pending")
    if way == "template":
        annotations = {"devcluster/does-not-start": None}
        controlled.cluster.api.patch(job, {"spec": {"template": {"metadata": {"annotations": annotations}}}})
        controlled.until(job, lambda j: j["status"]["phase"] == "Running" and not retried(j))
        return
    controlled.cluster.api.patch(job, {"spec": {"suspend": True}})
    controlled.until_phase(job, "Suspended")
    controlled.cluster.api.patch(job, {"spec": {"suspend": False}})
    controlled.wait(lambda: alive(controlled, team) == {"typo-1"})


def test_one_worker_more_that_does_not_come_up_is_given_back_and_the_job_goes_on(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team, other = controlled.team(guaranteed=0), controlled.team(guaranteed=0)
    controlled.start(*SOON, "--workers-ready-pause=600")
    job = controlled.job(team, "elastic", stuck(), gpus=1, minGpus=1, maxGpus=2, coolDownSeconds=0)
    come_up(controlled, path_of(team, "elastic-0"))
    complain(controlled, path_of(team, "elastic-1"))
    shrunk = controlled.until(job, lambda j: retried(j, "growState") and j["status"]["gpus"] == 1)
    assert "one more worker did not come up" in shrunk["status"]["message"]
    assert retried(shrunk, "growState")["workers"] == [1]
    assert (shrunk["status"]["phase"], shrunk["status"]["restarts"]) == ("Running", 0)
    controlled.until_bound(controlled.pod(other, "borrower"))
    controlled.kill()
    controlled.start(*SOON)
    controlled.cluster.api.delete(path_of(other, "borrower"))
    controlled.until_bound(controlled.pod(other, "next"))
    assert alive(controlled, team) == {"elastic-0"}, "it does not grow again at once, under another controller either"


def test_a_controller_that_is_killed_goes_on_counting_where_it_was(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start("--workers-ready-timeout=600")
    job = controlled.job(team, "typo", stuck())
    complain(controlled, path_of(team, "typo-0"))
    (told,) = controlled.until(job, lambda j: j.get("status", {}).get("notReady"))["status"]["notReady"]
    controlled.kill()
    controlled.start("--workers-ready-timeout=600")
    controlled.until_phase(controlled.job(controlled.team(), "none", gpus=1), "Pending")
    assert controlled.cluster.api.get(job)["status"]["notReady"] == [told]
    controlled.kill()
    controlled.start(*SOON, "--workers-ready-pause=600")
    given = controlled.until(job, lambda j: retried(j) and j["status"]["gpus"] == 0)
    controlled.kill()
    controlled.start(*SOON)
    controlled.until_phase(controlled.job(team, "other"), "Running")
    assert retried(controlled.cluster.api.get(job)) == retried(given)


def test_what_was_decided_before_the_controller_was_killed_is_carried_out(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start("--workers-ready-timeout=0")
    job = controlled.job(team, "typo", stuck())
    complain(controlled, path_of(team, "typo-0"))
    controlled.until(job, lambda j: j.get("status", {}).get("notReady"))
    controlled.kill()
    decided = {"count": 3, "time": "2026-11-22T07:00:00Z", "retryAt": "2199-01-01T00:00:00Z", "attempt": 1}
    controlled.cluster.api.patch(f"{job}/status", {"status": {"requeueState": {**decided, "message": "no image"}}})
    controlled.start("--workers-ready-timeout=0")
    controlled.until_phase(controlled.job(team, "other"), "Running")
    status = controlled.cluster.api.get(job)["status"]
    assert (status["phase"], status["requeueState"]["count"], status["message"]) == ("Pending", 3, "no image")


def test_a_job_may_say_itself_how_long_it_is_waited_for(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start(*SOON)
    patient = controlled.job(team, "patient", stuck(), workersReadyTimeoutSeconds=0)
    controlled.until_bound(path_of(team, "patient-0"))
    hasty = controlled.job(team, "hasty", stuck(), workersReadyTimeoutSeconds=1)
    controlled.until(hasty, lambda j: retried(j).get("count", 0) >= 2)
    assert not retried(controlled.cluster.api.get(patient))


def test_a_pod_that_does_not_come_up_makes_room_for_others_and_its_owner_makes_another(controlled: Controlled) -> None:
    nodes = controlled.add_nodes(2, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start("--workers-ready-timeout=3")
    body = pod_body("x")
    template = {"metadata": {"labels": {"app": "x"}, **stuck()["metadata"]}, "spec": body["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    controlled.cluster.api.create(
        f"/apis/apps/v1/namespaces/{team}/replicasets", {"metadata": {"name": "s"}, "spec": spec}
    )
    controlled.wait(lambda: controlled.bound(team))
    (first,) = controlled.bound(team)
    complain(controlled, path_of(team, first))
    tried = controlled.pods(team)[first]["spec"]["nodeName"]
    alone = controlled.pod(team, "alone", annotations=stuck()["metadata"]["annotations"])
    controlled.until_bound(alone)  # on the other node
    controlled.wait(lambda: first not in alive(controlled, team), lambda: controlled.log()[-3000:])
    controlled.wait(lambda: "it keeps its GPUs" in controlled.log(), lambda: controlled.log()[-3000:])
    assert "did not come up on node " + tried + " in 3 s: ImagePullBackOff: no such image" in controlled.log()
    controlled.cluster.api.delete(alone)
    controlled.wait(lambda: controlled.bound(team) - {"alone"}, lambda: controlled.log()[-3000:])
    (second,) = controlled.bound(team) - {"alone"}
    assert {controlled.pods(team)[second]["spec"]["nodeName"], tried} == set(nodes)
    controlled.cluster.api.delete(f"/apis/apps/v1/namespaces/{team}/replicasets/s")


@pytest.fixture
def on_a_node(kubelet_system: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    running = Controlled(kubelet_system, tmp_path, address=address_of(kubelet_system))
    yield running
    running.close()


def sleeper(**more: object) -> Object:
    return {
        "name": "main",
        "image": "localhost/base:1",
        "imagePullPolicy": "Never",
        "command": ["sleep", "300"],
        **more,
    }


def test_on_a_real_node_the_sentence_is_the_kubelets(on_a_node: Controlled) -> None:
    team = on_a_node.team(guaranteed=2)
    on_a_node.start("--workers-ready-timeout=6", "--workers-ready-pause=600")
    image = on_a_node.job(team, "image", {"spec": {"containers": [sleeper(image="localhost/none:1")]}})
    volumes = [{"name": "data", "configMap": {"name": "is-not-there"}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    mount = on_a_node.job(team, "mount", {"spec": {"containers": [sleeper(volumeMounts=mounts)], "volumes": volumes}})
    told = on_a_node.until(image, lambda j: retried(j) and j["status"]["gpus"] == 0)["status"]["message"]
    assert "ErrImageNeverPull" in told
    told = on_a_node.until(mount, lambda j: retried(j) and j["status"]["gpus"] == 0)["status"]["message"]
    assert 'FailedMount: MountVolume.SetUp failed for volume "data"' in told
    assert '"is-not-there" not found' in told


def test_on_a_real_node_an_init_container_takes_as_long_as_it_takes(on_a_node: Controlled) -> None:
    team = on_a_node.team(guaranteed=2)
    on_a_node.start("--workers-ready-timeout=4")
    init = {**sleeper(command=["sleep", "12"]), "name": "prepare"}
    slow = on_a_node.job(team, "slow", {"spec": {"containers": [sleeper()], "initContainers": [init]}})
    on_a_node.until(slow, lambda j: j.get("status", {}).get("phase") == "Running")
    assert set(on_a_node.pods(team)) == {"slow-0"}
    assert not retried(on_a_node.cluster.api.get(slow))
