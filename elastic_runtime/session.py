"""What one iteration of the loop means.

An iteration is one micro-batch of this worker. Between two iterations, where the loader is asked for the next batch,
lies the only place where the membership changes by agreement; where the gradients are summed, the only one where a
loss is noticed. Everything else in a loop is the script's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_runtime.buffers import FollowedBuffers
from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.modes import ExactMode, FastMode

if TYPE_CHECKING:
    import torch

    from elastic_runtime.batches import MicroBatch
    from elastic_runtime.generations import Generation
    from elastic_runtime.member import Member
    from elastic_runtime.modes import Mode
    from elastic_runtime.position import Position
    from elastic_runtime.state import TrainingState


class Session:
    """The loop of one training: counts micro-batches into steps, repeats a failed step, switches between steps."""

    def __init__(
        self, state: TrainingState, member: Member, scaler: torch.amp.GradScaler | None, exact_seed: int | None
    ) -> None:
        self._state, self._member, self._scaler = state, member, scaler
        self.steps_in_epoch = 0
        self._total_epochs: int | None = None
        buffers = FollowedBuffers([state.model])
        self._mode: Mode = (
            FastMode(state, buffers, member.streams)
            if exact_seed is None
            else ExactMode(state, buffers, member.streams, exact_seed)
        )
        self._micro: MicroBatch | None = None
        self._samples = 0
        self._first = True  # the next iteration begins a step
        self._backward_done = self._complete = self._repeat = False
        self._catching_up = False  # another's state is ahead of this worker's place in the loop
        self._agreed: Generation | None = None

    @property
    def position(self) -> Position:
        """Where the training stands."""
        return self._state.position

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size)."""
        return self._member.place

    def may_act(self) -> bool:
        """Whether optimizer, scheduler and scaler act now: outside an iteration, and where a step is complete."""
        return not self._catching_up and (self._micro is None or self._complete)

    # Epochs

    def start(self, total_epochs: int) -> None:
        """The training begins, here or where others are."""
        self._total_epochs = total_epochs
        self._member.join(self._state)

    def enter_epoch(self) -> None:
        """The loop begins to iterate, perhaps in the middle of an epoch. LoopError outside `job.epochs`."""
        if self._total_epochs is None:
            raise LoopError(
                "the prepared loader is iterated outside job.epochs(...); write: for epoch in job.epochs(N)"
            )
        self._catching_up, self._first, self._micro = False, True, None
        self._change_membership()

    def leave_epoch(self, epoch: int) -> None:
        """The script is done with an epoch, unless others already are further."""
        self._micro = None
        if self.position.epoch == epoch:
            self._state.position = self.position.after_epoch()

    def finish(self) -> None:
        """All epochs are done: wait for the others, so that whoever is a step behind finds a state to go on from."""
        self._catching_up = False
        while not self._member.all_here(self.position.step):
            self._member.recover(self._state, None)
        self._tell_progress(force=True)
        self._member.finish(self.position.step)

    # Iterations

    def begin(self, micro_batch: MicroBatch) -> None:
        """The loop gets this micro-batch next."""
        self._mode.begin(micro_batch, self.position.step, first=self._first)
        if self._first:
            self._samples = 0
        self._micro, self._backward_done, self._complete = micro_batch, False, False

    def backward(self, loss: torch.Tensor) -> None:
        """See `Job.backward`."""
        micro = self._micro
        if micro is None:
            raise LoopError("job.backward was called outside the prepared loader's loop; call it once per iteration")
        if self._backward_done:
            raise LoopError("job.backward was called twice in one iteration; add the losses up and call it once")
        self._backward_done = True
        self._samples += micro.size
        self._mode.reducer.begin(self._member.group, micro, first=self._first)
        self._first = False
        try:
            scaled = loss * micro.weight
            (self._scaler.scale(scaled) if self._scaler else scaled).backward()  # type: ignore[no-untyped-call]
            self._mode.end(micro)
            if micro.last:
                self._complete_step(micro)
        except CollectiveError as error:
            self._repeat_step(error)

    def end(self) -> bool:
        """The loop is done with an iteration; False where what follows is to be planned anew."""
        micro, self._micro = self._micro, None
        if not self._backward_done:
            raise LoopError("an iteration ended without job.backward(loss); every iteration needs it, exactly once")
        if self._repeat:
            self._repeat, self._first = False, True
            return False
        if micro is None or not micro.last:
            return True
        self._first, self._complete = True, False
        self._state.position = self.position.after_step()
        self._tell_progress()
        self._member.save_if_due(self._state)
        if self.position.index >= self.steps_in_epoch:
            return True  # a joiner should begin with a whole epoch: the switch waits for it
        return not self._change_membership()

    def _complete_step(self, micro: MicroBatch) -> None:
        """Sum the gradients; what the tail says is decided by all workers in the same way."""
        vote = self._member.vote()
        leader = self.place[0] == 0
        distance = vote.number - self._member.generation if vote else 0
        self._mode.fill_tail(leader=leader, samples=self._samples, vote=distance)
        self._member.check()
        self._mode.reducer.reduce()
        agreed = self._mode.take_tail(micro, leader=leader, workers=self.place[1])
        self._mode.completed(self.position.step)
        self._complete = True
        self._member.reporter.note_step(micro.step_samples, self.place[1])
        if agreed:
            self._agreed = vote

    def _repeat_step(self, error: CollectiveError) -> None:
        """Back to the step's beginning, and on with whoever is left."""
        self._mode.reducer.abandon()
        self._mode.restore()
        self._repeat, self._agreed = True, None
        self._recover(error)

    def _recover(self, error: CollectiveError | None) -> None:
        epoch = self.position.epoch
        self._member.recover(self._state, error)
        self._catching_up = self.position.epoch != epoch
        self._tell_progress(force=True)

    def _change_membership(self) -> bool:
        """Between two steps: make the switch that was agreed on, or the one that a loss calls for."""
        agreed, self._agreed = self._agreed, None
        if self._member.must_recover:
            self._recover(None)
            return True
        if agreed:
            self._member.switch_to(agreed, self._state)
            self._tell_progress(force=True)
            return True
        self._member.leave_if_told(self._state)
        return False

    def _tell_progress(self, *, force: bool = False) -> None:
        total = None if self._total_epochs is None else self._total_epochs * self.steps_in_epoch
        self._member.tell_progress(self.position, total, force=force)
