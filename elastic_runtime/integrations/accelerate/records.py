"""An Accelerator that saves where an elastic training stands, and has its trackers where rank 0 is."""

from __future__ import annotations

import json
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.integrations.accelerate.process_state import JobStateAccelerator
from elastic_runtime.plan.position import Position

POSITION_FILE = "elastic_position.json"


class RecordingAccelerator(JobStateAccelerator):
    """The trackers of an Accelerator: rank 0 is determined once the loop has begun, and may change."""

    ready = began = False  # the job has got everything; the loop has begun
    epoch, epoch_over = -1, False  # that the loop is in; whether its loader's loop is over
    loaded_position: Position | None = None  # where the training is to begin
    _wanted_trackers: tuple[Any, ...] | None = None
    _unlogged: tuple[tuple[Any, ...], ...] = ()  # values for the trackers once they are opened

    def keep_position(self) -> None:
        """Add the position to the state that `save_state` saves."""
        self.register_save_state_pre_hook(self._save_position)
        self.register_load_state_pre_hook(self._load_position)

    def follow(self, *_: object) -> None:
        """Follow the new rank and size; rank 0 opens the trackers."""
        super().follow()
        if self._wanted_trackers is not None and self.is_main_process:
            self._open_trackers()

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator's, by rank 0, with the position in the training; after `optimizer.step()`.

        The job's own checkpoints (ELASTIC_CHECKPOINT_DIR) need no call.
        """
        self._check_place("save_state")
        if self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration = self._next_iteration()
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerator's. Before the loop, training continues at that position unless a checkpoint is further."""
        self._check_place("load_state")
        super().load_state(*args, **kwargs)

    def _next_iteration(self) -> int:
        """Return rank 0's count: joined workers and resumed trainings have not counted earlier saves."""
        counted = int(self.save_iteration)
        for folder in Path(self.project_dir, "checkpoints").glob("checkpoint_*"):
            counted = max(counted, int(folder.name.rpartition("_")[2]) + 1)

        def of_rank_0() -> int:
            return int(self.job.all_reduce(torch.tensor(counted if self.is_main_process else 0)))

        return self._survived("save_state", of_rank_0, counted)

    def _save_position(self, _models: object, _weights: object, folder: str) -> None:
        """After the loop over the loader the epoch is over: what comes after it was done, or is left out."""
        if self.ready and self.is_main_process:
            position = self.job.position
            if self.epoch_over and position.epoch == self.epoch:
                position = position.after_epoch()
            Path(folder, POSITION_FILE).write_text(json.dumps(asdict(position)), encoding="utf-8")

    def _load_position(self, _models: object, folder: str) -> None:
        file = Path(folder, POSITION_FILE)
        if file.exists() and not self.began:
            self.loaded_position = Position(**json.loads(file.read_text(encoding="utf-8")))

    def skip_first_batches(self, *_: Any, **__: Any) -> Any:
        """Raise UsageError: the training loader has its position in the job's state."""
        raise UsageError(
            "the training loader continues at the training's position, also after load_state; omit skip_first_batches"
        )

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Initialize the trackers on rank 0, or on a worker that becomes rank 0."""
        self._wanted_trackers = (project_name, config, init_kwargs)
        try:
            leads = self.job.is_leader
        except LoopError:  # rank 0 is undetermined before the loop
            return
        if leads:
            self._open_trackers()

    def _open_trackers(self) -> None:
        assert self._wanted_trackers is not None
        wanted, self._wanted_trackers = self._wanted_trackers, None
        super().init_trackers(*wanted)
        for values in self._unlogged:
            super().log(*values)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # noqa: FBT001, FBT002  (Accelerate's own signature)
        """As Accelerator's on rank 0, elsewhere one that does nothing. LoopError while rank 0 is undetermined."""
        if self._wanted_trackers is not None and not self.began:
            raise LoopError(
                "accelerator.get_tracker comes after the loop has begun: before it, nobody is rank 0, and who is may "
                "change; ask for the tracker where you use it"
            )
        return super().get_tracker(name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log to rank 0's trackers, as Accelerator does; numbers also to `job.report`."""
        if self._wanted_trackers is not None and not self.began:
            self._unlogged += ((values, step, log_kwargs or {}),)
        super().log(values, step, log_kwargs or {})
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, Real)}
        if self.began and numbers:
            self.job.report(**numbers)

    def end_training(self) -> None:
        """Finish the trackers. The process group is the job's."""
        for tracker in self.trackers:
            tracker.finish()
