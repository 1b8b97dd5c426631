"""A training whose iterations have several backward passes, with an optimizer's step after each: a GAN."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.training import FEATURES, Points, Record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.elastic_runtime.training import Gate, Plan

judged = nn.functional.binary_cross_entropy_with_logits


def train_adversaries(
    plan: Plan, index: int, directory: Path, gate: Gate | None, *, dies: tuple[int, int, int] = (-1, -1, -1)
) -> None:
    """Critic, generator, and the critic once more on gradients that add up over the passes; all with a GradScaler.

    `dies`: (worker, step, after how many passes are applied).
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, max_batch_per_gpu=plan.max_batch, **plan.options)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, FEATURES))
    critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
    makes, judges = torch.optim.AdamW(generator.parameters(), lr=0.01), torch.optim.AdamW(critic.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(judges, step_size=7, gamma=0.9)
    loader = DataLoader(Points(plan.samples), batch_size=plan.loader_batch, shuffle=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    models = nn.ModuleDict({"generator": generator, "critic": critic})
    _, _, elastic_loader, _ = job.prepare(models, [makes, judges], loader, [scheduler], scaler=scaler)
    record = Record(job, index, directory, makes, dict)

    def applied(passes: int) -> None:
        if (index, job.step, passes) == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    for _epoch in job.epochs(plan.epochs):
        for x, _y, indices in elastic_loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            made = generator(torch.stack([torch.sin(indices * k) for k in range(1, 5)], dim=1))
            judges.zero_grad()
            real, fake = critic(x), critic(made.detach())
            job.backward(judged(real, torch.ones_like(real)) + judged(fake, torch.zeros_like(fake)), more=True)
            scaler.step(judges)
            applied(1)
            makes.zero_grad()
            fake = critic(made)
            job.backward(judged(fake, torch.ones_like(fake)), more=True)
            scaler.unscale_(makes)
            job.clip_grad_norm_(generator.parameters(), 5.0)
            scaler.step(makes)
            scaler.update()
            applied(2)
            job.backward(critic(x).square().mean())
            scaler.step(judges)
            scaler.update()
            scheduler.step()
    final: dict[str, Any] = {"model": models.state_dict(), "lr": scheduler.get_last_lr(), "step": job.step}
    torch.save(final, directory / f"final-{index}.pt")
