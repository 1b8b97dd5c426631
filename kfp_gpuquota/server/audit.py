"""The audit log: the requester, time, origin and answer of each requested change. One JSON object per line.

| field     | holds                                                                              |
|-----------|------------------------------------------------------------------------------------|
| `at`      | when the answer was sent, or the change begun, UTC, ISO 8601                       |
| `uid`, `user` | of the process that asked, by the kernel (SO_PEERCRED)                         |
| `pid`, `program` | that process                                                                |
| `request` | method and path                                                                    |
| `target`  | project and name that the body names, where the path does not                      |
| `status`  | of the answer; 401 is a wrong token, 499: the caller went before the answer;        |
|           | 0: the answer is missing, the daemon ended while it made the change                |
| `error`   | the sentence of a refusal                                                          |

A handler calls `begin_change` before it changes anything: the line is written then, and the answer added to it later. A
change whose line cannot be written is refused. Other requests have their line after the answer.

Requests that read are left out, and so are workers' (each job's own, by its token). A request of the web page has no
process: its `uid` is that of the cluster's user where the browser's cookie is valid, else -1.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import os
import pwd
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import web

from kfp_gpuquota.server.transport.unix_sockets import peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.typedefs import Handler, Middleware

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
CLIENT_CLOSED: Final = 499
WORKERS: Final = "/v1/membership/"
TARGET: Final = "target"
"""The key under which a handler notes what the decoded body of its request names."""
_RECORD: Final = "audit_record"
_WRITING: Final = "audit_writing"


class Writing(enum.Enum):
    """When the line of a request is written, and of which space."""

    FIRST = "before the change"
    RESERVED = "before the change, of space that is reserved: it stops something, and a full disk must not prevent it"
    AFTER = "after the answer: it changes nothing that anyone has to answer for"
    REFUSED = "if it is refused: it only shows what a change would do"


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the log."""

    at: str
    uid: int
    user: str
    pid: int
    program: str
    request: str
    status: int
    target: str = ""
    error: str = ""


class _Refusal(msgspec.Struct):
    message: str = ""


class _Answer(msgspec.Struct):
    error: _Refusal = msgspec.field(default_factory=_Refusal)


class AuditLog(Protocol):
    """Where the lines are kept."""

    def write(self, entry: AuditEntry) -> None:
        """Append an entry, if there is space for it."""

    def begin(self, entry: AuditEntry, writing: Writing) -> int:
        """Write the line of a change that is made next; return its position. Raises StateFileError."""

    def finish(self, position: int, begun: AuditEntry, answered: AuditEntry) -> None:
        """Write the answer into the line at that position."""


class _Record:
    """The line of one request."""

    def __init__(self, log: AuditLog, request: web.Request, caller: tuple[int, int]) -> None:
        self._log, self._request, self._caller = log, request, caller
        self._begun: tuple[int, AuditEntry] | None = None

    def begin(self, writing: Writing) -> None:
        """Write the line, without an answer. Raises StateFileError."""
        entry = self._entry(0)
        self._begun = self._log.begin(entry, writing), entry

    def end(self, status: int, error: str = "") -> None:
        """Write the answer."""
        entry = self._entry(status, error)
        if is_only_shown(self._request, status):
            return
        if self._begun is None:
            self._log.write(entry)
        else:
            self._log.finish(*self._begun, entry)

    def _entry(self, status: int, error: str = "") -> AuditEntry:
        pid, uid = self._caller
        return AuditEntry(
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            uid=uid,
            user=_user(uid),
            pid=pid,
            program=_program(pid),
            request=f"{self._request.method} {self._request.path}",
            status=status,
            target=self._request.get(TARGET, ""),
            error=error,
        )


def begin_change(request: web.Request, writing: Writing = Writing.FIRST) -> None:
    """Write the line of a change that is made next; its target is noted. Raises StateFileError."""
    request[_WRITING] = writing
    record: _Record | None = request.get(_RECORD)  # the page on Kubernetes has another log
    if record is not None and writing in {Writing.FIRST, Writing.RESERVED}:
        record.begin(writing)


def is_only_shown(request: web.Request, status: int) -> bool:
    """Return whether the answer shows what a change would do, so that it has no line."""
    return request.get(_WRITING) is Writing.REFUSED and status < 400


def audited(log: AuditLog, identify: Callable[[web.Request], tuple[int, int]] | None = None) -> Middleware:
    """Return a middleware that writes a line for each requested change; it encloses the one that renders errors.

    `identify` returns (process id, user id) of the caller if the socket does not provide them: (0, -1) if
    unidentified.
    """
    identified = identify or _peer

    @web.middleware
    async def audit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in _READS or request.path.startswith(WORKERS):
            return await handler(request)
        request[_RECORD] = record = _Record(log, request, identified(request))
        try:
            answer = await handler(request)
        except BaseException as error:
            record.end(CLIENT_CLOSED if isinstance(error, asyncio.CancelledError) else 500)
            raise
        record.end(answer.status, _error(answer))
        return answer

    return audit


def _peer(request: web.Request) -> tuple[int, int]:
    """Return (process id, user id), or (0, -1) if the other end has closed."""
    connected = request.transport.get_extra_info("socket") if request.transport else None
    if connected is None or connected.family != socket.AF_UNIX:
        return 0, -1
    return peer(connected)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


def _program(pid: int) -> str:
    try:
        return "" if pid == 0 else os.fsdecode(Path(f"/proc/{pid}/comm").read_bytes().strip())
    except OSError:
        return ""


def _error(answer: web.StreamResponse) -> str:
    if answer.status < web.HTTPBadRequest.status_code or not isinstance(answer, web.Response):
        return ""
    if "error" in answer:
        return str(answer["error"])
    try:
        return msgspec.json.decode(answer.body or b"{}", type=_Answer).error.message  # type: ignore[arg-type]
    except (msgspec.DecodeError, RecursionError):
        return ""
