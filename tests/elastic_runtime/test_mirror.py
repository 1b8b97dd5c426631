"""The copies of shards in other workers' memory: in any order of events, a loss costs the steps between two at most."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from elastic_runtime.plan.replica_groups import Grid
from elastic_runtime.sharded.layout import Sharded
from elastic_runtime.sharded.mirror import Copied, Mirror, Source, choose, mirrors_of
from elastic_runtime.sharded.state import Parts
from elastic_runtime.state.codec import Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZE = 7
IN_ROUND = 50
STAGES = ("copy", "work", "leave")


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_each_rank_mirrors_another_one_on_another_node_where_that_is_possible(nodes: list[int]) -> None:
    to = mirrors_of(nodes)
    assert sorted(to) == list(range(len(nodes)))
    assert all(rank != other for rank, other in enumerate(to))
    if 2 * max(Counter(nodes).values()) <= len(nodes):
        assert all(nodes[rank] != nodes[other] for rank, other in enumerate(to))


def test_copies_of_which_one_part_is_missing_are_of_no_use() -> None:
    assert choose([[Copied(4, 1, 3, own=0, ward=2)], [Copied(4, 1, 3, own=1, ward=0)]], -1) == Source(
        Copied(4, 1, 3), [0, 1], [[0, 2], [1]]
    )
    assert choose([[Copied(4, 1, 3, own=0, ward=2)], [Copied(4, 2, 3, own=1, ward=0)]], -1) is None
    assert choose([[Copied()], [Copied()]], -1) is None


class BlockedError(Exception):
    """A real worker would wait here."""


class FakeTransfer:
    """A transfer that `advance` carries out where both sides have begun."""

    def __init__(
        self,
        sent: Sequence[torch.Tensor],
        to: int,
        received: Sequence[torch.Tensor],
        source: int,
        after: Callable[[], None] | None,
    ) -> None:
        self.sent, self.to, self.received, self.source, self.after = sent, to, received, source, after
        self.succeeded = False


class FakeGroup:
    """Of `Group` what `Mirror` uses."""

    def __init__(self, rank: int, grid: Grid) -> None:
        self.rank, self.size, self.grid = rank, grid.ranks, grid
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
    the last step to whose sum it has contributed. With `rounds` work beside the training follows each step, with
    values 100 * (s + 1) + 50 + r; `stage[r]` counts the stages of all rounds that r has completed. `mapped`: mirrors
    map the memory of the copies. With fewer `shards` than ranks there are replica groups, r is the
    number of the shard, and the copies are own ones.
    """

    def __init__(self, ranks: int, every: int, *, rounds: bool, mapped: bool, shards: int) -> None:
        self.ranks, self.rounds, self.mapped = ranks, rounds, mapped
        self.grid = Grid(ranks, shards)
        self.stage = [0] * ranks
        self.kind = Sharded(torch.int64, (SIZE * shards,), 0)
        self.groups = [FakeGroup(rank, self.grid) for rank in range(ranks)]
        self.mirrors = [Mirror(every) for _ in range(ranks)]
        for group, mirror in zip(self.groups, self.mirrors, strict=True):
            to = mirrors_of([0] * ranks) if shards == ranks else []
            mirror.enter(group, 1, to, every, [mapped] * ranks if to else None)  # type: ignore[arg-type]
        self.begun = [-1] * ranks
        self.summed = [-1] * ranks

    def parts(self, rank: int, step: int, more: int = 0) -> Parts:
        shard = torch.full((SIZE,), 100 * step + more + self.grid.shard_of(rank))
        return Parts(Skeleton(b""), [self.kind], [shard], [])

    def actions(self, last: int) -> Iterator[tuple[str, int]]:
        """What may happen next."""
        for rank in range(self.ranks):
            complete = all(s >= self.begun[rank] for s in self.summed)
            if complete and self.stage[rank] < self._stages(rank) and self._may_go_on(rank):
                yield "round", rank
            if complete and self.begun[rank] == self.summed[rank] < last and self.stage[rank] == self._stages(rank):
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
        elif what == "round":
            self._go_on(rank)
        elif what == "sum":
            self.mirrors[rank].settle()
            self.summed[rank] = self.begun[rank]
        else:
            transfer = next(each for each in self.groups[rank].transfers if self._may_transfer(rank, each))
            number = self.groups[rank].transfers.index(transfer)
            source = self.groups[transfer.source].transfers[number]
            for into, piece in zip(transfer.received, source.sent, strict=True):
                into.copy_(piece)
            if transfer.after is not None:
                transfer.after()
            transfer.succeeded = True

    def _stages(self, rank: int) -> int:
        """Of the rounds up to the step that this worker is in."""
        return len(STAGES) * (self.begun[rank] + 1) if self.rounds and self.begun[rank] == self.summed[rank] else 0

    def _may_go_on(self, rank: int) -> bool:
        """Where the workers meet, all have to be there."""
        done = self.stage[rank]
        if STAGES[done % len(STAGES)] == "leave":
            return all(stage >= done for stage in self.stage)
        return STAGES[done % len(STAGES)] == "copy" or self._may(self.mirrors[rank].settle)

    def _go_on(self, rank: int) -> None:
        number, stage = divmod(self.stage[rank], len(STAGES))
        step = self.begun[rank] + 1
        if STAGES[stage] == "copy":
            self.mirrors[rank].begin_round(number, step, lambda: self.parts(rank, step, IN_ROUND))
        elif STAGES[stage] == "leave":
            self.mirrors[rank].end_round()
        else:
            self.mirrors[rank].settle()
        self.stage[rank] += 1

    def _may_sum(self, rank: int) -> bool:
        return self._may(self.mirrors[rank].settle)

    def _may(self, wait: Callable[[], None]) -> bool:
        try:
            wait()
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
        return tuple(self.begun), tuple(self.summed), tuple(self.stage), ended

    def check_loss(self, victim: int) -> int:
        """The victim dies now. How many steps that were begun are repeated, beside the present one."""
        survivors = [mirror for rank, mirror in enumerate(self.mirrors) if rank != victim]
        for mirror in survivors:
            mirror.leave_generation(agreed=False)
        others = [rank for rank in range(self.ranks) if rank != victim]
        in_round = {rank: self.stage[rank] < self._stages(rank) for rank in others}
        rounds = {self.stage[rank] // len(STAGES) if in_round[rank] else -1 for rank in others}
        current = rounds.pop() if len(rounds) == 1 else -1
        source = choose([mirror.held() for mirror in survivors], current)
        furthest = max(self.begun[rank] + in_round[rank] for rank in others)
        if source is None:
            assert furthest <= self.rounds, "nothing to go back to"
            return 0
        found: dict[int, torch.Tensor] = {}
        for rank, mirror in enumerate(survivors):
            own, shards = mirror.part(source.copied)
            assert (own is not None) == (source.held[rank] >= 0)
            found |= {old: shards[old][0] for old in source.provided[rank]}
        assert sorted(found) == list(range(self.grid.shards))
        for old, shard in found.items():
            more = IN_ROUND if source.copied.round >= 0 else 0
            assert shard.tolist() == [100 * source.copied.step + more + old] * SIZE
        worked = all(in_round[rank] and STAGES[self.stage[rank] % len(STAGES)] == "leave" for rank in others)
        overwritten = self.mapped and self.begun[victim] == furthest  # by the victim, which was ahead
        if worked and not overwritten:
            assert source.copied.round == current >= 0
        return furthest - source.copied.step


@pytest.mark.parametrize(
    ("ranks", "every", "steps", "rounds"),
    [(2, 1, 4, False), (3, 1, 2, False), (2, 3, 7, False), (3, 2, 3, False), (2, 1, 2, True), (2, 2, 3, True)],
)
@pytest.mark.parametrize("mapped", [False, True], ids=["sent", "mapped"])
def test_in_any_order_of_events_a_loss_costs_the_steps_between_two_copies_at_most(
    ranks: int, every: int, steps: int, rounds: bool, mapped: bool
) -> None:
    check_all_states(ranks, every, steps, rounds=rounds, mapped=mapped, shards=ranks)


@pytest.mark.parametrize(
    ("ranks", "shards", "every", "steps", "rounds"),
    [
        (4, 2, 1, 2, False),
        pytest.param(4, 2, 2, 3, False, marks=pytest.mark.slow),
        (3, 1, 1, 4, False),
        (2, 1, 1, 9, True),
    ],
)
def test_with_replica_groups_own_copies_suffice(ranks: int, shards: int, every: int, steps: int, rounds: bool) -> None:
    check_all_states(ranks, every, steps, rounds=rounds, mapped=False, shards=shards)


def check_all_states(ranks: int, every: int, steps: int, *, rounds: bool, mapped: bool, shards: int) -> None:
    """Every reachable state of the protocol, found by playing its events; in each of them any worker may die."""
    new = partial(replay, ranks, every, rounds=rounds, mapped=mapped, shards=shards)
    known: dict[tuple[object, ...], list[tuple[str, int]]] = {new([]).key(): []}
    waiting = list(known.values())
    worst = 0
    while waiting:
        path = waiting.pop()
        for victim in range(ranks):
            worst = max(worst, new(path).check_loss(victim))
        for action in list(new(path).actions(steps)):
            model = new([*path, action])
            if model.key() not in known:
                known[model.key()] = [*path, action]
                waiting.append(known[model.key()])
    assert len(known) > 40
    assert worst <= every
    assert worst == every or shards < ranks  # a survivor may have all parts of the newest step


def replay(ranks: int, every: int, path: list[tuple[str, int]], *, rounds: bool, mapped: bool, shards: int) -> Model:
    model = Model(ranks, every, rounds=rounds, mapped=mapped, shards=shards)
    for action in path:
        model.do(action)
    return model
