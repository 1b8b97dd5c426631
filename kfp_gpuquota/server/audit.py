"""The audit log: the requester, time, origin and answer of each requested change. One JSON object per line.

| field     | holds                                                                              |
|-----------|------------------------------------------------------------------------------------|
| `at`      | when the answer was sent, UTC, ISO 8601                                            |
| `uid`, `user` | of the process that asked, by the kernel (SO_PEERCRED)                         |
| `pid`, `program` | that process                                                                |
| `request` | method and path                                                                    |
| `target`  | project and name that the body names, where the path does not                      |
| `status`  | of the answer; 401 is a wrong token, 499: the caller went before the answer        |
| `error`   | the sentence of a refusal                                                          |

Requests that read are left out, and so are workers' (each job's own, by its token). A request of the web page has no
process: its `uid` is that of the cluster's user where the browser's cookie is valid, else -1.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import pwd
import socket
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.server.transport.unix_sockets import peer

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from aiohttp.typedefs import Handler, Middleware

MAX_BYTES: Final = 10 << 20
KEPT_FILES: Final = 5
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
CLIENT_CLOSED: Final = 499
_WORKERS: Final = "/v1/membership/"
TARGET: Final = "target"
"""The key under which a handler notes what the decoded body of its request names."""


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


def audit_file(path: Path) -> logging.Handler:
    """A handler for `path`, mode 0600; older entries are in path.1 to path.5, 10 MiB each."""
    return _PrivateFile(path, maxBytes=MAX_BYTES, backupCount=KEPT_FILES, encoding="utf-8")


def audited(
    write: Callable[[str], None], identify: Callable[[web.Request], tuple[int, int]] | None = None
) -> Middleware:
    """Return a middleware that writes a line for each requested change; it encloses the one that renders errors.

    `identify` returns (process id, user id) of the caller if the socket does not provide them: (0, -1) if
    unidentified.
    """
    identified = identify or _peer

    @web.middleware
    async def audit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in _READS or request.path.startswith(_WORKERS):
            return await handler(request)
        caller = identified(request)  # before anything is done: what follows must not fail
        try:
            answer = await handler(request)
        except BaseException as error:
            status = CLIENT_CLOSED if isinstance(error, asyncio.CancelledError) else 500
            write(_line(request, caller, status, request.get(TARGET, "")))
            raise
        write(_line(request, caller, answer.status, request.get(TARGET, ""), _error(answer)))
        return answer

    return audit


def _line(request: web.Request, caller: tuple[int, int], status: int, target: str = "", error: str = "") -> str:
    pid, uid = caller
    entry = AuditEntry(
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        uid=uid,
        user=_user(uid),
        pid=pid,
        program=_program(pid),
        request=f"{request.method} {request.path}",
        status=status,
        target=target,
        error=error,
    )
    return msgspec.json.encode(entry).decode()


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


class _PrivateFile(RotatingFileHandler):
    def _open(self):  # type: ignore[no-untyped-def]  # noqa: ANN202, RUF100
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        return stream
