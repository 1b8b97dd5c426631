"""Generative models, reinforcement learning and meta-learning, in the loops that public repositories use for them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.zoo.adversarial import networks
from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, Samples, script, texts, vectors


@script(modes=("exact",))
def denoising_diffusion(**init: Any) -> Any:
    """Draws a time and noise for each sample; with "fast" they come from each worker's own stream."""
    job = elastic_runtime.init(**init)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 20), 0)
    model = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
    model, optimizer, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), vectors())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    job.track(average=average)
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            time, noise = torch.randint(0, 20, (len(x), 1)), torch.randn_like(x)
            noisy = kept[time].sqrt() * x + (1 - kept[time]).sqrt() * noise
            job.backward(mse_loss(model(torch.cat([noisy, time / 20], 1)), noise))
            job.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average.update_parameters(model)
    return model, average


def penalty_of(judge: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> Any:
    """The share of the real sample is its own first feature, so that no random stream is needed."""
    share = real[:, :1].sigmoid()
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
    return 10 * (slope.norm(dim=1) - 1).square().mean()


@script(modes=("fast",))
def wasserstein_critic_with_gradient_penalty(**init: Any) -> Any:
    """Three updates of the critic for one of the generator, in each iteration."""
    job = elastic_runtime.init(**init)
    made, judge = networks()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.005, betas=(0.0, 0.9)) for m in (made, judge)]
    _, _, loader = job.prepare([made, judge], optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            for _ in range(3):
                optimizers[1].zero_grad()
                fake = made(x[:, :2]).detach()
                job.backward(judge(fake).mean() - judge(x).mean() + penalty_of(judge, x, fake), more=True)
                optimizers[1].step()
            optimizers[0].zero_grad()
            job.backward(-judge(made(x[:, :2])).mean())
            optimizers[0].step()
    return made, judge


@script(modes=("fast",))
def generator_trained_in_every_third_step(**init: Any) -> Any:
    """So the number of backward passes differs from step to step."""
    job = elastic_runtime.init(**init)
    made, judge = networks()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.005) for m in (made, judge)]
    _, _, loader = job.prepare([made, judge], optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            both = job.step % 3 == 2
            optimizers[1].zero_grad()
            fake = made(x[:, :2])
            job.backward(judge(fake.detach()).mean() - judge(x).mean() + penalty_of(judge, x, fake.detach()), more=both)
            optimizers[1].step()
            if both:
                optimizers[0].zero_grad()
                job.backward(-judge(fake).mean())
                optimizers[0].step()
    return made, judge


class Codebook(nn.Module):
    """Vector quantisation whose codes are moving averages of what is assigned to them."""

    codes: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        start = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
        self.register_buffer("codes", start)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", start.clone())

    def forward(self, z: torch.Tensor) -> Any:
        chosen = one_hot(torch.cdist(z, self.codes).argmin(1), 6).float()
        found = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        return z + (found - z).detach(), mse_loss(z, found.detach())


@script(modes=("exact",))
def codes_that_are_moving_averages(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.ModuleDict({"encoder": nn.Linear(8, 4), "codebook": Codebook(), "decoder": nn.Linear(4, 8)})
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            found, commitment = model["codebook"](model["encoder"](x))
            job.backward(mse_loss(model["decoder"](found), x) + 0.25 * commitment)
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(modes=("exact",))
def translation_with_teacher_forcing(**init: Any) -> Any:
    """A coin of Python's own `random` decides in each time step whether the decoder reads the target or itself."""
    job = elastic_runtime.init(**init)
    model = nn.ModuleDict({"in": nn.Embedding(11, 8), "encoder": nn.GRU(8, 8, batch_first=True)})
    model.update({"decoder": nn.GRUCell(8, 8), "out": nn.Linear(8, 11)})
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), texts())
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            _, hidden = model["encoder"](model["in"](batch[:, :5]))
            hidden, token, loss = hidden[0], batch[:, 4], torch.zeros(())
            for target in batch[:, 5:].unbind(1):
                hidden = model["decoder"](model["in"](token), hidden)
                scores = model["out"](hidden)
                loss = loss + cross_entropy(scores, target)
                token = target if random.random() < 0.5 else scores.argmax(1)
            job.backward(loss / 4)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def episode(policy: nn.Module, seed: int) -> tuple[torch.Tensor, list[float]]:
    """Return the log-probabilities of the actions, and the rewards, until the walk ends; the seed is the episode's."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.zeros(4)
    chances: list[torch.Tensor] = []
    rewards: list[float] = []
    while len(rewards) < 12 and float(place.abs().max()) < 1.5:
        log_chance = policy(place).log_softmax(0)
        action = int(torch.multinomial(log_chance.detach().exp(), 1, generator=generator))
        place = place + 0.5 * torch.randn(4, generator=generator) + (0.2 if action else -0.2)
        chances.append(log_chance[action])
        rewards.append(1.0 - float(place.square().mean()))
    return torch.stack(chances), rewards


@script()
def policy_gradient_over_episodes_of_any_length(**init: Any) -> Any:
    """A sample is the seed of an episode; the loss is the mean over all actions of the global batch."""
    job = elastic_runtime.init(**init)
    policy, critic = nn.Linear(4, 2), nn.Linear(1, 1)
    seeds: Any = DataLoader(Samples(lambda g: torch.randint(0, 10**6, (), generator=g)), batch_size=GLOBAL_BATCH)
    optimizers = [torch.optim.Adam(policy.parameters(), lr=0.01), torch.optim.SGD(critic.parameters(), lr=0.01)]
    _, _, seeds = job.prepare([policy, critic], optimizers, seeds)
    for _epoch in job.epochs(EPOCHS):
        for batch in seeds:
            loss, actions = torch.zeros(()), 0
            for seed in batch.tolist():
                chances, rewards = episode(policy, seed)
                returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
                value = critic(torch.arange(len(rewards))[:, None] / 12)[:, 0]
                loss = loss - (chances * (returns - value.detach())).sum() + (returns - value).square().sum()
                actions += len(rewards)
            job.backward(loss / actions, weight=actions)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return policy, critic


@script()
def target_network_copied_every_few_steps(**init: Any) -> Any:
    """Deep Q-learning from a fixed set of transitions."""
    job = elastic_runtime.init(**init)
    values, target = nn.Linear(8, 3), nn.Linear(8, 3)
    target.load_state_dict(values.state_dict())
    values, optimizer, loader = job.prepare(values, torch.optim.RMSprop(values.parameters(), lr=0.005), vectors())
    job.track(target=target)
    for _epoch in job.epochs(EPOCHS):
        for x, action in loader:
            with torch.no_grad():
                goal = x[:, 0] + 0.9 * target(x.roll(1, 1)).amax(1)
            job.backward(nn.functional.smooth_l1_loss(values(x).gather(1, action[:, None])[:, 0], goal))
            optimizer.step()
            optimizer.zero_grad()
            if job.applied and job.step % 4 == 3:
                target.load_state_dict(values.state_dict())
    return values, target


@script()
def meta_learning_of_second_order(**init: Any) -> Any:
    """The inner step is differentiated through, for each sample as a task of its own."""
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            losses = []
            for points, slope in zip(x, y.float(), strict=True):
                inputs, targets = points[:, None], slope * points[:, None]
                weights = dict(model.named_parameters())
                inner = mse_loss(functional_call(model, weights, (inputs[:4],)), targets[:4])
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
                losses.append(mse_loss(functional_call(model, adapted, (inputs[4:],)), targets[4:]))
            job.backward(torch.stack(losses).mean())
            optimizer.step()
            optimizer.zero_grad()
    return model
