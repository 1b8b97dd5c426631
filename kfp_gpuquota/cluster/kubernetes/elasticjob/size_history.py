"""A job's progress and the changes of its size, as its status has them: pure.

The last few are kept. Every change is one more write of the whole status, so a job that breathes for weeks must not
drag all of its history along.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Progress, Reason, ReasonCode, Resize
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import SizeChange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import TrainingProgress

KEPT: Final = 20


def size_changes(resizes: Sequence[Resize]) -> tuple[SizeChange, ...]:
    """The last ones, for the status."""
    return tuple(map(_size_change, resizes[-KEPT:]))


def resizes_of(told: Sequence[SizeChange]) -> tuple[Resize, ...]:
    """What the status told of them."""
    return tuple(map(_resize, told))


def reason_of(code: str, message: str) -> Reason:
    """A code that this version does not know is the least of what it could be: something fits."""
    known = {each.value for each in ReasonCode}
    return Reason(code=ReasonCode(code) if code in known else ReasonCode.FITS, message=message)


def _size_change(resize: Resize) -> SizeChange:
    return SizeChange(
        time=datetime.fromtimestamp(round(resize.at, 3), UTC),
        from_gpus=resize.from_gpus,
        to_gpus=resize.to_gpus,
        generation=resize.generation,
        step=resize.step,
        reason=resize.reason.code.value,
        message=resize.reason.message,
        pause_ms=resize.pause_ms,
        lost_steps=resize.lost_steps,
    )


def _resize(told: SizeChange) -> Resize:
    return Resize(
        at=told.time.timestamp(),
        from_gpus=told.from_gpus,
        to_gpus=told.to_gpus,
        generation=told.generation,
        step=told.step,
        reason=reason_of(told.reason, told.message),
        pause_ms=told.pause_ms,
        lost_steps=told.lost_steps,
    )


def progress_of(said: TrainingProgress | None) -> Progress | None:
    """Return the training's progress that an object's status has."""
    return None if said is None else msgspec.convert(said, Progress, from_attributes=True)
