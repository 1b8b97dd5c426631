"""State from one rank to another, over the generation's own group.

Messages: the head (its length, and pickled: the skeleton, and what to allocate) in one message of a fixed size, with a
second one for what does not fit into it; then the tensors: large ones in two halves, one for each of a group's two
connections; small ones joined into one buffer for each dtype, because a message costs more than a copy. The last one is
the sender's word that it stood still until all of it was sent: the tensors are live ones, and a sender that was called
away trains on while a thread is still sending them. The sender waits once, for all: each wait is a turn of the
machine's scheduler, which a busy one makes long.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.packing import describe, holes, pack, unpack

if TYPE_CHECKING:
    from elastic_runtime.groups import Group

SMALL_NUMEL = 1 << 14
HEAD_BYTES = 1 << 16
_LENGTH_BYTES = 8


def send_state(group: Group, to: int, state: object) -> None:
    """Blocks until all is sent. StateError where the state cannot be saved, CollectiveError where the peer is lost."""
    skeleton, tensors = pack(state)
    tensors = [tensor.cpu() for tensor in tensors]
    head = pickle.dumps((skeleton, describe(tensors)), protocol=5)
    group.send([*_cut(head), *_messages(tensors)], to, last=torch.ones(1))


def receive_state(group: Group, source: int, own: object = None) -> Any:
    """The state that `send_state` sent. CollectiveError where the peer is lost.

    It is received into the tensors of `own` where that has the same structure: fresh memory costs more than the
    transfer. So `own` is a state that may be lost, should the transfer fail half way.
    """
    parts = [torch.empty(HEAD_BYTES, dtype=torch.uint8)]
    group.receive(parts, source)
    length = int(parts[0][:_LENGTH_BYTES].view(torch.int64))
    if length > HEAD_BYTES:
        parts.append(torch.empty(length - HEAD_BYTES, dtype=torch.uint8))
        group.receive(parts[1:], source, first=1)
    head = b"".join(ctypes.string_at(part.data_ptr(), part.numel()) for part in parts)[_LENGTH_BYTES:length]
    skeleton, shapes = pickle.loads(head)  # noqa: S301  (written by a worker of the same job)
    tensors = _room(skeleton, shapes, own)
    messages = _messages(tensors)
    group.receive([*messages, torch.zeros(1)], source, first=len(parts))
    _scatter(tensors, messages)
    return unpack(skeleton, tensors)


def _cut(head: bytes) -> list[torch.Tensor]:
    """One message that the receiver knows the size of, or two: waiting for one more is a turn of two schedulers."""
    whole = bytearray((_LENGTH_BYTES + len(head)).to_bytes(_LENGTH_BYTES, sys.byteorder) + head)
    rest = whole[HEAD_BYTES:]
    first = torch.frombuffer(whole.ljust(HEAD_BYTES, b"\0"), dtype=torch.uint8)[:HEAD_BYTES]
    return [first, torch.frombuffer(rest, dtype=torch.uint8)] if rest else [first]


def _room(skeleton: bytes, shapes: list[tuple[torch.dtype, tuple[int, ...]]], own: object) -> list[torch.Tensor]:
    if own is not None:
        mine, tensors = pack(own)
        usable = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        if usable and describe(tensors) == shapes and holes(mine) == holes(skeleton):
            return tensors
    return [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]


def _messages(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is sent, in order: halves of large tensors, then the small ones of each dtype, joined, as bytes."""
    large = [half for t in tensors if t.numel() > SMALL_NUMEL for half in t.contiguous().view(-1).chunk(2)]
    return large + [torch.cat([t.reshape(-1) for t in small]) for small in _small(tensors)]


def _small(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if 0 < tensor.numel() <= SMALL_NUMEL:
            kinds.setdefault(tensor.dtype, []).append(tensor)
    return [kinds[dtype] for dtype in sorted(kinds, key=str)]


def _scatter(tensors: list[torch.Tensor], messages: list[torch.Tensor]) -> None:
    joined = messages[2 * sum(t.numel() > SMALL_NUMEL for t in tensors) :]
    for small, flat in zip(_small(tensors), joined, strict=True):
        parts = torch.split(flat, [t.numel() for t in small])
        for tensor, part in zip(small, parts, strict=True):
            tensor.view(-1).copy_(part)
