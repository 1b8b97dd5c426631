"""What-ifs on the web page of a Kubernetes cluster: who may ask, what the leader answers, and what the answer lacks.

Controller and page are processes of their own; the page has its account's rights only.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote_plus

import pytest

from kfp_gpuquota.cluster.certificates import new_authority
from kfp_gpuquota.cluster.kubernetes.objects.what_if import AUDIENCE, AUTHORITY, AUTHORITY_FILE, PATH
from kfp_gpuquota.cluster.kubernetes.web.planner import TOKEN_FILE
from tests.kubernetes.installation import NAMESPACE
from tests.kubernetes.web_page import ACCOUNT, COMPONENT, ROLES, WebPage, bind, web_page
from tests.polling import TIMEOUT_S, until
from tests.web.visitor import Tags
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kubernetes.controlled import Controlled
    from tests.kubernetes.web_page import User
    from tools.devcluster import DevCluster

SECRET = "top-secret"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"
JOBS = {"apiGroups": ["gpuquota.dev"], "resources": ["elasticjobs"]}


@dataclass
class Asking:
    """A running controller with its port for what-ifs, and a page that asks it."""

    controlled: Controlled
    page: WebPage
    files: Path
    port: int

    def start(self) -> None:
        """Start a controller at the port that the page knows."""
        self.controlled.start("--leader-elect", f"--namespace={NAMESPACE}", f"--what-if-port={self.port}")

    def publish(self) -> None:
        """Give the page the authority's certificate, as the kubelet does."""
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{AUTHORITY}"
        until(lambda: self.controlled.cluster.api.exists(path), "the authority is not published")
        (self.files / AUTHORITY_FILE).write_text(self.controlled.cluster.api.get(path)["data"][AUTHORITY_FILE])

    def publish_and_list(self, namespace: str) -> None:
        """Publish, and wait until the controller has listed what it plans with: it answers 503 before."""
        self.publish()
        body = json.dumps({"namespace": namespace, "gpus": 1, "visible": []}).encode()
        token = token_for(self.controlled.cluster, AUDIENCE)
        until(lambda: self.post(body, token)[0] == 200, self.controlled.log)

    def person(self, namespace: str, *verbs: str) -> User:
        """Somebody with these rights on the namespace's ElasticJobs, whom the page shows them."""
        user = self.page.user(f"user-{uuid.uuid4().hex[:6]}@example")
        role = self.controlled.cluster.api.create(
            f"{ROLES}/clusterroles", {"metadata": {"generateName": "what-if-"}, "rules": [{**JOBS, "verbs": verbs}]}
        )["metadata"]["name"]
        self.controlled.on_close.append(partial(self.remove, f"{ROLES}/clusterroles/{role}"))
        bind(self.controlled.cluster, user.name, role, namespace)
        until(lambda: user.get("/queue").status == 200, user.name)
        return user

    def post(self, body: bytes, token: str) -> tuple[int, str]:
        """The leader's answer to whoever has this token."""
        tls = ssl.create_default_context(cafile=str(self.files / AUTHORITY_FILE))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{PATH}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def remove(self, path: str) -> None:
        """Delete an object."""
        self.controlled.cluster.api.delete(path)


@pytest.fixture
def asking(controlled: Controlled, tmp_path: Path) -> Iterator[Asking]:
    """The page, and no controller yet."""
    cluster, files, port = controlled.cluster, tmp_path / "files", free_port()
    files.mkdir()
    options = ("--trusted-proxy=127.0.0.0/8", f"--what-if=https://127.0.0.1:{port}", f"--what-if-files={files}")
    with web_page(cluster, tmp_path / "page.log", *options) as page:
        (files / TOKEN_FILE).write_text(token_for(cluster, AUDIENCE))
        yield Asking(controlled, page, files, port)
    for name in ("rbac", "policy"):
        cluster.kubectl("delete", "--ignore-not-found", "-f", str(COMPONENT / f"{name}.yaml"))
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{AUTHORITY}"
    if cluster.api.exists(path):
        cluster.api.delete(path)


def token_for(cluster: DevCluster, audience: str) -> str:
    """A token of the page's account for this audience."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    return str(cluster.api.create(path, {"spec": {"audiences": [audience]}})["status"]["token"])


def answer(user: User, project: str, gpus: str = "2", **more: str) -> str:
    """The page's answer, as HTML."""
    query = {"what-if": "1", "project": project, "gpus": gpus, **more}
    text = user.get("/queue?" + "&".join(f"{name}={quote_plus(value)}" for name, value in query.items())).text
    return text.partition('id="outlook"')[2].partition("</ul>")[0]


def sentences(html: str) -> str:
    return " ".join(Tags("<p>" + html).text.split())


def test_a_user_is_told_of_the_own_job_and_how_many_gpus_others_give_back(asking: Asking) -> None:
    controlled = asking.controlled
    controlled.add_nodes(1, gpus=4)
    other, own = controlled.team("other", guaranteed=1), controlled.team("own", guaranteed=2)
    asking.start()
    asking.publish()
    elastic = controlled.job(other, f"{SECRET}-elastic", gpus=2, minGpus=1, maxGpus=4, gpusPerWorker=1)
    controlled.until(elastic, lambda job: job.get("status", {}).get("gpus") == 4)
    user = asking.person(own, "list", "create")
    html = answer(user, own)
    told = sentences(html)
    assert "It would start: starts when 2 workers of other teams' jobs are gone" in told
    assert "1 job of another team would give back 2 GPUs that they borrow" in told
    assert SECRET not in user.get(f"/queue?what-if=1&project={own}&gpus=2").text

    boss = asking.page.user(f"boss-{uuid.uuid4().hex[:6]}")
    binding = bind(controlled.cluster, boss.name, "cluster-admin")
    controlled.on_close.append(partial(asking.remove, binding))
    until(lambda: boss.get("/queue").status == 200, boss.name)
    assert f"{SECRET}-elastic of {other} would shrink" in sentences(answer(boss, own))

    assert not controlled.pods(own), "nothing was submitted"
    assert "it must be a whole number" in answer(user, own, HOSTILE)
    for hostile in (HOSTILE, "", "a/b", "x" * 5000):
        refused = answer(user, hostile)
        assert "<script" not in refused.replace("&lt;script", "")
        assert "\x1b" not in refused
        assert "\u202e" not in refused
    assert "it must be at most 100000" in answer(user, own, "100001")
    assert "It would" in answer(user, own, "100000", min_gpus="1")


def test_who_may_not_create_jobs_there_or_not_see_the_namespace_is_refused(asking: Asking) -> None:
    controlled = asking.controlled
    own, other = controlled.team("own", guaranteed=1), controlled.team("other", guaranteed=1)
    reader, stranger = asking.person(own, "list"), asking.person(other, "list", "create")
    assert "may not create ElasticJobs in namespace" in answer(reader, own)
    for user in (stranger, reader):
        for unseen in (own if user is stranger else other, "no-such-namespace"):
            assert "does not exist, or you may not see it" in answer(user, unseen)


def test_only_the_pages_account_asks_with_a_token_for_the_controller(asking: Asking) -> None:
    controlled = asking.controlled
    own = controlled.team("own", guaranteed=1)
    asking.start()
    asking.publish_and_list(own)
    cluster, body = controlled.cluster, json.dumps({"namespace": own, "gpus": 1, "visible": []}).encode()
    page = token_for(cluster, AUDIENCE)
    api_server = cluster.service_account_token(NAMESPACE, ACCOUNT)
    path = f"/api/v1/namespaces/{own}/serviceaccounts/default/token"
    other = cluster.api.create(path, {"spec": {"audiences": [AUDIENCE]}})["status"]["token"]
    assert asking.post(body, "")[0] == 401
    assert asking.post(body, "nobody.knows.it")[0] == 401
    assert asking.post(body, api_server)[0] == 401, "a token for the API server"
    status, why = asking.post(body, other)
    assert (status, "bind the ClusterRole gpuquota-what-if" in why) == (403, True)
    head, _, signature = page.rpartition(".")
    for forged in (f"{head}.{signature[::-1]}", f"{head}.", page.partition(".")[0] + ".e30.", f"{page}x"):
        assert asking.post(body, forged)[0] == 401, "a forged token"
    for wrong in (
        b"[" * 100_000,
        b'{"visible": ' + b"[" * 100_000,
        b"",
        b"{",
        b"[]",
        b'{"namespace": 1, "gpus": 1}',
        b'{"namespace": "x", "gpus": 0}',
    ):
        assert asking.post(wrong, page)[0] == 400, wrong
    too_many = json.dumps({"namespace": own, "gpus": 10**9}).encode()
    assert asking.post(too_many, page)[0] == 400
    assert asking.post(b" " * (2 << 20), page)[0] == 413
    assert asking.post(json.dumps({"namespace": "no-quota", "gpus": 1}).encode(), page)[0] == 400
    assert asking.post(body, page)[0] == 200
    newer = json.dumps({"namespace": own, "gpus": 1, "a_field_of_a_newer_page": [1]}).encode()
    assert asking.post(newer, page)[0] == 200


def test_a_revoked_token_is_refused(asking: Asking) -> None:
    """Its Secret was deleted, as that of a pod is with the pod; the API server takes some seconds to notice."""
    cluster, own = asking.controlled.cluster, asking.controlled.team("own", guaranteed=1)
    asking.start()
    asking.publish_and_list(own)
    secrets = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    secret = cluster.api.create(secrets, {"metadata": {"generateName": "bound-"}})["metadata"]
    bound = {"kind": "Secret", "apiVersion": "v1", "name": secret["name"], "uid": secret["uid"]}
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    token = cluster.api.create(path, {"spec": {"audiences": [AUDIENCE], "boundObjectRef": bound}})["status"]["token"]
    body = json.dumps({"namespace": own, "gpus": 1, "visible": []}).encode()
    assert asking.post(body, token)[0] == 200
    cluster.api.delete(f"{secrets}/{secret['name']}")
    until(lambda: asking.post(body, token)[0] == 401, "the revoked token is accepted")


def test_without_a_controller_that_answers_the_page_says_what_to_do(asking: Asking) -> None:
    controlled = asking.controlled
    own = controlled.team("own", guaranteed=1)
    user = asking.person(own, "list", "create")
    older = sentences(answer(user, own))
    assert "The controller has not published its certificate" in older
    assert "must be upgraded" in older
    asking.start()
    asking.publish()
    waits = lambda: "It cannot start on the nodes" in sentences(answer(user, own))  # noqa: E731 - there is no node
    until(waits, controlled.log)
    controlled.stop()
    gone = sentences(answer(user, own))
    assert "No controller answers at the moment" in gone
    assert "ask again in a moment" in gone
    asking.start()
    until(waits, controlled.log)


def test_a_user_waits_for_one_answer_at_a_time_and_everything_else_is_served(asking: Asking) -> None:
    """Where the controller should be, connections are accepted, and nothing answers until the end of the test."""
    controlled = asking.controlled
    own = controlled.team("own", guaranteed=1)
    user = asking.person(own, "list", "create")
    (asking.files / AUTHORITY_FILE).write_bytes(new_authority("a", time.time()).certificate)
    with socket.create_server(("127.0.0.1", asking.port)) as silent, ThreadPoolExecutor() as threads:
        first = threads.submit(lambda: sentences(answer(asking.page.user(user.name), own)))
        connection, _ = silent.accept()
        assert "your last question is still being answered" in sentences(answer(user, own))
        assert user.get("/teams").status == 200
        connection.close()
        assert "No controller answers at the moment" in first.result()


def test_a_controller_that_does_not_lead_does_not_answer(asking: Asking) -> None:
    controlled = asking.controlled
    own = controlled.team("own", guaranteed=1)
    controlled.start("--leader-elect", f"--namespace={NAMESPACE}", f"--what-if-port={free_port()}")
    asking.start()  # the standby is the one that the page reaches
    asking.publish()
    user = asking.person(own, "list", "create")
    stands_by = "No answer: this controller does not lead"
    until(lambda: stands_by in sentences(answer(user, own)), controlled.log)
