"""What all workers must have in common: a difference is named at joining, or within a number of steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic_runtime
from elastic_runtime.data.sample_checksums import draw_at_random, sample_checksum
from elastic_runtime.data.sources import Source
from elastic_runtime.errors import CollectiveError, ModelMismatchError, UsageError
from elastic_runtime.plan.batches import MicroBatch
from elastic_runtime.plan.position import Position
from elastic_runtime.process.timing import Phases
from elastic_runtime.reduction.backward_pass import Pass
from elastic_runtime.reduction.buffers import FollowedBuffers
from elastic_runtime.reduction.gradients import FastReducer
from elastic_runtime.reduction.step_metadata import Share, StepMetadata
from elastic_runtime.state.join_exchange import exchange
from elastic_runtime.state.training_state import Totals, TrainingState
from elastic_runtime.validation.agreement import FULL_TURN, Agreement
from tests.elastic_runtime.test_transfer import both
from tests.elastic_runtime.training import Points

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.membership.process_group import Group


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Two ranks in this process, once: a loader process of another test may be forked while groups are dropped."""
    return both()


class Worker:
    """One worker's part of the sums, and what it agrees on."""

    def __init__(self, model: nn.Module, rate: float = 0.1) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=rate)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
        self.agreement = Agreement(list(model.named_parameters()), [self.optimizer], None, [self.scheduler])
        self.metadata = StepMetadata(FollowedBuffers([]), self.agreement)

    def train_alone(self) -> None:
        self.metadata.take_alone(Share(1), 1)


def met(workers: list[Worker], groups: list[Group], step: int) -> list[BaseException | None]:
    """One step's sum, as each worker reads it: what each of them raised."""
    sections = [torch.zeros(each.metadata.size) for each in workers]
    for rank, (each, section) in enumerate(zip(workers, sections, strict=True)):
        each.metadata.fill(section, Share(1, step=step), leader=rank == 0)
    total = torch.stack(sections).sum(0)

    def take(rank: int) -> BaseException | None:
        try:
            workers[rank].metadata.take(total, keeps=rank == 0, samples=2, workers=2, group=groups[rank])
        except (CollectiveError, ModelMismatchError) as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(take, (0, 1)))


def first_errors(
    workers: list[Worker], groups: list[Group], steps: int = 2 * FULL_TURN, first: int = 0
) -> tuple[int, list[Any]]:
    """(the step in which an error appears, that of each worker); -1 where none does."""
    for step in range(first, first + steps):
        errors = met(workers, groups, step)
        if any(errors):
            return step, errors
    return -1, []


def test_workers_with_the_same_parameters_and_rates_agree(groups: list[Group]) -> None:
    assert first_errors([Worker(network()) for _ in range(2)], groups)[0] == -1


def test_another_learning_rate_is_named_in_its_first_step_on_both_workers_with_both_values(groups: list[Group]) -> None:
    step, errors = first_errors([Worker(network()), Worker(network(), rate=0.05)], groups)
    assert step == 0
    for error in errors:
        assert isinstance(error, ModelMismatchError)
        assert "'lr' of group 0 of SGD of rank 1 differs from rank 0's in step 0: it is 0.05, rank 0's 0.1" in str(
            error
        )


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "nesterov"])
def test_every_hyperparameter_is_compared_in_every_step(name: str, groups: list[Group]) -> None:
    workers = [Worker(network()), Worker(network())]
    assert not any(error for step in range(9) for error in met(workers, groups, step))
    workers[1].optimizer.param_groups[0][name] = 0.5
    assert all(f"'{name}' of group 0" in str(error) for error in met(workers, groups, 9))


def test_a_scheduler_that_was_stepped_with_a_local_loss_ends_all_workers(groups: list[Group]) -> None:
    workers = [Worker(network()), Worker(network())]
    met(workers, groups, 0)
    for rank, each in enumerate(workers):
        each.scheduler.step(1.0 + rank)
    errors = met(workers, groups, 1)
    assert all(isinstance(error, ModelMismatchError) for error in errors)
    assert all("attribute 'best' of ReduceLROnPlateau" in str(error) for error in errors)


def test_a_rate_that_is_rounded_differently_is_no_difference(groups: list[Group]) -> None:
    assert first_errors([Worker(network()), Worker(network(), rate=0.1 * (1 + 1e-12))], groups, 3)[0] == -1


def test_a_joiner_that_differs_in_its_first_step_ends_alone(groups: list[Group]) -> None:
    workers = [Worker(network()), Worker(network(), rate=0.05)]
    workers[0].train_alone()
    first, second = first_errors(workers, groups, first=5)[1]
    assert isinstance(first, CollectiveError)
    assert isinstance(second, ModelMismatchError)


@pytest.mark.parametrize("name", ["0.weight", "5.bias", "9.weight"])
def test_a_parameter_that_differs_when_workers_begin_is_named_before_a_step_is_applied(
    name: str, groups: list[Group]
) -> None:
    """As an initialisation from the first batch leaves it, which differs from worker to worker."""
    other = network()
    with torch.no_grad():
        other.get_parameter(name).mul_(1.1)
    step, errors = first_errors([Worker(network()), Worker(other)], groups)
    assert step == 0
    assert all(isinstance(error, ModelMismatchError) and repr(name) in str(error) for error in errors)


def test_a_parameter_that_differs_later_is_named_within_a_full_turn_and_no_worker_goes_on(groups: list[Group]) -> None:
    workers = [Worker(network()), Worker(network())]
    assert not any(error for step in range(9) for error in met(workers, groups, step))
    with torch.no_grad():
        workers[1].model.get_parameter("5.bias").mul_(1.001)
    for step in range(9, 9 + FULL_TURN + 1):
        first, second = met(workers, groups, step)
        if first or second:
            break
    assert isinstance(first, ModelMismatchError)
    assert isinstance(second, ModelMismatchError)
    assert "'5.bias' of this worker" in str(second)


def test_a_difference_that_no_step_has_shown_is_named_at_the_end_of_the_training(groups: list[Group]) -> None:
    workers = [Worker(network()), Worker(network())]
    assert not any(error for step in range(9) for error in met(workers, groups, step))
    with torch.no_grad():
        workers[1].model.get_parameter("5.bias").mul_(1.001)

    def check(rank: int) -> str:
        with pytest.raises(ModelMismatchError) as error:
            workers[rank].agreement.check_all(groups[rank])
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        assert all("'5.bias' of rank 1 differs from rank 0's at the end" in each for each in pool.map(check, (0, 1)))


def test_what_two_kinds_of_devices_round_differently_is_no_difference(groups: list[Group]) -> None:
    other = network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 1e-6)
    assert first_errors([Worker(network()), Worker(other)], groups)[0] == -1


def test_the_gradients_of_a_share_are_scaled_where_they_are_summed() -> None:
    """A loss that was scaled down before the backward pass gave gradients below what float16 holds."""
    model = nn.Linear(4, 1, bias=False).half()
    reducer = FastReducer(model.named_parameters(), 1)
    for micro in (MicroBatch(0, 1, 64, last=False), MicroBatch(1, 2, 64, last=True)):
        begun = Pass(micro, first=not micro.last, scale=1 / 64)
        reducer.begin_pass(None, begun)
        begun.backpropagate(model(torch.full((1, 4), 1e-7).half()).float().sum())
        reducer.end_pass()
    summed = reducer._layout.slots[0].view
    assert summed.flatten().tolist() == pytest.approx([2 * 1.19e-7 / 64] * 4, rel=0.01)


# At joining


def joining(change: Callable[[TrainingState, int], None]) -> list[BaseException | None]:
    """Two workers meet, of which rank 0 holds the state; what each of them raised."""
    groups = both()

    def enter(rank: int) -> BaseException | None:
        state = TrainingState(nn.Linear(2, 1), position=Position(step=5) if rank == 0 else Position())
        change(state, rank)
        try:
            exchange(groups[rank], state, Phases(), holds_state=rank == 0)
        except (CollectiveError, UsageError) as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(enter, (0, 1)))


def test_another_number_of_epochs_is_refused_with_both_values() -> None:
    """A script that counts from a checkpoint of its own asks for fewer the later it is started."""

    def change(state: TrainingState, rank: int) -> None:
        state.totals = Totals(208 - 104 * rank, -1, 4)

    first, second = joining(change)
    assert isinstance(first, CollectiveError)
    assert isinstance(second, ModelMismatchError)
    assert "job.epochs(104), of 4 steps each here, job.epochs(208), of 4 steps each there" in str(second)
    assert "start=" in str(second)


def test_another_option_is_refused_with_both_values() -> None:
    def change(state: TrainingState, rank: int) -> None:
        state.split = f"global_batch_size={8 + rank}"

    second = joining(change)[1]
    assert isinstance(second, ModelMismatchError)
    assert "global_batch_size=9 here, " in str(second)
    assert "global_batch_size=8 there" in str(second)


def test_other_samples_at_the_same_indices_are_refused() -> None:
    def change(state: TrainingState, rank: int) -> None:
        state.sample_checksum = 7 + rank

    second = joining(change)[1]
    assert isinstance(second, ModelMismatchError)
    assert "list files in sorted order" in str(second)


def test_samples_that_are_not_known_are_not_compared() -> None:
    def change(state: TrainingState, rank: int) -> None:
        state.sample_checksum = 7 * rank

    assert joining(change) == [None, None]


def checksum_of(items: list[Any]) -> int:
    return sample_checksum(lambda indices, _: [items[i] for i in indices], len(items), 3, 5)


def test_a_few_samples_say_whether_files_are_in_another_order() -> None:
    items = [(torch.full((4,), float(i)), i) for i in range(9)]
    assert checksum_of(items) == checksum_of(list(items)) > 0
    assert checksum_of(items) != checksum_of(items[::-1])


def test_samples_that_are_rounded_differently_are_the_same() -> None:
    items = [(torch.full((4,), i + 0.123456), i) for i in range(9)]
    assert checksum_of(items) == checksum_of([(x + 1e-6, i) for x, i in items])


def test_samples_drawn_from_the_random_streams_are_compared_and_others_are_not() -> None:
    before = torch.get_rng_state()
    assert sample_checksum(lambda *_: torch.rand(3), 9, 3, 5) == sample_checksum(lambda *_: torch.rand(3), 9, 3, 6) > 0
    assert torch.equal(torch.get_rng_state(), before)
    drawn = iter(range(9))
    assert sample_checksum(lambda *_: next(drawn), 9, 3, 5) == 0


def test_samples_that_are_kept_as_they_were_drawn_at_random_are_others_on_each_worker() -> None:
    def checksum(own: int) -> int:
        cache: dict[int, torch.Tensor] = {}
        return sample_checksum(lambda places, _: [cache.setdefault(i, torch.rand(3)) for i in places], 9, 3, own)

    assert checksum(5) != checksum(6)


def test_a_loader_is_compared_by_its_samples() -> None:
    class Listing(Dataset[int]):
        def __init__(self, files: list[int]) -> None:
            self.files = files

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> int:
            return self.files[index]

    def checksum(files: list[int]) -> int:
        job = elastic_runtime.init(global_batch_size=4)
        model = nn.Linear(1, 1)
        loader: Any = DataLoader(Listing(files), batch_size=4, shuffle=True)
        _, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        return int(loader.sample_checksum())

    assert checksum(list(range(20))) == checksum(list(range(20))) > 0
    assert checksum(list(range(20))) != checksum(list(range(20))[::-1])


class Flipped(Dataset[Any]):
    """Samples of which a part is drawn again each time they are read."""

    def __init__(self, part: float) -> None:
        self.part = part

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        flips = float(torch.rand(1)) < self.part
        return {"x": torch.tensor([-1.0, 1.0] if flips else [1.0, -1.0]) * index, "name": f"sample {index}"}


@pytest.mark.parametrize("part", [0.0, 0.1, 1.0])
def test_random_numbers_of_loader_processes_are_found(part: float) -> None:
    job = elastic_runtime.init(global_batch_size=4)
    model = nn.Linear(2, 1)
    loader: Any = DataLoader(Flipped(part), batch_size=4, num_workers=2)
    _, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert loader.processes_may_draw() == (part == 0.1)


def test_samples_that_cannot_be_compared_may_be_drawn_at_random() -> None:
    def fails(*_: object) -> None:
        raise LookupError

    assert draw_at_random(fails, 9)
    assert draw_at_random(lambda *_: object(), 9)
    assert not draw_at_random(lambda places, _: [torch.tensor([True]), {"places": tuple(places)}], 9)


# A joiner takes over


def taken_over(source: TrainingState, other: TrainingState) -> None:
    groups = both()

    def enter(rank: int) -> None:
        exchange(groups[rank], (source, other)[rank], Phases(), holds_state=rank == 0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(enter, (0, 1)))


def test_groups_that_an_optimizer_got_in_training_reach_a_joiner() -> None:
    def state(*, later: bool) -> tuple[TrainingState, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model[1].parameters(), lr=0.5)
        if later:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.25})
        return TrainingState(model, [("optimizer", optimizer)]), optimizer

    source, _ = state(later=True)
    joiner, optimizer = state(later=False)
    taken_over(source, joiner)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    first = list(joiner.model.parameters())[:2]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == list(map(id, first))


def test_buffers_that_a_state_dict_leaves_out_reach_a_joiner() -> None:
    def state(value: float) -> TrainingState:
        model = nn.Linear(2, 1)
        model.register_buffer("mean", torch.full((3,), value), persistent=False)
        return TrainingState(model, transient=FollowedBuffers([model]))

    joiner = state(0.0)
    taken_over(state(7.0), joiner)
    assert joiner.model.get_buffer("mean").tolist() == [7.0] * 3


# Buffers


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.complex64, torch.complex128]
)
def test_buffers_of_every_kind_follow_rank_0_and_are_rewound_when_they_are_assigned_anew(dtype: torch.dtype) -> None:
    class Counter(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor([value, value]).to(dtype))

    leader, other = Counter(1), Counter(0)
    leads, follows = FollowedBuffers([leader]), FollowedBuffers([other])
    leader.count = torch.tensor([0, 1]).to(dtype)
    sections = [torch.zeros(leads.size) for _ in range(2)]
    leads.fill(sections[0], leader=True)
    follows.fill(sections[1], leader=False)
    follows.take(sections[0] + sections[1])
    assert torch.equal(other.get_buffer("count"), leader.get_buffer("count"))
    leads.restore()
    assert leader.get_buffer("count").tolist() == [1, 1]


def test_a_buffer_of_another_shape_is_named() -> None:
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(2))
    buffers = FollowedBuffers([model])
    model.cache = torch.zeros(3)
    with pytest.raises(UsageError, match=r"buffer 'cache' was torch.float32 of shape \(2,\)"):
        buffers.save()


# Orders


@pytest.mark.parametrize("replacement", [True, False])
def test_samples_of_a_sampler_without_an_end_are_drawn_as_they_are_needed(replacement: bool) -> None:
    sampler = torch.utils.data.RandomSampler(Points(50), replacement=replacement, num_samples=10**10)
    order = Source(DataLoader(Points(50), batch_size=8, sampler=sampler), 7).epoch(0)
    assert len(order) == 10**10
    far = order[5 * 10**9 : 5 * 10**9 + 50]
    assert far == order[5 * 10**9 : 5 * 10**9 + 50]
    assert (sorted(far) == list(range(50))) is not replacement


# Loader processes


class Changing(Points):
    offset = 0.0

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.offset = 0.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y, _ = super().__getitem__(index)
        return torch.full_like(x, self.offset), y, index


def test_a_dataset_that_is_changed_between_epochs_is_changed_in_the_loader_processes() -> None:
    data = Changing(16)
    job, model = elastic_runtime.init(global_batch_size=8), nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="fork")
    _, _, loader = job.prepare(model, optimizer, loader)
    seen: list[set[float]] = []
    for epoch in job.epochs(2):
        data.offset = float(epoch + 1)
        seen.append(set())
        for x, _y, _i in loader:
            seen[-1].add(float(x.max()))
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [{1.0}, {2.0}]
