"""What `elastic_runtime.init` was asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_runtime.batches import check_batch, check_shards
from elastic_runtime.errors import BatchPlanError, SettingsError

REDUCTIONS = ("fast", "exact")


@dataclass(frozen=True)
class Options:
    """See `elastic_runtime.init`. BatchPlanError and SettingsError for values that cannot be."""

    global_batch_size: int | None = None
    max_batch_per_gpu: int | None = None
    seed: int = 0
    reduction: str = "fast"
    shards: int = 8
    checkpoint_every_s: float = 300.0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise SettingsError(f"reduction is {self.reduction!r}, but it must be 'fast' or 'exact'")
        if self.global_batch_size is not None:
            self.check(self.global_batch_size)

    @property
    def exact(self) -> bool:
        """Whether the result is to be the same to the bit at every size."""
        return self.reduction == "exact"

    @property
    def reduction_text(self) -> str:
        """What a state that was trained so is marked with."""
        return f"reduction='exact', shards={self.shards}" if self.exact else "reduction='fast'"

    def check(self, global_batch: int) -> None:
        """BatchPlanError where a step of so many samples cannot be split as asked."""
        check_batch(global_batch, self.max_batch_per_gpu)
        if not self.exact:
            return
        if self.max_batch_per_gpu is not None and not isinstance(self.max_batch_per_gpu, int):
            raise BatchPlanError("reduction='exact' fixes the shape of a shard; give max_batch_per_gpu as a number")
        check_shards(global_batch, self.shards, self.max_batch_per_gpu)
