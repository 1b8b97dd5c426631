"""Both ends of a membership shard, over real connections: either may go at any time, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import token_of
from kfp_gpuquota.cluster.kubernetes.shards import server
from kfp_gpuquota.cluster.kubernetes.shards.messages import CONTROL_PATH, Outbox, control_token, shard_of
from kfp_gpuquota.cluster.kubernetes.shards.server import ControlEndpoint, serving
from kfp_gpuquota.cluster.kubernetes.shards.shard_jobs import ShardJobs
from kfp_gpuquota.cluster.kubernetes.shards.sharded_membership import FIRST_PAUSE_S, ShardedMembership
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership.service import NotStoredYetError
from kfp_gpuquota.server.transport import connections
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.membership import AnnounceCommit

KEY = b"key"
JOB = "job-1"
LIMITS = Limits(silence_s=3.0)


@dataclass
class Leader:
    """A leader's end, and the reports that it received, as rows. `stored`: the highest number in the API server."""

    url: str
    epoch: int = 1
    rows: list[tuple[object, ...]] = field(default_factory=list)
    stored: int = 32
    reopened: list[str] = field(default_factory=list)
    attempt: int = 1

    def __post_init__(self) -> None:
        self.membership = ShardedMembership(self, self, [self.url], KEY, self.epoch)

    def open(self, *workers: str, first: int = 1) -> None:
        self.membership.open(
            JOB,
            "",
            min_workers=1,
            first_generation=first,
            running=workers,
            limits=LIMITS,
            trained=(),
            worker_prefix="",
            attempt=self.attempt,
            stored=self.stored,
        )
        self.membership.set_target(JOB, workers)

    @property
    def authority(self) -> bytes:
        return b""

    def shard_of(self, _uid: str) -> int:
        return 0

    def reopen(self, uid: str) -> None:
        self.reopened.append(uid)
        self.stored += 64
        self.open("a", first=self.stored - 32 + 1)

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        self.rows.append(("needed", generation))
        if generation > self.stored:
            raise NotStoredYetError(str(generation))

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        self.rows.append(("committed", commit.generation, commit.members, "by all" if commit.complete else "by some"))

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        self.rows.append(("released", worker, step))

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        self.rows.append(("kill", worker))

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        self.rows.append(("progress", worker, progress.step))

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        self.rows.append(("finished", worker, step))

    async def until(self, *row: object) -> None:
        await eventually(lambda: row in self.rows)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


class Worker:
    """One worker's connection."""

    def __init__(self, session: aiohttp.ClientSession, base: str, worker: str) -> None:
        self.worker, self._lines = worker, asyncio.Queue[bytes | None]()
        self._session, self._url = session, f"{base}/v1/membership/{JOB}/workers/{worker}"

    async def _body(self) -> AsyncIterator[bytes]:
        while line := await self._lines.get():
            yield line

    def say(self, event: str, **fields: object) -> None:
        self._lines.put_nowait(json.dumps({"event": event, "worker": self.worker, **fields}).encode() + b"\n")

    async def connect(self, event: str = "WorkerJoined", **fields: object) -> int:
        self.say(event, **fields)
        headers = {"Authorization": f"Bearer {token_of(JOB, KEY)}"}
        self.response = await self._session.post(
            self._url, params={"incarnation": "1"}, headers=headers, data=self._body()
        )
        return self.response.status

    async def hear(self, order: str) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                line = await self.response.content.readline()
                assert line, "the stream ended"
                message: dict[str, Any] = json.loads(line.strip() or b'{"order": ""}')
                if message["order"] == order:
                    return message


@dataclass
class World:
    """A shard that can be replaced on its port, and leaders."""

    stack: AsyncExitStack
    session: aiohttp.ClientSession
    port: int = 0
    jobs: ShardJobs | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def shard(self) -> AsyncIterator[ShardJobs]:
        jobs = ShardJobs(KEY, LIMITS)
        async with serving(jobs, ControlEndpoint(jobs), self.port, None) as self.port:
            yield jobs

    @asynccontextmanager
    async def leading(self, **more: Any) -> AsyncIterator[Leader]:
        leader = Leader(self.url, **more)
        async with leader.membership.serving():
            yield leader

    def worker(self, name: str) -> Worker:
        return Worker(self.session, self.url, name)


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        timeout = aiohttp.ClientTimeout(30)
        async with (
            asyncio.timeout(TIMEOUT_S),
            AsyncExitStack() as stack,
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            await test(World(stack, session))

    asyncio.run(main())


async def trains(world: World, name: str = "a") -> Worker:
    """One worker in generation 1."""
    worker = world.worker(name)
    assert await worker.connect() == 200
    worker.say("WorkerReady")
    order = await worker.hear("Recover")
    worker.say("GenerationAdopted", generation=order["generation"], step=0)
    return worker


def test_a_worker_trains_through_its_shard_and_the_leader_is_told() -> None:
    async def test(world: World) -> None:
        async with world.shard(), world.leading() as leader:
            leader.open("a")
            await eventually(lambda: leader.membership.connected == 1)
            worker = await trains(world)
            await leader.until("committed", 1, ("a",), "by all")
            worker.say("ProgressReported", step=5, metrics={"loss": 0.5})
            await leader.until("progress", "a", 5)
            leader.membership.set_target(JOB, ["a", "b"])
            other = world.worker("b")
            await other.connect()
            other.say("WorkerReady")
            assert (await worker.hear("Propose"))["members"] == ["a", "b"]

    run(test)


def test_a_worker_that_comes_before_its_job_is_open_is_asked_to_come_again() -> None:
    async def test(world: World) -> None:
        async with world.shard():
            assert await world.worker("a").connect() == 503  # a 401 would end its training
            async with world.leading() as leader:
                leader.open("a")
                await eventually(lambda: leader.membership.connected == 1)
                await trains(world)
            stranger = world.session.post(
                f"{world.url}/v1/membership/{JOB}/workers/a", headers={"Authorization": "Bearer none"}
            )
            async with stranger as answer:
                assert answer.status == 401

    run(test)


def test_training_goes_on_without_a_leader_and_the_next_one_is_told_what_stands() -> None:
    async def test(world: World) -> None:
        async with world.shard() as shard:
            async with world.leading() as leader:
                leader.open("a", "b")
                await eventually(lambda: leader.membership.connected == 1)
                first = world.worker("a")
                await first.connect()
                second = world.worker("b")
                await second.connect()
                for worker in (first, second):
                    worker.say("WorkerReady")
                for worker in (first, second):
                    worker.say("GenerationAdopted", generation=(await worker.hear("Recover"))["generation"], step=0)
                await leader.until("committed", 1, ("a", "b"), "by all")
            # the leader has exited, and b fails: a continues in a generation with a number that was stored before
            first.say("CollectiveFailed", generation=1, step=3)
            second.response.close()
            order = await first.hear("Recover")
            assert order == {"order": "Recover", "generation": 2, "members": ["a"]}
            first.say("GenerationAdopted", generation=2, step=3)
            first.say("TrainingFinished", step=9)
            await eventually(lambda: shard.service.machine(JOB).finished)
            async with world.leading(epoch=2) as later:
                later.open("a", "b", first=1_000_001)
                await later.until("committed", 2, ("a",), "by all")
                await later.until("finished", "a", 9)
                await later.until("kill", "b")

    run(test)


def test_a_shard_that_was_restarted_is_given_its_jobs_with_numbers_that_were_never_used() -> None:
    async def test(world: World) -> None:
        async with world.shard():
            pass  # a port of its own
        async with world.leading() as leader:
            leader.open("a")
            async with world.shard():
                await eventually(lambda: leader.membership.connected == 1)
                worker = await trains(world)
                await leader.until("committed", 1, ("a",), "by all")
            leader.membership.resume(JOB, leader.stored)
            async with world.shard() as shard:
                await eventually(lambda: leader.reopened == [JOB])
                await eventually(lambda: JOB in shard.jobs)
                worker = world.worker("a")
                assert await worker.connect("WorkerReconnected", generation=1, members=["a"], step=4) == 200
                await leader.until("committed", 1, ("a",), "by all")
                leader.membership.set_target(JOB, ["a", "b"])
                other = world.worker("b")
                await other.connect()
                other.say("WorkerReady")
                proposed = await worker.hear("Propose")
                assert (proposed["generation"], proposed["members"]) == (65, ["a", "b"])

    run(test)


def test_a_number_is_sent_only_once_the_leader_says_that_it_is_stored() -> None:
    async def test(world: World) -> None:
        async with world.shard(), world.leading(stored=0) as leader:
            leader.open("a")
            await eventually(lambda: leader.membership.connected == 1)
            worker = world.worker("a")
            await worker.connect()
            assert (await worker.hear("Stay"))["generation"] == 0
            worker.say("WorkerReady")
            await leader.until("needed", 1)
            ordered = asyncio.create_task(worker.hear("Recover"))
            await asyncio.sleep(0)
            assert not ordered.done()
            leader.membership.resume(JOB, 32)
            assert (await ordered)["generation"] == 1

    run(test)


def test_a_worker_that_ended_while_no_leader_was_connected_is_gone_for_the_shard_too() -> None:
    async def test(world: World) -> None:
        async with world.shard() as shard:
            async with world.leading() as leader:
                leader.open("a", "b")
                await eventually(lambda: JOB in shard.jobs)
            async with world.leading(epoch=2) as later:
                later.open("a")
                await eventually(lambda: not shard.service.machine(JOB).members["b"].alive)
                assert shard.service.machine(JOB).members["a"].alive

    run(test)


def test_a_later_start_of_the_job_begins_anew_and_a_job_that_is_not_listed_is_closed() -> None:
    async def test(world: World) -> None:
        async with world.shard() as shard:
            async with world.leading() as leader:
                leader.open("a")
                await eventually(lambda: JOB in shard.jobs)
                before = shard.service.machine(JOB)
                leader.attempt = 2
                leader.open("b")
                await eventually(lambda: shard.service.machine(JOB) is not before)
                assert set(shard.service.machine(JOB).members) == {"b"}
            async with world.leading(epoch=2):
                await eventually(lambda: JOB not in shard.jobs)

    run(test)


def test_of_two_leaders_the_one_of_the_later_epoch_is_obeyed() -> None:
    async def test(world: World) -> None:
        async with world.shard() as shard, world.leading(epoch=5) as later:
            later.open("a")
            await eventually(lambda: JOB in shard.jobs)
            async with world.leading(epoch=4) as stale:
                stale.open("x", "y")
                headers = {"Authorization": f"Bearer {control_token(KEY)}"}
                async with world.session.post(
                    world.url + CONTROL_PATH, params={"epoch": "4"}, headers=headers
                ) as answer:
                    assert answer.status == 409
                    assert "epoch 5" in await answer.text()
                assert shard.jobs[JOB].state.wanted == ("a",)
                assert stale.membership.connected == 0

    run(test)


def test_who_does_not_have_the_key_is_no_leader() -> None:
    async def test(world: World) -> None:
        async with world.shard():
            for token in ("", token_of(JOB, KEY), control_token(b"another")):
                headers = {"Authorization": f"Bearer {token}"}
                async with world.session.post(world.url + CONTROL_PATH, headers=headers) as answer:
                    assert answer.status == 401

    run(test)


@pytest.mark.parametrize(("uid", "shard"), [("job-1", 3), ("job-2", 1), ("0d1f2c9a-5b7e-4a1c-9f7d-3f1f6c1e8a55", 1)])
def test_a_jobs_shard_is_the_same_in_each_process(uid: str, shard: int) -> None:
    assert shard_of(uid, 4) == shard


def test_whoever_sends_half_a_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        jobs = ShardJobs(KEY, LIMITS)
        async with serving(jobs, ControlEndpoint(jobs), 0, None) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/membership/job/workers/a HTTP/1.1\r\nHost: x\r\n")
            async with asyncio.timeout(TIMEOUT_S):
                assert await reader.read() == b""
            writer.close()

    monkeypatch.setattr(server, "WORKER_LIMITS", connections.Limits(head_s=0.05))
    asyncio.run(scenario())


def test_the_leader_connects_again_soon_to_a_shard_that_was_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    (link,) = Leader("http://nowhere.invalid").membership._links
    pauses: list[float] = []

    async def converse() -> None:
        link._outbox = Outbox() if len(pauses) >= 3 else None
        raise RunError("it closed the connection")

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 6:
            raise asyncio.CancelledError

    monkeypatch.setattr(link, "_converse", converse)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(link.run())
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, *[FIRST_PAUSE_S] * 3]
