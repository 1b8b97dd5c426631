"""Waiting for the others: until all is done, one is lost, or the coordinator ends it; as for gloo and as for NCCL."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from elastic_runtime.errors import CollectiveError
from elastic_runtime.membership.process_group import Group, Interrupt
from elastic_runtime.torch_internals import build_second_connections

if TYPE_CHECKING:
    from collections.abc import Callable


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


COLLECTIVES: dict[str, Callable[[Group], object]] = {
    "all_reduce": lambda group: summed(group, 1.0),
    "all_to_all": lambda group: group.wait([group.all_to_all(torch.empty(2), torch.ones(2), [1, 1], [1, 1])]),
    "gather_parts": lambda group: group.wait(group.gather_parts(torch.ones(2))),
    "all_gather": lambda group: group.all_gather(torch.ones(2)),
    "all_gather_into": lambda group: group.all_gather_into(torch.empty(4), torch.ones(2)),
    "reduce_scatter_into": lambda group: group.reduce_scatter_into(torch.empty(2), torch.ones(4)),
    "barrier": Group.barrier,
}


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_wait_ends_when_the_coordinator_says_so(collective: str, polls: bool) -> None:
    """The other one lives and does not come in time."""
    (first, interrupt), (second, _) = both(polls=polls)
    threading.Timer(0.05, interrupt.set).start()
    with pytest.raises(CollectiveError, match="the coordinator ended this generation"):
        COLLECTIVES[collective](first)
    COLLECTIVES[collective](second)  # gloo waits for what is in flight when a group is dropped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_summed_and_gathered(dtype: torch.dtype) -> None:
    groups = both(polls=False)

    def parts(rank: int) -> tuple[list[float], list[float]]:
        group, _ = groups[rank]
        part, whole = torch.empty(2, dtype=dtype), torch.full((4,), rank + 1.0, dtype=dtype)
        group.reduce_scatter_into(part, whole + torch.arange(4))
        group.all_gather_into(whole, part)
        return part.tolist(), whole.tolist()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(parts, (0, 1)))
    assert found == [([3.0, 5.0], [3.0, 5.0, 7.0, 9.0]), ([7.0, 9.0], [3.0, 5.0, 7.0, 9.0])]


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
