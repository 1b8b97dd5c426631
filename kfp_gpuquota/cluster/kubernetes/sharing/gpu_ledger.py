"""The memory ledger of a shared GPU, which its node's agent writes to the reservation pod, for users. Pure.

No decision depends on it, and it is written rarely; the agent's metrics are more exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.wire import ShareView
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
    from kfp_gpuquota.fractions import Row


class Line(msgspec.Struct, frozen=True, rename="camel"):
    """The entry of one pod, in MiB; `pod` is "namespace/name"."""

    pod: str
    total_mib: int
    used_mib: int
    request_mib: int
    limit_mib: int
    granted_mib: int
    listens: bool


def written(rows: Iterable[Row], gpu: str, notes: Mapping[str, ShareNote], total_mib: int) -> str:
    """Return the GPU's entries as an annotation. Sharers that have not started are left out."""
    lines = [
        Line(note.pod, total_mib, row.used_mib, row.request_mib, row.limit_mib, row.granted_mib, row.listens)
        for row in rows
        if row.device == gpu and (note := notes.get(row.workload)) is not None and note.uid
    ]
    return msgspec.json.encode(sorted(lines, key=lambda line: line.pod)).decode() if lines else ""


def views_of(node: str, pods: Iterable[Pod]) -> tuple[ShareView, ...]:
    """Return the ledger entries of a node's reservations, by device."""
    found = [(view, pod) for pod in pods if (view := reservation_pods.view_of(pod)) is not None and view.node == node]
    return tuple(
        ShareView(
            worker=line.pod.partition("/")[2],
            job=line.pod.partition("/")[2],
            project=line.pod.partition("/")[0],
            device=view.device,
            total_mib=line.total_mib,
            used_mib=line.used_mib,
            request_mib=line.request_mib,
            limit_mib=line.limit_mib,
            granted_mib=line.granted_mib,
            listens=line.listens,
        )
        for view, pod in sorted(found, key=lambda one: one[0].device)
        for line in _lines((pod.metadata.annotations or {}).get(labels.LEDGER, ""))
    )


def _lines(text: str) -> tuple[Line, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[Line, ...]) if text else ()
    except msgspec.DecodeError:
        return ()
