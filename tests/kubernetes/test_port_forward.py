"""`kubectl port-forward` as a program that starts late, fails, or ignores its end, and what reads through it."""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.kubernetes.user_client import port_forward
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.cluster.kubernetes.user_client.port_forward import forwarded
from kfp_gpuquota.dsl.pipelines import port_forward as kfp
from kfp_gpuquota.errors import ClusterUnavailableError, NotFoundError, UsageError
from tests.kubernetes.users import connection_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.devcluster import DevCluster


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forward, "_STARTS_WITHIN_S", 2.0)
    monkeypatch.setattr(port_forward, "_STOPS_WITHIN_S", 0.2)


def ended(folder: Path) -> bool:
    """Whether kubectl has ended."""
    return not os.path.exists(f"/proc/{(folder / 'pid').read_text().strip()}")  # noqa: PTH110


def test_the_local_port_is_the_one_that_kubectl_chose(kubectl: Callable[[str], Path]) -> None:
    folder = kubectl("echo warning: slow >&2; echo 'Forwarding from 127.0.0.1:4321 -> 8080'; exec sleep 60")
    with forwarded("blue", "system", "svc/page", 8080, needed_by="gpuquota ui") as url:
        assert url == "http://127.0.0.1:4321"
        assert not ended(folder)
    assert ended(folder)
    arguments = (folder / "arguments").read_text().split()
    assert arguments == [
        "--context=blue",
        "--namespace=system",
        "port-forward",
        "--address=127.0.0.1",
        "svc/page",
        ":8080",
    ]


def test_one_that_ignores_its_end_is_killed(kubectl: Callable[[str], Path]) -> None:
    folder = kubectl("trap '' TERM; echo 'Forwarding from 127.0.0.1:1 -> 2'; while :; do sleep 0.05; done")
    with forwarded("", "system", "pod/a", 2, needed_by="gpuquota ui"):
        assert "--context" not in (folder / "arguments").read_text()
    assert ended(folder)


def test_what_kubectl_prints_is_the_reason_when_it_fails(kubectl: Callable[[str], Path]) -> None:
    kubectl("echo 'error: pods \"a\" is forbidden' >&2; exit 1")
    with (
        pytest.raises(ClusterUnavailableError, match=r'pod/a cannot be reached .*: error: pods "a" is forbidden'),
        forwarded("", "system", "pod/a", 2, needed_by="gpuquota ui"),
    ):
        pytest.fail("it is not reached")


def test_one_that_prints_nothing_is_given_up(kubectl: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kubectl("exec sleep 60")
    monkeypatch.setattr(port_forward, "_STARTS_WITHIN_S", 0.3)
    with (
        pytest.raises(ClusterUnavailableError, match=r"no answer within 0\.3 s"),
        forwarded("", "system", "pod/a", 2, needed_by="gpuquota ui"),
    ):
        pytest.fail("it is not reached")
    assert ended(folder)


def test_without_kubectl_the_message_says_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(UsageError, match="gpuquota ui needs kubectl to reach the cluster, and it is not installed here"),
        forwarded("", "system", "svc/page", 80, needed_by="gpuquota ui"),
    ):
        pytest.fail("it is not reached")


def test_kfps_server_is_forwarded_from_its_service_with_a_token_of_the_profiles_account(
    kubectl: Callable[[str], Path], cluster: DevCluster, namespace: str
) -> None:
    folder = kubectl("echo 'Forwarding from 127.0.0.1:99 -> 8888'; exec sleep 60")
    with kfp.forwarded("", "kubeflow") as url:
        assert url == "http://127.0.0.1:99"
    assert (folder / "arguments").read_text().split()[-2:] == ["svc/ml-pipeline", ":8888"]
    calls = Calls(connection_of(cluster.kubeconfig), retry_for_s=10)
    claims = kfp.profile_token(calls, namespace, "default").split(".")[1]
    content = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    assert content["aud"] == ["pipelines.kubeflow.org"]
    assert content["sub"] == f"system:serviceaccount:{namespace}:default"
    with pytest.raises(NotFoundError, match="nobody"):
        kfp.profile_token(calls, namespace, "nobody")
