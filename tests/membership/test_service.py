"""The service over real HTTP connections."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership.service import MembershipService, NotStoredYetError
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.membership import AnnounceCommit

TOKEN = "a-token"
JOB = "job-1"


@dataclass
class Recorder:
    """Notices, as rows."""

    rows: list[tuple[object, ...]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    full: bool = False  # the disk
    storing: bool = False  # a number, which takes time

    def _note(self, *row: object) -> None:
        self.rows.append(row)
        self.changed.set()

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        if self.full:
            if ("full", generation) not in self.rows:
                self._note("full", generation)
            raise OSError("no space left on device")
        if self.storing:
            if ("storing", generation) not in self.rows:
                self._note("storing", generation)
            raise NotStoredYetError(str(generation))
        self._note("reserved", generation)

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        self._note("committed", commit.generation, "by all" if commit.complete else "by the first")

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        self._note("released", worker, step)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        self._note("kill", worker)

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        self._note("progress", worker, progress.step)

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        self._note("finished", worker, step)

    async def until(self, *row: object) -> None:
        while row not in self.rows:
            self.changed.clear()
            await self.changed.wait()


class Connection:
    """One worker's connection: send events, receive orders."""

    def __init__(self, session: aiohttp.ClientSession, worker: str, token: str, incarnation: str) -> None:
        self.worker, self._lines = worker, asyncio.Queue[bytes | None]()
        self._request = session.post(
            f"/v1/membership/{JOB}/workers/{worker}",
            params={"incarnation": incarnation},
            headers={"Authorization": f"Bearer {token}"},
            data=self._body(),
        )

    async def _body(self) -> AsyncIterator[bytes]:
        while line := await self._lines.get():
            yield line

    async def open(self, event: str = "WorkerJoined", **fields: object) -> aiohttp.ClientResponse:
        self.send(event, **fields)
        self.response = await self._request
        return self.response

    def send(self, event: str, **fields: object) -> None:
        self._lines.put_nowait(json.dumps({"event": event, "worker": self.worker, **fields}).encode() + b"\n")

    def close(self) -> None:
        self._lines.put_nowait(None)

    async def receive(self, order: str) -> dict[str, object]:
        while True:
            line = await self.response.content.readline()
            assert line, "the stream ended"
            message: dict[str, object] = json.loads(line.strip() or b'{"order": "nothing"}')
            if message["order"] == order:
                return message


@dataclass
class Bench:
    service: MembershipService
    recorder: Recorder
    session: aiohttp.ClientSession

    async def join(self, worker: str, token: str = TOKEN, incarnation: str = "1") -> Connection:
        connection = Connection(self.session, worker, token, incarnation)
        await connection.open()
        return connection

    async def form(self) -> Connection:
        """The first generation, of one worker."""
        self.service.set_target(JOB, ["a"])
        a = await self.join("a")
        a.send("WorkerReady")
        await a.receive("Recover")
        return a

    async def store(self, operation: str, generation: int = 1, **fields: object) -> tuple[int, object]:
        async with self.session.post(
            f"/v1/membership/{JOB}/store/{generation}/{operation}",
            json=fields,
            headers={"Authorization": f"Bearer {TOKEN}"},
        ) as response:
            return response.status, await response.json()


@asynccontextmanager
async def served(limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Bench]:
    recorder = Recorder()
    service = MembershipService(recorder, limits=limits, clock=clock)
    app = web.Application()
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.lifespan)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    service.open(JOB, TOKEN)
    try:
        async with aiohttp.ClientSession(base, timeout=aiohttp.ClientTimeout(30)) as session:
            yield Bench(service, recorder, session)
    finally:
        await runner.cleanup()


def run(
    scenario: Callable[[Bench], Awaitable[None]],
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    async def body() -> None:
        async with served(limits, clock) as bench, asyncio.timeout(TIMEOUT_S):
            await scenario(bench)

    asyncio.run(body())


def test_a_worker_is_told_its_generation_and_the_number_was_reserved_before() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["a"])
        a = await bench.join("a")
        a.send("WorkerReady")
        assert await a.receive("Recover") == {"order": "Recover", "generation": 1, "members": ["a"]}
        assert bench.recorder.rows == [("reserved", 1)]
        a.send("GenerationAdopted", generation=1, step=0)
        await bench.recorder.until("committed", 1, "by all")
        a.send("ProgressReported", step=5, metrics={"loss": 0.5}, not_finite={"accuracy": "nan"})
        await bench.recorder.until("progress", "a", 5)

    run(scenario)


def test_a_notice_that_fails_holds_the_orders_after_it_back_until_it_is_taken() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.full = True
        bench.service.set_target(JOB, ["w0", "w1"])
        w0, w1 = await bench.join("w0"), await bench.join("w1")
        for worker in (w0, w1):
            worker.send("WorkerReady")
        await bench.recorder.until("full", 1)
        assert bench.recorder.rows == [("full", 1)]
        await bench.join("w2")  # the service still answers
        bench.recorder.full = False
        assert (await w0.receive("Recover"))["generation"] == 1
        assert (await w1.receive("Recover"))["members"] == ["w0", "w1"]
        assert bench.recorder.rows[-1] == ("reserved", 1)

    run(scenario)


def test_a_worker_that_connects_while_a_number_cannot_be_stored_is_not_told_the_number() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.full = True
        bench.service.set_target(JOB, ["w0"])
        w0 = await bench.join("w0")
        w0.send("WorkerReady")
        await bench.recorder.until("full", 1)
        again = await bench.join("w0")
        bench.recorder.full = False
        assert (await again.receive("Recover"))["generation"] == 1
        assert bench.recorder.rows[-1] == ("reserved", 1)

    run(scenario)


def test_an_order_waits_until_its_number_is_stored_and_is_sent_then() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.storing = True
        bench.service.set_target(JOB, ["w0"])
        w0 = await bench.join("w0")
        assert (await w0.receive("Stay"))["generation"] == 0
        w0.send("WorkerReady")
        await bench.recorder.until("storing", 1)
        waiting = asyncio.create_task(w0.receive("Recover"))
        assert not waiting.done()
        bench.recorder.storing = False
        bench.service.resume(JOB)
        assert (await waiting)["generation"] == 1

    run(scenario)


def test_a_coordinator_that_was_held_up_does_not_take_that_for_its_workers_silence() -> None:
    held_up_s = [0.0]

    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["w0", "w1"])
        w0 = await bench.join("w0")
        await w0.receive("Stay")
        held_up_s[0] = 100.0
        w0.send("WorkerReady")
        await bench.join("w1")
        assert ("kill", "w0") not in bench.recorder.rows
        await bench.recorder.until("kill", "w0")  # it sends nothing more, which counts as silence

    run(scenario, Limits(silence_s=2.0, unheard_s=2.0, isolated_s=2.0), lambda: time.monotonic() + held_up_s[0])


def test_a_wrong_token_opens_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["a"])
        refused = await bench.join("a", token="another")
        assert refused.response.status == 401
        assert (await refused.response.json())["error"]["code"] == "unauthorized"

    run(scenario)


def test_a_second_process_with_the_same_worker_id_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["a"])
        await bench.join("a", incarnation="1")
        second = await bench.join("a", incarnation="2")
        assert second.response.status == 409
        assert "used once" in (await second.response.json())["error"]["message"]

    run(scenario)


def test_a_worker_that_connects_again_is_told_the_newest_order_and_nothing_older() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["a", "b"])
        a, b = await bench.join("a"), await bench.join("b")
        a.send("WorkerReady")
        b.send("WorkerReady")
        await a.receive("Recover")
        a.close()
        bench.service.worker_exited(JOB, "b")
        again = await bench.join("a")
        assert (await again.receive("Recover"))["members"] == ["a"]

    run(scenario)


def test_the_end_of_a_request_is_answered_after_all_its_events_were_processed() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["a"])
        a = await bench.join("a")
        a.send("WorkerReady")
        await a.receive("Recover")
        a.send("GenerationAdopted", generation=1, step=0)
        a.send("TrainingFinished", step=9)
        a.close()
        await a.response.content.read()
        assert ("finished", "a", 9) in bench.recorder.rows

    run(scenario)


def test_garbage_ends_the_connection_and_not_the_service() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["a"])
        strange = Connection(bench.session, "a", TOKEN, "1")
        assert (await strange.open("Nonsense")).status == 400
        assert (await bench.join("a")).response.status == 200

    run(scenario)


def test_a_get_waits_for_the_value_and_ends_when_its_generation_is_over() -> None:
    async def scenario(bench: Bench) -> None:
        bench.service.set_target(JOB, ["a"])
        a = await bench.join("a")
        a.send("WorkerReady")
        await a.receive("Recover")
        waiting = asyncio.create_task(bench.store("get", key="k", timeout_s=20))
        assert await bench.store("set", key="k", value="dg==") == (200, None)
        assert await waiting == (200, ["dg=="])
        stuck = asyncio.create_task(bench.store("get", key="never", timeout_s=20))
        a.send("GenerationAdopted", generation=1, step=0)
        await bench.recorder.until("committed", 1, "by all")
        bench.service.set_target(JOB, [])
        await a.receive("Propose")
        a.send("GenerationAdopted", generation=2, step=1)
        assert (await stuck)[0] == 409

    run(scenario)


def test_the_store_counts_compares_and_deletes() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.form()
        assert await bench.store("add", key="n", amount=2) == (200, 2)
        assert await bench.store("add", key="n", amount=3) == (200, 5)
        assert await bench.store("compare_set", key="c", value="eA==") == (200, "eA==")
        assert await bench.store("compare_set", key="c", value="eQ==") == (200, "eA==")
        assert await bench.store("check", keys=["c", "n"]) == (200, True)
        assert await bench.store("delete", key="c") == (200, True)
        assert await bench.store("check", keys=["c"]) == (200, False)
        assert (await bench.store("get", key="c", timeout_s=0.01))[0] == 404

    run(scenario)


def test_a_value_beyond_the_limit_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        status, answer = await bench.store("set", key="big", value="A" * (4 << 20))
        assert status == 413, answer

    run(scenario)
