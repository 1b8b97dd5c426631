"""What is done on the page of a Kubernetes cluster: jobs are submitted and quotas changed, by who may do so."""

from __future__ import annotations

import re
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.installation import QUOTAS, jobs_of
from tests.kubernetes.test_crds import job, quota
from tests.kubernetes.web_page import COMPONENT, ROLES, User, WebPage, bind, web_page
from tests.polling import until
from tests.web.test_acting import fields_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

SECRET = "hunter2"
TEMPLATE = {
    "metadata": {"labels": {"of": "train"}},
    "spec": {
        "containers": [
            {
                "name": "main", "image": "registry.example/train:1", "command": ["python", "train.py"], "args": ["-v"],
                "env": [{"name": "PASSWORD", "value": SECRET}],
            }
        ]
    },
}  # fmt: skip

OWN = {
    "checkpoint": {"claimName": "of-train"}, "ttlSecondsAfterFinished": 3600, "workersReadyTimeoutSeconds": 900,
    "gracePeriodSeconds": 45, "gpuTypes": ["H100", "A100"],
}  # fmt: skip


@contextmanager
def rights(cluster: DevCluster) -> Iterator[None]:
    """Give the page's account the rights of the components."""
    files = [str(COMPONENT.with_name(f"web-page-{name}") / "rbac.yaml") for name in ("submit", "quotas")]
    for file in files:
        cluster.kubectl("apply", "-f", file)
    try:
        yield
    finally:
        for file in files:
            cluster.kubectl("delete", "-f", file)


@pytest.fixture(scope="module")
def page(kubeflow_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebPage]:
    options = ("--trusted-proxy=127.0.0.0/8", "--submit", "--quotas")
    log = tmp_path_factory.mktemp("page") / "log"
    with rights(kubeflow_cluster), web_page(kubeflow_cluster, log, *options) as running:
        yield running


@pytest.fixture
def team(kubeflow_cluster: DevCluster) -> str:
    """A namespace with a quota and a job."""
    namespace = kubeflow_cluster.make_namespace(f"acts-{uuid.uuid4().hex[:6]}")
    kubeflow_cluster.api.create(QUOTAS, quota(namespace, guaranteed=2))
    made = job("train", gpus=1, maxGpus=2, priority=70)
    made["spec"] |= {"template": TEMPLATE, **OWN}
    kubeflow_cluster.api.create(jobs_of(namespace), made)
    return namespace


def person(cluster: DevCluster, page: WebPage, role: str, namespace: str) -> User:
    user = page.user(f"{role}-{uuid.uuid4().hex[:6]}@example")
    bind(cluster, user.name, role, namespace)
    until(lambda: user.get(f"/jobs/{namespace}/train").status == 200, user.name)
    return user


def until_shown(user: User, team: str, parent: str) -> str:
    """Return the parent that the form has chosen, once the page has seen the change to it."""
    until(lambda: parent in user.get(f"/teams/{team}").text, "the change")
    chosen = re.search(r'<option value="([^"]*)" selected>', user.get(f"/teams/{team}").text)
    assert chosen is not None
    return chosen[1]


def test_a_job_is_submitted_as_the_user_new_or_like_another_one(
    kubeflow_cluster: DevCluster, page: WebPage, team: str
) -> None:
    api = kubeflow_cluster.api
    editor, viewer = (person(kubeflow_cluster, page, role, team) for role in ("kubeflow-edit", "kubeflow-view"))
    before = len(page.audit())
    form = {"project": team, "name": "new", "gpus": "1", "command": "python a.py", "what-kind": "build", "request": "r"}
    refused = viewer.post("/queue/submit", {**form, "image": "i", "token": viewer.form_token("/queue")})
    assert refused.status == 403
    assert f"{viewer.name} may not create ElasticJobs in namespace {team!r}" in text_of(refused)
    form["token"] = editor.form_token("/queue")
    assert "a job on Kubernetes runs in an image" in text_of(editor.post("/queue/submit", form))
    for _ in range(2):  # a double click
        answer = editor.post("/queue/submit", {**form, "image": "registry.example/a:1"})
        assert answer.headers["Location"].endswith(f"/jobs/{team}/new"), answer.text
        assert editor.get(f"/jobs/{team}/new").status == 200, "the page of the new job is there at once"
    spec = api.get(f"{jobs_of(team)}/new")["spec"]
    assert spec["kind"] == "build"
    assert spec["template"]["spec"]["containers"][0]["image"] == "registry.example/a:1"
    taken = editor.post("/queue/submit", {**form, "image": "i", "request": "s"})
    assert "already has a job 'new'" in text_of(taken)
    elsewhere = editor.post("/queue/submit", {**form, "image": "i", "project": "kube-system"})
    assert elsewhere.status == 404

    shown = editor.get(f"/queue?like={team}/train")
    assert SECRET not in shown.text
    again = {**fields_of(shown.text), "project": team, "token": form["token"]}
    assert editor.post("/queue/submit", again).status == 303
    first, second = (api.get(f"{jobs_of(team)}/{name}")["spec"] for name in ("train", "train-2"))
    assert second == first
    again |= {"name": "train-3", "command": "python other.py", "image": "registry.example/train:2"}
    assert editor.post("/queue/submit", again).status == 303
    container = api.get(f"{jobs_of(team)}/train-3")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "other.py"]
    assert "args" not in container
    assert container["env"] == TEMPLATE["spec"]["containers"][0]["env"]  # type: ignore[index]
    lines = page.audit()[before:]
    assert [(line["user"], line["status"]) for line in lines[:3]] == [
        (viewer.name, 403), (editor.name, 400), (editor.name, 303),
    ]  # fmt: skip
    assert lines[2]["target"] == f"{team}/new"


def test_a_job_that_is_submitted_again_has_the_run_time_of_its_own_project(
    kubeflow_cluster: DevCluster, page: WebPage, team: str
) -> None:
    api = kubeflow_cluster.api
    editor = person(kubeflow_cluster, page, "kubeflow-edit", team)
    api.patch(f"{jobs_of(team)}/train/status", {"status": {"defaultRuntimeSeconds": 7200}})
    until(lambda: "2h" in text_of(editor.get(f"/jobs/{team}/train")), "the default of its project")
    form = {**fields_of(editor.get(f"/queue?like={team}/train").text), "project": team}
    assert editor.post("/queue/submit", {**form, "token": editor.form_token("/queue")}).status == 303
    assert "maxRuntimeSeconds" not in api.get(f"{jobs_of(team)}/train-2")["spec"]


def test_jobs_are_stopped_together_if_the_user_may_stop_them(
    kubeflow_cluster: DevCluster, page: WebPage, team: str
) -> None:
    api = kubeflow_cluster.api
    editor, viewer = (person(kubeflow_cluster, page, role, team) for role in ("kubeflow-edit", "kubeflow-view"))
    stop = {"job": f"{team}/train", "action": "cancel"}
    assert "Cancel train?" in text_of(viewer.post("/queue/confirm", {**stop, "token": viewer.form_token("/queue")}))
    assert viewer.post("/queue/stop", {**stop, "token": viewer.form_token("/queue")}).status == 403
    token = editor.form_token("/queue")
    before = len(page.audit())
    assert editor.post("/queue/confirm", {**stop, "token": token}).status == 200
    assert editor.post("/queue/stop", {**stop, "token": token}).status == 303
    assert api.get(f"{jobs_of(team)}/train")["spec"]["lease"]["durationSeconds"] == 0
    assert editor.post("/queue/stop", {**stop, "action": "delete", "token": token}).status == 303
    assert not api.exists(f"{jobs_of(team)}/train")
    asked = [line["target"] for line in page.audit()[before:]]
    assert asked == [f"cancel {team}/train", f"delete {team}/train"], "a confirmation has no line"


def test_a_job_that_has_ended_or_is_gone_keeps_no_other_from_being_stopped(
    kubeflow_cluster: DevCluster, page: WebPage, team: str
) -> None:
    api = kubeflow_cluster.api
    editor = person(kubeflow_cluster, page, "kubeflow-edit", team)
    for name in ("a-ended", "b-cancelled", "c-runs"):
        api.create(jobs_of(team), job(name, gpus=1))
    api.patch(f"{jobs_of(team)}/a-ended/status", {"status": {"phase": "Failed"}})
    api.patch(f"{jobs_of(team)}/b-cancelled", {"spec": {"lease": {"holder": "gpuquota-cancel", "durationSeconds": 0}}})
    until(lambda: "Failed" in editor.get(f"/jobs/{team}/a-ended").text)
    until(lambda: editor.get(f"/jobs/{team}/c-runs").status == 200)
    jobs = "".join(f"&job={team}/{name}" for name in ("a-ended", "b-cancelled", "c-runs"))
    form = f"token={editor.form_token('/queue')}&action=suspend{jobs}".encode()
    made = {"Content-Type": "application/x-www-form-urlencoded", "Origin": editor.origin}
    answer = editor.send("POST", "/queue/stop", form, made)
    assert api.get(f"{jobs_of(team)}/c-runs")["spec"]["suspend"] is True
    assert answer.status == 400
    assert "job 'b-cancelled' is being stopped; submit it again instead. Of the other jobs" in text_of(answer)


def test_a_quota_is_changed_by_who_may_patch_it_and_not_where_a_profile_defines_it(
    kubeflow_cluster: DevCluster, page: WebPage, team: str
) -> None:
    api = kubeflow_cluster.api
    boss, editor = (person(kubeflow_cluster, page, "kubeflow-edit", team) for _ in range(2))
    role = f"quotas-{uuid.uuid4().hex[:6]}"
    rule = {"apiGroups": ["gpuquota.dev"], "resources": ["gpuquotas"], "verbs": ["patch"], "resourceNames": [team]}
    api.create(f"{ROLES}/clusterroles", {"metadata": {"name": role}, "rules": [rule]})
    bind(kubeflow_cluster, boss.name, role)
    form = {"guaranteed": "3", "limit": "4", "priority": "50", "weight": "2", "parent": ""}
    assert f"{editor.name} may not patch GpuQuota" in text_of(editor.get(f"/teams/{team}"))
    token = editor.form_token("/queue")
    assert editor.post(f"/teams/{team}/update", {**form, "token": token}).status == 403
    until(lambda: "Guaranteed GPUs" in boss.get(f"/teams/{team}").text, "the right")
    form["token"] = boss.form_token("/queue")
    assert boss.post(f"/teams/{team}/update", {**form, "version": '"0"'}).status == 409
    assert boss.post(f"/teams/{team}/update", form).status == 303
    spec = api.get(f"{QUOTAS}/{team}")["spec"]
    assert (spec["guaranteed"], spec["limit"], spec["priority"], spec["overQuotaWeight"]) == (3, 4, 50, 2)
    assert boss.post(f"/teams/{team}/update", {"token": form["token"], "stop_policy": "Hold"}).status == 303
    assert api.get(f"{QUOTAS}/{team}")["spec"]["stopPolicy"] == "Hold"

    above = f"above-{uuid.uuid4().hex[:6]}"  # a department, of which this user sees nothing
    api.create(QUOTAS, quota(above, guaranteed=4))
    api.patch(f"{QUOTAS}/{team}", {"spec": {"parent": above}})
    shown = until_shown(boss, team, above)
    assert boss.post(f"/teams/{team}/update", {**form, "guaranteed": "1", "parent": shown}).status == 303
    assert api.get(f"{QUOTAS}/{team}")["spec"]["parent"] == above

    api.patch(f"{QUOTAS}/{team}", {"metadata": {"labels": {labels.SOURCE: "profile"}}})
    sentence = f"kubectl edit profile {team} (spec.plugins, kind GpuQuota)"
    until(lambda: sentence in boss.get(f"/teams/{team}").text, "the Profile")
    refused = boss.post(f"/teams/{team}/update", form)
    assert refused.status == 409
    assert sentence in text_of(refused)


def test_without_the_options_nothing_is_submitted_and_no_quota_changed(
    kubeflow_cluster: DevCluster, page: WebPage, team: str, tmp_path: Path
) -> None:
    assert page.port, "its account has the rights: the options decide"
    with web_page(kubeflow_cluster, tmp_path / "log") as plain:
        editor = person(kubeflow_cluster, plain, "kubeflow-edit", team)
        assert "Submit" not in editor.get("/queue").text.partition("</table>")[2]
        token = editor.form_token("/queue")
        form = {"project": team, "name": "x", "command": "c", "image": "i", "token": token}
        assert editor.post("/queue/submit", form).status == 403
        assert "gpuquota project set" in text_of(editor.get(f"/teams/{team}"))
        assert editor.post(f"/teams/{team}/update", {"token": token, "guaranteed": "0"}).status == 403
