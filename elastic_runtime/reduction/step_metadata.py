"""Numbers that are summed at the end of the last gradient bucket, where they need no collective of their own."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import LoopError
from elastic_runtime.validation.agreement import MARKS, Agreement

if TYPE_CHECKING:
    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.reduction.buffers import FollowedBuffers
    from elastic_runtime.reduction.gradient_noise import PartNorms

_HEAD = 9 + MARKS
_BASE = 1 << 20
CHECKSUMS = 251
"""A prime, and small enough for sums of squares over hundreds of workers to be exact."""


@dataclass(frozen=True)
class Share:
    """One worker's part of a step, as it enters the sum.

    `vote`: how far the prepared generation's number is above the one in force, 0 for none. `weight`: of its losses,
    beside their samples; whole ones stay exact up to 2**44. `busy_s`: seconds it took. `checksum`: below `CHECKSUMS`,
    equal for workers that are at the same step of the same order. `step`: the number of steps that were applied before.
    `loss`: this worker's part of the global batch's loss, if an optimizer asks for it.
    """

    samples: int
    vote: int = 0
    weight: float = 0.0
    busy_s: float = 0.0
    checksum: int = 0
    step: int = 0
    loss: float = 0.0


class StepMetadata:
    """The workers' shares, rank 0's values that all must have, and rank 0's buffers. All are summed over the workers.

    With a vote v its square travels. Sums W * v and W * v**2 mean that all W workers voted v: by Cauchy-Schwarz no
    other votes have both. The same shows whether all workers are at one step.
    """

    def __init__(
        self, buffers: FollowedBuffers, agreement: Agreement | None = None, norms: PartNorms | None = None
    ) -> None:
        self._buffers, self._norms = buffers, norms
        self.agreement = self._agreement = agreement or Agreement()
        self._before_buffers = _HEAD + self._agreement.size
        self._before_norms = self._before_buffers + buffers.size
        self.size = self._before_norms + (norms.size if norms else 0)
        self._share = Share(0)
        self._numbers = array("d", [0.0] * _HEAD)
        self._values = torch.frombuffer(self._numbers, dtype=torch.float64)  # the same memory
        self.weight = 0.0  # of all workers' losses in the step that was taken last
        self.busy_s = 0.0  # of all workers together
        self.loss = 0.0  # the sum of all workers' parts

    def fill(self, section: torch.Tensor, share: Share, *, leader: bool) -> None:
        """Write this worker's numbers into `section`. Shape: (size,)."""
        self._share = share
        vote, checksum = share.vote, share.checksum
        numbers = [share.samples, vote, vote**2, checksum, checksum**2, share.busy_s, share.loss]
        numbers += divmod(share.weight, _BASE)
        numbers += self._agreement.marks()
        self._numbers[:] = array("d", numbers)
        section[:_HEAD].copy_(self._values)
        if self._agreement.size:
            self._agreement.fill(section[_HEAD : self._before_buffers], share.step, leader=leader)
        if self._buffers.size:
            self._buffers.fill(section[self._before_buffers : self._before_norms], leader=leader)
        if self._norms:
            self._norms.fill(section[self._before_norms :])

    def take_alone(self, share: Share, samples: int) -> bool:
        """Read the sums of one worker, which are its own numbers, as `take` does."""
        _check_samples(share.samples, samples)
        self._share, self.weight, self.busy_s, self.loss = share, share.weight, share.busy_s, share.loss
        if self._agreement.size:
            self._agreement.train_alone()
        if self._norms:
            self._norms.take_alone()
        return share.vote > 0

    def take(
        self, section: torch.Tensor, *, keeps: bool, samples: int, workers: int, group: Group | None = None
    ) -> bool:
        """Read the sums; return whether all workers voted for the same generation. `keeps`: buffers are not set.

        `group`: of all workers, for values that turn out to differ.

        LoopError if the workers are not at the same step, or their samples do not add up to it; ModelMismatchError if
        hyperparameters or parameters differ here, CollectiveError if they do on another worker.
        """
        numbers = section[:_HEAD].tolist()
        counted, votes, vote_squares, checksums, checksum_squares, self.busy_s, self.loss, high, low, *marks = numbers
        self.weight = high * _BASE + low
        if not _unanimous(self._share.checksum, checksums, checksum_squares, workers):
            raise LoopError(
                "the workers are not at the same step of the same order of samples: every worker must run the same "
                "loop (leave it by `break` only where all do, after the same step) over the same dataset, with the "
                "same seed and the same sampler"
            )
        _check_samples(round(counted), samples)
        if self._agreement.size and workers > 1:
            self._agreement.check(marks, section[_HEAD : self._before_buffers], self._share.step, workers, group)
        if not keeps and self._buffers.size:
            self._buffers.take(section[self._before_buffers : self._before_norms])
        if self._norms:
            self._norms.take(section[self._before_norms :])
        vote = self._share.vote
        return vote > 0 and _unanimous(vote, votes, vote_squares, workers)


def _check_samples(counted: int, samples: int) -> None:
    if counted != samples:
        raise LoopError(
            f"the workers counted {counted} samples in a step of {samples}; every worker must run the same loop over a "
            "dataset of the same length"
        )


def _unanimous(value: int, total: float, squares: float, workers: int) -> bool:
    """Return whether `workers` values, all equal to `value`, have these sums, up to rounding."""
    return math.isclose(total, workers * value, rel_tol=1e-6, abs_tol=0.5) and math.isclose(
        squares, workers * value**2, rel_tol=1e-6, abs_tol=0.5
    )
