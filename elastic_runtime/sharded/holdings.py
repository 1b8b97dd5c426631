"""What the members of a new generation hold of a sharded state: the account of each, and what follows from all."""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from elastic_runtime.membership.process_group import Group


@dataclass(frozen=True)
class Holding:
    """The state that one member of a new generation holds; numbers only, since they are gathered in one tensor."""

    step: int  # of the state; -1: none
    fingerprint: int  # of the model's names and shapes
    number: int  # the generation whose layout its parts have; 0: it holds none
    old: int  # its rank there; -1: none
    ranks: int  # the number of ranks there
    shards: int  # the number of parts there: less than ranks with replica groups
    bridged: int  # whether that generation's group is complete, so that leaving workers send their parts
    whole: int  # whether it has no trained state, but the initial model
    began: int  # whether it has trained
    save: int  # a number for checkpoints of this generation; all workers use that of rank 0
    every: int  # how many steps lie between copies; 0: it wants none
    mirrors: int  # whether it has memory for copies already
    node: int  # a number of its machine
    free_on_node: int  # bytes of memory on the machine
    free_in_limit: int  # bytes of memory within the worker's own limit
    rounds: int  # of work beside the training that are complete
    in_round: int  # whether it is in the next one
    pid: int  # with the next two: where others may map its memory
    descriptor: int
    token: int


def exchange(group: Group, mine: Holding) -> list[Holding]:
    """Return what each member holds, by rank. CollectiveError if one was lost."""
    rows = group.all_gather(torch.tensor(dataclasses.astuple(mine), dtype=torch.int64)).tolist()
    return [Holding(*row) for row in rows]


def complete(holdings: list[Holding], held: list[int]) -> bool:
    """Return whether all parts of the newest layout are available, all of one step."""
    holders = [each for each, old in zip(holdings, held, strict=True) if old >= 0]
    if not holders or len({each.step for each in holders}) > 1:
        return False
    parts = {each.old % each.shards for each in holders}
    return len(parts) == holders[0].shards or all(each.bridged for each in holders)


def round_of(holdings: list[Holding]) -> int:
    """Return the round of work in which all of these workers are; -1: they are not in one together."""
    rounds = {each.rounds if each.in_round else -1 for each in holdings}
    return rounds.pop() if len(rounds) == 1 else -1


def others_wait_in_round(holdings: list[Holding]) -> bool:
    """Return whether one of these workers is in the round of work that comes next."""
    return any(each.in_round and each.rounds == max(other.rounds for other in holdings) for each in holdings)


def free_for_copies(holdings: list[Holding], need: int) -> int:
    """Return the bytes of memory that each worker may use for copies; `need` if all have them already."""
    new = [each for each in holdings if not each.mirrors]  # what is in use for copies is not free
    workers = Counter(each.node for each in new)
    return min((min(each.free_on_node // workers[each.node], each.free_in_limit) for each in new), default=need)


def new_number() -> int:
    """Return a random number above 0 that a 32-bit float represents exactly."""
    return 1 + secrets.randbelow((1 << 24) - 1)
