"""GPUs of ElasticJobs whose workers do not become ready, through the real API server and controller."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.dsl.launcher.job_messages import JobMessages, conclusion
from tests.kubernetes.conftest import address_of
from tests.kubernetes.controlled import Controlled, is_leaving, is_over, pod_body
from tests.kubernetes.test_elastic_job import path_of
from tests.kubernetes.users import connection_of
from tools.devcluster import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

Object = dict[str, Any]
LATER = "--workers-ready-pause=600"
PULL = {"reason": "ImagePullBackOff", "message": "no such image"}


def stuck(**annotations: str) -> Object:
    """A template of pods whose containers do not start on KWOK's nodes until a test starts them."""
    notes = {"devcluster/does-not-start": "yes", **annotations}
    return {"metadata": {"annotations": notes}, "spec": {"containers": [{"name": "main", "image": "none"}]}}


def complain(controlled: Controlled, path: str, waiting: Object | None = None) -> None:
    """Report as the kubelet that the pod does not become ready."""
    controlled.until_bound(path)
    status = {"name": "main", "image": "none", "imageID": "", "ready": False, "restartCount": 0}
    statuses = [{**status, "state": {"waiting": waiting or PULL}}]
    controlled.cluster.api.patch(f"{path}/status", {"status": {"containerStatuses": statuses}})


def come_up(controlled: Controlled, path: str) -> None:
    controlled.until_bound(path)
    controlled.cluster.api.patch(f"{path}/status", {"status": {"phase": "Running"}})


def hurry(controlled: Controlled, job: str) -> None:
    """Set the job's timeout to one second, after the kubelet's reports have arrived."""
    controlled.cluster.api.patch(job, {"spec": {"workersReadyTimeoutSeconds": 1}})


def retried(job: Object, state: str = "requeueState") -> Object:
    return job.get("status", {}).get(state) or {}


def alive(controlled: Controlled, team: str) -> set[str]:
    return {name for name, pod in controlled.pods(team).items() if not is_over(pod) and not is_leaving(pod)}


def test_an_image_that_cannot_be_pulled_makes_room_for_others_and_the_job_fails_in_the_end(
    controlled: Controlled,
) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start("--workers-ready-tries=1")
    job = controlled.job(team, "typo", stuck())
    complain(controlled, path_of(team, "typo-0"))
    waits = controlled.job(team, "waits")
    controlled.until(job, lambda j: j.get("status", {}).get("notReady"))
    hurry(controlled, job)
    failed = controlled.until_phase(job, "Failed")["status"]
    assert "its worker did not start in 1 s: worker 0 on node" in failed["message"]
    assert (failed["restarts"], failed["evictions"], failed.get("exitCode")) == (0, 0, None)
    controlled.until_phase(waits, "Running")
    shown = KubernetesClient(connection_of(controlled.cluster.kubeconfig)).get_job(team, "typo")
    assert "ImagePullBackOff: no such image" in conclusion(shown)
    events = f"/api/v1/namespaces/{team}/events"
    controlled.wait(lambda: "WorkersNotReady" in {e["reason"] for e in controlled.cluster.api.items(events)})
    (reported,) = [e for e in controlled.cluster.api.items(events) if e["reason"] == "WorkersNotReady"]
    assert (reported["type"], reported["involvedObject"]["kind"]) == ("Warning", "ElasticJob")


def test_a_gang_of_which_one_worker_does_not_come_up_returns_to_the_queue_as_a_whole(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start(LATER)
    job = controlled.job(team, "gang", stuck(), gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
    come_up(controlled, path_of(team, "gang-0"))
    complain(controlled, path_of(team, "gang-1"))
    controlled.until(job, lambda j: j.get("status", {}).get("notReady") and j["status"]["phase"] == "Running")
    hurry(controlled, job)
    given = controlled.until(job, lambda j: retried(j) and j["status"]["phase"] == "Pending")
    assert given["status"]["gpus"] == 0
    assert "1 of its 2 workers did not start" in given["status"]["message"]
    shown = KubernetesClient(connection_of(controlled.cluster.kubeconfig)).get_job(team, "gang")
    assert shown.status.reason is not None
    assert shown.status.reason.code is ReasonCode.PODS_NOT_READY
    (line,) = JobMessages().lines(shown, 0.0)
    assert "ImagePullBackOff: no such image; it released its GPUs, and is retried at" in line
    controlled.until_phase(controlled.job(team, "other", gpus=2), "Running")


@pytest.mark.parametrize("way", ["template", "resumed"])
def test_who_mends_the_job_need_not_wait_for_the_next_try(controlled: Controlled, way: str) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start(LATER)
    job = controlled.job(team, "typo", stuck(), workersReadyTimeoutSeconds=1)
    controlled.until(job, lambda j: retried(j) and j["status"]["phase"] == "Pending")
    patient: Object = {"workersReadyTimeoutSeconds": 600}
    if way == "template":
        patient["template"] = {"metadata": {"annotations": {"devcluster/does-not-start": None}}}
    else:
        controlled.cluster.api.patch(job, {"spec": {"suspend": True}})
        controlled.until_phase(job, "Suspended")
        patient["suspend"] = False
    controlled.cluster.api.patch(job, {"spec": patient})
    controlled.until_bound(path_of(team, "typo-1"))
    controlled.until(job, lambda j: not retried(j))


def test_one_worker_more_that_does_not_come_up_is_given_back_and_the_job_goes_on(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team, other = controlled.team(guaranteed=0), controlled.team(guaranteed=0)
    controlled.start(LATER)
    job = controlled.job(team, "elastic", stuck(), gpus=1, minGpus=1, maxGpus=2, coolDownSeconds=0)
    come_up(controlled, path_of(team, "elastic-0"))
    complain(controlled, path_of(team, "elastic-1"))
    controlled.until(job, lambda j: j.get("status", {}).get("notReady") and j["status"]["phase"] == "Running")
    hurry(controlled, job)
    shrunk = controlled.until(job, lambda j: retried(j, "growState") and j["status"]["gpus"] == 1)
    assert "one more worker did not start" in shrunk["status"]["message"]
    assert retried(shrunk, "growState")["workers"] == [1]
    assert (shrunk["status"]["phase"], shrunk["status"]["restarts"]) == ("Running", 0)
    controlled.until_bound(controlled.pod(other, "borrower"))
    controlled.kill()
    controlled.start(LATER)
    controlled.cluster.api.delete(path_of(other, "borrower"))
    controlled.until_bound(controlled.pod(other, "next"))
    assert alive(controlled, team) == {"elastic-0"}, "it does not grow again at once, under another controller either"


def test_the_next_worker_goes_to_another_node_where_the_others_have_come_up(controlled: Controlled) -> None:
    nodes = controlled.add_nodes(3, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start("--workers-ready-pause=8")
    job = controlled.job(team, "elastic", stuck(), gpus=1, minGpus=1, maxGpus=2, coolDownSeconds=0)
    come_up(controlled, path_of(team, "elastic-0"))
    complain(controlled, path_of(team, "elastic-1"))
    controlled.until(job, lambda j: j.get("status", {}).get("notReady") and j["status"]["phase"] == "Running")
    used = {pod["spec"]["nodeName"] for pod in controlled.pods(team).values()}
    hurry(controlled, job)
    controlled.until(job, lambda j: retried(j, "growState"))
    controlled.cluster.api.patch(job, {"spec": {"workersReadyTimeoutSeconds": 600}})
    third = path_of(team, "elastic-2")
    controlled.wait(lambda: "elastic-2" in controlled.bound(team), lambda: controlled.log()[-3000:])
    assert {controlled.cluster.api.get(third)["spec"]["nodeName"], *used} == set(nodes)
    come_up(controlled, third)
    controlled.until(job, lambda j: not retried(j, "growState"))


def test_a_controller_that_is_killed_goes_on_counting_where_it_was(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start(LATER)
    job = controlled.job(team, "typo", stuck())
    complain(controlled, path_of(team, "typo-0"))
    (reported,) = controlled.until(job, lambda j: j.get("status", {}).get("notReady"))["status"]["notReady"]
    controlled.kill()
    controlled.start(LATER)
    controlled.until_phase(controlled.job(controlled.team(), "none", gpus=1), "Pending")
    assert controlled.cluster.api.get(job)["status"]["notReady"] == [reported]
    hurry(controlled, job)
    given = controlled.until(job, lambda j: retried(j) and j["status"]["phase"] == "Pending")
    controlled.kill()
    controlled.start(LATER)
    controlled.until_phase(controlled.job(team, "other"), "Running")
    assert retried(controlled.cluster.api.get(job)) == retried(given)


def test_what_was_decided_before_the_controller_was_killed_is_carried_out(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    job = controlled.job(team, "typo", stuck())
    complain(controlled, path_of(team, "typo-0"))
    controlled.until(job, lambda j: j.get("status", {}).get("notReady"))
    controlled.kill()
    state = {"count": 3, "time": "2026-11-22T07:00:00Z", "retryAt": "2199-01-01T00:00:00Z", "attempt": 1}
    controlled.cluster.api.patch(f"{job}/status", {"status": {"requeueState": {**state, "message": "no image"}}})
    controlled.start()
    controlled.until_phase(controlled.job(team, "other"), "Running")
    status = controlled.until_phase(job, "Pending")["status"]
    assert (status["requeueState"]["count"], status["message"]) == (3, "no image")


def test_a_job_that_comes_up_at_last_forgets_what_went_wrong(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start("--workers-ready-pause=1", "--workers-ready-tries=0")
    job = controlled.job(team, "late", stuck(), workersReadyTimeoutSeconds=1)
    controlled.until(job, retried)
    controlled.cluster.api.patch(job, {"spec": {"workersReadyTimeoutSeconds": 600}})

    def is_up() -> bool:
        for name in alive(controlled, team):
            with suppress(ApiError):  # one that is just being given back
                controlled.cluster.api.patch(f"{path_of(team, name)}/status", {"status": {"phase": "Running"}})
        return bool(controlled.cluster.api.get(job)["status"]["phase"] == "Running")

    controlled.wait(is_up, lambda: controlled.log()[-3000:])
    up = controlled.until(job, lambda j: not retried(j))
    assert (up["status"]["phase"], up["status"]["restarts"]) == ("Running", 0)


def test_a_job_may_say_itself_how_long_it_is_waited_for(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start("--workers-ready-timeout=1", "--workers-ready-pause=1", "--workers-ready-tries=0")
    patient = controlled.job(team, "patient", stuck(), workersReadyTimeoutSeconds=0)
    controlled.until_bound(path_of(team, "patient-0"))
    hasty = controlled.job(team, "hasty", stuck())
    controlled.until(hasty, lambda j: retried(j).get("count", 0) >= 2)
    assert not retried(controlled.cluster.api.get(patient))


def test_a_pod_that_does_not_come_up_is_taken_away_and_its_owner_makes_another(controlled: Controlled) -> None:
    nodes = controlled.add_nodes(2, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start("--workers-ready-timeout=3")
    template = {"metadata": {"labels": {"app": "x"}, **stuck()["metadata"]}, "spec": pod_body("x")["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    sets = f"/apis/apps/v1/namespaces/{team}/replicasets"
    controlled.cluster.api.create(sets, {"metadata": {"name": "s"}, "spec": spec})
    places: dict[str, str] = {}

    def been_on_both() -> bool:
        bound = {name: pod["spec"].get("nodeName", "") for name, pod in controlled.pods(team).items()}
        places.update((name, node) for name, node in bound.items() if node)
        return set(places.values()) == set(nodes)

    controlled.wait(been_on_both, lambda: controlled.log()[-3000:])
    assert len(places) >= 2
    assert f"did not start on node {next(iter(places.values()))} in 3 s" in controlled.log()
    controlled.cluster.api.delete(f"{sets}/s")


def test_a_pod_without_an_owner_that_does_not_come_up_gives_its_gpus_on(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    controlled.until_bound(controlled.pod(team, "alone", annotations=stuck()["metadata"]["annotations"]))
    controlled.kill()
    controlled.start("--workers-ready-timeout=1")
    controlled.wait(lambda: not controlled.pods(team))
    assert "NotReady: it did not start on node" in controlled.log()


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


def says(job: Object, what: str) -> bool:
    """Return the condition that `kubectl get ej`, `explain` and a step's log show."""
    conditions = job.get("status", {}).get("conditions", [])
    return any(c["type"] == "WorkersReady" and what in c.get("message", "") for c in conditions)


def test_on_a_real_node_the_sentence_is_the_kubelets(on_a_node: Controlled) -> None:
    team = on_a_node.team(guaranteed=2)
    on_a_node.start("--workers-ready-timeout=20", LATER)
    image = on_a_node.job(team, "image", {"spec": {"containers": [sleeper(image="localhost/none:1")]}})
    volumes = [{"name": "data", "configMap": {"name": "is-not-there"}}]
    main = sleeper(volumeMounts=[{"name": "data", "mountPath": "/data"}])
    patient = {"spec": {"containers": [main], "volumes": volumes}}
    mount = on_a_node.job(team, "mount", patient, workersReadyTimeoutSeconds=0)
    reported = on_a_node.until(image, lambda j: retried(j) and j["status"]["gpus"] == 0)["status"]["message"]
    assert "ErrImageNeverPull" in reported
    on_a_node.until(mount, lambda j: says(j, "FailedMount"))
    hurry(on_a_node, mount)
    reported = on_a_node.until(mount, lambda j: retried(j) and j["status"]["gpus"] == 0)["status"]["message"]
    assert 'FailedMount: MountVolume.SetUp failed for volume "data"' in reported
    assert '"is-not-there" not found' in reported


def test_on_a_real_node_an_init_container_takes_as_long_as_it_takes(on_a_node: Controlled) -> None:
    team = on_a_node.team(guaranteed=2)
    on_a_node.start()
    init = {**sleeper(command=["sleep", "8"]), "name": "prepare"}
    slow = on_a_node.job(team, "slow", {"spec": {"containers": [sleeper()], "initContainers": [init]}})
    prepared = {"type": "PodReadyToStartContainers", "status": "True"}
    pod = path_of(team, "slow-0")
    on_a_node.until(pod, lambda p: any(prepared.items() <= c.items() for c in p["status"].get("conditions", [])))
    hurry(on_a_node, slow)
    on_a_node.until(slow, lambda j: j.get("status", {}).get("phase") == "Running")
    assert set(on_a_node.pods(team)) == {"slow-0"}
    assert not retried(on_a_node.cluster.api.get(slow))
