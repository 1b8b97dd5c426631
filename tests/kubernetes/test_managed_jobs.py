"""Jobs with `managedBy: gpuquota.dev/elastic` run as ElasticJobs: pods change in place, others see a Job.

The API server's own rules for the status of managed Jobs are the oracle: it refuses what no Job controller would write.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import MANAGER, ManagedJob, elastic_job_of
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.errors import InvalidFieldError
from tests.kubernetes.controlled import Controlled, pod_body
from tests.kubernetes.installation import batch_jobs_of, jobs_of
from tests.polling import until

Object = dict[str, Any]


def job_body(nodes: int = 2, name: str = "train", notes: dict[str, str] | None = None, **spec: Any) -> Object:
    template = {"spec": {**pod_body("x")["spec"], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}}
    return {
        "metadata": {"name": name, "labels": {labels.ELASTIC: "true"}, "annotations": notes or {}},
        "spec": {
            "managedBy": MANAGER,
            "parallelism": nodes,
            "completions": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": template,
            **spec,
        },
    }


def bounds(least: int, most: int) -> dict[str, str]:
    return {labels.MIN_NODES: str(least), labels.MAX_NODES: str(most)}


@pytest.fixture
def teams(controlled: Controlled) -> tuple[str, str]:
    """A team that borrows, and the owner of the four GPUs of the only node."""
    return controlled.borrower_and_owner(4)


def run(controlled: Controlled, team: str, body: Object) -> str:
    controlled.cluster.api.create(batch_jobs_of(team), body)
    return f"{batch_jobs_of(team)}/{body['metadata']['name']}"


def active(controlled: Controlled, path: str, count: int) -> Object:
    return controlled.until(path, lambda job: job["status"].get("active", 0) == count)


def has(job: Object, condition: str) -> bool:
    return any(one["type"] == condition and one["status"] == "True" for one in job["status"].get("conditions", []))


def events(controlled: Controlled, team: str) -> dict[str, str]:
    found = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
    return {one["reason"]: one["message"] for one in found if one["involvedObject"]["kind"] == "Job"}


def test_its_pods_grow_shrink_and_end_and_the_job_completes(controlled: Controlled, teams: tuple[str, str]) -> None:
    borrower, owner = teams
    api = controlled.cluster.api
    controlled.start()
    path = run(controlled, borrower, job_body(2, notes=bounds(1, 4)))
    uid = active(controlled, path, 4)["metadata"]["uid"]
    assert set(controlled.pods(borrower)) == {"train-0", "train-1", "train-2", "train-3"}
    selector = api.get(path)["spec"]["selector"]["matchLabels"]
    assert all(selector.items() <= pod["metadata"]["labels"].items() for pod in controlled.pods(borrower).values())
    controlled.until_bound(controlled.pod(owner, "back", gpus=3))
    shrunk = active(controlled, path, 1)
    assert (shrunk["metadata"]["uid"], shrunk["status"].get("failed")) == (uid, None)
    controlled.kill()
    controlled.start()
    (name,) = controlled.bound(borrower)
    controlled.finish(f"/api/v1/namespaces/{borrower}/pods/{name}")
    done = controlled.until(path, lambda job: has(job, "Complete"))
    assert done["status"]["succeeded"] == 2
    assert done["status"]["completedIndexes"] == "0-1"
    api.delete(f"{path}?propagationPolicy=Background")
    until(lambda: not api.items(jobs_of(borrower)), "its ElasticJob stays")


def as_read(body: Object) -> ManagedJob:
    return msgspec.json.decode(msgspec.json.encode(body), type=ManagedJob)


def test_its_template_s_topology_is_read_in_kueue_s_words() -> None:
    levels = {"required": "block", "preferred": "rack", "slice-required": "nvlink"}
    notes = {f"kueue.x-k8s.io/podset-{level}-topology": label for level, label in levels.items()}
    body = job_body(4)
    body["spec"]["template"]["metadata"] = {"annotations": {**notes, "kueue.x-k8s.io/podset-slice-size": "2"}}
    spec = elastic_job_of(as_read(body))["spec"]
    found = [spec[name] for name in ("requiredTopology", "preferredTopology", "segmentTopology", "segment")]
    assert found == ["block", "rack", "nvlink", 2]
    body["spec"]["template"]["metadata"]["annotations"]["kueue.x-k8s.io/podset-slice-size"] = "two"
    with pytest.raises(InvalidFieldError, match="podset-slice-size is 'two', but it must be a number from 1 to"):
        elastic_job_of(as_read(body))


def test_a_failure_is_the_jobs(controlled: Controlled, teams: tuple[str, str]) -> None:
    borrower, _ = teams
    controlled.start()
    path = run(controlled, borrower, job_body(1))
    active(controlled, path, 1)
    controlled.finish(f"/api/v1/namespaces/{borrower}/pods/train-0", exit_code=3)
    failed = controlled.until(path, lambda job: has(job, "Failed"))
    assert has(failed, "FailureTarget")
    (message,) = {one["message"] for one in failed["status"]["conditions"] if one["type"] == "Failed"}
    assert "exit code 3" in message


def test_it_is_suspended_and_resumed_also_by_a_new_controller(controlled: Controlled, teams: tuple[str, str]) -> None:
    borrower, _ = teams
    api = controlled.cluster.api
    controlled.start()
    path = run(controlled, borrower, job_body(2, suspend=True))
    controlled.until(path, lambda job: has(job, "Suspended"))
    assert not controlled.pods(borrower)
    controlled.kill()
    api.patch(path, {"spec": {"suspend": False}})
    controlled.start()
    started = active(controlled, path, 2)["status"]["startTime"]
    api.patch(path, {"spec": {"suspend": True}})
    suspended = controlled.until(path, lambda job: has(job, "Suspended"))
    assert started
    assert "startTime" not in suspended["status"]
    assert not suspended["status"].get("failed")
    api.patch(path, {"spec": {"suspend": False}})
    assert not has(active(controlled, path, 2), "Suspended")


def test_an_elastic_job_that_somebody_deletes_is_made_again(controlled: Controlled, teams: tuple[str, str]) -> None:
    """As the Job controller replaces pods. One of the same name that is a user's own is left alone."""
    borrower, _ = teams
    api = controlled.cluster.api
    controlled.start()
    own = controlled.job(borrower, "train", gpus=1)
    path = run(controlled, borrower, job_body(1))
    controlled.wait(lambda: "NameTaken" in events(controlled, borrower), lambda: controlled.log()[-3000:])
    assert "ownerReferences" not in api.get(own)["metadata"]
    api.delete(own)
    active(controlled, path, 1)
    first = api.get(own)["metadata"]["uid"]
    api.delete(own)
    controlled.until(own, lambda job: job["metadata"]["uid"] != first)
    active(controlled, path, 1)


@pytest.mark.parametrize("suspend", [False, True])
def test_one_that_is_cancelled_before_it_has_started_fails_its_job(
    controlled: Controlled, teams: tuple[str, str], *, suspend: bool
) -> None:
    """The API server refuses the status of a failed Job without a start time."""
    borrower, _ = teams
    controlled.start()
    path = run(controlled, borrower, job_body(8, suspend=suspend))  # more nodes than there are
    elastic = f"{jobs_of(borrower)}/train"
    controlled.wait(lambda: controlled.cluster.api.exists(elastic))
    controlled.cluster.api.patch(elastic, {"spec": {"lease": {"holder": "user", "durationSeconds": 0}}})
    failed = controlled.until(path, lambda job: has(job, "Failed"))
    (reason,) = {one["reason"] for one in failed["status"]["conditions"] if one["type"] == "Failed"}
    assert reason == "Cancelled"


def test_a_changed_size_is_refused_by_name_and_other_changes_follow(
    controlled: Controlled, teams: tuple[str, str]
) -> None:
    """What a user has changed of the ElasticJob stays."""
    borrower, _ = teams
    api = controlled.cluster.api
    controlled.start()
    path = run(controlled, borrower, job_body(2))
    active(controlled, path, 2)
    elastic = f"{jobs_of(borrower)}/train"
    api.patch(elastic, {"spec": {"priority": 90}})
    api.patch(path, {"spec": {"parallelism": 1, "completions": 1, "suspend": True}})
    assert has(active(controlled, path, 0), "Suspended")
    controlled.wait(lambda: "gpus 2" in events(controlled, borrower).get("NotChanged", ""))
    assert "Refused" not in events(controlled, borrower)
    assert api.get(elastic)["spec"]["priority"] == 90


@pytest.mark.parametrize(
    ("change", "notes", "sentence"),
    [
        ({"parallelism": 0}, {}, "it must be from 1 to"),
        ({"completions": 0}, {}, "without completions"),
        ({}, {labels.MIN_NODES: "-1"}, "it must be a whole number from 1"),
        ({}, {labels.MAX_NODES: "9" * 5000}, "it must be a whole number from 1"),
        ({"template": {"spec": {**pod_body("x", gpus=0)["spec"], "restartPolicy": "Never"}}}, {}, "needs no managedBy"),
    ],
)
def test_what_cannot_be_run_says_so(
    controlled: Controlled, teams: tuple[str, str], change: Object, notes: dict[str, str], sentence: str
) -> None:
    borrower, _ = teams
    controlled.start()
    run(controlled, borrower, job_body(1, notes=notes, **change))
    controlled.wait(
        lambda: sentence in events(controlled, borrower).get("InvalidJob", ""), lambda: controlled.log()[-3000:]
    )
    assert not controlled.cluster.api.items(jobs_of(borrower))
