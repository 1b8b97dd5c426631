"""Every damage of a checkpoint leads back to the one before it: each bit, each length, of a small one."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elastic_runtime.errors import CheckpointError
from elastic_runtime.sharded import files
from elastic_runtime.sharded.state import Parts
from elastic_runtime.state import checkpoint
from elastic_runtime.state.packing import pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def damaged(whole: bytes) -> Iterator[bytes]:
    """Each single bit flipped, each truncation, and bytes that follow."""
    for place in range(len(whole)):
        for bit in range(8):
            yield whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :]
    for length in range(len(whole)):
        yield whole[:length]
    yield whole + b"\0"
    yield whole + whole


def test_every_damage_of_a_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    for step in (1, 2):
        checkpoint.save(str(tmp_path), step, {"w": torch.tensor([float(step)]), "n": step})
    newest = checkpoint.checkpoints(str(tmp_path))[0]
    whole = newest.read_bytes()
    for content in damaged(whole):
        newest.write_bytes(content)
        step, state = files.load_newest(str(tmp_path)) or (0, {})
        assert (step, state["n"], float(state["w"])) == (1, 1, 1.0)
    newest.write_bytes(whole)
    assert (files.load_newest(str(tmp_path)) or (0,))[0] == 2


def test_every_damage_of_a_part_of_a_sharded_checkpoint_falls_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    for step in (1, 2):
        skeleton, tensors = pack({"w": torch.tensor([float(step)])})
        files.write_part(str(tmp_path), files.Saved(step, 7, 1), 0, Parts(skeleton, [None], [], tensors))
    newest = files.Saved(2, 7, 1).path(str(tmp_path), 0)
    whole = newest.read_bytes()
    for content in damaged(whole):
        newest.write_bytes(content)
        step, state = files.load_newest(str(tmp_path)) or (0, {})
        assert (step, float(state["w"])) in {(1, 1.0)} | ({(2, 2.0)} if content.endswith(whole) else set())


def test_a_head_is_not_decoded_before_its_checksum_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(str(tmp_path), 1, {"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])

    def decoded(*_: Any, **__: Any) -> None:
        pytest.fail("it was decoded")

    monkeypatch.setattr(checkpoint, "decode", decoded)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.load(path)


def test_a_head_that_announces_more_memory_than_there_is_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = checkpoint.save(str(tmp_path), 1, {"w": torch.zeros(2)})
    whole = path.read_bytes()
    start = checkpoint.MAGIC + (1 << 62).to_bytes(8, "little")
    path.write_bytes(start + zlib.crc32(start).to_bytes(4, "little") + whole[20:])
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
