"""Checkpoint files that somebody else has made execute nothing in the job that reads them."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elastic_runtime.sharded import files
from elastic_runtime.sharded.state import Parts
from elastic_runtime.state import checkpoint
from elastic_runtime.state.packing import pack
from tests.security.other_user import NOBODY, as_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEWEST = files.Saved(2, 7, 1)


class Payload:
    """Executes a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


class Opaque:
    """Something that only pickle can make."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    def __hash__(self) -> int:
        return 0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With a good checkpoint of step 1, of a job that is not sharded."""
    made = tmp_path / "checkpoints"
    checkpoint.save(str(made), 1, {"n": 1})
    yield made
    assert not (tmp_path / "executed").exists()


def part(folder: Path, state: object) -> Path:
    """Write a part of a sharded checkpoint."""
    skeleton, tensors = pack(state)
    return files.write_part(str(folder), NEWEST, 0, Parts(skeleton, [None] * len(tensors), [], tensors))


def with_head(path: Path, magic: bytes, head: bytes) -> None:
    """Write a part with this head, and right checksums."""
    end = len(head).to_bytes(8, "little") + zlib.crc32(head).to_bytes(4, "little")
    path.write_bytes(magic + head + end)


@pytest.mark.parametrize("magic", [b"ELASTICS", files.MAGIC])
def test_a_pickled_head_executes_nothing(folder: Path, tmp_path: Path, magic: bytes) -> None:
    with_head(NEWEST.path(str(folder), 0), magic, pickle.dumps(Payload(tmp_path / "executed")))
    assert files.load_newest(str(folder)) == (1, {"n": 1})


@pytest.mark.parametrize(
    "head",
    [
        files._Head(pack([])[0], [], [], [], [(files._Stored(8, 1 << 40, 0), torch.float32, (1,))]),
        files._Head(pack([])[0], [], [], [], [(files._Stored(-8, 8, 0), torch.float32, (2,))]),
    ],
    ids=["a tensor that is larger than the file", "a tensor before the file"],
)
def test_a_head_does_not_make_its_reader_allocate_what_the_file_does_not_have(folder: Path, head: files._Head) -> None:
    with_head(NEWEST.path(str(folder), 0), files.MAGIC, head.encoded())
    assert files.load_newest(str(folder)) == (1, {"n": 1})


def test_a_part_of_version_0_2_is_read(folder: Path) -> None:
    path = part(folder, {"w": torch.tensor([1.0, 2.0]), "n": 2})
    with path.open("rb") as file:
        head = files._head(file)
    raw = path.read_bytes()[len(files.MAGIC) : head.replicated[0][0].offset + head.replicated[0][0].length]
    pickled = pickle.dumps(head, protocol=5)
    end = len(pickled).to_bytes(8, "little") + zlib.crc32(pickled).to_bytes(4, "little")
    path.write_bytes(b"ELASTICS" + raw + pickled + end)
    step, state = files.load_newest(str(folder)) or (0, {})
    assert (step, state["n"], state["w"].tolist()) == (2, 2, [1.0, 2.0])


def test_objects_are_unpickled_from_files_of_this_user_that_not_everybody_writes(folder: Path) -> None:
    for sharded in (True, False):
        path = part(folder, {"o": Opaque()}) if sharded else checkpoint.save(str(folder), 2, {"o": Opaque()})
        assert (files.load_newest(str(folder)) or (0, {}))[1] == {"o": Opaque()}
        path.chmod(0o666)
        assert (files.load_newest(str(folder)) or (0, {}))[1] != {"o": Opaque()}
        path.chmod(0o664)
        assert (files.load_newest(str(folder)) or (0, {}))[1] == {"o": Opaque()}
        path.unlink()


@as_root
@pytest.mark.parametrize("sharded", [True, False])
def test_a_file_of_another_user_is_read_without_its_objects(folder: Path, tmp_path: Path, *, sharded: bool) -> None:
    def saved(state: object) -> None:
        path = part(folder, state) if sharded else checkpoint.save(str(folder), 2, state)
        os.chown(path, NOBODY, NOBODY)

    folder.chmod(0o777)
    saved({"n": 2})
    assert (files.load_newest(str(folder)) or (0,))[0] == 2
    saved({"o": Payload(tmp_path / "executed")})
    assert (files.load_newest(str(folder)) or (0,))[0] == 1


@as_root
def test_a_folder_whose_owner_has_written_the_file_is_a_volume_that_shows_another_number(folder: Path) -> None:
    path = checkpoint.save(str(folder), 2, {"o": Opaque()})
    for each in (folder, path):
        os.chown(each, NOBODY, NOBODY)
    assert files.load_newest(str(folder)) == (2, {"o": Opaque()})


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system that shows every file with one owner and one mode, as a mount of SMB does."""
    below, mounted = tmp_path / "below", tmp_path / "mounted"
    below.mkdir()
    mounted.mkdir()
    shown = ("--perms=0777", "--chmod-ignore", f"--force-user={NOBODY}", f"--force-group={NOBODY}")
    subprocess.run(["bindfs", *shown, below, mounted], check=True)
    yield mounted
    subprocess.run(["umount", mounted], check=True)


@as_root
@pytest.mark.skipif(shutil.which("bindfs") is None, reason="Debian's bindfs makes such a file system")
@pytest.mark.parametrize("sharded", [True, False])
def test_files_are_as_trusted_as_a_volume_that_shows_all_files_alike(mounted: Path, *, sharded: bool) -> None:
    path = part(mounted, {"o": Opaque()}) if sharded else checkpoint.save(str(mounted), 2, {"o": Opaque()})
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (NOBODY, 0o777)
    assert files.load_newest(str(mounted)) == (2, {"o": Opaque()})


def test_a_checkpoint_is_written_for_everybody_under_no_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        paths = [part(folder, {"n": 2}), checkpoint.save(str(folder), 3, {"n": 3})]
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o002 for path in paths] == [0, 0]
