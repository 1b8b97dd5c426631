"""The sharers of a GPU, which the controller annotates on its reservation pod for the node's agent. Pure.

The agent trusts only these notes, which only the controller can write: annotations of pods in a team's namespace could
claim a share that was not assigned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.node import usable_mib
from kfp_gpuquota.api.share import limit_mib, request_mib, share_fields
from kfp_gpuquota.fractions.claims import Claim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import JobSpec


class ShareNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pod's share of each of its GPUs: a fraction or MiB, as in a JobSpec."""

    ticket: str  # identifies this admission of the holder
    pod: str  # "namespace/name", for messages
    since: float  # of the assignment, in seconds since 1970
    uid: str = ""  # the pod's, after it was bound
    gpus: tuple[str, ...] = ()  # by UUID
    gpu_fraction: float | None = None
    gpu_fraction_limit: float | None = None
    gpu_memory_mib: int | None = None
    gpu_memory_limit_mib: int | None = None
    priority: int = 50
    memory_reserve: float = 0.0  # the part of each GPU's memory that is the driver's

    @property
    def holder(self) -> str:
        """Return the holder of the share: the pod's uid, or the id of an ElasticJob's worker."""
        return self.ticket.rpartition("@")[0]

    @property
    def project(self) -> str:
        """Return the namespace of the pod."""
        return self.pod.partition("/")[0]


_NOTES = msgspec.json.Decoder(tuple[ShareNote, ...])


def note_of(spec: JobSpec, holder: str, pod: str, since: float) -> ShareNote:
    """Return the note of a holder whose devices were assigned at `since`."""
    return ShareNote(
        ticket=f"{holder}@{since:.6f}",
        pod=pod,
        since=since,
        priority=spec.effective_priority,
        **share_fields(spec),
    )


def written(notes: Iterable[ShareNote], memory_reserve: float = 0.0) -> str:
    """Return the notes as an annotation, sorted by ticket; "" for none. `memory_reserve`: the driver's part."""
    ordered = [msgspec.structs.replace(note, memory_reserve=memory_reserve) for note in notes]
    ordered.sort(key=lambda note: note.ticket)
    return msgspec.json.encode(ordered).decode() if ordered else ""


def read(text: str) -> tuple[ShareNote, ...]:
    """Return the notes of an annotation; () if it cannot be decoded."""
    try:
        return _NOTES.decode(text) if text else ()
    except msgspec.DecodeError:
        return ()


def claim(note: ShareNote, gpu: str, total_mib: int) -> Claim:
    """Return the pod's claim on one of its GPUs."""
    total_mib = usable_mib(total_mib, note.memory_reserve)
    return Claim(
        workload=note.uid or note.ticket,
        device=gpu,
        request_mib=request_mib(note, total_mib),
        limit_mib=limit_mib(note, total_mib),
        priority=note.priority,
        since=note.since,
        running=bool(note.uid),
    )
