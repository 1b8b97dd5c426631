"""The numbers that ride at the end of the last bucket, and would otherwise need a collective of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from elastic_runtime.buffers import FollowedBuffers

_HEAD = 5
_BASE = 1 << 20


class Tail:
    """Samples counted, the vote for the next generation, and rank 0's buffers. All are summed over the workers.

    A vote is how far the prepared generation's number is above the one in force, 0 for none; its square travels with
    it. Sums W * v and W * v**2 mean that all W workers voted v: by Cauchy-Schwarz no other votes have both.
    """

    def __init__(self, buffers: FollowedBuffers) -> None:
        self._buffers = buffers
        self.size = _HEAD + buffers.size
        self._vote = 0
        self._numbers = torch.zeros(_HEAD)
        self._known = (0, 0, 0.0)  # what they were made of: the same in most steps
        self.weight = 0.0  # of all workers' losses in the step that was taken last

    def fill(self, section: torch.Tensor, *, leader: bool, samples: int, vote: int, weight: float = 0.0) -> None:
        """This worker's numbers. `weight`: of its losses, beside their samples; whole ones stay exact up to 2**44."""
        self._vote = vote
        if self._known != (samples, vote, weight):
            self._known = (samples, vote, weight)
            self._numbers = torch.tensor([samples, vote, vote * vote, *divmod(weight, _BASE)])
        section[:_HEAD].copy_(self._numbers)
        if self._buffers.size:
            self._buffers.fill(section[_HEAD:], leader=leader)

    def take(self, section: torch.Tensor, *, keeps: bool, samples: int, workers: int) -> bool:
        """Everybody's sums; whether all voted as this worker did, for a generation. `keeps`: the buffers are its own.

        LoopError where the workers' samples do not add up to the step's: their loops iterate differently.
        """
        *whole, high, low = section[:_HEAD].tolist()
        counted, votes, squares = (round(value) for value in whole)
        self.weight = high * _BASE + low
        if counted != samples:
            raise LoopError(
                f"the workers counted {counted} samples in a step of {samples}; every worker must run the same loop "
                "over a dataset of the same length"
            )
        if not keeps and self._buffers.size:
            self._buffers.take(section[_HEAD:])
        return self._vote > 0 and votes == workers * self._vote and squares == workers * self._vote**2
