"""Checkpoints: whole or not there, checked, and readable at any world size.

A file is written beside its place, synced, and renamed into it; so, killed at any instant, what has the name is whole.
Layout: magic, length of the head (8 bytes), CRC-32 of both and of the head, head (encoded: step, skeleton, and of
each tensor type, shape and unusual strides),
tensors, CRC-32 of all before it. Nothing is decoded, and no memory is taken, before its checksum was verified.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import CheckpointError
from elastic_runtime.state.codec import OpaqueError, decode, encode
from elastic_runtime.state.layouts import allocate, describe, flat
from elastic_runtime.state.packing import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader

    import torch

MAGIC = b"ELASTIC2"
KEEP = 2
NOT_OWN = "it holds objects that only pickle can make, and another user may have written it"


def save(directory: str, step: int, state: object, *, keep: int = KEEP) -> Path:
    """Write the state after `step`; older files beyond `keep` are removed.

    Raises CheckpointError where it cannot be written (the older ones are then untouched), StateError where the state
    cannot be saved at all.
    """
    skeleton, tensors = pack(state)
    tensors = [tensor.cpu() for tensor in tensors]
    target = Path(directory) / f"checkpoint-{step:012d}.elastic"
    partial = target.with_suffix(f".partial-{os.getpid()}")
    write_whole(target, partial, step, _blocks(step, skeleton, tensors))
    for old in (*checkpoints(directory)[keep:], *_abandoned(target)):
        old.unlink(missing_ok=True)
    return target


def load(path: Path) -> tuple[int, Any]:
    """(step, state). CheckpointError where it is damaged."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except OpaqueError as error:
        raise CheckpointError(f"checkpoint {path} is not loaded: {NOT_OWN}") from error
    except Exception as error:  # whatever a damaged file leads to, the one before it is tried
        raise CheckpointError(f"checkpoint {path} is damaged ({error})") from error


def checkpoints(directory: str) -> list[Path]:
    """All of them, newest first."""
    return sorted(Path(directory).glob("checkpoint-*.elastic"), reverse=True)


def _abandoned(newest: Path) -> list[Path]:
    """Return the partial files that killed writers have left, of steps up to that of `newest`."""
    partials = newest.parent.glob("checkpoint-*.partial-*")
    return [partial for partial in partials if partial.name.partition(".")[0] <= newest.stem]


def write_whole(target: Path, partial: Path, step: int, blocks: Iterable[bytes | memoryview]) -> None:
    """Write `target`, by way of `partial` beside it. CheckpointError, and neither of them, where it cannot be done."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            if (mode := os.fstat(file.fileno()).st_mode) & stat.S_IWOTH:
                with contextlib.suppress(OSError):  # not every file system has modes; see `is_own`
                    os.fchmod(file.fileno(), mode & ~stat.S_IWOTH)
            file.writelines(blocks)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        _sync_directory(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"step {step} could not be saved to {target.parent}: {error}; free or mount it"
        ) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU, which must live as long."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _blocks(step: int, skeleton: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    head = encode((step, skeleton, describe(tensors)))
    start = MAGIC + len(head).to_bytes(8, "little")
    checksum = 0
    parts: list[bytes | memoryview] = [
        start,
        zlib.crc32(head, zlib.crc32(start)).to_bytes(4, "little"),
        head,
        *map(bytes_of, map(flat, tensors)),
    ]
    for part in parts:
        checksum = zlib.crc32(part, checksum)
        yield part
    yield checksum.to_bytes(4, "little")


def _read(file: BufferedReader) -> tuple[int, Any]:
    start = file.read(len(MAGIC) + 8)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if not start.startswith(MAGIC) or length > os.fstat(file.fileno()).st_size:
        raise CheckpointError("it does not begin as a checkpoint does")
    (step, skeleton, shapes), checksum = _head(file, start, length)
    tensors = [allocate(each) for each in shapes]
    for part in map(bytes_of, map(flat, tensors)):
        if file.readinto(part) != part.nbytes:
            raise CheckpointError("it ends too early")
        checksum = zlib.crc32(part, checksum)
    if file.read() != checksum.to_bytes(4, "little"):
        raise CheckpointError(_WRONG_CHECKSUM)
    return step, unpack(skeleton, tensors, trusted=is_own(file))


_WRONG_CHECKSUM = "its checksum is wrong"


def _head(file: BufferedReader, start: bytes, length: int) -> tuple[Any, int]:
    """(the head, the checksum up to its end)."""
    stored, raw = file.read(4), file.read(length)
    if stored != zlib.crc32(raw, zlib.crc32(start)).to_bytes(4, "little"):
        raise CheckpointError(_WRONG_CHECKSUM)
    return decode(raw, trusted=is_own(file)), zlib.crc32(raw, zlib.crc32(stored, zlib.crc32(start)))


def _sync_directory(directory: Path) -> None:
    """Sync the names in the directory, where the file system can: without that a checkpoint may be the one before."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_own(file: BufferedReader) -> bool:
    """Return whether objects of this open file may be unpickled: it is this job's own, as far as the system records it.

    Objects that only pickle can make are a program for their reader. They are decoded only from files that this user,
    root or the owner of the folder has written, and that not everybody may write to. Jobs that share a volume and run
    as one user cannot be told apart: there a job's files are as trusted as its volume. So they are on one that shows
    every file with one owner and one mode, as mounts of SMB and many of FUSE do.
    """
    facts, folder = os.fstat(file.fileno()), Path(file.name).parent
    above = folder.stat()
    owners = {os.geteuid(), 0}
    if not above.st_mode & stat.S_IWOTH or above.st_mode & stat.S_ISVTX:
        owners.add(above.st_uid)  # the volume of another user's number, as NFS shows root's files
    if facts.st_uid in owners and not facts.st_mode & stat.S_IWOTH:
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as private:
            shown = os.fstat(private.fileno())
    except OSError:
        return False
    return facts.st_uid in owners | {shown.st_uid} and not facts.st_mode & ~shown.st_mode & stat.S_IWOTH
