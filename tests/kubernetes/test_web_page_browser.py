"""The page inside a dashboard as Kubeflow's: a proxy that names the user, a frame, and messages with the namespace."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientSession, web
from selenium.webdriver.common.by import By

from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.test_crds import quota
from tests.kubernetes.web_page import BASE, bind, web_page
from tests.polling import until
from tests.web.browser import chromium
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from selenium import webdriver

    from tools.devcluster import DevCluster

# What the dashboard does, as far as pages in its frame notice: it answers the first message with the namespace.
DASHBOARD = """<!doctype html><title>dashboard</title><iframe width="1200" height="800"></iframe><script>
const frame = document.querySelector("iframe");
let selected = new URL(location).searchParams.get("selected");
window.select = (namespace) => {
  selected = namespace;
  frame.contentWindow.postMessage({ type: namespace ? "namespace-selected" : "all-namespaces", value: namespace }, "*");
};
addEventListener("message", (event) => {
  if (event.data.type === "iframe-connected") window.select(selected);
});
frame.src = new URL(location).searchParams.get("frame");
</script>"""


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    yield from chromium()


class Gateway:
    """Serves the dashboard, and leads the page's path to the page with the user's name."""

    def __init__(self, port: int, page: int, user: str) -> None:
        self.port, self._page, self._user = port, page, user

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        application = web.Application()
        application.router.add_get("/", self._dashboard)
        application.router.add_get("/{path:.*}", self._forward)
        async with ClientSession(auto_decompress=False) as self._session:
            runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            yield
            await runner.cleanup()

    async def _dashboard(self, _request: web.Request) -> web.Response:
        return web.Response(text=DASHBOARD, content_type="text/html")

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {**request.headers, "kubeflow-userid": self._user}
        url = f"http://127.0.0.1:{self._page}{request.raw_path}"
        async with self._session.get(url, headers=headers, allow_redirects=False, timeout=None) as found:
            answer = web.StreamResponse(status=found.status, headers=found.headers)
            await answer.prepare(request)
            async for chunk in found.content.iter_any():
                await answer.write(chunk)
            return answer

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread."""
        loop, started, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

        async def run() -> None:
            async with self._serving():
                started.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        try:
            assert started.wait(60)
            yield
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


@pytest.mark.slow
def test_the_page_shows_the_namespace_that_is_selected_in_the_dashboard(
    kubeflow_cluster: DevCluster, driver: webdriver.Chrome, tmp_path: Path
) -> None:
    api = kubeflow_cluster.api
    names = [kubeflow_cluster.make_namespace(f"{team}-{uuid.uuid4().hex[:6]}") for team in ("one", "two")]
    user = f"{uuid.uuid4().hex[:6]}@example"
    for name in names:
        api.create(QUOTAS, quota(name, guaranteed=1))
        bind(kubeflow_cluster, user, "kubeflow-view", name)
    port = free_port()
    options = ("--trusted-proxy=127.0.0.1/32", f"--origin=http://127.0.0.1:{port}")
    with web_page(kubeflow_cluster, tmp_path / "log", *options) as page, Gateway(port, page.port, user).running():
        driver.get(f"http://127.0.0.1:{port}/?selected={names[0]}&frame={BASE}/teams")
        driver.switch_to.frame(driver.find_element(By.TAG_NAME, "iframe"))

        def shown() -> list[str]:
            return list(
                driver.execute_script("return [...document.querySelectorAll('h2')].map((one) => one.textContent)")
            )

        def framed() -> str:
            return str(driver.execute_script("return location.search"))

        until(lambda: shown() == [names[0]], shown)
        assert framed() == f"?namespace={names[0]}"
        driver.execute_script("window.parent.select(arguments[0])", names[1])
        until(lambda: shown() == [names[1]], shown)
        driver.execute_script("window.parent.select('')")
        until(lambda: sorted(shown()) == names, shown)
        until(lambda: driver.find_element(By.ID, "connection").text == "live", "the stream")
