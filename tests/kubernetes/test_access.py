"""Every way of a user to an API server, with the official client: kubeconfig files, credentials, proxies, errors."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.client.http.credentials import from_file
from kfp_gpuquota.cluster.kubernetes.user_client import kubeconfig
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection
from kfp_gpuquota.cluster.kubernetes.user_client.kubeconfig import in_cluster
from kfp_gpuquota.errors import ClusterUnavailableError, NotFoundError, UnauthorizedError, UsageError
from tests import forked, programs
from tests.kubernetes.connect_proxy import connect_proxy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.devcluster import DevCluster

    Write = Callable[..., Path]

Object = dict[str, Any]

REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
ADMIN = "devcluster-admin"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def token(cluster: DevCluster) -> str:
    return str(json.loads(cluster.kubeconfig.read_bytes())["users"][0]["user"]["token"])


@pytest.fixture
def write(cluster: DevCluster, tmp_path: Path) -> Write:
    """Write a kubeconfig of one context, with these fields of its user and its cluster; None leaves a field out."""

    def to_file(user: Object, name: str = "config", **of_cluster: object) -> Path:
        fields = {
            "server": cluster.server,
            "certificate-authority": str(cluster.layout.authority),
            **{field.replace("_", "-"): value for field, value in of_cluster.items()},
        }
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "clusters": [
                {"name": "c", "cluster": {name: value for name, value in fields.items() if value is not None}}
            ],
            "users": [{"name": "u", "user": user}],
        }
        path = tmp_path / name
        path.write_text(json.dumps(config))
        return path

    return to_file


def who(path: Path | str, retry_for_s: float = 5.0) -> str:
    """The user as whom the API server knows the current context of a kubeconfig."""
    answer = Calls(Connection.open(str(path)), retry_for_s=retry_for_s).create(REVIEWS, {})
    return str(answer["status"]["userInfo"]["username"])


def plugin(folder: Path, script: str) -> Object:
    """An exec plugin, found relative to the kubeconfig's folder; each run leaves a line in `runs`."""
    path = folder / "plugin"
    path.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "./plugin",
            "interactiveMode": "Never",
            "env": [{"name": "GREETING", "value": "hello"}],
        }
    }


def credential(**status: str) -> str:
    return json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status})


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def admin_name(cluster: DevCluster) -> str:
    me = cluster.api.create(REVIEWS, {})
    return str(me["status"]["userInfo"]["username"])


def test_a_token_of_the_file_and_the_contexts_namespace(cluster: DevCluster, write: Write, token: str) -> None:
    path = write({"token": token})
    assert who(path) == admin_name(cluster)
    assert Connection.open(str(path)).namespace == "team"


def test_a_client_certificate_in_files_and_in_the_kubeconfig_itself(cluster: DevCluster, write: Write) -> None:
    certificate, key = (cluster.layout.authority.parent / f"person.{suffix}" for suffix in ("crt", "key"))
    assert who(write({"client-certificate": str(certificate), "client-key": str(key)})) == "person"
    encoded = [base64.b64encode(path.read_bytes()).decode() for path in (certificate, key)]
    authority = base64.b64encode(cluster.layout.authority.read_bytes()).decode()
    inline = {"client-certificate-data": encoded[0], "client-key-data": encoded[1]}
    assert who(write(inline, certificate_authority=None, certificate_authority_data=authority)) == "person"


def test_a_token_file_is_read_again_when_its_token_was_rotated(
    cluster: DevCluster, write: Write, token: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    calls = Calls(Connection.open(str(write({"tokenFile": "token"}))), retry_for_s=5)
    with pytest.raises(UnauthorizedError):
        calls.get("/api")
    file.write_text(f"{token}\n")
    assert calls.create(REVIEWS, {})["status"]["userInfo"]["username"] == admin_name(cluster)


def test_an_exec_plugin_gives_a_token_and_runs_once_for_a_command(
    cluster: DevCluster, write: Write, token: str, tmp_path: Path
) -> None:
    script = f"test \"$GREETING\" = hello && echo '{credential(token=token)}'"
    path = write(plugin(tmp_path, script))
    environment = {**os.environ, "KUBECONFIG": str(path), "GPUQUOTA_HOME": str(tmp_path)}
    done = forked.run(programs.kubectl_gpuquota, "get", "nodes", environment=environment)
    assert done.returncode == 0, done.stderr
    assert (done.stderr, runs(tmp_path)) == ("", 1)


def test_an_exec_plugin_runs_again_when_its_token_is_refused_or_has_expired(
    cluster: DevCluster, write: Write, token: str, tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text(credential(token="revoked"))
    calls = Calls(Connection.open(str(write(plugin(tmp_path, f"cat {tmp_path}/answer")))), retry_for_s=5)
    (tmp_path / "answer").write_text(credential(token=token, expirationTimestamp="2020-01-01T00:00:00Z"))
    calls.get("/api")
    assert runs(tmp_path) >= 2
    before = runs(tmp_path)
    calls.get("/api")
    assert runs(tmp_path) > before, "its token has expired"


def test_an_exec_plugin_gives_a_client_certificate(cluster: DevCluster, write: Write, tmp_path: Path) -> None:
    certificate, key = (cluster.layout.authority.parent / f"person.{suffix}" for suffix in ("crt", "key"))
    status = {"clientCertificateData": certificate.read_text(), "clientKeyData": key.read_text()}
    (tmp_path / "answer").write_text(credential(**status))
    assert who(write(plugin(tmp_path, f"cat {tmp_path}/answer"))) == "person"


def test_an_exec_plugin_that_fails_is_named_with_its_own_words(write: Write, tmp_path: Path) -> None:
    path = write(plugin(tmp_path, "echo 'session expired; run: sso login' >&2; exit 7"))
    environment = {**os.environ, "KUBECONFIG": str(path), "GPUQUOTA_HOME": str(tmp_path)}
    done = forked.run(programs.kubectl_gpuquota, "list", environment=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: the credential plugin './plugin' of your kubeconfig gave no credentials: ")
    assert "session expired; run: sso login" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    path = write({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-login"}})
    with pytest.raises(ClusterUnavailableError, match="No such file or directory: 'no-such-login'"):
        who(path)


def test_an_exec_plugin_that_does_not_end_has_a_time_limit(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeconfig, "PLUGIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(kubeconfig, "LOGIN_TIMEOUT_S", 0.2)
    hold = tmp_path / "hold"
    os.mkfifo(hold)
    with pytest.raises(ClusterUnavailableError, match=r"it has not ended within 0\.2 s"):
        who(write(plugin(tmp_path, f"cat {hold}")))
    hold.open("w").close()  # it ends now


class Issuer(BaseHTTPRequestHandler):
    """An issuer of OpenID Connect that answers each refresh with `id_token`."""

    id_token = ""

    def do_GET(self) -> None:
        self._answer({"token_endpoint": f"http://{self.headers['Host']}/token"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        fields = {"id_token": self.id_token, "refresh_token": "next", "access_token": "x", "token_type": "Bearer"}
        self._answer(fields)

    def _answer(self, body: Object) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: object) -> None:
        pass


def test_a_token_of_openid_connect_is_refreshed_and_stored(
    cluster: DevCluster, namespace: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OAUTHLIB_INSECURE_TRANSPORT", "1")  # a real issuer has a certificate
    monkeypatch.setattr(Issuer, "id_token", cluster.service_account_token(namespace, "default"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Issuer)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    parts = ({"alg": "none"}, {"exp": 1_000_000_000})
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    issuer = f"http://127.0.0.1:{server.server_port}"
    config = {"client-id": "me", "client-secret": "s", "refresh-token": "r", "idp-issuer-url": issuer}
    config["id-token"] = ".".join([*encoded, "signature"])
    path = write({"auth-provider": {"name": "oidc", "config": config}})
    try:
        assert who(path) == f"system:serviceaccount:{namespace}:default"
    finally:
        server.shutdown()
        server.server_close()
    assert Issuer.id_token in path.read_text(), "the next command needs no refresh"
    assert who(path) == f"system:serviceaccount:{namespace}:default"


def test_several_files_are_merged_and_the_first_current_context_counts(
    cluster: DevCluster, write: Write, token: str, tmp_path: Path
) -> None:
    whole = json.loads(write({"token": token}, name="whole").read_text())
    one, other = tmp_path / "one", tmp_path / "sub" / "other"
    other.parent.mkdir()
    one.write_text(json.dumps({"current-context": "here", "contexts": whole["contexts"], "users": whole["users"]}))
    authority = other.parent / "authority.pem"  # relative to the file that names it
    authority.write_bytes(cluster.layout.authority.read_bytes())
    reached = {"server": cluster.server, "certificate-authority": "authority.pem"}
    other.write_text(json.dumps({"current-context": "elsewhere", "clusters": [{"name": "c", "cluster": reached}]}))
    assert who(os.pathsep.join([str(one), str(tmp_path / "none"), str(other)])) == admin_name(cluster)


def test_the_name_in_the_servers_certificate_can_be_given(cluster: DevCluster, write: Write, token: str) -> None:
    assert who(write({"token": token}, tls_server_name="kubernetes.default")) == admin_name(cluster)
    with pytest.raises(
        UsageError, match=r"certificate of the API server .* is not accepted \(.*'else.where'.*tls-server"
    ):
        who(write({"token": token}, tls_server_name="else.where"))


def test_an_unknown_authority_is_refused_unless_verification_is_skipped(
    cluster: DevCluster, write: Write, token: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"is not accepted \(.*certificate-authority-data"):
        who(write({"token": token}, certificate_authority=None))
    path = write({"token": token}, certificate_authority=None, insecure_skip_tls_verify=True)
    environment = {**os.environ, "KUBECONFIG": str(path), "GPUQUOTA_HOME": str(tmp_path)}
    done = forked.run(programs.kubectl_gpuquota, "get", "nodes", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_clusters_proxy_is_used(cluster: DevCluster, write: Write, token: str) -> None:
    with connect_proxy() as proxy:
        assert who(write({"token": token}, proxy_url=proxy.url)) == admin_name(cluster)
        assert proxy.connected == [cluster.server.removeprefix("https://")]


def test_a_proxy_of_the_environment_is_used_but_not_for_this_machine(
    cluster: DevCluster, write: Write, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_proxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        who(write({"token": token}))
        assert proxy.connected == []
        by_name = f"https://{cluster.server.removeprefix('https://')}".replace("127.0.0.1", "127.0.0.2")
        with pytest.raises(ClusterUnavailableError):  # nothing listens there, but the proxy was asked
            who(write({"token": token}, server=by_name), retry_for_s=0)
        assert proxy.connected == [by_name.removeprefix("https://")]
        monkeypatch.setenv("NO_PROXY", "127.0.0.2")
        with pytest.raises(ClusterUnavailableError):
            who(write({"token": token}, server=by_name), retry_for_s=0)
        assert len(proxy.connected) == 1


def test_a_proxy_that_is_away_or_of_another_kind_is_named(write: Write, token: str) -> None:
    with pytest.raises(ClusterUnavailableError, match=r"proxy http://127\.0\.0\.1:9 does not connect .*proxy-url"):
        who(write({"token": token}, proxy_url="http://127.0.0.1:9"), retry_for_s=0)
    with pytest.raises((UsageError, ClusterUnavailableError), match="socks"):
        who(write({"token": token}, proxy_url="socks9://127.0.0.1:9"), retry_for_s=0)


def test_credentials_that_have_expired_are_one_sentence_with_the_next_step(
    write: Write, tmp_path: Path, cluster: DevCluster
) -> None:
    environment = {**os.environ, "KUBECONFIG": str(write({"token": "expired"})), "GPUQUOTA_HOME": str(tmp_path)}
    done = forked.run(programs.kubectl_gpuquota, "list", environment=environment)
    assert done.returncode == 2
    assert done.stderr == (
        f"Error: the API server {cluster.server} does not accept the credentials of context 'here' in your kubeconfig: "
        "they are missing, or have expired; log in again, and try: kubectl auth whoami\n"
    )


def test_a_user_who_acts_as_another_is_that_one(cluster: DevCluster, write: Write, token: str) -> None:
    acting = {"as": "eve", "as-groups": ["a", "b"], "as-uid": "7", "as-user-extra": {"team/x": ["1", "2"]}}
    found = Calls(Connection.open(str(write({"token": token, **acting})))).create(REVIEWS, {})["status"]["userInfo"]
    assert (found["username"], found["uid"], found["extra"]) == ("eve", "7", {"team/x": ["1", "2"]})
    assert {"a", "b"} <= set(found["groups"])


def test_files_that_are_missing_or_no_kubeconfigs_are_named(tmp_path: Path, write: Write) -> None:
    with pytest.raises(NotFoundError, match=r"none does not exist; name another one in the variable KUBECONFIG"):
        Connection.open(str(tmp_path / "none"))
    for number, content in enumerate(("- a\n- b\n", "{", "text", "", "users: [{}]", "contexts: {a: 1}")):
        path = tmp_path / f"bad-{number}"
        path.write_text(content)
        with pytest.raises(UsageError, match=re.escape(path.name) + r"|kubeconfig contexts is ''"):
            Connection.open(str(path))
    without = write({})
    whole = json.loads(without.read_text())
    without.write_text(json.dumps({**whole, "users": []}))
    with pytest.raises(UsageError, match="kubeconfig users is 'u', but the file has: none"):
        Connection.open(str(without))


def test_a_pod_uses_its_service_account(
    cluster: DevCluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = cluster.server.removeprefix("https://").partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    (tmp_path / "ca.crt").write_bytes(cluster.layout.authority.read_bytes())
    (tmp_path / "namespace").write_text(f"{namespace}\n")
    (tmp_path / "token").write_text(cluster.service_account_token(namespace, "default"))
    connection = Connection(lambda: in_cluster(tmp_path))
    found = Calls(connection).create(REVIEWS, {})["status"]["userInfo"]["username"]
    assert (found, connection.namespace) == (f"system:serviceaccount:{namespace}:default", namespace)
    (tmp_path / "token").write_text("")
    with pytest.raises(UsageError, match="the service account of this pod cannot be used"):
        in_cluster(tmp_path)


def test_the_controller_takes_a_token_or_a_certificate_only(write: Write, tmp_path: Path, token: str) -> None:
    assert from_file(write({"token": token})).token() == token
    with pytest.raises(UsageError, match=r"has 'exec'; give the controller a token or a certificate"):
        from_file(write(plugin(tmp_path, "exit 1")))


def test_without_the_package_the_command_says_what_to_install(cluster: DevCluster) -> None:
    program = "import sys; sys.modules['kubernetes'] = None; from kfp_gpuquota.cli.entry import *; kubectl_plugin()"
    done = subprocess.run(
        [sys.executable, "-c", program, "list"],
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "Error: a cluster on Kubernetes needs the Python package kubernetes, and kubernetes is not installed here; "
        "install it with: pip install 'kfp-gpuquota[kubernetes]'\n",
    )


def test_a_forked_process_has_connections_of_its_own(cluster: DevCluster) -> None:
    calls = Calls(Connection.open(str(cluster.kubeconfig)))
    calls.get("/api")
    if (child := os.fork()) == 0:  # it would answer the parent's next request, if both used one connection
        os._exit(0 if calls.get("/api")["kind"] == "APIVersions" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert calls.get("/version")["major"]
