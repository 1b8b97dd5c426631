"""The files of one layer of an image, which owe nothing to the machine that collects them.

A layer is a mapping of paths to files, not a folder: owners, modes and times are those that it is given, so neither
root nor a umask has a part in its bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass, field

_ALIASES = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}


@dataclass(frozen=True, slots=True)
class File:
    """A file, a link (`target`) or a folder of a layer. `owner` is its user and group."""

    kind: bytes = tarfile.REGTYPE
    content: bytes = b""
    mode: int = 0o644
    target: str = ""
    owner: int = 0


@dataclass(frozen=True, slots=True)
class Blob:
    """A compressed layer. `diff_id` is the digest of what it is uncompressed, by which a configuration names it."""

    content: bytes
    diff_id: str


@dataclass(slots=True)
class Layer:
    """Files by their path, which is relative to the root and goes through none of the links /bin, /lib and so on."""

    files: dict[str, File] = field(default_factory=dict)

    def add(self, path: str, content: bytes | str, mode: int = 0o644) -> None:
        """Add a file."""
        data = content.encode() if isinstance(content, str) else content
        self.files[merged(path)] = File(content=data, mode=mode)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self.files[merged(path)] = File(tarfile.SYMTYPE, mode=0o777, target=target)

    def folder(self, path: str, mode: int = 0o755, owner: int = 0) -> None:
        """Add a folder."""
        self.files[merged(path)] = File(tarfile.DIRTYPE, mode=mode, owner=owner)

    def merge_usr(self) -> None:
        """Add the links of a root file system whose programs and libraries are all below /usr."""
        for alias, target in _ALIASES.items():
            self.files[alias] = File(tarfile.SYMTYPE, mode=0o777, target=target)

    def pack(self, epoch: int) -> Blob:
        """Return the layer with `epoch` (seconds since 1970) as the time of all files."""
        for path in list(self.files):
            self._add_parents(path)
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
            # a hard link comes after the file that it names
            for path, file in sorted(self.files.items(), key=lambda item: (item[1].kind == tarfile.LNKTYPE, item[0])):
                archive.addfile(_entry(path, file, epoch), io.BytesIO(file.content))
        content = plain.getvalue()
        return Blob(gzip.compress(content, compresslevel=6, mtime=0), f"sha256:{hashlib.sha256(content).hexdigest()}")

    def _add_parents(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        while parent and parent not in self.files:
            self.files[parent] = File(tarfile.DIRTYPE, mode=0o755)
            parent = parent.rpartition("/")[0]


def merged(path: str) -> str:
    """Return a path of a package as it is where /bin, /sbin, /lib and /lib64 are links to those of /usr."""
    path = path.removeprefix("./").strip("/")
    first, separator, rest = path.partition("/")
    return f"{_ALIASES[first]}/{rest}" if separator and first in _ALIASES else path


def _entry(path: str, file: File, epoch: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.mtime, entry.linkname = file.kind, file.mode, epoch, file.target
    entry.size, entry.uid, entry.gid = len(file.content), file.owner, file.owner
    return entry
