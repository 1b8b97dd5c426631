"""The web page of a Kubernetes cluster: a real API server with fake nodes, a controller, and the page's process.

    python benchmarks/page.py --kubernetes [--queued 1000]

The page has its account's rights only, and Chromium names its user as the proxy would.

event_to_pixel_ms: from the request to the API server that suspends or resumes a job until Chromium has drawn its queue
with the job's new state, which the controller has written meanwhile; median of 20.
first_paint_ms, page_kib: as on the embedded cluster, a queue of `--queued` ElasticJobs.
page_ms: the same page without a browser, from the request to the last byte of HTML, median of 20.
what_if_ms: an answer to "What if I submit this?" beside these jobs, from the request to the last byte, median of 20.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser import chromium, drawn_at, painted
from common import milliseconds, print_conditions, print_result

from kfp_gpuquota.cluster.kubernetes.objects.what_if import AUDIENCE, AUTHORITY, AUTHORITY_FILE
from kfp_gpuquota.cluster.kubernetes.web.planner import TOKEN_FILE
from tests.kubernetes.conftest import install_crds
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import NAMESPACE, jobs_of
from tests.kubernetes.web_page import ACCOUNT, BASE, bind, web_page
from tests.polling import until
from tools.devcluster import DevCluster, Options
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from selenium import webdriver

CHANGES = 20
TEAMS = 20
USER = "boss@example"


def measure(queued: int) -> None:
    """Measure and print."""
    driver = chromium()
    print_conditions(
        "The web page on Kubernetes", browser=driver.capabilities["browserVersion"], queued_jobs=queued,
        nodes="1 fake, 2 GPUs",
    )  # fmt: skip
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {"kubeflow-userid": USER}})
    try:
        with tempfile.TemporaryDirectory(prefix="gpuquota-page-") as folder:
            print_result(**on_cluster(driver, Path(folder), queued))
    finally:
        driver.quit()


def on_cluster(driver: webdriver.Chrome, folder: Path, queued: int) -> dict[str, object]:
    """Return the figures of a cluster that is started for them."""
    cluster = DevCluster.start(folder / "cluster", Options(kwok_nodes=0))
    try:
        install_crds(cluster)
        for name in (NAMESPACE, "gpuquota-reservations"):
            cluster.make_namespace(name)
        controlled = Controlled(cluster, folder)
        try:
            return figures(controlled, driver, folder, queued)
        finally:
            controlled.stop()
    finally:
        cluster.stop()


def figures(controlled: Controlled, driver: webdriver.Chrome, folder: Path, queued: int) -> dict[str, object]:
    """Return everything that is measured."""
    cluster, files, port = controlled.cluster, folder / "files", free_port()
    controlled.add_nodes(1, gpus=2)
    teams = [controlled.team(f"team-{number}", guaranteed=1) for number in range(TEAMS)]
    holder = controlled.team("holder", guaranteed=2)
    controlled.start("--leader-elect", f"--namespace={NAMESPACE}", f"--what-if-port={port}")
    controlled.until_phase(controlled.job(holder, "holder", gpus=2, gpusPerWorker=1), "Running")
    files.mkdir()
    options = ("--trusted-proxy=127.0.0.0/8", f"--what-if=https://127.0.0.1:{port}", f"--what-if-files={files}")
    with web_page(cluster, folder / "page.log", *options) as page:
        bind(cluster, USER, "cluster-admin")
        user = page.user(USER)
        until(lambda: user.get("/queue").status == 200, "the user is not let in")
        queue = f"http://127.0.0.1:{page.port}{BASE}/queue?size=1000"
        latency = event_to_pixel(controlled, driver, queue, teams[0])
        print(f"event to pixel: {latency} ms", flush=True)
        for number in range(queued - 2):
            controlled.job(teams[number % TEAMS], f"job-{number:05}", gpus=1)
        every = [path for team in teams for path in cluster.api.items(jobs_of(team))]
        assert len(every) == queued - 1
        until(lambda: user.get("/queue?size=1000").text.count("<tr id=") == queued, "the jobs are not shown", 120)
        written = lambda: all(  # noqa: E731
            job.get("status", {}).get("message") for team in teams for job in cluster.api.items(jobs_of(team))
        )
        until(written, "the controller has not explained all jobs", 300)
        paint = painted(driver, queue, queued)
        print(f"first paint: {paint}", flush=True)
        give_credentials(cluster, files)
        asked = f"/queue?what-if=1&gpus=2&word=none&project={teams[1]}"
        until(lambda: "It would" in user.get(asked).text, lambda: user.get(asked).text[-2000:])
        return {
            "event_to_pixel_ms": latency,
            **paint,
            "page_ms": timed(lambda: user.get("/queue?size=1000")),
            "what_if_ms": timed(lambda: user.get(asked)),
        }


def event_to_pixel(controlled: Controlled, driver: webdriver.Chrome, queue: str, team: str) -> float:
    """Return milliseconds from a request to the API server until what it changes is drawn."""
    path = controlled.job(team, "job", suspend=True)
    uid = controlled.until_phase(path, "Suspended")["metadata"]["uid"]
    driver.get(queue)
    took = []
    for i in range(CHANGES):
        time.sleep(1.0)  # people do not click ten times a second
        began = time.time()
        controlled.cluster.api.patch(path, {"spec": {"suspend": i % 2 == 1}})
        took.append(drawn_at(driver, f"job-{uid}", "Suspended" if i % 2 else "Pending") - began)
    return round(statistics.median(took) * 1e3, 1)


def give_credentials(cluster: DevCluster, files: Path) -> None:
    """Give the page what the kubelet mounts: the authority's certificate, and a token for the controller."""
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{AUTHORITY}"
    until(lambda: cluster.api.exists(path), "the authority is not published")
    (files / AUTHORITY_FILE).write_text(cluster.api.get(path)["data"][AUTHORITY_FILE])
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    token = cluster.api.create(account, {"spec": {"audiences": [AUDIENCE]}})["status"]["token"]
    (files / TOKEN_FILE).write_text(token)


def timed(action: Callable[[], object]) -> dict[str, float]:
    """Return the median and the ends of 20 times, in ms."""
    took = []
    for _ in range(CHANGES):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return milliseconds(took)
