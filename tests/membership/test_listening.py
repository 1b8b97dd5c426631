"""The clock that stands still while its owner is held up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.server.membership.listening import ListeningClock


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_time_passes_as_usual_for_one_that_listens() -> None:
    hands = Hands()
    clock = ListeningClock(hands, longest_s=1.0)
    for _ in range(10):
        hands.now += 0.5
        clock.listened()
    assert clock() == 55.0


def test_however_long_it_was_held_up_that_counts_as_one_long_turn() -> None:
    hands = Hands()
    clock = ListeningClock(hands, longest_s=1.0)
    hands.now += 1000
    assert clock() == 51.0
    hands.now += 1000
    assert clock() == 51.0
    clock.listened()
    hands.now += 0.25
    assert clock() == 51.25


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans())))
def test_it_never_falls_and_never_passes_more_than_its_limit_without_listening(turns: list[tuple[float, bool]]) -> None:
    hands = Hands()
    clock = ListeningClock(hands, longest_s=1.0)
    seen, since = [clock()], clock()
    for passed, listens in turns:
        hands.now += passed
        if listens:
            clock.listened()
            since = clock()
        seen.append(clock())
        assert seen[-1] - since <= 1.0 + 1e-6
    assert all(later >= earlier - 1e-6 for earlier, later in pairwise(seen))
