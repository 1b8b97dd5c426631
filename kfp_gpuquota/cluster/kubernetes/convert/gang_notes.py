"""The annotation of an admitted pod about its gang, by which a restarted controller forms the gang again. Pure.

gpuquota.dev/admitted-gang: "4"          four pods start together
gpuquota.dev/admitted-gang: "1+7x2"      one; seven pods of two GPUs were not created yet when it was admitted
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kfp_gpuquota.cluster.kubernetes.convert.owners import Rest
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_DEVICES, bounded_number

MAX_GROUP: Final = 10_000  # pods that start together
_LONGEST: Final = 200
_REST: Final = re.compile(r"(\d+)x(\d+)", re.ASCII)


class GangNote(NamedTuple):
    """How many pods of the group start together, and for which pods that do not exist yet quota is reserved."""

    size: int = 0
    rest: tuple[Rest, ...] = ()

    @property
    def text(self) -> str:
        """Return the annotation; "" for a pod without a gang."""
        if not self.size:
            return ""
        return "+".join((str(self.size), *(f"{rest.pods}x{rest.gpus}" for rest in self.rest)))


NO_GANG: Final = GangNote()


def gang_note(text: str) -> GangNote:
    """Return what the annotation states; NO_GANG for any other text."""
    size, *parts = text[:_LONGEST].split("+")
    pods = bounded_number(size, MAX_GROUP)
    if not pods:
        return NO_GANG
    found = (match for match in map(_REST.fullmatch, parts) if match is not None)
    counts = ((bounded_number(match[1], MAX_GROUP), bounded_number(match[2], MAX_DEVICES)) for match in found)
    return GangNote(pods, tuple(Rest(count, gpus) for count, gpus in counts if count and gpus))
