"""The audit log has the requester of each change, and the answer."""

from __future__ import annotations

import getpass
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api.wire import StopAction
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError, UnauthorizedError
from kfp_gpuquota.server.client import Client

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster


def entries(cluster: EmbeddedCluster) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cluster.home.audit_file.read_text().splitlines()]


def test_each_change_is_written_with_who_asked_and_what_became_of_it(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train")
    embedded_cluster.client.list_jobs("team-a")
    with pytest.raises(GpuQuotaError):
        embedded_cluster.submit("huge", gpus=99)
    embedded_cluster.client.delete_job("team-a", "train")
    with pytest.raises(NotFoundError):
        embedded_cluster.client.stop_jobs("team-a", ["one", "two"], StopAction.DELETE)
    asked = [(one["request"].split()[0], one.get("target", ""), one["status"]) for one in entries(embedded_cluster)]
    assert asked == [
        ("POST", "team-a", 201),
        ("POST", "team-a/train", 201),
        ("POST", "team-a/huge", 422),
        ("DELETE", "", 204),
        ("POST", "one,two", 404),
    ]
    for one in entries(embedded_cluster):
        assert (one["uid"], one["user"], one["pid"]) == (os.getuid(), getpass.getuser(), os.getpid())
        assert one["program"]
    refused, deleted = entries(embedded_cluster)[2:4]
    assert "gpus is 99" in refused["error"]
    assert deleted["request"].endswith("/team-a/jobs/train")
    assert embedded_cluster.home.audit_file.stat().st_mode & 0o777 == 0o600


def test_a_wrong_token_is_written_too(embedded_cluster: EmbeddedCluster) -> None:
    intruder = Client(lambda: (embedded_cluster.home.socket_file, "wrong"), retry_for_s=1.0)
    with pytest.raises(UnauthorizedError):
        intruder.delete_job("team-a", "train")
    (one,) = entries(embedded_cluster)
    assert (one["status"], one["pid"]) == (401, os.getpid())
