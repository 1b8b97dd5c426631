"""The split of a global batch over workers and micro-batches. Pure; every worker computes the same result.

The samples of a step go to the ranks as contiguous shares, as even as possible, larger ones first; a share is cut into
micro-batches as even as possible, none above the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from elastic_runtime.errors import BatchPlanError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One iteration of one worker: samples [start, stop) of the step's `step_samples`.

    A padding micro-batch has no sample of its own: the worker takes part with weight zero, on a copy of the first
    sample.
    """

    start: int
    stop: int
    step_samples: int
    last: bool
    shard: int = 0  # where shards are fixed: which one of the step's this is
    step_shards: int = 1

    @property
    def size(self) -> int:
        """The number of samples with a weight above zero."""
        return self.stop - self.start

    @property
    def padding(self) -> bool:
        """Whether the micro-batch has weight zero."""
        return self.stop == self.start

    @property
    def weight(self) -> float:
        """The micro-batch's fraction of the global batch."""
        return self.size / self.step_samples


@lru_cache(maxsize=256)
def split(total: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` contiguous ranges [start, stop) of range(total), as even as possible, larger ones first."""
    size, larger = divmod(total, parts)
    stops = [size * (i + 1) + min(i + 1, larger) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


@lru_cache(maxsize=256)
def micro_batches(samples: int, rank: int, world_size: int, max_batch: int | None) -> list[MicroBatch]:
    """Return the micro-batches of `rank` in a step of `samples`: at least one; the last one is marked."""
    start, stop = split(samples, world_size)[rank]
    if start == stop:
        return [MicroBatch(start, start, samples, last=True)]
    count = -(-(stop - start) // (max_batch or stop - start))
    cuts = split(stop - start, count)
    return [MicroBatch(start + a, start + b, samples, last=b == stop - start) for a, b in cuts]


@lru_cache(maxsize=256)
def lockstep_batches(samples: int, rank: int, world_size: int, max_batch: int | None) -> list[MicroBatch]:
    """Return the micro-batches of `rank` if all ranks must have equally many: a short share may end in padding."""
    shares = split(samples, world_size)
    start, stop = shares[rank]
    largest = shares[0][1] - shares[0][0]
    count = -(-largest // (max_batch or largest))
    cuts = split(stop - start, count)
    return [MicroBatch(start + a, start + b, samples, last=n == count) for n, (a, b) in enumerate(cuts, 1)]


@lru_cache(maxsize=256)
def shard_batches(samples: int, rank: int, world_size: int, shards: int) -> list[MicroBatch]:
    """Return the micro-batches of `rank` if a step is computed in `shards` parts for any number of workers.

    Shards are contiguous and as even as possible; a step of fewer samples has fewer of them. A rank has a contiguous
    range of shards; if there are more ranks than shards, the last ranks have none.
    """
    cuts = split(samples, min(shards, samples))
    first, last = split(len(cuts), world_size)[rank]
    if first == last:
        return [MicroBatch(0, 0, samples, last=True, step_shards=len(cuts))]
    return [
        MicroBatch(*cuts[shard], samples, last=shard == last - 1, shard=shard, step_shards=len(cuts))
        for shard in range(first, last)
    ]


@lru_cache(maxsize=256)
def lockstep_shards(samples: int, rank: int, world_size: int, shards: int) -> list[MicroBatch]:
    """Return the micro-batches of `rank` as `shard_batches` does, if all ranks must have equally many.

    In each iteration the ranks compute the next shards in order, one each; in the last one some may have padding. So
    the gradients of an iteration are added to the sum of those before.
    """
    cuts = split(samples, min(shards, samples))
    turns = -(-len(cuts) // world_size)
    found = []
    for turn in range(turns):
        shard = turn * world_size + rank
        start, stop = cuts[shard] if shard < len(cuts) else (0, 0)
        found.append(MicroBatch(start, stop, samples, last=turn == turns - 1, shard=shard, step_shards=len(cuts)))
    return found


def check_shards(global_batch_size: int, shards: int, max_batch_per_gpu: int | None) -> None:
    """Raise BatchPlanError if the global batch cannot be split into shards of a fixed shape."""
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise BatchPlanError(f"shards is {shards!r}, but it must be a whole number from 1 up")
    size = -(-global_batch_size // shards)
    if max_batch_per_gpu is not None and size > max_batch_per_gpu:
        raise BatchPlanError(
            f"reduction='exact' computes a step of {global_batch_size} samples as {shards} shards of {size}, which is "
            f"above max_batch_per_gpu={max_batch_per_gpu}; a shard is never cut: use at least "
            f"shards={-(-global_batch_size // max_batch_per_gpu)}"
        )


def check_batch(global_batch_size: int, max_batch_per_gpu: int | str | None) -> None:
    """Raise BatchPlanError if no split exists."""
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise BatchPlanError(f"global_batch_size is {global_batch_size!r}, but it must be a whole number from 1 up")
    if max_batch_per_gpu is None or max_batch_per_gpu == "auto":
        return
    if isinstance(max_batch_per_gpu, bool) or not isinstance(max_batch_per_gpu, int) or max_batch_per_gpu < 1:
        raise BatchPlanError(
            f"max_batch_per_gpu is {max_batch_per_gpu!r}, but it must be a whole number from 1 up; "
            "leave it out to take each worker's share at once, or use 'auto' to find it"
        )
