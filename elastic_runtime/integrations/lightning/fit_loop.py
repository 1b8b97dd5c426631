"""Trainer's fit loop over the job's epochs."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from torch.utils.data import DataLoader

from elastic_runtime.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_runtime.integrations.lightning.strategy import ElasticStrategy


class StepLoader:
    """What Trainer iterates over: the first micro-batch of each global step. The strategy gets the others."""

    def __init__(self, strategy: ElasticStrategy, loader: Any) -> None:
        self._strategy, self._loader = strategy, loader
        self.sampler, self.dataset, self.batch_size = loader.sampler, loader.dataset, loader.batch_size
        self._steps: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the global steps of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._steps = self._epoch()
        return self._steps

    def _epoch(self) -> Iterator[Any]:
        strategy = self._strategy
        for _step, micro_batches in strategy.job.global_steps(self._loader):
            strategy.begin_step(iter(micro_batches))
            yield strategy.first_micro_batch()
            strategy.tracked.end_iteration()

    def end_epoch(self) -> None:
        """Let the last step of the epoch count, before what follows the epoch."""
        if self._steps is not None:
            for _ in self._steps:
                raise RunError("Trainer left an epoch that has more steps; an elastic training ends with whole epochs")
            self._steps = None


class ElasticFitLoop(_FitLoop):
    """Lightning's loop over the epochs and batches of the job. The strategy sets it as the class of Trainer's own."""

    strategy: ElasticStrategy
    _epochs: Iterator[int] | None = None
    _entered = False  # the job's epoch, for Trainer's next one

    def setup_data(self) -> None:
        """Begin the job's training where the data are first there: where it stands, counters and callbacks do, too."""
        super().setup_data()
        if self._epochs is not None or self._combined_loader is None or self.max_batches == 0:
            return
        if isinstance(self._data_fetcher, _DataLoaderIterDataFetcher):
            raise UsageError("training_step(dataloader_iter) does not go together with ElasticStrategy; take a batch")
        self._leave_signals_to_the_job()
        self._epochs = self.strategy.job.epochs(self._last_epoch())
        self._enter_next()
        self.strategy.follow_ranks()

    def _last_epoch(self) -> int:
        if self.max_epochs is not None and self.max_epochs >= 0:
            return self.max_epochs
        return -(-self.max_steps // int(self.max_batches))

    def _leave_signals_to_the_job(self) -> None:
        """Of Trainer's handler and the job's own, the first would end the training before its state is saved."""
        connector = self.trainer._signal_connector  # noqa: SLF001
        before = connector._original_handlers.get(signal.SIGTERM)  # noqa: SLF001
        if before is not None:
            connector._register_signal(signal.SIGTERM, before)  # noqa: SLF001

    def _enter_next(self) -> None:
        assert self._epochs is not None
        self._entered = next(self._epochs, None) is not None
        if not self._entered:
            self.trainer.should_stop = True

    def on_advance_start(self) -> None:
        """Enter the job's next epoch with Trainer's."""
        if not self._entered:
            self._enter_next()
        self._entered = False
        super().on_advance_start()

    def on_advance_end(self) -> None:
        """Leave the loader before what follows an epoch, which a worker that resumes there runs again."""
        if not self._stops_within():
            self.strategy.loader.end_epoch()
        self.strategy.results.enter_carried()
        super().on_advance_end()

    def _stops_within(self) -> bool:
        """Whether Trainer stops before the epoch is over."""
        return not self.epoch_loop._num_ready_batches_reached()  # noqa: SLF001

    def on_run_end(self) -> None:
        """End the job's training after Trainer's."""
        super().on_run_end()
        assert self._epochs is not None
        if self.strategy.job.position.epoch + 1 < self._last_epoch() or self._stops_within():
            self.strategy.job.close()
            return
        for _ in self._epochs:
            raise RunError("the job has more epochs than Trainer")


def one_loader(loader: object) -> DataLoader[Any]:
    """Return the training's loader. UsageError for other objects, or one without a length."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"the training's loader is a {type(loader).__name__}; ElasticStrategy needs one torch DataLoader"
        )
    try:
        len(loader)
    except TypeError as error:
        raise UsageError(f"the training's loader has no length ({error}), which ElasticStrategy needs") from error
    return loader
