"""The memory ledger of a shared GPU on its way from a node's agent to users."""

from __future__ import annotations

from typing import Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing.gpu_ledger import views_of, written
from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
from kfp_gpuquota.fractions import Row

AMOUNTS: dict[str, Any] = {"used_mib": 300, "request_mib": 200, "limit_mib": 800, "granted_mib": 800}


def reservation(ledger: str, node: str = "n", device: int = 1) -> Pod:
    notes = {labels.RESERVES_ON: node, **({labels.LEDGER: ledger} if ledger else {})}
    metadata = {
        "name": f"gpu-{device}",
        "namespace": "gpuquota-reservations",
        "uid": f"u{device}",
        "labels": {labels.RESERVES: str(device)},
        "annotations": notes,
    }
    return msgspec.convert({"metadata": metadata, "spec": {"containers": []}, "status": {}}, Pod)


def test_users_see_the_sharers_that_run_by_device() -> None:
    notes = {
        "a": ShareNote(ticket="1", pod="team-a/train", since=0.0, uid="x"),
        "b": ShareNote(ticket="2", pod="team-b/waits", since=0.0),
    }
    rows = [Row(workload=each, device="GPU-1", listens=True, **AMOUNTS) for each in ("a", "b", "unknown")]
    text = written([*rows, Row(workload="a", device="GPU-2", **AMOUNTS)], "GPU-1", notes, 1000)
    plain = msgspec.convert({"metadata": {"name": "plain", "namespace": "team-a", "uid": "p"}}, Pod)
    (share,) = views_of("n", [plain, reservation(text), reservation("", device=0), reservation(text, node="other")])
    assert (share.project, share.job, share.worker, share.device) == ("team-a", "train", "train", 1)
    assert (share.total_mib, share.used_mib, share.listens) == (1000, 300, True)


def test_what_cannot_be_read_is_shown_as_nothing() -> None:
    assert written([], "GPU-1", {}, 1000) == ""
    assert views_of("n", [reservation("no JSON"), reservation('[{"pod": 1}]', device=2)]) == ()
