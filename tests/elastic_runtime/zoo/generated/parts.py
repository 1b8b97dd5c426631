"""The parts of generated scripts, by kind; the first of each kind is the plain one."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, SAMPLES, Samples, vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.elastic_runtime.zoo.generated.drafts import Draft


_ema: Any = get_ema_multi_avg_fn


@dataclass(frozen=True)
class Part:
    """`refused`, `rehearsed`: patterns of what a run or a rehearsal says of a script with it; "": it is right.
    `refused_in`: a history in which it is refused; "": it is alone. `rehearsed_with`: the pattern with another part.

    `noted`: a variable that a rehearsal names in a note, for whether it matters cannot be seen.
    `modes`: the reductions under which it can be right at all, or is refused.
    """

    name: str
    add: Callable[[Draft], None]
    refused: str = ""
    rehearsed: str = ""
    modes: tuple[str, ...] = ("fast", "exact")
    refused_in: str = ""
    rehearsed_with: tuple[tuple[str, str], ...] = ()
    noted: str = ""


KINDS: dict[str, dict[str, Part]] = {}


def part(
    kind: str,
    *,
    refused: str = "",
    rehearsed: str = "",
    modes: tuple[str, ...] = ("fast", "exact"),
    refused_in: str = "",
    rehearsed_with: tuple[tuple[str, str], ...] = (),
    noted: str = "",
) -> Callable[[Any], Any]:
    """Enter a function into KINDS under its kind and its name."""

    def enter(add: Any) -> Any:
        KINDS.setdefault(kind, {})[add.__name__] = Part(
            add.__name__, add, refused, rehearsed, modes, refused_in, rehearsed_with, noted
        )
        return add

    return enter


# Models: 8 features in, 3 classes out


@part("model")
def perceptron(s: Draft) -> None:
    s.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@part("model")
def layer_norm(s: Draft) -> None:
    s.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


@part("model", modes=("exact",))
def batch_norm(s: Draft) -> None:
    s.init["shards"] = 3
    s.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


@part("model", modes=("exact",))
def dropout(s: Draft) -> None:
    s.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))


@part("model", rehearsed_with=(("in_pieces", "depend on the number of workers"),))
def spectral_norm(s: Draft) -> None:
    """Each forward pass improves its estimate of the norm: a step of one worker in two pieces has two, of two one."""
    s.model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 3))


class Transposed(nn.Module):
    """A weight whose memory is that of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(16, 8) * 0.3).t())
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(x @ self.weight))


@part("model")
def transposed_weight(s: Draft) -> None:
    s.model = Transposed()


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.conv(x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last))
        return self.head(torch.tanh(found).flatten(1))


@part("model")
def channels_last(s: Draft) -> None:
    s.model = Channels().to(memory_format=torch.channels_last)


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8, **options)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.table((x * 10).long().abs() % 40).mean(1) + x)


@part("model")
def embedding_table(s: Draft) -> None:
    s.model = Words()


@part("model", refused="max_norm")
def embedding_max_norm(s: Draft) -> None:
    s.model = Words(max_norm=0.5)


@part("model", refused="scale_grad_by_freq")
def embedding_scaled_by_frequency(s: Draft) -> None:
    s.model = Words(scale_grad_by_freq=True)


class Counting(nn.Module):
    """Its `get_extra_state` is a count of its forward passes, on which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.calls += 1
        return self.inner(x) * (1.0 + 0.1 * (self.calls % 3))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@part("model", rehearsed="depend on the number of workers")
def extra_state(s: Draft) -> None:
    s.model = Counting()


class Moving(nn.Module):
    """Moves buffers in its forward pass, one of which its state_dict leaves out."""

    gain: torch.Tensor
    phase: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.register_buffer("gain", torch.ones(()))
        self.register_buffer("phase", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.gain = self.gain * 0.99
            self.phase.mul_(1.01)
        return self.inner(x) * self.gain * self.phase.float()


@part("model", rehearsed="depend on the number of workers")
def moving_buffers(s: Draft) -> None:
    s.model = Moving()


class Centred(nn.Module):
    """Subtracts a mean of former samples, a buffer to which each forward pass adds its own ones afterwards."""

    total: torch.Tensor
    count: torch.Tensor

    def __init__(self, uses: Callable[[], bool], adds: Callable[[], bool]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self._uses, self._adds = uses, adds

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner(x - self.total / self.count if self._uses() else x)
        if self.training and self._adds():
            self.total += x.detach().sum(0)
            self.count += len(x)
        return found


@part("model", rehearsed="buffers that step 3 fills depend on the number of workers: count, total")
def mean_of_former_samples(s: Draft) -> None:
    s.model = Centred(lambda: True, lambda: True)


@part("model", rehearsed="buffers that step 3 fills depend on the number of workers: count, total")
def mean_of_the_samples_of_earlier_epochs(s: Draft) -> None:
    """What a step of one worker and of two differ in has no effect before the next epoch."""
    s.model = Centred(lambda: s.job.step >= 8, lambda: s.job.step < 8)


class FromFirstBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.begun = nn.Linear(8, 3), False

    def forward(self, x: torch.Tensor) -> Any:
        if not self.begun:
            self.begun = True
            with torch.no_grad():
                self.inner.bias.copy_(x.mean(0)[:3])
        return self.inner(x)


@part("model", refused="changed .*before job.backward|differs from rank 0's", rehearsed="changed|differs|another state")
def set_from_first_batch(s: Draft) -> None:
    s.model = FromFirstBatch()


class Expert(nn.Module):
    """A second layer, which some steps use."""

    def __init__(self, s: Draft, wanted: Callable[[int], bool]) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(8, 3), nn.Linear(8, 3)
        self._step: Callable[[], int] = lambda: int(s.job.step)  # a copy of the model has the same one
        self._wanted = wanted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out + self.expert(x) if self._wanted(self._step()) else out


@part("model")
def expert_of_every_third_step(s: Draft) -> None:
    s.model = Expert(s, lambda step: step % 3 == 1)


@part("model")
def expert_of_the_first_steps(s: Draft) -> None:
    s.model = Expert(s, lambda step: step < 3)


@part("model")
def expert_of_the_last_steps(s: Draft) -> None:
    s.model = Expert(s, lambda step: step > 8)


@part("model")
def tied_weights(s: Draft) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    s.model = nn.Sequential(first, nn.Tanh(), second, nn.Linear(8, 3))


# Optimizers


@part("optimizer")
def sgd(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@part("optimizer")
def adamw(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)


@part("optimizer")
def amsgrad_in_groups(s: Draft) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        given: list[Any] = list(model.parameters())
        first, others = given[0], given[1:]
        groups: Any = [{"params": [first], "lr": 0.02}, {"params": others}]
        return torch.optim.Adam(groups, lr=0.01, amsgrad=True)

    s.make_optimizer = make


@part("optimizer")
def rmsprop(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.RMSprop(model.parameters(), lr=0.003, momentum=0.5, centered=True)


@part("optimizer")
def nadam(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.NAdam(model.parameters(), lr=0.01)


def _by_columns(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of this shape whose memory is in the reverse order of the dimensions."""
    order = tuple(reversed(range(like.dim())))
    return torch.zeros([like.shape[d] for d in order]).permute(order)


class Rotating(torch.optim.Optimizer):
    """Keeps a transposed average of each matrix, of which it reads the memory in order, as SOAP's kernels do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "average" not in state:
                    state["average"] = _by_columns(parameter.grad)
                state["average"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                turned = state["average"].as_strided((parameter.numel(),), (1,))
                weights = 1.0 + 0.1 * (torch.arange(parameter.numel()) % 3)
                parameter.sub_((turned * weights).view_as(parameter), alpha=group["lr"])


@part("optimizer")
def transposed_moments(s: Draft) -> None:
    s.make_optimizer = lambda model: Rotating(model.parameters())


class CountingSgd(torch.optim.SGD):
    """Counts its steps in an attribute, on which its rate depends."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] / (1.0 + 0.2 * self.count)
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


@part("optimizer", refused="changes its attribute 'count'")
def counter_in_the_optimizer(s: Draft) -> None:
    s.make_optimizer = lambda model: CountingSgd(model.parameters(), lr=0.1)


class SlowSgd(torch.optim.SGD):
    """In each fourth step it goes half of the way back to slow weights, which are in a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        (group,) = self.param_groups
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] % 4 == 0:
            for slow, parameter in zip(self.slow, group["params"], strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


@part("optimizer", refused="changes its attribute 'slow'")
def slow_weights_in_the_optimizer(s: Draft) -> None:
    s.make_optimizer = lambda model: SlowSgd(model.parameters())


class Langevin(torch.optim.SGD):
    """Adds noise to each step, from torch's own generator and from Python's. Its first step sets a constant."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.last_loss = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.02 * random.random())


@part("optimizer")
def noise_in_the_optimizer(s: Draft) -> None:
    s.make_optimizer = lambda model: Langevin(model.parameters(), lr=0.1)


class NumberedSgd(torch.optim.SGD):
    """Keeps the first weights of each group in its state, under the group's number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for number, group in enumerate(self.param_groups):
            state: Any = self.state
            first = state[number].setdefault("first", [parameter.clone() for parameter in group["params"]])
            for parameter, before in zip(group["params"], first, strict=True):
                parameter.lerp_(before, 0.02)


@part("optimizer", refused="keeps state under the key 0, a number")
def state_under_a_number(s: Draft) -> None:
    s.make_optimizer = lambda model: NumberedSgd(model.parameters(), lr=0.1)


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer, and has none of what torch's class makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@part("optimizer", refused="has not called __init__ of torch.optim.Optimizer")
def wrapper_without_init(s: Draft) -> None:
    s.make_optimizer = lambda model: Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))


# Schedulers, and where they step


@part("scheduler")
def constant(s: Draft) -> None:
    pass


def _gamma(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.8)


@part("scheduler")
def stepped_at_the_epochs_begin(s: Draft) -> None:
    s.make_scheduler = _gamma
    s.prologue.append(lambda epoch: s.scheduler.step() if epoch else None)


@part("scheduler")
def stepped_at_the_epochs_end(s: Draft) -> None:
    s.make_scheduler = _gamma
    s.epilogue.append(lambda _epoch: s.scheduler.step())


@part("scheduler")
def one_cycle(s: Draft) -> None:
    s.make_scheduler = lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=SAMPLES * EPOCHS + 1)
    s.after_step.append(lambda _: s.scheduler.step())


@part("scheduler")
def rate_of_the_epoch_by_hand(s: Draft) -> None:
    def set_rate(epoch: int) -> None:
        for group in s.optimizer.param_groups:
            group["lr"] = 0.05 * 0.7**epoch

    s.prologue.append(set_rate)


@part("scheduler")
def rate_lowered_at_the_epochs_begin(s: Draft) -> None:
    def lower(_: int) -> None:
        for group in s.optimizer.param_groups:
            group["lr"] *= 0.8

    s.prologue.append(lower)


@part("scheduler")
def rate_lowered_at_the_epochs_end(s: Draft) -> None:
    def lower(_: int) -> None:
        for group in s.optimizer.param_groups:
            group["lr"] *= 0.8

    s.epilogue.append(lower)


@part("scheduler")
def plateau_of_the_mean(s: Draft) -> None:
    s.make_scheduler = lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.3
    )
    s.epilogue.append(lambda _: s.scheduler.step(evaluated(s)))


@part("scheduler", refused="differs from rank 0's", rehearsed="differs from rank 0's", refused_in="with:2")
def plateau_of_a_local_loss(s: Draft) -> None:
    """The metric is each worker's own: its last micro-batch's loss."""
    s.make_scheduler = lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.3
    )
    s.after_step.append(lambda loss: s.scheduler.step(loss))  # noqa: PLW0108  (bound once it is made)


@part(
    "scheduler", refused="differs from rank 0's", rehearsed="differs from rank 0's|another state", refused_in="join:6"
)
def momentum_by_a_counter_of_steps(s: Draft) -> None:
    steps = [0]

    def count(_: Any) -> None:
        if s.job.applied:
            steps[0] += 1
        for group in s.optimizer.param_groups:
            group["weight_decay"] = 0.1 * min(steps[0] / 10, 1.0)

    s.after_step.append(count)


@part(
    "scheduler", refused="differs from rank 0's", rehearsed="differs from rank 0's|another state", refused_in="join:6"
)
def rate_by_a_counter_of_epochs(s: Draft) -> None:
    epochs = [0]

    def count(_: int) -> None:
        epochs[0] += 1
        for group in s.optimizer.param_groups:
            group["lr"] = 0.05 * 0.7 ** epochs[0]

    s.prologue.append(count)


# Samplers


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


# Losses


@part("loss")
def mean(s: Draft) -> None:
    pass


@part("loss", rehearsed="depend on the number of workers", modes=("fast",))
def class_weights(s: Draft) -> None:
    weights = torch.tensor([1.0, 1.15, 1.0])
    s.loss = lambda output, y: cross_entropy(output, y, weight=weights)


@part("loss")
def class_weights_with_their_sum(s: Draft) -> None:
    weights = torch.tensor([1.0, 2.0, 1.0])
    s.loss = lambda output, y: (cross_entropy(output, y, weight=weights), {"weight": float(weights[y].sum())})


@part("loss")
def sum_over_samples(s: Draft) -> None:
    s.loss = lambda output, y: (cross_entropy(output, y, reduction="sum") / GLOBAL_BATCH, {"reduction": "sum"})


@part("loss", rehearsed="sum", modes=("fast",))
def sum_over_a_constant(s: Draft) -> None:
    s.loss = lambda output, y: cross_entropy(output, y, reduction="sum") / GLOBAL_BATCH


def _masked(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (y > 0).float()
    return (cross_entropy(output, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1.0), mask.sum()


@part("loss", rehearsed="weight=", modes=("fast",))
def mean_over_a_mask(s: Draft) -> None:
    s.loss = lambda output, y: _masked(output, y)[0]


@part("loss")
def mean_over_a_mask_with_its_sum(s: Draft) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> Any:
        found, weight = _masked(output, y)
        return found, {"weight": float(weight)}

    s.loss = loss


@part("loss")
def decayed_weights(s: Draft) -> None:
    s.more_loss.append(lambda: 0.01 * sum(p.square().sum() for p in s.model.parameters()))


# How a step is cut


@part("cut")
def whole(s: Draft) -> None:
    pass


@part("cut", modes=("fast",))
def in_pieces(s: Draft) -> None:
    s.init["max_batch_per_gpu"] = 5


@part("cut")
def by_global_steps(s: Draft) -> None:
    s.by_global_steps = True


@part("cut")
def epochs_of_three_steps(s: Draft) -> None:
    """Left as an iteration begins: a training that resumes there has none, so nothing is counted."""
    s.leaves, s.leaves_first = lambda: s.job.position.index == 3, True


def _cut_short(s: Draft) -> Iterator[Any]:
    for batch in islice(s.loader, 3):  # noqa: UP028  (a worker that resumes counts from 0 again)
        yield batch


def _counted(s: Draft) -> Iterator[Any]:
    for number, batch in enumerate(s.loader):
        s.number = number
        yield batch


@part("cut", rehearsed="not at the same step|at different places", noted="islice", modes=("fast",))
def epochs_of_three_iterations(s: Draft) -> None:
    s.batches = lambda: _cut_short(s)


@part("cut", rehearsed="not at the same step|at different places", noted="number", modes=("fast",))
def left_after_three_iterations(s: Draft) -> None:
    s.batches, s.leaves = lambda: _counted(s), lambda: s.number == 3


@part("cut", rehearsed="depend on the number|other gradients", noted="number")
def every_third_iteration_weighs_more(s: Draft) -> None:
    s.batches = lambda: _counted(s)
    s.scale_loss.append(lambda loss: loss * (3.0 if s.number % 3 == 2 else 1.0))


@part("cut", modes=("exact",))
def in_three_shards(s: Draft) -> None:
    s.init["shards"] = 3


# Evaluation


def evaluated(s: Draft) -> float:
    """The loss over fixed samples that the workers share out."""
    s.model.eval()
    x, y = torch.linspace(-1, 1, 64).view(8, 8), torch.arange(8) % 3
    mine = slice(s.job.rank, None, s.job.world_size)
    with torch.no_grad():
        loss = cross_entropy(s.model(x[mine]), y[mine])
    s.model.train()
    return float(s.job.mean(loss, weight=float(len(x[mine]))))


@part("evaluation")
def not_evaluated(s: Draft) -> None:
    pass


@part("evaluation")
def evaluated_by_itself(s: Draft) -> None:
    def evaluate(_: int) -> None:
        s.model.eval()
        with torch.no_grad():
            s.model(torch.ones(3, 8))
            torch.rand(5)
        s.model.train()

    s.epilogue.append(evaluate)


@part("evaluation")
def evaluated_together(s: Draft) -> None:
    s.epilogue.append(lambda _: evaluated(s))


@part("evaluation")
def evaluated_before_the_epoch(s: Draft) -> None:
    s.prologue.append(lambda _: evaluated(s))


@part("evaluation")
def evaluated_in_the_loop(s: Draft) -> None:
    s.after_step.append(lambda _: evaluated(s) if s.job.applied and s.job.step % 3 == 2 else None)


# Averages


@part("average")
def none(s: Draft) -> None:
    pass


def _average(s: Draft, *, tracked: bool) -> None:
    def make() -> None:
        average = AveragedModel(s.model, multi_avg_fn=_ema(0.9), use_buffers=True)
        if tracked:
            s.job.track(average=average)
        s.after_step.append(lambda _: average.update_parameters(s.model))
        s.results.append(average)

    s.prepared.append(make)


@part("average")
def tracked_average(s: Draft) -> None:
    _average(s, tracked=True)


@part("average", rehearsed="AveragedModel")
def untracked_average(s: Draft) -> None:
    _average(s, tracked=False)


@part("average", rehearsed="differ|other values|other gradients|another state|depend")
def average_by_hand_in_the_loss(s: Draft) -> None:
    """A dictionary of averages towards which the loss draws."""
    kept: dict[str, torch.Tensor] = {}

    def draw() -> Any:
        for name, parameter in s.model.named_parameters():
            kept.setdefault(name, torch.zeros_like(parameter.detach()))
        return 0.1 * sum((p - kept[name]).square().sum() for name, p in s.model.named_parameters())

    def follow(_: Any) -> None:
        if s.job.applied:
            for name, parameter in s.model.named_parameters():
                kept[name].lerp_(parameter.detach(), 0.5)

    s.more_loss.append(draw)
    s.after_step.append(follow)


# Counters of the script's own


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


# Before and after the loader's loop


@part("prologue")
def nothing_before(s: Draft) -> None:
    pass


@part("prologue")
def buffer_before(s: Draft) -> None:
    tau = torch.ones(())
    s.model.register_buffer("tau", tau)
    s.prologue.append(lambda _: s.model.get_buffer("tau").mul_(0.7))
    s.scale_loss.append(lambda loss: loss * (1.0 + s.model.get_buffer("tau")))


@part("prologue")
def weights_shrunk_before(s: Draft) -> None:
    @torch.no_grad()
    def shrink(epoch: int) -> None:
        if epoch:
            next(s.model.parameters()).mul_(0.8)

    s.prologue.append(shrink)


@part("prologue")
def moments_cleared_before(s: Draft) -> None:
    s.prologue.append(lambda epoch: s.optimizer.state.clear() if epoch else None)


@part("prologue")
def layer_thawed_before(s: Draft) -> None:
    def begin() -> None:
        next(s.model.parameters()).requires_grad_(False)  # noqa: FBT003

    s.prepared.append(begin)
    s.prologue.append(lambda epoch: next(s.model.parameters()).requires_grad_(epoch >= 1))


@part("prologue")
def rates_summed_before(s: Draft) -> None:
    """Over the workers, without job.repeat."""

    def average(_epoch: int) -> None:
        for group in s.optimizer.param_groups:
            rate = torch.tensor(group["lr"] * 0.9)
            group["lr"] = float(s.job.all_reduce(rate) / sum(s.job.all_gather(1)))

    s.prologue.append(average)


@part("prologue")
def layer_frozen_before(s: Draft) -> None:
    """Where its gradients are cleared to zeros, momentum moves it still."""
    s.prologue.append(lambda epoch: next(s.model.parameters()).requires_grad_(epoch < 2))


@part("prologue")
def group_added_before(s: Draft) -> None:
    inner = s.make_optimizer

    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        optimizer = inner(_Given(others))
        first.requires_grad_(False)  # noqa: FBT003
        kept.append(first)
        return optimizer

    def thaw(epoch: int) -> None:
        if epoch == 1:
            kept[0].requires_grad_(True)  # noqa: FBT003
            others = {name: value for name, value in s.optimizer.param_groups[0].items() if name != "params"}
            s.optimizer.add_param_group({"params": kept, **copy.deepcopy(others)})

    kept: list[Any] = []
    s.make_optimizer = make
    s.prologue.append(thaw)


class _Given:
    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters

    def parameters(self) -> list[Any]:
        return self._parameters


@part("prologue", refused="created after prepare|after prepare", rehearsed="after prepare")
def layer_replaced_before(s: Draft) -> None:
    def replace(epoch: int) -> None:
        if epoch != 1:
            return
        torch.manual_seed(7)
        for name, module in list(s.model.named_modules()):
            if isinstance(module, nn.Linear) and module.out_features == 3:
                fresh = nn.Linear(module.in_features, 3)
                owner, _, last = name.rpartition(".")
                setattr(s.model.get_submodule(owner), last, fresh)
                s.optimizer.add_param_group({"params": list(fresh.parameters())})
                return

    s.prologue.append(replace)


@part("prologue", rehearsed="other values|depend on the number|differ|other gradients")
def anchor_copied_before(s: Draft) -> None:
    anchor: list[Any] = []

    def keep(_: int) -> None:
        anchor[:] = [copy.deepcopy(s.model)]

    def draw() -> Any:
        pairs = zip(s.model.parameters(), anchor[0].parameters(), strict=True)
        return 0.3 * sum((p - q.detach()).square().sum() for p, q in pairs)

    s.prologue.append(keep)
    s.more_loss.append(draw)


@part("epilogue")
def nothing_after(s: Draft) -> None:
    pass


@part("epilogue")
def buffer_after(s: Draft) -> None:
    s.model.register_buffer("rho", torch.ones(()))
    s.epilogue.append(lambda _: s.model.get_buffer("rho").mul_(0.8))
    s.scale_loss.append(lambda loss: loss * (1.0 + s.model.get_buffer("rho")))


@part("epilogue")
def weights_shrunk_after(s: Draft) -> None:
    @torch.no_grad()
    def shrink(_: int) -> None:
        next(s.model.parameters()).mul_(0.8)

    s.epilogue.append(shrink)


class Scaled(Samples):
    """Its samples have a size that the script sets."""

    size = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.size, y


def _scaled(s: Draft) -> Scaled:
    found = Scaled(vector)
    s.data = s.data or found  # a stream, or what has other lengths, stays
    return found


@part("epilogue")
def samples_scaled_by_the_epoch(s: Draft) -> None:
    """And otherwise for what an epoch ends with."""
    data = _scaled(s)
    s.prologue.append(lambda epoch: setattr(data, "size", 1.0 + 0.2 * epoch))
    s.epilogue.append(lambda _: setattr(data, "size", 1.0))


class Noisy(Samples):
    """Its samples are drawn at random."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y


@part("noise", modes=("exact",))
def noise_of_the_samples(s: Draft) -> None:
    s.data = s.data or Noisy(vector)


@part("epilogue", refused="changed 'size' of its Scaled")
def samples_scaled_after_each_epoch(s: Draft) -> None:
    data = _scaled(s)
    s.epilogue.append(lambda _: setattr(data, "size", data.size * 1.2))


# What the loop has counted, used after it


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


# Gradients


@part("clearing")
def cleared_to_none(s: Draft) -> None:
    pass


@part("clearing")
def cleared_first(s: Draft) -> None:
    s.clears_first = True


@part("clearing")
def cleared_to_zeros(s: Draft) -> None:
    s.clear = lambda: s.optimizer.zero_grad(set_to_none=False)


@part("clearing")
def cleared_to_zeros_first(s: Draft) -> None:
    s.clear, s.clears_first = lambda: s.model.zero_grad(set_to_none=False), True


@part("clearing")
def cleared_to_zeros_in_some_steps(s: Draft) -> None:
    s.clear = lambda: s.optimizer.zero_grad(set_to_none=s.job.step % 3 == 0)


@part("clearing")
def cleared_to_zeros_first_in_some_steps(s: Draft) -> None:
    s.clear, s.clears_first = lambda: s.optimizer.zero_grad(set_to_none=s.job.step % 3 == 0), True


# Skipping


@part("skipping")
def nothing_skipped(s: Draft) -> None:
    pass


@part("skipping")
def every_fourth_step_skipped(s: Draft) -> None:
    s.skips = lambda: s.job.step % 4 == 2


# Hooks


@part("hook")
def no_hook(s: Draft) -> None:
    pass


@part("hook")
def hook_on_a_gradient(s: Draft) -> None:
    first: Any = next(s.model.parameters())
    first.register_hook(lambda gradient: gradient * 0.5)


@part("hook")
def hook_on_the_optimizer(s: Draft) -> None:
    @torch.no_grad()
    def decay(*_: Any) -> None:
        next(s.model.parameters()).mul_(0.99)

    s.prepared.append(lambda: s.optimizer.register_step_post_hook(decay))


@part("hook")
def hook_on_the_forward_pass(s: Draft) -> None:
    s.model.register_buffer("seen", torch.zeros(()))

    def count(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1.0 + 0.01 * module.get_buffer("seen"))

    s.model.register_forward_hook(count)
    s.before_step.append(lambda: s.model.get_buffer("seen").add_(1.0) if s.job.applied else None)


@part("hook")
def clipped(s: Draft) -> None:
    s.before_step.append(lambda: s.job.clip_grad_norm_(s.model.parameters(), 0.5))
