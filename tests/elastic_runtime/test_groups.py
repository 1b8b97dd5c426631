"""Waiting for the others: until all is done, one is lost, or the coordinator ends it; as for gloo and as for NCCL."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.loop.synchronized_calls import SUMMABLE
from elastic_runtime.membership import meetings
from elastic_runtime.membership.process_group import Group, Interrupt
from elastic_runtime.torch_internals import build_second_connections, reduce_scatter_flat
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable


def connected(rank: int, size: int, store: Store, *, polls: bool) -> tuple[Group, Interrupt]:
    interrupt = Interrupt()
    group = build_second_connections(store, rank, size, timedelta(seconds=60))
    return Group(group, rank, size, interrupt, polls=polls), interrupt


def connected_all(size: int, *, polls: bool = False) -> list[tuple[Group, Interrupt]]:
    """That many ranks, in as many threads of this process."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: connected(rank, size, store, polls=polls), range(size)))


def both(*, polls: bool) -> list[tuple[Group, Interrupt]]:
    """Two ranks."""
    return connected_all(2, polls=polls)


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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", sorted(SUMMABLE, key=str))
def test_sums_of_parts_are_those_of_torch(dtype: torch.dtype, size: int) -> None:
    """Of integers exactly; of types of two bytes nearer to the sum, since it is rounded once."""
    groups = connected_all(size)
    generator = torch.Generator().manual_seed(1)
    given = [(torch.randn(5 * size, generator=generator) * 9).to(dtype) for _ in range(size)]

    def parts(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group, _ = groups[rank]
        part, theirs = torch.empty(5, dtype=dtype), torch.empty(5, dtype=dtype)
        group.reduce_scatter_into(part, given[rank].clone())
        reduce_scatter_flat(group._group, theirs, given[rank].clone()).wait()
        whole = torch.zeros(5 * size, dtype=dtype)
        group.all_gather_into(whole, part)
        return part, theirs, whole

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(parts, range(size)))
    exact = torch.stack(given).sum(0, dtype=torch.float64)
    ours, torchs = (torch.cat([each[which] for each in found]) for which in (0, 1))
    if not dtype.is_floating_point:
        assert torch.equal(ours, torchs)
    elif dtype.itemsize == 2:
        assert torch.equal(ours, exact.to(torch.float32).to(dtype))
        assert (exact - ours).abs().sum() <= (exact - torchs).abs().sum()
    else:
        torch.testing.assert_close(ours, torchs)
    for _, _, whole in found:
        assert torch.equal(whole, ours)


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


def meeting(size: int = 2) -> list[Group]:
    """Connected ranks with a coordinator's store."""
    store = HashStore()

    def connect(rank: int) -> Group:
        first, second = (
            build_second_connections(PrefixStore(name, store), rank, size, timedelta(seconds=60)) for name in "ab"
        )
        return Group(first, rank, size, Interrupt(), second, store=store)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(connect, range(size)))


def in_a_step(group: Group, step: int) -> float:
    group.work_on(step)
    return summed(group, 1.0)


def test_a_worker_in_a_step_and_one_in_a_meeting_both_end_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "LONG_S", 0.02)
    first, second = meeting()
    with ThreadPoolExecutor(2) as pool:
        waits: list[Future[Any]] = [pool.submit(first.meet, "job.mean", 6), pool.submit(in_a_step, second, 6)]
        errors = [wait.exception() for wait in waits]
    assert [type(error) for error in errors] == [LoopError, LoopError]
    assert all("job.mean at" in str(error) and "a training step at" in str(error) for error in errors)
    summed(first, 1.0)  # gloo waits for what is in flight when a group is dropped
    rows = [torch.empty(128, dtype=torch.uint8) for _ in range(2)]
    second._lanes[1].allgather([rows], [torch.zeros(128, dtype=torch.uint8)]).wait()


def test_workers_that_meet_in_different_parts_of_a_script_all_end_by_name() -> None:
    with ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(group.meet, kind, 6) for group, kind in zip(meeting(), ("job.mean", "the end"), strict=True)
        ]
    assert all("rank 0 in job.mean at" in str(wait.exception()) for wait in waits)
    assert all("rank 1 in the end at" in str(wait.exception()) for wait in waits)


def test_workers_that_wait_long_for_one_that_comes_late_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a long wait has left with the coordinator is of that wait only: in a step, in a meeting, in a step."""
    monkeypatch.setattr(meetings, "LONG_S", 0.0)
    groups, late = meeting(), threading.Event()

    def run(group: Group) -> list[float]:
        found = []
        for step in range(3):
            if group.rank == step % 2:
                assert late.wait(60)
                late.clear()
            else:
                threading.Timer(0.05, late.set).start()
            found.append(in_a_step(group, step))
            group.work_on(None)
            group.meet("job.mean", step + 1)
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, groups)) == [[2.0] * 3] * 2


@pytest.mark.parametrize("seed", range(6))
def test_workers_whose_own_work_takes_long_are_waited_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random scripts, the same for all, in which one worker comes late to a step or a meeting: as rank 0 does that
    saves or evaluates alone. It comes once another one has waited for so long that it looks for others.
    """
    monkeypatch.setattr(meetings, "LONG_S", 0.0)
    monkeypatch.setattr(meetings, "_PAUSES_S", (0.001, 0.002))
    draw = random.Random(seed)
    groups = meeting(draw.choice([2, 3]))
    script = [*draw.choices([meetings.STEP, "job.mean"], k=7), "the end"]
    late = [draw.randrange(len(groups) + 1) for _ in script]

    def run(group: Group) -> int:
        step = met = 0
        for kind, who in zip(script, late, strict=True):
            if group.rank == who:
                key, store = f"at/{kind != meetings.STEP}/{step}/{met}", group._store
                assert store is not None
                until(partial(store.check, [key]), f"a worker that looks for others: {key}")
            if kind == meetings.STEP:
                assert in_a_step(group, step) == len(groups)
                group.work_on(None)
                step += 1
            else:
                group.meet(kind, step)
                met += 1
        return step

    with ThreadPoolExecutor(len(groups)) as pool:
        assert len(set(pool.map(run, groups))) == 1
