"""The page inside a dashboard as Kubeflow's: a proxy that names the user, a frame, and messages with the namespace."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By

from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.istio import istio
from tests.kubernetes.test_crds import quota
from tests.kubernetes.web_page import BASE, bind, web_page
from tests.polling import until
from tests.web.browser import chromium
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    options = ("--trusted-proxy=127.0.0.6/32", f"--origin=http://127.0.0.1:{port}")
    with (
        web_page(kubeflow_cluster, tmp_path / "log", *options) as page,
        istio(page.port, user, tmp_path, port=port, dashboard=DASHBOARD),
    ):
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
