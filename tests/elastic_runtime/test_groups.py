"""Waiting for the others: until all is done, one is lost, or the coordinator ends it; as for gloo and as for NCCL."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from elastic_runtime.errors import CollectiveError
from elastic_runtime.membership.process_group import Group, Interrupt
from elastic_runtime.torch_internals import build_second_connections


def connected(rank: int, store: Store, *, polls: bool) -> tuple[Group, Interrupt]:
    interrupt = Interrupt()
    group = build_second_connections(store, rank, 2, timedelta(seconds=60))
    return Group(group, rank, 2, interrupt, polls=polls), interrupt


def both(*, polls: bool) -> list[tuple[Group, Interrupt]]:
    """Two ranks, in two threads of this process."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: connected(rank, store, polls=polls), (0, 1)))


def summed(group: Group, value: float) -> float:
    tensor = torch.full((1000,), value)
    group.wait([group.all_reduce(tensor)])
    return float(tensor[-1])


@pytest.mark.parametrize("polls", [False, True])
def test_a_wait_ends_when_all_is_done(polls: bool) -> None:
    (first, _), (second, _) = both(polls=polls)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(summed, (first, second), (2.0, 3.0))) == [5.0, 5.0]


@pytest.mark.parametrize("polls", [False, True])
def test_a_wait_ends_when_the_coordinator_says_so(polls: bool) -> None:
    """The other one lives and does not come in time."""
    (first, interrupt), (second, _) = both(polls=polls)
    threading.Timer(0.05, interrupt.set).start()
    with pytest.raises(CollectiveError, match="the coordinator ended this generation"):
        summed(first, 1.0)
    summed(second, 1.0)  # gloo waits for what is in flight when a group is dropped


@pytest.mark.parametrize("polls", [False, True])
def test_a_wait_ends_when_the_peer_is_gone(polls: bool) -> None:
    groups = both(polls=polls)
    (first, _), (second, _) = groups
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(summed, (first, second), (1.0, 1.0)))
    work = first.all_reduce(torch.ones(1000))
    second._group.shutdown()
    groups.clear()
    del second
    with pytest.raises(CollectiveError, match="a peer was lost"):
        first.wait([work])
