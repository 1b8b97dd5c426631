"""The states of a global step on one worker, and the transitions between them.

docs/explanation/elastic.md shows the same table; a test compares them. A trigger that a state does not have is a defect
of the loop: KeyError.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final


class StepState(StrEnum):
    """The state of the step that this worker computes, iteration by iteration."""

    BETWEEN_STEPS = "between steps"  # outside of an iteration; the next one begins a step
    BETWEEN_MICRO_BATCHES = "between micro-batches"  # outside of an iteration, within a step
    STARTED = "started"  # the step's first iteration, before its backward pass
    CONTINUED = "continued"  # a further iteration of the step, before its backward pass
    PASSED = "passed"  # a backward pass is summed over all workers, and another one of the iteration follows
    COMPUTED = "computed"  # the iteration's last backward pass has begun
    SUMMED = "summed"  # the gradients are those of all workers, and optimizers act
    APPLIED = "applied"  # an optimizer acted on them, or a GradScaler decided that none does
    EMPTY = "empty"  # all samples of all workers are skipped: nothing acts
    COUNTED = "counted"  # the step counts already; work beside the training follows in its iteration
    REPEATED = "repeated"  # what the iteration computes is dropped: the step begins again after it
    TAKEN_OVER = "taken over"  # the others have applied the step, and this worker has their state


class StepTrigger(StrEnum):
    """The triggers of a step's transitions."""

    BEGUN = "the loop gets a micro-batch"
    EARLIER_SUMMED = "the sum of job.backward(more=True)"
    COMPUTED = "the iteration's last job.backward, or job.skip"
    SUMMED = "the sum of the step's last micro-batch"
    SKIPPED = "no worker has a gradient"
    ACTED = "optimizer.step or scaler.step"
    PAUSED = "job.repeat"
    ENDED = "the loop asks for the next batch"
    ABANDONED = "the loop is left"
    REVERTED = "a worker is lost, or memory is exhausted"
    TAKEN_OVER = "another worker's state of after the step"


_S, _T = StepState, StepTrigger
_ANYWHERE: Final = {_T.ABANDONED: _S.BETWEEN_STEPS}
_WITHIN: Final = {**_ANYWHERE, _T.REVERTED: _S.REPEATED}
_COMPLETE: Final = {**_WITHIN, _T.ENDED: _S.BETWEEN_STEPS}

TRANSITIONS: Final = MappingProxyType(
    {
        _S.BETWEEN_STEPS: {**_ANYWHERE, _T.BEGUN: _S.STARTED},
        _S.BETWEEN_MICRO_BATCHES: {**_ANYWHERE, _T.BEGUN: _S.CONTINUED},
        _S.STARTED: {
            **_WITHIN,
            _T.EARLIER_SUMMED: _S.PASSED,
            _T.COMPUTED: _S.COMPUTED,
            _T.ENDED: _S.BETWEEN_STEPS,  # an error, as of the next two
        },
        _S.CONTINUED: {**_WITHIN, _T.COMPUTED: _S.COMPUTED, _T.ENDED: _S.BETWEEN_MICRO_BATCHES},
        _S.PASSED: {
            **_WITHIN,
            _T.EARLIER_SUMMED: _S.PASSED,
            _T.COMPUTED: _S.COMPUTED,
            _T.ENDED: _S.BETWEEN_MICRO_BATCHES,
        },
        _S.COMPUTED: {**_WITHIN, _T.SUMMED: _S.SUMMED, _T.ENDED: _S.BETWEEN_MICRO_BATCHES},
        _S.SUMMED: {**_COMPLETE, _T.ACTED: _S.APPLIED, _T.SKIPPED: _S.EMPTY},
        _S.APPLIED: {**_COMPLETE, _T.PAUSED: _S.COUNTED},
        _S.EMPTY: {**_COMPLETE, _T.PAUSED: _S.COUNTED},
        _S.COUNTED: {**_ANYWHERE, _T.ENDED: _S.BETWEEN_STEPS},
        _S.REPEATED: {**_COMPLETE, _T.TAKEN_OVER: _S.TAKEN_OVER},
        _S.TAKEN_OVER: {**_COMPLETE, _T.PAUSED: _S.COUNTED},
    }
)

BETWEEN: Final = frozenset({_S.BETWEEN_STEPS, _S.BETWEEN_MICRO_BATCHES})
"""There is no iteration."""
OPEN: Final = frozenset({_S.STARTED, _S.CONTINUED, _S.PASSED})
"""A backward pass may come."""
ACTING: Final = frozenset({_S.PASSED, _S.SUMMED, _S.APPLIED, _S.TAKEN_OVER})
"""There are gradients of all workers."""
COMPLETE: Final = frozenset({_S.SUMMED, _S.APPLIED, _S.EMPTY, _S.TAKEN_OVER})
"""`job.applied`: the iteration completes a step."""
SETTLED: Final = frozenset({_S.APPLIED, _S.EMPTY, _S.TAKEN_OVER})
"""The step is complete, and its gradients are applied."""
FIRST: Final = frozenset({_S.BETWEEN_STEPS, _S.STARTED, _S.COUNTED, _S.TAKEN_OVER})
"""The next backward pass is the first one of a step."""
COUNTED: Final = frozenset({_S.COUNTED, _S.TAKEN_OVER})
"""The training's position is after the step, though its iteration is not over."""
UNCOUNTED: Final = COMPLETE - COUNTED
"""The step is complete, and the position is before it."""
