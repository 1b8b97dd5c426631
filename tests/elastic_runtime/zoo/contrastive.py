"""Losses that compare all samples of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import elastic_runtime
from tests.elastic_runtime.zoo.parts import EPOCHS, script, vectors


def pair_of_towers(*, global_batch_size: int = 12, max_batch_per_gpu: int | None = None, **init: Any) -> Any:
    """Two encoders of two halves of each sample, and a temperature that is learned."""
    job = elastic_runtime.init(global_batch_size=global_batch_size, max_batch_per_gpu=max_batch_per_gpu, **init)
    towers = nn.ModuleList([nn.Linear(4, 6), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))])
    scale = nn.Parameter(torch.tensor(1.0))
    towers.register_parameter("scale", scale)
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1, momentum=0.9)
    towers, optimizer, loader = job.prepare(towers, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _ in loader:
            images, texts = normalize(towers[0](x[:, :4])), normalize(towers[1](x[:, 4:]))
            all_images, all_texts = job.gather_batch(images), job.gather_batch(texts)
            own = torch.arange(job.batch_start, job.batch_start + len(x))
            by_image = cross_entropy(scale.exp() * images @ all_texts.T, own)
            by_text = cross_entropy(scale.exp() * texts @ all_images.T, own)
            job.backward((by_image + by_text) / 2)
            optimizer.step()
            optimizer.zero_grad()
    return towers


@script(modes=("fast",))
def language_image_pairs_over_the_whole_batch(**init: Any) -> Any:
    return pair_of_towers(**init)


@script(refused="job.gather_batch needs a worker's whole share of a step in one iteration", modes=("fast",))
def whole_batch_in_pieces(**init: Any) -> Any:
    return pair_of_towers(max_batch_per_gpu=4, **init)


@script(refused="job.gather_batch needs reduction='fast'", modes=("exact",))
def whole_batch_in_shards(**init: Any) -> Any:
    return pair_of_towers(**init)


@script(modes=("fast",))
def supervised_contrast_of_labels(**init: Any) -> Any:
    """Rows of integers are gathered as well."""
    job = elastic_runtime.init(global_batch_size=12, **init)
    model = nn.Linear(8, 4)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            rows = normalize(model(x))
            others, labels = job.gather_batch(rows), job.gather_batch(y)
            alike = (y[:, None] == labels[None, :]).float()
            alike[torch.arange(len(x)), job.batch_start + torch.arange(len(x))] = 0
            likelihood = torch.log_softmax(rows @ others.T, dim=1)
            job.backward(-((likelihood * alike).sum(1) / alike.sum(1).clamp(min=1)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return model


class Prototypes(nn.Module):
    """An encoder, and a moving mean of what it makes of each class, to which the rows of a batch are compared."""

    means: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.register_buffer("means", torch.eye(3, 4))

    @torch.no_grad()
    def add(self, rows: torch.Tensor, labels: torch.Tensor) -> None:
        sums = torch.zeros_like(self.means).index_add_(0, labels, rows)
        count = torch.bincount(labels, minlength=3).clamp(min=1)
        self.means.lerp_(sums / count[:, None], 0.2)


@script(modes=("fast",))
def prototypes_of_the_whole_batch(**init: Any) -> Any:
    """A buffer that is filled from samples: those of all workers."""
    job = elastic_runtime.init(**init)
    model = Prototypes()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            rows = normalize(model.encoder(x))
            loss = cross_entropy(rows @ model.means.clone().T, y)
            model.add(job.gather_batch(rows.detach()), job.gather_batch(y))
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model
