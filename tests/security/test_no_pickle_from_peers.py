"""What a peer sends is decoded without executing any of it, and its sizes are limited before memory is taken."""

from __future__ import annotations

import collections
import contextlib
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_runtime.data.stream_reader import _restored
from elastic_runtime.errors import CollectiveError, StateError
from elastic_runtime.membership.pickled_objects import Exchange
from elastic_runtime.state.codec import OpaqueError, decode, encode, is_opaque
from elastic_runtime.state.packing import pack, unpack
from elastic_runtime.state.transfer import _cut, gather_values, receive_state, send_state
from tests.elastic_runtime.test_transfer import both

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_runtime.membership.process_group import Group

EXECUTED: list[str] = []


class Attack:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return EXECUTED.append, ("executed",)


class Store:
    """The coordinator's, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def with_store(groups: list[Group]) -> tuple[Group, Group, Store]:
    store = Store()
    for group in groups:
        group._exchange = Exchange(store, group.rank)  # type: ignore[arg-type]
    return groups[0], groups[1], store


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=30,
)


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: object) -> None:
    encoded = encode(value)
    assert not is_opaque(encoded)
    assert decode(encoded, trusted=False) == value


@pytest.mark.parametrize(
    "value",
    [
        [1] * 100, [1.5] * 100, (1 << 62,) * 100, [1 << 70] * 100, [True] * 100, torch.float16, torch.device("cpu"),
        torch.Size([2, 3]), 1 + 2j, frozenset([1]), bytearray(b"x"), np.float32(1.5), np.int64(7), "\ud800",
        random.Random(1).getstate(),
    ],
)  # fmt: skip
def test_other_values_arrive_as_they_were(value: object) -> None:
    found = decode(encode(value), trusted=False)
    assert (type(found), found) == (type(value), value)


def test_arrays_and_tensors_arrive_as_they_were() -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.array(["a", "bc"]), np.array([], dtype=np.int32)):
        found = decode(encode(array), trusted=False)
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    for tensor in (torch.arange(6.0).view(2, 3).T, torch.ones(3, dtype=torch.bfloat16), torch.empty(0, 2)):
        found = decode(encode(tensor), trusted=False)
        assert (found.dtype, found.tolist()) == (tensor.dtype, tensor.tolist())
    assert decode(encode(np.random.RandomState(1).get_state()), trusted=False)[0] == "MT19937"


@pytest.mark.parametrize("value", [Attack(), [Attack()], {"k": (Attack(),)}, np.array([Attack()], dtype=object)])
def test_an_object_is_opaque_and_not_made_of_untrusted_bytes(value: object) -> None:
    EXECUTED.clear()
    encoded = encode(value)
    assert is_opaque(encoded)
    assert is_opaque(bytes(encoded))
    nested = encode({"state": encoded})
    assert is_opaque(nested)
    for data in (encoded, nested):
        with pytest.raises(OpaqueError):
            decode(data, trusted=False)
    with pytest.raises(OpaqueError):
        _restored(bytes(encoded))
    assert not EXECUTED


@given(st.binary() | st.binary(min_size=1).map(lambda raw: b"l" + (5).to_bytes(8, "little") + raw))
def test_any_bytes_are_a_value_or_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(StateError):
        decode(data, trusted=False)


@pytest.mark.parametrize("letter", [b"l", b"D", b"s", b"b", b"u", b"i"])
def test_an_announced_length_beyond_what_is_there_takes_no_memory(letter: bytes) -> None:
    with pytest.raises(StateError):
        decode(letter + (1 << 60).to_bytes(8, "little"), trusted=False)


def test_a_value_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(StateError):
        decode(b"l\x01\0\0\0\0\0\0\0" * 10_000 + b"N", trusted=False)


def test_a_pickle_in_place_of_a_head_is_not_executed() -> None:
    EXECUTED.clear()
    sender, receiver = both()
    (head,) = _cut(pickle.dumps((Attack(), []), protocol=5))
    sent = sender._lanes[0].send([head], 1, 0)
    with pytest.raises(CollectiveError, match="cannot be read"):
        receive_state(receiver, 0)
    sent.wait()
    assert not EXECUTED


@pytest.mark.parametrize("shape", [(1 << 50,), (-1,), (-(1 << 40), -(1 << 40))])
def test_tensors_beyond_the_memory_are_refused_before_it_is_taken(shape: tuple[int, ...]) -> None:
    sender, receiver = both()
    (head,) = _cut(encode((encode(None), None, [(torch.float32, shape)])))
    sent = sender._lanes[0].send([head], 1, 0)
    with pytest.raises(CollectiveError, match="cannot be read"):
        receive_state(receiver, 0)
    sent.wait()


def test_objects_travel_through_the_coordinator_and_leave_it_again() -> None:
    sender, receiver, store = with_store(both())
    state = {"counts": collections.Counter(a=2), "weights": torch.arange(10.0), "big": Big("x" * 600_000)}
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_state, sender, 1, state)
        received = receive_state(receiver, 0)
        sent.result()
    assert received["big"] == state["big"]
    assert torch.equal(received["weights"], torch.arange(10.0))
    assert not store.values


def test_objects_are_refused_where_there_is_no_coordinator() -> None:
    sender, _ = both()
    with pytest.raises(StateError, match="keep tensors, numbers, text"):
        send_state(sender, 1, {"object": Big("x")})


def test_values_of_all_are_gathered_and_what_was_left_for_them_does_not_pile_up() -> None:
    first, second, store = with_store(both())
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            both_values = list(pool.map(lambda group: gather_values(group, Big(str(group.rank))), (first, second)))
            assert both_values == [[Big("0"), Big("1")]] * 2
    assert len(store.values) <= 8


class Big:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Big) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def test_a_state_keeps_its_structure_through_files_and_connections(tmp_path: Path) -> None:
    skeleton, tensors = pack({"a": [torch.ones(2)], "b": ({"c": None},)})
    assert unpack(bytes(skeleton), tensors, trusted=False)["b"] == ({"c": None},)
