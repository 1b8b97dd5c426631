"""The election on a real API server, with clocks that the test advances: the cases of client-go's tests."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import from_file
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import LeaseValidity, StaleLeaseError
from kfp_gpuquota.cluster.kubernetes.client.leader.leader_election import LeaderElection
from kfp_gpuquota.cluster.kubernetes.client.leader.renewal import Renewal
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
from kfp_gpuquota.errors import InvalidFieldError
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tools.devcluster import DevCluster

DURATION_S, DEADLINE_S, RETRY_S = 12.0, 8.0, 2.0


class Clock:
    """A clock that advances when the test advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Election:
    """Candidates for one lease of the test's own."""

    def __init__(self, cluster: DevCluster, connection: Connection) -> None:
        self.cluster, self.connection, self.clock = cluster, connection, Clock()
        self.name = f"lease-{uuid.uuid4().hex[:8]}"
        self.path = f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{self.name}"

    def candidate(self, identity: str, clock: Clock | None = None) -> LeaderElection:
        return LeaderElection(
            self.connection,
            "default",
            identity,
            name=self.name,
            duration_s=DURATION_S,
            renew_deadline_s=DEADLINE_S,
            retry_s=RETRY_S,
            clock=clock or self.clock,
        )

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.api.get(self.path)["spec"]
        return found

    @property
    def version(self) -> str:
        return str(self.cluster.api.get(self.path)["metadata"]["resourceVersion"])


@asynccontextmanager
async def electing(cluster: DevCluster) -> AsyncIterator[Election]:
    async with Connection(from_file(cluster.kubeconfig)) as connection:
        election = Election(cluster, connection)
        yield election
        if cluster.api.exists(election.path):
            cluster.api.delete(election.path)


@pytest.fixture
def elect(cluster: DevCluster) -> Callable[[Callable[[Election], Awaitable[None]]], None]:
    """Runs a test's coroutine with an election of its own."""

    def run(test: Callable[[Election], Awaitable[None]]) -> None:
        async def main() -> None:
            async with electing(cluster) as election:
                await test(election)

        asyncio.run(main())

    return run


def test_the_first_candidate_creates_the_lease_and_leads(elect: Any) -> None:
    async def test(election: Election) -> None:
        first = election.candidate("first")
        assert await first.attempt()
        assert first.leads
        assert (election.spec["holderIdentity"], election.spec["leaseTransitions"]) == ("first", 0)
        assert election.spec["leaseDurationSeconds"] == DURATION_S

    elect(test)


def test_a_renewal_keeps_the_time_of_acquisition_and_the_epoch(elect: Any) -> None:
    async def test(election: Election) -> None:
        first = election.candidate("first")
        await first.attempt()
        before, version = election.spec, election.version
        assert await first.attempt()
        assert election.version != version
        assert {k: election.spec[k] for k in ("acquireTime", "leaseTransitions")} == {
            k: before[k] for k in ("acquireTime", "leaseTransitions")
        }

    elect(test)


def test_a_lease_that_another_one_holds_is_not_taken_before_it_has_not_changed_for_its_duration(elect: Any) -> None:
    async def test(election: Election) -> None:
        first, second = election.candidate("first", Clock()), election.candidate("second")
        await first.attempt()
        assert not await second.attempt()  # from here on it counts
        election.clock.now += DURATION_S - 0.5
        assert not await second.attempt()
        await first.attempt()  # it changed: the count starts again
        election.clock.now += 1.0
        assert not await second.attempt()
        election.clock.now += DURATION_S
        assert await second.attempt()
        assert (election.spec["holderIdentity"], election.spec["leaseTransitions"]) == ("second", 1)
        assert (second.epoch, first.epoch) == (1, 0)

    elect(test)


def test_the_times_in_the_lease_are_not_compared_with_the_candidates_own_clock(elect: Any) -> None:
    async def test(election: Election) -> None:
        first, second = election.candidate("first"), election.candidate("second")
        await first.attempt()
        past = {"renewTime": "2001-01-01T00:00:00.000000Z", "acquireTime": "2001-01-01T00:00:00.000000Z"}
        election.cluster.api.patch(election.path, {"spec": past})
        assert not await second.attempt()

    elect(test)


def test_of_two_candidates_for_an_expired_lease_one_wins(elect: Any) -> None:
    async def test(election: Election) -> None:
        await election.candidate("first").attempt()
        others = [election.candidate(f"other-{i}") for i in range(4)]
        assert not any([await other.attempt() for other in others])
        election.clock.now += DURATION_S
        won = await asyncio.gather(*(other.attempt() for other in others))
        assert won.count(True) == 1
        assert election.spec["holderIdentity"] == f"other-{won.index(True)}"
        assert election.spec["leaseTransitions"] == 1

    elect(test)


def test_a_lease_without_holder_is_taken_at_once(elect: Any) -> None:
    async def test(election: Election) -> None:
        first, second = election.candidate("first"), election.candidate("second")
        await first.attempt()
        await first.release()
        assert not first.leads
        assert not first.validity.valid()
        assert (election.spec["holderIdentity"], election.spec["leaseDurationSeconds"]) == ("", 1)
        assert await second.attempt()
        assert election.spec["leaseTransitions"] == 1

    elect(test)


def test_a_release_does_not_touch_a_lease_that_another_one_has_taken(elect: Any) -> None:
    async def test(election: Election) -> None:
        first, second = election.candidate("first", Clock()), election.candidate("second")
        await first.attempt()
        assert not await second.attempt()
        election.clock.now += DURATION_S
        assert await second.attempt()
        version = election.version
        await first.release()  # it was paused meanwhile and believes that it leads
        assert (election.version, election.spec["holderIdentity"]) == (version, "second")

    elect(test)


def test_a_candidate_that_never_led_releases_nothing(elect: Any) -> None:
    async def test(election: Election) -> None:
        first, second = election.candidate("first"), election.candidate("second")
        await first.attempt()
        version = election.version
        await second.release()
        assert election.version == version

    elect(test)


def test_a_leader_that_finds_another_holder_stops_at_once(elect: Any) -> None:
    async def test(election: Election) -> None:
        first = election.candidate("first")
        await first.attempt()
        election.cluster.api.patch(election.path, {"spec": {"holderIdentity": "somebody-else"}})
        assert not await first.attempt()
        assert not first.validity.valid()
        async with asyncio.timeout(TIMEOUT_S):
            await first.hold()  # returns
        assert election.spec["holderIdentity"] == "somebody-else"

    elect(test)


def test_a_leader_whose_lease_was_deleted_makes_it_anew_with_its_epoch(elect: Any) -> None:
    async def test(election: Election) -> None:
        first, second = election.candidate("first", Clock()), election.candidate("second")
        await first.attempt()
        await second.attempt()
        election.clock.now += DURATION_S
        await second.attempt()
        election.cluster.api.delete(election.path)
        assert await second.attempt()
        assert election.spec["leaseTransitions"] == second.epoch == 1

    elect(test)


def test_a_leader_whose_namespace_was_deleted_stops_with_its_next_renewal(elect: Any) -> None:
    async def course(election: Election) -> None:
        api = election.cluster.api
        namespace = election.cluster.make_namespace(f"system-{uuid.uuid4().hex[:6]}")
        leader = LeaderElection(election.connection, namespace, "a", name=election.name, clock=election.clock)
        assert await leader.attempt()
        api.delete(f"/api/v1/namespaces/{namespace}")
        api.until_gone(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{election.name}")
        assert not await leader.attempt()
        assert not leader.validity.valid()

    elect(course)


def test_a_leader_may_act_for_the_renew_deadline_from_the_start_of_its_last_successful_request(elect: Any) -> None:
    async def test(election: Election) -> None:
        first = election.candidate("first")
        slow = SlowCalls(election.connection, election.clock, seconds=3.0)
        first._connection = slow  # type: ignore[assignment]
        await first.attempt()  # a read and a write, 3 s each
        assert first.validity.remaining_s() == pytest.approx(DEADLINE_S - 6.0)
        election.clock.now += DEADLINE_S - 6.0
        assert not first.validity.valid()

    elect(test)


def test_a_request_that_fails_shortens_nothing_and_lengthens_nothing(elect: Any) -> None:
    async def test(election: Election) -> None:
        first = election.candidate("first")
        await first.attempt()
        election.clock.now += 3.0
        path, first._path = first._path, "/apis/none"
        assert await first.attempt()
        assert first.validity.remaining_s() == pytest.approx(DEADLINE_S - 3.0)
        election.clock.now += DEADLINE_S - 3.0
        assert not await first.attempt()
        first._path = path
        assert not first.validity.valid()

    elect(test)


@pytest.mark.parametrize("periods", [(8.0, 8.0, 2.0), (12.0, 2.0, 2.0), (12.0, 8.0, 0.0)])
def test_periods_that_cannot_hold_a_lease_are_refused(periods: tuple[float, float, float]) -> None:
    duration_s, renew_deadline_s, retry_s = periods
    with pytest.raises(InvalidFieldError, match="lease periods"):
        LeaderElection(
            Connection(None),  # type: ignore[arg-type]
            "default",
            "one",
            duration_s=duration_s,
            renew_deadline_s=renew_deadline_s,
            retry_s=retry_s,
        )


def test_a_validity_that_has_ended_is_not_renewed() -> None:
    clock = Clock()
    validity = LeaseValidity(DEADLINE_S, clock)
    assert not validity.valid()
    validity.acquired(clock.now)
    clock.now += DEADLINE_S - 1
    validity.renewed(clock.now)
    clock.now += DEADLINE_S
    assert not validity.valid()
    validity.renewed(clock.now)  # a request that was answered while the process was stopped
    assert not validity.valid()


def test_a_writer_sends_nothing_on_a_stale_lease_not_even_again(elect: Any) -> None:
    async def test(election: Election) -> None:
        first = election.candidate("first")
        await first.attempt()
        answers: list[object] = []
        writer = Writer(election.connection, fence=first.validity)
        path = "/api/v1/namespaces/default/configmaps"

        def write(name: str) -> None:
            body = {"metadata": {"name": name}}
            writer.submit(Write(verb="POST", path=path, about=name, body=body), answers.append, answers.append)

        write(f"{election.name}-valid")
        async with asyncio.timeout(TIMEOUT_S):
            while len(answers) < 1:
                await asyncio.sleep(0.01)
        election.clock.now += DEADLINE_S
        write(f"{election.name}-stale")
        async with asyncio.timeout(TIMEOUT_S):
            while writer._tasks:
                await asyncio.sleep(0.01)
        with pytest.raises(StaleLeaseError, match="another process may lead"):
            await election.connection.call("GET", path, fence=first.validity)
        names = [one["metadata"]["name"] for one in election.cluster.api.items(path)]
        assert f"{election.name}-valid" in names
        assert f"{election.name}-stale" not in names
        assert len(answers) == 1
        election.cluster.api.delete(f"{path}/{election.name}-valid")

    elect(test)


class SlowCalls:
    """A connection on which every call takes some of the clock's seconds."""

    def __init__(self, connection: Connection, clock: Clock, seconds: float) -> None:
        self._connection, self._clock, self._seconds = connection, clock, seconds

    async def read(self, *arguments: Any, **more: Any) -> Any:
        self._clock.now += self._seconds
        return await self._connection.read(*arguments, **more)

    async def call(self, *arguments: Any, **more: Any) -> Any:
        self._clock.now += self._seconds
        return await self._connection.call(*arguments, **more)


def test_the_lease_is_renewed_while_the_event_loop_is_busy_and_not_when_it_hangs(cluster: DevCluster) -> None:
    async def scenario(busy_s: float, alive_s: float) -> bool:
        async with electing(cluster) as election:
            leader = LeaderElection(
                election.connection,
                "default",
                "busy",
                name=election.name,
                duration_s=1.5,
                renew_deadline_s=1.0,
                retry_s=0.2,
            )
            assert await leader.attempt()
            renewal = Renewal(leader, lambda: Connection(from_file(cluster.kubeconfig)), alive_s)
            holding = asyncio.create_task(renewal.hold())
            await asyncio.sleep(0)
            deadline = time.monotonic() + busy_s
            while time.monotonic() < deadline:
                pass  # what a plan with ten thousand starts does to the loop
            led = leader.leads and leader.validity.valid()
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            return led

    assert asyncio.run(scenario(3.0, 60.0))
    assert not asyncio.run(scenario(3.0, 0.5))
