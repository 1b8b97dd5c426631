"""Pauses between attempts double up to a limit, and end with the time that the caller has."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_a_server_may_prolong_a_pause_and_not_shorten_it() -> None:
    backoff = Backoff(1.0, 8.0)
    assert (backoff.next_s(5.0), backoff.next_s(0.5)) == (5.0, 2.0)


def test_it_is_exhausted_when_the_next_pause_exceeds_the_limit() -> None:
    now = [100.0]
    backoff = Backoff(1.0, 8.0, limit_s=4.0, clock=lambda: now[0])
    assert not backoff.exhausted
    now[0] += backoff.next_s()
    assert not backoff.exhausted  # 2 s are left of 3
    now[0] += backoff.next_s()
    assert backoff.exhausted  # 4 s exceed the one second that is left


def test_without_a_limit_it_is_never_exhausted_and_with_none_left_at_once() -> None:
    assert not Backoff(1.0, 8.0).exhausted
    assert Backoff(1.0, 8.0, limit_s=0.0).exhausted


@given(st.integers(0, 2**32))
def test_jitter_changes_a_pause_by_half_at_most(seed: int) -> None:
    backoff = Backoff(1.0, 4.0, jitter=random.Random(seed))
    assert all(pause / 2 <= backoff.next_s() <= pause * 1.5 for pause in (1.0, 2.0, 4.0, 4.0))
