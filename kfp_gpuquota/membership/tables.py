"""The two transition tables. Transitions that are not in them are ignored: duplicates, and messages that arrive late.

docs/membership.md shows the same tables; a test compares them.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final


class WorkerState(StrEnum):
    """The state of one worker."""

    EXPECTED = "expected"  # the cluster started it; it has sent no message
    JOINING = "joining"  # connected, still importing and building
    READY = "ready"  # waits for a generation
    MEMBER = "member"  # in the generation in force
    LEFT = "left"  # in no generation any more; its process may still run
    FINISHED = "finished"  # applied the last step
    GONE = "gone"  # its process has exited


class WorkerTrigger(StrEnum):
    """The triggers of a worker's transitions."""

    JOINED = "WorkerJoined"
    READY = "WorkerReady"
    INCLUDED = "a generation with it is in force"
    EXCLUDED = "a generation without it is in force"
    RELEASED = "it left by agreement, or is not wanted and in no generation"
    FINISHED = "TrainingFinished"
    GONE = "WorkerGone"


class GenerationState(StrEnum):
    """The state of one generation."""

    PROPOSED = "proposed"  # its members prepare while the one in force trains
    RECOVERING = "recovering"  # its members build it while no worker trains
    WITHDRAWN = "withdrawn"  # no longer wanted; may still have been agreed on
    COMMITTED = "committed"  # in force: at least one worker switched to it
    SUPERSEDED = "superseded"  # a newer one is in force


class GenerationTrigger(StrEnum):
    """The triggers of a generation's transitions."""

    ADOPTED = "GenerationAdopted, or CollectiveFailed inside it"
    OUTDATED = "another target, a joiner lost, a member lost"
    REPLACED = "a newer generation is committed"


_W, _WT, _G, _GT = WorkerState, WorkerTrigger, GenerationState, GenerationTrigger

_ALIVE_ANYWHERE: Final = {_WT.GONE: _W.GONE, _WT.RELEASED: _W.LEFT, _WT.INCLUDED: _W.MEMBER}

WORKER_TRANSITIONS: Final = MappingProxyType(
    {
        _W.EXPECTED: {**_ALIVE_ANYWHERE, _WT.JOINED: _W.JOINING, _WT.READY: _W.READY},
        _W.JOINING: {**_ALIVE_ANYWHERE, _WT.READY: _W.READY},
        _W.READY: _ALIVE_ANYWHERE,
        _W.MEMBER: {
            _WT.EXCLUDED: _W.LEFT,
            _WT.RELEASED: _W.LEFT,
            _WT.FINISHED: _W.FINISHED,
            _WT.GONE: _W.GONE,
        },
        _W.LEFT: {_WT.GONE: _W.GONE},
        _W.FINISHED: {_WT.GONE: _W.GONE},
        _W.GONE: {},
    }
)

GENERATION_TRANSITIONS: Final = MappingProxyType(
    {
        _G.PROPOSED: {_GT.ADOPTED: _G.COMMITTED, _GT.OUTDATED: _G.WITHDRAWN, _GT.REPLACED: _G.SUPERSEDED},
        _G.RECOVERING: {_GT.ADOPTED: _G.COMMITTED, _GT.OUTDATED: _G.WITHDRAWN, _GT.REPLACED: _G.SUPERSEDED},
        _G.WITHDRAWN: {_GT.ADOPTED: _G.COMMITTED, _GT.REPLACED: _G.SUPERSEDED},
        _G.COMMITTED: {_GT.REPLACED: _G.SUPERSEDED},
        _G.SUPERSEDED: {},
    }
)
