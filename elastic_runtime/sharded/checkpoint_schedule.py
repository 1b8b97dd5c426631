"""When checkpoints are written: at intervals beside the training, and once more when the whole job has to exit.

Rank 0 writes a replicated state; of a sharded one each worker writes its parts, after rank 0 has decided in the sum at
a step's end. The loop stands still only while the state is copied; a thread writes the copy. The copy's memory is also
allocated by a thread, before the first copy is due, and kept.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import CheckpointError, SettingsError
from elastic_runtime.sharded import files
from elastic_runtime.state import checkpoint
from elastic_runtime.state.layouts import Copies, describe
from elastic_runtime.state.packing import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from elastic_runtime.plan.position import Position
    from elastic_runtime.process.preemption import StableState
    from elastic_runtime.process.reporting import Reporter
    from elastic_runtime.reduction.step_modes import Mode
    from elastic_runtime.sharded.files import Saved
    from elastic_runtime.sharded.sharding import Sharding
    from elastic_runtime.sharded.state import Parts
    from elastic_runtime.state.random_streams import RandomStreams
    from elastic_runtime.state.training_state import TrainingState

_log = logging.getLogger("elastic_runtime")


class BackgroundWriter:
    """One worker's checkpoints in `directory` ("": none): a thread writes them, every `every_s`."""

    def __init__(self, directory: str, reporter: Reporter, *, every_s: float, keep: int) -> None:
        self.directory = directory
        self._reporter, self._every_s, self._keep = reporter, every_s, keep
        self._saved_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._copies = Copies()
        self._preparing: threading.Thread | None = None

    def due(self) -> bool:
        """Whether the time for another one has come, and the last one is written."""
        writing = self._thread is not None and self._thread.is_alive()
        return bool(self.directory) and not writing and time.monotonic() - self._saved_at >= self._every_s

    def settle(self) -> None:
        """Return when nothing is being written any more, and the memory for a copy is there."""
        for thread in (self._preparing, self._thread):
            if thread is not None:
                thread.join()

    def _prepare(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Allocate the memory of the copy in a thread, once, before the first copy is due."""
        if self.directory and self._preparing is None:
            self._preparing = _in_thread(partial(self._copies.make_room, describe(tensors())))

    def _start(self, began: float, write: Callable[[float], None]) -> None:
        """The state is copied, since `began`: `write(stall_ms)` in a thread."""
        self._saved_at = time.monotonic()
        stall_ms = (self._saved_at - began) * 1e3
        self._thread = _in_thread(partial(write, stall_ms))

    def _write_and_report(self, step: int, stall_ms: float, save: Callable[[], Path]) -> bool:
        """Write one, and report it; whether it is durable. One that cannot be written is warned of."""
        began, captured_at = time.monotonic(), time.time()
        try:
            path = save()
        except CheckpointError as error:
            _log.warning("%s; training continues without it", error)
            self._reporter.line("checkpoint_failed", step=step, why=str(error))
            return False
        took_ms = (time.monotonic() - began) * 1e3
        self._reporter.checkpoint_at = captured_at
        self._reporter.line("checkpoint", step=step, path=str(path), stall_ms=stall_ms, write_ms=took_ms)
        return True

    def _warn_of_loss(self, step: int) -> bool:
        """Return whether there is no folder for checkpoints; if so, log how many steps are lost."""
        if not self.directory:
            _log.warning("ELASTIC_CHECKPOINT_DIR is not set: the %d steps trained so far are lost", step)
        return not self.directory


class ReplicatedCheckpoints(BackgroundWriter):
    """Writes the checkpoints of one worker into `directory` ("": none), at most `keep` of them, every `every_s`."""

    def __init__(self, directory: str, reporter: Reporter, *, every_s: float, keep: int) -> None:
        if every_s <= 0 or keep < 1:
            raise SettingsError(
                f"checkpoint_every_s is {every_s:g} and keep_checkpoints is {keep}; the first must be above 0 and the "
                "second at least 1"
            )
        super().__init__(directory, reporter, every_s=every_s, keep=keep)
        self._written: Position | None = None  # the newest one that is durable
        self._lock = threading.Lock()
        if directory:
            _check_writable(directory)

    def load(self) -> tuple[int, Any] | None:
        """(step, state) of the newest whole checkpoint."""
        return files.load_newest(self.directory) if self.directory else None

    def save_if_due(self, position: Position, capture: Callable[[], dict[str, Any]]) -> None:
        """Copy the state and have it written, if the time has come and the last one is written."""
        with self._lock:
            self._prepare(lambda: pack(capture())[1])
        if self.due():
            self.save_soon(position, capture, _at_once)

    def save_soon(
        self,
        position: Position,
        capture: Callable[[], dict[str, Any]],
        standing_still: Callable[[Callable[[], None]], bool],
    ) -> bool:
        """Copy the state while it stands still, and have it written; False where it does not stand still.

        Without a directory there is nothing to do.
        """
        if not self.directory:
            return True
        with self._lock:
            self.settle()
            began, copied = time.monotonic(), []
            if not standing_still(lambda: copied.append(self._copied(capture()))):
                return False
            self._start(began, partial(self._write, position, copied[0]))
            return True

    def save_now(self, position: Position, capture: Callable[[], dict[str, Any]]) -> None:
        """Write the state before returning. A place that cannot be written to is warned of: the job must go."""
        if self._warn_of_loss(position.step):
            return
        with self._lock:
            self.settle()
            if self._written != position:  # an epoch's end and the next one's beginning are one step
                self._write(position, capture(), 0.0)

    def _copied(self, state: dict[str, Any]) -> Any:
        skeleton, tensors = pack(state)
        return unpack(skeleton, self._copies.take(tensors))

    def _write(self, position: Position, state: object, stall_ms: float) -> None:
        save = partial(checkpoint.save, self.directory, position.step, state, keep=self._keep)
        if self._write_and_report(position.step, stall_ms, save):
            self._written = position


class ShardedCheckpoints(BackgroundWriter):
    """Writes one rank's parts into `directory` ("": none); rank 0 leaves `keep` checkpoints there."""

    def prepare(self, capture: Callable[[], Parts]) -> None:
        """Allocate the memory of the copy in a thread, once, before the first copy is due."""
        self._prepare(lambda: _tensors(capture()))

    def save_soon(self, saved: Saved, rank: int, capture: Callable[[], Parts]) -> None:
        """Copy the parts and have them written."""
        self.settle()
        began = time.monotonic()
        parts = capture()
        copied, shards = self._copies.take(_tensors(parts)), len(parts.shards)
        parts = replace(parts, shards=copied[:shards], replicated=copied[shards:])
        self._start(began, partial(self._write, saved, rank, parts))

    def save_now(self, saved: Saved, rank: int, capture: Callable[[], Parts]) -> None:
        """Write the parts before returning."""
        if self._warn_of_loss(saved.step):
            return
        self.settle()
        self._write(saved, rank, capture(), 0.0)

    def note_restored(self, step: int) -> None:
        """Record that the training continues from a checkpoint of this step."""
        self._saved_at = time.monotonic()
        self._reporter.line("restored", step=step)

    def _write(self, saved: Saved, rank: int, parts: Parts, stall_ms: float) -> None:
        def save() -> Path:
            path = files.write_part(self.directory, saved, rank, parts)
            if rank == 0:
                files.prune(self.directory, self._keep, saved.step)
            return path

        self._write_and_report(saved.step, stall_ms, save)


class Checkpoints:
    """The checkpoints of a training. `sharding`: of its state, if it is sharded. `leader`: this worker is rank 0."""

    sharding: Sharding | None = None

    def __init__(self, replicated: ReplicatedCheckpoints, streams: RandomStreams, reporter: Reporter) -> None:
        self._replicated, self._streams, self._reporter = replicated, streams, reporter

    def load(self, state: TrainingState) -> bool:
        """Load the newest complete checkpoint; return whether there is one."""
        found = self._replicated.load()
        if found is None:
            return False
        state.load(found[1])
        self._streams.load(found[1]["streams"])
        self._reporter.line("restored", step=found[0])
        return True

    def if_due(self, state: TrainingState, *, leader: bool) -> None:
        """Between two steps: start to save a checkpoint if one is due."""
        if self.sharding:
            self.sharding.saves.save_if_agreed()
        elif leader:
            self._replicated.save_if_due(state.position, partial(self._capture, state))

    def now(self, state: TrainingState) -> None:
        """Save before returning, unless a resume would leave out a part of an iteration, or run code again that has
        changed parameters or moments.
        """
        if self.sharding:
            self.sharding.saves.save_now()
        elif _is_intact(state):
            self._replicated.save_now(state.position, partial(self._capture, state))
        else:
            _log.warning(_IN_ITERATION if state.in_iteration else _CHANGED_AFTER_LOOP)

    def in_time(self, state: TrainingState, mode: Mode, stable_state: StableState, *, leader: bool) -> bool:
        """From another thread: rank 0 saves the state of the beginning of a step that takes long. Whether that is all.

        With sharded state all workers do, and stay ready to do so in the next step, which others may have reached.
        """
        if self.sharding and self.sharding.checkpoints.directory:
            if _is_intact(state):
                self.sharding.saves.save_in_time(lambda now: _rewound(state, mode.rewound(now)), stable_state.use)
            return False
        if self.sharding or not leader or not _is_intact(state):
            return True

        def use(copy: Callable[[], None]) -> bool:
            return stable_state.use(copy) and _is_intact(state)  # the script may have changed it meanwhile

        return self._replicated.save_soon(state.position, lambda: mode.rewound(self._capture(state)), use)

    def settle(self) -> None:
        """Return when nothing is being written any more."""
        self._replicated.settle()
        if self.sharding:
            self.sharding.checkpoints.settle()

    def _capture(self, state: TrainingState) -> dict[str, Any]:
        return _rewound(state, {**state.capture(), "streams": self._streams.capture()})


_IN_ITERATION = (
    "an iteration was interrupted after its step, in job.repeat or job.mean: its state is not saved, and the steps "
    "since the last checkpoint are trained again"
)
_CHANGED_AFTER_LOOP = (
    "the code after the loader's loop was interrupted, and has changed parameters or optimizer state: they are not "
    "saved, and the steps since the last checkpoint are trained again"
)


def _is_intact(state: TrainingState) -> bool:
    """Return whether the state, or that of the end of the loader's loop, is the one to continue from."""
    return not state.in_iteration and (state.between_loops is None or state.between_loops.is_intact())


def _rewound(state: TrainingState, captured: dict[str, Any]) -> dict[str, Any]:
    """Return a captured state, while the code after the loader's loop runs that of the loop's end."""
    return captured if state.between_loops is None else state.between_loops.rewound(captured)


def _tensors(parts: Parts) -> list[torch.Tensor]:
    return [*parts.shards, *parts.replicated]


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="elastic-checkpoint", daemon=True)
    thread.start()
    return thread


def _at_once(copy: Callable[[], None]) -> bool:
    copy()
    return True


def _check_writable(directory: str) -> None:
    """CheckpointError at the start is better than a loss at the end."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"ELASTIC_CHECKPOINT_DIR {directory!r} cannot be made: {error}") from error
    try:
        tempfile.TemporaryFile(dir=directory).close()  # os.access returns True for root on a read-only file system
    except OSError as error:
        raise CheckpointError(
            f"ELASTIC_CHECKPOINT_DIR {directory!r} cannot be written to ({error.strerror}); mount it read-write, or "
            "unset it"
        ) from error
