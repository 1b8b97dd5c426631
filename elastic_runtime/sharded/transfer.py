"""Resharding in memory: from the old ranks' parts to the new ranks', peer to peer, while the old group lives.

With replica groups several ranks have the same part, which is numbered by its place in a group; any of them may
provide it.

A leaving rank sends its parts over the old group to ranks that stay; these forward them over the new group, with their
own. Both process the same batches in the same order, so no rank holds more than one batch of foreign parts. An old
part is freed as soon as all of it was sent: the pause needs the memory of the shards once, not twice.

All-to-all rather than sends and receives: gloo closes the connection where those are waited for in turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic_runtime.sharded.layout import Cut, Range, Sharded, batches, providers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.plan.replica_groups import Grid

    Pieces = dict[tuple[Cut, int], torch.Tensor]
    """The pieces that this rank forwards for a leaving rank, by cut and old rank."""


class Resharding:
    """From the ranks of an `old` generation to those of a `new` one. `held[r]`: the old rank of new rank r, -1 where it
    is new.

    `provided[r]`: the old parts that new rank r provides; by default its own, and in turn those that only leaving ranks
    have. Where several provide one, the ranks of the new replica groups take it from them in turn.
    """

    def __init__(
        self,
        tensors: Sequence[Sharded],
        old: Grid,
        held: Sequence[int],
        new: Grid,
        device: torch.device,
        provided: list[list[int]] | None = None,
    ) -> None:
        self._tensors, self._old, self._new, self._device = tensors, old, new, device
        self._held = held
        own = [old.shard_of(rank) if rank >= 0 else -1 for rank in held]
        self._provided = providers(old.shards, own) if provided is None else provided
        self._sources = [[rank for rank, olds in enumerate(self._provided) if o in olds] for o in range(old.shards)]
        self._missing = [each for each in range(old.shards) if each not in own]

    def hand_over(self, old_group: Group, old_rank: int, shards: list[torch.Tensor]) -> None:
        """Send the parts of this leaving rank. Raises CollectiveError if a peer is lost."""
        for batch in batches(self._tensors) if self._missing else ():
            self._bring(old_group, old_rank, batch, shards)

    def run(
        self, group: Group, old_group: Group | None, shards: Mapping[int, list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the new parts of a rank that stays or joins. `shards`: the old parts that it has, by their numbers;
        the lists are emptied meanwhile.

        Raises CollectiveError if a peer is lost; the old parts are then no longer available.
        """
        new = [self._allocate(tensor, group) for tensor in self._tensors]
        own = self._held[group.rank]
        for batch in batches(self._tensors):
            pieces = self._bring(old_group, own, batch, []) if old_group and self._missing else {}
            self._exchange(group, batch, shards, pieces, new)
            for cut in batch:
                if cut.stop == self._tensors[cut.index].size:
                    for parts in shards.values():
                        parts[cut.index] = torch.empty(0)
        return new

    def _allocate(self, tensor: Sharded, group: Group) -> torch.Tensor:
        shape = tensor.local_shape(self._part(tensor, group.rank))
        return torch.empty(shape, dtype=tensor.dtype, device=self._device)

    def _part(self, tensor: Sharded, rank: int) -> Range:
        """Return the part of a new rank."""
        return tensor.part(self._new.shard_of(rank), self._new.shards)

    def _bring(self, group: Group, rank: int, batch: list[Cut], shards: list[torch.Tensor]) -> Pieces:
        """Send the parts that only leaving ranks have over the old group, to the ranks that forward them.

        If no rank that has such a part stays, the one in the first replica group leaves, too: its number is the part's.
        """
        sent: list[list[torch.Tensor]] = [[] for _ in range(self._old.ranks)]
        wanted: list[list[tuple[Cut, int, Range]]] = [[] for _ in range(self._old.ranks)]
        for leaver in self._missing:
            to = self._held[self._sources[leaver][0]]
            for cut in batch:
                span = cut.within(self._tensors[cut.index].part(leaver, self._old.shards))
                if span and rank == leaver:
                    sent[to].append(self._slice(cut.index, shards[cut.index], span, rank))
                if span and rank == to:
                    wanted[leaver].append((cut, leaver, span))
        received = self._all_to_all(group, sent, [[self._shape(cut, span) for cut, _, span in w] for w in wanted])
        return {
            (cut, old): piece
            for pieces, whats in zip(received, wanted, strict=True)
            for piece, (cut, old, _) in zip(pieces, whats, strict=True)
        }

    def _exchange(
        self,
        group: Group,
        batch: list[Cut],
        shards: Mapping[int, list[torch.Tensor]],
        pieces: Pieces,
        new: list[torch.Tensor],
    ) -> None:
        """Exchange all new parts over the new group."""
        sent = [
            [self._piece(cut, old, span, shards, pieces) for cut, old, span in self._moves(batch, group.rank, to)]
            for to in range(group.size)
        ]
        wanted = [self._moves(batch, source, group.rank) for source in range(group.size)]
        received = self._all_to_all(group, sent, [[self._shape(cut, span) for cut, _, span in w] for w in wanted])
        for got, whats in zip(received, wanted, strict=True):
            for piece, (cut, _, span) in zip(got, whats, strict=True):
                tensor = self._tensors[cut.index]
                start = self._part(tensor, group.rank)[0]
                new[cut.index].narrow(tensor.dim, span[0] - start, span[1] - span[0]).copy_(piece)

    def _moves(self, batch: list[Cut], source: int, to: int) -> list[tuple[Cut, int, Range]]:
        """Return what new rank `source` sends to new rank `to`, in order: (cut, old part in which it lies, range)."""
        found = []
        for cut in batch:
            tensor = self._tensors[cut.index]
            for old in self._provided[source]:
                if self._source(old, to) != source:
                    continue
                span = cut.within(tensor.part(old, self._old.shards), self._part(tensor, to))
                if span:
                    found.append((cut, old, span))
        return found

    def _source(self, old: int, to: int) -> int:
        """Return the rank from which new rank `to` takes what it needs of an old part: itself, if it has it."""
        sources = self._sources[old]
        return to if to in sources else sources[self._new.group_of(to) % len(sources)]

    def _piece(
        self,
        cut: Cut,
        old: int,
        span: Range,
        shards: Mapping[int, list[torch.Tensor]],
        pieces: Pieces,
    ) -> torch.Tensor:
        brought = pieces.get((cut, old))
        if brought is None:
            return self._slice(cut.index, shards[old][cut.index], span, old)
        tensor = self._tensors[cut.index]
        start = max(cut.start, tensor.part(old, self._old.shards)[0])
        return brought.narrow(tensor.dim, span[0] - start, span[1] - span[0])

    def _slice(self, index: int, shard: torch.Tensor, span: Range, old: int) -> torch.Tensor:
        tensor = self._tensors[index]
        start = tensor.part(old, self._old.shards)[0]
        return shard.narrow(tensor.dim, span[0] - start, span[1] - span[0])

    def _shape(self, cut: Cut, span: Range) -> tuple[torch.dtype, tuple[int, ...]]:
        tensor = self._tensors[cut.index]
        return tensor.dtype, tensor.local_shape(span)

    def _all_to_all(
        self,
        group: Group,
        sent: list[list[torch.Tensor]],
        expected: list[list[tuple[torch.dtype, tuple[int, ...]]]],
    ) -> list[list[torch.Tensor]]:
        """Tensors for each rank, as bytes, and those of each rank."""
        parts = [[_bytes(tensor) for tensor in tensors] for tensors in sent]
        flat = [part for of_rank in parts for part in of_rank]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=self._device)
        sizes = [[_numel(shape) * dtype.itemsize for dtype, shape in of_rank] for of_rank in expected]
        incoming = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=self._device)
        if group.size == 1:
            incoming.copy_(outgoing)
        else:
            sent_sizes = [sum(part.numel() for part in of_rank) for of_rank in parts]
            group.wait([group.all_to_all(incoming, outgoing, [sum(s) for s in sizes], sent_sizes)])
        received = iter(torch.split(incoming, [size for of_rank in sizes for size in of_rank]))
        return [[_typed(next(received), dtype, shape) for dtype, shape in of_rank] for of_rank in expected]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _typed(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    aligned = raw.clone() if raw.storage_offset() % dtype.itemsize else raw
    return aligned.view(dtype).view(shape)
