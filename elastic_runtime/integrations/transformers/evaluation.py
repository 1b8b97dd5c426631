"""Trainer's evaluation, shared out: each worker computes some of the batches, and all see what was found for each.

Trainer's own loop runs on every worker, over all batches in one order, as on a single device. Where it asks for the
prediction of a batch, a round of as many batches as there are workers is computed, each by one of them, and exchanged.
So figures are those of one worker at every size, and where a worker is lost only that round is computed again.

Accelerate's way, a part of the samples for each worker, was rejected: it fills the last batches up with samples of the
first ones, which count in the loss; and all would have to start again after a loss, with metrics that have added up
what came before it (`batch_eval_metrics`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, IterableDataset

from elastic_runtime.data.dataloader import like
from elastic_runtime.data.sources import Source
from elastic_runtime.integrations.transformers.loaders import without_sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_runtime.integrations.transformers.trainer import ElasticTrainer
    from elastic_runtime.loop.job import Job


@contextmanager
def shared_out(trainer: ElasticTrainer, loader: Any) -> Iterator[Any]:
    """The loader to give to Trainer's evaluation loop, while `trainer.prediction_step` computes this worker's share.

    The given loader, which each worker evaluates by itself, if its samples cannot be determined in advance.
    """
    plain = without_sharding(loader)
    if not isinstance(plain, DataLoader) or isinstance(plain.dataset, IterableDataset) or plain.batch_sampler is None:
        yield loader
        return
    predict, preprocess = trainer.prediction_step, cast("Any", trainer.preprocess_logits_for_metrics)

    def compute(model: Any, inputs: Any, *how: Any, **named: Any) -> Any:
        """Less what would be exchanged for nothing: the logits as they are, of which metrics see the preprocessed."""
        loss, logits, labels = predict(model, inputs, *how, **named)
        if preprocess is not None and logits is not None:
            logits = preprocess(logits, labels)
        return loss, logits, labels

    def prediction_step(model: Any, batch: Any, *how: Any, **named: Any) -> Any:
        if not isinstance(batch, _Batch):  # a loop of the script's own, over something else
            return compute(model, batch, *how, **named)
        return shared.prediction(batch, lambda inputs: compute(model, inputs, *how, **named))

    shared = SharedLoader(
        plain,
        trainer.job,
        device=trainer.args.device,
        seed=trainer.args.seed,
        with_inputs="inputs" in trainer.args.include_for_metrics,
    )
    own: dict[str, Any] = {"prediction_step": prediction_step, "preprocess_logits_for_metrics": None}
    before = {name: vars(trainer)[name] for name in own if name in vars(trainer)}
    vars(trainer).update(own)
    try:
        yield shared
    finally:
        for name in own:
            del vars(trainer)[name]
        vars(trainer).update(before)


class _Batch(dict[str, Any]):
    """What the loop holds of a batch that any worker computes: its number, and its inputs if metrics are given them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class SharedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types
    """All batches of a loader, in one order on all workers, whatever its sampler draws.

    `with_inputs`: each worker is given the inputs of all of them, too; else it reads those that it computes.
    """

    def __init__(
        self, loader: DataLoader[Any], job: Job, *, device: torch.device, seed: int, with_inputs: bool
    ) -> None:
        self.loader, self.dataset, self.gradient_state = loader, loader.dataset, GradientState()
        self._job, self._device, self._with_inputs = job, device, with_inputs
        source = Source(loader, seed)
        order = source.epoch(0)
        self._batches = [list(order[at : at + size]) for at, size in source.cuts(0, 0, loader.batch_size or 1)]
        self._found: dict[int, tuple[Any, Any]] = {}
        self._reading: Iterator[Any] = iter(())
        self._reads = (-1, 0)  # the number of the next batch, and the increment

    def __len__(self) -> int:
        """Batches of all workers."""
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[_Batch]:
        self.begin()
        self.remainder = len(self._batches[-1]) if self._batches else -1
        try:
            for number in range(len(self)):
                self.end_of_dataloader = number == len(self) - 1
                yield _Batch(number)
        finally:
            self.end()

    def prediction(self, batch: _Batch, compute: Callable[[Any], Any]) -> Any:
        """Return the result of `compute` for the batch, from this worker or the one that computed it."""
        if batch.number not in self._found:
            found = self._job.repeat(lambda: self._round(batch.number, compute))
            self._found = {number: (inputs, answer) for number, inputs, answer in found}
        inputs, answer = send_to_device(self._found.pop(batch.number), self._device)
        batch.update(inputs or {})
        return answer

    def _round(self, first: int, compute: Callable[[Any], Any]) -> list[tuple[int, Any, Any]]:
        """(number, inputs, what was found) of the next batches, one of each worker."""
        number, mine = first + self._job.rank, []
        if number < len(self):
            inputs = self._read(number)
            mine = [(number, inputs if self._with_inputs else None, compute(inputs))]
        return [found for each in self._job.all_gather(mine) for found in each]

    def _read(self, number: int) -> Any:
        """Return a batch's inputs; its loader continues while the size is unchanged and no batch is repeated."""
        size = self._job.world_size
        if self._reads != (number, size):
            mine: Any = self._batches[number::size]
            self._reading = iter(like(self.loader, self.dataset, mine, self.loader.collate_fn, torch.Generator()))
        self._reads = (number + size, size)
        return next(self._reading)
