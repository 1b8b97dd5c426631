"""Counters of a script's own, random numbers, and what the loop has counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.elastic_runtime.zoo.generated.parts.registry import part
from tests.elastic_runtime.zoo.parts import Samples, vector

if TYPE_CHECKING:
    from tests.elastic_runtime.zoo.generated.drafts import Draft


@part("counter")
def no_counter(s: Draft) -> None:
    pass


@part("counter")
def step_of_the_job(s: Draft) -> None:
    s.scale_loss.append(lambda loss: loss * (1.0 + 0.1 * (s.job.step % 4)))


@part("counter", rehearsed="other gradients|depend on the number|differ|another state")
def count_of_iterations(s: Draft) -> None:
    count = [0]

    def scale(loss: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return loss * (1.0 + 0.1 * (count[0] % 7))

    s.scale_loss.append(scale)


@part("counter", rehearsed="other gradients|depend on the number|differ|another state")
def count_of_epochs(s: Draft) -> None:
    count = [0]
    s.prologue.append(lambda _: count.__setitem__(0, count[0] + 1))
    s.scale_loss.append(lambda loss: loss * 0.8 ** count[0])


class Counter:
    """For `job.track`."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@part("counter")
def tracked_count_of_epochs(s: Draft) -> None:
    counter = Counter()
    s.prepared.append(lambda: s.job.track(counter=counter))
    s.prologue.append(lambda _: setattr(counter, "value", counter.value + 1))
    s.scale_loss.append(lambda loss: loss * 0.8**counter.value)


@part("counter")
def tracked_count_of_epochs_after(s: Draft) -> None:
    counter = Counter()
    s.prepared.append(lambda: s.job.track(counter=counter))
    s.epilogue.append(lambda _: setattr(counter, "value", counter.value + 1))
    s.scale_loss.append(lambda loss: loss * 0.8**counter.value)


class LargeSum(Counter):
    """More than is copied at an epoch's beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = torch.zeros((1 << 20) + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"].clone()


@part("counter")
def tracked_sum_that_is_large(s: Draft) -> None:
    large = LargeSum()
    s.prepared.append(lambda: s.job.track(large=large))
    s.after_step.append(lambda _: large.sum.add_(float(s.job.applied)))
    s.scale_loss.append(lambda loss: loss * (1.0 + 0.1 * (large.sum[0] % 5)))


@part("counter")
def tracked_count_of_steps(s: Draft) -> None:
    counter = Counter()
    s.prepared.append(lambda: s.job.track(counter=counter))
    s.after_step.append(lambda _: setattr(counter, "value", counter.value + s.job.applied))
    s.scale_loss.append(lambda loss: loss * (1.0 + 0.1 * (counter.value % 5)))


# Random numbers in the loop


@part("noise")
def no_noise(s: Draft) -> None:
    pass


@part("noise", modes=("exact",))
def noise_of_the_global_generator(s: Draft) -> None:
    s.iteration.append(lambda x: x + 0.1 * torch.randn(x.shape))


@part("noise", rehearsed="other gradients|depend on the number|generator")
def noise_of_a_generator(s: Draft) -> None:
    own = torch.Generator().manual_seed(3)
    s.iteration.append(lambda x: x + 0.1 * torch.randn(x.shape, generator=own))


@part("noise", rehearsed="other gradients|depend on the number|generator")
def noise_of_numpys_generator(s: Draft) -> None:
    own = np.random.default_rng(3)
    s.iteration.append(lambda x: x + 0.1 * torch.from_numpy(own.normal(size=tuple(x.shape))).float())


class Noisy(Samples):
    """Its samples are drawn at random."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y


@part("noise", modes=("exact",))
def noise_of_the_samples(s: Draft) -> None:
    s.data = s.data or Noisy(vector)


# What the loop has counted, used after it


class Cached(Noisy):
    """Keeps its samples as it has drawn them at first."""

    def __init__(self) -> None:
        super().__init__(vector)
        self._cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._cache:
            self._cache[index] = super().__getitem__(index)
        return self._cache[index]


@part("noise", rehearsed="give other samples")
def noise_that_is_kept_in_a_cache(s: Draft) -> None:
    s.data = s.data or Cached()


@part("count_of_the_loop")
def nothing_counted(s: Draft) -> None:
    pass


@part("count_of_the_loop")
def mean_loss_printed_after(s: Draft) -> None:
    s.counted.append(lambda total, n, _: print(total / n))


@part("count_of_the_loop")
def last_losses_kept_after(s: Draft) -> None:
    """The best loss of the epoch, and whether the last one was better than the first."""
    kept: list[Any] = []
    s.counted.append(lambda _total, _n, losses: kept.append((min(losses), losses[-1] < losses[0])))


@part("count_of_the_loop")
def mean_loss_over_all_workers_after(s: Draft) -> None:
    s.counted.append(lambda total, n, _: s.job.mean(total / n, weight=float(n)))


@part("count_of_the_loop", noted="n, total")
def decay_by_the_mean_loss_after(s: Draft) -> None:
    """Decides on what a worker that resumes in the middle of an epoch has only a part of."""

    def decay(total: float, n: int, _: list[float]) -> None:
        loss = s.job.mean(total / n, weight=float(n))
        for group in s.optimizer.param_groups:
            group["lr"] *= 1 / (1 + loss)

    s.counted.append(decay)


@part("count_of_the_loop", noted="losses")
def rate_halved_by_the_losses_of_the_loop(s: Draft) -> None:
    """Where the epoch's losses have not become smaller."""

    def halve(_total: float, _n: int, losses: list[float]) -> None:
        if s.job.mean(losses[-1]) > s.job.mean(losses[0]):
            for group in s.optimizer.param_groups:
                group["lr"] *= 0.5

    s.counted.append(halve)


class Meter:
    """The mean of an epoch's losses, as scripts and libraries have it: an object that is no module."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


@part("count_of_the_loop", noted="meter.count, self.meter.total")
def rate_by_a_meter_of_the_loop(s: Draft) -> None:
    """As above, with what the loop counts in an object."""
    s.meter = Meter()
    s.prologue.append(lambda _: setattr(s, "meter", Meter()))

    def lower(_total: float, _n: int, _losses: list[float]) -> None:
        loss = s.job.mean(s.meter.total / s.meter.count, weight=float(s.meter.count))
        for group in s.optimizer.param_groups:
            group["lr"] *= 1 / (1 + loss)

    s.counted.append(lower)
