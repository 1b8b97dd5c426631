"""What makes the training's state, and how a joiner gets ready for it."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from torch import nn

from elastic_runtime.plan.batches import MicroBatch
from elastic_runtime.reduction.backward_pass import Pass
from elastic_runtime.reduction.buffers import FollowedBuffers
from elastic_runtime.reduction.gradients import FastReducer
from elastic_runtime.reduction.step_metadata import Share, StepMetadata
from elastic_runtime.state.layouts import describe
from elastic_runtime.state.packing import holes, pack, unpack
from elastic_runtime.state.random_streams import WATCHED, RandomStreams, SeededDraws
from elastic_runtime.state.training_state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZERS = [
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
]


def made(optimizer: Any) -> TrainingState:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    return TrainingState(model, [("optimizer", optimizer(model.parameters()))])


def trained(optimizer: Any) -> TrainingState:
    state = made(optimizer)
    state.model(torch.randn(4, 6)).sum().backward()
    dict(state.parts)["optimizer"].step()  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_after_a_rehearsal_a_joiner_has_the_structure_of_a_state_that_was_trained(optimizer: Any) -> None:
    joiner, source = made(optimizer), trained(optimizer)
    before = [p.clone() for p in joiner.model.parameters()]
    joiner.rehearse()
    for value, parameter in zip(before, joiner.model.parameters(), strict=True):
        assert torch.equal(value, parameter)
        assert parameter.grad is None
    (mine, own), (theirs, sent) = pack(joiner.capture()), pack(source.capture())
    assert holes(mine) == holes(theirs)
    assert describe(own) == describe(sent)


def test_a_rehearsal_that_nobody_needed_leaves_no_trace() -> None:
    state = made(OPTIMIZERS[0])
    state.rehearse()
    state.forget_rehearsal()
    assert dict(state.parts)["optimizer"].state_dict()["state"] == {}


def test_a_state_loaded_by_another_process_is_the_same_to_the_bit() -> None:
    source, other = trained(OPTIMIZERS[0]), made(OPTIMIZERS[0])
    other.load(source.capture())
    for a, b in zip(pack(source.capture())[1], pack(other.capture())[1], strict=True):
        assert torch.equal(a, b)


class Quantised(torch.optim.Optimizer):
    """Keeps its moments in 8 bits, counts in whole numbers, and remembers things that are no tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if not state:
                codes = torch.full_like(parameter, 129, dtype=torch.uint8)
                state.update(codes=codes, count=torch.tensor(1 << 30), how="signed", scales=[torch.ones(2).bfloat16()])
        return closure


def test_an_optimizers_state_keeps_its_types() -> None:
    source, other = trained(Quantised), made(Quantised)
    skeleton, tensors = pack(source.capture())
    other.load(unpack(skeleton, [tensor.clone() for tensor in tensors]))
    (theirs, mine) = (dict(state.parts)["optimizer"].state_dict()["state"] for state in (source, other))
    assert describe(pack(mine)[1]) == describe(pack(theirs)[1])
    assert [each["how"] for each in mine.values()] == ["signed"] * 6
    for a, b in zip(pack(theirs)[1], pack(mine)[1], strict=True):
        assert torch.equal(a, b)


def test_fused_optimizers_go_on_with_channels_last_parameters() -> None:
    """In a checkpoint of an older version all is contiguous; fused kernels go through parameter and state in the order
    of their memories.
    """

    def made() -> TrainingState:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        return TrainingState(model, [("optimizer", torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))])

    def step(state: TrainingState, seed: int) -> None:
        state.model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer: Any = dict(state.parts)["optimizer"]
        optimizer.step()
        optimizer.zero_grad()

    source, joiner = made(), made()
    step(source, 1)
    captured = source.capture()
    del captured["laid_out"]
    skeleton, tensors = pack(captured)
    joiner.load(unpack(skeleton, [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]))
    for state in (source, joiner):
        step(state, 2)
    for a, b in zip(source.model.parameters(), joiner.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_what_arrives_after_a_transfer_failed_does_not_reach_the_state() -> None:
    state = made(OPTIMIZERS[0])
    state.rehearse()
    late = pack(state.capture())[1]
    state.leave_memory()
    before = [tensor.clone() for tensor in pack(state.capture())[1]]
    for tensor in late:
        tensor.fill_(7)
    for a, b in zip(before, pack(state.capture())[1], strict=True):
        assert torch.equal(a, b)
    assert dict(state.parts)["optimizer"].state_dict()["state"] == {}


def test_a_rehearsal_leaves_a_state_that_the_script_gave_as_it_is() -> None:
    state = trained(OPTIMIZERS[0])
    before = [tensor.clone() for tensor in pack(state.capture())[1]]
    state.rehearse()
    state.forget_rehearsal()
    for a, b in zip(before, pack(state.capture())[1], strict=True):
        assert torch.equal(a, b)


def test_random_streams_go_back_to_where_they_were() -> None:
    streams = RandomStreams()
    streams.save()
    drawn = torch.rand(3)
    streams.restore()
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("of_python", [False, True])
def test_work_of_a_seed_draws_the_same_numbers_in_each_process_and_moves_no_stream(of_python: bool) -> None:
    """Also once it is known from which streams it draws."""

    def others() -> list[list[float]]:
        random.seed(number), numpy.random.seed(number), torch.manual_seed(number)
        draws, found = SeededDraws(RandomStreams()), []
        for seed in range(WATCHED + 3):
            with draws.within(seed):
                found.append([float(torch.rand(())), *([random.random(), numpy.random.rand()] if of_python else [])])
        after.append((random.random(), numpy.random.rand(), float(torch.rand(()))))
        return found

    after: list[tuple[float, float, float]] = []
    number = 5
    first = others()
    random.seed(number), numpy.random.seed(number), torch.manual_seed(number)
    assert after == [(random.random(), numpy.random.rand(), float(torch.rand(())))]
    number = 6
    assert others() == first
    assert len({tuple(each) for each in first}) == WATCHED + 3


@pytest.mark.parametrize("draws", [0, 1, 2, 3])
@pytest.mark.parametrize("draw", [random.random, partial(random.gauss, 0.0, 1.0), partial(random.shuffle, [1, 2, 3])])
def test_pythons_stream_goes_back_whatever_was_drawn_between_two_steps(draw: Callable[[], object], draws: int) -> None:
    streams = RandomStreams()
    random.seed(3)
    streams.save()
    for _ in range(draws):
        draw()
    streams.save()
    drawn = [random.gauss(0.0, 1.0) for _ in range(5)]
    streams.restore()
    assert drawn == [random.gauss(0.0, 1.0) for _ in range(5)]


@pytest.mark.parametrize("draws", [0, 1, 2, 3])
def test_numpys_stream_goes_back_whatever_was_drawn_between_two_steps(draws: int) -> None:
    streams = RandomStreams()
    numpy.random.seed(3)
    streams.save()
    for _ in range(draws):
        numpy.random.standard_normal()
    streams.save()
    drawn = [numpy.random.standard_normal() for _ in range(4)]
    streams.restore()
    assert drawn == [numpy.random.standard_normal() for _ in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_buffers_travel_in_the_metadata_and_stay_exact(dtype: torch.dtype) -> None:
    leader, other = nn.BatchNorm1d(4).to(dtype), nn.BatchNorm1d(4).to(dtype)
    leader.num_batches_tracked.fill_((1 << 60) + 12_345)  # type: ignore[union-attr]
    leader.register_buffer("below_zero", torch.tensor([-1, -(1 << 62) - 7]))
    other.register_buffer("below_zero", torch.tensor([0, 0]))
    leader(torch.randn(8, 4, dtype=dtype))
    sections = []
    for model, is_leader in ((leader, True), (other, False)):
        buffers = FollowedBuffers([model])
        section = torch.empty(buffers.size)
        buffers.fill(section, leader=is_leader)
        sections.append(section)
    FollowedBuffers([other]).take(sections[0] + sections[1])
    for a, b in zip(leader.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("votes", "agreed"), [([3, 3, 3], True), ([3, 0, 3], False), ([2, 3, 4], False), ([0, 0, 0], False)]
)
def test_only_a_unanimous_vote_is_an_agreement(votes: list[int], agreed: bool) -> None:
    of_workers = [StepMetadata(FollowedBuffers([])) for _ in votes]
    sections = [torch.zeros(metadata.size) for metadata in of_workers]
    for metadata, section, vote in zip(of_workers, sections, votes, strict=True):
        metadata.fill(section, Share(5, vote), leader=False)
    total = torch.stack(sections).sum(0)
    answers = {metadata.take(total, keeps=False, samples=15, workers=len(votes)) for metadata in of_workers}
    assert answers == {agreed}


def test_half_precision_gradients_are_added_up_in_single_precision() -> None:
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    reducer = FastReducer(model.named_parameters(), 1)
    for k, value in enumerate((256.0, 1.0, 1.0)):
        begun = Pass(MicroBatch(k, k + 1, 3, last=k == 2), first=k == 0)
        reducer.begin_pass(None, begun)
        begun.backpropagate(model(torch.full((1, 4), value, dtype=torch.bfloat16)).sum())
    reducer.reduce()
    reducer.distribute(1.0)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16
    assert model.weight.grad.flatten().tolist() == [258.0] * 4


def test_channels_last_parameters_get_gradients_of_their_own_layout() -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    reducer = FastReducer(model.named_parameters(), 1)
    for micro in (MicroBatch(0, 2, 4, last=False), MicroBatch(2, 4, 4, last=True)):
        begun = Pass(micro, first=not micro.last)
        reducer.begin_pass(None, begun)
        begun.backpropagate(model(torch.randn(2, 3, 8, 8)).sum())
    reducer.reduce()
    reducer.distribute(1.0)
    assert model.weight.grad is not None
    assert model.weight.grad.stride() == model.weight.stride()
