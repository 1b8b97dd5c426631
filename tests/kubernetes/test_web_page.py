"""The web page of a Kubernetes cluster: who sees what, who may do what, and what it shows."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import pipeline_labels
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from kfp_gpuquota.cluster.kubernetes.web.rights import (
    DENIAL_KEPT_S,
    KEPT_S,
    Asked,
    Bindings,
    Identity,
    Rights,
    RoleBinding,
    Subject,
)
from tests.kubernetes.gpu_exporter import NAMESPACE as EXPORTERS
from tests.kubernetes.gpu_exporter import SERVICE, GpuExporter, own_address, publish
from tests.kubernetes.installation import NAMESPACE, QUOTAS, jobs_of
from tests.kubernetes.istio import GATEWAY, istio
from tests.kubernetes.test_crds import job, quota
from tests.kubernetes.web_page import ACCOUNT, BASE, User, WebPage, bind, web_page
from tests.polling import TIMEOUT_S, until
from tests.web.visitor import Tags
from tools.devcluster import Api, ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

WHY = "waits for 2 GPUs of team-b"


@dataclass
class Team:
    """A namespace with a quota and a job, and two people: one who edits and one who only reads."""

    namespace: str
    editor: User
    viewer: User

    @property
    def job(self) -> str:
        return f"/jobs/{self.namespace}/train"


@pytest.fixture(scope="module")
def page(kubeflow_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebPage]:
    with web_page(kubeflow_cluster, tmp_path_factory.mktemp("page") / "log") as running:
        yield running


def team(cluster: DevCluster, page: WebPage, name: str) -> Team:
    """A team whose job holds the first GPU of the only node."""
    namespace = cluster.make_namespace(f"{name}-{uuid.uuid4().hex[:6]}")
    cluster.api.create(QUOTAS, quota(namespace, guaranteed=2))
    made = cluster.api.create(jobs_of(namespace), job("train", gpus=2, minGpus=1, maxGpus=2))
    status = {
        "phase": "Running", "gpus": 1, "message": WHY, "reason": "no-capacity", "startTime": "2026-01-01T00:00:00Z",
        "resizes": [{"time": "2026-01-01T00:01:00Z", "fromGpus": 2, "toGpus": 1, "step": 7, "message": WHY}],
        "progress": {"step": 70, "metrics": {"loss": 0.5}},
    }  # fmt: skip
    cluster.api.patch(f"{jobs_of(namespace)}/train/status", {"status": {**made.get("status", {}), **status}})
    people = [page.user(f"{who}@{namespace}.example") for who in ("editor", "viewer")]
    for user, role in zip(people, ("kubeflow-edit", "kubeflow-view"), strict=True):
        bind(cluster, user.name, role, namespace)
        until(lambda user=user: user.get(f"/jobs/{namespace}/train").status == 200, user.name)  # type: ignore[misc]
    return Team(namespace, *people)


@pytest.fixture(scope="module")
def ours(kubeflow_cluster: DevCluster, page: WebPage) -> Team:
    return team(kubeflow_cluster, page, "ours")


@pytest.fixture(scope="module")
def theirs(kubeflow_cluster: DevCluster, page: WebPage) -> Team:
    return team(kubeflow_cluster, page, "theirs")


def text_of(user: User, path: str) -> str:
    answer = user.get(path, Accept="text/html")
    assert answer.status == 200, answer.text
    return " ".join(Tags(answer.text).text.split())


def test_a_user_sees_the_own_team_and_nothing_of_another(ours: Team, theirs: Team) -> None:
    for path in ("/teams", "/queue?state=all", "/nodes?color=project", "/timeline?span=week", ours.job):
        shown = text_of(ours.viewer, path)
        assert theirs.namespace not in shown, path
        assert path.startswith("/nodes") or ours.namespace in shown, path
    logs = ("log", "log?worker=all&q=a", "log.txt")
    for path in (theirs.job, *(f"{theirs.job}/{log}" for log in logs)):
        assert ours.viewer.get(path).status == 404, path
    with ours.viewer.stream("/queue") as stream:
        assert theirs.namespace not in json.dumps(next(stream.messages()).data)
    for query in (f"?namespace={theirs.namespace}", f"?project={theirs.namespace}"):
        assert "train" not in text_of(ours.viewer, f"/queue{query}&state=all").partition("Submitted")[2]
        assert "No job held a GPU" in text_of(ours.viewer, f"/timeline{query}&span=week")
        assert "No node is as chosen" in text_of(ours.viewer, f"/nodes{query}")
    compared = text_of(ours.viewer, f"{ours.job}?compare={theirs.namespace}/train")
    assert compared.replace(theirs.namespace, "none") == text_of(ours.viewer, f"{ours.job}?compare=none/train")


def test_the_pages_show_teams_the_queue_a_job_and_nodes(ours: Team) -> None:
    assert "2 guaranteed" in text_of(ours.viewer, "/teams")
    assert WHY in text_of(ours.viewer, f"/queue?namespace={ours.namespace}")
    shown = text_of(ours.viewer, ours.job)
    for words in (
        WHY,
        "2 GPUs, elastic from 1 to 2",
        "job resized (-1)",
        "GPUs held 1 GPU",
        "70",
        "Change its priority",
    ):
        assert words in shown, words
    assert "At least" not in shown, "size bounds are fixed on Kubernetes"
    assert "What if" not in text_of(ours.viewer, "/queue")


HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202etxt"


def reported(
    cluster: DevCluster, namespace: str, kind: str, name: str, minute: int, reason: str, uid: str = "", **more: object
) -> None:
    """An Event as the API server stores it."""
    at = f"2036-01-01T00:{minute:02}:00Z"
    body = {
        "metadata": {"name": f"{name}.{uuid.uuid4().hex[:12]}"},
        "involvedObject": {"kind": kind, "name": name, "namespace": namespace, "uid": uid},
        "reason": reason, "message": f"{reason} of {name}", "type": "Normal", "lastTimestamp": at, "firstTimestamp": at,
        "count": 1,
    }  # fmt: skip
    cluster.api.create(f"/api/v1/namespaces/{namespace}/events", {**body, **more})


def test_a_job_shows_the_events_of_its_object_and_pods_to_who_may_list_events(
    kubeflow_cluster: DevCluster, ours: Team, theirs: Team
) -> None:
    uid = kubeflow_cluster.api.get(f"{jobs_of(ours.namespace)}/train")["metadata"]["uid"]
    here = (kubeflow_cluster, ours.namespace)
    reported(*here, "Pod", "train-1", 3, "FailedScheduling", type="Warning", count=7, message=HOSTILE)
    reported(*here, "ElasticJob", "train", 1, "Nominated", uid)
    reported(*here, "Pod", "train-0", 2, "Pulled")
    reported(*here, "ElasticJob", "train", 1, "OfAnEarlierJob", "another-uid")
    for name in ("train-0-0", "trainer-0", "train", "other"):
        reported(*here, "Pod", name, 1, "OfAnotherPod")
    reported(kubeflow_cluster, theirs.namespace, "Pod", "train-0", 1, "OfAnotherTeam")

    reads = {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]}
    roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
    made = kubeflow_cluster.api.create(roles, {"metadata": {"generateName": "events-"}, "rules": [reads]})
    role = made["metadata"]["name"]
    assert "FailedScheduling" not in text_of(ours.viewer, ours.job), "the user may not list events"
    bind(kubeflow_cluster, ours.editor.name, role, ours.namespace)
    until(lambda: "FailedScheduling" in text_of(ours.editor, ours.job), "the events are not shown")
    assert "FailedScheduling" not in text_of(ours.viewer, ours.job)

    html = ours.editor.get(ours.job).text
    listed = html.partition('id="events"')[2].partition("</section>")[0]
    order = [listed.index(word) for word in ("FailedScheduling", "Pulled", "Nominated", "job submitted")]
    assert order == sorted(order), "newest first"
    shown = " ".join(Tags("<p" + listed).text.split())
    assert "FailedScheduling (warning) train-1 (7 times): <img src=x onerror=alert(1)>\\x1b[2J\\u202etxt" in shown
    assert "<img" not in listed
    for other in ("OfAnotherPod", "OfAnotherTeam", "OfAnEarlierJob"):
        assert other not in html

    with ours.editor.stream(ours.job) as stream:
        next(stream.messages())
        reported(*here, "Pod", "train-0", 4, "Killing")
        stream.until("Killing")


def test_nodes_name_pods_of_the_own_team_only(kubeflow_cluster: DevCluster, ours: Team, theirs: Team) -> None:
    (node,) = kubeflow_cluster.api.items("/api/v1/nodes")
    for left in kubeflow_cluster.api.items("/api/v1/pods"):  # by other tests: one that waits would take the idle GPU
        kubeflow_cluster.api.delete(
            f"/api/v1/namespaces/{left['metadata']['namespace']}/pods/{left['metadata']['name']}", 0
        )
    last = int(node["status"]["allocatable"][labels.GPU_RESOURCE]) - 1
    amounts = {"allocatable": {"amd.com/gpu": "2"}, "capacity": {"amd.com/gpu": "2"}}
    kubeflow_cluster.api.patch(f"/api/v1/nodes/{node['metadata']['name']}/status", {"status": amounts})
    policy = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    kubeflow_cluster.api.apply(
        f"{QUOTA_POLICIES}/default", {**policy, "spec": {"gpuResources": [{"name": "amd.com/gpu"}]}}
    )
    limits = {labels.GPU_RESOURCE: "1", "amd.com/gpu": "1"}
    container = {"name": "main", "image": "none", "resources": {"limits": limits}}
    pod = {
        "metadata": {"name": "plain", "annotations": {labels.DEVICES: str(last)}},
        "spec": {"nodeName": node["metadata"]["name"], "containers": [container]},
    }
    kubeflow_cluster.api.create(f"/api/v1/namespaces/{ours.namespace}/pods", pod)
    until(lambda: text_of(ours.viewer, "/nodes").count("plain") == 2, lambda: text_of(ours.viewer, "/nodes"))
    shown = text_of(theirs.viewer, "/nodes")
    assert "plain" not in shown
    assert "used by others" in shown
    assert "1 of 2 in use" in shown
    kubeflow_cluster.api.delete(f"/api/v1/namespaces/{ours.namespace}/pods/plain", 0)

    def idle() -> bool:
        return text_of(theirs.viewer, "/nodes").count("idle for") > shown.count("idle for")

    until(idle, lambda: text_of(theirs.viewer, "/nodes"))
    kubeflow_cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"gpuResources": None}})
    gone = {"allocatable": {"amd.com/gpu": None}, "capacity": {"amd.com/gpu": None}}
    kubeflow_cluster.api.patch(f"/api/v1/nodes/{node['metadata']['name']}/status", {"status": gone})


def test_the_use_of_gpus_is_drawn_as_the_exporter_of_the_node_reports_it(
    kubeflow_cluster: DevCluster, ours: Team, theirs: Team
) -> None:
    """A pod's GPU is that which the plan counts for it; GPUs that no pod has are the plan's free ones."""
    api, policy = kubeflow_cluster.api, f"{QUOTA_POLICIES}/default"
    (node,) = api.items("/api/v1/nodes")
    name, last = node["metadata"]["name"], int(node["status"]["allocatable"][labels.GPU_RESOURCE]) - 1
    idle = b'DCGM_FI_DEV_GPU_UTIL{gpu="7",UUID="GPU-idle"} 3\n'
    with GpuExporter({(ours.namespace, "measured"): ["35"]}, more=idle).serving(own_address()) as exporter:
        publish(api, own_address(), exporter.port, [name])
        kind = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
        use = {"exporter": f"{EXPORTERS}/{SERVICE}", "intervalSeconds": 1}
        api.apply(policy, {**kind, "spec": {"gpuUse": use}})
        container = {"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
        pod = {
            "metadata": {"name": "measured", "annotations": {labels.DEVICES: str(last)}},
            "spec": {"nodeName": name, "containers": [container]},
        }
        api.create(f"/api/v1/namespaces/{ours.namespace}/pods", pod)
        page, user = f"/nodes/{name}", theirs.viewer
        until(lambda: 'data-values="35 35' in user.get(page).text, lambda: text_of(user, page))
        drawn = user.get(page).text.partition('<section id="gpu-use"')[2].partition("</section>")[0]
        assert f"<span>GPU {last}</span> <strong>35</strong>" in drawn
        until(lambda: 'data-values="3 3' in user.get(page).text, lambda: text_of(user, page))
        assert "measured" not in text_of(user, page), "another team's pod has no name"
        api.patch(policy, {"spec": {"gpuUse": None}})
    api.delete(f"/api/v1/namespaces/{ours.namespace}/pods/measured", 0)


def test_who_is_not_named_by_a_trusted_proxy_is_refused(page: WebPage, ours: Team) -> None:
    nobody = page.user("")
    for path in ("/", "/teams", ours.job, f"{ours.job}/log"):
        assert nobody.get(path).status == 401, path
    assert page.user("system:admin").get("/teams").status == 401
    assert page.user("stranger@example").get("/teams").status == 403
    assert nobody.get("/static/page.css").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("kubeflow-userid", "nobody@example"), ("kubeflow-userid", "{user}")],
        [("kubeflow-userid", ""), ("Kubeflow-UserID", "{user}")],
        [("kubeflow-userid", "{user},nobody@example")],
        [("kubeflow_userid", "{user}")],
        [("X-Forwarded-User", "{user}"), ("X-Forwarded-For", "127.0.0.1"), ("Forwarded", "for=127.0.0.1")],
        [("kubeflow-userid", "system:masters"), ("kubeflow-groups", "system:masters"), ("Impersonate-User", "{user}")],
        [("kubeflow-userid", "{user}" + "x" * 300)],
        [("kubeflow-userid", "{user}\u200b")],
    ],
)
def test_no_second_header_and_no_look_alike_names_a_user(
    page: WebPage, ours: Team, headers: list[tuple[str, str]]
) -> None:
    """What a pod can add that reaches the page, beside or instead of the proxy's own header."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=TIMEOUT_S)
    connection.putrequest("GET", f"{BASE}/teams", skip_host=True)
    connection.putheader("Host", f"localhost:{page.port}")
    for name, value in headers:
        connection.putheader(name, value.replace("{user}", ours.editor.name).encode())
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status in {401, 403}
    assert ours.namespace not in answer.read().decode().replace(ours.editor.name, "")
    connection.close()


class Browser(User):
    """A browser at the gateway; `headers` are what its user makes it send beside its own."""

    def __init__(self, port: int, **headers: str) -> None:
        super().__init__(port, "")
        self._named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.host, self.origin = "kubeflow.example", "https://kubeflow.example"


@pytest.fixture(scope="module")
def sidecar_page(kubeflow_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebPage]:
    """The page as `overlays/kubeflow/web-page` configures it."""
    options = ("--trusted-proxy=127.0.0.6/32", "--origin=https://kubeflow.example")
    with web_page(kubeflow_cluster, tmp_path_factory.mktemp("sidecar") / "log", *options) as running:
        yield running


def test_the_header_of_an_untrusted_sender_does_not_count(sidecar_page: WebPage, ours: Team) -> None:
    """A pod that reaches the page beside the gateway, with all that the gateway would send."""
    claims = {"x_forwarded_for": "127.0.0.6", "x_envoy_external_address": "127.0.0.6", "x_forwarded_proto": "https"}
    identity = {"x_forwarded_client_cert": f"URI={GATEWAY}", "x_envoy_peer_metadata_id": "router"}
    user = Browser(sidecar_page.port, kubeflow_userid=ours.editor.name, **claims, **identity)
    assert user.get("/teams").status == 401
    before = len(sidecar_page.audit())
    assert user.post(f"{ours.job}/suspend", {"token": "x"}).status == 401
    assert [line["user"] for line in sidecar_page.audit()[before:]] == [""]


def test_behind_istio_the_user_is_who_the_gateway_names(sidecar_page: WebPage, ours: Team, tmp_path: Path) -> None:
    with istio(sidecar_page.port, ours.editor.name, tmp_path) as port:
        browser = Browser(port)
        assert ours.namespace in text_of(browser, "/teams")
        form = {"token": browser.form_token(ours.job)}
        answer = browser.post(f"{ours.job}/resume", form)
        assert (answer.status, answer.headers["Location"]) == (303, f"{BASE}{ours.job}")
        assert sidecar_page.audit()[-1]["user"] == ours.editor.name
        spoofed = Browser(
            port, x_forwarded_host="evil.example", x_forwarded_proto="http", forwarded="host=evil.example"
        )
        assert spoofed.post(f"{ours.job}/resume", form).headers["Location"] == f"{BASE}{ours.job}"
        assert spoofed.post(f"{ours.job}/resume", form, Origin="https://evil.example").status == 403
        honest_forwarded = Browser(port, x_forwarded_host="kubeflow.example")
        assert honest_forwarded.get("/teams", Host="evil.example").status == 421


SPOOFED = {
    "x_forwarded_user": "{user}", "x_forwarded_email": "{user}", "x_auth_request_email": "{user}",
    "x_forwarded_for": "127.0.0.6", "x_real_ip": "127.0.0.6", "x_envoy_external_address": "127.0.0.6",
    "x_envoy_original_path": "/gpuquota/static/page.css", "x_original_url": "/gpuquota/static/page.css",
    "x_http_method_override": "GET", "x_forwarded_client_cert": f"URI={GATEWAY}",
    "kubeflow_groups": "system:masters",
}  # fmt: skip


@pytest.mark.parametrize(("mode", "status"), [("replace", 403), ("append", 401), ("merge", 403)])
def test_behind_istio_a_browser_that_names_another_user_is_not_that_user(
    sidecar_page: WebPage, ours: Team, tmp_path: Path, mode: str, status: int
) -> None:
    """`append` and `merge` are gateways that keep a browser's header: its user is refused, and nobody else."""
    with istio(sidecar_page.port, "stranger@example", tmp_path, mode=mode) as port:
        spoofed = {name: value.replace("{user}", ours.editor.name) for name, value in SPOOFED.items()}
        browser = Browser(port, kubeflow_userid=ours.editor.name, **spoofed)
        for path in ("/teams", ours.job, f"{ours.job}/log"):
            answer = browser.get(path)
            assert answer.status == status, path
            assert ours.namespace not in answer.text.replace(ours.editor.name, "")
        assert browser.post(f"{ours.job}/suspend", {"token": "x"}).status == status


def test_it_does_not_start_for_others_without_a_trusted_proxy() -> None:
    command = [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes.web", "--host=0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no --trusted-proxy is given" in done.stderr
    done = subprocess.run([*command, "--trusted-proxy=127.0.0.6/32"], capture_output=True, text=True, check=False)
    assert "--origin is missing" in done.stderr


def test_a_foreign_host_and_a_foreign_origin_are_refused(ours: Team) -> None:
    form = {"token": ours.editor.form_token(ours.job)}
    assert ours.editor.get("/teams", Host="evil.example").status == 421
    assert ours.editor.get("/teams", Origin="https://evil.example").status == 403
    assert ours.editor.post(f"{ours.job}/suspend", form, Origin="https://evil.example").status == 403
    policy = ours.editor.get("/teams").headers["Content-Security-Policy"]
    assert "frame-ancestors 'self'" in policy


def test_actions_need_the_users_right_and_are_audited(kubeflow_cluster: DevCluster, page: WebPage, ours: Team) -> None:
    stored = f"{jobs_of(ours.namespace)}/train"
    form = {"token": ours.editor.form_token(ours.job)}
    before = len(page.audit())
    refused = ours.viewer.post(f"{ours.job}/suspend", {"token": ours.viewer.form_token(ours.job)}, Accept="text/plain")
    assert refused.status == 403
    assert "may not patch ElasticJob 'train'" in refused.text
    assert ours.viewer.post(f"{ours.job}/suspend", form).status == 403, "the form is another user's"
    assert not kubeflow_cluster.api.get(stored)["spec"].get("suspend")
    assert ours.editor.post(f"{ours.job}/suspend", form).status == 303
    assert kubeflow_cluster.api.get(stored)["spec"]["suspend"] is True
    assert ours.editor.post(f"{ours.job}/resume", form).status == 303
    assert ours.editor.post(f"{ours.job}/update", {**form, "priority": "70", "min_gpus": "1"}).status == 303
    assert kubeflow_cluster.api.get(stored)["spec"]["priority"] == 70
    resized = ours.editor.post(f"{ours.job}/update", {**form, "max_gpus": "3"}, Accept="text/plain")
    assert resized.status == 422
    assert "maxGpus cannot be changed" in resized.text
    lines = page.audit()[before:]
    assert [(line["user"], line["status"]) for line in lines] == [
        *[(ours.viewer.name, 403)] * 2, *[(ours.editor.name, 303)] * 3, (ours.editor.name, 422),
    ]  # fmt: skip
    assert lines[0]["request"] == f"POST /gpuquota{ours.job}/suspend"


def test_pipelines_shows_a_runs_steps_with_a_link_to_kubeflow(kubeflow_cluster: DevCluster, ours: Team) -> None:
    step = job("step")
    step["metadata"]["labels"] = {pipeline_labels.RUN: "0a1b", pipeline_labels.TASK: "train"}
    kubeflow_cluster.api.create(jobs_of(ours.namespace), step)
    until(lambda: "0a1b" in ours.editor.get("/pipelines").text, "the run is not shown")
    text = ours.editor.get("/pipelines").text
    assert f'href="/_/pipeline/?ns={ours.namespace}#/runs/details/0a1b"' in text
    assert f'/jobs/{ours.namespace}/step">step</a>' in text
    pods = f"/api/v1/namespaces/{ours.namespace}/pods"
    for name in ("load", "train"):
        kubeflow_cluster.api.create(pods, step_pod(name))
    reads = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
    role = kubeflow_cluster.api.create(roles, {"metadata": {"generateName": "pods-"}, "rules": [reads]})
    bind(kubeflow_cluster, ours.editor.name, role["metadata"]["name"], ours.namespace)
    until(lambda: "digits-v2 run 0a1b" in text_of(ours.editor, "/pipelines"), "the pods are not shown")
    assert "loadno GPUPending0" in text_of(ours.editor, "/pipelines")
    assert "trainno GPU" not in text_of(ours.editor, "/pipelines"), "its job is shown"
    assert "loadno" not in text_of(ours.viewer, "/pipelines"), "the user may not list pods"
    for name in ("load", "train"):
        kubeflow_cluster.api.delete(f"{pods}/{name}")
    until(lambda: "loadno" not in text_of(ours.editor, "/pipelines"), "a deleted pod is shown")
    kubeflow_cluster.api.delete(f"{jobs_of(ours.namespace)}/step")


def step_pod(name: str) -> dict[str, Any]:
    """A step's pod as KFP's and Argo's label it."""
    labels = {"pipeline/runid": "0a1b", "workflows.argoproj.io/workflow": "digits-v2-x7v6d"}
    annotations = {"workflows.argoproj.io/node-name": f"digits-v2-x7v6d(0).root(0).{name}(0).executor(0)"}
    container = {"name": "main", "image": "none"}
    return {
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {"containers": [container], "nodeName": "elsewhere"},
    }


def test_a_stream_shows_a_change_and_a_deleted_job(kubeflow_cluster: DevCluster, ours: Team) -> None:
    kubeflow_cluster.api.create(jobs_of(ours.namespace), job("short"))
    short = f"/jobs/{ours.namespace}/short"
    until(lambda: ours.editor.get(short).status == 200, "the job is not shown")
    with ours.editor.stream(short) as stream:
        next(stream.messages())
        form = {"token": ours.editor.form_token(short)}
        assert ours.editor.post(f"{short}/delete", form).status == 303
        stream.until("This job was deleted")
    assert not kubeflow_cluster.api.exists(f"{jobs_of(ours.namespace)}/short")


def test_the_pages_account_changes_of_a_job_no_more_than_the_page(kubeflow_cluster: DevCluster, ours: Team) -> None:
    account = Api.of_kubeconfig(kubeflow_cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT))
    template = {"spec": {"containers": [{"name": "main", "image": "evil"}]}}

    def refusal() -> str:
        try:
            account.patch(f"{jobs_of(ours.namespace)}/train", {"spec": {"template": template}}, dryRun="All")
        except ApiError as error:
            return error.message
        return ""

    assert "changes their priority, and nothing else" in until(refusal, "the policy does not apply")
    for path in ("/api/v1/secrets", "/api/v1/configmaps"):
        with pytest.raises(ApiError, match="forbidden"):
            account.get(path)


async def reviews_of(
    cluster: DevCluster, name: str, namespaces: list[str], bound: list[str]
) -> tuple[set[str] | None, int]:
    """What the user may see of these namespaces with bindings in some, and how many requests that took."""
    answers: list[str] = []
    user, bindings = Identity(name), Bindings()
    subjects = (Subject("User", name), Subject("Group", "g"))
    for namespace in bound:
        bindings.put(RoleBinding(Metadata(uid=f"uid-{namespace}", namespace=namespace), subjects))
    credentials = load_credentials(str(cluster.kubeconfig))
    async with Connection(credentials, count=lambda verb, _status: answers.append(verb)) as connection:
        rights = Rights(connection, bindings, lambda: namespaces)
        found = await rights.visible(user)
        assert await rights.visible(user) == found, "from memory"
    return None if found is None else set(found), answers.count("POST")


def test_reviews_are_as_many_as_the_users_namespaces_and_not_as_the_clusters(
    kubeflow_cluster: DevCluster, ours: Team
) -> None:
    everything = [ours.namespace, *(f"team-{i}" for i in range(4_999))]
    user = ours.viewer.name
    bound = [ours.namespace, "team-1", "team-2", "gone"]
    assert asyncio.run(reviews_of(kubeflow_cluster, user, everything, bound)) == ({ours.namespace}, 4)
    assert asyncio.run(reviews_of(kubeflow_cluster, "nobody", everything, [])) == (set(), 1)
    boss = f"boss-{uuid.uuid4().hex[:6]}"
    bind(kubeflow_cluster, boss, "kubeflow-view")
    seen = lambda: asyncio.run(reviews_of(kubeflow_cluster, boss, everything, [])) == (None, 1)  # noqa: E731
    until(seen, "the administrator's reviews")


def test_a_right_that_was_taken_away_is_gone_after_a_minute(kubeflow_cluster: DevCluster, ours: Team) -> None:
    user, api = Identity(f"guest-{uuid.uuid4().hex[:6]}"), kubeflow_cluster.api
    bindings, now = Bindings(), 0.0
    bindings.put(RoleBinding(Metadata(uid="b", namespace=ours.namespace), (Subject("User", user.name),)))
    binding = bind(kubeflow_cluster, user.name, "kubeflow-view", ours.namespace)

    async def run() -> None:
        nonlocal now
        credentials = load_credentials(str(kubeflow_cluster.kubeconfig))
        async with Connection(credentials) as connection:
            rights = Rights(connection, bindings, lambda: [ours.namespace], clock=lambda: now)
            while not await rights.visible(user):
                now += DENIAL_KEPT_S
            api.delete(binding)
            now += KEPT_S - 1
            while await rights.may_now(Asked(user, "list", namespace=ours.namespace)):
                pass  # the API server takes a moment
            assert await rights.visible(user) == frozenset({ours.namespace})
            now += 1
            assert await rights.visible(user) == frozenset()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_user_sees_what_a_group_that_the_proxy_names_may_see(
    kubeflow_cluster: DevCluster, page: WebPage, ours: Team, tmp_path: Path
) -> None:
    group = f"staff-{uuid.uuid4().hex[:6]}"
    bind(kubeflow_cluster, group, "kubeflow-view", ours.namespace, kind="Group")
    options = ("--trusted-proxy=127.0.0.0/8", "--groups-header=kubeflow-groups")
    with web_page(kubeflow_cluster, tmp_path / "log", *options) as with_groups:
        member, other = (
            with_groups.user("member", f"others, {group}"),
            with_groups.user("other", "others,system:masters"),
        )
        until(lambda: member.get("/teams").status == 200, "the member is not let in")
        assert ours.namespace in text_of(member, "/teams")
        assert other.get("/teams").status == 403
    assert page.user("member", group).get("/teams").status == 403, "a header that no proxy sets was believed"


def test_an_administrator_sees_all_teams(kubeflow_cluster: DevCluster, page: WebPage, ours: Team, theirs: Team) -> None:
    boss = page.user(f"boss-{uuid.uuid4().hex[:6]}@example")
    bind(kubeflow_cluster, boss.name, "kubeflow-view")
    until(lambda: boss.get("/teams").status == 200, "the administrator is not let in")
    shown = text_of(boss, "/teams")
    assert ours.namespace in shown
    assert theirs.namespace in shown
    assert text_of(boss, "/queue").count(WHY) == 2
