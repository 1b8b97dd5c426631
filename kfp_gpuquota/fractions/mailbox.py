"""The two files by which an agent and a workload agree on a limit (docs/fractions.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kfp_gpuquota.fractions.processes import read

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_FILE: Final = "limit.json"
USAGE_FILE: Final = "usage.json"

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Told(msgspec.Struct, frozen=True):
    """What a workload may use of each of its devices, in MiB."""

    limit_mib: int


class Heard(msgspec.Struct, frozen=True):
    """What a workload says: the limit that it follows now, and what it would like to use (None: all it may)."""

    follows_mib: int | None = None
    wanted_mib: int | None = None


def tell(directory: Path, limit_mib: int) -> None:
    """Replace the limit. Raises OSError."""
    temporary = directory / f"{LIMIT_FILE}.new"
    temporary.write_bytes(msgspec.json.encode(Told(limit_mib)))
    temporary.replace(directory / LIMIT_FILE)


def told(directory: Path) -> int | None:
    """The limit that stands; None where nothing was said."""
    said = _read(f"{directory}/{LIMIT_FILE}", Told)
    return None if said is None else said.limit_mib


def heard(directory: Path) -> Heard | None:
    """What the workload says; None for one that does not listen, or that writes what cannot be read."""
    return _read(f"{directory}/{USAGE_FILE}", Heard)


def _read(path: str, kind: type[_Struct]) -> _Struct | None:
    try:
        return msgspec.json.decode(content, type=kind) if (content := read(path)) else None
    except msgspec.DecodeError:
        return None
