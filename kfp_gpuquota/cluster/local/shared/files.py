"""The files of a shared cluster: which of them users reach, and the directory that the owner of a job has.

Root makes an owner's directory whole, and then gives it away; from then on it opens nothing in it, since its owner may
put a link to anything there. Each directory above it is root's, so that no part of its path can be replaced.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
import threading
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.local.home import PASSABLE_DIRECTORY, PRIVATE_DIRECTORY, write_private
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.cluster.local.home import Home

_ENTER: Final = 0o001
_WRITABLE: Final = 0o022
_REMOVE: Final = ("rm", "-rf", "--")
_DELETED: Final = ".deleted"
_BATCH: Final = 100
_MOST_ARGUMENTS: Final = 5000


def open_to_users(home: Home, socket: Path) -> None:
    """Let users pass through the home to what is theirs, and to the socket. Raises StateFileError where they cannot."""
    _refuse_changeable(home.root, "GPUQUOTA_HOME")
    for parent in home.root.parents:
        if not parent.stat().st_mode & _ENTER:
            raise StateFileError(
                f"{home.root} cannot be shared: users may not pass through {parent}; choose another directory with "
                "GPUQUOTA_HOME, such as /var/lib/gpuquota"
            )
    write_private(home.shared_mark, "")
    for directory in (home.root, home.jobs):
        directory.chmod(PASSABLE_DIRECTORY)
    if not socket.parent.exists():
        socket.parent.mkdir()
        socket.parent.chmod(0o755)
    _refuse_changeable(socket.parent, "GPUQUOTA_SHARED_SOCKET")
    partial = home.socket_file.with_name("socket.link")
    partial.unlink(missing_ok=True)
    partial.symlink_to(socket)
    partial.replace(home.socket_file)


def part_of_others(path: Path) -> Path | None:
    """Return the part of an absolute path that others than root may change or replace; None if there is none."""
    for part in {lexical: None for place in (path, path.resolve()) for lexical in (place, *place.parents)}:
        facts = part.lstat()
        writable = facts.st_mode & _WRITABLE and not facts.st_mode & stat.S_ISVTX and not stat.S_ISLNK(facts.st_mode)
        if facts.st_uid != 0 or writable:
            return part
    return None


def _refuse_changeable(path: Path, variable: str) -> None:
    if (part := part_of_others(path)) is not None:
        raise StateFileError(
            f"{path} cannot be shared: others than root can change {part}; choose another directory with {variable}"
        )


def close_to_users(home: Home) -> None:
    """Make the home its user's own again, after it was shared."""
    if home.shared_mark.exists():
        home.shared_mark.unlink()
        home.socket_file.unlink(missing_ok=True)
        for directory in (home.root, home.jobs):
            directory.chmod(PRIVATE_DIRECTORY)


def make_owners_directory(home: Home, job: str, uid: int, token: str) -> None:
    """Make the directory of a job's owner, with its token and a place for checkpoints; to one that exists, do nothing.

    A daemon may have been killed between any two steps.
    """
    directory = home.owners(job)
    home.job(job).chmod(PASSABLE_DIRECTORY)
    if not directory.exists():
        partial = directory.with_name("owner.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=PRIVATE_DIRECTORY)
        (partial / home.checkpoints(job).name).mkdir(mode=PRIVATE_DIRECTORY)
        write_private(partial / home.job_token_file(job).name, token)
        for made in partial.iterdir():
            _give(made, uid)
        partial.rename(directory)
    if directory.lstat().st_uid != uid:  # last: from here on its owner may enter it
        _give(directory, uid)


class Removals:
    """Deletes jobs' directories in the background: their owners may have made trees of any size and depth in them.

    By rm(1), which follows no link and needs no stack, one process at a time. What is left, since a user still made
    files in it or the daemon ended, is tried again with the next job and by the next daemon.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._left: list[str] = []
        self._running = False

    def add(self, job: str) -> None:
        """Delete a job's directory soon; what its owner still runs may not enter it any more."""
        found = self._home.job(job)
        deleted = found.with_name(f"{job}{_DELETED}")
        with contextlib.suppress(FileNotFoundError):
            found.rename(deleted)
            os.chown(deleted / self._home.owners(job).name, 0, 0, follow_symlinks=False)
        self._delete(deleted)

    def resume(self) -> None:
        """Delete soon what an earlier daemon has left."""
        self._delete(*self._home.jobs.glob(f"*{_DELETED}"))

    def _delete(self, *directories: Path) -> None:
        with self._lock:
            self._waiting += map(str, directories)
            if self._waiting and not self._running:
                self._waiting, self._left = self._waiting + self._left, []
                self._running = True
                threading.Thread(target=self._remove, daemon=True).start()

    def close(self) -> None:
        """Leave what waits to a process that outlives this one."""
        with self._lock:
            for first in range(0, len(self._waiting), _MOST_ARGUMENTS):
                batch = self._waiting[first : first + _MOST_ARGUMENTS]
                subprocess.Popen([*_REMOVE, *batch]).returncode = 0  # nobody waits for it
            self._waiting = []

    def _remove(self) -> None:
        while True:
            with self._lock:
                batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                if not batch:
                    self._running = False
                    return
            subprocess.run([*_REMOVE, *batch], check=False)
            self._left += filter(os.path.lexists, batch)


def _give(path: Path, uid: int) -> None:
    os.chown(path, uid, _group_of(uid), follow_symlinks=False)


def _group_of(uid: int) -> int:
    """Return the primary group; that of root for a user without an account, to whom nothing is given by it."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_gid
    return 0
