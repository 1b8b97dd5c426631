"""The controller forecasts the starts of waiting jobs after plans, and writes a status only for a material change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from kfp_gpuquota.api import Device, JobSpec, JobStatus, Node, Phase, Project, Worker
from kfp_gpuquota.cluster.kubernetes.controller.forecast import EVERY_S, RESTS, SELDOM_S, SOON_S, StartForecast
from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
from kfp_gpuquota.cluster.kubernetes.planner.process import InlinePlanner
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
from kfp_gpuquota.scheduler import NodeChanged, QuotaChanged, State
from tests.simulation.loop import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState


def record(name: str, phase: Phase, **spec: object) -> JobRecord:
    made = JobSpec(name=name, project="team", command=("true",), gpus=2, **spec)  # type: ignore[arg-type]
    started = 0.0 if phase is Phase.RUNNING else None
    return JobRecord(uid=name, spec=made, status=JobStatus(phase=phase, started_at=started))


class _Free:
    """Devices that nobody else assigns."""

    def held(self, _worker: str) -> None:
        return None

    def take(self, *_: object, **__: object) -> None:
        pass


class _FailsOnce(InlinePlanner):
    """A planner of which the first child is killed while it writes; later ones take a while."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.began: list[float] = []

    async def aside(self, compute: Callable[[], bytes]) -> bytes:
        self.began.append(asyncio.get_running_loop().time())
        if len(self.began) == 1:
            return compute()[:-1]
        if len(self.began) > 2:
            await asyncio.sleep(EVERY_S)
        return compute()


def test_forecasts_go_on_after_one_has_failed_and_rest_after_long_ones() -> None:
    state = State()
    state.apply(NodeChanged(Node(name="node", devices=(Device(index=0),))))
    state.apply(QuotaChanged(Project(name="team", guaranteed=2)))
    planner = _FailsOnce(state)

    def begin() -> None:
        loop = asyncio.get_running_loop()
        book = ElasticJobStore(state.apply, cast("DeviceAllocator", _Free()), {}, loop.time)
        book.commit(Change(jobs={"first": record("first", Phase.PENDING)}))
        forecast = StartForecast(planner, lambda: state, book, loop.time)
        for at in range(200):
            loop.call_later(at, forecast.planned)
        loop.call_later(200, forecast.close)
        loop.call_later(200, loop.rested.set)  # type: ignore[attr-defined]

    simulate(begin)
    first, second, third, fourth, *_ = (round(at) for at in planner.began)
    assert (second - first, third - second) == (EVERY_S, EVERY_S)
    assert fourth - third == (1 + RESTS) * EVERY_S


def test_a_forecast_follows_plans_and_is_renewed_while_jobs_wait() -> None:
    state = State()
    written: list[tuple[float, str]] = []
    state.apply(NodeChanged(Node(name="node", devices=(Device(index=0), Device(index=1)))))
    state.apply(QuotaChanged(Project(name="team", guaranteed=2)))

    def begin() -> None:
        loop = asyncio.get_running_loop()
        book = ElasticJobStore(state.apply, cast("DeviceAllocator", _Free()), {}, loop.time)
        book.changed = lambda uid: written.append((loop.time(), uid))
        worker = Worker(id="first-0", job_uid="first", index=0, node="node", devices=(0, 1))
        book.commit(Change(jobs={"first": record("first", Phase.RUNNING, max_runtime_s=600.0)}))
        book.commit(Change(workers={"first-0": WorkerRecord(worker=worker, attempt=0)}))
        book.commit(Change(jobs={"second": record("second", Phase.PENDING)}))
        book.runtime_states["second"] = cast("RuntimeState", None)
        forecast = StartForecast(InlinePlanner(state), lambda: state, book, loop.time)
        for _ in range(3):
            forecast.planned()

        def look() -> None:
            expected = book.expected_starts["second"]
            assert (expected.earliest, expected.latest) == (600.0, 600.0)
            forecast.close()
            loop.rested.set()  # type: ignore[attr-defined]

        loop.call_later(SOON_S + 3 * SELDOM_S, look)

    simulate(begin)
    assert written == [(SOON_S, "second")]
