"""Without a cluster the same script runs alone; and what a script may get wrong is named."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import elastic_runtime
from elastic_runtime.errors import BatchPlanError, LoopError, SettingsError, UsageError
from tests.elastic_runtime.training import Plan, Points, build

DATA = Points(50)


def plain_loop(order: list[list[int]]) -> dict[str, torch.Tensor]:
    """The same training as written without any library, over given batches."""
    model, optimizer, scheduler = build(Plan())
    for indices in order:
        loss = nn.functional.cross_entropy(model(DATA.x[indices]), DATA.y[indices])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


def elastic_loop(max_batch: int | None) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    job = elastic_runtime.init(global_batch_size=8, max_batch_per_gpu=max_batch)
    model, optimizer, scheduler = build(Plan())
    given = model, optimizer
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, loader, scheduler)
    assert (model, optimizer) == given
    batches: dict[int, list[int]] = {}
    for _epoch in job.epochs(2):
        for x, y, indices in loader:
            optimizer.zero_grad()  # before the backward pass, as many write it
            batches.setdefault(job.step, []).extend(indices.tolist())
            job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
    return model.state_dict(), list(batches.values())


def test_alone_it_trains_what_a_plain_loop_trains_to_the_bit() -> None:
    state, batches = elastic_loop(None)
    assert sorted(i for batch in batches[:7] for i in batch) == list(range(50))
    for name, value in plain_loop(batches).items():
        assert torch.equal(value, state[name])


def train_for_a_while(how: str) -> tuple[weakref.ref[nn.Module], weakref.ref[torch.optim.Optimizer]]:
    job = elastic_runtime.init(global_batch_size=8)
    model, optimizer, _ = build(Plan())
    loader = DataLoader(DATA, batch_size=8)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    held = weakref.ref(model), weakref.ref(optimizer)
    for _epoch in job.epochs(1):
        for x, y, _indices in loader:
            job.backward(nn.functional.cross_entropy(model(x), y))
            if how == "break":
                return held
            if how == "interrupted":
                with contextlib.suppress(KeyboardInterrupt):
                    raise KeyboardInterrupt
                return held
            optimizer.step()
            optimizer.zero_grad()
    return held


@pytest.mark.parametrize("how", ["whole", "break", "interrupted"])
def test_the_memory_of_a_training_that_the_script_dropped_is_free(how: str) -> None:
    held = train_for_a_while(how)
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.int16), torch.zeros(2, dtype=torch.bool), torch.zeros(2).to_sparse()]
)
def test_a_tensor_that_cannot_be_summed_over_workers_is_refused_alone_already(tensor: torch.Tensor) -> None:
    job = elastic_runtime.init(global_batch_size=8)
    model, optimizer, _ = build(Plan())
    job.prepare(model, optimizer, DataLoader(DATA, batch_size=8))
    with pytest.raises(UsageError, match="convert it to a dense tensor of one of: bfloat16, float16"):
        job.all_reduce(tensor)


def test_micro_batches_change_nothing_but_rounding() -> None:
    whole, _ = elastic_loop(None)
    cut, _ = elastic_loop(3)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-6)


def prepared(**options: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    job = elastic_runtime.init(**options)
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=8))
    return job, model, optimizer, loader


def test_the_global_batch_is_the_loaders_batch_where_none_is_given() -> None:
    job, model, _, loader = prepared()
    assert len(loader) == 7
    sizes = []
    for _epoch in job.epochs(1):
        for x, _y, _i in loader:
            sizes.append(len(x))
            job.backward(model(x).sum())
            model.zero_grad()
    assert sizes == [8] * 6 + [2]


def test_gradients_and_the_optimizer_are_untouched_between_micro_batches() -> None:
    job, model, optimizer, loader = prepared(global_batch_size=8, max_batch_per_gpu=4)
    weight = next(model.parameters())
    before = weight.clone()
    for _epoch in job.epochs(1):
        for k, (x, _y, _i) in enumerate(loader):
            job.backward(model(x).mean())
            complete = k % 2 == 1
            assert (weight.grad is not None) == complete
            optimizer.step()
            assert torch.equal(weight, before) != complete
            if complete:
                break
        break


def test_a_parameter_that_nobody_uses_keeps_no_gradient() -> None:
    job = elastic_runtime.init(global_batch_size=8, max_batch_per_gpu=4)
    model = nn.ModuleDict({"used": nn.Linear(12, 3), "unused": nn.Linear(12, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    _, _, loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=8))
    unused = next(model["unused"].parameters())
    before = unused.clone()
    for _epoch in job.epochs(1):
        for x, _y, _i in loader:
            job.backward(model["used"](x).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(unused, before)


@pytest.mark.parametrize("max_batch", [None, 2])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_is_skipped_leaves_gradients_as_they_are_and_nothing_acts(
    max_batch: int | None, *, to_none: bool
) -> None:
    def fresh() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def loss(model: nn.ModuleList, step: int, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model[0](x) + (model[1](x) if step % 3 == 1 else 0.0)
        return found.square().mean()

    x, (plain, optimizer) = torch.randn(4, 3), fresh()
    for step in filter(lambda step: step % 4 != 2, range(12)):
        loss(plain, step, x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    job = elastic_runtime.init(max_batch_per_gpu=max_batch)
    loader: Any = DataLoader(TensorDataset(x), batch_size=4)
    model, optimizer, loader = job.prepare(*fresh(), loader)
    for _epoch in job.epochs(12):
        for (batch,) in loader:
            if job.step % 4 == 2:
                job.skip()
            else:
                job.backward(loss(model, job.step, batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_scheduler_stepped_after_each_epoch_acts_each_time() -> None:
    job = elastic_runtime.init(global_batch_size=8)
    model, optimizer, _ = build(Plan())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, DataLoader(DATA, batch_size=8), scheduler)
    for _epoch in job.epochs(3):
        for x, y, _i in loader:
            job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.01 * 0.5**3]
    assert set(scheduler.state_dict()) == set(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).state_dict())


def test_backward_is_called_exactly_once_in_an_iteration() -> None:
    job, model, _, loader = prepared()
    epochs = job.epochs(1)
    next(epochs)
    batches = iter(loader)
    x, _y, _i = next(batches)
    job.backward(model(x).mean())
    with pytest.raises(LoopError, match="add the losses up"):
        job.backward(model(x).mean())
    next(batches)
    with pytest.raises(LoopError, match=r"without job\.backward"):
        next(batches)


@pytest.mark.parametrize("ended_by", ["the next epoch", "another loop"])
def test_a_loop_that_has_ended_is_not_continued(ended_by: str) -> None:
    job, model, optimizer, loader = prepared()
    epochs = job.epochs(2)
    next(epochs)
    batches = iter(loader)
    x, *_ = next(batches)
    job.backward(model(x).mean())
    optimizer.step()
    if ended_by == "the next epoch":
        next(epochs)
    else:
        job.repeat(lambda: next(iter(loader)))
    with pytest.raises(LoopError, match=f"had ended: .*{ended_by}"):
        next(batches)


def test_rank_0_is_told_once_the_loop_begins_and_a_mean_over_workers_is_a_number() -> None:
    job, model, optimizer, loader = prepared()
    received: list[int] = []
    job.on_leader(lambda: received.append(job.rank))
    assert job.is_leader
    for _epoch in job.epochs(2):
        for x, _y, _i in loader:
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        assert job.mean(torch.tensor(3.0), weight=2.0) == 3.0
    assert received == [0]


def test_keywords_of_backward_are_torchs_own() -> None:
    job, model, optimizer, loader = prepared()
    weight, bias, *_others = model.parameters()
    for _epoch in job.epochs(1):
        for x, _y, _i in loader:
            loss = model(x).mean()
            job.backward(loss, retain_graph=True, inputs=[weight])
            assert (weight.grad is None, bias.grad is None) == (False, True)
            assert len(torch.autograd.grad(loss, [weight])) == 1
            optimizer.step()
            optimizer.zero_grad()


def test_the_loader_belongs_inside_the_epochs() -> None:
    _, _, _, loader = prepared()
    with pytest.raises(LoopError, match=r"job\.epochs"):
        next(iter(loader))


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    model = nn.Linear(12, 3)
    job = elastic_runtime.init(global_batch_size=8)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(DATA, batch_size=8))
    batches = job.steps(1)
    x, *_ = next(batches)
    with pytest.raises(UsageError, match=r"loss of shape \(8, 3\)"):
        job.backward(model(x))


def test_nothing_works_before_prepare() -> None:
    with pytest.raises(LoopError, match=r"job\.prepare"):
        elastic_runtime.init().backward(torch.zeros(1))


class Scaling(DataLoader[Any]):
    """Does something to each batch."""

    def __iter__(self) -> Any:
        return ((x / 255, *rest) for x, *rest in super().__iter__())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), "DistributedSampler"),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 0), 8, drop_last=False)),
            "DistributedSampler",
        ),
        (DataLoader(DATA, batch_size=None), "batch_size"),
        (DataLoader(TensorDataset(torch.zeros(3, 12)), batch_size=8, drop_last=True), "no global batch of 8"),
        ([1, 2, 3], "DataLoader"),
        (Scaling(DATA, batch_size=8), "Scaling with an __iter__ of its own.* use a plain DataLoader, and a collate_fn"),
    ],
)
def test_a_loader_that_cannot_be_shared_out_is_refused_with_a_remedy(loader: Any, message: str) -> None:
    model = nn.Linear(12, 3)
    with pytest.raises(UsageError, match=message):
        elastic_runtime.init().prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)


def test_a_model_that_is_distributed_already_is_refused_with_a_remedy() -> None:
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(UsageError, match=r"wrapped by DistributedDataParallel, .* give prepare the plain model"):
        elastic_runtime.init().prepare(wrapped, optimizer, DataLoader(DATA, batch_size=8))


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = nn.Linear(12, 3).requires_grad_(False)  # noqa: FBT003
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="nothing to train"):
        elastic_runtime.init().prepare(model, optimizer, DataLoader(DATA, batch_size=8))


def test_a_batch_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(BatchPlanError, match="global_batch_size is 0"):
        elastic_runtime.init(global_batch_size=0)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_COORDINATOR", "http://127.0.0.1:1/x")
    monkeypatch.delenv("ELASTIC_WORKER_ID", raising=False)
    with pytest.raises(SettingsError, match="ELASTIC_WORKER_ID"):
        elastic_runtime.init()
