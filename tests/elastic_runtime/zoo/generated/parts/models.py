"""The models of generated scripts: 8 features in, 3 classes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.elastic_runtime.zoo.generated.parts.registry import part

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.elastic_runtime.zoo.generated.drafts import Draft


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
