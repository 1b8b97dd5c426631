"""Logs of workers on the page: the end of one, lines that contain a text, what is printed from now on, all of it.

Colors of a terminal are left out, other control characters are shown as escapes.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.control_characters import visible
from kfp_gpuquota.api.request_paths import join

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.web.source import Source


_COLOR: Final = re.compile("\x1b\\[[0-9;:]{0,40}[mK]")


def plain_log(raw: bytes) -> str:
    """Return a log's text: without colors, and of lines that were overwritten (progress bars) what stood last."""
    text = _COLOR.sub("", raw.decode(errors="replace")).replace("\r\n", "\n")
    return "\n".join(visible(line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n"))


SHOWN_BYTES: Final = 200_000
SEARCHED_BYTES: Final = 20_000_000
FOUND_LINES: Final = 1000
POLL_S: Final = 15.0
LONGEST_LINE: Final = 8192
ALL: Final = "all"
"""Names all workers of a job."""
MOST_WORKERS: Final = 64
LAST_LINES: Final = 30
LAST_BYTES: Final = 16_384


async def page(source: Source, project: str, name: str, worker: str, wanted: str, base: str) -> dict[str, Any]:
    """Return the values of the page: the log's end, or its last lines with a text. Raises NotFoundError.

    With `worker` ALL: those of all workers, each line with its worker.
    """
    job = source.job(project, name)
    reached = SEARCHED_BYTES if wanted else SHOWN_BYTES
    every = worker == ALL
    workers = [str(one.index) for one in job.status.workers][-MOST_WORKERS:] if every else [worker]
    share = reached // max(1, len(workers))
    lines: deque[str] = deque(maxlen=FOUND_LINES if wanted else None)
    cut, offset = False, 0
    for one in workers:
        text, offset = await _end(source, project, name, one, share)
        cut = cut or len(text) >= share
        lines.extend(await asyncio.to_thread(_lines, text, share, wanted, f"worker {one} | " if every else ""))
    return {
        "job": job,
        "here": join(base, "jobs", project, name),
        "worker": worker,
        "workers": _choices(job),
        "every": every,
        "q": wanted,
        "found": len(lines),
        "text": "\n".join(lines),
        "cut": cut,
        "offset": offset,
        "revision": 0,
    }


def _lines(text: bytes, most: int, wanted: str, prefix: str) -> list[str]:
    """Return the lines of a log's end that contain a text; without its first line where that may be cut."""
    if len(text) >= most:
        text = text.partition(b"\n")[2]
    plain = plain_log(text)
    if not wanted and not prefix:
        return [plain]
    return [prefix + line for line in plain.rstrip("\n").split("\n") if line and wanted.lower() in line.lower()]


async def last_lines(source: Source, project: str, name: str, worker: str) -> str:
    """Return the last lines of a worker's log. Raises what the source raises."""
    text, _ = await _end(source, project, name, worker, LAST_BYTES)
    return "\n".join(plain_log(text).rstrip("\n").split("\n")[-LAST_LINES:])


async def follow(
    source: Source, project: str, name: str, worker: str, offset: int
) -> AsyncGenerator[tuple[int, bytes] | None, None]:
    """Yield (offset behind it, JSON of its text) for what is printed from `offset` on, None where nothing was."""
    rest = b""
    while True:
        chunk = await source.read_log(project, name, worker, offset, POLL_S)
        if chunk.next_offset - len(chunk.text) > offset and rest:  # the file system took back what came before
            rest = b""
        offset, rest = chunk.next_offset, rest + chunk.text
        whole = rest if not chunk.more else _whole_lines(rest)
        rest = rest[len(whole) :]
        if whole:
            yield offset - len(rest), msgspec.json.encode(plain_log(whole))
        elif chunk.more:
            yield None
        if not chunk.more:
            return


async def whole(source: Source, project: str, name: str, worker: str) -> AsyncIterator[bytes]:
    """Yield a log from its beginning to what was printed until now."""
    offset = 0
    while (chunk := await source.read_log(project, name, worker, offset, 0.0)).text:
        yield chunk.text
        offset = chunk.next_offset


def _whole_lines(text: bytes) -> bytes:
    """Return the text up to its last end of a line, so that no character is cut; a very long line as it is."""
    end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
    return text[:end] if end or len(text) < LONGEST_LINE else text


async def _end(source: Source, project: str, name: str, worker: str, most: int) -> tuple[bytes, int]:
    """Return the last bytes of a log, and the offset behind them."""
    chunk = await source.read_log(project, name, worker, -most, 0.0)
    parts = [chunk.text]
    while chunk.text:
        chunk = await source.read_log(project, name, worker, chunk.next_offset, 0.0)
        parts.append(chunk.text)
    return b"".join(parts)[-most:], chunk.next_offset


def _choices(job: Job) -> list[tuple[str, str]]:
    workers = [(str(worker.index), f"worker {worker.index}") for worker in job.status.workers]
    first = "the job's result" if job.status.result_worker else "the first worker"
    return [("", first), *workers, *([(ALL, "all workers")] if len(workers) > 1 else [])]
