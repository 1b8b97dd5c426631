"""The strategy that makes Lightning's Trainer elastic.

To Trainer it is a strategy of one device, whatever the number of workers: ranks change during a training, and Trainer
reads them once. Only what rank 0 does alone (checkpoints, loggers, progress bars) follows the job.

Its automatic optimization is of a global step in place of a batch. Trainer's arguments, modules and callbacks that do
not go together with an elastic job are refused.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

import elastic_runtime
from elastic_runtime.errors import SettingsError
from elastic_runtime.integrations.lightning.fit_loop import ElasticFitLoop, StepLoader, one_loader
from elastic_runtime.integrations.lightning.ranks import device_of, follow_rank
from elastic_runtime.integrations.lightning.results import StepResults
from elastic_runtime.integrations.lightning.tracked_state import TrackedState

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer
    from torch.optim import Optimizer


REFUSED: dict[type, str] = {
    callbacks.GradientAccumulationScheduler: "global_batch_size sets how many samples a step has",
    callbacks.Timer: "it reads each worker's clock, and workers would stop at different steps; set max_steps",
    callbacks.BatchSizeFinder: 'ElasticStrategy(max_batch_per_gpu="auto") does that',
    callbacks.LearningRateFinder: "it trains within the training; find the rate in a job of its own",
    callbacks.StochasticWeightAveraging: "its averages reach no joining worker",
    callbacks.WeightAveraging: "its averages reach no joining worker",
    callbacks.ModelPruning: "its masks reach no joining worker",
    BaseFinetuning: "its bookkeeping of parameter groups reaches no joining worker; set requires_grad in the module's "
    "on_train_epoch_start, with all parameters in the optimizer",
}


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raise SettingsError for what would be done twice, or differently at each size."""
    for name, usual, instead in (
        ("accumulate_grad_batches", 1, "a step has global_batch_size samples whatever fits into memory: set that"),
        ("overfit_batches", 0.0, "use a torch.utils.data.Subset"),
        ("limit_train_batches", 1.0, "an epoch is a whole one: use a torch.utils.data.Subset, or set max_steps"),
        ("reload_dataloaders_every_n_epochs", 0, "the loader is dealt out once for the whole training"),
    ):
        found = getattr(trainer, name)
        if found is not None and (found != usual or type(found) is not type(usual)):  # 1 is a batch, 1.0 all of them
            raise SettingsError(f"Trainer({name}={found!r}) does not go together with ElasticStrategy: {instead}")
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise SettingsError("Trainer(max_epochs=-1) has no end, which an elastic training needs: set max_steps")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise SettingsError(
            "Trainer(precision='16-mixed') scales losses by a GradScaler of its own, which reaches no joining worker; "
            "use precision='bf16-mixed'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in REFUSED.items():
            if isinstance(callback, kind):
                raise SettingsError(f"{kind.__name__} does not go together with ElasticStrategy: {reason}")
    _check_module(module)


def _check_module(module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise SettingsError(
            "automatic_optimization=False does not go together with ElasticStrategy, which repeats a step where a "
            "worker is lost; train the module by job.epochs and job.backward, with `more=True` for several optimizers"
        )
    if type(module).backward is not LightningModule.backward:
        raise SettingsError(
            f"{type(module).__name__}.backward is not called: the job runs the backward pass; leave it out"
        )


def check_optimizers(optimizers: list[Any]) -> None:
    """Raise SettingsError for optimizers that compute a loss several times in a step."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise SettingsError(
                "LBFGS computes the loss several times in a step, from batches that are gone; use another optimizer, "
                "or train the module by job.epochs, with job.backward in the closure"
            )


class ElasticOptimization(_AutomaticOptimization):
    """Runs forward and backward passes of all micro-batches of a step, again where a worker is lost."""

    @property
    def _strategy(self) -> ElasticStrategy:
        strategy: Any = self.trainer.strategy
        found: ElasticStrategy = strategy
        return found

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        return Closure(step_fn=partial(self._global_step, kwargs, optimizer, batch_idx))

    def _global_step(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> ClosureResult:
        """Return the result of this worker's last micro-batch."""
        strategy, job = self._strategy, self._strategy.job
        clear = self._make_zero_grad_fn(batch_idx, optimizer)
        found = ClosureResult(None)
        for batch in strategy.micro_batches(kwargs["batch"]):
            first = job.begins_step
            strategy.results.begin_micro_batch(batch, first=first)
            found = self._training_step(type(kwargs)(kwargs, batch=batch))
            if clear is not None and first:
                clear()
            if found.closure_loss is None:
                job.skip()
            else:
                strategy.backward(found.closure_loss, optimizer)
        return found

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Any) -> None:
        super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        self._strategy.results.end_step()


class ElasticStrategy(SingleDeviceStrategy):
    """For `Trainer(strategy=...)`: this process is a worker of an elastic job.

    `options` are those of `elastic_runtime.init`; without `global_batch_size` it is the loader's batch_size. `job` is
    the job, with `rank`, `world_size` and `report`. SettingsError in `fit` for what cannot be elastic.
    """

    strategy_name = "elastic"
    loader: StepLoader
    results: StepResults
    tracked: TrackedState

    def __init__(self, **options: Any) -> None:
        self.job = elastic_runtime.init(**({"progress": False} | options))
        super().__init__()
        self._trainer: Trainer | None = None
        self._micro_batches: Iterator[Any] = iter(())

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return device_of(self.accelerator)

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is rank 0; before the training every worker is."""
        return self.job.is_leader or not self._placed

    @property
    def global_rank(self) -> int:
        """This worker's rank now; 0 before the training."""
        return self.job.rank if self._placed else 0

    @global_rank.setter
    def global_rank(self, _: int) -> None:
        """Ignore what Lightning sets."""

    @property
    def _placed(self) -> bool:
        return self._trainer is not None and hasattr(self, "loader") and self.job.placed

    def setup(self, trainer: Trainer) -> None:
        """Make the trainer's loops the job's, if it is going to train."""
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            check_trainer(trainer, self.lightning_module)
            self._take_loops(trainer)
        super().setup(trainer)
        check_optimizers(self.optimizers)

    def _take_loops(self, trainer: Trainer) -> None:
        self._trainer = trainer
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        fit.__class__, epoch.automatic_optimization.__class__ = ElasticFitLoop, ElasticOptimization
        assert isinstance(fit, ElasticFitLoop)
        fit.strategy = self
        self.results = epoch._results = StepResults(self.job)  # noqa: SLF001

    def process_dataloader(self, dataloader: object) -> object:
        """Prepare the training's loader with all the rest; others stay as they are."""
        trainer = self._trainer
        if trainer is None or not trainer.training or trainer.sanity_checking:
            return dataloader
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        given: list[Any] = [self.lightning_module, list(self.optimizers), one_loader(dataloader)]
        prepared = self.job.prepare(*given, *([schedulers] if schedulers else []))
        self.job.keep_epochs_whole()
        self.tracked = TrackedState(trainer, self.results)
        self.job.track(trainer=self.tracked)
        self.loader = StepLoader(self, prepared[2])
        return self.loader

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: FBT001
        """Read a checkpoint of Lightning's, for `test` and its like. SettingsError if it is to resume a training."""
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            raise SettingsError(
                "trainer.fit(ckpt_path=...) does not go together with ElasticStrategy: a job resumes at the newest "
                "checkpoint in ELASTIC_CHECKPOINT_DIR by itself; to begin with the weights of a file, load its "
                "state_dict into the module before fit"
            )
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    # A global step

    def begin_step(self, micro_batches: Iterator[Any]) -> None:
        """The next global step has these micro-batches."""
        self._micro_batches = micro_batches

    def first_micro_batch(self) -> Any:
        """Return the first one, which Trainer gets; its place in the epoch is where the counters are."""
        assert self._trainer is not None
        batch = next(self._micro_batches)
        self.tracked.begin_iteration()
        fit = self._trainer.fit_loop
        fetcher: Any = fit._data_fetcher  # noqa: SLF001
        fetcher.fetched = fit.epoch_loop.batch_progress.current.ready
        return batch

    def micro_batches(self, first: Any) -> Iterator[Any]:
        """Yield all of the step on this worker's device; `first` is there already."""
        yield first
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        for batch in self._micro_batches:
            found = module._on_before_batch_transfer(plugin.convert_input(batch), dataloader_idx=0)  # noqa: SLF001
            yield self.batch_to_device(found, dataloader_idx=0)

    def backward(self, closure_loss: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Run the job's backward pass, between Lightning's hooks."""
        module: Any = self.lightning_module
        loss: Any = self.precision_plugin.pre_backward(closure_loss, module)
        self.job.backward(loss)
        found: torch.Tensor = self.precision_plugin.post_backward(loss, module)
        return found

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the gradients by the closure, clip them, and step; the step is not given the closure."""
        module: Any = model or self.lightning_module
        found = self.precision_plugin._wrap_closure(module, optimizer, closure)  # noqa: SLF001
        optimizer.step(**kwargs)
        return found

    # All workers

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002, ARG002, FBT001, FBT002
        """Rank 0's decision, for all: rounding may differ between devices."""
        if not self._placed or self.job.world_size == 1:
            return decision
        return bool(self.job.repeat(lambda: self.job.all_gather(decision)[0]))

    def follow_ranks(self) -> None:
        """Let Lightning's `rank_zero_only` and the progress bar follow the rank, now and after each change of size."""
        self._set_rank()
        self.job.on_resize(lambda _: self._set_rank())

    def _set_rank(self) -> None:
        follow_rank(self.job)
        bar = self._trainer.progress_bar_callback if self._trainer is not None else None
        if bar is not None:
            (bar.enable if self.is_global_zero else bar.disable)()
