"""The web page of the embedded cluster: what 50 open pages cost the daemon, how fast a page is, how soon it shows news.

    python benchmarks/page.py [--pages 50] [--reporting 10] [--queued 1000]
    python benchmarks/page.py --kubernetes [--queued 1000]
    python benchmarks/page.py --scale

With --kubernetes: the page of a Kubernetes cluster (benchmarks/page_kubernetes.py). With --scale: that of 10,000 jobs
and 10,000 GPUs (benchmarks/page_scale.py).

Needs Debian's packages chromium and chromium-driver. Three parts, each on a cluster of its own:

event_to_pixel_ms: from the request to suspend or resume a job until Chromium has drawn its queue with the job's new
state (two animation frames after the element was replaced), median of 20.
first_paint_ms: first contentful paint of the queue with `--queued` jobs, from the navigation's begin, median of 5.
page_kib: what Chromium received for that page, styles and script included (compressed; page_plain_kib: decompressed).
cpu_percent: CPU of the daemon in percent of one core over 30 s, while `--reporting` jobs each report their progress
once a second and `--pages` streams are open: a third of them on Teams, a third on the queue, the others on the jobs'
pages; less what the same cluster needs without a page (base_percent). idle_requests: requests of a page in Chromium
that is left alone for 10 s, beside its stream.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from browser import chromium, drawn_at, painted
from common import print_conditions, print_result

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop, start_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium import webdriver

    from kfp_gpuquota.server.client import Client

MEASURED_S = 30.0
IDLE_S = 10.0
CHANGES = 20
STREAM = {"Accept": "text/event-stream"}


def main() -> None:
    """Measure and print."""
    if sys.argv[1:] == ["--worker"]:
        report()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--reporting", type=int, default=10)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--kubernetes", action="store_true")
    parser.add_argument("--scale", action="store_true")
    options = parser.parse_args()
    if options.scale:
        import page_scale  # noqa: PLC0415

        page_scale.measure()
        return
    if options.kubernetes:
        import page_kubernetes  # noqa: PLC0415 (it needs what the tests need)

        page_kubernetes.measure(options.queued)
        return
    driver = chromium()
    print_conditions(
        "The web page", browser=driver.capabilities["browserVersion"], pages=options.pages,
        reporting_jobs=options.reporting, queued_jobs=options.queued,
    )  # fmt: skip
    try:
        with cluster(2) as (client, _):
            latency = event_to_pixel(client, driver)
        print(f"event to pixel: {latency} ms", flush=True)
        with cluster(2) as (client, _):
            page = first_paint(client, driver, options.queued)
        print(f"first paint: {page}", flush=True)
        with cluster(options.reporting) as (client, pid):
            load = cost(client, driver, pid, options.pages, options.reporting)
    finally:
        driver.quit()
    print_result(event_to_pixel_ms=latency, **page, **load)


def event_to_pixel(client: Client, driver: webdriver.Chrome) -> float:
    """Return milliseconds from the answer to an action until it is drawn."""
    client.create_project(Project(name="team", guaranteed=2))
    client.submit(JobSpec(name="holder", project="team", command=("sleep", "infinity"), gpus=2, grace_period_s=1))
    job = client.submit(JobSpec(name="job", project="team", command=("true",)))  # resumed, it waits
    client.suspend_job("team", "job")
    base = enter(client, driver)
    driver.get(f"{base}/queue")
    took = []
    for i in range(CHANGES):
        word = "Pending" if i % 2 == 0 else "Suspended"
        time.sleep(1.0)  # people do not click ten times a second
        began = time.time()
        (client.resume_job if i % 2 == 0 else client.suspend_job)("team", "job")
        took.append(drawn_at(driver, f"job-{job.uid}", word) - began)
    return round(statistics.median(took) * 1e3, 1)


def first_paint(client: Client, driver: webdriver.Chrome, queued: int) -> dict[str, float]:
    """Return how long the queue with many jobs takes, and how much is sent for it."""
    client.create_project(Project(name="holder", guaranteed=2))
    client.submit(JobSpec(name="holder", project="holder", command=("sleep", "infinity"), gpus=2, grace_period_s=1))
    for number in range(20):
        client.create_project(Project(name=f"team-{number}"))
    for number in range(queued - 1):
        spec = JobSpec(name=f"job-{number:05}", project=f"team-{number % 20}", command=("true",))
        client.submit(spec)
    base = enter(client, driver)
    return painted(driver, f"{base}/queue?size=1000", min(queued, 1000))


def cost(client: Client, driver: webdriver.Chrome, pid: int, pages: int, reporting: int) -> dict[str, float]:
    """Return what open pages cost the daemon while jobs report."""
    client.create_project(Project(name="team", guaranteed=reporting))
    command = (sys.executable, str(Path(__file__).absolute()), "--worker")
    for number in range(reporting):
        client.submit(JobSpec(name=f"job-{number}", project="team", command=command, grace_period_s=1))
    while not all(job.status.progress and job.status.progress.step > 2 for job in client.list_jobs().jobs):
        time.sleep(0.1)
    base = busy_percent(pid, MEASURED_S)
    paths = ["/teams", "/queue", *(f"/jobs/team/job-{number}" for number in range(reporting))]
    shares = itertools.cycle(["/teams", "/queue", ""])
    jobs = itertools.cycle(paths[2:])
    chosen = [path or next(jobs) for path in itertools.islice(shares, pages)]
    link = client.open_page().url
    received, busy = asyncio.run(_with_streams(link, chosen, pid))
    enter(client, driver)
    time.sleep(1.0)  # until all of the page is loaded
    before = driver.execute_script("return performance.getEntriesByType('resource').length")
    time.sleep(IDLE_S)
    after = driver.execute_script("return performance.getEntriesByType('resource').length")
    return {
        "cpu_percent": round(busy - base, 2),
        "base_percent": round(base, 2),
        "messages_per_s": round(received / MEASURED_S, 1),
        "idle_requests": after - before,
    }


async def _with_streams(link: str, paths: list[str], pid: int) -> tuple[int, float]:
    """Return how many messages the streams received, and how busy the daemon was."""
    base = link.partition("/enter")[0]
    received = 0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.CookieJar(unsafe=True),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        (await session.get(link)).release()

        async def watch(path: str) -> None:
            nonlocal received
            async with session.get(base + path, headers=STREAM) as answer:
                assert answer.status == 200, answer.status
                async for chunk in answer.content.iter_any():
                    received += chunk.count(b"event: page")

        tasks = [asyncio.create_task(watch(path)) for path in paths]
        await asyncio.sleep(3.0)
        received = 0
        busy = await asyncio.to_thread(busy_percent, pid, MEASURED_S)
        counted = received
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return counted, busy


def report() -> None:
    """Be a worker that reports a step each second, until it is ended: without torch, which costs more than the page."""
    address = os.environ["ELASTIC_COORDINATOR"].removeprefix("unix://")
    path, _, prefix = address.partition(":")
    worker, token = os.environ["ELASTIC_WORKER_ID"], Path(os.environ["ELASTIC_TOKEN_FILE"]).read_text()
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.putrequest("POST", f"{prefix}/workers/{worker}?incarnation={worker}")
    connection.putheader("Authorization", f"Bearer {token}")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()

    def say(**message: Any) -> None:
        line = json.dumps({"worker": worker, **message}).encode() + b"\n"
        connection.send(b"%x\r\n%s\r\n" % (len(line), line))

    say(event="WorkerJoined")
    for step in itertools.count(1):
        loss = {"loss": 1 / step, "accuracy": 1 - 1 / step}
        say(event="ProgressReported", step=step, total_steps=100_000, metrics=loss, throughput=1000.0 + step, workers=1)
        say(event="WorkerHeard")
        time.sleep(1.0)


def busy_percent(pid: int, seconds: float) -> float:
    """Return the CPU that a process uses, in percent of one core."""
    before = _cpu_s(pid)
    time.sleep(seconds)
    return 100 * (_cpu_s(pid) - before) / seconds


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def enter(client: Client, driver: webdriver.Chrome) -> str:
    """Open the page in the browser, and return its address."""
    link = client.open_page().url
    driver.get(link)
    while not driver.current_url.endswith("/teams"):
        time.sleep(0.05)
    return link.partition("/enter")[0]


@contextmanager
def cluster(gpus: int) -> Iterator[tuple[Client, int]]:
    """Yield the client of a cluster of its own, and its daemon's process id."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        start_with(home, ClusterConfig(gpus_per_node=gpus, cpu_slots=True))
        client = cast("Client", connect({"GPUQUOTA_HOME": str(home.root)}))
        try:
            yield client, client.health().pid
        finally:
            for job in client.list_jobs().jobs:
                client.delete_job(job.spec.project, job.spec.name)
            while client.list_jobs().jobs:
                time.sleep(0.05)
            client.stop_cluster()
            await_stop(home)


if __name__ == "__main__":
    main()
