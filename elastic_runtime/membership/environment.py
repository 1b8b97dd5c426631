"""The worker's settings from its environment variables (docs/contracts.md)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from elastic_runtime.errors import SettingsError
from elastic_runtime.membership.connections import SCHEME, UnixConnection, split_address

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http.client import HTTPConnection

_UNFIT = re.compile(r"[^\x21-\x7e]")
"""Characters that an address must not contain: http.client would refuse them at each attempt."""


@dataclass(frozen=True)
class Environment:
    """One worker's place in its cluster; without a coordinator it runs alone."""

    job_name: str = "local"
    worker_id: str = "local"
    coordinator: str = ""
    token_file: str = ""
    checkpoint_dir: str = ""
    checkpoints_elsewhere: bool = False  # ELASTIC_CHECKPOINT_DIR is set, to nothing: the program has its own way
    report_file: str = ""
    error_file: str = ""
    ca_file: str = ""
    memory_dir: str = ""
    mirror: int = 1  # with shard=: after so many steps a worker's shards are copied to another one; 0: never
    stall_s: float | None = None  # after so long a worker that keeps others waiting ends; None: learned; 0: never
    stopped_s: float | None = None  # so long a process of another worker may be stopped; None: the default; 0: never
    static: tuple[int, int] | None = None  # (rank, world size) where torchrun fixed them
    rehearse: str = ""  # ELASTIC_REHEARSE, where it is not "0": everything else is as if it were not set

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """From the process's environment. SettingsError where variables that belong together are not all there, and for
        an address or a token file that waiting would not mend.
        """
        given = os.environ if variables is None else variables
        if (rehearse := given.get("ELASTIC_REHEARSE", "0")) not in {"", "0"}:
            worker = "second" if ":" in rehearse else "first"
            return cls(worker_id=worker, rehearse=rehearse, mirror=0)  # lost shards come from a checkpoint there
        environment = cls(
            job_name=given.get("JOB_NAME", "local"),
            worker_id=given.get("ELASTIC_WORKER_ID", "local"),
            coordinator=given.get("ELASTIC_COORDINATOR", ""),
            token_file=given.get("ELASTIC_TOKEN_FILE", ""),
            checkpoint_dir=given.get("ELASTIC_CHECKPOINT_DIR", ""),
            checkpoints_elsewhere=given.get("ELASTIC_CHECKPOINT_DIR") == "",
            report_file=given.get("ELASTIC_REPORT_FILE", ""),
            error_file=given.get("ELASTIC_ERROR_FILE", ""),
            ca_file=given.get("ELASTIC_CA_FILE", ""),
            memory_dir=given.get("ELASTIC_MEMORY_DIR", ""),
            mirror=_mirror(given.get("ELASTIC_MIRROR", "1")),
            stall_s=_bound_s(given, "ELASTIC_STALL_S"),
            stopped_s=_bound_s(given, "ELASTIC_STOPPED_S"),
            static=_static(given),
        )
        if environment.coordinator and "ELASTIC_WORKER_ID" not in given:
            raise SettingsError("ELASTIC_COORDINATOR is set, but ELASTIC_WORKER_ID is not; set both, or neither")
        if environment.coordinator and (processes := given.get("LOCAL_WORLD_SIZE", "1")) != "1":
            raise SettingsError(
                f"torchrun has started {processes} processes, but a worker of the cluster is one; write: python FILE, "
                f"or torchrun --nproc-per-node=1 FILE, and submit a job of {processes} workers"
            )
        environment._check_reachable()
        return environment

    def _check_reachable(self) -> None:
        """SettingsError for what waiting would not mend; a file may hold the address later, and the token by then."""
        if not self.coordinator:
            return
        try:
            self.coordinator_address()
        except (SettingsError, OSError):
            if self._in_file:
                return
            raise
        try:
            self.token()
        except OSError as error:
            raise SettingsError(f"{error}; the file must be there before the worker starts") from error

    def coordinator_address(self) -> tuple[str, int, str]:
        """(host, port, path) of the job's membership service; `@FILE` is read again by each call. The host of a Unix
        socket is its file, and the port is 0.

        SettingsError for something that is no such address; OSError where the file is not there.
        """
        url = self._url()
        if local := split_address(url):
            if _UNFIT.search(local[1]):
                raise SettingsError(self._no_address(url))
            return local[0], 0, local[1].rstrip("/")
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise SettingsError(self._no_address(url)) from error
        if parts.scheme not in {"http", "https"} or not parts.hostname or _UNFIT.search(url):
            raise SettingsError(self._no_address(url))
        return parts.hostname, port, parts.path.rstrip("/")

    def _no_address(self, url: str) -> str:
        held = f"{self.coordinator!r}, a file that holds {url!r}" if self._in_file else repr(url)
        return (
            f"ELASTIC_COORDINATOR is {held}, but it must be http(s)://HOST:PORT/PATH, unix:///SOCKET:/PATH, or @FILE "
            "with such a line"
        )

    def connect(self, timeout_s: float) -> tuple[HTTPConnection, str]:
        """(a connection to the membership service, not yet open, the path there)."""
        from elastic_runtime.membership.connections import open_connection  # noqa: PLC0415  (costs 15 ms, which a script alone saves)

        host, port, path = self.coordinator_address()
        if self.local:
            return UnixConnection(host, timeout_s), path
        authority = self.ca_file if self._url().startswith("https:") else None
        return open_connection(host, port, authority, timeout_s), path

    @property
    def local(self) -> bool:
        """Whether the coordinator is this machine's: reached by a Unix socket."""
        return self._url().startswith(SCHEME)

    @property
    def _in_file(self) -> bool:
        return self.coordinator.startswith("@")

    def _url(self) -> str:
        return _line("ELASTIC_COORDINATOR", self.coordinator[1:]) if self._in_file else self.coordinator

    def token(self) -> str:
        """The job's token; empty where no file is named. OSError where the file cannot be read."""
        return _line("ELASTIC_TOKEN_FILE", self.token_file) if self.token_file else ""


def _line(variable: str, file: str) -> str:
    """Return the content of the file that a variable names. Raises OSError that names the variable."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise OSError(f"{variable} names the file {file!r}, which cannot be read: {error.strerror}") from error


def _mirror(value: str) -> int:
    if value in {"off", "0"}:
        return 0
    if not value.isdecimal():
        raise SettingsError(f"ELASTIC_MIRROR is {value!r}, but it must be a number of steps, or off")
    return int(value)


def _bound_s(given: Mapping[str, str], name: str) -> float | None:
    """Return a number of seconds; None for "auto", 0 for "off"."""
    value = given.get(name, "auto")
    if value in {"auto", "off"}:
        return None if value == "auto" else 0.0
    if not value.isdecimal() or value == "0":
        raise SettingsError(f"{name} is {value!r}, but it must be a number of seconds, auto, or off")
    return float(value)


def _static(given: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank and size that torchrun, or a compatible launcher, has fixed for this process."""
    if given.get("ELASTIC_COORDINATOR") or not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(given):
        return None
    return int(given["RANK"]), int(given["WORLD_SIZE"])
