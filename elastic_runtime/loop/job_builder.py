"""The construction of a job's parts from the arguments of `init` and `prepare`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from elastic_runtime.data.changed_datasets import ChangedDatasets
from elastic_runtime.data.further_loaders import SecondLoader, check_seconds
from elastic_runtime.data.loader import ElasticLoader, IndexedLoader
from elastic_runtime.data.sources import chosen
from elastic_runtime.data.streamed import StreamedLoader
from elastic_runtime.loop.session import Session
from elastic_runtime.loop.step import GlobalStep
from elastic_runtime.plan.batch_sizes import GlobalBatch, MicroBatchLimit
from elastic_runtime.plan.batches import lockstep_batches, lockstep_shards, shard_batches
from elastic_runtime.process.device_memory import MemoryFollower
from elastic_runtime.reduction.buffers import FollowedBuffers
from elastic_runtime.reduction.gradient_noise import GradientNoise
from elastic_runtime.reduction.step_modes import ExactMode, FastMode, Mode, numerics
from elastic_runtime.state.kept_gradients import KeptGradients
from elastic_runtime.torch_internals.modules import uncompiled

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from elastic_runtime.data.loader import Plan
    from elastic_runtime.loop.member import Member
    from elastic_runtime.loop.options import TrainingOptions
    from elastic_runtime.sharded.wrap import ShardFunction
    from elastic_runtime.state.training_state import TrainingState


class JobBuilder:
    """Builds a job's parts. `memory_dir`: the folder of this worker's memory limit; "": none."""

    def __init__(self, options: TrainingOptions, member: Member, memory_dir: str) -> None:
        self._options, self._member, self._memory_dir = options, member, memory_dir

    def session(
        self, state: TrainingState, scaler: torch.amp.GradScaler | None, batch: GlobalBatch
    ) -> tuple[Session, Plan]:
        """Return the session of replicated models, and the function that splits a step."""
        options, streams = self._options, self._member.streams
        noise = GradientNoise(batch.samples) if options.measures_noise else None
        norms = noise.parts if noise else None
        state.noise = noise
        buffers = state.transient = FollowedBuffers([state.model])
        directory = self._memory_dir
        if options.exact:
            state.numerics = numerics()
            mode: Mode = ExactMode(state, buffers, streams, options.seed, norms)
            state.kept_gradients = KeptGradients(mode.reducer, state.parameters)
            session = self._of(state, mode, scaler, None, MemoryFollower(directory, None), noise)
            return session, partial(shard_batches, shards=options.shards)
        allowed = options.max_batch_per_gpu
        limit = MicroBatchLimit(allowed if isinstance(allowed, int) else None)
        mode = FastMode(state, buffers, streams, norms)
        state.kept_gradients = KeptGradients(mode.reducer, state.parameters)
        return self._of(state, mode, scaler, limit, MemoryFollower(directory, limit), noise), limit.plan

    def sharded(
        self,
        state: TrainingState,
        models: list[Any],
        shard: ShardFunction,
        shard_size: int | None,
        scaler: torch.amp.GradScaler | None,
    ) -> tuple[Session, Plan]:
        """Return the same for sharded models, in replica groups of `shard_size` workers.

        Raises SettingsError for options that they do not support.
        """
        from elastic_runtime.sharded.exact_sums import ExactShardedMode, check_elementwise  # noqa: PLC0415
        from elastic_runtime.sharded.mode import ShardedMode  # noqa: PLC0415  (FSDP costs a second to import)
        from elastic_runtime.sharded.wrap import Wrapping  # noqa: PLC0415

        options = self._options
        options.check_sharded(shard_size, scaled=scaler is not None)
        optimizers = {name: part for name, part in state.parts if isinstance(part, torch.optim.Optimizer)}
        wrapping = Wrapping(state.model, list(map(uncompiled, models)), optimizers, shard)
        sharding = self._member.shard(
            state, wrapping, shard_size, every_s=options.checkpoint_every_s, keep=options.keep_checkpoints
        )
        buffers, streams = FollowedBuffers([state.model]), self._member.streams
        if options.exact:
            check_elementwise(optimizers.values())
            state.numerics = numerics()
            mode: ShardedMode = ExactShardedMode(sharding, buffers, streams, options.seed)
        else:
            mode = ShardedMode(sharding, buffers, streams)
        state.kept_gradients = KeptGradients(mode.reducer, lambda: wrapping.parameters().items())
        most = options.max_batch_per_gpu
        plan: Plan = partial(lockstep_batches, max_batch=most if isinstance(most, int) else None)
        if options.exact:
            plan = partial(lockstep_shards, shards=options.shards)
        return self._of(state, mode, None, None, MemoryFollower(self._memory_dir, None)), plan

    def _of(
        self,
        state: TrainingState,
        mode: Mode,
        scaler: torch.amp.GradScaler | None,
        limit: MicroBatchLimit | None,
        memory: MemoryFollower,
        noise: GradientNoise | None = None,
    ) -> Session:
        step = GlobalStep(state, self._member, mode, scaler, limit, memory, noise)
        session = Session(state, self._member, mode, memory, step)
        session.counts_gain = self._options.adascale
        return session

    def loader(
        self, loaders: list[DataLoader[Any]], session: Session, batch: GlobalBatch, plan: Plan, state: TrainingState
    ) -> ElasticLoader:
        """Return the prepared loaders; the state gets what the order of samples depends on."""
        seed, exact = self._options.seed, self._options.exact
        loader, *others = loaders
        state.split = f"global_batch_size={batch.samples}, scale_batch={batch.bounds}"
        state.split += f", scale_lr={batch.rule}, noise_scale" if state.noise else ""
        if others:
            check_seconds(loader, batch)
        if not isinstance(loader.dataset, IterableDataset):
            indexed = IndexedLoader(loader, session, seed, batch, plan, seeded=exact)
            indexed.changes = ChangedDatasets([each.dataset for each in loaders])
            state.data = f"{indexed.length} samples{chosen(loader.dataset)} in the order of seed={seed}"
            per_loader = loader.batch_size or batch.samples
            for number, other in enumerate(others, 1):
                of_step = max(1, (other.batch_size or 1) * batch.samples // per_loader)
                indexed.seconds.append(SecondLoader(other, number, seed, (of_step, batch.samples)))
                state.data += f", beside {len(other.dataset)} samples{chosen(other.dataset)}"  # type: ignore[arg-type]
            return indexed
        state.data = f"a stream, seed={seed}"
        streamed = StreamedLoader(loader, session, seed, batch, plan, seeded=exact)
        state.parts.append(("loader", streamed))
        return streamed
