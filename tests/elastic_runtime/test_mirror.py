"""The copies of shards in other workers' memory: in any order of events, a loss costs one step at most."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from elastic_runtime.sharded.layout import Sharded
from elastic_runtime.sharded.mirror import Copied, Mirror, Source, choose, mirrors_of
from elastic_runtime.sharded.state import Parts
from elastic_runtime.state.codec import Skeleton

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZE = 7


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_each_rank_mirrors_another_one_on_another_node_where_that_is_possible(nodes: list[int]) -> None:
    to = mirrors_of(nodes)
    assert sorted(to) == list(range(len(nodes)))
    assert all(rank != other for rank, other in enumerate(to))
    if 2 * max(Counter(nodes).values()) <= len(nodes):
        assert all(nodes[rank] != nodes[other] for rank, other in enumerate(to))


def test_copies_of_which_one_part_is_missing_are_of_no_use() -> None:
    assert choose([[Copied(4, 1, 3, own=0, ward=2)], [Copied(4, 1, 3, own=1, ward=0)]]) == Source(
        Copied(4, 1, 3), [0, 1], [[0, 2], [1]]
    )
    assert choose([[Copied(4, 1, 3, own=0, ward=2)], [Copied(4, 2, 3, own=1, ward=0)]]) is None
    assert choose([[Copied()], [Copied()]]) is None


class BlockedError(Exception):
    """A real worker would wait here."""


class FakeTransfer:
    """A transfer that `advance` carries out where both sides have begun."""

    def __init__(self, sent: Sequence[torch.Tensor], to: int, received: Sequence[torch.Tensor], source: int) -> None:
        self.sent, self.to, self.received, self.source = sent, to, received, source
        self.succeeded = False


class FakeGroup:
    """Of `Group` what `Mirror` uses."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.transfers: list[FakeTransfer] = []

    def swap(self, *what: Any) -> FakeTransfer:
        self.transfers.append(FakeTransfer(*what))
        return self.transfers[-1]

    def finish(self, transfer: FakeTransfer) -> None:
        if not transfer.succeeded:
            raise BlockedError


class Model:
    """Workers of one generation, which copy, transfer, take part in a step's sum and apply it, in any order.

    The state of worker r in step s is a shard of values 100 * s + r. `begun[r]`: the step that r is in, `summed[r]`:
    the last step to whose sum it has contributed.
    """

    def __init__(self, ranks: int, every: int) -> None:
        self.ranks = ranks
        self.kind = Sharded(torch.int64, (SIZE * ranks,), 0)
        self.groups = [FakeGroup(rank, ranks) for rank in range(ranks)]
        self.mirrors = [Mirror(every) for _ in range(ranks)]
        for group, mirror in zip(self.groups, self.mirrors, strict=True):
            mirror.enter(group, 1, [0] * ranks, every)  # type: ignore[arg-type]
        self.begun = [-1] * ranks
        self.summed = [-1] * ranks

    def parts(self, rank: int, step: int) -> Parts:
        shard = torch.full((SIZE,), 100 * step + rank)
        return Parts(Skeleton(b""), [self.kind], [shard], [])

    def actions(self, last: int) -> Iterator[tuple[str, int]]:
        """What may happen next."""
        for rank in range(self.ranks):
            if self.begun[rank] == self.summed[rank] < last and all(s >= self.begun[rank] for s in self.summed):
                yield "begin", rank
            if self.begun[rank] > self.summed[rank] and self._may_sum(rank):
                yield "sum", rank
            if any(self._may_transfer(rank, transfer) for transfer in self.groups[rank].transfers):
                yield "transfer", rank

    def do(self, action: tuple[str, int]) -> None:
        what, rank = action
        if what == "begin":
            self.begun[rank] += 1
            step = self.begun[rank]
            self.mirrors[rank].begin_step(step, lambda: self.parts(rank, step))
        elif what == "sum":
            self.mirrors[rank].end_step(self.begun[rank])
            self.summed[rank] = self.begun[rank]
        else:
            transfer = next(each for each in self.groups[rank].transfers if self._may_transfer(rank, each))
            number = self.groups[rank].transfers.index(transfer)
            source = self.groups[transfer.source].transfers[number]
            for into, piece in zip(transfer.received, source.sent, strict=True):
                into.copy_(piece)
            transfer.succeeded = True

    def _may_sum(self, rank: int) -> bool:
        try:
            self.mirrors[rank].end_step(self.begun[rank])
        except BlockedError:
            return False
        return True

    def _may_transfer(self, rank: int, transfer: FakeTransfer) -> bool:
        """Both its peers have begun theirs. A transfer ends at once: what it has sent lies in the wire then."""
        number = self.groups[rank].transfers.index(transfer)
        peers = [self.groups[transfer.source], self.groups[transfer.to]]
        return not transfer.succeeded and all(len(peer.transfers) > number for peer in peers)

    def key(self) -> tuple[object, ...]:
        ended = tuple(tuple(each.succeeded for each in group.transfers) for group in self.groups)
        return tuple(self.begun), tuple(self.summed), ended

    def check_loss(self, victim: int) -> int:
        """The victim dies now. How many steps that were begun are repeated, beside the present one."""
        survivors = [mirror for rank, mirror in enumerate(self.mirrors) if rank != victim]
        for mirror in survivors:
            mirror.leave_generation(agreed=False)
        source = choose([mirror.held() for mirror in survivors])
        furthest = max(step for rank, step in enumerate(self.begun) if rank != victim)
        if source is None:
            assert furthest < 1, "nothing to go back to"
            return 0
        found: dict[int, torch.Tensor] = {}
        for rank, mirror in enumerate(survivors):
            own, shards = mirror.part(source.copied)
            assert (own is not None) == (source.held[rank] >= 0)
            found |= {old: shards[old][0] for old in source.provided[rank]}
        assert sorted(found) == list(range(self.ranks))
        for old, shard in found.items():
            assert shard.tolist() == [100 * source.copied.step + old] * SIZE
        return furthest - source.copied.step


@pytest.mark.parametrize(("ranks", "every", "steps"), [(2, 1, 4), (3, 1, 3), (2, 3, 7), (3, 2, 4)])
def test_in_any_order_of_events_a_loss_goes_back_to_the_copies_before_the_last_at_most(
    ranks: int, every: int, steps: int
) -> None:
    """Every reachable state of the protocol, found by playing its events; in each of them any worker may die."""
    known: dict[tuple[object, ...], list[tuple[str, int]]] = {Model(ranks, every).key(): []}
    waiting = list(known.values())
    worst = 0
    while waiting:
        path = waiting.pop()
        for victim in range(ranks):
            worst = max(worst, replay(ranks, every, path).check_loss(victim))
        for action in list(replay(ranks, every, path).actions(steps)):
            model = replay(ranks, every, [*path, action])
            if model.key() not in known:
                known[model.key()] = [*path, action]
                waiting.append(known[model.key()])
    assert len(known) > 40
    assert worst <= 2 * every - 1
    assert worst >= every, "no loss was late enough"


def replay(ranks: int, every: int, path: list[tuple[str, int]]) -> Model:
    model = Model(ranks, every)
    for action in path:
        model.do(action)
    return model
