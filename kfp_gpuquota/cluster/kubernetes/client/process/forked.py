"""Computes a value in a forked child process, which has this process's memory as it was at that moment.

Pure Python on a thread would compete with the event loop for the interpreter's lock, and would need a copy of the
data, made on the loop. A child needs neither: the loop waits for the fork itself only, whose time grows with the
memory's page tables, and goes on while another core computes. Rejected: a process that is kept for that, to which the
data would have to be sent.

The child computes and writes, and nothing else: it has closed the connections of this process, and no lock that another
thread held at the fork is one that it needs. It is killed when its time is over, or when nobody waits for it any more.
Pages that it touches are copied, since Python counts references in them. A container that needs more memory than it may
use ends as a whole, so no child is started where too little is left, and one that allocates too much fails by itself.
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
"""Bytes that a child may allocate, beside what it has of its parent's memory."""
SPARE: Final = 64 << 20
CGROUP: Final = Path("/sys/fs/cgroup")

log = logging.getLogger(__name__)


async def computed(compute: Callable[[], bytes], limit_s: float, cgroup: Path = CGROUP) -> bytes:
    """Return what `compute()` returns in a child.

    Raises TimeoutError, and ClusterUnavailableError where it failed or there is too little memory for it. `cgroup` is
    the folder of this container's control group.
    """
    pid, pipe = _forked(compute, limit_s, _allowed(cgroup))
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


def free_memory(cgroup: Path) -> int | None:
    """Return the bytes that the container may still use, also in place of cached files; None where it has no limit."""
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        stored = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except FileNotFoundError:  # no container, or another kind of control groups
        return None
    return None if limit == "max" else int(limit) - used + int(stored.get("inactive_file", 0))


def _allowed(cgroup: Path) -> int:
    """Return how much a child may allocate. Raises ClusterUnavailableError where copied pages may take what is left."""
    free = free_memory(cgroup)
    if free is None:
        return MEMORY
    left = free - _pages(1) // 2 - SPARE
    if left <= 0:
        log.warning("a computation needs a child process, but only %d MiB of memory are free", free >> 20)
        raise ClusterUnavailableError("the controller has too little memory left for it; raise its limit")
    return min(MEMORY, left)


def _forked(compute: Callable[[], bytes], limit_s: float, allowed: int) -> tuple[int, int]:
    """Fork; return the child's id, and where its answer is read."""
    pipe, answer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(pipe)
        os.close(answer)
        raise ClusterUnavailableError(f"no process can be started: {error}") from error
    if pid == 0:
        _compute(compute, answer, limit_s, allowed)
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


def _compute(compute: Callable[[], bytes], answer: int, limit_s: float, allowed: int) -> NoReturn:
    """Compute in the child, write, and end it, whatever happens: it must never return into the parent's event loop."""
    code = 1
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
        memory = _pages(0) + allowed
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        content = memoryview(compute())
        while content:
            content = content[os.write(answer, content) :]
        code = 0
    except BrokenPipeError:  # the process that asked has ended
        pass
    except BaseException:
        log.exception("a computation in a child process failed")  # without memory, this may fail too
    finally:
        os._exit(code)


def _pages(column: int) -> int:
    """Return this process's virtual memory (column 0) or resident memory (column 1) in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
