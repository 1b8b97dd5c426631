"""Private parts of torch that the runtime uses: a torch in which one of them has changed fails here, by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from elastic_runtime.torch_internals import forget_unscaled, fsdp, modules, no_worker_info


def test_what_is_set_in_a_modules_registries_is_set_on_the_module() -> None:
    norm = nn.BatchNorm1d(2)
    modules.own_parameters(norm)["weight"] = nn.Parameter(torch.full((2,), 3.0))
    modules.own_buffers(norm)["running_mean"] = torch.full((2,), 4.0)
    assert norm.weight.tolist() == [3.0, 3.0]
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [4.0, 4.0]
    assert isinstance(norm, modules.BatchNorm)


def test_a_buffer_outside_of_the_state_dict_is_not_persistent() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("transient", torch.zeros(1), persistent=False)
    assert [modules.is_persistent(module, name) for name in ("kept", "transient")] == [True, False]


def test_a_compiled_module_is_seen_as_one() -> None:
    module = nn.Linear(1, 1)
    assert not modules.is_compiled(module)
    module.compile(backend="eager")
    assert modules.is_compiled(module)


def test_a_scalers_scale_is_there_from_the_first_loss_on() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = [modules.scale_of(scaler)]
    scaled = scaler.scale(torch.ones(1))
    scales.append(modules.scale_of(scaler))
    assert scaled.item() == 8.0
    assert scales == [None, torch.tensor([8.0])]


def test_a_scaler_that_forgets_a_step_unscales_again() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)  # a second time it would be refused
        assert weight.grad is not None
        assert weight.grad.item() == 1.0
        forget_unscaled(scaler)


def test_a_scaler_that_steps_an_optimizer_is_known_to_its_step() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    found = []

    def look() -> None:
        found.append(modules.stepping_scaler())

    optimizer.step = look  # type: ignore[assignment, method-assign]
    optimizer.step()
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    assert found == [None, scaler]


def test_schedulers_show_their_optimizer_and_what_they_are_made_of() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert not modules.was_given_to_a_scheduler(optimizer)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
    assert modules.was_given_to_a_scheduler(optimizer)
    assert modules.inner_schedulers(whole) == parts
    assert modules.inner_schedulers(parts[0]) == []
    numbers = {name for name, value in vars(optimizer).items() if type(value) in {int, float}}
    assert numbers <= modules.OPTIMIZER_ATTRIBUTES


def test_a_compiled_copy_is_traced_to_its_model() -> None:
    model = nn.Linear(1, 1)
    assert modules.uncompiled(torch.compile(model, backend="eager")) is model
    assert modules.uncompiled(model) is model


def test_layers_whose_results_depend_on_the_samples_have_their_base_classes() -> None:
    assert isinstance(nn.BatchNorm2d(1), modules.BatchStatistics)
    assert not isinstance(nn.InstanceNorm1d(1), modules.BatchStatistics)
    assert isinstance(nn.Dropout2d(), modules.Dropout)


def test_a_tensor_counts_what_is_written_to_it() -> None:
    tensor = torch.zeros(2)
    before = modules.writes_to(tensor)
    tensor.add_(1.0)
    assert modules.writes_to(tensor) == before + 1


def test_a_loaders_iterator_takes_its_indices_from_its_batch_sampler() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    iterator: Any = iter(loader)
    assert isinstance(iterator, modules.LoaderIterator)
    assert modules.index_sampler(iterator) is loader.batch_sampler


def test_a_loader_whose_processes_were_dropped_begins_with_new_ones() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert iter(loader) is first
    del first
    modules.drop_loader_processes(loader)
    second: Any = iter(loader)
    assert [batch.tolist() for (batch,) in second] == [[0, 1], [2, 3]]


def test_no_worker_info_is_seen_where_it_is_hidden() -> None:
    with no_worker_info():
        assert torch.utils.data.get_worker_info() is None


def test_fsdp_takes_collectives_of_these_classes() -> None:
    assert callable(FSDPModule.set_custom_all_gather)
    assert callable(FSDPModule.set_custom_reduce_scatter)
    assert {"__call__", "allocate"} <= set(dir(fsdp.AllGather)) & set(dir(fsdp.ReduceScatter))
    assert fsdp.AllGather.__module__.startswith(fsdp.PACKAGE)
