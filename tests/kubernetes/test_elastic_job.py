"""ElasticJobs through the real API server and controller: their life on KWOK's nodes, real training on a real one."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.dsl.launcher.job_messages import JobMessages
from tests.kubernetes.conftest import address_of
from tests.kubernetes.controlled import Controlled, is_leaving, is_over
from tests.kubernetes.installation import jobs_of
from tests.kubernetes.running_workers import RunningWorkers, Worker
from tests.kubernetes.users import connection_of
from tests.polling import TIMEOUT_S
from tests.webhook_receiver import receiving
from tools.devcluster import ApiError
from tools.devcluster.node import host_python

if TYPE_CHECKING:
    from tools.devcluster import DevCluster

REPOSITORY = Path(__file__).parents[2]
STEPS = 1000


def alive(controlled: Controlled, team: str) -> dict[str, dict[str, Any]]:
    """Pods that have not ended and are not being deleted."""
    return {n: p for n, p in controlled.pods(team).items() if not is_over(p) and not is_leaving(p)}


@pytest.fixture
def workers(controlled: Controlled, tmp_path: Path) -> RunningWorkers:
    """The programs of the pods that a test starts."""
    running = RunningWorkers(controlled.cluster, tmp_path)
    controlled.on_close.append(running.stop)
    return running


def path_of(team: str, pod: str) -> str:
    return f"/api/v1/namespaces/{team}/pods/{pod}"


def test_a_job_has_no_pods_while_it_waits_and_its_gang_when_it_starts(controlled: Controlled) -> None:
    controlled.add_nodes(2, gpus=2)
    team = controlled.team(guaranteed=4)
    blocker = controlled.pod(team, "blocker", gpus=1)
    controlled.start()
    controlled.until_bound(blocker)
    job = controlled.job(team, "gang", gpus=4, gpusPerWorker=1)
    waits = controlled.until(job, lambda j: "needs 4" in j.get("status", {}).get("message", ""))
    assert waits["status"]["phase"] == "Pending"
    assert set(controlled.pods(team)) == {"blocker"}
    controlled.cluster.api.delete(blocker)
    controlled.until_phase(job, "Running")
    controlled.wait(lambda: len(controlled.bound(team)) == 4)
    pods = controlled.pods(team)
    assert set(pods) == {f"gang-{i}" for i in range(4)}
    assert {p["metadata"]["annotations"][labels.DEVICES] for p in pods.values()} == {"0", "1"}


def test_webhooks_are_notified_of_starts_and_preemptions_of_jobs_and_pods(
    controlled: Controlled, tmp_path: Path
) -> None:
    controlled.add_nodes(1, gpus=2)
    borrower, owner = controlled.team(guaranteed=0), controlled.team(guaranteed=2)
    folder = tmp_path / "notifications"
    folder.mkdir()
    with receiving() as (url, texts):
        (folder / "borrower.json").write_text(json.dumps({"url": url, "projects": [borrower]}))
        controlled.start(f"--notifications={folder}")
        controlled.until_phase(controlled.job(borrower, "train", gpus=1), "Running")
        pod = controlled.pod(borrower, "plain", gpus=1)
        controlled.until_bound(pod)
        controlled.job(owner, "first", gpus=2, gpusPerWorker=2)
        found = [texts.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert found[0].startswith(f"Job train of project {borrower} started: ")
    job, evicted = sorted(found[1:])
    assert job.startswith(f"Job train of project {borrower} was preempted: ")
    assert evicted.startswith(f"Pod plain of project {borrower} was preempted: ")


def test_the_cpu_of_its_template_is_planned_with(controlled: Controlled) -> None:
    nodes = controlled.add_nodes(2, gpus=4)  # of 64 cores each
    team = controlled.team(guaranteed=8)
    controlled.start()
    main = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "40"}}}
    asks = {"spec": {"containers": [main]}}
    job = controlled.job(team, "wide", asks, gpus=3, minGpus=2, gpusPerWorker=1)
    controlled.until_phase(job, "Running")
    controlled.wait(lambda: len(controlled.bound(team)) == 2)
    assert {p["spec"]["nodeName"] for p in controlled.pods(team).values()} == set(nodes)
    whole = controlled.job(team, "whole", {"spec": {"containers": [{**main, "resources": {"limits": {"cpu": 65}}}]}})
    reported = controlled.until(whole, lambda j: "65 CPUs" in j.get("status", {}).get("message", ""))
    assert reported["status"]["phase"] == "Pending"


def test_a_worker_is_told_who_it_is_and_restarts_nowhere(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    template = {"spec": {"containers": [{"name": "main", "image": "none", "env": [{"name": "MINE", "value": "1"}]}]}}
    controlled.until_phase(controlled.job(team, "one", template, gpus=2, gracePeriodSeconds=7), "Running")
    pod = controlled.pods(team)["one-0"]
    values = {v["name"]: v["value"] for v in pod["spec"]["containers"][0]["env"]}
    assert values["MINE"] == "1"
    assert (values["JOB_NAME"], values["POD_INDEX"], values["RUNAI_NUM_OF_GPUS"]) == ("one", "0", "2")
    assert values["ELASTIC_COORDINATOR"].startswith("https://127.0.0.1:")
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 7
    assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    secret = next(v["secret"]["secretName"] for v in pod["spec"]["volumes"] if v["name"] == "gpuquota-membership")
    assert set(controlled.cluster.api.get(f"/api/v1/namespaces/{team}/secrets/{secret}")["data"]) == {"token", "ca.crt"}


def test_a_job_grows_with_what_is_idle_and_gives_single_workers_back(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team, other = controlled.team(guaranteed=0), controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "elastic", gpus=1, minGpus=1, maxGpus=4, coolDownSeconds=0, gracePeriodSeconds=1)
    controlled.until(job, lambda j: j.get("status", {}).get("gpus") == 4)
    first = controlled.pod(other, "first")
    controlled.until_bound(first)
    controlled.until(job, lambda j: j["status"]["gpus"] == 3)
    assert "takes back" in controlled.cluster.api.get(job)["status"]["message"]
    controlled.until_bound(controlled.pod(other, "second"))
    controlled.until(job, lambda j: j["status"]["gpus"] == 2)
    assert "elastic-0" in alive(controlled, team)
    controlled.cluster.api.delete(first)
    controlled.until(job, lambda j: j["status"]["gpus"] == 3)
    assert "elastic-4" in alive(controlled, team)  # an index is used once


def test_workers_that_keep_away_from_other_pods_are_placed_by_kube_scheduler_and_none_is_made_again(
    controlled: Controlled,
) -> None:
    nodes = sorted(controlled.add_nodes(3, gpus=1))
    team = controlled.team(guaranteed=3)
    term = {"labelSelector": {"matchLabels": {"app": "hog"}}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [{**term, "namespaceSelector": {}}]}
    elsewhere = f"/api/v1/namespaces/{controlled.team('others')}/pods"
    hog = {"containers": [{"name": "main", "image": "none"}], "nodeName": nodes[0]}  # the first that is planned
    controlled.cluster.api.create(elsewhere, {"metadata": {"name": "hog", "labels": {"app": "hog"}}, "spec": hog})
    controlled.start()
    spec = {"containers": [{"name": "main", "image": "none"}], "affinity": {"podAntiAffinity": apart}}
    job = controlled.job(team, "apart", {"spec": spec}, gpus=2, minGpus=1, gpusPerWorker=1, gracePeriodSeconds=1)
    ready = controlled.until(job, lambda j: _condition(j, "WorkersReady").get("status") == "True")
    pods = controlled.pods(team)
    assert pods.keys() == {"apart-0", "apart-1"}
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == set(nodes[1:])
    assert ready["status"]["restarts"] == 0


def test_a_job_succeeds_with_its_workers_and_names_the_one_with_the_result(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "two", gpus=2, gpusPerWorker=1)
    controlled.until_phase(job, "Running")
    controlled.wait(lambda: all(p["status"].get("phase") == "Running" for p in controlled.pods(team).values()))
    controlled.finish(path_of(team, "two-1"))
    controlled.finish(path_of(team, "two-0"))
    status = controlled.until_phase(job, "Succeeded")["status"]
    assert (status["exitCode"], status["resultWorker"], status["gpus"]) == (0, "two-0", 0)
    assert {c["type"]: c["status"] for c in status["conditions"]}["Complete"] == "True"
    controlled.kill()
    controlled.start()
    assert controlled.cluster.api.get(job)["status"] == status


def test_a_failed_worker_fails_the_job_and_ends_the_others(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "two", gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    controlled.until(path_of(team, "two-1"), lambda p: p["status"].get("phase") == "Running")
    controlled.finish(path_of(team, "two-1"), exit_code=3)
    status = controlled.until_phase(job, "Failed")["status"]
    assert status["exitCode"] == 3
    assert "worker 1 ended with exit code 3" in status["message"]
    assert set(controlled.pods(team)) == {"two-1"}  # its log can still be read


def test_a_suspended_job_gives_everything_back_and_resumes(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "paused", gpus=2, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    controlled.cluster.api.patch(job, {"spec": {"suspend": True}})
    controlled.until_phase(job, "Suspended")
    controlled.wait(lambda: not controlled.pods(team))
    controlled.until_bound(controlled.pod(team, "meanwhile", gpus=2))
    controlled.cluster.api.delete(path_of(team, "meanwhile"))
    controlled.cluster.api.patch(job, {"spec": {"suspend": False}})
    controlled.until_phase(job, "Running")
    assert set(controlled.pods(team)) == {"paused-1"}


def test_a_job_ends_when_it_has_run_for_its_longest_time_and_goes_when_its_time_is_over(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    job = controlled.job(team, "short", maxRuntimeSeconds=2, ttlSecondsAfterFinished=1, gracePeriodSeconds=1)
    status = controlled.until_phase(job, "Failed")["status"]
    assert status["message"] == "it has run for 2 s, which is its maximum run time"
    controlled.cluster.api.until_gone(job)


def test_a_job_whose_launcher_is_gone_is_cancelled(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    job = controlled.job(team, "held", gracePeriodSeconds=1, lease={"holder": "step", "durationSeconds": 3})
    controlled.until_phase(job, "Running")
    status = controlled.until_phase(job, "Cancelled")["status"]
    assert "launcher has ended" in status["message"]


@pytest.mark.slow
def test_a_lease_does_not_end_while_nobody_can_renew_it(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "held", gracePeriodSeconds=1, lease={"holder": "step", "durationSeconds": 9})
    controlled.until_phase(job, "Running")
    with controlled.cluster.away("kube-apiserver"):
        time.sleep(14)  # how long it is away is what is tested: longer than the lease
    controlled.cluster.await_healthy()
    controlled.cluster.api.patch(job, {"spec": {"lease": {"holder": "step", "durationSeconds": 60}}})
    controlled.until_bound(controlled.pod(team, "after"))
    assert controlled.cluster.api.get(job)["status"]["phase"] == "Running"


def test_pods_that_are_refused_end_in_a_condition_and_are_tried_again(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    quotas = f"/api/v1/namespaces/{team}/resourcequotas"
    controlled.cluster.api.create(quotas, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    controlled.until(f"{quotas}/none", lambda q: "hard" in q.get("status", {}))
    controlled.start()
    job = controlled.job(team, "refused")
    reported = controlled.until(job, lambda j: _condition(j, "WorkersReady").get("reason") == "PodRefused")
    assert "exceeded quota" in _condition(reported, "WorkersReady")["message"]
    controlled.cluster.api.delete(f"{quotas}/none")
    controlled.until_phase(job, "Running")


def test_an_image_that_cannot_be_pulled_ends_in_a_condition(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    job = controlled.job(team, "typo")
    controlled.until_phase(job, "Running")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    pod = path_of(team, "typo-0")
    statuses = [{**s, "state": waiting} for s in controlled.cluster.api.get(pod)["status"]["containerStatuses"]]
    controlled.cluster.api.patch(f"{pod}/status", {"status": {"containerStatuses": statuses}})
    reported = controlled.until(job, lambda j: _condition(j, "WorkersReady").get("reason") == "ImagePullBackOff")
    assert "no such image" in _condition(reported, "WorkersReady")["message"]


def test_a_deleted_job_takes_its_pods_along(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    job = controlled.job(team, "gone", gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    controlled.cluster.api.delete(job)
    controlled.wait(lambda: not controlled.pods(team))
    controlled.until_phase(controlled.job(team, "gone", gracePeriodSeconds=1), "Running")


def test_a_restarted_controller_carries_on_with_running_jobs(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "long", gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    before = {n: p["metadata"]["uid"] for n, p in controlled.pods(team).items()}
    controlled.kill()
    controlled.start()
    waiting = controlled.job(team, "next")
    controlled.until(waiting, lambda j: j.get("status", {}).get("message"))
    assert {n: p["metadata"]["uid"] for n, p in controlled.pods(team).items()} == before
    for name in before:
        controlled.finish(path_of(team, name))
    controlled.until_phase(job, "Succeeded")
    controlled.until_phase(waiting, "Running")


def test_a_restarted_controller_remembers_who_had_finished(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "two", gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    for name in ("two-0", "two-1"):
        controlled.until(path_of(team, name), lambda p: p["status"].get("phase") == "Running")
    controlled.finish(path_of(team, "two-0"))
    controlled.until(job, lambda j: j["status"]["ended"] == [0])
    controlled.kill()
    controlled.finish(path_of(team, "two-1"), exit_code=137)
    controlled.start()
    status = controlled.until_phase(job, "Succeeded")["status"]  # the result is there; the other one was only killed
    assert status["resultWorker"] == "two-0"


@pytest.mark.parametrize("deleted", [True, False])
def test_a_restarted_controller_knows_a_released_worker_from_one_that_has_finished(
    controlled: Controlled, workers: RunningWorkers, *, deleted: bool
) -> None:
    """A released worker ends with 0 too, perhaps before its pod's deletion and the new generation were stored."""
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "two", gpus=1, maxGpus=2, minGpus=1, coolDownSeconds=0, gracePeriodSeconds=1)

    def start(name: str) -> Worker:
        return workers.start(controlled.until(path_of(team, name), _runs))

    stays, leaves = start("two-0"), start("two-1")
    controlled.until(job, lambda j: len(j["status"].get("ranks", ())) == 2)
    controlled.kill()
    leaves.close()
    stays.generation, stays.members = stays.generation + 1, (stays.id,)  # agreed on just before
    path = path_of(team, "two-1")
    if deleted:
        controlled.cluster.api.patch(path, {"metadata": {"finalizers": ["example.org/slow"]}})
        controlled.cluster.api.delete(path)
    controlled.finish(path)
    controlled.start()
    start("two-2")
    controlled.until(job, lambda j: sorted(j["status"]["ranks"]) == [0, 2])
    if deleted:
        controlled.cluster.api.patch(path, {"metadata": {"finalizers": None}})
    for name in ("two-0", "two-2"):
        controlled.finish(path_of(team, name))
    assert controlled.until_phase(job, "Succeeded")["status"]["resultWorker"] in {"two-0", "two-2"}
    assert set(controlled.pods(team)) <= {"two-0", "two-1", "two-2"}


def test_a_worker_that_was_killed_while_no_controller_ran_is_replaced_and_the_others_train_on(
    controlled: Controlled, workers: RunningWorkers
) -> None:
    """The lost one is the oldest: it is listed before those that are alive."""
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "two", gpus=2, gpusPerWorker=1, minGpus=1, maxGpus=2, gracePeriodSeconds=1)
    started = [workers.start(controlled.until(path_of(team, f"two-{n}"), _runs)) for n in (0, 1)]
    controlled.until(job, lambda j: len(j["status"].get("ranks", ())) == 2)
    controlled.kill()
    started[0].close()
    controlled.finish(path_of(team, "two-0"), exit_code=137)
    controlled.start()
    controlled.until(path_of(team, "two-2"), _runs)
    status = controlled.until(job, lambda j: j["status"].get("restarts"))["status"]
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 1)
    assert alive(controlled, team).keys() == {"two-1", "two-2"}


def test_a_jobs_progress_is_its_first_workers_and_after_the_last_step_it_gets_no_worker_more(
    controlled: Controlled, workers: RunningWorkers
) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "two", gpus=1, maxGpus=2, minGpus=1, coolDownSeconds=0, gracePeriodSeconds=1)
    first = workers.start(controlled.until(path_of(team, "two-0"), _runs))
    controlled.until(job, lambda j: j["status"].get("ranks") == [0])
    measured = {"throughput": 40.0, "workers": 1, "batch_size": 64, "noise_scale": 200.0}
    first.report(
        "ProgressReported",
        step=7,
        epoch=1,
        total_steps=9,
        metrics={"loss": 0.5},
        not_finite={"norm": "-inf"},
        **measured,
    )
    status = controlled.until(job, lambda j: j["status"].get("progress"))["status"]
    assert (status["progress"]["step"], status["progress"]["metrics"]) == (7, {"loss": 0.5})
    assert status["progress"]["notFinite"] == {"norm": "-inf"}
    assert status["progress"]["sizes"] == [{"workers": 1, "throughput": 40.0, "batchSize": 64}]
    assert status["progress"]["noiseScale"] == 200.0
    first.report("TrainingFinished", step=9)
    controlled.wait(lambda: "finished its training with step 9" in controlled.log(), controlled.log)
    controlled.add_nodes(1, gpus=1)  # nobody uses it
    other = controlled.pod(team, "other")
    controlled.until_bound(other)
    assert alive(controlled, team).keys() == {"two-0", "other"}
    controlled.finish(path_of(team, "two-0"))
    controlled.until_phase(job, "Succeeded")


@pytest.mark.parametrize("controlled_at_the_end", [True, False])
def test_a_worker_that_fails_after_another_has_ended_well_fails_the_job(
    controlled: Controlled, *, controlled_at_the_end: bool
) -> None:
    """Also where both end while no controller runs."""
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    job = controlled.job(team, "two", gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    for name in ("two-0", "two-1"):
        controlled.until(path_of(team, name), _runs)
    if not controlled_at_the_end:
        controlled.kill()
    controlled.finish(path_of(team, "two-0"))
    if controlled_at_the_end:
        controlled.until(job, lambda j: j["status"]["ended"] == [0])
    controlled.finish(path_of(team, "two-1"), exit_code=1)
    if not controlled_at_the_end:
        controlled.start()
    status = controlled.until_phase(job, "Failed")["status"]
    assert status["exitCode"] == 1
    assert "worker 1 ended with exit code 1, after another one had ended with 0" in status["message"]


def _condition(job: dict[str, Any], kind: str) -> dict[str, Any]:
    found = (c for c in job.get("status", {}).get("conditions", []) if c["type"] == kind)
    return next(found, {})


def test_a_job_that_can_never_be_is_told_so_by_the_api_server(controlled: Controlled) -> None:
    team = controlled.team(guaranteed=1)
    with pytest.raises(ApiError, match="minGpus is 3"):
        controlled.cluster.api.create(
            jobs_of(team),
            {
                "apiVersion": labels.API_VERSION,
                "kind": "ElasticJob",
                "metadata": {"name": "x"},
                "spec": {"gpus": 1, "minGpus": 3, "template": {"spec": {"containers": [{"name": "m"}]}}},
            },
        )


def test_real_training_shrinks_and_grows_for_another_team_and_loses_no_step(
    kubelet_system: DevCluster, tmp_path: Path
) -> None:
    controlled = Controlled(kubelet_system, tmp_path, address=address_of(kubelet_system))
    try:
        _shrink_and_grow(controlled, tmp_path / "go")
    finally:
        controlled.close()


def _shrink_and_grow(controlled: Controlled, go: Path) -> None:
    team, other = controlled.team(guaranteed=0), controlled.team(guaranteed=1)
    controlled.start()
    size = {"gpus": 1, "minGpus": 1, "maxGpus": 2, "coolDownSeconds": 1, "gracePeriodSeconds": 20}
    job = controlled.job(team, "digits", training(STEPS, go), **size)
    controlled.until(job, lambda j: _steps(j) > 20 and j["status"]["gpus"] == 2)
    sleeper = {"image": "localhost/base:1", "imagePullPolicy": "Never", "command": ["sleep", "300"]}
    limits = {"limits": {labels.GPU_RESOURCE: "1"}}
    path = controlled.pod(other, "urgent", containers=[{"name": "main", **sleeper, "resources": limits}])
    controlled.until(path, lambda p: p["status"].get("phase") == "Running")
    shrunk = controlled.until(job, lambda j: j["status"]["gpus"] == 1 and _sizes(j)[-1:] == [(2, 1)])
    controlled.kill()  # training continues without it, and the next one receives its size from the workers
    controlled.cluster.api.delete(path)
    controlled.start()
    grown = controlled.until(job, lambda j: _sizes(j)[-1:] == [(1, 2)] and _steps(j) > _steps(shrunk))
    assert grown["status"]["restarts"] == 0
    go.touch()
    done = controlled.until_phase(job, "Succeeded")
    assert _steps(done) == STEPS
    assert done["status"]["restarts"] == done["status"]["evictions"] == 0
    assert (2, 1) in _sizes(done)
    assert _sizes(done)[-1] == (1, 2)  # the one that it grew by under another controller
    assert not any(change.get("lostSteps") for change in done["status"]["resizes"])
    client = KubernetesClient(connection_of(controlled.cluster.kubeconfig))
    story = JobMessages().lines(client.get_job(team, "digits"), 0.0)
    assert any(re.match(rf"shrunk from 2 to 1 GPUs: project {other} takes back .* \(paused", line) for line in story)
    assert re.findall(r"(\d+) steps lost", controlled.log()).count("0") == controlled.log().count("steps lost")
    log = controlled.cluster.container_log(team, done["status"]["resultWorker"], "main")
    assert f"step {STEPS}" in log, json.dumps(done["status"])


def training(steps: int, go: Path | None = None) -> dict[str, Any]:
    """A training in a pod, with this machine's Python and torch; it ends soon once the file `go` exists."""
    volumes, mounts = host_python()
    if go is not None:
        volumes.append({"name": "go", "hostPath": {"path": str(go.parent)}})
        mounts.append({"name": "go", "mountPath": str(go.parent), "readOnly": True})
    program = ("-u", "-m", "tests.elastic_runtime.paced_training", str(steps), *([str(go)] if go else []))
    container = {
        "name": "main",
        "image": "localhost/base:1",
        "imagePullPolicy": "Never",
        "command": [sys.executable, *program],
        "env": [
            {"name": "PYTHONPATH", "value": str(REPOSITORY)},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "PATH", "value": "/usr/bin:/bin"},
        ],
        "volumeMounts": mounts,
    }
    return {"spec": {"containers": [container], "volumes": volumes}}


def _runs(pod: dict[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def _sizes(job: dict[str, Any]) -> list[tuple[int, int]]:
    return [(change["fromGpus"], change["toGpus"]) for change in job["status"].get("resizes", [])]


def _steps(job: dict[str, Any]) -> int:
    return int((job.get("status", {}).get("progress") or {}).get("step", 0))
