"""What a job says of this worker and of where the training stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from elastic_runtime.loop.member import Member
    from elastic_runtime.loop.session import Session
    from elastic_runtime.plan.position import Position


class JobView:
    """The properties of a job, which change as the training goes on."""

    _member: Member
    _session: Session | None = None

    @property
    def rank(self) -> int:
        """This worker's rank now; it may change at each step. LoopError before the loop begins."""
        return self._member.rank_and_size[0]

    @property
    def world_size(self) -> int:
        """The number of workers that train now. LoopError before the loop begins."""
        return self._member.rank_and_size[1]

    @property
    def is_leader(self) -> bool:
        """Whether this worker is rank 0, which prints and saves. False before the loop, when ranks are undetermined."""
        return self._member.placed and self.rank == 0

    @property
    def placed(self) -> bool:
        """Whether this worker has a rank: from the loop's beginning on."""
        return self._member.placed

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the workers that train now, by rank; empty before the loop, and without a coordinator."""
        return self._member.members

    @property
    def leaving(self) -> bool:
        """Whether this worker is leaving the job."""
        return self._member.leaving

    @property
    def step(self) -> int:
        """Global steps applied so far, over all epochs and all sizes; within an iteration: before it."""
        return self._prepared.steps_before

    @property
    def applied(self) -> bool:
        """Whether this iteration completes a global step, so that the optimizer acts in it."""
        return self._prepared.applied

    @property
    def samples(self) -> int:
        """The number of samples of this iteration; 0 where they are copies, of a worker without one in a small step."""
        micro = self._prepared.micro_batch
        return micro.size if micro else 0

    @property
    def begins_step(self) -> bool:
        """Whether this iteration is the first one of a global step, or of its repetition; before job.backward."""
        return self._prepared.begins_step

    @property
    def position(self) -> Position:
        """The training's position after this iteration: epoch, steps of it, total steps."""
        return self._prepared.reached

    @property
    def _prepared(self) -> Session:
        if self._session is None:
            raise LoopError("job.prepare(model, optimizer, loader) comes before this")
        return self._session
