"""The validated options of `elastic_runtime.init`."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_runtime.errors import BatchPlanError, SettingsError
from elastic_runtime.plan.batch_sizes import LR_RULES, GlobalBatch
from elastic_runtime.plan.batches import check_batch, check_shards

REDUCTIONS = ("fast", "exact")


@dataclass(frozen=True)
class TrainingOptions:
    """The options of `elastic_runtime.init`. Raises BatchPlanError and SettingsError for invalid values."""

    global_batch_size: int | None = None
    max_batch_per_gpu: int | str | None = None
    seed: int = 0
    reduction: str = "fast"
    shards: int = 8
    scale_batch: tuple[int, int] | None = None
    scale_lr: str = "linear"
    noise_scale: bool = False
    checkpoint_every_s: float = 300.0
    keep_checkpoints: int = 2
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise SettingsError(f"reduction is {self.reduction!r}, but it must be 'fast' or 'exact'")
        if self.scale_lr not in LR_RULES:
            raise SettingsError(f"scale_lr is {self.scale_lr!r}, but it must be 'linear', 'sqrt', 'adascale' or 'none'")
        if self.adascale and self.scale_batch is None:
            raise SettingsError(
                "scale_lr='adascale' follows a batch that grows with the job: give scale_batch=(least, most) as well, "
                "or leave it out"
            )
        if self.scale_batch is not None:
            self._check_scale(*self.scale_batch)
        if self.global_batch_size is not None:
            self.check(self.global_batch_size)

    @property
    def exact(self) -> bool:
        """Whether the result is to be the same to the bit at every size."""
        return self.reduction == "exact"

    @property
    def adascale(self) -> bool:
        """Whether the gain of the batch scales the learning rate, and counts the steps."""
        return self.scale_lr == "adascale"

    @property
    def measures_noise(self) -> bool:
        """Whether the noise of the gradients is measured."""
        return self.noise_scale or self.adascale

    @property
    def reduction_text(self) -> str:
        """Return the mark of a state that was trained with these options."""
        return f"reduction='exact', shards={self.shards}" if self.exact else "reduction='fast'"

    def check(self, global_batch: int) -> None:
        """Raise BatchPlanError if a step of this number of samples cannot be split as asked."""
        check_batch(global_batch, self.max_batch_per_gpu)
        if not self.exact:
            return
        if isinstance(self.max_batch_per_gpu, str):
            raise BatchPlanError(
                "reduction='exact' fixes the shape of a shard, so max_batch_per_gpu cannot be 'auto'; give a number"
            )
        check_shards(global_batch, self.shards, self.max_batch_per_gpu)

    def check_sharded(self, shard_size: int | None, *, scaled: bool) -> None:
        """Raise SettingsError for what does not go together with shard=. `scaled`: a GradScaler was given."""
        valid = shard_size is None or (isinstance(shard_size, int) and not isinstance(shard_size, bool))
        if not valid or (shard_size is not None and shard_size < 1):
            raise SettingsError(
                f"shard_size is {shard_size!r}, but it must be a whole number from 1 up: the number of workers that "
                "hold one copy of the model together; leave it out to share one copy among all"
            )
        if self.exact and shard_size == 1:
            raise SettingsError(
                "reduction='exact' and shard_size=1 exclude each other: each worker would hold the whole model; leave "
                "shard= and shard_size= out"
            )
        if isinstance(self.max_batch_per_gpu, str):
            raise SettingsError(
                "shard= and max_batch_per_gpu='auto' exclude each other: all workers have to iterate in step, and none "
                "can cut its share by itself; give a number"
            )
        if self.measures_noise:
            raise SettingsError(
                "noise_scale=True (or scale_lr='adascale') and shard= exclude each other: FSDP sums the gradients "
                "within the backward pass, where one worker's own are not to be seen; leave it out"
            )
        if scaled:
            raise SettingsError(
                "shard= and a GradScaler exclude each other: each worker would skip steps by itself; use bfloat16, by "
                "fully_shard's mp_policy"
            )

    def batch(self, global_batch: int, per_worker: int) -> GlobalBatch:
        """Return the samples of a step at each size."""
        return GlobalBatch(global_batch, per_worker, self.scale_batch, self.scale_lr)

    def _check_scale(self, least: int, most: int) -> None:
        if self.exact:
            raise BatchPlanError(
                "reduction='exact' and scale_batch exclude each other: what a step is made of would depend on the size"
            )
        if not 1 <= least <= most:
            raise BatchPlanError(f"scale_batch is ({least}, {most}), but it must be (least, most) samples, from 1 up")
