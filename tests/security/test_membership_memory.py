"""What one token, or none, can make the membership service hold: over real connections, with TLS."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import socket
import ssl
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import pytest
from aiohttp import web

from kfp_gpuquota.cluster.certificates import maintained
from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError
from kfp_gpuquota.server.membership import job_bounds, messages, rendezvous_store
from kfp_gpuquota.server.membership.job_bounds import JobBounds
from kfp_gpuquota.server.membership.rendezvous_store import Space, Store, Total
from kfp_gpuquota.server.membership.service import MembershipService
from kfp_gpuquota.server.transport import accepting
from kfp_gpuquota.server.transport.accepting import LimitedSite
from kfp_gpuquota.server.transport.connections import MAX_HEAD_BYTES, LimitedRunner, Limits
from kfp_gpuquota.server.transport.tls import load_pair
from tests.membership.test_service import Recorder
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

JOB, TOKEN = "job", "a-token"
MIB = 1 << 20
MATERIAL = maintained(None, ["127.0.0.1"], time.time())
HERE, THERE = "127.0.0.2", "127.0.0.3"


class Bench:
    """A service on a TLS port, and what connects to it."""

    def __init__(self, service: MembershipService, site: LimitedSite, runner: LimitedRunner) -> None:
        self.service, self.site, self.runner = service, site, runner
        self.port = runner.addresses[0][1]
        self._kept: list[Caller] = []
        self.trusting = ssl.create_default_context(cadata=MATERIAL.trusted.decode())

    @property
    def job(self) -> Any:
        """The service's state of the job."""
        return self.service._jobs[JOB]

    @property
    def open(self) -> int:
        """The number of connections that count."""
        return self.runner.admission._count

    async def connect(self, source: str = HERE, *, tls: bool = True) -> Caller:
        """Open a connection from an address of this machine."""
        context = self.trusting if tls else None
        streams = await asyncio.open_connection("127.0.0.1", self.port, ssl=context, local_addr=(source, 0))
        self._kept.append(Caller(*streams))  # a stream that is collected closes its connection
        return self._kept[-1]


class Caller:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, path: str, body: bytes = b"", *more: str, token: str = TOKEN, length: int | None = None) -> Self:
        """Write a request."""
        lines = [f"POST /v1/membership/{JOB}/{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *more]
        lines.append(f"Content-Length: {len(body) if length is None else length}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return self

    async def answer(self) -> tuple[int, bytes]:
        """Read one answer with a length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split(b"\r")[0])
        return int(head.split(b" ", 2)[1]), await self.reader.readexactly(length)

    async def ask(self, operation: str, **fields: object) -> tuple[int, Any]:
        """Ask the store."""
        status, body = await self.send(f"store/1/{operation}", json.dumps(fields).encode()).answer()
        return status, json.loads(body)

    async def ended(self) -> bool:
        """Read a byte; return whether the other end has closed the connection instead."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Bench]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(context, MATERIAL.serving.certificate, MATERIAL.serving.key)
    service = MembershipService(Recorder())
    service.open(JOB, TOKEN, first_generation=5, running=[f"{JOB}-0"], worker_prefix=f"{JOB}-")
    app = web.Application()
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.lifespan)
    runner = LimitedRunner(
        app, Limits(by_token=True, **limits), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    site = LimitedSite(runner, socket.create_server(("127.0.0.1", 0), backlog=1024), context)
    await site.start()
    try:
        yield Bench(service, site, runner)
    finally:
        await runner.cleanup()


def run(scenario: Callable[[Bench], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def whole() -> None:
        async with served(**limits) as bench, asyncio.timeout(TIMEOUT_S):
            await scenario(bench)

    asyncio.run(whole())


async def until_async(condition: Callable[[], bool]) -> None:
    """Return when the condition is true; the scenario has a time limit."""
    while not condition():
        await asyncio.sleep(0.01)


# Requests and answers


def test_an_answer_holds_a_value_once_however_often_its_key_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        caller = await bench.connect()
        value = bytes(range(256)) * 400
        assert (await caller.ask("set", key="k", value=base64.b64encode(value).decode()))[0] == 200
        held: list[int] = []
        holding = JobBounds.holding

        def counting(bounds: JobBounds, size: int) -> Any:
            held.append(size)
            return holding(bounds, size)

        monkeypatch.setattr(JobBounds, "holding", counting)
        status, found = await caller.ask("get", keys=["k"] * 20)
        assert (status, {base64.b64decode(one) for one in found}, len(found)) == (200, {value}, 20)
        assert held[1:] == [len(value)]
        status, _ = await caller.ask("get", keys=["k"] * 1000)
        assert status == 422  # 100 MB

    run(scenario)


def test_answers_and_waits_are_counted_against_their_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_bounds, "HELD_BYTES", 20_000)
    monkeypatch.setattr(job_bounds, "HELD_BYTES_A_WORKER", 0)

    async def scenario(bench: Bench) -> None:
        keys = [f"absent-{number}" for number in range(150)]
        waiting = await bench.connect()
        waiting.send("store/1/wait", json.dumps({"keys": keys, "timeout_s": 60}).encode())
        await until_async(lambda: bench.job.bounds._held > 0)
        refused, answer = await (await bench.connect()).ask("wait", keys=keys, timeout_s=60)
        assert (refused, "hold" in answer["error"]["message"]) == (503, True)
        waiting.writer.transport.abort()
        await until_async(lambda: bench.job.bounds._held == 0)
        assert (await (await bench.connect()).ask("wait", keys=keys, timeout_s=0.01))[0] == 404

    run(scenario)


@pytest.mark.parametrize(
    ("body", "more", "status"),
    [
        (json.dumps({"keys": ["k"] * 10_001}).encode(), (), 422),
        (json.dumps({"key": "k" * 5000}).encode(), (), 422),
        (b'{"keys": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", (), 400),
        (b" " * (MIB + 1), (), 413),
        (b"{}", ("Content-Encoding: gzip",), 422),
    ],
    ids=["many keys", "a long key", "deep JSON", "a large body", "a compressed body"],
)
def test_a_request_beyond_a_bound_is_refused(body: bytes, more: tuple[str, ...], status: int) -> None:
    async def scenario(bench: Bench) -> None:
        assert (await (await bench.connect()).send("store/1/set", body, *more).answer())[0] == status

    run(scenario)


def test_large_bodies_of_a_job_are_read_a_few_at_a_time() -> None:
    async def scenario(bench: Bench) -> None:
        slow = [await bench.connect() for _ in range(8)]
        for one in slow:
            one.send("store/1/set", b" " * 1000, length=MIB - 1)
        await until_async(bench.job.bounds.large_bodies.locked)
        assert (await (await bench.connect()).ask("set", key="small", value=""))[0] == 200
        for one in slow:
            one.writer.transport.abort()
        await until_async(lambda: not bench.job.bounds.large_bodies.locked())

    run(scenario)


def test_a_job_has_as_many_connections_as_its_workers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_bounds, "CONNECTIONS", 2)
    monkeypatch.setattr(job_bounds, "CONNECTIONS_A_WORKER", 2)  # and it has one worker

    async def scenario(bench: Bench) -> None:
        callers = [await bench.connect() for _ in range(4)]
        for one in callers:
            assert (await one.ask("count"))[0] == 200
        for one in callers[1:]:
            one.send("store/1/wait", json.dumps({"keys": ["absent"], "timeout_s": 60}).encode())
        await until_async(lambda: sum(not one.idle for one in bench.job.bounds._connections) == 3)
        fifth = await bench.connect()
        assert (await fifth.ask("count"))[0] == 200
        assert await callers[0].ended(), "an idle connection ends for it"
        fifth.send("store/1/wait", json.dumps({"keys": ["absent"], "timeout_s": 60}).encode())
        await until_async(lambda: all(not one.idle for one in bench.job.bounds._connections))
        assert (await (await bench.connect()).ask("count"))[0] == 503

    run(scenario)


def test_a_job_that_is_evicted_keeps_the_bounds_of_the_workers_that_leave() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, [f"{JOB}-{number}" for number in range(50)])
        bench.service.set_target(JOB, [])
        assert bench.job.bounds.workers == 50

    run(scenario)


# Workers


@pytest.mark.parametrize("hello", [{}, {"event": "WorkerHeard"}, {"event": "WorkerJoined", "worker": "another"}])
def test_a_refused_worker_leaves_nothing_behind(hello: dict[str, str]) -> None:
    async def scenario(bench: Bench) -> None:
        before = len(bench.job.machine.members)
        for number in range(5):
            line = json.dumps(hello).encode() + b"\n"
            caller = (await bench.connect()).send(f"workers/{JOB}-new{number}?incarnation=1", line)
            assert (await caller.answer())[0] in {400, 422}
        assert bench.job.incarnations == {}
        assert len(bench.job.machine.members) == before

    run(scenario)


def test_a_token_is_valid_for_its_job_until_the_job_is_closed() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.open("other", "another-token", worker_prefix="other-")
        caller = await bench.connect()
        assert (await caller.ask("count"))[0] == 200
        for token in ("another-token", TOKEN[:-1], f"{TOKEN}x", "", "\x00"):
            assert (await (await bench.connect()).send("store/1/count", b"{}", token=token).answer())[0] in {400, 401}
        in_query = (await bench.connect()).send(f"store/1/count?token={TOKEN}", b"{}", token="")
        assert (await in_query.answer())[0] == 401
        bench.service.close(JOB)
        assert (await caller.send("store/1/count", b"{}").answer())[0] == 401, "also on a connection that was proven"

    run(scenario)


def test_a_worker_that_is_replayed_by_another_process_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        line = json.dumps({"event": "WorkerJoined", "worker": f"{JOB}-0"}).encode() + b"\n"
        first = (await bench.connect()).send(f"workers/{JOB}-0?incarnation=mine", line)
        assert b" 200 " in await first.reader.readuntil(b"\r\n")
        for incarnation in ("", "other", "x" * 100):
            replay = (await bench.connect()).send(f"workers/{JOB}-0?incarnation={incarnation}", line)
            assert (await replay.answer())[0] in {409, 422}
        assert bench.job.incarnations == {f"{JOB}-0": "mine"}

    run(scenario)


def test_workers_that_the_cluster_has_not_named_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_UNNAMED", 3)

    async def scenario(bench: Bench) -> None:
        async def join(worker: str) -> int:
            line = json.dumps({"event": "WorkerJoined", "worker": worker}).encode() + b"\n"
            caller = (await bench.connect()).send(f"workers/{worker}?incarnation=1", line)
            head = await caller.reader.readuntil(b"\r\n\r\n")
            caller.writer.transport.abort()
            return int(head.split(b" ", 2)[1])

        assert [await join(f"{JOB}-{name}") for name in ("a", "b", "c", "d", "0")] == [200, 200, 200, 503, 200]
        members = [f"{JOB}-{n}" for n in range(10)]
        line = json.dumps({"event": "WorkerReconnected", "worker": f"{JOB}-0", "generation": 1, "members": members})
        caller = (await bench.connect()).send(f"workers/{JOB}-0?incarnation=1", line.encode() + b"\n")
        assert (await caller.answer())[0] == 503
        assert await join(f"{JOB}-{'x' * 600}") == 422

    run(scenario)


# The store


def test_a_value_wakes_only_what_waits_for_it() -> None:
    async def scenario() -> None:
        space = Space()
        waits = [asyncio.create_task(space.wait([f"k{n}", "last"], 30.0)) for n in range(50)]
        await asyncio.sleep(0)
        assert len(space._waiting) == 50
        space.set("other", b"")
        space.set("k7", b"")
        await asyncio.sleep(0)
        assert set(space._waiting) == {f"k{n}" for n in range(50) if n != 7} | {"last"}
        space.set("last", b"")
        await waits[7]
        assert sum(one.done() for one in waits) == 1
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        assert space._waiting == {}

    asyncio.run(scenario())


def test_a_wait_for_a_key_that_is_deleted_again_goes_on() -> None:
    async def scenario() -> None:
        space = Space()
        wait = asyncio.create_task(space.wait(["a", "b"], 30.0))
        await asyncio.sleep(0)
        space.set("a", b"")
        await asyncio.sleep(0)
        space.delete("a")
        space.set("b", b"")
        await asyncio.sleep(0)
        assert not wait.done()
        space.set("a", b"")
        await wait

    asyncio.run(scenario())


def test_the_stores_of_all_jobs_have_a_total_of_which_each_keeps_its_part() -> None:
    total = Total(10_000)
    first, second = Store(total), Store(total)
    first.space(1, 1).set("k", b"x" * 7000)
    first.space(1, 1).set("l", b"x" * 2000)
    second.space(1, 1).set("k", b"x" * 4000)  # above the total, and within its part
    with pytest.raises(InvalidFieldError, match="equal part"):
        first.space(1, 1).set("m", b"x" * 100)
    with pytest.raises(InvalidFieldError, match="equal part"):
        second.space(1, 1).set("m", b"x" * 1000)
    first.close()
    assert total.jobs == 1
    second.space(1, 1).set("m", b"x" * 1000)
    second.close()
    assert (total.jobs, total.bytes) == (0, 0)


def test_an_appended_value_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "MAX_VALUE_BYTES", 1000)
    space = Space()
    space.append("k", b"x" * 1000)
    with pytest.raises(InvalidFieldError, match="at most"):
        space.append("k", b"x")


def test_a_jobs_work_is_done_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get their turn after each slice, also where nothing of the job has to wait."""
    monkeypatch.setattr(job_bounds, "SLICE_S", 0.0)

    async def scenario() -> None:
        turn, order = job_bounds.Turn(), []

        async def work(name: str) -> None:
            for _ in range(3):
                async with turn:
                    order.append(name)

        async def other() -> None:
            for _ in range(20):
                order.append("other")
                await asyncio.sleep(0)

        await asyncio.gather(work("a"), work("b"), other())
        assert all("other" in pair for pair in itertools.pairwise(order[:12]))
        assert {"a", "b"} < set(order)

    asyncio.run(scenario())


def test_the_refusal_of_a_job_that_holds_too_much_names_how_much() -> None:
    bounds = JobBounds()
    refused = pytest.raises(ClusterUnavailableError, match="1 more do not fit")
    with bounds.holding(job_bounds.HELD_BYTES), refused, bounds.holding(1):
        pass
    with bounds.holding(1):
        pass


# Connections


def test_a_silent_connection_counts_and_has_no_tls_state() -> None:
    async def scenario(bench: Bench) -> None:
        silent = [await bench.connect(tls=False) for _ in range(4)]
        await until_async(lambda: bench.open == 4)
        assert bench.site._acceptor.unproven == 0
        assert await (await bench.connect(tls=False)).ended(), "one too many from this source"
        assert (await (await bench.connect(THERE)).ask("count"))[0] == 200
        assert all([await one.ended() for one in silent]), "the time for a handshake is limited"
        await until_async(lambda: bench.open == 1)

    run(scenario, per_source=4, handshake_s=2.0)


def hello(bench: Bench) -> bytes:
    """Return the first record of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        bench.trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


def test_a_handshake_that_arrives_in_pieces_is_made() -> None:
    async def scenario(bench: Bench) -> None:
        caller = await bench.connect(tls=False)
        first = hello(bench)
        for start in range(0, len(first), 7):
            caller.writer.write(first[start : start + 7])
            await caller.writer.drain()
            await asyncio.sleep(0)
            if start + 7 < len(first):
                assert bench.site._acceptor.unproven == 0
        assert (await caller.reader.read(1)) == b"\x16"

    run(scenario)


def test_what_is_no_handshake_is_closed_at_once() -> None:
    async def scenario(bench: Bench) -> None:
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, b"\x17\x03\x03"):
            caller = await bench.connect(tls=False)
            caller.writer.write(junk)
            assert await caller.ended()

    run(scenario, handshake_s=30.0)


def test_half_a_handshake_ends_in_time_and_keeps_no_other_source_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "OF_ONE", 4)
    monkeypatch.setattr(accepting, "READY_S", 1.5)

    async def scenario(bench: Bench) -> None:
        half = [await bench.connect(tls=False) for _ in range(40)]
        for number, one in enumerate(half):
            one.writer.write(hello(bench) if number < 20 else hello(bench)[:100])
        await until_async(lambda: bench.site._acceptor.unproven == 4)
        for _ in range(3):
            assert (await (await bench.connect(THERE)).ask("count"))[0] == 200
        for one in half:
            while not await one.ended():
                pass
        await until_async(lambda: bench.open == 3)

    run(scenario, handshake_s=1.5)


def test_a_source_that_waits_gets_the_slot_of_the_one_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "UNPROVEN", 4)
    monkeypatch.setattr(accepting, "OF_ONE", 2)
    monkeypatch.setattr(accepting, "OLD_S", 0.1)
    monkeypatch.setattr(accepting, "SWEEP_S", 0.05)

    async def scenario(bench: Bench) -> None:
        for source in ("127.0.0.5", "127.0.0.6"):
            for _ in range(2):
                await bench.connect(source)  # a handshake, and no request
        assert bench.site._acceptor.unproven == 4
        assert (await (await bench.connect(THERE)).ask("count"))[0] == 200

    run(scenario, head_s=30.0)


@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_connection_without_a_valid_token_stays_unproven_and_is_closed(token: str) -> None:
    async def scenario(bench: Bench) -> None:
        caller = await bench.connect()
        assert (await caller.send("store/1/count", b"{}", token=token).answer())[0] == 401
        assert await caller.ended()
        await until_async(lambda: bench.site._acceptor.unproven == 0)

    run(scenario)


def test_a_head_without_an_end_is_cut_off() -> None:
    async def scenario(bench: Bench) -> None:
        caller = await bench.connect()
        caller.writer.write(b"POST /v1/membership/job/store/1/set HTTP/1.1\r\n")
        for number in range(MAX_HEAD_BYTES // 1000 + 20):
            caller.writer.write(b"X-%d: %s\r\n" % (number, b"a" * 1000))
        assert await caller.ended()

    run(scenario, head_s=30.0)
