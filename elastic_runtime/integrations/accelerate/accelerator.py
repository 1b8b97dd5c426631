"""`ElasticAccelerator`: an Accelerator whose loop is an elastic job's."""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env

import elastic_runtime
from elastic_runtime.data.loader import check
from elastic_runtime.data.sources import has_own_batches
from elastic_runtime.errors import LoopError, SettingsError, UsageError
from elastic_runtime.integrations.accelerate.prepared import (
    ElasticOptimizer,
    ElasticScheduler,
    EvaluationLoader,
    TrainingLoader,
)
from elastic_runtime.integrations.accelerate.records import RecordingAccelerator
from elastic_runtime.integrations.accelerate.settings import as_one_process, check_arguments, check_more

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.utils.data import DataLoader

    from elastic_runtime.loop.job import Job


class ElasticAccelerator(RecordingAccelerator):
    """An Accelerator whose training may grow, shrink, lose workers and resume.

    `global_batch_size` (samples of one global step, over all workers) is by default the training loader's `batch_size`
    times `gradient_accumulation_steps`; the loader's `batch_size` is the most samples of one iteration.
    Keywords in `elastic` go to `elastic_runtime.init`, all others to Accelerator. SettingsError for those that bring a
    way of distributing of their own.
    """

    _optimizers: list[Any]

    def __init__(
        self,
        *args: Any,
        global_batch_size: int | None = None,
        elastic: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(Accelerator).bind(*args, **kwargs).arguments
        check_arguments(given, os.environ)
        with as_one_process(cpu=bool(given.get("cpu")) or parse_flag_from_env("ACCELERATE_USE_CPU")):
            super().__init__(*args, **kwargs)
        if self.distributed_type != DistributedType.NO:
            raise SettingsError(
                f"Accelerate has {self.num_processes} processes of its own ({self.distributed_type.value}); make the "
                "ElasticAccelerator before any other Accelerator or PartialState, and start it by torchrun, "
                "accelerate launch or gpuquota"
            )
        self.sync_gradients, self._more = True, False
        options: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "seed": self.dataloader_config.data_seed or 0,
        }
        options |= elastic or {}
        self._global_batch, self.seed = options["global_batch_size"], int(options["seed"])
        self._trained: list[torch.nn.Module] = []
        self._training: TrainingLoader | None = None
        self._named: DataLoader[Any] | None = None
        self.job: Job = elastic_runtime.init(**options)
        self.job.on_resize(self.follow)
        self.keep_position()

    # The loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the training stands up to `count`; a joiner begins in the middle of one."""
        self._begin()
        for epoch in self.job.epochs(count):
            self.follow()
            self.read_alone, self.epoch, self.epoch_over = False, epoch, False
            yield epoch
        self.live = False

    def steps(self, count: int) -> Iterator[Any]:
        """The training loader's batches, epoch after epoch, until `count` global steps are applied."""
        self._begin()
        assert self._training is not None
        yield from self._training.iterations(self.job.steps(count))
        self.live = False

    def warm_up(self, forward: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        """`job.warm_up` over a function from a batch to its loss; a decorator. After all has been prepared."""
        self._prepare_job()
        assert self._training is not None
        place = self._training.on_device
        self.job.warm_up(lambda batch: forward(place(batch)))
        return forward

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:  # noqa: ARG002  (Accelerate's own signature)
        """Around an iteration's body: what does not fit into memory is repeated in halves.

        The job determines when a step is complete: its number of iterations depends on the number of workers.
        """
        with self.job.retrying():
            yield

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | None = None,
        reduction: str = "mean",
        more: bool = False,
        **kwargs: Any,
    ) -> None:
        """`job.backward`: this micro-batch's share of the global batch. Exactly once in each iteration, but for
        `more=True`: an optimizer acts on these gradients, and another call follows.

        Afterwards `sync_gradients` is true if the step is complete, or with `more`: optimizers act.
        """
        check_more(kwargs)
        try:
            self.job.backward(loss, weight=weight, reduction=reduction, more=more)
        except LoopError as error:
            if self.sync_gradients:  # in no iteration
                error.add_note(
                    "accelerator.backward is job.backward; the training loader is the first DataLoader that "
                    "accelerator.prepare was given, or its training_loader="
                )
            raise
        self._more = more
        self.sync_gradients = self.job.applied or more

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip if a global step is complete; otherwise there are no gradients, and the norm is 0."""
        if not self.sync_gradients:
            return torch.zeros((), device=self.device)
        self.unscale_gradients()
        norm = self.job.clip_grad_norm_(parameters, max_norm, norm_type)
        self.sync_gradients = self.job.applied or self._more
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip if a global step is complete."""
        if self.sync_gradients:
            super().clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale with the scaler, if there is one and a global step is complete."""
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        if self.sync_gradients and self.scaler is not None:
            for each in self._optimizers if optimizer is None else given:
                self.scaler.unscale_(getattr(each, "optimizer", each))

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a global step, as in Accelerator. LoopError if it is set after the loop has begun."""
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if self.ready:
            raise LoopError("gradient_accumulation_steps comes before accelerator.epochs: it makes the global batch")
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    # What is prepared

    def prepare(
        self, *args: Any, device_placement: list[bool] | None = None, training_loader: DataLoader[Any] | None = None
    ) -> Any:
        """As Accelerator's: any number of objects in any order, which are returned in that order.

        The first DataLoader that is given, or `training_loader`, holds the training data; further ones are for
        evaluation and the like. Before the loop, else LoopError.
        """
        if self.ready and any(isinstance(each, torch.nn.Module | torch.optim.Optimizer) for each in args):
            raise LoopError("accelerator.prepare comes before accelerator.epochs: joiners have to prepare the same")
        if training_loader is not None:
            self._named = training_loader
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: Any = None,
        evaluation_mode: Any = False,  # noqa: FBT002  (Accelerate's own signature)
    ) -> torch.nn.Module:
        """As Accelerator's for one process: on the device, in mixed precision, compiled where that was asked for."""
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode and not any(prepared is each for each in self._trained):
            self._trained.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> Any:
        """Wrapped by an ElasticOptimizer."""
        if isinstance(optimizer, ElasticOptimizer):
            return optimizer
        place = self.device_placement if device_placement is None else device_placement
        self._optimizers.append(ElasticOptimizer(optimizer, device_placement=place, scaler=self.scaler))
        return self._optimizers[-1]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrapped by an ElasticScheduler."""
        if isinstance(scheduler, ElasticScheduler):
            return scheduler
        of = getattr(scheduler, "optimizer", None)
        own = [each for each in self._optimizers if of is each or of is each.optimizer]
        wrapped = ElasticScheduler(
            scheduler, own or self._optimizers, step_with_optimizer=self.step_scheduler_with_optimizer
        )
        self._schedulers.append(wrapped)
        return wrapped

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: object = None
    ) -> Any:
        """A TrainingLoader or a EvaluationLoader; see `prepare`. UsageError where it cannot be shared out."""
        if isinstance(data_loader, TrainingLoader | EvaluationLoader):
            return data_loader
        if slice_fn_for_dispatch is not None:
            raise UsageError("slice_fn_for_dispatch is set, but no worker reads for the others; leave it out")
        place = self.device_placement if device_placement is None else device_placement
        prepared = self._training_loader(data_loader, place) or EvaluationLoader(self, data_loader, place=place)
        self._dataloaders.append(prepared)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to `save_state` and to the job's state (`job.track`). Call it before the loop."""
        if self.ready:
            raise LoopError("accelerator.register_for_checkpointing comes before accelerator.epochs")
        super().register_for_checkpointing(*objects)

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerator's: before the loop what was prepared is forgotten, so that something else may be prepared."""
        kept = self._optimizers if self.ready else []
        found = super().free_memory(*objects)
        self._optimizers = kept
        if not self.ready:
            self._trained, self._training, self._named = [], None, None
        return found

    def batch_of(self, loader: DataLoader[Any]) -> tuple[int, int | None]:
        """Samples of a global step, and the most of one iteration."""
        if has_own_batches(loader):
            return 1, None
        size = loader.batch_size or 1
        return self._global_batch or size * self.gradient_accumulation_steps, size

    def _training_loader(self, loader: DataLoader[Any], place: bool) -> TrainingLoader | None:  # noqa: FBT001
        if self._training is not None or (self._named is not None and loader is not self._named):
            return None
        check(loader)
        if has_own_batches(loader) and self.gradient_accumulation_steps > 1:
            raise SettingsError(
                "each batch of a batch sampler of one's own is one global step; leave gradient_accumulation_steps out"
            )
        self._training = TrainingLoader(self, loader, place=place)
        return self._training

    def _prepare_job(self) -> None:
        """Everything has been prepared: give it to the job, once."""
        if self.ready:
            return
        models = [model for model in self._trained if any(p.requires_grad for p in model.parameters())]
        if self._training is None or not models or not self._optimizers:
            raise LoopError(
                "accelerator.prepare was not given a DataLoader, a model that requires gradients and its optimizer; it "
                "comes before accelerator.epochs"
            )
        self.ready = True
        most, cut = self.batch_of(self._training.loader)
        self.job.settle_batch(global_batch_size=most, max_batch_per_gpu=cut)
        optimizers = [each.optimizer for each in self._optimizers]
        schedulers, tracked = self._registered()
        found = self.job.prepare(models, optimizers, self._training.loader, schedulers, scaler=self.scaler)
        self._training.elastic = found[2]
        self.job.track(**{f"registered{number}": each for number, each in enumerate(tracked)})
        for each in self._optimizers:
            each.rebind()

    def _begin(self) -> None:
        """Set the position of an earlier `load_state` call, before or after the job received all objects."""
        self._prepare_job()
        position, self.loaded_position = self.loaded_position, None
        if position is not None:
            self.job.begin_at(position)
        self.began = self.live = True

    def _registered(self) -> tuple[list[Any], list[Any]]:
        """Schedulers, and other objects that were registered, each once and without its wrapper."""
        schedulers = [each.scheduler for each in self._schedulers]
        tracked: list[Any] = []
        for each in self._custom_objects:
            plain = getattr(each, "scheduler", each)
            if any(plain is each for each in schedulers):
                continue
            is_scheduler = isinstance(plain, torch.optim.lr_scheduler.LRScheduler)
            (schedulers if is_scheduler else tracked).append(plain)
        return schedulers, tracked
