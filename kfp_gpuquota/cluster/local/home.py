"""The cluster's directory: its permissions, the lock of its daemon, and how clients find the daemon.

HOME/            0700    one user's cluster; $GPUQUOTA_HOME, else $XDG_STATE_HOME/gpuquota
  state.db               SQLite
  token          0600    what clients present
  socket         0600    where the daemon listens; both ends verify that the other one is this user's
  daemon.lock            held by the one daemon
  daemon.log
  page.json      0600    port and path of the web page, after its first use
  page-sessions.json     0600: digests of the cookies with which browsers see it
  notifications/NAME.json   where notifications are sent (`cluster.notifications`)
  reserve                disk space that is released when the disk is full, so that jobs can be stopped and deleted
  jobs/UID/              one job: its token, its checkpoints, its workers' directories

A home that several users share is root's; they pass through it (0711), but read none of its files (`shared.files`):

HOME/            0711
  shared                 marks it
  socket                 a link to the socket that they reach
  jobs/UID/      0711
    owner/       0700    the owner's: token, checkpoints, reports. Root opens nothing in it once the owner may enter it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.errors import ConflictError, StateFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOME_VARIABLE: Final = "GPUQUOTA_HOME"
PRIVATE_DIRECTORY = 0o700
PASSABLE_DIRECTORY = 0o711
PRIVATE_FILE = 0o600
LOCK_TIMEOUT_S: Final = 0.5
RESERVE_BYTES: Final = 4 << 20


def default_home(environment: Mapping[str, str]) -> Path:
    """$GPUQUOTA_HOME, else gpuquota under the XDG state directory. Raises UsageError for a relative $GPUQUOTA_HOME.

    It would name another cluster in each directory. A relative $XDG_STATE_HOME is ignored, as specified.
    """
    if given := environment.get(HOME_VARIABLE):
        path = Path(given).expanduser()
        if not path.is_absolute():
            raise UsageError(f"GPUQUOTA_HOME is {given!r}, but it must be an absolute path, such as {path.absolute()}")
        return path
    state = environment.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "gpuquota"


class Home:
    """Paths below one cluster's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "state.db"
        self.token_file = root / "token"
        self.socket_file = root / "socket"
        self.log_file = root / "daemon.log"
        self.audit_file = root / "audit.log"
        self.page_file = root / "page.json"
        self.page_sessions_file = root / "page-sessions.json"
        self.notifications = root / "notifications"
        self.device_locks = root / "device-locks.json"
        self.jobs = root / "jobs"
        self.shared_mark = root / "shared"
        self._reserve = root / "reserve"
        self._lock_file = root / "daemon.lock"

    def create(self) -> None:
        """Make the directory, private to its user. Raises StateFileError where that cannot be."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
            self._check_private()
            self.jobs.mkdir(exist_ok=True, mode=PRIVATE_DIRECTORY)
            self.notifications.mkdir(exist_ok=True, mode=PRIVATE_DIRECTORY)
        except OSError as error:
            raise StateFileError(
                f"cannot write the cluster's directory {self.root}: {error.strerror}; "
                "choose another with the environment variable GPUQUOTA_HOME"
            ) from error

    def _check_private(self) -> None:
        found = self.root.stat()
        if found.st_uid != os.geteuid():
            raise StateFileError(f"{self.root} belongs to another user; choose another directory with GPUQUOTA_HOME")
        mode = PASSABLE_DIRECTORY if self.shared_mark.exists() else PRIVATE_DIRECTORY
        if stat.S_IMODE(found.st_mode) & 0o077 & ~mode:
            self.root.chmod(mode)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one daemon of this directory; ConflictError when there is one."""
        with open(self._lock_file, "w", opener=private) as file:
            if not _locked_within(file, fcntl.LOCK_EX, LOCK_TIMEOUT_S):
                raise ConflictError(f"another daemon already runs on {self.root}")
            yield

    def is_locked(self) -> bool:
        """Whether a daemon runs on this directory."""
        try:
            with self._lock_file.open() as file:
                return not _locked_within(file, fcntl.LOCK_SH, 0.0)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def take_reserve(self) -> None:
        """Reserve disk space if it is available and not reserved yet."""
        if self._reserve.exists():
            return
        partial = self._reserve.with_name("reserve.tmp")
        try:
            with open(partial, "wb", opener=private) as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            partial.rename(self._reserve)
        except OSError:
            partial.unlink(missing_ok=True)

    def give_up_reserve(self) -> bool:
        """Return whether there was any, which is now free for others."""
        try:
            self._reserve.unlink()
        except FileNotFoundError:
            return False
        return True

    def job(self, uid: str) -> Path:
        """A job's directory."""
        return self.jobs / uid

    def owners(self, uid: str) -> Path:
        """Return the directory that the owner of a job has, in a home that several users share."""
        return self.jobs / uid / "owner"

    def checkpoints(self, uid: str) -> Path:
        """Return the directory of a job's checkpoints, which outlives its workers."""
        return self.jobs / uid / "checkpoints"

    def job_token_file(self, uid: str) -> Path:
        """The token that opens this job's membership and nothing else."""
        return self.jobs / uid / "token"

    def coordinator_url(self, uid: str) -> str:
        """Return the address of the job's membership service for its workers."""
        return join(f"unix://{self.socket_file}:/v1/membership", uid)

    def remove_job(self, uid: str) -> None:
        """Delete a job's logs, checkpoints and records."""
        shutil.rmtree(self.jobs / uid, ignore_errors=True)

    def worker(self, uid: str, worker: str) -> Path:
        """A worker's directory, which its shim works in."""
        return self.jobs / uid / "workers" / worker

    def read_or_make_token(self) -> str:
        """The token of this cluster, made on first use."""
        return _read_or_make(self.token_file, secrets.token_urlsafe(32))

    def cluster_id(self) -> str:
        """The name of this cluster among all, made on first use."""
        return _read_or_make(self.root / "cluster-id", secrets.token_hex(6))


def _read_or_make(path: Path, text: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        if found := path.read_text().strip():
            return found
    return write_private(path, text)


def _locked_within(file: IO[str], kind: int, timeout_s: float) -> bool:
    """Clients look at the lock for an instant (shared), so a daemon that wants it asks more than once."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        except OSError as error:
            raise StateFileError(
                f"the file system of {file.name} has no locks ({error.strerror}); set GPUQUOTA_HOME to a directory "
                "on a disk of this machine"
            ) from error
        else:
            return True


def private(path: str, flags: int) -> int:
    """Open a file that only this user may read."""
    return os.open(path, flags, PRIVATE_FILE)


def make_private(directory: Path) -> None:
    """Make a directory that only this user may enter, and those above it that do not exist."""
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(exist_ok=True, mode=PRIVATE_DIRECTORY)


def write_private(path: Path, text: str) -> str:
    """Write `text` so that only this user can read it and no reader ever finds half of it; returns it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
    return text
