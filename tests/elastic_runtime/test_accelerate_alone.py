"""ElasticAccelerator without a cluster: what Accelerator computes, what it adds, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, ProjectConfiguration
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from elastic_runtime.errors import LoopError, SettingsError, UsageError
from elastic_runtime.integrations.accelerate import ElasticAccelerator
from tests.elastic_runtime.accelerate_training import Counter, evaluate
from tests.elastic_runtime.training import Plan, Points, Stream, build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = Points(50)
EPOCHS = 2


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    """Accelerate keeps its state for as long as the process lives."""
    forget_accelerate()
    yield
    forget_accelerate()


def forget_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loader(samples: int = 50, **options: Any) -> DataLoader[Any]:
    return DataLoader(Subset(DATA, range(samples)), **{"batch_size": 8, **options})


def iterate(accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any, batches: Any) -> None:
    """One epoch as Accelerate's guide writes it."""
    for x, y, _ in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def trained(accelerator: Accelerator, data: DataLoader[Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer, scheduler = build(Plan())
    prepared = accelerator.prepare(model, optimizer, data, scheduler)
    model, optimizer, batches, scheduler = prepared
    elastic = isinstance(accelerator, ElasticAccelerator)
    for _epoch in accelerator.epochs(EPOCHS) if elastic else range(EPOCHS):
        iterate(accelerator, model, optimizer, scheduler, batches)
    return accelerator.unwrap_model(model).state_dict(), scheduler.get_last_lr()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_alone_it_trains_what_accelerator_trains_to_the_bit(precision: str) -> None:
    expected, rates = trained(Accelerator(mixed_precision=precision, cpu=True), loader())
    forget_accelerate()
    got, same_rates = trained(ElasticAccelerator(mixed_precision=precision, cpu=True), loader())
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert same_rates == rates


def test_gradients_are_accumulated_as_accelerator_accumulates_them() -> None:
    expected, rates = trained(Accelerator(gradient_accumulation_steps=3, cpu=True), loader(48))
    forget_accelerate()
    got, same_rates = trained(ElasticAccelerator(gradient_accumulation_steps=3, cpu=True), loader(48))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
    assert same_rates == rates


def adversaries(accelerator: Accelerator, **more: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    makes, judges = nn.Linear(3, 12), nn.Linear(12, 1)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (makes, judges)]
    prepared = accelerator.prepare(makes, judges, *optimizers, loader())
    makes, judges, makes_step, judges_step, batches = prepared
    epochs: Any = accelerator.epochs(2) if isinstance(accelerator, ElasticAccelerator) else range(2)
    for _epoch in epochs:
        for x, y, _indices in batches:
            made = makes(nn.functional.one_hot(y, 3).float())
            judges_step.zero_grad()
            accelerator.backward(judges(x).square().mean() - judges(made.detach()).mean(), **more)
            accelerator.clip_grad_norm_(judges.parameters(), 0.5)
            judges_step.step()
            makes_step.zero_grad()
            accelerator.backward(judges(made).mean())
            accelerator.clip_grad_norm_(makes.parameters(), 0.5)
            makes_step.step()
    return [parameter.detach() for each in (makes, judges) for parameter in each.parameters()]


def test_two_optimizers_may_act_in_turns_within_an_iteration() -> None:
    expected = adversaries(Accelerator(cpu=True))
    forget_accelerate()
    found = adversaries(ElasticAccelerator(cpu=True), more=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_schedules_length_is_that_of_the_loader_divided_by_the_accumulation() -> None:
    accelerator = ElasticAccelerator(gradient_accumulation_steps=3, cpu=True)
    model, optimizer, scheduler = build(Plan())
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    steps_per_epoch = len(batches) // accelerator.gradient_accumulation_steps
    for _epoch in accelerator.epochs(1):
        iterate(accelerator, model, optimizer, scheduler, batches)
    assert accelerator.job.step == steps_per_epoch == 3
    assert len(batches) == 9
    assert batches.total_batch_size == 24


def test_objects_are_prepared_in_any_order_and_in_several_calls() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    models = [nn.Linear(12, 3), nn.Linear(12, 3)]
    teacher = nn.Linear(12, 3).requires_grad_(requires_grad=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    optimizer, first, batches = accelerator.prepare(optimizers[0], models[0], loader())
    scheduler, held_out, second, own = accelerator.prepare(schedulers[0], loader(20), models[1], teacher)
    other, second_scheduler = accelerator.prepare(optimizers[1], schedulers[1])
    assert [first, second, own] == [*models, teacher]
    assert accelerator.prepare(held_out) is held_out
    before = [model.weight.clone() for model in (*models, teacher)]
    for _epoch in accelerator.epochs(1):
        for x, y, _ in batches:
            accelerator.backward(nn.functional.cross_entropy(first(x) + second(x) + own(x), y))
            for each in (optimizer, other, scheduler, second_scheduler):
                each.step()
            optimizer.zero_grad()
            other.zero_grad()
    changed = [not torch.equal(model.weight, old) for model, old in zip((*models, teacher), before, strict=True)]
    assert changed == [True, True, False]
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.1 * 0.5**7] * 2


def test_clipping_and_gradients_wait_for_the_step() -> None:
    accelerator = ElasticAccelerator(global_batch_size=8, elastic={"max_batch_per_gpu": 4}, cpu=True)
    model, optimizer, _ = build(Plan())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(16))
    seen = []
    for _epoch in accelerator.epochs(1):
        for x, y, _ in batches:
            optimizer.zero_grad()  # before the backward pass, as many write it
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            left = torch.nn.utils.get_total_norm(grads).item() if grads else None
            seen.append((accelerator.sync_gradients, norm > 0, left))
            optimizer.step()
    assert [(complete, bool(found)) for complete, found, _ in seen] == [(False, False), (True, True)] * 2
    assert [left for *_, left in seen] == [None, pytest.approx(1e-3, rel=1e-3)] * 2


def test_a_gradient_scaler_skips_a_step_and_its_schedule() -> None:
    accelerator = ElasticAccelerator(global_batch_size=16, elastic={"scale_batch": (8, 8)}, cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    torch.manual_seed(0)
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(32), scheduler)
    skipped, moved = [], []
    for _epoch in accelerator.epochs(1):
        for x, y, _ in batches:
            before = model.weight.detach().clone()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss * (float("inf") if accelerator.job.step == 1 else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 100.0)
            gradient = model.weight.grad
            assert gradient is not None
            gradient = gradient.clone()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
            moved.append(
                torch.allclose(before - model.weight, 0.05 * gradient, atol=1e-6)
            )  # half the batch, half the rate
    assert skipped == [False, True, False, False]
    assert moved == [True, False, True, True]
    assert scheduler.scheduler.last_epoch == 3
    assert accelerator.scaler.get_scale() == 2.0


def test_an_iteration_that_does_not_fit_into_memory_is_repeated_in_halves() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, scheduler = build(Plan())
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    sizes: list[int] = []
    for _epoch in accelerator.epochs(1):
        for x, y, _ in batches:
            with accelerator.accumulate(model):
                if len(x) > 4:
                    raise torch.OutOfMemoryError
                sizes.append(len(x))
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert sizes == [4] * 12 + [2]
    assert accelerator.job.step == 7


def test_steps_in_place_of_both_loops() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, scheduler = build(Plan())
    model, optimizer, _, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    iterate(accelerator, model, optimizer, scheduler, accelerator.steps(9))
    assert accelerator.job.position.step == 9
    assert accelerator.job.position.epoch == 1
    assert accelerator.sync_gradients


def test_evaluation_sees_each_sample_once() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, scheduler = build(Plan())
    model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, loader(), loader(21))
    for _epoch in accelerator.epochs(1):
        assert evaluate(accelerator, model, held_out) == list(range(21))
        assert accelerator.repeat(lambda: evaluate(accelerator, model, held_out)) == list(range(21))
        iterate(accelerator, model, optimizer, scheduler, batches)
    assert accelerator.repeat(lambda: evaluate(accelerator, model, held_out)) == list(range(21))
    assert len(held_out) == 3
    assert len(held_out.dataset) == 21


def test_what_each_worker_evaluated_by_itself_is_not_added_up_over_them() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, scheduler = build(Plan())
    model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, loader(), loader(21))

    def seen() -> float:
        count = sum(len(x) for x, _, _ in held_out)
        return float(accelerator.reduce(torch.tensor(float(count))))

    for _epoch in accelerator.epochs(1):
        with pytest.raises(LoopError, match=r"accelerator\.repeat\(evaluate\)"):
            seen()
        accelerator.wait_for_everyone()
        assert accelerator.repeat(seen) == 21
        iterate(accelerator, model, optimizer, scheduler, batches)
        assert accelerator.gather(torch.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"sampler": "weighted"}, {"batch_size": 4}])
def test_shares_of_an_evaluation_are_parts_of_one_order(size: int, options: dict[str, Any]) -> None:
    """As on several workers, each with random numbers of its own; what fills the last batches up are the first ones."""
    accelerator = ElasticAccelerator(cpu=True)
    if options.get("sampler"):
        options = {"sampler": WeightedRandomSampler([1.0] * 21, 21)}
    model, optimizer, _ = build(Plan())
    *_, held_out = accelerator.prepare(model, optimizer, loader(), loader(21, **options))
    expected = list(held_out._in_one_order().batch_sampler.sampler)
    shares = []
    for rank in range(size):
        torch.manual_seed(rank)
        shares.append([indices.tolist() for _, _, indices in held_out._by_accelerate(rank, size)])
    assert len({len(share) for share in shares}) == 1
    together = [index for batches in zip(*shares, strict=True) for batch in batches for index in batch]
    assert together[:21] == expected


def test_an_evaluation_that_cannot_be_shared_out_is_refused() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, _ = build(Plan())
    prepared = accelerator.prepare(model, optimizer, loader(), DataLoader(Stream(DATA), batch_size=8))
    with pytest.raises(UsageError, match=r"outside accelerator\.repeat"):
        prepared[3]._by_accelerate(0, 2)
    assert [len(x) for x, _, _ in prepared[3]] == [8] * 6 + [2]
    with pytest.raises(UsageError, match="DistributedSampler"):
        accelerator.prepare(loader(sampler=DistributedSampler(DATA, num_replicas=2, rank=0)))
    with pytest.raises(UsageError, match="'sum', 'mean', 'max'"):
        accelerator.reduce(torch.ones(1), "median")


def test_the_training_loader_is_the_first_or_the_named_one() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, _ = build(Plan())
    training, other = loader(), loader(20)
    model, optimizer, held_out, batches = accelerator.prepare(
        model, optimizer, other, training, training_loader=training
    )
    assert [len(held_out), len(batches)] == [3, 7]
    for _epoch in accelerator.epochs(1):
        x, y, _ = next(iter(held_out))
        with pytest.raises(LoopError, match="outside the prepared loader") as raised:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
        assert "training_loader=" in raised.value.__notes__[0]
        break


def accumulate_by_hand(accelerator: ElasticAccelerator, model: nn.Module, optimizer: Any, batches: Any) -> None:
    for _epoch in accelerator.epochs(1):
        for number, (x, y, _) in enumerate(batches, 1):
            accelerator.backward(nn.functional.cross_entropy(model(x), y) / 2)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


def test_a_loop_that_accumulates_by_hand_is_told_what_to_do() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, _ = build(Plan())
    prepared = accelerator.prepare(model, optimizer, loader())
    with pytest.raises(LoopError, match=r"call optimizer\.step\(\) and optimizer\.zero_grad\(\) in every iteration"):
        accumulate_by_hand(accelerator, *prepared)


def test_what_all_do_together_belongs_where_a_step_is_complete() -> None:
    accelerator = ElasticAccelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer, _ = build(Plan())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(16))
    losses = []
    for _epoch in accelerator.epochs(1):
        for x, y, _ in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            for call in (accelerator.gather, accelerator.reduce, accelerator.gather_for_metrics):
                with pytest.raises(LoopError, match=r"if accelerator\.sync_gradients"):
                    call(loss)
            with pytest.raises(LoopError, match="wait_for_everyone"):
                accelerator.wait_for_everyone()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.gather(loss.detach()).mean().item())
                accelerator.set_trigger()
                assert accelerator.check_trigger()
    assert len(losses) == 1


def accelerated(**options: Any) -> tuple[ElasticAccelerator, Any, Any, Any, Any, Counter]:
    forget_accelerate()
    accelerator, counter = ElasticAccelerator(cpu=True, **options), Counter()
    model, optimizer, scheduler = build(Plan())
    accelerator.register_for_checkpointing(counter)
    return accelerator, *accelerator.prepare(model, optimizer, loader(shuffle=True), scheduler), counter


def test_load_state_goes_on_where_save_state_was_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def run(*, save_at: int = -1, load: bool = False) -> tuple[dict[str, torch.Tensor], int, int]:
        accelerator, model, optimizer, batches, scheduler, counter = accelerated()
        if load:
            accelerator.load_state(str(tmp_path))
        iterations = 0
        for _epoch in accelerator.epochs(2):
            for x, y, _ in batches:
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                iterations, counter.steps = iterations + 1, counter.steps + 1
                if accelerator.job.position.step == save_at:
                    accelerator.save_state(str(tmp_path))
        return model.state_dict(), counter.steps, iterations

    expected, counted, _ = run(save_at=10)
    got, same_count, iterations = run(load=True)
    assert (counted, same_count, iterations) == (14, 14, 4)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_a_state_that_is_saved_at_an_epochs_end_goes_on_with_the_next_one(tmp_path: Path) -> None:
    """A schedule that steps once an epoch would do so twice otherwise."""
    rates = []
    for load in (False, True):
        forget_accelerate()
        accelerator = ElasticAccelerator(cpu=True, step_scheduler_with_optimizer=False)
        model, optimizer, batches, scheduler = accelerator.prepare(*build(Plan())[:2], loader(16), build(Plan())[2])
        scheduler.scheduler.optimizer = optimizer.optimizer
        if load:
            accelerator.load_state(str(tmp_path / "0"))
        for epoch in accelerator.epochs(2):
            for x, y, _ in batches:
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            rates.append((epoch, accelerator.job.step, scheduler.scheduler.last_epoch))
            accelerator.save_state(str(tmp_path / str(epoch)))
    assert rates == [(0, 2, 1), (1, 4, 2), (1, 4, 2)]


def test_states_are_numbered_on_from_those_that_are_there(tmp_path: Path) -> None:
    """A worker that joined, or resumed from the job's checkpoint, has saved none of them itself."""
    for _run in range(2):
        forget_accelerate()
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=3)
        accelerator = ElasticAccelerator(cpu=True, project_config=project)
        accelerator.prepare(*build(Plan())[:2], loader())
        for _epoch in accelerator.epochs(2):
            accelerator.save_state()
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == [
        f"checkpoint_{number}" for number in (1, 2, 3)
    ]


def test_what_was_prepared_is_forgotten_before_the_loop_only() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters()), loader(40))
    accelerator.free_memory()
    model, optimizer, _ = build(Plan())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(16))
    for _epoch in accelerator.epochs(1):
        for x, y, _ in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    assert accelerator.job.step == 2


def test_the_accumulation_is_fixed_where_the_loop_begins() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    model, optimizer, scheduler = build(Plan())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(48))
    accelerator.gradient_accumulation_steps = 3
    for _epoch in accelerator.epochs(1):
        with pytest.raises(LoopError, match="global batch"):
            accelerator.gradient_accumulation_steps = 2
        iterate(accelerator, model, optimizer, scheduler, batches)
    assert accelerator.job.step == 2


def test_registered_objects_and_the_training_go_on_from_the_jobs_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))
    counted = []
    for epochs in (1, 2):
        accelerator, model, optimizer, batches, scheduler, counter = accelerated(elastic={"checkpoint_every_s": 1e-9})
        for _epoch in accelerator.epochs(epochs):
            for x, y, _ in batches:
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                counter.steps += 1
        counted.append((counter.steps, accelerator.job.step))
    assert counted == [(7, 7), (14, 14)]


def test_a_scheduler_that_is_only_registered_is_the_jobs_too() -> None:
    accelerator = ElasticAccelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer, scheduler = build(Plan())
    accelerator.register_for_checkpointing(scheduler)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(32))
    for _epoch in accelerator.epochs(1):
        iterate(accelerator, model, optimizer, scheduler, batches)
    assert scheduler.last_epoch == accelerator.job.step == 2


class Kept(GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
    """A tracker that stores the logged values."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.logged

    @on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((step, values))


def test_what_is_logged_reaches_trackers_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_REPORT_FILE", str(tmp_path / "report"))
    tracker = Kept()
    accelerator = ElasticAccelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("digits", {"lr": 0.1})
    model, optimizer, _ = build(Plan())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(8))
    for _epoch in accelerator.epochs(1):
        for x, y, _ in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": 0.5, "note": "none"}, step=3)
    accelerator.end_training()
    assert tracker.logged == [{"lr": 0.1}, (3, {"loss": 0.5, "note": "none"})]
    rows = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    assert [row["loss"] for row in rows if row["event"] == "metrics"] == [0.5]


def stateful() -> DataLoaderConfiguration:
    found = DataLoaderConfiguration()
    found.use_stateful_dataloader = True  # its constructor asks for torchdata
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin.__new__(FullyShardedDataParallelPlugin)}, "fsdp_plugin is set"),
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"dataloader_config": stateful()}, "use_stateful_dataloader is True"),
        ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, "no worker reads for the others"),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)},
            "the last step of an epoch",
        ),
    ],
)
def test_settings_that_do_what_the_job_does_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ElasticAccelerator(cpu=True, **options)


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_what_accelerate_launch_would_distribute_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(SettingsError, match=f"ACCELERATE_USE_{name} is set"):
        ElasticAccelerator(cpu=True)


def test_the_loop_needs_what_it_trains() -> None:
    accelerator = ElasticAccelerator(cpu=True)
    with pytest.raises(LoopError, match=r"accelerator\.prepare was not given"):
        next(accelerator.epochs(1))
    model, optimizer, _ = build(Plan())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    with pytest.raises(LoopError, match=r"accelerator\.epochs"):
        next(iter(batches))
    for _epoch in accelerator.epochs(1):
        with pytest.raises(LoopError, match="comes before"):
            accelerator.prepare(nn.Linear(1, 1))
        with pytest.raises(LoopError, match="comes before"):
            accelerator.register_for_checkpointing(Counter())
        x, y, _ = next(iter(batches))
        loss = nn.functional.cross_entropy(model(x), y)
        with pytest.raises(UsageError, match="retain_graph"):
            accelerator.backward(loss, retain_graph=True)
        break


def test_what_an_elastic_loader_cannot_do_is_refused() -> None:
    accelerator = ElasticAccelerator(gradient_accumulation_steps=2, cpu=True)
    own = DataLoader(DATA, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(DATA), 8, drop_last=False))
    with pytest.raises(SettingsError, match="batch sampler"):
        accelerator.prepare(own)
    with pytest.raises(UsageError, match="skip_first_batches"):
        accelerator.skip_first_batches(own, 3)


def test_an_accelerator_that_was_made_before_with_ranks_of_its_own_is_refused() -> None:
    state = PartialState(cpu=True)
    state.distributed_type, state.num_processes = DistributedType.MULTI_CPU, 2
    with pytest.raises(SettingsError, match="before any other Accelerator"):
        ElasticAccelerator(cpu=True)
