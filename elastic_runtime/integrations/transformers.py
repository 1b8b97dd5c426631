"""Hugging Face's Trainer, elastic: `ElasticTrainer` in place of `Trainer`.

    from elastic_runtime.integrations.transformers import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=args, train_dataset=data, global_batch_size=256)
    trainer.train()

Trainer keeps its arguments, losses, optimizers, schedules, callbacks, logging and evaluation; the loop is elastic: the
global batch stays the same at every size, each sample is seen once per epoch, and checkpoints are the job's
(`ELASTIC_CHECKPOINT_DIR`), so `save_strategy` has nothing to do. Accelerate is used by Trainer as on a single device.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState
from transformers.trainer_utils import TrainOutput

import elastic_runtime
from elastic_runtime.errors import SettingsError

if TYPE_CHECKING:
    from elastic_runtime.job import Job

IGNORED_LABEL = -100


class ElasticTrainer(Trainer):
    """A Trainer whose training may grow, shrink, lose workers and resume.

    `global_batch_size` (samples of one optimizer step, over all workers) is by default that of the arguments:
    `per_device_train_batch_size` times `gradient_accumulation_steps`; `per_device_train_batch_size` is the most samples
    of one iteration. Other keywords go to `elastic_runtime.init`. SettingsError for arguments that bring a way of
    distributing of their own (DeepSpeed, FSDP, several GPUs in one process).
    """

    def __init__(
        self, *args: Any, global_batch_size: int | None = None, elastic: dict[str, Any] | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self._check_arguments()
        micro = self.args.per_device_train_batch_size
        self._global_batch = global_batch_size or micro * self.args.gradient_accumulation_steps
        self.job: Job = elastic_runtime.init(
            global_batch_size=self._global_batch,
            max_batch_per_gpu=micro,
            seed=self.args.seed,
            **(elastic or {}),
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training data as one worker alone would read it; the job deals it out."""
        if self.train_dataset is None:
            raise SettingsError("ElasticTrainer needs a train_dataset to train")
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            drop_last=self.args.dataloader_drop_last,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
        )

    def _inner_training_loop(self, *_: object, **__: object) -> TrainOutput:
        """Trainer's own loop, with the job's steps in place of the loader's."""
        began = time.time()
        loader = self.get_train_dataloader()
        self.create_optimizer()
        self._steps_per_epoch = -(-len(loader.dataset) // self._global_batch)  # type: ignore[arg-type]
        steps = self._steps()
        self.create_scheduler(num_training_steps=steps)
        parts: tuple[Any, ...] = (self.model, self.optimizer, loader, self.lr_scheduler)
        parts[0].to(self.args.device)
        model, optimizer, loader, scheduler = self.job.prepare(*parts)
        self._begin(steps, loader)
        total = self._train(model, optimizer, scheduler, steps)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        metrics = {"train_runtime": round(time.time() - began, 3), "train_loss": total}
        self.log(dict(metrics))
        return TrainOutput(self.state.global_step, total, metrics)

    def _train(self, model: Any, optimizer: Any, scheduler: Any, steps: int) -> float:
        """All steps that are left; returns the mean loss of this worker's iterations."""
        summed, count = 0.0, 0
        for inputs in self.job.steps(steps):
            model.train()
            prepared = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, prepared)
            self.job.backward(loss, weight=counted_tokens(prepared))
            if self.job.applied and self.args.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            summed, count = summed + float(loss.detach()), count + 1
            if self.job.applied:
                self._after_step(float(loss.detach()))
            if self.control.should_training_stop:
                break
        return summed / max(1, count)

    def _begin(self, steps: int, loader: Any) -> None:
        self.is_in_train = True
        self.state = TrainerState(max_steps=steps, num_train_epochs=-(-steps // self._steps_per_epoch))
        self.state.compute_steps(self.args, steps)  # type: ignore[no-untyped-call]
        self.callback_handler.model, self.callback_handler.optimizer = self.model, self.optimizer
        self.callback_handler.lr_scheduler, self.callback_handler.train_dataloader = self.lr_scheduler, loader
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)

    def _after_step(self, loss: float) -> None:
        """A global step is applied: Trainer's callbacks, and its log on the leader."""
        self.state.global_step = self.job.step
        self.state.epoch = self.job.step / self._steps_per_epoch
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.job.is_leader
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self.job.report(loss=loss)
        if self.control.should_log:
            self.control.should_log = False
            if self.job.is_leader:
                self.log({"loss": round(loss, 4), "learning_rate": self._get_learning_rate()})

    def _steps(self) -> int:
        """Optimizer steps in all: `max_steps`, or those of the epochs."""
        of_epochs = self.args.num_train_epochs * self._steps_per_epoch
        return int(self.args.max_steps if self.args.max_steps > 0 else of_epochs)

    def _check_arguments(self) -> None:
        for name in ("deepspeed", "fsdp"):
            if getattr(self.args, name, None):
                raise SettingsError(f"args.{name} is set, but ElasticTrainer distributes by itself; leave it out")
        if self.args.n_gpu > 1:
            raise SettingsError(
                f"this process sees {self.args.n_gpu} GPUs, but a worker of an elastic job has one; let the cluster "
                "choose it, or set CUDA_VISIBLE_DEVICES"
            )


def counted_tokens(inputs: dict[str, Any]) -> int | None:
    """Tokens that the loss is a mean over, where labels are per token; None where each sample counts the same."""
    labels = inputs.get("labels")
    if labels is None or labels.dim() < 2:
        return None
    return max(1, int((labels[..., 1:] != IGNORED_LABEL).sum()))
