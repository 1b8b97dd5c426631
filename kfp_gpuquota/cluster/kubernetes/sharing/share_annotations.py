"""Who shares a GPU, as it is written on the pod that reserves it: by the controller, for the node's agent. Pure.

An agent believes these notes only, for nobody else can write them: annotations of pods in a team's namespace could
claim a part that nobody has given them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.share import limit_mib, request_mib
from kfp_gpuquota.fractions.claims import Claim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import JobSpec


class ShareNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pod's part of each of `gpus` (UUIDs): a fraction, or MiB, as a JobSpec has them.

    `ticket` names this admission of this holder and no other one; `pod` is "namespace/name", for people; `since` is
    when it was given its place, in seconds since the epoch. `uid` is the pod's, once it is on its node: until then it
    is a newcomer.
    """

    ticket: str
    pod: str
    since: float
    uid: str = ""
    gpus: tuple[str, ...] = ()
    gpu_fraction: float | None = None
    gpu_fraction_limit: float | None = None
    gpu_memory_mib: int | None = None
    gpu_memory_limit_mib: int | None = None
    priority: int = 50

    @property
    def holder(self) -> str:
        """Who holds the part: the pod's uid, or an ElasticJob's worker."""
        return self.ticket.rpartition("@")[0]

    @property
    def project(self) -> str:
        """The namespace."""
        return self.pod.partition("/")[0]


_NOTES = msgspec.json.Decoder(tuple[ShareNote, ...])


def note_of(spec: JobSpec, holder: str, pod: str, since: float) -> ShareNote:
    """The note of a job's worker that has its place `since`."""
    return ShareNote(
        ticket=f"{holder}@{since:.6f}",
        pod=pod,
        since=since,
        gpu_fraction=spec.gpu_fraction,
        gpu_fraction_limit=spec.gpu_fraction_limit,
        gpu_memory_mib=spec.gpu_memory_mib,
        gpu_memory_limit_mib=spec.gpu_memory_limit_mib,
        priority=spec.effective_priority,
    )


def written(notes: Iterable[ShareNote]) -> str:
    """As an annotation, in an order of their own; "" for none."""
    ordered = sorted(notes, key=lambda note: note.ticket)
    return msgspec.json.encode(ordered).decode() if ordered else ""


def read(text: str) -> tuple[ShareNote, ...]:
    """The notes of a reserved GPU; none where they cannot be read."""
    try:
        return _NOTES.decode(text) if text else ()
    except msgspec.DecodeError:
        return ()


def claim(note: ShareNote, gpu: str, total_mib: int) -> Claim:
    """What the pod, or the newcomer, may have of one of its GPUs."""
    return Claim(
        workload=note.uid or note.ticket,
        device=gpu,
        request_mib=request_mib(note, total_mib),
        limit_mib=limit_mib(note, total_mib),
        priority=note.priority,
        since=note.since,
        running=bool(note.uid),
    )
