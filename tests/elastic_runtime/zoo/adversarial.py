"""Several networks that train each other, and several loaders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, Samples, script, vector, vectors

PAIRS = ("fast",)
"""Several backward passes in an iteration need "fast"."""


def judged(score: torch.Tensor, real: float) -> Any:
    return binary_cross_entropy_with_logits(score, torch.full_like(score, real))


def networks(norm: nn.Module | None = None) -> tuple[nn.Sequential, nn.Sequential]:
    """(generator from the sample's own two features, critic)."""
    made = nn.Sequential(nn.Linear(2, 8), norm or nn.Tanh(), nn.Linear(8, 8))
    return made, nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))


def play(job: Any, made: Any, judge: Any, optimizers: Any, loader: Any) -> None:
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            fake = made(x[:, :2])
            job.backward(judged(judge(x), 1.0) + judged(judge(fake.detach()), 0.0), more=True)
            optimizers[1].step()
            optimizers[0].zero_grad()
            job.backward(judged(judge(fake), 1.0))
            optimizers[0].step()


@script(modes=PAIRS)
def generator_and_critic(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    made, judge = networks()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.9)) for m in (made, judge)]
    _, _, loader = job.prepare([made, judge], optimizers, vectors())
    play(job, made, judge, optimizers, loader)
    return made, judge


class Frozen(nn.BatchNorm1d):
    """Normalises by its buffers, which it moves: so that the result does not depend on a worker's part of a batch."""

    def forward(self, x: torch.Tensor) -> Any:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False)


@script(modes=PAIRS)
def generator_with_batch_norm(**init: Any) -> Any:
    """Its buffers are followed between two passes of one graph."""
    job = elastic_runtime.init(**init)
    made, judge = networks(Frozen(8))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (made, judge)]
    _, _, loader = job.prepare([made, judge], optimizers, vectors())
    play(job, made, judge, optimizers, loader)
    return made, judge


@script(modes=PAIRS)
def wasserstein_critic_with_clipped_weights(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    made, judge = networks()
    optimizers = [torch.optim.RMSprop(m.parameters(), lr=0.002) for m in (made, judge)]
    _, _, loader = job.prepare([made, judge], optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            judge.zero_grad()
            job.backward(judge(made(x[:, :2]).detach()).mean() - judge(x).mean(), more=True)
            optimizers[1].step()
            with torch.no_grad():
                for parameter in judge.parameters():
                    parameter.clamp_(-0.3, 0.3)
            made.zero_grad()
            job.backward(-judge(made(x[:, :2])).mean())
            optimizers[0].step()
    return made, judge


@script()
def optimizers_that_take_turns(**init: Any) -> Any:
    """One acts in even steps, the other one in odd ones."""
    job = elastic_runtime.init(**init)
    first, second = nn.Linear(8, 8), nn.Linear(8, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (first, second)]
    _, _, loader = job.prepare([first, second], optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(second(first(x).tanh()), y))
            optimizers[job.step % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return first, second


@script()
def optimizer_that_acts_in_every_third_step(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            job.backward(cross_entropy(model(x), y))
            if job.step % 3 == 2:
                optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def two_models_with_one_optimizer(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    encoder, decoder = nn.Linear(8, 4), nn.Linear(4, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    _, optimizer, loader = job.prepare([encoder, decoder], optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            job.backward(mse_loss(decoder(encoder(x).tanh()), x))
            optimizer.step()
            optimizer.zero_grad()
    return encoder, decoder


class Unlabelled(torch.utils.data.Dataset[torch.Tensor]):
    """Not written down: only the first loader's samples are."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> Any:
        return vector(torch.Generator().manual_seed(1000 + index))[0]


@script()
def second_loader_of_unlabelled_samples(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    labelled: Any = DataLoader(Samples(vector), batch_size=GLOBAL_BATCH, shuffle=True)
    unlabelled: Any = DataLoader(Unlabelled(), batch_size=GLOBAL_BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, (labelled, unlabelled) = job.prepare(model, optimizer, [labelled, unlabelled])
    for _epoch in job.epochs(EPOCHS):
        for (x, y), u in zip(labelled, unlabelled, strict=False):
            job.backward(cross_entropy(model(x), y) + 0.1 * model(u).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def two_domains_by_two_iterators(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    there, back = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.Adam([*there.parameters(), *back.parameters()], lr=0.01)
    second: Any = DataLoader(Unlabelled(), batch_size=GLOBAL_BATCH, shuffle=True)
    _, optimizer, (first, second) = job.prepare([there, back], optimizer, [vectors(), second])
    others = iter(second)
    for _epoch in job.epochs(EPOCHS):
        for x, _y in first:
            other = next(others)
            job.backward(mse_loss(back(there(x)), x) + mse_loss(there(back(other)), other))
            optimizer.step()
            optimizer.zero_grad()
    return there, back
