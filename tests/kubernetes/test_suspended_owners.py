"""Jobs, JobSets, TrainJobs and AppWrappers give way by their `suspend`: no failure counts, and a user's suspend stays.

Jobs are those of the real Job controller. The kinds of JobSet, Trainer and AppWrapper are minimal schemas of our own,
from their API documentation, and `trainer.py` plays their controllers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.suspension import suspending
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import KINDS, Suspendable, suspension
from kfp_gpuquota.cluster.kubernetes.suspension.resuming import Resuming
from tests.kubernetes.controlled import Controlled, pod_body
from tests.kubernetes.detached import Unanswered, detached
from tests.kubernetes.installation import batch_jobs_of
from tests.kubernetes.trainer import AppWrappers, Trainer, TrainingOperator, install_kinds, path_of
from tests.polling import TIMEOUT_S

Object = dict[str, Any]
BY_KIND = {kind.kind: kind for kind in KINDS}
IGNORED = {"type": "DisruptionTarget", "status": "True"}
REASON = "project owner takes back its guaranteed GPUs"


def job_spec(pods: int, *, gated: bool = True, **more: Any) -> Object:
    spec = {**pod_body("x", gated=gated)["spec"], "restartPolicy": "Never"}
    return {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": {"spec": spec}, **more}


def job_path(team: str, name: str = "train") -> str:
    return f"{batch_jobs_of(team)}/{name}"


@pytest.fixture
def teams(controlled: Controlled) -> tuple[str, str]:
    """A team that borrows, and the owner of the two GPUs of the only node."""
    return controlled.borrower_and_owner(2)


def run_job(controlled: Controlled, team: str, pods: int = 2, **more: Any) -> str:
    """Create a Job; its path, when all its pods are bound."""
    spec = job_spec(pods, completionMode="Indexed", **more)
    path = job_path(team)
    controlled.cluster.api.create(batch_jobs_of(team), {"metadata": {"name": "train"}, "spec": spec})
    controlled.wait(lambda: len(controlled.bound(team)) == pods, lambda: controlled.log()[-3000:])
    return path


def reasons(controlled: Controlled, team: str, kind: str) -> list[str]:
    events = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
    ours = (one for one in events if one.get("source", {}).get("component") == "gpuquota-controller")
    return [event["reason"] for event in ours if event["involvedObject"]["kind"] == kind]


def test_a_job_gives_way_without_a_failure_and_runs_again(controlled: Controlled, teams: tuple[str, str]) -> None:
    borrower, owner = teams
    controlled.start()
    path = run_job(controlled, borrower)
    controlled.pod(owner, "back", gpus=2)
    controlled.until_bound(f"/api/v1/namespaces/{owner}/pods/back")
    controlled.wait(lambda: len(controlled.waiting(borrower)) == 2, lambda: controlled.log()[-3000:])
    job = controlled.until(path, lambda one: labels.SUSPENDED not in one["metadata"].get("labels", {}))
    assert not job["spec"]["suspend"]
    assert not job["status"].get("failed"), job["status"]
    controlled.wait(lambda: set(reasons(controlled, borrower, "Job")) == {"Suspended", "Resumed"})
    assert "Evicted" not in reasons(controlled, borrower, "Pod")
    controlled.kill()
    controlled.start()
    controlled.cluster.api.delete(f"/api/v1/namespaces/{owner}/pods/back", 0)
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2, lambda: controlled.log()[-3000:])
    assert not controlled.cluster.api.get(path)["status"].get("failed")


def test_a_controller_that_was_killed_after_the_suspension_resumes(
    controlled: Controlled, teams: tuple[str, str]
) -> None:
    borrower, _ = teams
    controlled.start()
    path, api = run_job(controlled, borrower), controlled.cluster.api
    controlled.kill()
    job = controlled.until(path, lambda one: one["status"].get("ready") == 2)  # its status changes no more
    api.patch(path, suspension(BY_KIND["Job"], msgspec.convert(job, Suspendable), REASON).body)
    controlled.until(path, lambda job: "Suspended" in str(job["status"].get("conditions")))
    controlled.start()
    job = controlled.until(path, lambda one: not one["spec"]["suspend"])
    assert labels.SUSPENDED not in {**job["metadata"].get("labels", {}), **job["metadata"].get("annotations", {})}
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2, lambda: controlled.log()[-3000:])


def test_what_a_user_has_suspended_stays_so(controlled: Controlled, teams: tuple[str, str]) -> None:
    """Also if the user takes over a suspension of ours, by removing the label."""
    borrower, _ = teams
    controlled.start()
    path, api = run_job(controlled, borrower), controlled.cluster.api
    api.patch(path, {"spec": {"suspend": True}})
    controlled.wait(lambda: not controlled.pods(borrower))
    other = job_path(borrower, "other")
    taken = {"name": "other", "annotations": {labels.SUSPENDED: REASON}}
    api.create(batch_jobs_of(borrower), {"metadata": taken, "spec": job_spec(1, suspend=True)})
    controlled.kill()
    controlled.start()
    third = {"name": "third", "labels": {labels.SUSPENDED: "true"}}
    api.create(batch_jobs_of(borrower), {"metadata": third, "spec": job_spec(1, suspend=True)})
    controlled.until(job_path(borrower, "third"), lambda job: not job["spec"]["suspend"])  # which a tenant may want
    assert api.get(path)["spec"]["suspend"]
    assert api.get(other)["spec"]["suspend"]


def test_a_job_of_which_other_pods_go_on_loses_one_by_eviction(controlled: Controlled, teams: tuple[str, str]) -> None:
    borrower, owner = teams
    controlled.start()
    spec = job_spec(2, backoffLimit=6)  # a work queue: each pod alone
    controlled.cluster.api.create(batch_jobs_of(borrower), {"metadata": {"name": "train"}, "spec": spec})
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2)
    controlled.until_bound(controlled.pod(owner, "back"))
    assert len(controlled.bound(borrower)) == 1
    assert not controlled.cluster.api.get(job_path(borrower))["spec"].get("suspend")
    assert "Evicted" in reasons(controlled, borrower, "Pod")


def test_a_job_that_would_fail_by_one_eviction_gives_way_as_a_whole(
    controlled: Controlled, teams: tuple[str, str]
) -> None:
    borrower, owner = teams
    controlled.start()
    api, path = controlled.cluster.api, job_path(borrower)
    api.create(batch_jobs_of(borrower), {"metadata": {"name": "train"}, "spec": job_spec(2)})
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2)
    controlled.until_bound(controlled.pod(owner, "back"))
    controlled.wait(lambda: (len(controlled.bound(borrower)), len(controlled.waiting(borrower))) == (1, 1))
    job = controlled.until(path, lambda one: labels.SUSPENDED not in one["metadata"].get("labels", {}))
    assert not job["status"].get("failed"), job["status"]
    assert "Evicted" not in reasons(controlled, borrower, "Pod")


IGNORE = {"action": "Ignore", "onPodConditions": [IGNORED]}
FAIL = {"action": "FailJob", "onPodConditions": [IGNORED]}


def on_exit(operator: str, *codes: int) -> Object:
    return {"action": "FailJob", "onExitCodes": {"operator": operator, "values": codes}}


@pytest.mark.parametrize(
    ("spec", "status", "survives"),
    [
        ({}, {}, True),  # of at most 6
        ({}, {"failed": 5}, False),
        ({"backoffLimit": 1}, {}, False),
        ({"backoffLimit": 2}, {}, True),
        ({"backoffLimit": 2}, {"failed": "x"}, True),
        ({"backoffLimit": 2}, {"terminating": 1}, True),  # they count as failed already
        ({"backoffLimit": 2, "podReplacementPolicy": "Failed"}, {"terminating": 1}, False),
        ({"backoffLimitPerIndex": 0, "backoffLimit": 9}, {}, False),
        ({"backoffLimitPerIndex": 1, "backoffLimit": 99}, {}, True),
        ({"backoffLimitPerIndex": 1, "backoffLimit": 1}, {}, False),  # both hold
        ({"backoffLimitPerIndex": 1, "backoffLimit": 99}, {"failed": 1}, False),  # it may be of the same index
        ({"backoffLimit": 0, "podFailurePolicy": {"rules": [IGNORE]}}, {}, True),
        ({"backoffLimit": 0, "podFailurePolicy": {"rules": [on_exit("In", 42), IGNORE, FAIL]}}, {}, True),
        ({"backoffLimit": 9, "podFailurePolicy": {"rules": [on_exit("In", 143), IGNORE]}}, {}, False),
        ({"backoffLimit": 9, "podFailurePolicy": {"rules": [on_exit("NotIn", 1, 2), IGNORE]}}, {}, False),
        ({"backoffLimit": 9, "podFailurePolicy": {"rules": [FAIL, IGNORE]}}, {}, False),  # the first one applies
        ({"backoffLimit": 0, "podFailurePolicy": {"rules": [{**IGNORE, "action": "Count"}, IGNORE]}}, {}, False),
        ({"backoffLimit": 0, "podFailurePolicy": {"rules": None}}, {}, False),
    ],
)
def test_a_job_survives_evictions_within_its_limit(spec: Object, status: Object, survives: bool) -> None:
    assert found(spec=spec, status=status).survives(BY_KIND["Job"], 2) is survives


def test_of_a_job_with_a_limit_for_each_index_the_failures_of_the_pods_index_count() -> None:
    job = found(spec={"backoffLimit": 99, "backoffLimitPerIndex": 2}, status={"failed": 9})
    for failures, survives in (("1", True), ("2", False), ("", False), ("x", False)):
        pod = found(metadata={"annotations": {"batch.kubernetes.io/job-index-failure-count": failures}})
        assert job.survives(BY_KIND["Job"], 1, pod.index_failures) is survives


def test_of_the_training_operators_jobs_only_an_elastic_one_survives_the_loss_of_a_worker() -> None:
    assert not found(spec={"runPolicy": {"backoffLimit": 9}}).survives(BY_KIND["PyTorchJob"], 1)
    assert found(spec={"elasticPolicy": {"maxRestarts": 3}}).survives(BY_KIND["PyTorchJob"], 1)


def test_a_train_job_gives_way_under_its_own_name(controlled: Controlled, teams: tuple[str, str]) -> None:
    """Neither its Job nor its JobSet is suspended beside it, since the controllers above would undo that."""
    borrower, owner = teams
    api = controlled.cluster.api
    install_kinds(api)
    trainer = Trainer(api, borrower, job_spec(2, completionMode="Indexed"))
    controlled.on_close.append(trainer.close)
    controlled.start()
    path = path_of("trainjobs", borrower, "llm")
    body = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "llm"}}
    api.create(path_of("trainjobs", borrower), {**body, "spec": {"runtimeRef": {"name": "torch-distributed"}}})
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2, lambda: controlled.log()[-3000:])
    controlled.pod(owner, "back", gpus=2)
    controlled.until_bound(f"/api/v1/namespaces/{owner}/pods/back")
    controlled.wait(lambda: len(controlled.waiting(borrower)) == 2, lambda: controlled.log()[-3000:])
    controlled.wait(lambda: set(reasons(controlled, borrower, "TrainJob")) == {"Suspended", "Resumed"})
    assert not [*reasons(controlled, borrower, "Job"), *reasons(controlled, borrower, "JobSet")]
    assert "llm" in controlled.log().split("Suspended: ", 1)[0].rpartition("TrainJob")[2]
    controlled.cluster.api.delete(f"/api/v1/namespaces/{owner}/pods/back", 0)
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2, lambda: controlled.log()[-3000:])
    assert trainer.changed == ["suspend", "resume"]
    assert "Evicted" not in reasons(controlled, borrower, "Pod")
    api.delete(path)


@pytest.mark.parametrize("gpus", [1, 2])
def test_an_app_wrapper_gives_way_as_a_whole(controlled: Controlled, teams: tuple[str, str], gpus: int) -> None:
    """An eviction would be a failed pod, after which it counts a retry and deletes all that it wraps.

    Also if one of its Jobs is stopped: a Job with `backoffLimit: 0` would fail by that.
    """
    borrower, owner = teams
    api = controlled.cluster.api
    install_kinds(api)
    wrappers = AppWrappers(api, borrower)
    controlled.on_close.append(wrappers.close)
    controlled.start()
    jobs = [{"metadata": {"name": name}, "spec": job_spec(1)} for name in ("one", "two")]
    body = {"apiVersion": "workload.codeflare.dev/v1beta2", "kind": "AppWrapper", "metadata": {"name": "all"}}
    path = path_of("appwrappers", borrower, "all")
    api.create(path_of("appwrappers", borrower), {**body, "spec": {"components": [{"template": job} for job in jobs]}})
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2, lambda: controlled.log()[-3000:])
    controlled.until_bound(controlled.pod(owner, "back", gpus=gpus))
    controlled.wait(lambda: len(controlled.waiting(borrower)) == gpus, lambda: controlled.log()[-3000:])
    controlled.wait(lambda: wrappers.phases == ["Running", "Suspending", "Suspended", "Running"])
    controlled.wait(lambda: set(reasons(controlled, borrower, "AppWrapper")) == {"Suspended", "Resumed"})
    assert not reasons(controlled, borrower, "Job")
    assert labels.SUSPENDED not in str(api.get(path)["metadata"].get("labels"))
    assert "Evicted" not in reasons(controlled, borrower, "Pod")
    api.delete(path)


def test_a_job_of_the_training_operator_gives_way_as_a_gang(controlled: Controlled, teams: tuple[str, str]) -> None:
    borrower, owner = teams
    api = controlled.cluster.api
    install_kinds(api)
    operator = TrainingOperator(api, borrower)
    controlled.on_close.append(operator.close)
    controlled.start()
    replicas = {"replicas": 1, "template": {"spec": {**pod_body("x")["spec"], "restartPolicy": "Never"}}}
    body = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": "train"}}
    path = path_of("tfjobs", borrower, "train")
    api.create(
        path_of("tfjobs", borrower), {**body, "spec": {"tfReplicaSpecs": {"Chief": replicas, "Worker": replicas}}}
    )
    controlled.wait(lambda: len(controlled.bound(borrower)) == 2, lambda: controlled.log()[-3000:])
    controlled.until_bound(controlled.pod(owner, "back", gpus=2))
    controlled.wait(lambda: len(controlled.waiting(borrower)) == 2, lambda: controlled.log()[-3000:])
    controlled.wait(lambda: set(reasons(controlled, borrower, "TFJob")) == {"Suspended", "Resumed"})
    assert not api.get(path)["spec"]["runPolicy"]["suspend"]
    assert "Evicted" not in reasons(controlled, borrower, "Pod")
    api.delete(path)


def test_workspaces_are_sessions_and_stay_paused(controlled: Controlled) -> None:
    """Kubeflow's notebooks v2 scale the StatefulSet of a Workspace: to 0 while it is paused, as by their culling."""
    team, api = controlled.team("workspaces", guaranteed=1), controlled.cluster.api
    controlled.add_nodes(1, 2)
    controlled.start()
    sets = f"/apis/apps/v1/namespaces/{team}/statefulsets"
    for name in ("one", "two"):
        written = {"notebooks.kubeflow.org/workspace-name": name, "statefulset": name}
        template = {"metadata": {"labels": written}, "spec": pod_body("x")["spec"]}
        spec = {"replicas": 1, "serviceName": name, "selector": {"matchLabels": written}, "template": template}
        api.create(sets, {"metadata": {"name": name}, "spec": spec})
    controlled.wait(lambda: len(controlled.bound(team)) == len(controlled.waiting(team)) == 1, controlled.log)
    ((first,), (second,)) = controlled.bound(team), controlled.waiting(team)
    api.patch(f"{sets}/{first.partition('-')[0]}", {"spec": {"replicas": 0}})
    controlled.wait(lambda: controlled.bound(team) == {second}, controlled.log)
    assert set(controlled.pods(team)) == {second}, "a paused workspace has no pod"


# Without a cluster


def found(**more: Any) -> Suspendable:
    return msgspec.convert({"metadata": {"name": "x", "namespace": "n", "uid": "u"}, **more}, Suspendable)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}, True),
        ({"metadata": {}, "spec": {"managedBy": "kueue.x-k8s.io/multikueue"}}, True),
        ({"metadata": {}, "spec": {"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}}}, True),
        ({"metadata": {}, "spec": {"managedBy": "example.com/jobs"}}, True),  # it would never be resumed
        ({"metadata": {}, "spec": {"managedBy": "kubernetes.io/job-controller", "runPolicy": {}}}, False),
        ({"metadata": {}, "spec": {"managedBy": "jobset.sigs.k8s.io/jobset-controller"}}, False),
        ({"metadata": {}, "spec": {"managedBy": "trainer.kubeflow.org/trainjob-controller"}}, False),
        ({"metadata": {}, "spec": {"runPolicy": {"managedBy": "kubeflow.org/training-operator"}}}, False),
        ({"metadata": {}, "spec": {"managedBy": "workload.codeflare.dev/appwrapper"}}, False),
    ],
)
def test_what_another_controller_manages_is_left_to_it(body: Object, *, expected: bool) -> None:
    assert msgspec.convert(body, Suspendable).managed_elsewhere is expected


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Job", {"suspend": True}),
        ("TrainJob", {"suspend": True}),
        ("MPIJob", {"runPolicy": {"suspend": True}}),
        ("JAXJob", {"runPolicy": {"suspend": True}}),
        ("AppWrapper", {"suspend": True}),
    ],
)
def test_a_kind_is_suspended_where_its_api_says(kind: str, spec: Object) -> None:
    body = suspension(BY_KIND[kind], found(), REASON).body
    assert body["spec"] == spec
    assert found(spec=body["spec"]).suspended
    assert not found(spec=suspension(BY_KIND[kind], found(), None).body["spec"]).suspended
    assert body["metadata"]["labels"] == {labels.SUSPENDED: "true"}


def test_an_object_with_conditions_of_any_form_is_read() -> None:
    assert not found(status={"conditions": None}).has_suspended
    assert not found(status={"conditions": [{"type": "Suspended", "status": "False"}]}).has_suspended
    assert found(status={"conditions": [{"type": "Suspended", "status": "True"}]}).has_suspended
    assert found(status={"phase": "Suspended"}).has_suspended
    assert not found(status={"phase": "Suspending"}).has_suspended


class Asked(Unanswered):
    """An API server with a pod of a Job, which never ends its pods; it is `busy` for so many look-ups."""

    def __init__(self, job: Object, busy: int = 0) -> None:
        super().__init__()
        self.busy = busy
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job", "controller": True}
        self._pod = {"metadata": {"name": "p", "namespace": "a", "uid": "p", "ownerReferences": [reference]}}
        self._job = {**job, "metadata": {"name": "j", "namespace": "a", "uid": "job", **job.get("metadata", {})}}

    def answer(self, verb: str, path: str, body: object) -> bytes:
        if verb == "GET" and path.startswith(("/api/v1/namespaces/a/pods/", "/apis/batch/")):
            self.busy -= 1
            if self.busy >= 0:
                raise ApiError(503, "ServiceUnavailable", "")
            return msgspec.json.encode(self._pod if "/pods/" in path else self._job)
        return b"{}"

    def written(self) -> list[str]:
        """The kinds of writes about the pod and its Job."""
        ours = [(verb, path) for verb, path, _ in self.asked if path.endswith(("/jobs/j", "/p/eviction"))]
        return [path.rpartition("/")[2] for verb, path in ours if verb != "GET"]


OTHER = {"apiVersion": "example.com/v1", "kind": "Thing", "name": "t", "uid": "t", "controller": True}
CRON = {**OTHER, "apiVersion": "batch/v1", "kind": "CronJob"}
LOOP = {**OTHER, "apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job"}


@pytest.mark.parametrize(
    ("job", "writes", "busy"),
    [
        ({}, ["j", "eviction"], 0),
        ({}, ["j", "eviction"], 3),  # it was evicted at once, which fails a Job with `backoffLimit: 0`
        ({}, ["eviction"], 99_999),  # until the time in which pods of suspended owners end
        ({"metadata": {"ownerReferences": [CRON]}}, ["j", "eviction"], 0),
        ({"spec": {"suspend": True}}, ["eviction"], 0),  # its user has suspended it; it had its time
        ({"metadata": {"uid": "another"}}, ["eviction"], 0),
        ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}, ["eviction"], 0),
        ({"metadata": {"ownerReferences": [OTHER]}}, ["eviction"], 0),  # which would undo it
        ({"metadata": {"ownerReferences": [LOOP]}}, ["eviction"], 0),
        ({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, ["eviction"], 0),
        ({"status": {"phase": "Succeeded"}}, ["eviction"], 0),
        ({"spec": 7}, ["eviction"], 0),
    ],
)  # fmt: skip
def test_pods_whose_owner_cannot_be_suspended_or_does_not_end_them_are_evicted(
    monkeypatch: pytest.MonkeyPatch, job: Object, writes: list[str], busy: int
) -> None:
    monkeypatch.setattr(suspending, "ENDED_WITHIN_S", 0.1 if busy else 0.01)
    monkeypatch.setattr(suspending, "RETRY_S", 0.001)

    async def scenario() -> None:
        async with detached() as test:
            test.controller._writer._connection = connection = Asked(job, busy)
            test.node(gpus=1)
            test.team("a", guaranteed=0)
            test.team("b", guaranteed=1)
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job", "controller": True}
            meta = {"name": "p", "namespace": "a", "uid": "p", "ownerReferences": [owner]}
            test.pod("a", "p", uid="p", node="node", metadata={**meta, "annotations": {labels.DEVICES: "0"}})
            test.pod("b", "back")
            await test.start()
            async with asyncio.timeout(TIMEOUT_S):
                while "eviction" not in connection.written():
                    await asyncio.sleep(0.001)
            assert connection.written() == writes

    asyncio.run(scenario())


def pod_view(**more: Any) -> PodView:
    return PodView(uid="p", namespace="n", name="p", stage=Stage.ASSIGNED, gpus=1, created=0.0, **more)


@pytest.mark.parametrize(
    ("kind", "pod", "expected"),
    [
        ("Job", pod_view(controller_uid="u"), True),
        ("Job", pod_view(controller_uid="another"), False),
        ("TrainJob", pod_view(controller_uid="job", labels={"jobset.sigs.k8s.io/jobset-name": "x"}), True),
        ("JobSet", pod_view(controller_uid="job", labels={"jobset.sigs.k8s.io/jobset-name": "y"}), False),
        ("MPIJob", pod_view(controller_uid="job", labels={"training.kubeflow.org/job-name": "x"}), True),
    ],
)
def test_a_suspension_ends_the_pods_of_all_objects_below(kind: str, pod: PodView, *, expected: bool) -> None:
    assert BY_KIND[kind].owns(found().metadata, pod) is expected


@pytest.mark.parametrize(
    ("condition", "running", "resumed"),
    [
        ("Suspended", [], True),
        ("Suspended", [pod_view(controller_uid="job")], False),
        ("Suspended", [pod_view(controller_uid="another")], True),
        ("Suspended", None, False),  # a restarted controller has not read the pods
        ("Complete", [pod_view(controller_uid="job")], True),
        ("Failed", [], True),
    ],
)
def test_it_is_resumed_when_its_pods_have_ended_or_it_has(
    condition: str, running: list[PodView] | None, *, resumed: bool
) -> None:
    async def scenario() -> None:
        async with detached() as test:
            test.controller._writer._connection = connection = Asked({})
            await test.start()
            conditions = [{"type": condition, "status": "True"}]
            marked = found(
                metadata={"name": "j", "namespace": "n", "uid": "job", "labels": {labels.SUSPENDED: "true"}},
                spec={"suspend": True},
                status={"conditions": conditions},
            )
            resuming = Resuming(test.controller._writer, test.controller.events, lambda: running)
            resuming.put(BY_KIND["Job"], marked)
            for _ in range(50):
                await asyncio.sleep(0)
            assert connection.written() == (["j"] if resumed else [])

    asyncio.run(scenario())
