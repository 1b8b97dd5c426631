"""Computes a value in a forked child process, which has this process's memory as it was at that moment.

Pure Python on a thread would compete with the event loop for the interpreter's lock, and would need a copy of the
data, made on the loop. A child needs neither: the loop waits for the fork itself only, whose time grows with the
memory's page tables, and goes on while another core computes. Rejected: a process that is kept for that, to which the
data would have to be sent.

The child computes and writes, and nothing else: it has closed the connections of this process, and no lock that another
thread held at the fork is one that it needs. It is killed when its time is over, or when nobody waits for it any more,
and fails where it needs too much memory.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK: Final = 1 << 16
_FIRST_DESCRIPTOR: Final = 3
_LAST_DESCRIPTOR: Final = 1 << 30
NICENESS: Final = 10
"""A busy machine's processor is the event loop's first."""
MEMORY: Final = 512 << 20
"""Bytes that a child may allocate, beside what it shares with its parent."""

log = logging.getLogger(__name__)


async def computed(compute: Callable[[], bytes], limit_s: float) -> bytes:
    """Return what `compute()` returns in a child. Raises TimeoutError, and ClusterUnavailableError where it failed."""
    pid, pipe = _forked(compute, limit_s)
    try:
        async with asyncio.timeout(limit_s):
            content = await _content(pipe)
    finally:
        os.kill(pid, signal.SIGKILL)  # most often it has exited; it is a zombie then, whose id is not another's
        os.close(pipe)
        status = await asyncio.shield(asyncio.to_thread(os.waitpid, pid, 0))
    if not content:
        raise ClusterUnavailableError(f"the computation failed: the process ended with status {status[1]}")
    return content


def _forked(compute: Callable[[], bytes], limit_s: float) -> tuple[int, int]:
    """Fork; return the child's id, and where its answer is read."""
    pipe, answer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(pipe)
        os.close(answer)
        raise ClusterUnavailableError(f"no process can be started: {error}") from error
    if pid == 0:
        _compute(compute, answer, limit_s)
    os.close(answer)
    os.set_blocking(pipe, False)
    return pid, pipe


async def _content(pipe: int) -> bytes:
    """Return all bytes of the pipe, once its other end was closed."""
    loop = asyncio.get_running_loop()
    ended, chunks = loop.create_future(), list[bytes]()

    def take() -> None:
        if chunk := os.read(pipe, _CHUNK):
            chunks.append(chunk)
        elif not ended.done():
            ended.set_result(None)

    loop.add_reader(pipe, take)
    try:
        await ended
    finally:
        loop.remove_reader(pipe)
    return b"".join(chunks)


def _compute(compute: Callable[[], bytes], answer: int, limit_s: float) -> NoReturn:
    """Compute in the child, write, and end it."""
    try:
        gc.disable()  # a collection would touch, and so copy, all memory
        signal.set_wakeup_fd(-1)  # signals of this process are not the parent's
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(_FIRST_DESCRIPTOR, answer)
        os.closerange(answer + 1, _LAST_DESCRIPTOR)
        seconds = ceil(limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os.nice(NICENESS)
        memory = _address_space() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        content = memoryview(compute())
        while content:
            content = content[os.write(answer, content) :]
    except BaseException:
        log.exception("a computation in a child process failed")
        os._exit(1)
    os._exit(0)


def _address_space() -> int:
    """Return this process's virtual memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
