"""Samplers, batch samplers and streams."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from tests.elastic_runtime.zoo.generated.parts.registry import part
from tests.elastic_runtime.zoo.parts import GLOBAL_BATCH, SAMPLES, Samples, vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.elastic_runtime.zoo.generated.drafts import Draft


@part("sampler")
def shuffled(s: Draft) -> None:
    pass


@part("sampler")
def sequential(s: Draft) -> None:
    s.loader_options = {"shuffle": False}


@part("sampler")
def weighted(s: Draft) -> None:
    weights = [1.0 + index % 3 for index in range(SAMPLES)]
    own = torch.Generator().manual_seed(4)
    s.loader_options = {"sampler": torch.utils.data.WeightedRandomSampler(weights, SAMPLES, generator=own)}


def _weighted_by_the_loss(s: Draft, weigh: Callable[[torch.Tensor], None]) -> None:
    """After each epoch `weigh` gets the loss of each sample."""

    def look(_: int) -> None:
        pairs = [vector(torch.Generator().manual_seed(index)) for index in range(SAMPLES)]
        x, y = (torch.stack(each) for each in zip(*pairs, strict=True))
        s.model.eval()
        with torch.no_grad():
            weigh(cross_entropy(s.model(x), y, reduction="none").double() ** 3 + 0.01)
        s.model.train()

    s.epilogue.append(look)


@part("sampler", refused="changed 'weights' of WeightedRandomSampler")
def weights_set_by_hand(s: Draft) -> None:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    s.loader_options = {"sampler": sampler}
    _weighted_by_the_loss(s, lambda weights: setattr(sampler, "weights", weights))


class Weights:
    """For `job.track`, and for `DrawnByWeights`."""

    def __init__(self) -> None:
        self.value = torch.ones(SAMPLES, dtype=torch.float64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


class DrawnByWeights(Sampler[int]):
    def __init__(self, weights: Weights) -> None:
        self._weights, self.generator = weights, torch.Generator()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        drawn = torch.multinomial(self._weights.value, SAMPLES, replacement=True, generator=self.generator)
        return iter(drawn.tolist())


@part("sampler")
def weights_that_are_tracked(s: Draft) -> None:
    weights = Weights()
    s.loader_options = {"sampler": DrawnByWeights(weights)}
    s.prepared.append(lambda: s.job.track(weights=weights))
    _weighted_by_the_loss(s, lambda found: setattr(weights, "value", found))


class Growing(Samples):
    """Has more samples in each epoch."""

    length = SAMPLES // 2

    def __len__(self) -> int:
        return self.length


@part("sampler", refused="samples when prepare got it")
def more_samples_in_each_epoch(s: Draft) -> None:
    s.data = Growing(vector)
    s.prologue.append(lambda epoch: setattr(s.data, "length", SAMPLES // 2 + 4 * epoch))


@part("sampler", refused="changed the loader's batch size from 12 to 6")
def smaller_batches_at_first(s: Draft) -> None:
    def set_size(epoch: int) -> None:
        s.loader.batch_sampler.batch_size = GLOBAL_BATCH // (2 if epoch < 2 else 1)

    s.prologue.append(set_size)


class OwnOrder(Sampler[int]):
    """Draws from a generator of its own that it keeps across epochs."""

    def __init__(self) -> None:
        self.generator_of_order = random.Random(0)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.generator_of_order.shuffle(order)
        return iter(order)


@part("sampler")
def own_random_generator(s: Draft) -> None:
    s.loader_options = {"sampler": OwnOrder()}


class NumpyOrder(OwnOrder):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(SAMPLES).tolist())


@part("sampler")
def own_numpy_generator(s: Draft) -> None:
    s.loader_options = {"sampler": NumpyOrder()}


class CumulativeOrder(OwnOrder):
    """Shuffles what is there in each `set_epoch`."""

    def __init__(self) -> None:
        self.order = list(range(SAMPLES))

    def set_epoch(self, epoch: int) -> None:
        random.Random(epoch).shuffle(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


@part("sampler")
def shuffled_again_in_set_epoch(s: Draft) -> None:
    s.loader_options = {"sampler": CumulativeOrder()}


@part("sampler")
def batches_of_their_own(s: Draft) -> None:
    sampler = BatchSampler(RandomSampler(range(SAMPLES)), GLOBAL_BATCH, drop_last=False)
    s.loader_options = {"batch_sampler": sampler, "batch_size": 1}


@part("sampler")
def weighted_batches_in_order(s: Draft) -> None:
    sampler = BatchSampler(SequentialSampler(range(SAMPLES)), GLOBAL_BATCH - 1, drop_last=True)
    s.loader_options = {"batch_sampler": sampler, "batch_size": 1}


class Stream(IterableDataset[Any]):
    """Its samples in order, and where it is."""

    def __init__(self) -> None:
        self.items, self.at = Samples(vector), 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SAMPLES:
            self.at += 1
            yield self.items[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@part("sampler")
def stream(s: Draft) -> None:
    s.data, s.loader_options = Stream(), {}


class Buffered(Stream):
    """Shuffles through a buffer that its state leaves out."""

    def __iter__(self) -> Iterator[Any]:
        kept: list[Any] = []
        for item in super().__iter__():
            kept.append(item)
            if len(kept) > 5:
                yield kept.pop(random.randrange(len(kept)))
        yield from kept


@part("sampler", refused="state")
def stream_with_a_buffer(s: Draft) -> None:
    s.data, s.loader_options = Buffered(), {}


class Nested(Sampler[int]):
    """Draws from a sampler in it."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.inner))


@part("sampler")
def generator_of_a_sampler_in_the_sampler(s: Draft) -> None:
    s.loader_options = {"sampler": Nested(OwnOrder())}


class ByClass(Sampler[list[int]]):
    """Shuffles the lists of its classes in place, for batches."""

    def __init__(self) -> None:
        self.pools = {number: list(range(number, SAMPLES, 2)) for number in range(2)}

    def __len__(self) -> int:
        return SAMPLES // GLOBAL_BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for pool in self.pools.values():
            random.shuffle(pool)
        half = GLOBAL_BATCH // 2
        for at in range(0, SAMPLES // 2, half):
            yield [index for pool in self.pools.values() for index in pool[at : at + half]]


@part("sampler")
def lists_of_classes_shuffled_in_place(s: Draft) -> None:
    s.loader_options = {"batch_sampler": ByClass(), "batch_size": 1}
