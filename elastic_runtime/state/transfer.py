"""State from one rank to another, over the generation's own group.

Messages: the head (its length, and encoded: the skeleton, and what to allocate) in one message of a fixed size, with a
second one for what does not fit into it; then the tensors: large ones in two halves, one for each of a group's two
connections; small ones joined into one buffer for each dtype, because a message costs more than a copy. The last one is
the sender's confirmation that its tensors did not change until all were sent: they are the live ones, and a sender that
was interrupted continues to train while a thread still sends them. The sender waits once, for all: each wait is a turn
of the machine's scheduler, which a busy one makes long.

Nothing that arrives is unpickled: a head is decoded by `codec`, and its sizes are limited before memory is taken. A
state with objects that require pickle stores its skeleton with the coordinator instead, which authenticates its workers
by their token; the head contains the key.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CollectiveError, StateError
from elastic_runtime.state.codec import decode, encode, is_opaque
from elastic_runtime.state.layouts import allocate, describe, flat
from elastic_runtime.state.packing import holes, pack, unpack

if TYPE_CHECKING:
    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.state.layouts import Description

SMALL_NUMEL = 1 << 14
HEAD_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 28
_LENGTH_BYTES = 8


def send_state(group: Group, to: int, state: object) -> None:
    """Blocks until all is sent. StateError where the state cannot be saved, CollectiveError where the peer is lost."""
    skeleton, tensors = pack(state)
    tensors = [tensor.cpu() for tensor in tensors]
    left = group.leave(skeleton, to) if is_opaque(skeleton) else None
    head = encode((skeleton if left is None else None, left, describe(tensors)))
    group.send([*_cut(head), *_messages(tensors)], to, last=torch.ones(1))


def receive_state(group: Group, source: int, own: object = None) -> Any:
    """The state that `send_state` sent. CollectiveError where the peer is lost.

    It is received into the tensors of `own` where that has the same structure: fresh memory costs more than the
    transfer. So `own` is a state that may be lost, should the transfer fail half way.
    """
    head, parts = _receive_head(group, source)
    try:
        skeleton, left, shapes = decode(head, trusted=False)
        _check_shapes(shapes)
        trusted = left is not None
        skeleton = group.fetch(left) if trusted else skeleton
        tensors = _room(skeleton, shapes, own, trusted=trusted)
    except (StateError, TypeError, ValueError, RuntimeError) as error:
        raise CollectiveError(f"the state that rank {source} sent cannot be read: {error}") from error
    messages = _messages(tensors)
    group.receive([*messages, torch.zeros(1)], source, first=parts)
    _scatter(tensors, messages)
    return unpack(skeleton, tensors, trusted=trusted)


def gather_values(group: Group, value: Any) -> list[Any]:
    """Each rank's value, its tensors on the CPU. CollectiveError where a peer is lost, or sends what cannot be read."""
    mine = _as_bytes(group, value)
    lengths = group.all_gather(torch.tensor([len(mine)])).flatten().tolist()
    if not all(0 <= length <= _memory_bytes() for length in lengths):
        raise CollectiveError(f"the workers announced values of {lengths} bytes")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
    rows = group.all_gather(padded)
    return [_value(group, row.numpy().tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)]


def _as_bytes(group: Group, value: object) -> bytearray:
    skeleton, tensors = pack(value)
    left = group.leave(skeleton, None) if is_opaque(skeleton) else None
    alone = [tensor.cpu().clone() for tensor in tensors]
    return bytearray(encode((skeleton if left is None else None, left, alone)))


def _value(group: Group, data: bytes) -> Any:
    try:
        skeleton, left, tensors = decode(data, trusted=False)
        trusted = left is not None
        return unpack(group.fetch(left) if trusted else skeleton, tensors, trusted=trusted)
    except (StateError, TypeError, ValueError, RuntimeError) as error:
        raise CollectiveError(f"the value of another worker cannot be read: {error}") from error


def _receive_head(group: Group, source: int) -> tuple[bytes, int]:
    """(the head, in how many messages it came)."""
    parts = [torch.empty(HEAD_BYTES, dtype=torch.uint8)]
    group.receive(parts, source)
    length = int(parts[0][:_LENGTH_BYTES].view(torch.int64))
    if not _LENGTH_BYTES <= length <= MAX_HEAD_BYTES:
        raise CollectiveError(f"rank {source} announced a head of {length} bytes, more than {MAX_HEAD_BYTES}")
    if length > HEAD_BYTES:
        parts.append(torch.empty(length - HEAD_BYTES, dtype=torch.uint8))
        group.receive(parts[1:], source, first=1)
    whole = b"".join(ctypes.string_at(part.data_ptr(), part.numel()) for part in parts)
    return whole[_LENGTH_BYTES:length], len(parts)


def _check_shapes(shapes: list[Description]) -> None:
    """StateError for tensors that this machine's memory cannot hold."""
    size = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape, *_ in shapes)
    if any(number < 0 for _, *numbers in shapes for row in numbers for number in row) or size > _memory_bytes():
        raise StateError(f"its tensors have {size} bytes, and this machine's memory {_memory_bytes()}")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cut(head: bytes) -> list[torch.Tensor]:
    """One message of a size that the receiver expects, or two: each further wait costs a turn of two schedulers."""
    whole = bytearray((_LENGTH_BYTES + len(head)).to_bytes(_LENGTH_BYTES, sys.byteorder) + head)
    rest = whole[HEAD_BYTES:]
    first = torch.frombuffer(whole.ljust(HEAD_BYTES, b"\0"), dtype=torch.uint8)[:HEAD_BYTES]
    return [first, torch.frombuffer(rest, dtype=torch.uint8)] if rest else [first]


def _room(skeleton: bytes, shapes: list[Description], own: object, *, trusted: bool) -> list[torch.Tensor]:
    if own is None:
        return [allocate(each) for each in shapes]
    mine, tensors = pack(own)
    if len(tensors) != len(shapes) or holes(mine) != holes(skeleton, trusted=trusted):
        return [allocate(each) for each in shapes]
    pairs = zip(tensors, describe(tensors), shapes, strict=True)
    return [tensor if own == each and _usable(tensor) else allocate(each) for tensor, own, each in pairs]


def _usable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and flat(tensor).data_ptr() == tensor.data_ptr()


def _messages(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the messages in order: halves of large tensors, then the small ones of each dtype, joined.

    All as bytes: gloo refuses to send booleans and complex numbers.
    """
    large = [half for t in tensors if t.numel() > SMALL_NUMEL for half in flat(t).chunk(2)]
    joined = [torch.cat([flat(t) for t in small]) for small in _small(tensors)]
    return [message.view(torch.uint8) for message in large + joined]


def _small(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if 0 < tensor.numel() <= SMALL_NUMEL:
            kinds.setdefault(tensor.dtype, []).append(tensor)
    return [kinds[dtype] for dtype in sorted(kinds, key=str)]


def _scatter(tensors: list[torch.Tensor], messages: list[torch.Tensor]) -> None:
    joined = messages[2 * sum(t.numel() > SMALL_NUMEL for t in tensors) :]
    for small, whole in zip(_small(tensors), joined, strict=True):
        parts = torch.split(whole.view(small[0].dtype), [t.numel() for t in small])
        for tensor, part in zip(small, parts, strict=True):
            flat(tensor).copy_(part)
