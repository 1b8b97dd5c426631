"""Where Trainer's loops and callbacks are, as a part of the job's state: to joining workers, and in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from elastic_runtime.integrations.lightning.results import StepResults


class TrackedState:
    """Trainer's, for `job.track`."""

    def __init__(self, trainer: Trainer, results: StepResults) -> None:
        self._trainer, self._results = trainer, results
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return counters, what the epoch has logged, and the callbacks' own state."""
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        connector: Any = trainer._logger_connector  # noqa: SLF001
        figures = connector._callback_metrics  # noqa: SLF001
        return {
            "counters": {name: _settled(name, counter.state_dict()) for name, counter in self._counters().items()},
            "stepped": epoch_loop._batches_that_stepped,  # noqa: SLF001
            "should_stop": trainer.should_stop,
            "logged": self._results.captured(),
            "figures": {name: torch.as_tensor(value).detach().clone() for name, value in figures.items()},
            "callbacks": {each.state_key: state for each in self._callbacks() if (state := each.state_dict())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where that state was."""
        self._loaded = state
        trainer = self._trainer
        for name, counter in self._counters().items():
            counter.load_state_dict(state["counters"][name])
        trainer.fit_loop.epoch_loop._batches_that_stepped = state["stepped"]  # noqa: SLF001
        trainer.should_stop = state["should_stop"]
        self._results.load(state["logged"])
        connector: Any = trainer._logger_connector  # noqa: SLF001
        connector._callback_metrics = dict(state["figures"])  # noqa: SLF001
        for each in self._callbacks():
            if each.state_key in state["callbacks"]:
                each.load_state_dict(state["callbacks"][each.state_key])

    def begin_iteration(self) -> None:
        """Forget which state was loaded."""
        self._loaded = None

    def end_iteration(self) -> None:
        """Load again what was received within an iteration, whose end has moved the counters since."""
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def _counters(self) -> dict[str, Any]:
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        return {
            "epoch": fit.epoch_progress,
            "batch": epoch.batch_progress,
            "scheduler": epoch.scheduler_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
            "validation": epoch.val_loop.batch_progress,
        }

    def _callbacks(self) -> list[Any]:
        return list(self._trainer.callbacks)  # type: ignore[attr-defined]


def _settled(name: str, counts: dict[str, Any]) -> dict[str, Any]:
    """Return the counts without a batch that is begun: a signal in a step saves the state of the step's beginning."""
    if name == "epoch":
        return counts
    if "completed" in counts:
        return dict.fromkeys(counts, counts["completed"])
    return {each: _settled(each, value) if isinstance(value, dict) else value for each, value in counts.items()}
