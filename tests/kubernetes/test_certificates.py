"""The webhook's certificates: as pure functions, and in a Secret that several replicas share."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.cluster import certificates
from kfp_gpuquota.cluster.certificates import (
    AUTHORITY_VALID_S,
    DAY_S,
    RENEW_BEFORE_S,
    SERVING_VALID_S,
    Material,
    maintained,
)
from kfp_gpuquota.cluster.kubernetes.admission import server as webhook
from kfp_gpuquota.cluster.kubernetes.admission.mounted_certificate import MountedCertificate
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.transport.tls import load_pair
from tests import forked, programs
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.controlled import Controlled
    from tools.devcluster import DevCluster

NAMES = ("gpuquota-webhook.gpuquota-system.svc", "127.0.0.1")
NOW = 1_800_000_000.0


def shakes_hands(trusted: bytes, serving: certificates.KeyPair, name: str) -> bool:
    """Whether a client that trusts `trusted` accepts the certificate under that name (in memory, both ends real)."""
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(server_context, serving.certificate, serving.key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_context = ssl.create_default_context(cadata=trusted.decode())
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return client.version() is not None


def test_a_client_that_trusts_the_authority_accepts_the_certificate_under_its_names_only() -> None:
    material = maintained(None, NAMES, time.time())
    assert all(shakes_hands(material.trusted, material.serving, name) for name in NAMES)
    assert not shakes_hands(material.trusted, material.serving, "gpuquota-webhook.elsewhere.svc")
    stranger = maintained(None, NAMES, time.time())
    assert not shakes_hands(stranger.trusted, material.serving, NAMES[0])


def test_what_is_good_for_a_while_is_left_as_it_is() -> None:
    material = maintained(None, NAMES, NOW)
    assert maintained(material, NAMES, NOW) is material
    assert maintained(material, tuple(reversed(NAMES)), NOW + SERVING_VALID_S - RENEW_BEFORE_S - 1) is material


def test_the_certificate_is_renewed_before_it_ends_and_the_authority_stays() -> None:
    material = maintained(None, NAMES, NOW)
    later = NOW + SERVING_VALID_S - RENEW_BEFORE_S + 1
    renewed = maintained(material, NAMES, later)
    assert renewed.authority == material.authority
    assert renewed.trusted == material.trusted
    assert certificates.expires_at(renewed.serving.certificate) == pytest.approx(later + SERVING_VALID_S, abs=1)


def test_replicas_of_two_versions_do_not_renew_in_turns() -> None:
    old, new = NAMES, (NAMES[0], "gpuquota-membership.gpuquota-system.svc")
    first = maintained(None, old, NOW)
    second = maintained(first, new, NOW)
    assert set(certificates.names_of(second.serving.certificate)) == {*old, *new}
    assert maintained(second, old, NOW) is second
    assert maintained(second, new, NOW) is second
    later = maintained(second, new, NOW + SERVING_VALID_S)
    assert set(certificates.names_of(later.serving.certificate)) == set(new), "what nobody needs goes with the renewal"


def test_while_the_authority_changes_clients_trust_both() -> None:
    # an authority that ends in a hundred days is renewed now, and what the old one has signed is still shown by others
    now = time.time()
    old = maintained(None, NAMES, now - AUTHORITY_VALID_S + 100 * DAY_S)
    old = msgspec.structs.replace(old, serving=certificates.issue(old.authority, NAMES, now))
    new = maintained(old, NAMES, now)
    assert new.authority != old.authority
    assert shakes_hands(new.trusted, new.serving, NAMES[0])
    assert shakes_hands(new.trusted, old.serving, NAMES[0])
    assert not shakes_hands(old.trusted, new.serving, NAMES[0])
    assert maintained(new, NAMES, now) is new


def test_keys_and_certificates_that_do_not_belong_together_are_noticed() -> None:
    one, other = (maintained(None, NAMES, NOW) for _ in range(2))
    certificates.check(one)
    for broken in (
        msgspec.structs.replace(one, serving=other.serving),
        msgspec.structs.replace(one, authority=other.authority),
        Material(
            authority=one.authority,
            serving=certificates.KeyPair(certificate=one.serving.certificate, key=other.serving.key),
            trusted=one.trusted,
        ),
    ):
        with pytest.raises(ValueError, match="another"):
            certificates.check(broken)


def put_pair(folder: Path, pair: certificates.KeyPair) -> None:
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)


def test_a_mounted_certificate_is_loaded_again_when_it_was_renewed(tmp_path: Path) -> None:
    now = time.time()
    first = maintained(None, NAMES, now)
    put_pair(tmp_path, first.serving)
    mounted = MountedCertificate(tmp_path)
    mounted.refresh()
    assert mounted.expires_at == certificates.expires_at(first.serving.certificate)
    renewed = certificates.issue(first.authority, NAMES, now + 3600)
    put_pair(tmp_path, renewed)
    mounted.refresh()
    assert mounted.expires_at == certificates.expires_at(renewed.certificate)
    (tmp_path / "tls.key").write_bytes(first.serving.key)
    with pytest.raises(RunError, match=r"--cert-dir .* has no usable tls.crt and tls.key"):
        mounted.refresh()
    assert mounted.expires_at == certificates.expires_at(renewed.certificate), "the last good one stays"


# In a real API server


def secret(cluster: DevCluster, namespace: str) -> dict[str, Any]:
    return cluster.api.get(f"/api/v1/namespaces/{namespace}/secrets/{webhook.SECRET}")


async def refreshed(cluster: DevCluster, namespace: str, now: float, replicas: int = 1) -> list[Material]:
    """One round of each of so many replicas, all at once."""
    async with Connection(load_credentials(str(cluster.kubeconfig), None)) as connection:
        keepers = [webhook.Certificates(connection, namespace, NAMES) for _ in range(replicas)]
        return list(await asyncio.gather(*(keeper.refresh(now) for keeper in keepers)))


def test_replicas_that_start_together_agree_on_one_authority(cluster: DevCluster, namespace: str) -> None:
    first, *others = asyncio.run(refreshed(cluster, namespace, time.time(), replicas=5))
    assert all(other == first for other in others)
    assert base64.b64decode(secret(cluster, namespace)["data"]["ca.crt"]) == first.trusted
    assert asyncio.run(refreshed(cluster, namespace, time.time())) == [first], "the next one finds it"


def test_replicas_renew_once(cluster: DevCluster, namespace: str) -> None:
    now = time.time()
    (before,) = asyncio.run(refreshed(cluster, namespace, now))
    after = asyncio.run(refreshed(cluster, namespace, now + SERVING_VALID_S - DAY_S, replicas=5))
    assert len({one.serving.certificate for one in after}) == 1
    assert after[0].serving != before.serving
    assert after[0].authority == before.authority


@pytest.mark.parametrize("damage", [{"tls.key": None}, {"ca.crt": "bm90aGluZw=="}, {"tls.crt": "AAAA"}, {"ca.key": ""}])
def test_a_damaged_secret_is_made_anew(cluster: DevCluster, namespace: str, damage: dict[str, Any]) -> None:
    (before,) = asyncio.run(refreshed(cluster, namespace, time.time()))
    path = f"/api/v1/namespaces/{namespace}/secrets/{webhook.SECRET}"
    cluster.api.patch(path, {"data": damage})
    (after,) = asyncio.run(refreshed(cluster, namespace, time.time()))
    assert after != before
    certificates.check(after)
    assert base64.b64decode(secret(cluster, namespace)["data"]["tls.crt"]) == after.serving.certificate


def test_the_webhook_serves_a_mounted_certificate_and_writes_no_secret(
    controlled: Controlled, namespace: str, tmp_path: Path
) -> None:
    material = maintained(None, ["127.0.0.1"], time.time())
    put_pair(tmp_path, material.serving)
    port = free_port()
    keys = f"--keys-namespace={namespace}"
    controlled.start("--reviews-only", keys, f"--cert-dir={tmp_path}", f"--webhook-port={port}")
    context = ssl.create_default_context(cadata=material.authority.certificate.decode())
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as shaken,
    ):
        shown = shaken.getpeercert(binary_form=True)
    assert shown == ssl.PEM_cert_to_DER_cert(material.serving.certificate.decode())
    assert not controlled.cluster.api.items(f"/api/v1/namespaces/{namespace}/secrets")


def test_a_controller_that_plans_takes_no_mounted_certificate(cluster: DevCluster, tmp_path: Path) -> None:
    ended = forked.run(programs.controller, f"--kubeconfig={cluster.kubeconfig}", f"--cert-dir={tmp_path}")
    assert ended.returncode == 2
    assert "add --reviews-only" in ended.stdout + ended.stderr
