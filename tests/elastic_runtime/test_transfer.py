"""A state from one rank to another, over both connections of a group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from elastic_runtime.errors import CollectiveError
from elastic_runtime.membership.process_group import Group, Interrupt
from elastic_runtime.state.checkpoint import checkpoints, load, save
from elastic_runtime.state.transfer import HEAD_BYTES, SMALL_NUMEL, receive_state, send_state
from elastic_runtime.torch_internals import build_second_connections

if TYPE_CHECKING:
    from pathlib import Path


def connected(rank: int, store: Store) -> Group:
    lanes = [build_second_connections(PrefixStore(name, store), rank, 2, timedelta(seconds=60)) for name in ("a", "b")]
    return Group(lanes[0], rank, 2, Interrupt(), lanes[1])


def both() -> list[Group]:
    """Two ranks, in two threads of this process."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: connected(rank, store), (0, 1)))


def test_tensors_of_kinds_that_gloo_does_not_send_travel_as_bytes() -> None:
    state = {
        "small": torch.tensor([True, False]),
        "wave": torch.tensor(1 + 2j),
        "large": torch.rand(SMALL_NUMEL * 2) > 0.5,
    }
    groups = both()
    with ThreadPoolExecutor(2) as pool:
        received = pool.submit(receive_state, groups[1], 0)
        pool.submit(send_state, groups[0], 1, state).result()
        for name, value in received.result().items():
            assert torch.equal(value, state[name])


class Codes(torch.Tensor):
    """Made of 8-bit codes and a scale, as 8-bit optimizers keep their moments."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, codes.shape)
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, *_: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: object) -> Codes:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, operation: object, *_: object) -> Any:
        raise NotImplementedError(operation)


def state() -> dict[str, Any]:
    """Large and small tensors, of odd sizes, of several types, empty, transposed, none of them equal."""
    generator = torch.Generator().manual_seed(3)
    return {
        "odd": torch.randn(SMALL_NUMEL + 1, generator=generator),
        "large": torch.randn(300, 401, generator=generator, dtype=torch.float64),
        "transposed": torch.randn(200, 333, generator=generator).T,
        "whole": torch.arange(3 * SMALL_NUMEL),
        "small": [torch.randn(7, generator=generator), torch.tensor(5.0), torch.tensor(6), torch.empty(0)],
        "name": "a state",
    }


def moved(own: object, sent_state: object = None) -> dict[str, Any]:
    """What arrives of `state()`."""
    sender, receiver = both()
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(send_state, sender, 1, sent_state or state())
        received: dict[str, Any] = pool.submit(receive_state, receiver, 0, own).result()
        sent.result()
    return received


def assert_whole(received: dict[str, Any]) -> None:
    for name, value in state().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(received[name], value), name
    assert received["name"] == "a state"
    assert all(torch.equal(got, sent) for got, sent in zip(received["small"], state()["small"], strict=True))


def test_a_state_arrives_as_it_was() -> None:
    assert_whole(moved(None))


def test_a_state_arrives_in_memory_that_is_there() -> None:
    own = {**state(), "transposed": torch.zeros(333, 200)}
    own = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in own.items()}
    for name in ("odd", "large", "whole"):
        own[name].zero_()
    received = moved(own)
    assert_whole(received)
    assert received["odd"].data_ptr() == own["odd"].data_ptr()


@pytest.mark.parametrize("names", [HEAD_BYTES // 2, HEAD_BYTES - 300, HEAD_BYTES, 3 * HEAD_BYTES])
def test_a_state_arrives_however_long_its_head_is(names: int) -> None:
    received = moved(None, {**state(), "names": "n" * names})
    assert_whole(received)
    assert received["names"] == "n" * names


def test_tensors_that_are_made_of_others_arrive_as_such(tmp_path: Path) -> None:
    sent = {"moments": [Codes(torch.arange(200, dtype=torch.uint8), torch.tensor(0.5))]}
    save(str(tmp_path), 3, sent)
    own = {"moments": [Codes(torch.zeros(200, dtype=torch.uint8), torch.tensor(0.0))]}
    for found in (moved(None, sent), moved(own, sent), load(checkpoints(str(tmp_path))[0])[1]):
        (moments,) = found["moments"]
        assert type(moments) is Codes
        assert torch.equal(moments.codes, sent["moments"][0].codes)
        assert float(moments.scale) == 0.5


def test_a_peer_that_is_lost_in_the_middle_is_a_collective_error() -> None:
    sender, receiver = both()
    del sender  # which closes its connections
    with pytest.raises(CollectiveError):
        receive_state(receiver, 0)


def test_what_goes_wrong_while_sending_is_not_taken_for_sent() -> None:
    sender, _receiver = both()
    with pytest.raises(TypeError):
        sender.send(["not a tensor"], 1, last=torch.ones(1))  # type: ignore[list-item]
