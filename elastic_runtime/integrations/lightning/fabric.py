"""Lightning Fabric, elastic: `ElasticFabric` in place of `lightning.Fabric`, and its epochs.

Fabric is set up for one device, so that it wraps no model and starts no process; models keep its precision, batches go
to its device. What `setup` and `setup_dataloaders` are given makes the job, once the loop begins. Optimizers are
returned as they are: Fabric's wrapper of one keeps the parameter groups that were there when it was made, and not those
that a resumed or joining worker loads.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning import Fabric, LightningModule
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.utilities import move_data_to_device

import elastic_runtime
from elastic_runtime.data.loader import check
from elastic_runtime.errors import LoopError, SettingsError, UsageError
from elastic_runtime.integrations.lightning.ranks import device_of, follow_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from elastic_runtime.data.loader import ElasticLoader
    from elastic_runtime.loop.job import Job

Value = TypeVar("Value")
_MEANS = ("mean", "avg", torch.distributed.ReduceOp.AVG)
_SUMS = ("sum", torch.distributed.ReduceOp.SUM)


class ElasticFabric(Fabric):
    """A Fabric whose training may grow, shrink, lose workers and resume.

    `global_batch_size` (samples of one global step, over all workers) is by default the training loader's
    `batch_size`. Keywords in `elastic` go to `elastic_runtime.init`, all others to Fabric. SettingsError for those that
    distribute the training by themselves.
    """

    def __init__(
        self, *, global_batch_size: int | None = None, elastic: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        _check_arguments(kwargs)
        self.job: Job = elastic_runtime.init(**{"global_batch_size": global_batch_size, **(elastic or {})})
        super().__init__(**{**kwargs, "strategy": _JobStrategy(self.job), "devices": 1})
        if getattr(self._precision, "scaler", None) is not None:
            raise SettingsError(
                "precision='16-mixed' scales losses by a GradScaler of Fabric's own, which reaches no joining worker; "
                "use precision='bf16-mixed'"
            )
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[Any] = []
        self._training: TrainingLoader | None = None
        self._ready = False

    # The loop

    def epochs(self, count: int, *, start: int = 0) -> Iterator[int]:
        """Yield the epochs from where the training stands up to `count`; `start`: as for `job.epochs`."""
        self._prepare()
        yield from self._live(self.job.epochs(count, start=start))

    def steps(self, count: int) -> Iterator[Any]:
        """Yield the training loader's batches, epoch after epoch, until `count` global steps are applied."""
        training = self._prepare()
        yield from self._live(map(training.place, self.job.steps(count)))

    def _live(self, turns: Iterator[Value]) -> Iterator[Value]:
        """Let the collectives reach the workers while this loop runs."""
        strategy = self._job_strategy
        for turn in turns:
            if not strategy.live:
                follow_rank(self.job)
                strategy.live = True
            yield turn
        strategy.live = False

    def backward(self, tensor: torch.Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Run `job.backward`, which takes the keywords, exactly once in each iteration."""
        if args:
            raise UsageError("fabric.backward(loss, gradient) gives a gradient of the loss; multiply the loss instead")
        module = None if model is None else model.module
        self._precision.pre_backward(tensor, module)
        self.job.backward(tensor, **kwargs)
        self._precision.post_backward(tensor, module)

    # What is set up

    def setup(self, module: Any, *optimizers: Any, scheduler: Any = None, **kwargs: Any) -> Any:
        """Set up as Fabric does, before the loop: else LoopError. The optimizers are returned as they are."""
        self._check_unprepared("setup")
        wrapped = super().setup(module, **kwargs)
        self._take_model(wrapped)
        self._take(optimizers)
        if isinstance(wrapped.module, LightningModule):
            wrapped.module._fabric_optimizers = list(optimizers)  # noqa: SLF001  (what `self.optimizers()` returns)
        if scheduler is not None:
            self._schedulers.append(scheduler)
        found = (wrapped, *optimizers, *(() if scheduler is None else (scheduler,)))
        return found if len(found) > 1 else wrapped

    def setup_module(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Set up as Fabric does, before the loop."""
        self._check_unprepared("setup_module")
        wrapped = super().setup_module(module, *args, **kwargs)
        self._take_model(wrapped)
        return wrapped

    def setup_optimizers(self, *optimizers: Any) -> Any:
        """Return the optimizers as they are. Before the loop."""
        self._check_unprepared("setup_optimizers")
        self._validate_setup_optimizers(optimizers)
        self._take(optimizers)
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _take_model(self, wrapped: Any) -> None:
        """Take the model, without the hook by which Fabric refuses a backward pass of a mixed precision that it has not
        begun: `job.backward` begins it, and names one that the script begins.
        """
        self._models.append(wrapped.module)
        wrapped._register_backward_hook = _unhooked  # noqa: SLF001

    def _take(self, optimizers: tuple[Any, ...]) -> None:
        for optimizer in optimizers:
            self._optimizers.append(optimizer)
            optimizer.register_step_post_hook(self._call_after_step)

    def _call_after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.call("on_after_optimizer_step", strategy=self._strategy, optimizer=optimizer)

    def setup_dataloaders(self, *dataloaders: Any, move_to_device: bool = True, **kwargs: Any) -> Any:
        """Set up the training's loader, which is the first one of all that are given; others as Fabric does, each
        worker reads all of them. UsageError where the samples cannot be distributed.
        """
        given = list(dataloaders)
        found: list[Any] = []
        if self._training is None and given:
            loader = given.pop(0)
            check(loader)
            self._training = TrainingLoader(self.job, loader, self.device if move_to_device else None)
            found.append(self._training)
        if given:
            others = super().setup_dataloaders(*given, move_to_device=move_to_device, **kwargs)
            found += others if isinstance(others, list) else [others]
        return found[0] if len(found) == 1 else found

    def _check_unprepared(self, call: str) -> None:
        if self._ready:
            raise LoopError(f"fabric.{call} comes before fabric.epochs: joining workers have to set up the same")

    def _prepare(self) -> TrainingLoader:
        """Give all that was set up to the job, once."""
        models = [model for model in self._models if any(p.requires_grad for p in model.parameters())]
        training = self._training
        if training is None or not models or not self._optimizers:
            raise LoopError(
                "fabric.setup and fabric.setup_dataloaders were not given a model that requires gradients, its "
                "optimizer and a DataLoader; they come before fabric.epochs"
            )
        if not self._ready:
            self._ready = True
            schedulers = self._schedulers or None
            training.elastic = self.job.prepare(models, self._optimizers, training.loader, schedulers)[2]
            self.job.on_resize(lambda _: follow_rank(self.job))
        return training

    # All workers

    @property
    def _job_strategy(self) -> _JobStrategy:
        strategy: Any = self._strategy
        found: _JobStrategy = strategy
        return found

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:  # noqa: ARG002, FBT001, FBT002
        """Before the loop every worker acts by itself. LoopError in it: rank 0 may be lost while others wait for it."""
        if self._job_strategy.live:
            raise LoopError("fabric.rank_zero_first comes before fabric.epochs; in the loop, use fabric.job.repeat")
        yield


def _unhooked(output: torch.Tensor) -> torch.Tensor:
    return output


def _check_arguments(given: dict[str, Any]) -> None:
    """Raise SettingsError for arguments that distribute a training."""
    for name, usual in (("strategy", "auto"), ("devices", "auto"), ("num_nodes", 1)):
        found = given.get(name, usual)
        if found != usual and not (name == "devices" and found in (1, "1")):
            raise SettingsError(
                f"ElasticFabric({name}={found!r}): a worker has one device, and the job decides how many workers there "
                "are; leave it out"
            )


class _JobStrategy(SingleDeviceStrategy):
    """One device, with the job's ranks. `live`: the loop runs; outside of it each worker acts by itself."""

    live = False

    def __init__(self, job: Job) -> None:
        self._job = job
        super(SingleDeviceStrategy, self).__init__()  # without the ranks that it sets

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return device_of(self.accelerator)

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is rank 0; before the loop every worker is."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:  # type: ignore[override]  # Lightning assigns it, only in the constructor
        """This worker's rank now; 0 before the loop."""
        return self._job.rank if self._job.placed else 0

    @property
    def local_rank(self) -> int:  # type: ignore[override]  # Lightning assigns it, only in the constructor
        """The same: what one worker does for its node is done by rank 0."""
        return self.global_rank

    @property
    def world_size(self) -> int:  # type: ignore[override]  # Lightning assigns it, only in the constructor
        """The number of workers now; 1 before the loop."""
        return self._job.world_size if self._job.placed else 1

    def clip_gradients_norm(self, module: Any, optimizer: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Clip where a global step is complete; elsewhere there are no gradients, and the norm is 0."""
        return self._job.clip_grad_norm_(self.precision.main_params(optimizer), max_norm, *args, **kwargs)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Clip where a global step is complete."""
        if self._job.applied:
            super().clip_gradients_value(module, optimizer, clip_val)

    def _together(self, work: Callable[[], Value], alone: Value) -> Value:
        """Return the result of a job's collective; `alone` outside of the loop, and in an iteration that is dropped, to
        whose end not all workers come. LoopError within a step.
        """
        return self._job.repeat(work) if self.live and not self._job.dropped else alone

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:  # noqa: ARG002
        """Sum, or compute the mean, in place."""
        if not any(reduce_op == each for each in (*_MEANS, *_SUMS)):
            raise UsageError(f"fabric.all_reduce(reduce_op={reduce_op!r}) is neither 'mean' nor 'sum'")
        divides = any(reduce_op == each for each in _MEANS)

        def work() -> torch.Tensor:
            total = self._job.all_reduce(tensor.detach().clone())
            return total / self._job.world_size if divides else total

        with torch.no_grad():
            return tensor.copy_(self._together(work, tensor.detach()))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:  # noqa: ARG002, FBT001, FBT002
        """Return a row for each worker; with one worker the tensor itself."""
        if sync_grads:
            raise UsageError("fabric.all_gather(sync_grads=True) cannot be; use fabric.job.gather_batch")
        found = self._together(lambda: self._job.all_gather(tensor.detach()), [tensor])
        return torch.stack([each.to(tensor.device) for each in found]) if len(found) > 1 else tensor

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all workers."""
        self.broadcast(0)

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """Return that worker's object."""
        found = self._together(lambda: self._job.all_gather(obj)[src], obj)
        return move_data_to_device(found, self.root_device)  # type: ignore[no-any-return]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002, FBT001, FBT002
        """Return whether all, or any, have decided so."""
        found = self._together(lambda: self._job.all_gather(decision), [decision])
        return min(found) if all else max(found)


class TrainingLoader:
    """The training's loader, whose batches are shared out by the job and put on `device`, unless it is None.

    Its other attributes are those of the loader that was given.
    """

    def __init__(self, job: Job, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.loader, self._job, self._device = loader, job, device
        self.elastic: ElasticLoader | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return the global steps of an epoch. UsageError for an IterableDataset."""
        return self._job.steps_per_epoch(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.elastic is None:
            raise LoopError(
                "the training loader is iterated outside fabric.epochs(...); write: for epoch in fabric.epochs(N)"
            )
        return map(self.place, self.elastic)

    def place(self, batch: Any) -> Any:
        """Return the batch on the device."""
        return batch if self._device is None else move_data_to_device(batch, self._device)
