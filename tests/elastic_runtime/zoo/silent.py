"""Scripts that nothing refuses alone, and that would go wrong on a cluster: a rehearsal finds them."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, normalize
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Subset, random_split

import elastic_runtime
from tests.elastic_runtime.zoo.classic import sharpness_aware
from tests.elastic_runtime.zoo.defects import prepared, trained
from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, Samples, script, vector

if TYPE_CHECKING:
    from collections.abc import Callable


@script(rehearsed="a sum over the samples", modes=("fast",))
def loss_that_is_a_sum(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y, reduction="sum"))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


class Attending(nn.Module):
    """Has dropout as a layer, as a number, in attention and in a recurrent layer, and a batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
        self.recurrent = nn.GRU(16, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.dropout_prob, self.last = 0.1, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.first(x).reshape(-1, 4, 4).repeat(1, 1, 4)
        found = self.recurrent(self.attention(found, found, found)[0])[0].mean(1)
        return self.last(dropout(found, self.dropout_prob, self.training))


def _weights_of_classes(init: dict[str, Any], weight_of: Callable[[torch.Tensor], float | None]) -> Any:
    """Train beside dropout with a mean over weights of classes; `weight_of` the weights of a micro-batch is its own."""
    job, model, optimizer, loader = prepared(init, Attending())
    weights = torch.tensor([1.0, 1.15, 1.0])
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            model.train()
            job.backward(cross_entropy(model(x), y, weight=weights), weight=weight_of(weights[y]))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(rehearsed="depend on the number of workers", modes=("fast",))
def weights_of_classes_beside_dropout(**init: Any) -> Any:
    return _weights_of_classes(init, lambda _weights: None)


@script(modes=())
def weights_of_classes_counted_beside_dropout(**init: Any) -> Any:
    """Right, but no run equals another one: only a rehearsal judges it."""
    return _weights_of_classes(init, lambda weights: float(weights.sum()))


@script(rehearsed="depend on the number of workers", modes=("fast",))
def contrastive_loss_over_pairs_of_a_batch(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            found = normalize(model(x))
            others = normalize(model(x * 0.9 + 0.1))
            job.backward(cross_entropy(found @ others.T * 4, torch.arange(len(x))))
            optimizer.step()
            optimizer.zero_grad()
    return model


class Centred(nn.Module):
    """Keeps a running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.mean = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


@script(rehearsed=r"attributes that have changed meanwhile: mean")
def running_mean_that_is_no_buffer(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init, Centred())
    trained(job, model, optimizer, loader)
    return model


@script(rehearsed="an object of class AveragedModel")
def average_that_is_not_tracked(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    average = AveragedModel(model)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            average.update_parameters(model)
            optimizer.zero_grad()
    return average


@script(rehearsed="variables of the loop have other values on the worker that joined: kept")
def weights_of_the_best_epoch_in_a_variable(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    best, kept = float("inf"), None
    for epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if float(epoch % 3) < best:
            best, kept = float(epoch % 3), copy.deepcopy(model.state_dict())
    assert kept is not None
    model.load_state_dict(kept)
    return model


@script(rehearsed="Subset")
def split_without_a_seed(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    train, _test = random_split(Samples(vector), [36, 12])
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(train, batch_size=GLOBAL_BATCH, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    trained(job, model, optimizer, loader)
    return model


@script(refused="an initialisation from the first batch")
def bias_set_from_the_first_batch(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    begun = False
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            if not begun:
                begun = True
                with torch.no_grad():
                    model.bias.copy_(x.mean(0)[:3])
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(rehearsed="which had become rank 0.*UnboundLocalError")
def log_that_only_the_first_leader_has(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    for epoch in job.epochs(EPOCHS):
        if job.is_leader and epoch == 0 and job.step == 0:
            log: list[int] = []
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            if job.is_leader:
                log.append(job.step)
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(rehearsed="has other gradients than before")
def noise_of_a_generator_of_its_own(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    noise = torch.Generator().manual_seed(3)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x + 0.1 * torch.randn(x.shape, generator=noise)), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(rehearsed="'lr' of group 0 of SGD of rank 1 differs from rank 0's")
def rate_counted_by_the_loop(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    steps = 0
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            steps += 1
            optimizer.param_groups[0]["lr"] = 0.1 / steps
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(rehearsed="has other gradients than before", modes=("fast",))
def parameters_moved_back_though_the_step_was_lost(**init: Any) -> Any:
    return sharpness_aware(init, always=True)


@script(rehearsed="one training for each process")
def folds_in_one_process(**init: Any) -> Any:
    """Cross-validation: a job for each fold."""
    models = []
    data = Samples(vector)
    for fold in range(2):
        job = elastic_runtime.init(**init)
        torch.manual_seed(fold)
        model = nn.Linear(8, 3)
        chosen = Subset(data, [i for i in range(48) if i % 2 != fold])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(chosen, batch_size=GLOBAL_BATCH // 3, shuffle=True)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        for _epoch in job.epochs(1):
            for x, y in loader:
                job.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    return models


@script(rehearsed="ended without a step of the job", modes=("fast",))
def training_that_only_initialises(**init: Any) -> Any:
    """Each worker of a cluster would do all of it."""
    elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(Samples(vector), batch_size=GLOBAL_BATCH):
        loss: Any = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
