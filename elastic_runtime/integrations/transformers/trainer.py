"""`ElasticTrainer`: a Trainer whose loop is an elastic job's."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from accelerate import DistributedType, PartialState
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, optimization
from transformers.trainer_callback import ExportableState, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy, TrainOutput, speed_metrics

import elastic_runtime
from elastic_runtime.errors import LoopError, SettingsError
from elastic_runtime.integrations.transformers.evaluation import shared_out
from elastic_runtime.integrations.transformers.loaders import without_sharding
from elastic_runtime.integrations.transformers.losses import MeanLoss, counted_tokens, is_causal
from elastic_runtime.integrations.transformers.settings import check_arguments, check_class
from elastic_runtime.integrations.transformers.tracked_state import TrackedState

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from elastic_runtime.loop.job import Job

BY_FIGURES = (
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    getattr(optimization, "GreedyLR", torch.optim.lr_scheduler.ReduceLROnPlateau),
)
"""Schedules that are stepped by an evaluation, with its figure."""


class ElasticTrainer(Trainer):
    """A Trainer whose training may grow, shrink, lose workers and resume.

    `global_batch_size` (samples of one optimizer step, over all workers) is by default that of the arguments:
    `per_device_train_batch_size` times `gradient_accumulation_steps`; `per_device_train_batch_size` is the most samples
    of one iteration. Other keywords go to `elastic_runtime.init`. SettingsError for arguments that are refused: those
    that bring a way of distributing, or of saving, of their own.
    """

    _begun = _led = _agreeing = False
    _first_step = 0
    epoch_begun_at = -1
    """The step before which callbacks were called last for the beginning of an epoch. They may have changed weights."""

    def __init__(
        self, *args: Any, global_batch_size: int | None = None, elastic: dict[str, Any] | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.make_elastic(global_batch_size, elastic)

    def make_elastic(self, global_batch_size: int | None = None, elastic: dict[str, Any] | None = None) -> None:
        """Make the job, once Trainer's arguments are there; also of one that was constructed as another class."""
        self.accelerator.backward = self._backward  # what training_step calls
        check_arguments(self.args)
        check_class(self)
        micro = self.args.per_device_train_batch_size
        options: dict[str, Any] = {
            "global_batch_size": global_batch_size or micro * self.args.gradient_accumulation_steps,
            "max_batch_per_gpu": micro,
            "seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
        }
        options |= elastic or {}
        self._global_batch = int(options["global_batch_size"])
        self.job: Job = elastic_runtime.init(**options)
        self._losses = MeanLoss()
        self._weight: int | None = None  # of this iteration's loss
        self.current_gradient_accumulation_steps = 1  # training_step divides by it, which the job does
        self._ignored: list[str] | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """As on a single device; under torchrun, too, where the arguments have found several: ranks are the job's."""
        state = PartialState()
        state.num_processes, state.distributed_type, state.backend = 1, DistributedType.NO, None
        super().create_accelerator_and_postprocess()

    def _backward(self, loss: torch.Tensor) -> None:
        self.job.backward(loss, weight=self._weight)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training data as one worker alone would read it; the job deals it out. By a Trainer that is made elastic
        by inheriting from both, where it has a way of its own.
        """
        inherited = super().get_train_dataloader
        if inherited.__func__ is not Trainer.get_train_dataloader:  # type: ignore[attr-defined]
            return inherited()
        dataset = self.train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            raise SettingsError("ElasticTrainer needs a train_dataset with a length")
        args, workers = self.args, self.args.dataloader_num_workers
        return DataLoader(
            dataset,
            batch_size=args.per_device_train_batch_size,
            sampler=self._get_train_sampler(),
            drop_last=args.dataloader_drop_last,
            num_workers=workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
        )

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:  # noqa: ARG002, FBT001, FBT002
        """As `bf16` and `fp16` ask for it: Trainer leaves it to the model that Accelerate wraps, which is not used."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:  # noqa: FBT001  (Trainer's)
        """Train as Trainer does. SettingsError for `resume_from_checkpoint`: a job resumes by itself."""
        if resume_from_checkpoint:
            raise SettingsError(
                "resume_from_checkpoint is set, but an elastic job resumes at the newest checkpoint in "
                "ELASTIC_CHECKPOINT_DIR by itself; leave it out"
            )
        return super().train(None, *args, **kwargs)

    def _inner_training_loop(
        self, *_: object, ignore_keys_for_eval: list[str] | None = None, **__: object
    ) -> TrainOutput:
        """Trainer's own loop, with the job's steps in place of the loader's."""
        began = time.time()
        self._ignored = ignore_keys_for_eval
        loader = without_sharding(self.get_train_dataloader())
        self._steps_per_epoch = self.job.steps_per_epoch(loader)
        steps = self._steps()
        self.create_optimizer()
        self.create_scheduler(num_training_steps=steps)
        parts: tuple[Any, ...] = (self.model, self.optimizer, loader, self.lr_scheduler)
        parts[0].to(self.args.device)
        scaler = getattr(self.accelerator, "scaler", None)
        model, optimizer, loader, scheduler = self.job.prepare(*parts, scaler=scaler)
        self._make_state(steps)
        self.job.track(trainer=TrackedState(self))
        total = self._train(self._compiled(model), optimizer, scheduler, scaler, loader)
        return self._finish(began, total)

    def _make_state(self, steps: int) -> None:
        stateful: list[Any] = [
            each for each in (*self.callback_handler.callbacks, self.control) if isinstance(each, ExportableState)
        ]
        self.state = TrainerState(
            max_steps=steps,
            num_train_epochs=-(-steps // self._steps_per_epoch),
            train_batch_size=self.args.per_device_train_batch_size,
            stateful_callbacks=stateful,
        )
        self.state.compute_steps(self.args, steps)  # type: ignore[no-untyped-call]

    def _compiled(self, model: Any) -> Any:
        """As `torch_compile` asks for it: Trainer leaves it to the model that Accelerate wraps, which is not used."""
        args = self.args
        if not args.torch_compile:
            return model
        return torch.compile(model, backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)

    def _finish(self, began: float, total: float) -> TrainOutput:
        """As Trainer: trackers receive the metrics before they are closed."""
        trained = self.state.global_step - self._first_step
        metrics = speed_metrics("train", began, num_samples=trained * self._global_batch, num_steps=trained)  # type: ignore[no-untyped-call]
        metrics["train_loss"] = total
        self.log(dict(metrics))
        if self._begun:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return TrainOutput(self.state.global_step, total, metrics)

    def _train(self, model: Any, optimizer: Any, scheduler: Any, scaler: Any, loader: Any) -> float:
        """All steps that are left; returns the mean loss of those that this worker took part in."""
        fresh = True
        for inputs in self.job.steps(self.state.max_steps):
            if fresh:
                self._before_step(loader)
            with self.job.retrying():
                self._weight, fresh = self._counted(inputs), False
                loss = self.training_step(model, inputs, None)
                norm = self._clip(model, optimizer, scaler)
                rate = self._get_learning_rate()
                self._step(optimizer, scheduler, scaler)
                self._losses.note(float(loss), self._weight)
                fresh = self.job.applied
                if fresh:
                    self._after_step(norm, rate)
            if self.control.should_training_stop:
                break
        return self._losses.of_all

    def _clip(self, model: Any, optimizer: Any, scaler: Any) -> torch.Tensor | None:
        """As Trainer, which also reports the norm if it does not clip."""
        if not self.job.applied:
            return None
        if scaler is not None:
            scaler.unscale_(optimizer)
        return self.job.clip_grad_norm_(model.parameters(), self.args.max_grad_norm or math.inf)

    def _step(self, optimizer: Any, scheduler: Any, scaler: Any) -> None:
        """Step optimizer, scaler and scheduler, and call the callbacks where a global step is complete."""
        if self.job.applied:
            self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if self.job.applied:
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        if not isinstance(scheduler, BY_FIGURES):
            scheduler.step()
        optimizer.zero_grad()

    def _before_step(self, loader: Any) -> None:
        """Call Trainer's callbacks at the first iteration of a global step, in Trainer's order."""
        self._note_place()
        handler = self.callback_handler
        if not self._begun:
            self.is_in_train = self._begun = True
            handler.model, handler.optimizer = self.model, self.optimizer
            handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, loader
            self._first_step = self.job.step
            self.control = handler.on_train_begin(self.args, self.state, self.control)
            self._led = self.job.is_leader
            if self.args.eval_on_start and self.job.step == 0:
                self._evaluate(None, self._ignored, skip_scheduler=True)
        self._take_over()
        if self.job.step % self._steps_per_epoch == 0 and self.epoch_begun_at != self.job.step:
            with self.job.changing_state():
                self.control = handler.on_epoch_begin(self.args, self.state, self.control)
                self.epoch_begun_at = self.job.step
        self.control = handler.on_step_begin(self.args, self.state, self.control)

    def _take_over(self) -> None:
        """Create the progress bar of a worker that becomes rank 0 during the training."""
        if self.job.is_leader and not self._led:
            for each in self.callback_handler.callbacks:
                if isinstance(each, ProgressCallback):
                    each.on_train_begin(self.args, self.state, self.control)  # type: ignore[no-untyped-call]
        self._led = self.job.is_leader

    def _note_place(self) -> None:
        """Which worker this one is may change at each step."""
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.job.is_leader
        self.state.global_step = self.job.step
        self.state.epoch = self.job.step / self._steps_per_epoch

    def _after_step(self, norm: torch.Tensor | None, rate: float) -> None:
        """A global step is applied: callbacks, and the log and the evaluation that they ask for, on every worker."""
        self._losses.end_step()
        self._note_place()
        self._take_over()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._steps_per_epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self.state.global_step % self._steps_per_epoch == 0:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        if self.control.should_epoch_stop and not self.control.should_training_stop:
            raise SettingsError(
                "a callback set control.should_epoch_stop, but epochs are whole ones here; use should_training_stop"
            )
        self.job.report(loss=self._losses.newest)
        if self.control.should_log:
            self._log_step(norm, rate)
        best = self.control.should_evaluate and self._evaluate_step()
        if best if self.args.save_strategy == SaveStrategy.BEST else self.control.should_save:
            self._save_step()

    def _evaluate_step(self) -> bool:
        """Whether the model is the best one so far."""
        self._agreeing = True
        try:
            metrics = self._evaluate(None, self._ignored)
        finally:
            self._agreeing = False
        return self._determine_best_metric(metrics=metrics, trial=None)

    def _save_step(self) -> None:
        """Write Trainer's own checkpoint, for use elsewhere: the job resumes from its own checkpoints."""
        if self.is_world_process_zero():
            self._save_checkpoint(self.model, trial=None)  # type: ignore[arg-type]
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As Trainer's, shared out among the workers while they train together. All get rank 0's figures then, so that
        all stop early, or lower the learning rate, at the same step: rounding may differ between devices.
        """
        if not self._agreeing or self.job.world_size == 1:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        with shared_out(self, dataloader) as shared:
            found = super().evaluation_loop(shared, *args, **kwargs)
        figures = self.job.repeat(lambda: self.job.all_gather(found.metrics)[0])
        return found._replace(metrics=figures)

    def is_world_process_zero(self) -> bool:
        """Whether this worker is rank 0; before the training every worker is."""
        try:
            return self.job.is_leader
        except (AttributeError, LoopError):  # during Trainer's construction, or before rank 0 is determined
            return True

    def is_local_process_zero(self) -> bool:
        """As `is_world_process_zero`: which workers share a machine is not visible here."""
        return self.is_world_process_zero()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002
        """As Trainer's: by rank 0."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def _log_step(self, norm: torch.Tensor | None, rate: float) -> None:
        logs = {"loss": self._losses.since_the_last_log(), "learning_rate": rate}
        if norm is not None:
            logs["grad_norm"] = float(norm)
        self.log(logs)

    def _steps(self) -> int:
        """Optimizer steps in all: `max_steps`, or those of the epochs, of which the last may be a part."""
        of_epochs = math.ceil(self.args.num_train_epochs * self._steps_per_epoch)
        return int(self.args.max_steps if self.args.max_steps > 0 else of_epochs)

    def _counted(self, inputs: dict[str, Any]) -> int | None:
        shifted = bool(getattr(self, "_loss_shifts_labels", False)) or is_causal(self.model)
        return counted_tokens(inputs, shifted=shifted)
