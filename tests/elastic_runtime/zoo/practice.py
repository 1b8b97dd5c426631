"""What training scripts do around their models: adapters, experts, parametrizations, schedules, validation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.zoo.parts import EPOCHS, script, vector, vectors


class Adapter(nn.Module):
    """A frozen layer with a trained update of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T


@script()
def low_rank_adapters_beside_a_frozen_base(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(Adapter(nn.Linear(8, 8)), nn.Tanh(), Adapter(nn.Linear(8, 3)))
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, loader = job.prepare(model, torch.optim.AdamW(trained, lr=0.02), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


class Experts(nn.Module):
    """Each sample goes to one of six experts; those that no sample chose have no gradients in that step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        chance, chosen = self.router(x).softmax(1).max(1)
        found = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                found = found.index_add(0, rows, chance[rows, None] * expert(x[rows]))
        return found


@script()
def experts_of_which_some_are_unused(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
    return model


@script()
def tasks_with_an_optimizer_each(**init: Any) -> Any:
    """A trunk and two heads; how much each task counts is learned as well."""
    job = elastic_runtime.init(**init)
    trunk, heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 1)])
    doubts = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
    optimizers = [torch.optim.Adam(trunk.parameters(), lr=0.01)]
    optimizers += [torch.optim.Adam([*head.parameters(), d], lr=0.02) for head, d in zip(heads, doubts, strict=True)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in optimizers]
    _, _, loader, _ = job.prepare([trunk, heads, doubts], optimizers, vectors(), schedulers)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            found = trunk(x).relu()
            losses = cross_entropy(heads[0](found), y), mse_loss(heads[1](found)[:, 0], x.sum(1))
            total = sum((-doubt).exp() * loss + doubt for loss, doubt in zip(losses, doubts, strict=True))
            job.backward(total)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return trunk, heads, doubts


@script()
def spectral_and_weight_normalisation(**init: Any) -> Any:
    """Parametrizations: the weight is computed again from others, and spectral_norm moves buffers in each forward."""
    job = elastic_runtime.init(**init)
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 3)))
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def one_cycle_of_rate_and_momentum(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    loader: Any = vectors()
    steps = EPOCHS * job.steps_per_epoch(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, loader, scheduler)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


@script()
def warm_restarts_by_parts_of_an_epoch(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1, 2)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, vectors(), scheduler)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step((job.step + 1) / len(loader))
    return model


class Patience:
    """Stops where the loss has not improved by a tenth for three epochs."""

    def __init__(self) -> None:
        self.best, self.bad = float("inf"), 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def over(self, loss: float) -> bool:
        better = loss < 0.9 * self.best
        self.best, self.bad = (loss, 0) if better else (self.best, self.bad + 1)
        return self.bad == 3


def validated(model: nn.Module) -> float:
    """The loss over fixed samples, which every worker computes by itself."""
    held_out = [vector(torch.Generator().manual_seed(seed)) for seed in range(500, 520)]
    loader: Any = DataLoader(held_out, batch_size=10)  # type: ignore[arg-type]
    model.eval()
    with torch.no_grad():
        total = sum(float(cross_entropy(model(x), y)) for x, y in loader)
    model.train()
    return total / len(loader)


@script()
def early_stopping_on_a_validation_loss(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), vectors())
    patience = Patience()
    job.track(patience=patience)
    for _epoch in job.epochs(100):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if patience.over(validated(model)):
            break
    return model


@script()
def validation_in_the_middle_of_an_epoch(**init: Any) -> Any:
    """Its loss lowers the rate, which is the same on all workers as they all compute the whole of it."""
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, vectors(), scheduler)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if job.applied and job.step % 3 == 2:
                scheduler.step(validated(model))
    return model


class Shadow:
    """Averaged parameters kept by name, as many scripts write them by hand."""

    def __init__(self, model: nn.Module) -> None:
        self._values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = dict(state)

    def update_parameters(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self._values[name].lerp_(parameter.detach(), 0.1)

    def copy_to(self, model: nn.Module) -> None:
        model.load_state_dict(self._values)


@script()
def averages_by_hand_and_clipping_by_value(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2), vectors())
    shadow = Shadow(model)
    job.track(shadow=shadow)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            if job.applied:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            shadow.update_parameters(model)
            optimizer.zero_grad()
    shadow.copy_to(model)
    return model


@script()
def compiled_model(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model: Any = torch.compile(plain, backend="eager", dynamic=True)
    model, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return plain


@script()
def segments_computed_again_by_reentrant_checkpoints(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            found = checkpoint_sequential(model, 2, x.requires_grad_(), use_reentrant=True)  # type: ignore[no-untyped-call]
            job.backward(cross_entropy(found, y))
            optimizer.step()
            optimizer.zero_grad()
    return model


class Lion(torch.optim.Optimizer):
    """An optimizer of the script's own, which makes its state in its first step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - 0.1 * group["lr"]).add_(torch.tanh(50 * average.lerp(p.grad, 0.1)), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


@script()
def optimizer_of_the_scripts_own(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, Lion(model.parameters(), lr=0.01), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(modes=("exact",))
def samples_mixed_with_each_other(**init: Any) -> Any:
    """Mixes each sample with another one of its micro-batch, by a share that is drawn for it."""
    job = elastic_runtime.init(shards=4, **init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            share = float(torch.distributions.Beta(0.4, 0.4).sample())
            order = torch.randperm(len(x))
            found = model(share * x + (1 - share) * x[order])
            job.backward(share * cross_entropy(found, y) + (1 - share) * cross_entropy(found, y[order]))
            optimizer.step()
            optimizer.zero_grad()
    return model


class Momentum(nn.Module):
    """An encoder, a slow copy of it, and a queue of the keys of former batches."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(requires_grad=False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", normalize(torch.randn(24, 4, generator=torch.Generator().manual_seed(7))))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1


def contrast(job: Any, model: Any, x: torch.Tensor) -> Any:
    query = normalize(model.query(x))
    with torch.no_grad():
        key = normalize(model.key(0.9 * x + 0.1))
    likely = torch.cat([(query * key).sum(1, keepdim=True), query @ model.queue.clone().T], 1)
    model.queue = torch.cat([job.gather_batch(key), model.queue])[:24]
    return cross_entropy(likely / 0.5, torch.zeros(len(x), dtype=torch.long))


@script(modes=("fast",))
def momentum_contrast_with_a_queue(**init: Any) -> Any:
    """The slow encoder moves after the step; the queue gets the keys of the whole batch."""
    job = elastic_runtime.init(**init)
    model = Momentum()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            job.backward(contrast(job, model, x))
            optimizer.step()
            optimizer.zero_grad()
            if job.applied:
                model.follow()
    return model


@script(refused="before job.backward", modes=("fast",))
def slow_encoder_moved_before_the_backward_pass(**init: Any) -> Any:
    """A step that is repeated after a loss would move it twice."""
    job = elastic_runtime.init(**init)
    model = Momentum()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            model.follow()
            job.backward(contrast(job, model, x))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(refused="without job.backward")
def gradients_of_each_sample_by_hand(**init: Any) -> Any:
    """Differentially private training computes and clips them by itself, and sets `grad`."""
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(values: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, x, y)
            for name, parameter in model.named_parameters():
                parameter.grad = each[name].clamp(-0.1, 0.1).mean(0)
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(refused="were not cleared before parameter")
def gradients_that_are_never_cleared(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.Linear(8, 3)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
    return model


@script(refused="were not cleared before parameter")
def second_optimizer_that_adds_up_three_steps(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    body, head = nn.Linear(8, 8), nn.Linear(8, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (body, head)]
    _, _, loader = job.prepare([body, head], optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(head(body(x).tanh()), y))
            optimizers[1].step()
            optimizers[1].zero_grad()
            if job.step % 3 == 2:
                optimizers[0].step()
                optimizers[0].zero_grad()
    return body, head


@script()
def unused_experts_whose_gradients_are_zeros(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=False)
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
    return model


class Interactions(nn.Module):
    """A recommender's: tables with sparse gradients, of which a step uses some rows, beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.tags = nn.Embedding(30, 4, sparse=True), nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.head = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        places = (x * 10).long().abs()
        return self.head(torch.cat([self.items(places[:, 0] % 30), self.tags(places[:, 1:4] % 20), x], 1))


@script(modes=("fast",))
def tables_with_sparse_gradients(**init: Any) -> Any:
    """SparseAdam for the tables, which acts on the rows of the global batch only, and Adam for the rest."""
    job = elastic_runtime.init(**init)
    model = Interactions()
    optimizers = [
        torch.optim.SparseAdam([*model.items.parameters(), *model.tags.parameters()], lr=0.05),
        torch.optim.Adam(model.head.parameters(), lr=0.02),
    ]
    model, _, loader = job.prepare(model, optimizers, vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            job.backward(loss)
            gradient = model.items.weight.grad
            assert gradient is None or gradient.is_sparse, "as scripts that log its rows expect"
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert job.mean(loss.detach()) > 0  # also in an iteration in which a worker is lost
    return model


@script(modes=("fast",))
def word_vectors_of_sparse_gradients_only(**init: Any) -> Any:
    """No parameter is dense; gradients are zeroed and not removed."""
    job = elastic_runtime.init(**init)
    model = nn.ModuleList([nn.Embedding(30, 4, sparse=True) for _ in range(2)])
    model, optimizer, loader = job.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.3), vectors())
    for _epoch in job.epochs(EPOCHS):
        for x, _y in loader:
            center, other = ((x[:, at] * 10).long().abs() % 30 for at in (0, 1))
            job.backward(-nn.functional.logsigmoid((model[0](center) * model[1](other)).sum(1)).mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return model
