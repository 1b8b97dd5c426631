"""Supervised training: classifiers, autoencoders, regression, self-supervision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, Samples, image, images, script, vector, vectors


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def fit(job: Any, model: nn.Module, optimizer: Any, loader: Any, loss_of: Any) -> None:
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            job.backward(loss_of(*batch))
            optimizer.step()


@script()
def perceptron(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = mlp()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), vectors())
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model(x), y))
    return model


@script()
def digits_with_dropout_off_and_step_schedule(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, images(), scheduler)
    for _epoch in job.epochs(EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            job.backward(nn.functional.nll_loss(model(x).log_softmax(1), y))
            optimizer.step()
        scheduler.step()
        model.eval()
    return model


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.second(torch.relu(self.norm(self.first(x))))


@script()
def residual_network_with_cosine_per_step(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, images(), scheduler)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y, label_smoothing=0.1))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


@script(modes=("exact",))
def batch_norm_network(**init: Any) -> Any:
    """With "fast" each worker normalises over its own part of a batch, which is another computation at each size."""
    job = elastic_runtime.init(shards=4, **init)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), images())
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model(x), y))
    return model


@script(modes=("exact",))
def dropout_network(**init: Any) -> Any:
    """With "fast" dropout draws from each worker's own stream."""
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), vectors())
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model(x), y))
    return model


@script(modes=("exact",))
def variational_autoencoder(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "decoder": nn.Linear(4, 8)})
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), vectors())

    def loss_of(x: torch.Tensor, _y: torch.Tensor) -> Any:
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return mse_loss(model["decoder"](z), x) + 0.01 * divergence

    fit(job, model, optimizer, loader, loss_of)
    return model


@script()
def regression_by_micro_batches(**init: Any) -> Any:
    job = elastic_runtime.init(
        global_batch_size=12, max_batch_per_gpu=None if init["reduction"] == "exact" else 4, **init
    )
    model = nn.Linear(8, 1)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), vectors())
    fit(job, model, optimizer, loader, lambda x, y: mse_loss(model(x)[:, 0], y.float()))
    return model


@script()
def siamese_pairs(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 4)
    data = Samples(lambda g: (torch.randn(8, generator=g), torch.randn(8, generator=g), torch.rand((), generator=g)))
    loader: Any = DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=True)
    model, optimizer, loader = job.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.05), loader)
    fit(job, model, optimizer, loader, lambda a, b, t: mse_loss((normalize(model(a)) * normalize(model(b))).sum(1), t))
    return model


@script()
def distillation_from_a_frozen_teacher(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    teacher, student = mlp().eval().requires_grad_(requires_grad=False), nn.Linear(8, 3)
    student, optimizer, loader = job.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1), vectors())

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        log_chosen = student(x).log_softmax(1)
        soft = nn.functional.kl_div(log_chosen, teacher(x).softmax(1), reduction="batchmean")
        return soft + nn.functional.nll_loss(log_chosen, y)

    fit(job, student, optimizer, loader, loss_of)
    return student


@script()
def averaged_teacher(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = mlp()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    teacher = AveragedModel(model, avg_fn=lambda old, new, _count: 0.9 * old + 0.1 * new)
    job.track(teacher=teacher)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            with torch.no_grad():
                goal = teacher(x)
            job.backward(cross_entropy(model(x), y) + mse_loss(model(x), goal))
            optimizer.step()
            teacher.update_parameters(model)
            optimizer.zero_grad()
    return model, teacher


@script()
def weights_averaged_and_normalised_after_the_training(**init: Any) -> Any:
    """`update_bn` reads the prepared loader once more when the training is over."""
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    average = AveragedModel(model)
    job.track(average=average)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
    update_bn(loader, average)
    return average


@script()
def fine_tuning_with_two_rates(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.ModuleDict({"backbone": nn.Linear(8, 8), "head": nn.Linear(8, 3)})
    groups = [{"params": model["backbone"].parameters(), "lr": 0.01}, {"params": model["head"].parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-4)
    model, optimizer, loader = job.prepare(model, optimizer, vectors())
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model["head"](model["backbone"](x).tanh()), y))
    return model


@script()
def super_resolution(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2))
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), images())
    fit(job, model, optimizer, loader, lambda x, _y: mse_loss(model(nn.functional.avg_pool2d(x, 2)), x))
    return model


@script()
def segmentation_over_pixels_that_count(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Conv2d(3, 2, 3, padding=1)
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), images())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            target = (x[:, 0] > 0).long().masked_fill(x[:, 1] > 1, -100)
            counted = float((target >= 0).sum())
            job.backward(cross_entropy(model(x), target, ignore_index=-100), weight=counted)
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def adversarial_inputs(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = mlp()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy(model(x), y, reduction="sum"), x)
        return cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)

    fit(job, model, optimizer, loader, loss_of)
    return model


@script()
def gradient_penalty(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), vectors())

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return cross_entropy(out, y) + 0.1 * slope.square().sum(1).mean()

    fit(job, model, optimizer, loader, loss_of)
    return model


@script()
def meta_copy_in_the_loop(**init: Any) -> Any:
    """A copy of the model takes a step of its own by hand, as first-order meta-learning does."""
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    inner = copy.deepcopy(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        inner.load_state_dict(model.state_dict())
        penalty = (model.weight - inner.weight.detach() * 0.9).square().sum()
        return cross_entropy(model(x), y) + 0.01 * penalty

    fit(job, model, optimizer, loader, loss_of)
    return model


@script()
def steps_instead_of_epochs(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = mlp()
    model, optimizer, _loader = job.prepare(model, torch.optim.NAdam(model.parameters(), lr=0.01), vectors())
    for x, y in job.steps(20):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (job.step + 1) / 5)
        job.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return model


@script()
def pixels_moved_to_channels_last(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3)).to(
        memory_format=torch.channels_last
    )
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), images())
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model(x), y))
    return model


@script()
def samples_weighted_by_class(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = mlp()
    sampler = torch.utils.data.WeightedRandomSampler([1.0 + i % 3 for i in range(48)], 48)
    loader: Any = DataLoader(Samples(vector), batch_size=GLOBAL_BATCH, sampler=sampler)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model(x), y))
    return model


@script()
def images_in_order_of_size(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(48)), GLOBAL_BATCH, drop_last=True)
    loader: Any = DataLoader(Samples(image), batch_sampler=batches)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model(x), y))
    return model


@script()
def loop_of_global_steps(**init: Any) -> Any:
    """Counts and clips as a plain loop does, with micro-batches of a third of a step in it."""
    cut: dict[str, Any] = {} if init["reduction"] == "exact" else {"max_batch_per_gpu": 4}
    job = elastic_runtime.init(**cut, **init)
    model = mlp()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(EPOCHS):
        for step, micro_batches in job.global_steps(loader):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step % 4)
            for x, y in micro_batches:
                job.backward(cross_entropy(model(x), y))
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return model


def sharpness_aware(init: dict[str, Any], *, always: bool) -> Any:
    """The second pass is computed with parameters moved along the gradients of the first one. `always`: they are moved
    back even where the second pass was lost with a worker, and the step is going to be repeated.
    """
    job = elastic_runtime.init(**init)
    model = mlp()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y), more=True)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            move(model, moves, 1.0)
            optimizer.zero_grad()
            job.backward(cross_entropy(model(x), y))
            if job.applied or always:
                move(model, moves, -1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


@torch.no_grad()
def move(model: nn.Module, moves: list[torch.Tensor], factor: float) -> None:
    for parameter, moved in zip(model.parameters(), moves, strict=True):
        parameter.add_(moved, alpha=factor)


@script(modes=("fast",))
def sharpness_aware_minimisation(**init: Any) -> Any:
    return sharpness_aware(init, always=False)


def quasi_newton_steps(line_search: str | None = None, **init: Any) -> Any:
    """LBFGS evaluates the loss and its gradients several times in each step, and amplifies rounding in float32."""
    job = elastic_runtime.init(**init)
    model = mlp().double()
    optimizer: Any = torch.optim.LBFGS(
        model.parameters(), lr=0.3, max_iter=4, history_size=5, line_search_fn=line_search
    )
    model, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
                optimizer.zero_grad()
                loss = cross_entropy(model(x.double()), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
                job.backward(loss)
                return loss

            optimizer.step(closure)
    return model


@script(modes=("fast",))
def quasi_newton(**init: Any) -> Any:
    return quasi_newton_steps(**init)


@script(modes=("fast",))
def quasi_newton_with_a_line_search(**init: Any) -> Any:
    return quasi_newton_steps("strong_wolfe", **init)


@script(modes=("fast",))
def normalisation_over_the_whole_batch(**init: Any) -> Any:
    """With one worker SyncBatchNorm is BatchNorm; its result is the same with more."""
    job = elastic_runtime.init(**init)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(plain)  # type: ignore[no-untyped-call]
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), images())
    fit(job, model, optimizer, loader, lambda x, y: cross_entropy(model(x), y))
    return model
