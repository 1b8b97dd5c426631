"""Scripts that went wrong once: each is right now, or is refused by name."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import prune as untyped_prune
from torch.utils.data import DataLoader, RandomSampler

import elastic_runtime
from tests.elastic_runtime.zoo.classic import quasi_newton_steps, sharpness_aware
from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, Samples, script, vector, vectors

prune: Any = untyped_prune


def trained(job: Any, model: Any, optimizer: Any, loader: Any, after: Any = None) -> None:
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            if after:
                after()
            optimizer.zero_grad()


def prepared(init: dict[str, Any], model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """(job, model, optimizer, loader)."""
    job = elastic_runtime.init(**init, **options)
    model = model or nn.Linear(8, 3)
    return (job, *job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), vectors()))


# Right


@script()
def weights_pruned_by_a_mask_made_before(**init: Any) -> Any:
    model = nn.Linear(8, 3)
    prune.identity(model, "weight")
    job, model, optimizer, loader = prepared(init, model)
    for epoch in job.epochs(EPOCHS):
        if epoch == 2:
            prune.l1_unstructured(model, "weight", amount=0.3)
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def scheduler_that_was_not_given(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trained(job, model, optimizer, loader, lambda: scheduler.step())  # noqa: PLW0108  (bound before the loop it would not be guarded)
    return model


@script()
def scheduler_made_of_others_that_was_not_given(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6)]
    parts.append(torch.optim.lr_scheduler.StepLR(optimizer, 5))  # type: ignore[arg-type]
    chained = torch.optim.lr_scheduler.ChainedScheduler(parts)
    trained(job, model, optimizer, loader, lambda: chained.step())  # noqa: PLW0108  (the same)
    return model


class Tracker(nn.Module):
    """Counts and averages in buffers that it assigns again, of all kinds."""

    steps: torch.Tensor
    seen: torch.Tensor
    phase: torch.Tensor
    size: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("phase", torch.ones((), dtype=torch.complex64))
        self.register_buffer("size", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.linear(x) * self.size / self.phase.abs()
        if self.training:
            self.steps = self.steps + 1
            self.seen = torch.roll(self.seen, 1) ^ torch.tensor([True, False, False, False])
            self.phase = self.phase * torch.tensor(1j)
            self.size = self.size * 0.99
        return found


@script()
def buffers_that_are_assigned_anew(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init, Tracker())
    trained(job, model, optimizer, loader)
    return model


@script()
def gradient_norm_read_in_every_iteration(**init: Any) -> Any:
    """After a loss the repeated iteration has gradients of zeros, and not none."""
    options: dict[str, Any] = {"shards": 1} if init["reduction"] == "exact" else {}
    job, model, optimizer, loader = prepared(init, **options)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            norm = sum(float(p.grad.norm()) ** 2 for p in model.parameters()) ** 0.5
            assert norm >= 0
            optimizer.step()
            optimizer.zero_grad()
    return model


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.filter = nn.Parameter(torch.ones(5, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> Any:
        return (torch.fft.rfft(x) @ self.filter).abs() + self.bias


@script()
def complex_parameters(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init, Spectrum())
    trained(job, model, optimizer, loader)
    return model


@script()
def layers_added_to_the_optimizer_in_training(**init: Any) -> Any:
    body = nn.Linear(8, 8)
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(8, 3))
    body.requires_grad_(requires_grad=False)
    job = elastic_runtime.init(**init)
    optimizer: Any = torch.optim.Adam(model[2].parameters(), lr=0.05)
    _, optimizer, loader = job.prepare(model, optimizer, vectors())
    for epoch in job.epochs(EPOCHS):
        if epoch >= 1 and len(optimizer.param_groups) == 1:
            body.requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.01})
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def scheduler_and_average_are_pickled(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    _, _, loader, _ = job.prepare(model, optimizer, vectors(), scheduler)
    average = torch.optim.swa_utils.AveragedModel(model)
    job.track(average=average)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            average.update_parameters(model)
            scheduler.step()
            optimizer.zero_grad()
        torch.save({"average": average}, io.BytesIO())
    return average


@script()
def loader_asked_for_its_settings(**init: Any) -> Any:
    job, model, optimizer, loader = prepared(init)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (GLOBAL_BATCH, 0, False)
    assert len(loader.sampler) == len(loader.dataset)
    trained(job, model, optimizer, loader)
    return model


@script()
def samples_without_an_end(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    data = Samples(vector)
    loader = DataLoader(
        data, batch_size=GLOBAL_BATCH, sampler=RandomSampler(data, replacement=True, num_samples=10**10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer, loader)
    for x, y in job.steps(20):
        job.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return model


@script(modes=("fast",))
def half_precision_parameters_with_small_gradients(**init: Any) -> Any:
    """Scaled down before the backward pass, the gradients of a share would be below what float16 holds."""
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 1, bias=False).half()
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
    _, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            small = (x.sign() * 1e-6).half()
            job.backward(model(small).float().sum(1).mean())
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(first_step=8)
def checkpoint_of_its_own(**init: Any) -> Any:
    """Begins after the second epoch of a run before it, at every size."""
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict({"weight": torch.full((3, 8), 0.1), "bias": torch.zeros(3)})
    _, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS + 2, start=2):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


# Refused, alone and at once


@script(refused="neither applied nor cleared")
def accumulates_by_itself(**init: Any) -> None:
    job, model, optimizer, loader = prepared(init)
    for _epoch in job.epochs(EPOCHS):
        for i, (x, y) in enumerate(loader):
            job.backward(cross_entropy(model(x), y))
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


@script(refused="neither applied nor cleared", modes=("fast",))
def accumulates_by_itself_over_micro_batches(**init: Any) -> None:
    """The optimizer was asked where no step is complete, so nothing was trained."""
    job, model, optimizer, loader = prepared(init, max_batch_per_gpu=3)
    for _epoch in job.epochs(EPOCHS):
        for i, (x, y) in enumerate(loader):
            job.backward(cross_entropy(model(x), y))
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


@script(refused="GradScaler was not given to prepare", modes=("fast",))
def scaler_that_was_not_given(**init: Any) -> None:
    job, model, optimizer, loader = prepared(init)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(scaler.scale(cross_entropy(model(x), y)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@script(refused=r"loss\.backward\(\) beside job\.backward")
def backward_of_its_own(**init: Any) -> None:
    job, model, optimizer, loader = prepared(init)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            (0.1 * mse_loss(model(x), torch.zeros(len(x), 3))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


@script(refused="change the learning rate of one SGD")
def two_schedulers_that_were_not_given(**init: Any) -> None:
    job, model, optimizer, loader = prepared(init)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3), torch.optim.lr_scheduler.ConstantLR(optimizer)]
    for each in schedulers:
        assert each.optimizer is optimizer
    trained(job, model, optimizer, loader)


@script(refused="stands alone in an iteration")
def closure_of_the_optimizer(**init: Any) -> None:
    job, model, optimizer, loader = prepared(init)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step(partial(model, x))


@script(refused="optimizer.step\\(closure\\) needs reduction='fast' .* needs no closure", modes=("exact",))
def quasi_newton_in_shards(**init: Any) -> None:
    quasi_newton_steps(**init)


@script(refused="more=True\\) needs reduction='fast' .* add the losses up", modes=("exact",))
def sharpness_aware_in_shards(**init: Any) -> None:
    sharpness_aware(init, always=False)


def adversarial_networks(init: dict[str, Any], *, more: bool) -> Any:
    """Two networks, two optimizers, two losses in an iteration."""
    job = elastic_runtime.init(**init)
    made, judge = nn.Linear(2, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (made, judge)]
    _, _, loader = job.prepare([made, judge], optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            optimizers[1].zero_grad()
            job.backward(judge(made(x[:, :2]).detach()).mean() - judge(x).mean(), more=more)
            optimizers[1].step()
            optimizers[0].zero_grad()
            job.backward(-judge(made(x[:, :2])).mean())
            optimizers[0].step()
    return made, judge


@script(refused="called twice in one iteration; .* pass more=True to all calls but the last")
def adversarial_networks_with_two_backward_passes(**init: Any) -> None:
    adversarial_networks(init, more=False)


@script(refused="more=True\\) needs reduction='fast' .* add the losses up", modes=("exact",))
def adversarial_networks_in_shards(**init: Any) -> None:
    adversarial_networks(init, more=True)


@script()
def adversarial_networks_that_step_together(**init: Any) -> Any:
    """Both losses in one backward pass: each network's gradients are those of its own loss."""
    job = elastic_runtime.init(**init)
    made, judge = nn.Linear(2, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (made, judge)]
    _, _, loader = job.prepare([made, judge], optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            fake = made(x[:, :2])
            frozen = {name: value.detach() for name, value in judge.named_parameters()}
            of_judge = judge(fake.detach()).mean() - judge(x).mean()
            job.backward(of_judge - torch.func.functional_call(judge, frozen, (fake,)).mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return made, judge


@script(refused="gave one batch in each of several iterations")
def second_loader_that_was_not_given(**init: Any) -> None:
    job, model, optimizer, loader = prepared(init)
    second = DataLoader(Samples(vector), batch_size=GLOBAL_BATCH)
    for _epoch in job.epochs(EPOCHS):
        for (x, y), (u, _) in zip(loader, second, strict=False):
            job.backward(cross_entropy(model(x), y) + model(u).square().mean())
            optimizer.step()
            optimizer.zero_grad()


@script(refused="got the name 'weight_orig' after prepare")
def weights_pruned_in_the_third_epoch(**init: Any) -> None:
    """Its checkpoints would be of another model than the one that a restart builds."""
    job, model, optimizer, loader = prepared(init)
    for epoch in job.epochs(EPOCHS):
        if epoch == 2:
            prune.l1_unstructured(model, "weight", amount=0.3)
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


@script(refused="SyncBatchNorm layers, which are not supported with reduction='exact'", modes=("exact",))
def synchronised_normalisation_in_shards(**init: Any) -> None:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())


@script(refused="SyncBatchNorm needs a worker's whole share of a step in one iteration", modes=("fast",))
def synchronised_normalisation_in_pieces(**init: Any) -> None:
    job, model, optimizer, loader = prepared(
        init, nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8)), max_batch_per_gpu=4
    )
    trained(job, model, optimizer, loader)


@script(refused="LazyLinear")
def lazy_layers(**init: Any) -> None:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.LazyLinear(3))
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())


@script(refused="where something fetches a batch ahead")
def batches_fetched_ahead(**init: Any) -> None:
    """As prefetchers do that copy the next batch to a GPU while this one is computed."""
    job, model, optimizer, loader = prepared(init)
    for _epoch in job.epochs(EPOCHS):
        batches = iter(loader)
        following = next(batches, None)
        while following is not None:
            x, y = following
            following = next(batches, None)
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


@script(refused="leaves a batch out by `continue`")
def batches_left_out(**init: Any) -> None:
    job, model, optimizer, loader = prepared(init)
    for _epoch in job.epochs(EPOCHS):
        for i, (x, y) in enumerate(loader):
            if i == 2:
                continue
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


class _FabricModule(nn.Module):
    """As Lightning Fabric's `setup` returns it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@script(refused="Lightning Fabric")
def model_set_up_by_fabric(**init: Any) -> None:
    prepared(init, _FabricModule(nn.Linear(8, 3)))
