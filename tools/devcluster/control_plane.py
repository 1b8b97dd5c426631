"""The programs of the control plane, their certificates, tokens and kubeconfigs."""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from kfp_gpuquota.cluster import certificates
from tools.devcluster.layout import ADMIN, SERVICE_ADDRESS, SERVICE_RANGE
from tools.devcluster.processes import Program

if TYPE_CHECKING:
    from pathlib import Path

    from tools.devcluster.api import Api
    from tools.devcluster.layout import Layout, Options, Ports

NODE: Final = "real-0"
IDENTITIES: Final = {
    ADMIN: "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    f"system:node:{NODE}": "system:nodes",
    "kwok": "system:masters",
}
KUBELET_CLIENT: Final = "kube-apiserver-kubelet-client"
PERSON: Final = "person"
"""The user of the client certificate certificates/person.crt, who has no rights but those of everybody."""
SERVING_NAMES: Final = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", "127.0.0.1")


def prepare(layout: Layout, ports: Ports, address: str) -> None:
    """Write certificates, tokens and kubeconfigs. `address` is the one at which pods find the API server."""
    folder = layout.authority.parent
    folder.mkdir(parents=True, exist_ok=True)
    layout.kubeconfig_of(ADMIN).parent.mkdir(exist_ok=True)
    now = time.time()
    authority = certificates.new_authority("devcluster", now)
    serving = certificates.issue(authority, sorted({*SERVING_NAMES, SERVICE_ADDRESS, address}), now)
    write_secret(layout.authority, authority.certificate)
    write_secret(folder / "apiserver.crt", serving.certificate)
    write_secret(folder / "apiserver.key", serving.key)
    client = certificates.issue(authority, [KUBELET_CLIENT], now, client=True)
    write_secret(folder / "kubelet-client.crt", client.certificate)
    write_secret(folder / "kubelet-client.key", client.key)
    person = certificates.issue(authority, [PERSON], now, client=True)
    write_secret(folder / "person.crt", person.certificate)
    write_secret(folder / "person.key", person.key)
    write_secret(folder / "service-accounts.key", _signing_key())
    tokens = {user: secrets.token_hex(16) for user in IDENTITIES}
    lines = (f'{tokens[user]},{user},{user},"{groups}"\n' for user, groups in IDENTITIES.items())
    write_secret(folder / "tokens.csv", "".join(lines).encode())
    for user, token in tokens.items():
        write_secret(layout.kubeconfig_of(user), kubeconfig(layout, server(ports), {"token": token}))
    write_secret(layout.kubeconfig, layout.kubeconfig_of(ADMIN).read_bytes())


def server(ports: Ports) -> str:
    """The API server's address on this machine."""
    return f"https://127.0.0.1:{ports.api}"


def kubeconfig(layout: Layout, address: str, user: dict[str, object], namespace: str = "default") -> bytes:
    """A kubeconfig (JSON, which is YAML) of one context, `devcluster`."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "devcluster", "cluster": {"server": address, "certificate-authority": str(layout.authority)}}
        ],
        "users": [{"name": "devcluster", "user": user}],
        "contexts": [
            {"name": "devcluster", "context": {"cluster": "devcluster", "user": "devcluster", "namespace": namespace}}
        ],
        "current-context": "devcluster",
    }
    return json.dumps(content, indent=1).encode()


def store(binaries: Path, layout: Layout, ports: Ports) -> Program:
    """etcd."""
    client, peer = f"http://127.0.0.1:{ports.etcd}", f"http://127.0.0.1:{ports.etcd_peer}"
    # fsync is what a power failure needs; a test's folder does not outlive one
    return Program(
        name="etcd",
        argv=(
            str(binaries / "etcd"),
            f"--data-dir={layout.etcd}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--log-level=warn",
        ),
    )


def api_server(binaries: Path, layout: Layout, ports: Ports, options: Options, address: str) -> Program:
    """kube-apiserver, with RBAC, the Node authorizer and limits wide enough for a load test."""
    folder = layout.authority.parent
    return Program(
        name="kube-apiserver",
        argv=(
            str(binaries / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{ports.etcd}",
            f"--secure-port={ports.api}",
            f"--bind-address={'0.0.0.0' if options.kubelet else '127.0.0.1'}",  # noqa: S104  pods must reach it
            f"--advertise-address={address}",
            # 1.37 does not start with an address that could not be an endpoint
            *(() if options.kubelet else ("--endpoint-reconciler-type=none",)),
            f"--tls-cert-file={folder / 'apiserver.crt'}",
            f"--tls-private-key-file={folder / 'apiserver.key'}",
            f"--client-ca-file={layout.authority}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            f"--service-account-key-file={folder / 'service-accounts.key'}",
            f"--service-account-signing-key-file={folder / 'service-accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            # without a kube-proxy, a webhook's Service is found by its endpoints
            "--enable-aggregator-routing=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
            f"--kubelet-client-key={folder / 'kubelet-client.key'}",
            "--max-requests-inflight=3000",
            "--max-mutating-requests-inflight=1000",
            *options.flags.get("kube-apiserver", ()),
        ),
    )


def controllers(binaries: Path, layout: Layout, options: Options) -> list[Program]:
    """kube-controller-manager and kube-scheduler.

    Fake nodes send no heartbeats, and none are missed: on a busy machine they would be late, and KWOK never marks the
    pods of a node ready again that was NotReady once. Without fake nodes, a real node's are missed as on any cluster.
    """
    folder = layout.authority.parent
    patience = () if options.kwok_nodes is None else ("--node-monitor-grace-period=24h",)
    return [
        Program(
            name="kube-controller-manager",
            argv=(
                *_controller(binaries, layout, "kube-controller-manager"),
                f"--service-account-private-key-file={folder / 'service-accounts.key'}",
                f"--root-ca-file={layout.authority}",
                "--use-service-account-credentials",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
                *patience,
                *options.flags.get("kube-controller-manager", ()),
            ),
        ),
        Program(
            name="kube-scheduler",
            argv=(
                *_controller(binaries, layout, "kube-scheduler"),
                "--kube-api-qps=1000",
                "--kube-api-burst=2000",
                *options.flags.get("kube-scheduler", ()),
            ),
        ),
    ]


def allow_kubelet_access(api: Api) -> None:
    """Let the API server read logs and run commands on the node, as every installer does."""
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": KUBELET_CLIENT}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"}
    api.create(
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        {"metadata": {"name": KUBELET_CLIENT}, "subjects": [subject], "roleRef": role},
    )


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _controller(binaries: Path, layout: Layout, name: str) -> tuple[str, ...]:
    return (
        str(binaries / name),
        f"--kubeconfig={layout.kubeconfig_of(f'system:{name}')}",
        "--secure-port=0",  # nothing asks it, and a port that is taken would end it
        "--leader-elect=false",
    )


def _signing_key() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
