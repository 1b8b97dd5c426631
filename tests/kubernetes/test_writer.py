"""The queue of requests: lanes, turns of namespaces, repeats outside of the slots, and answers that cannot be used."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import Credentials
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import NO_FENCE, Fence
from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import (
    NAMESPACE_BURST,
    NAMESPACE_PER_SECOND,
    Recorder,
)
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import SLOTS, Writer
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Test = Callable[["Writer", "Scripted"], Awaitable[None]]


class Scripted(Connection):
    """Answers with `answer(path)` once the request is released; records how many calls ran at a time."""

    def __init__(self, answer: Callable[[str], bytes | Exception]) -> None:
        super().__init__(Credentials(server="https://nowhere.invalid"), seed=1)
        self._answer = answer
        self.held: set[str] = set()
        self.running: list[str] = []
        self.calls: list[str] = []
        self.moved = asyncio.Condition()

    async def call(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "",
        params: Mapping[str, str] | None = None,
        retry_for_s: float | None = None,
        fence: Fence = NO_FENCE,
    ) -> bytes:
        """Make one attempt of the call."""
        self.calls.append(path)
        self.running.append(path)
        try:
            async with self.moved:
                self.moved.notify_all()
                await self.moved.wait_for(lambda: path not in self.held)
            answer = self._answer(path)
        finally:
            self.running.remove(path)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def backoff(self, limit_s: float) -> Backoff:
        """Return at once instead of pausing."""
        return Backoff(0.0, 0.0, limit_s=limit_s)

    async def let(self, *paths: str) -> None:
        """Release these requests."""
        async with self.moved:
            self.held -= set(paths)
            self.moved.notify_all()


def write(namespace: str, name: str, lane: Lane = Lane.OTHER) -> Write:
    return Write(verb="POST", path=f"{namespace}/{name}", about=f"{namespace}/{name}", lane=lane)


def with_writer(answer: Callable[[str], bytes | Exception], test: Test, *, timeout_s: float = 60.0) -> None:
    """Run `test` with a writer that receives these answers."""

    async def run() -> None:
        connection = Scripted(answer)
        writer = Writer(connection, retry_for_s=timeout_s)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await test(writer, connection)
        finally:
            await writer.close()

    asyncio.run(run())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_request_that_always_fails_holds_no_slot_while_it_waits() -> None:
    broken = ApiError(500, "InternalError", "This pod has more than one PodDisruptionBudget")

    async def test(writer: Writer, connection: Scripted) -> None:
        finished = asyncio.Event()
        for number in range(3 * SLOTS[Lane.RELEASE]):
            writer.submit(write("hostile", f"p{number}", Lane.RELEASE), lambda _: None, lambda _: None)
        writer.submit(write("other", "pod", Lane.RELEASE), lambda _: finished.set(), lambda _: None)
        await finished.wait()
        assert connection.calls.count("other/pod") == 1

    with_writer(lambda path: broken if path.startswith("hostile") else b"{}", test)


def test_namespaces_take_turns_and_none_takes_the_last_slots() -> None:
    async def test(writer: Writer, connection: Scripted) -> None:
        connection.held = {f"big/p{number}" for number in range(100)}
        done: list[str] = []
        for number in range(100):
            writer.submit(write("big", f"p{number}", Lane.ADMIT), lambda _: done.append("big"), lambda _: None)
        await turns()
        assert len(connection.running) == SLOTS[Lane.ADMIT] - 2
        for number in range(5):
            writer.submit(write("small", f"p{number}", Lane.ADMIT), lambda _: done.append("small"), lambda _: None)
        await turns(60)
        assert done == ["small"] * 5

    with_writer(lambda _: b"{}", test)


def test_a_lane_that_is_full_holds_up_no_other_lane() -> None:
    async def test(writer: Writer, connection: Scripted) -> None:
        connection.held = {f"n{number}/status" for number in range(50)}
        for number in range(50):
            writer.submit(write(f"n{number}", "status", Lane.STATUS), lambda _: None, lambda _: None)
        evicted = asyncio.Event()
        writer.submit(write("n1", "pod", Lane.RELEASE), lambda _: evicted.set(), lambda _: None)
        await evicted.wait()
        assert writer.depth[Lane.STATUS] == 50 - SLOTS[Lane.STATUS]

    with_writer(lambda _: b"{}", test)


def test_an_answer_that_cannot_be_used_is_a_failure_and_others_go_on() -> None:
    def unusable(_: bytes) -> None:
        raise KeyError("uid")

    def unusable_too(_: Exception) -> None:
        raise KeyError("uid")

    async def test(writer: Writer, connection: Scripted) -> None:
        failures: list[Exception] = []
        finished = asyncio.Event()
        writer.submit(write("n", "first"), unusable, failures.append)
        writer.submit(write("n", "second"), unusable, unusable_too)
        writer.submit(write("n", "third"), lambda _: finished.set(), lambda _: None)
        await finished.wait()
        assert [type(error) for error in failures] == [KeyError]

    with_writer(lambda _: b"{}", test)


def test_a_refusal_is_reported_once_and_not_repeated() -> None:
    async def test(writer: Writer, connection: Scripted) -> None:
        failures: list[Exception] = []
        writer.submit(write("n", "pod"), lambda _: None, failures.append)
        await turns()
        assert connection.calls == ["n/pod"]
        assert [str(error) for error in failures] == ["no"]

    with_writer(lambda _: ApiError(403, "Forbidden", "no"), test)


def test_what_passes_is_repeated_until_the_time_limit() -> None:
    async def test(writer: Writer, connection: Scripted) -> None:
        failed = asyncio.Event()
        writer.submit(write("n", "pod"), lambda _: None, lambda _: failed.set())
        await failed.wait()
        assert len(connection.calls) > 1

    with_writer(lambda _: ApiError(503, "ServiceUnavailable", "later"), test, timeout_s=0.05)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(list(Lane)), st.booleans()), max_size=60))
def test_every_request_is_answered_exactly_once(requests: list[tuple[str, Lane, bool]]) -> None:
    async def test(writer: Writer, connection: Scripted) -> None:
        answers: list[int] = []
        for number, (namespace, lane, _) in enumerate(requests):
            one = lambda _, number=number: answers.append(number)  # noqa: E731
            writer.submit(write(namespace, str(number), lane), one, one)
        while len(answers) < len(requests):
            await asyncio.sleep(0)
        await turns()
        assert sorted(answers) == list(range(len(requests)))
        assert not any(writer.depth.values())

    refused = {f"{namespace}/{number}" for number, (namespace, _, bad) in enumerate(requests) if bad}
    with_writer(lambda path: ApiError(409, "Conflict", "taken") if path in refused else b"{}", test)


def test_a_team_that_causes_events_without_end_leaves_room_for_the_others() -> None:
    async def test(writer: Writer, connection: Scripted) -> None:
        events, began = Recorder(writer), asyncio.get_running_loop().time()
        for number in range(500):
            events.record(Subject("Pod", f"p{number}", "noisy"), "Quarantined", f"problem {number}")
        events.record(Subject("Pod", "pod", "quiet"), "Evicted", "for a reason")
        passed = asyncio.get_running_loop().time() - began
        while any(writer.depth.values()) or connection.running:
            await asyncio.sleep(0)
        assert connection.calls.count("/api/v1/namespaces/quiet/events") == 1
        written = connection.calls.count("/api/v1/namespaces/noisy/events")
        assert int(NAMESPACE_BURST) <= written <= NAMESPACE_BURST + passed * NAMESPACE_PER_SECOND

    with_writer(lambda _: b"{}", test)
