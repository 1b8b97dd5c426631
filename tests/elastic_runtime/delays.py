"""Random delays at the places where the runtime's threads meet, and connections that are refused or never made: what
a busy machine and a bad network do, more often.

They found a joiner's rehearsal that overlapped with the received state, a joiner that was never released, and a
generation for which its members waited without end because the report of its failure was lost with a connection.
"""

from __future__ import annotations

import functools
import random
import time
from typing import TYPE_CHECKING, Any

from elastic_runtime.loop import member
from elastic_runtime.loop.member import Member
from elastic_runtime.membership import generations
from elastic_runtime.membership.coordinator_client import EventOutbox
from elastic_runtime.membership.generations import Generations
from elastic_runtime.state.random_streams import RandomStreams
from elastic_runtime.state.training_state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable

PLACES: list[tuple[Any, str]] = [
    (generations, "build_group"),
    (Generations, "on_order"),
    (Generations, "adopt"),
    (EventOutbox, "send"),
    (Member, "_adopt"),
    (TrainingState, "load"),
    (RandomStreams, "restore"),
    (member, "exchange"),
]
DELAYS_S = (0, 0, 0, 0, 0.02, 0.15, 0.4)
REFUSED, DROPPED = 0.1, 0.05
"""How often a generation cannot be built: at once, or never in time."""
BUILD_S = 2.0


def delay_meetings(seed: int) -> None:
    """From now on this process is now and then slow there."""
    draw = random.Random(seed)
    for owner, name in PLACES:
        setattr(owner, name, _delayed(getattr(owner, name), draw))
    name = "build_group"
    setattr(generations, name, _failing(getattr(generations, name), draw))
    setattr(generations, "BUILD_S", BUILD_S)  # noqa: B010


def _delayed(original: Callable[..., Any], draw: random.Random) -> Callable[..., Any]:
    @functools.wraps(original)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.choice(DELAYS_S))
        return original(*args, **kwargs)

    return delayed


def _failing(build: Callable[..., Any], draw: random.Random) -> Callable[..., Any]:
    @functools.wraps(build)
    def failing(*args: Any, **kwargs: Any) -> Any:
        drawn = draw.random()
        if drawn < REFUSED:
            raise RuntimeError("connection refused")
        if drawn < REFUSED + DROPPED:
            time.sleep(2 * BUILD_S)
        return build(*args, **kwargs)

    return failing
