"""The division of a sharded job's workers into replica groups: each group holds the whole state, each worker a part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """`ranks` workers in groups of `shards` each, the first `shards` ranks being the first group."""

    ranks: int
    shards: int

    @classmethod
    def of(cls, ranks: int, wanted: int | None) -> Grid:
        """Return groups of `wanted` workers, or of the next larger number that divides `ranks`; None: one group of all.

        So all workers train at every size, and no worker holds a larger part than in a group of `wanted`; with fewer
        workers than that, there is one group.
        """
        shards = min(wanted or ranks, ranks)
        while ranks % shards:
            shards += 1
        return cls(ranks, shards)

    @property
    def groups(self) -> int:
        """Return the number of replica groups."""
        return self.ranks // self.shards

    def shard_of(self, rank: int) -> int:
        """Return the number of the part that this rank holds."""
        return rank % self.shards

    def group_of(self, rank: int) -> int:
        """Return the number of this rank's group."""
        return rank // self.shards

    def same_group(self, rank: int) -> list[int]:
        """Return the ranks of this rank's group, in order of their parts."""
        first = rank - self.shard_of(rank)
        return list(range(first, first + self.shards))

    def same_shard(self, rank: int) -> list[int]:
        """Return the ranks that hold the same part as this one, one of each group."""
        return list(range(self.shard_of(rank), self.ranks, self.shards))
