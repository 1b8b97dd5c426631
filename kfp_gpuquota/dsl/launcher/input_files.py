"""The files of a step's inputs, as its workers receive them: also by links to folders of the same input.

A listing names all that is below an input, or is refused with the name of what a worker cannot have: a link out of the
input, to nothing or to a folder that contains it, and all that is neither a file nor a folder.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHUNK_SIZE: Final = 1 << 20


class NotTransferableError(Exception):
    """An input has something that no worker can have."""


def within(path: str, roots: Iterable[Path]) -> Path | None:
    """Return the path if it is one of `roots` or below one, by its name alone, else None."""
    asked = Path(os.path.normpath(path))
    return next((asked for root in roots if asked == root or root in asked.parents), None)


def really_within(path: str, roots: Iterable[Path]) -> Path | None:
    """As `within`, and where links of the path lead is inside the same root, too."""
    asked = Path(os.path.normpath(path))
    root = next((root for root in roots if within(path, [root])), None)
    if root is None:
        return None
    return asked if within(os.path.realpath(asked), [Path(os.path.realpath(root))]) else None


def listing(root: Path) -> list[tuple[str, int, int]]:
    """[(path relative to `root`, bytes, mode)] of a file ("") or of all files below a folder, sorted.

    Raises NotTransferableError.
    """
    if not os.path.lexists(root):
        return []  # an artifact that KFP does not download
    return sorted(_listed(path, root) for path in _files(root, root, ()))


def _files(path: Path, root: Path, opened: tuple[str, ...]) -> Iterator[Path]:
    """Yield all below a path but folders. `opened` are the real paths of the folders on the way to it."""
    if not path.is_dir():
        yield path
        return
    real = os.path.realpath(path)
    if really_within(str(path), [root]) is None:
        raise NotTransferableError(f"{path} is a link that leaves its input; copy what it leads to into the input")
    if real in opened:
        raise NotTransferableError(f"{path} is a link to a folder that contains it")
    for entry in path.iterdir():
        yield from _files(entry, root, (*opened, real))


def _listed(path: Path, root: Path) -> tuple[str, int, int]:
    try:
        facts = path.stat()
        name = "" if path == root else path.relative_to(root).as_posix()
        name.encode()
    except OSError:
        raise NotTransferableError(f"{path} is a link to nothing") from None
    except UnicodeError:
        raise NotTransferableError(f"{str(path)!r} has a name that is not UTF-8") from None
    if really_within(str(path), [root]) is None:
        raise NotTransferableError(f"{path} is a link that leaves its input; copy what it leads to into the input")
    if not stat.S_ISREG(facts.st_mode):
        raise NotTransferableError(f"{path} is no file")
    return name, facts.st_size, facts.st_mode & 0o777
