"""The page reads logs in parts: no line twice, none left out, from a server that answers as a kubelet does."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.test_utils import TestServer

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Worker
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import Credentials
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container, Metadata, Pod, PodSpec, PodStatus
from kfp_gpuquota.cluster.kubernetes.objects.log_lines import time_of
from kfp_gpuquota.cluster.kubernetes.web import pod_logs
from kfp_gpuquota.cluster.kubernetes.web.objects import Objects
from kfp_gpuquota.cluster.kubernetes.web.pod_logs import PodLogs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
WORKER = Worker(id="train-0", job_uid="u", index=0, node="n", devices=(0,))
JOB = Job(
    uid="u", spec=JobSpec(name="train", project="team", command=("x",), gpus=1), status=JobStatus(workers=(WORKER,))
)


def pod(phase: str) -> Pod:
    metadata = Metadata(name="train-0", namespace="team", uid="p", labels={labels.JOB: "train"})
    spec = PodSpec(node_name="n", containers=(Container(name="main"), Container(name="istio-proxy")))
    return Pod(metadata=metadata, spec=spec, status=PodStatus(phase=phase))


@dataclass
class Kubelet:
    """Serves one log: each line with the milliseconds at which it was printed."""

    lines: list[tuple[int, bytes]]
    asked: list[dict[str, str]] = field(default_factory=list)
    printed: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        answer = web.StreamResponse()
        await answer.prepare(request)
        since = datetime.fromisoformat(query["sinceTime"]) if "sinceTime" in query else BEGIN
        shown = [(at, line) for at, line in self.lines if BEGIN + timedelta(milliseconds=at) >= since]
        for at, line in shown[-int(query.get("tailLines", len(shown) or 1)) :]:
            await answer.write(stamped(at, line))
        sent = len(self.lines)
        while "follow" in query:
            await self.printed.wait()
            self.printed.clear()
            for at, line in self.lines[sent:]:
                await answer.write(stamped(at, line))
            sent = len(self.lines)
        return answer


def stamped(at: int, line: bytes) -> bytes:
    return f"{(BEGIN + timedelta(milliseconds=at)).isoformat(timespec='microseconds')[:-6]}Z ".encode() + line


@asynccontextmanager
async def logs_of(kubelet: Kubelet, phase: str = "Running") -> AsyncIterator[PodLogs]:
    application = web.Application()
    application.router.add_get("/api/v1/namespaces/team/pods/train-0/log", kubelet.answer)
    objects = Objects()
    objects.put_pod(pod(phase))
    async with (
        TestServer(application) as server,
        Connection(Credentials(str(server.make_url("")).rstrip("/"))) as connection,
    ):
        yield PodLogs(objects, connection)


def test_a_log_is_read_in_parts_without_a_line_twice_or_left_out() -> None:
    lines = [(i, b"%d %s\n" % (i, b"x" * 100)) for i in range(9_000)]

    async def run() -> tuple[bytes, int]:
        kubelet = Kubelet([*lines, (9_000, b"without an end")])
        async with logs_of(kubelet, "Succeeded") as logs:
            parts, offset = [], 0
            while (chunk := await logs.read(JOB, "", offset, 0.0)).text:
                parts.append(chunk.text)
                offset = chunk.next_offset
            assert not chunk.more
            assert {query["container"] for query in kubelet.asked} == {"main"}
            return b"".join(parts), len(parts)

    text, parts = asyncio.run(run())
    assert text == b"".join(line for _, line in lines) + b"without an end"
    assert parts > 3


def test_the_end_of_a_log_and_what_is_printed_after_it() -> None:
    async def run() -> None:
        kubelet = Kubelet([(i, b"%d\n" % i) for i in range(1_000)])
        async with logs_of(kubelet) as logs:
            end = await logs.read(JOB, "0", -100, 0.0)
            assert end.text == b"".join(b"%d\n" % i for i in (998, 999))
            reading = asyncio.create_task(logs.read(JOB, "0", end.next_offset, 60.0))
            while not any("follow" in query for query in kubelet.asked):
                await asyncio.sleep(0)
            kubelet.lines.append((1_000, b"new\n"))
            kubelet.printed.set()
            found = await reading
            assert (found.text, found.more) == (b"new\n", True)
            assert "sinceTime" in kubelet.asked[-1]

    asyncio.run(run())


def test_times_have_zones_and_offsets_fit_into_what_browsers_repeat() -> None:
    at = time_of(b"2026-01-01T00:00:00.5Z")
    assert at == time_of(b"2026-01-01T01:00:00.500000000+01:00")
    assert time_of(b"not") is None
    latest = time_of(b"2050-01-01T00:00:00Z")
    assert latest is not None
    assert len(str(latest)) < 19
    assert pod_logs.PIECE < 1 << 20
