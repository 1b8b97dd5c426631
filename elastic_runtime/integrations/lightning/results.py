"""What a training step logs: means over the step's whole global batch, the same on every worker.

Lightning's own collection takes each value as it is logged, in this worker's share of the batch. Here they are kept
until the step is applied, and then exchanged in one round. So a monitored figure is that of one worker at every size,
and nothing of a repeated step is counted twice.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

from elastic_runtime.errors import UsageError

if TYPE_CHECKING:
    from elastic_runtime.loop.job import Job

Logged = tuple[torch.Tensor, int]
"""A value, and the samples that it is a mean over."""


class StepResults(_ResultCollection):
    """Lightning's collection of a training epoch."""

    def __init__(self, job: Job) -> None:
        super().__init__(training=True)
        self._job = job
        self._logged: dict[str, list[Logged]] | None = None  # of the step; None: outside of one
        self._carried: dict[str, dict[str, Any]] = {}  # of another worker, or of a checkpoint, not logged here yet
        self._entered: set[str] = set()  # of these, what was not logged here before its epoch ended

    def begin_micro_batch(self, batch: Any, *, first: bool) -> None:
        """A training step follows; `first`: of its global step, or of its repetition."""
        self.batch, self.batch_size = batch, None
        if first or self._logged is None:
            self._logged = {}

    def end_step(self) -> None:
        """Enter the values of the step that was applied."""
        logged, self._logged = self._logged or {}, None
        if not self._job.applied:  # others have applied it: their figures come with their state
            return
        everyone = [logged]
        if self._job.world_size > 1:
            everyone = self._job.repeat(lambda: self._job.all_gather(logged))
        for key in dict.fromkeys(key for each in everyone for key in each):
            found = [one for each in everyone for one in each.get(key, [])]
            if key in self and found:
                super().update_metrics(key, *self._merged(key, found))

    def _merged(self, key: str, found: list[Logged]) -> Logged:
        samples = sum(number for _, number in found)
        if len(found) == 1:
            return found[0]
        values = torch.stack([value.to(found[0][0].device) for value, _ in found])
        meta = self[key].meta
        if meta.is_mean_reduction:
            weights = torch.tensor([number for _, number in found], device=values.device)
            return (values * weights).sum() / samples, samples
        if meta.is_sum_reduction:
            return values.sum(), samples
        return (values.max() if meta.is_max_reduction else values.min()), samples

    def _extract_batch_size(self, value: _ResultMetric, batch_size: int | None, meta: _Metadata) -> int:
        """Return the samples of the micro-batch, which Lightning guesses from the first tensor of a batch."""
        if batch_size is not None or self._logged is None:
            return super()._extract_batch_size(value, batch_size, meta)
        return self._job.samples

    def log(self, fx: str, name: str, *arguments: Any, **options: Any) -> None:
        """Log as Lightning does, which compares how a name was logged before: not with what was carried here."""
        key = f"{fx}.{name}"
        if key in self._entered:
            self._entered.remove(key)
            metric = self.pop(key)
            if not metric.has_reset:
                self._carried[key] = _captured(metric)
        super().log(fx, name, *arguments, **options)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Keep a value of a training step; enter one that is logged elsewhere."""
        metric = self[key]
        if key in self._carried:
            _load(metric, self._carried.pop(key))
        if self._logged is None:
            super().update_metrics(key, value, batch_size)
            return
        if not metric.is_tensor:
            raise UsageError(
                f"self.log({metric.meta.name!r}, ...) in training_step got a torchmetrics object, whose counts are "
                "those of this worker's samples; log a tensor, of which the mean over all workers is taken, or use "
                "the object in validation_step"
            )
        if self._job.samples:
            self._logged.setdefault(key, []).append((value.detach(), batch_size))

    # As a part of the job's state

    def captured(self) -> dict[str, dict[str, Any]]:
        """Return what has been logged in the epoch, by key."""
        logged = {key: _captured(metric) for key, metric in self.items() if metric.is_tensor and not metric.has_reset}
        return self._carried | logged

    def load(self, captured: dict[str, dict[str, Any]]) -> None:
        """Take over what was logged in the epoch."""
        for key, metric in self.items():
            if key in captured:
                _load(metric, captured[key])
            elif metric.is_tensor:
                metric.reset()
        self._carried = {key: each for key, each in captured.items() if key not in self}

    def enter_carried(self) -> None:
        """Enter what is not going to be logged here before the epoch ends."""
        for key, each in self._carried.items():
            meta = _Metadata(**each["meta"])
            meta.sync = _Sync(fn=_Sync.no_op)
            self[key] = _ResultMetric(meta, is_tensor=True)
            _load(self[key], each)
        self._entered |= set(self._carried)
        self._carried = {}


_PLAIN = tuple(field.name for field in fields(_Metadata) if field.name not in {"reduce_fx", "_sync"})


def _captured(metric: _ResultMetric) -> dict[str, Any]:
    meta = {name: getattr(metric.meta, name) for name in _PLAIN} | {"reduce_fx": metric.meta.reduce_fx.__name__}
    samples = metric.cumulated_batch_size if metric.meta.is_mean_reduction else 0
    return {"meta": meta, "value": torch.as_tensor(metric.value).clone(), "samples": int(samples)}


def _load(metric: _ResultMetric, captured: dict[str, Any]) -> None:
    metric.value = captured["value"].clone()
    metric._forward_cache = metric.value if not metric.meta.on_epoch else metric._forward_cache  # noqa: SLF001
    if metric.meta.is_mean_reduction:
        metric.cumulated_batch_size = torch.tensor(captured["samples"])
    metric.has_reset, metric._computed = False, None  # noqa: SLF001
    metric._update_count = max(1, metric._update_count)  # noqa: SLF001
