"""A training with much of what trainings have at once: for tests of real processes.

Two models, one of them compiled, with an optimizer each; averaged weights; a frozen layer, a parameter that is never
used, and one that only some samples use; GradScaler; buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.training import FEATURES, Points

if TYPE_CHECKING:
    from pathlib import Path

    from tests.elastic_runtime.training import Gate, Plan


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(24, 3), nn.Linear(24, 3)
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> Any:
        found = self.always(x)
        chosen = indices % 50 == 0
        return found + self.seldom(x) * chosen[:, None] if bool(chosen.any()) else found


def train_zoo(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, max_batch_per_gpu=plan.max_batch, **plan.options)
    encoder: Any = nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, 24))
    encoder[0].requires_grad_(False)  # noqa: FBT003
    head = Head()
    optimizers = [
        torch.optim.AdamW(encoder[2].parameters(), lr=0.01),
        torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9),
    ]
    encoder = torch.compile(encoder, backend=plan.compiled, dynamic=True) if plan.compiled else encoder
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    loader = DataLoader(Points(plan.samples), batch_size=8, shuffle=True)
    _, _, elastic_loader = job.prepare([encoder, head], optimizers, loader, scaler=scaler)
    average = AveragedModel(head)
    job.track(average=average)
    for _epoch in job.epochs(plan.epochs):
        for x, y, indices in elastic_loader:
            if gate:
                gate.pass_through(index, job.step)
            job.backward(nn.functional.cross_entropy(head(encoder(x), indices), y))
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            average.update_parameters(head)
            for optimizer in optimizers:
                optimizer.zero_grad()
    plain = getattr(encoder, "_orig_mod", encoder)
    parts = [("encoder", plain), ("head", head), ("average", average)]
    found = {f"{name}.{key}": value for name, part in parts for key, value in part.state_dict().items()}
    final = {"model": found, "step": job.step, "scale": scaler.get_scale(), "rank": job.rank}
    torch.save(final, directory / f"final-{index}.pt")
