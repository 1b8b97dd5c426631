"""One binary tree over the shards of a step, whatever the number of workers. Pure.

Floating-point addition is commutative but not associative: a sum is the same to the bit wherever it is computed, as
long as the same pairs are added. The tree's leaves are the shards 0 .. leaves-1 of a step; node (level, index) covers
[index << level, (index + 1) << level); a node whose right half is beyond the last leaf is its left half.

Who holds a contiguous range of leaves can sum up those nodes that lie in it (its canonical nodes, at most two a level);
whoever gets the canonical nodes of all ranges finishes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Node = tuple[int, int]
"""(level, index)"""


@dataclass(frozen=True, slots=True)
class Push:
    """What one more node does to a stack of partial sums: it goes to `row`, then each (into, from) is added."""

    row: int
    merges: tuple[tuple[int, int], ...]


def push(stack: list[Node], node: Node, leaves: int) -> Push:
    """Put the next node to the right on the stack, and merge siblings. Changes `stack`."""
    row, merges = len(stack), []
    stack.append(node)
    while True:
        level, index = stack[-1]
        if (1 << level) >= leaves:
            break
        if index % 2 and len(stack) > 1 and stack[-2] == (level, index - 1):
            merges.append((len(stack) - 2, len(stack) - 1))
            stack.pop()
        elif index % 2 or (index + 1) << level < leaves:
            break
        stack[-1] = (level + 1, index // 2)
    return Push(row, tuple(merges))


NOTHING: Node = (-1, 0)
"""What a rank without leaves sends: a sum of nothing, which is added last."""


@dataclass(frozen=True, slots=True)
class RangePlan:
    """What each leaf of a range does, in order; and the canonical nodes that are left, by row."""

    pushes: tuple[Push, ...]
    nodes: tuple[Node, ...]


@lru_cache(maxsize=1024)
def range_plan(start: int, stop: int, leaves: int) -> RangePlan:
    """For the leaves [start, stop)."""
    if start == stop:
        return RangePlan((Push(0, ()),), (NOTHING,))
    stack: list[Node] = []
    pushes = tuple(push(stack, (0, leaf), leaves) for leaf in range(start, stop))
    return RangePlan(pushes, tuple(stack))


@lru_cache(maxsize=1024)
def joint_plan(nodes: tuple[tuple[Node, ...], ...], leaves: int) -> tuple[tuple[int, int], ...]:
    """How the canonical nodes of all ranks, listed in order of ranks, are merged: (into, from). The sum is in 0."""
    stack: list[Node] = []
    rows: list[int] = []
    merges, nothing = [], []
    for number, node in enumerate(node for of_rank in nodes for node in of_rank):
        if node == NOTHING:
            nothing.append((0, number))
            continue
        pushed = push(stack, node, leaves)
        rows = [*rows[: pushed.row], number]
        merges += [(rows[into], rows[source]) for into, source in pushed.merges]
    return (*merges, *nothing)
