"""Checkpoints of a sharded job: each rank writes its parts, and a reader takes the parts it needs.

    checkpoint-STEP-SAVE.part-RANK-of-RANKS

SAVE is a number of its own for each time that a checkpoint is made, so that the parts of two attempts at one step are
never mixed. A part is written beside its place, synced, and renamed; a checkpoint is whole when all its parts are
there: no rank waits for another, and no last word has to be written. One file, gathered by rank 0, was rejected: all of
the model would pass through one worker while the others wait.

Layout of a part: magic, tensors, head (encoded: skeleton, kinds, ranges, and of each tensor offset, length and CRC-32),
length of the head (8 bytes), its CRC-32 (4 bytes). So a reader checks just what it reads. Until version 0.2 the head
was pickled; such a part is read with the classes of a head only.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CheckpointError
from elastic_runtime.sharded.layout import Sharded
from elastic_runtime.state import checkpoint
from elastic_runtime.state.checkpoint import NOT_OWN, is_own
from elastic_runtime.state.codec import Skeleton, decode, encode, is_opaque

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader

    from elastic_runtime.sharded.layout import Range
    from elastic_runtime.sharded.state import Parts

MAGIC = b"ELASTIC3"
_PICKLED = b"ELASTICS"  # until 0.2
_PART = re.compile(r"checkpoint-(\d{12})-([0-9a-f]{8})\.part-(\d+)-of-(\d+)")
_TAIL = 12

_log = logging.getLogger("elastic_runtime")


@dataclass(frozen=True, order=True)
class Saved:
    """One whole checkpoint. `ranks` and `save` are 0 for one that a job which is not sharded has written."""

    step: int
    save: int
    ranks: int

    def path(self, directory: str, rank: int) -> Path:
        """Return the path of one rank's part."""
        if self.ranks == 0:
            return Path(directory) / f"checkpoint-{self.step:012d}.elastic"
        return Path(directory) / f"checkpoint-{self.step:012d}-{self.save:08x}.part-{rank}-of-{self.ranks}"

    def __str__(self) -> str:
        return self.path("", 0).name.split(".")[0]


@dataclass(frozen=True)
class _Stored:
    offset: int
    length: int
    crc: int


@dataclass(frozen=True)
class _Head:
    skeleton: Skeleton
    kinds: list[Sharded | None]
    ranges: list[Range]
    shards: list[_Stored]
    replicated: list[tuple[_Stored, torch.dtype, tuple[int, ...]]]

    def encoded(self) -> bytes:
        """Return the head as plain values, which need no pickle."""
        kinds = [None if kind is None else (kind.dtype, kind.shape, kind.dim) for kind in self.kinds]
        common = [(astuple(stored), dtype, shape) for stored, dtype, shape in self.replicated]
        return encode((bytes(self.skeleton), kinds, self.ranges, [astuple(one) for one in self.shards], common))

    @classmethod
    def decoded(cls, raw: bytes) -> _Head:
        """Return the head again; nothing in it is executed."""
        skeleton, kinds, ranges, shards, common = decode(raw, trusted=False)
        return cls(
            Skeleton(skeleton),
            [None if kind is None else Sharded(*kind) for kind in kinds],
            ranges,
            [_Stored(*one) for one in shards],
            [(_Stored(*stored), dtype, tuple(shape)) for stored, dtype, shape in common],
        )


def whole_ones(directory: str) -> list[Saved]:
    """All whole checkpoints, newest first, those of jobs that are not sharded as well."""
    found = [saved for saved, ranks in _parts(directory).items() if len(ranks) == saved.ranks]
    found += [Saved(int(path.stem.removeprefix("checkpoint-")), 0, 0) for path in checkpoint.checkpoints(directory)]
    return sorted(found, reverse=True)


def write_part(directory: str, saved: Saved, rank: int, parts: Parts) -> Path:
    """This rank's part; every rank writes those tensors that all have, too. CheckpointError where it cannot be done."""
    target = saved.path(directory, rank)
    partial = target.with_name(f"{target.name}.partial")
    checkpoint.write_whole(target, partial, saved.step, _blocks(parts, rank, saved.ranks))
    return target


def prune(directory: str, keep: int, step: int) -> None:
    """Leave the newest `keep` whole ones up to `step`, and what may still be in the making.

    Above `step`, which was just written, is what was damaged when the training went back.
    """
    whole = [saved for saved in whole_ones(directory) if saved.step <= step]
    if not whole:
        return
    kept = set(whole[:keep])
    for saved, ranks in _parts(directory).items():
        if saved not in kept and saved < whole[0]:
            for rank in ranks:
                saved.path(directory, rank).unlink(missing_ok=True)
    for saved in whole[keep:]:
        saved.path(directory, 0).unlink(missing_ok=True)
    for partial in Path(directory).glob("checkpoint-*.part-*.partial"):
        if int(partial.name.split("-")[1]) < whole[0].step:
            partial.unlink(missing_ok=True)


def read_parts(directory: str, saved: Saved, rank: int, ranks: int) -> Parts:
    """The parts of one rank among `ranks`, whatever their number was. CheckpointError where something is damaged."""
    from elastic_runtime.sharded.state import Parts  # noqa: PLC0415  (a job that is not sharded needs no DTensor)

    with contextlib.ExitStack() as stack:
        try:
            files = [stack.enter_context(saved.path(directory, r).open("rb")) for r in range(saved.ranks)]
            heads = [_head(file) for file in files]
            replicated = [_typed(_read(files[0], at), dtype, shape) for at, dtype, shape in heads[0].replicated]
            sharded = [kind for kind in heads[0].kinds if kind is not None]
            shards = [_shard(index, kind, kind.part(rank, ranks), files, heads) for index, kind in enumerate(sharded)]
        except Exception as error:  # whatever a damaged file leads to, the checkpoint before it is tried
            raise CheckpointError(f"checkpoint {saved} is damaged: {error}") from error
    return Parts(heads[0].skeleton, heads[0].kinds, shards, replicated)


def load_newest(directory: str) -> tuple[int, Any] | None:
    """(step, state) of the newest whole checkpoint of either kind, for a job that is not sharded; None: there is none.

    A damaged one is warned of and skipped.
    """
    for saved in whole_ones(directory):
        try:
            if saved.ranks == 0:
                return checkpoint.load(saved.path(directory, 0))
            return saved.step, read_parts(directory, saved, 0, 1).tree(None)
        except CheckpointError as error:
            _log.warning("%s; falling back to the one before", error)
    return None


def _parts(directory: str) -> dict[Saved, list[int]]:
    """Return the ranks whose parts exist, for each checkpoint."""
    found: dict[Saved, list[int]] = {}
    for path in Path(directory).glob("checkpoint-*.part-*-of-*"):
        if match := _PART.fullmatch(path.name):
            step, save, rank, ranks = match.groups()
            found.setdefault(Saved(int(step), int(save, 16), int(ranks)), []).append(int(rank))
    return found


def _blocks(parts: Parts, rank: int, ranks: int) -> Iterator[bytes | memoryview]:
    yield MAGIC
    at, stored = len(MAGIC), []
    tensors = [tensor.cpu().contiguous() for tensor in (*parts.shards, *parts.replicated)]
    for tensor in tensors:
        raw = checkpoint.bytes_of(tensor)
        stored.append(_Stored(at, len(raw), zlib.crc32(raw)))
        at += len(raw)
        yield raw
    ranges = [kind.part(rank, ranks) for kind in parts.sharded]
    common = tensors[len(ranges) :]
    described = [(s, t.dtype, tuple(t.shape)) for s, t in zip(stored[len(ranges) :], common, strict=True)]
    head = _Head(parts.skeleton, parts.kinds, ranges, stored[: len(ranges)], described).encoded()
    yield head
    yield len(head).to_bytes(8, "little") + zlib.crc32(head).to_bytes(4, "little")


def _head(file: BufferedReader) -> _Head:
    magic = file.read(len(MAGIC))
    if magic not in {MAGIC, _PICKLED}:
        raise ValueError("it does not begin as one does")
    end = file.seek(-_TAIL, os.SEEK_END)
    tail = file.read(_TAIL)
    length = int.from_bytes(tail[:8], "little")
    if length > end:
        raise ValueError(f"its head would have {length} bytes, and it has {end} in all")
    file.seek(end - length)
    head = file.read(length)
    if zlib.crc32(head) != int.from_bytes(tail[8:], "little"):
        raise ValueError("the checksum of its head does not match")
    found = _Head.decoded(head) if magic == MAGIC else _HeadUnpickler(io.BytesIO(head)).load()
    if not isinstance(found, _Head):
        raise TypeError("it has no head")
    if not is_own(file) and is_opaque(bytes(found.skeleton)):
        raise ValueError(NOT_OWN)
    return found


class _HeadUnpickler(pickle.Unpickler):
    """Reads the head of a part until version 0.2: no other class, and no function, is loaded."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a head, or a type of tensors."""
        allowed = {one.__qualname__: one for one in (_Head, _Stored, Sharded, Skeleton)}
        if name in allowed and module == allowed[name].__module__:
            return allowed[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"a head has no {module}.{name}")


def _shard(index: int, kind: Sharded, wanted: Range, files: list[BufferedReader], heads: list[_Head]) -> torch.Tensor:
    """Part `wanted` of a tensor, from the old ranks' parts that overlap with it."""
    shard = torch.empty(kind.local_shape(wanted), dtype=kind.dtype)
    for file, head in zip(files, heads, strict=True):
        old = head.ranges[index]
        start, stop = max(wanted[0], old[0]), min(wanted[1], old[1])
        if start < stop:
            part = _typed(_read(file, head.shards[index]), kind.dtype, kind.local_shape(old))
            shard.narrow(kind.dim, start - wanted[0], stop - start).copy_(
                part.narrow(kind.dim, start - old[0], stop - start)
            )
    return shard


def _read(file: BufferedReader, stored: _Stored) -> bytearray:
    if not 0 <= stored.offset <= stored.offset + stored.length <= os.fstat(file.fileno()).st_size:
        raise ValueError("a tensor would lie outside of the file")
    raw = bytearray(stored.length)
    file.seek(stored.offset)
    if file.readinto(raw) != stored.length or zlib.crc32(raw) != stored.crc:
        raise ValueError("a checksum does not match")
    return raw


def _typed(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
