"""One binary tree over the shards of a step, whatever the number of workers. Pure.

Floating-point addition is commutative but not associative: a sum is the same to the bit wherever it is computed, as
long as the same pairs are added. The tree's leaves are the shards 0 .. leaves-1 of a step; node (level, index) covers
[index << level, (index + 1) << level); a node whose right half is beyond the last leaf is its left half.

A rank with a contiguous range of leaves computes the nodes that lie in it (its canonical nodes, at most two a level).
From the canonical nodes of all ranges the sum is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Node = tuple[int, int]
"""A node of the tree: (level, index)."""


@dataclass(frozen=True, slots=True)
class Push:
    """The effect of one more node on a stack of partial sums: stored in `row`, then each (into, from) is added."""

    row: int
    merges: tuple[tuple[int, int], ...]


def push(stack: list[Node], node: Node, leaves: int) -> Push:
    """Push the next node to the right, and merge siblings. Modifies `stack`."""
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
"""The node of a rank without leaves: an empty sum, which is added last."""


@dataclass(frozen=True, slots=True)
class RangePlan:
    """The pushes of a range's leaves in order, and the canonical nodes that remain, by row."""

    pushes: tuple[Push, ...]
    nodes: tuple[Node, ...]


@lru_cache(maxsize=1024)
def range_plan(start: int, stop: int, leaves: int) -> RangePlan:
    """Return the plan of the leaves [start, stop)."""
    if start == stop:
        return RangePlan((Push(0, ()),), (NOTHING,))
    stack: list[Node] = []
    pushes = tuple(push(stack, (0, leaf), leaves) for leaf in range(start, stop))
    return RangePlan(pushes, tuple(stack))


@lru_cache(maxsize=1024)
def joint_plan(nodes: tuple[tuple[Node, ...], ...], leaves: int) -> tuple[tuple[int, int], ...]:
    """Return the merges (into, from) of the canonical nodes of all ranks, in order of ranks; the sum is in row 0."""
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
