"""The web page of a cluster with 10,000 jobs and 10,000 GPUs, in Chromium.

    python benchmarks/page.py --scale

The page's own server over the state of an embedded cluster: 1,250 nodes with 8 GPUs in 50 racks and 2 pools, 40 teams,
2,400 jobs that hold 9,600 GPUs, 7,100 that wait, 500 that ended. The state is loaded from its file as a daemon does;
the jobs have no processes.

first_paint_ms: first contentful paint, from the navigation's begin, median of 5, of the slowest page (queue, nodes
colored by project, teams, timeline, a job). page_kib: what Chromium received for the largest of them, compressed.
event_to_pixel_ms: from a change of the state until Chromium has drawn it (two animation frames after the element was
replaced), median of 20: the larger one of the queue's, where a job is suspended and resumed, and of the map's, where a
GPU is used and released. loop_ms: the longest time that the server's event loop stood still while a stream of each page
was open and a job changed once a second.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser import chromium, drawn_at, painted
from common import print_conditions, print_result

from kfp_gpuquota.api import (
    Device,
    JobSpec,
    JobStatus,
    Node,
    Phase,
    Progress,
    Project,
    Reason,
    ReasonCode,
    Worker,
    WorkerPhase,
)
from kfp_gpuquota.api.history import UsePoint
from kfp_gpuquota.cluster.local.audit_log import AuditLog
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.page.server import PageServer
from kfp_gpuquota.cluster.local.page.source import LocalPages
from kfp_gpuquota.cluster.local.storage.state import ClusterState
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord, with_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from selenium import webdriver

    from kfp_gpuquota.cluster.local.cluster import LocalCluster

NODES, GPUS, RACK = 1250, 8, 25
RUNNING, WAITING, ENDED = 2400, 7100, 500
TEAMS = 40
CHANGES = 20
PATHS = {
    "queue": "/queue?state=all",
    "nodes": "/nodes?color=project&group=rack",
    "teams": "/teams",
    "timeline": "/timeline?size=250",
    "job": "/jobs/team-00/job-00000",
}


def measure() -> None:
    """Measure and print."""
    driver = chromium()
    print_conditions(
        "The web page at scale", browser=driver.capabilities["browserVersion"], jobs=RUNNING + WAITING + ENDED,
        gpus=NODES * GPUS,
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="gpuquota-page-") as folder:
            server = Server(Home(Path(folder) / "home"))
            try:
                print_result(**figures(driver, server))
            finally:
                server.close()
    finally:
        driver.quit()


def figures(driver: webdriver.Chrome, server: Server) -> dict[str, object]:
    """Return everything that is measured."""
    driver.get(server.link)
    while not driver.current_url.endswith("/teams"):
        time.sleep(0.05)
    base = server.link.partition("/enter")[0]
    pages = {name: painted(driver, base + path) for name, path in PATHS.items()}
    for name, page in pages.items():
        print(f"{name}: {page}", flush=True)
    driver.get(f"{base}/queue?word=waits-0000")  # a suspended job moves behind those that wait
    queue = event_to_pixel(driver, server.change_job, server.row)
    driver.get(base + PATHS["nodes"])
    nodes = event_to_pixel(driver, server.change_gpu, "n-node-1249")
    print(f"event to pixel: queue {queue} ms, map {nodes} ms", flush=True)
    for path in PATHS.values():
        driver.switch_to.new_window("window")
        driver.get(base + path)
    server.slowest_s = 0.0
    for i in range(CHANGES):
        time.sleep(1.0)
        server.change_job(i)
    return {
        "first_paint_ms": max(page["first_paint_ms"] for page in pages.values()),
        "page_kib": max(page["page_kib"] for page in pages.values()),
        "event_to_pixel_ms": max(queue, nodes),
        "loop_ms": round(server.slowest_s * 1e3, 1),
    }


def event_to_pixel(driver: webdriver.Chrome, change: Callable[[int], str], element: str) -> float:
    """Return milliseconds from a change until it is drawn."""
    took = []
    for i in range(CHANGES):
        time.sleep(1.0)  # people do not click ten times a second
        began = time.time()
        word = change(i)
        took.append(drawn_at(driver, element, word) - began)
    return round(statistics.median(took) * 1e3, 1)


class Server:
    """The page's server in a thread of its own, over a state that was loaded from a file."""

    def __init__(self, home: Home) -> None:
        home.create()
        self.slowest_s = 0.0
        self._changing = f"waits-{0:05}"
        self.row = f"job-{self._changing}"
        self._nodes = list(nodes())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.link = self._call(self._open(home))
        self._ticker = asyncio.run_coroutine_threadsafe(self._tick(), self._loop)

    async def _open(self, home: Home) -> str:
        store = Store(home.database)
        with store.transaction():
            store.save_nodes(self._nodes)
            for i in range(TEAMS):
                store.save_project(Project(name=f"team-{i:02}", guaranteed=NODES * GPUS // TEAMS))
            for job, worker in jobs():
                store.save_job(job)
                if worker is not None:
                    store.save_worker(worker)
        self._state = ClusterState(store, self._nodes)
        used = tuple(UsePoint(time.time() - 30 * i, 50.0 + i % 40, 40_000) for i in reversed(range(240)))
        cluster = SimpleNamespace(
            list_nodes=self._state.list_nodes,
            memory=SimpleNamespace(of=lambda *_: ()),
            meter=SimpleNamespace(of=lambda *_: used),
            held_hours=lambda _since_s: (),
        )
        source = LocalPages(store, self._state, cast("LocalCluster", cluster))
        self._page = PageServer(home, source, AuditLog(home.audit_file))
        return (await self._page.open()).url

    def change_job(self, i: int) -> str:
        """Suspend or resume a job; return its phase then."""
        phase = Phase.SUSPENDED if i % 2 == 0 else Phase.PENDING

        async def change() -> None:
            with self._state.change(durable=False) as made:
                made.jobs[self._changing] = with_status(self._state.jobs[self._changing], phase=phase)

        self._call(change())
        return phase.value

    def change_gpu(self, i: int) -> str:
        """Take a GPU away, or return it; return what its tile says then."""

        async def change() -> None:
            self._state.set_nodes(self._nodes, {"node-1249": (7,)} if i % 2 == 0 else {})

        self._call(change())
        return "1 of 8 in use" if i % 2 == 0 else "0 of 8 in use"

    def close(self) -> None:
        """Stop serving."""
        self._ticker.cancel()
        self._call(self._page.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            self.slowest_s = max(self.slowest_s, time.monotonic() - before - 0.005)


def nodes() -> Iterator[Node]:
    """Yield the nodes."""
    for i in range(NODES):
        pool = "" if i < NODES // 2 else "h100"
        devices = tuple(Device(index=j, model="A100" if not pool else "H100") for j in range(GPUS))
        yield Node(name=f"node-{i:04}", devices=devices, pool=pool, labels={"rack": f"rack-{i // RACK:02}"})


def jobs() -> Iterator[tuple[JobRecord, WorkerRecord | None]]:
    """Yield the jobs, each with its worker: of 4 GPUs."""
    now = time.time()
    waits = Reason(code=ReasonCode.NO_FREE_GPUS, message="It needs 4 GPUs of one node; no node has more than 2 idle.")
    runs = Reason(code=ReasonCode.FITS, message="It holds 4 GPUs of its project's guarantee.")
    for i in range(RUNNING):
        uid, node = f"job-{i:05}", i // 2
        pool = "" if node < NODES // 2 else "h100"
        spec = JobSpec(name=uid, project=f"team-{i % TEAMS:02}", command=("true",), gpus=4, node_pool=pool)
        progress = Progress(step=i, total_steps=5000, at=now, metrics={"loss": 1.0})
        status = JobStatus(
            phase=Phase.RUNNING, reason=runs, gpus=4, progress=progress,
            submitted_at=now - 9000 + i, started_at=now - 8000,
        )  # fmt: skip
        worker = Worker(
            id=f"{uid}-0", job_uid=uid, index=0, node=f"node-{node:04}", devices=tuple(range(i % 2 * 4, i % 2 * 4 + 4)),
            phase=WorkerPhase.RUNNING, started_at=now - 8000,
        )  # fmt: skip
        yield (
            JobRecord(uid=uid, spec=spec, status=status, request_id=uid, size=4),
            WorkerRecord(worker=worker, attempt=0),
        )
    for i in range(WAITING):
        uid = f"waits-{i:05}"
        spec = JobSpec(name=uid, project=f"team-{i % TEAMS:02}", command=("true",), gpus=4)
        status = JobStatus(phase=Phase.PENDING, reason=waits, submitted_at=now - 7200 + i / 2)
        yield JobRecord(uid=uid, spec=spec, status=status, request_id=uid), None
    for i in range(ENDED):
        uid = f"ended-{i:05}"
        spec = JobSpec(name=uid, project=f"team-{i % TEAMS:02}", command=("true",))
        status = JobStatus(
            phase=Phase.SUCCEEDED, submitted_at=now - 9999, started_at=now - 9998, finished_at=now - 9000
        )
        yield JobRecord(uid=uid, spec=spec, status=status, request_id=uid), None


if __name__ == "__main__":
    measure()
