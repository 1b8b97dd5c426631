"""The state of Trainer and its callbacks from step to step, as a part of the job's state.

Early stopping counts evaluations and compares with the best one. A worker that joins, or resumes from a checkpoint,
would otherwise count from zero and stop later than the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState, TrainerControl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_runtime.integrations.transformers.trainer import ElasticTrainer

REMEMBERED = ("best_metric", "best_global_step", "best_model_checkpoint", "log_history")


class TrackedState:
    """Trainer's state for `job.track`, with that of callbacks that are an ExportableState."""

    values_of_each_worker = ("log_history",)
    """Of `state`: losses of this worker's samples. A joiner takes over rank 0's; workers may differ in them."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the newest values."""
        state = self._trainer.state
        return {
            "state": {name: getattr(state, name, None) for name in REMEMBERED},
            "callbacks": [each.state()["attributes"] for each in self._callbacks()],
            "epoch_begun_at": self._trainer.epoch_begun_at,
        }

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Another worker's, or a checkpoint's; of the same callbacks in the same order."""
        for name, value in found["state"].items():
            setattr(self._trainer.state, name, value)
        self._trainer.epoch_begun_at = found.get("epoch_begun_at", -1)  # not in checkpoints of version 0.2
        for callback, attributes in zip(self._callbacks(), found["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def _callbacks(self) -> Iterator[Any]:
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState) and not isinstance(each, TrainerControl):
                yield each
