"""A real headless Chromium, driven by selenium."""

from __future__ import annotations

import importlib.resources
import os
import shutil
from typing import TYPE_CHECKING, Any, cast

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    NoSuchElementException,
    StaleElementReferenceException,
    WebDriverException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver.remote.webelement import WebElement

    from kfp_gpuquota.server.client import Client
    from tests.conftest import EmbeddedCluster

OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
MARK = "window.notReloaded = true"


def start_chromium() -> webdriver.Chrome:
    """Start the system's Chromium; where there is none the test is skipped, or fails where one is required."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        reason = "no chromium and chromedriver; Debian's packages are chromium and chromium-driver"
        if os.environ.get("GPUQUOTA_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in OPTIONS:
        options.add_argument(option)
    return webdriver.Chrome(options=options, service=Service(driver))


REPLACED = "does not belong to the document"
"""What the driver says of an element whose page was replaced while it looked."""


class Browser:
    """One window on a cluster's page."""

    def __init__(self, driver: webdriver.Chrome, cluster: EmbeddedCluster) -> None:
        self.driver = driver
        link = cast("Client", cluster.client).open_page().url
        self.base = link.partition("/enter")[0]
        self.problems()  # those of earlier tests
        driver.get(link)
        until(lambda: driver.current_url == f"{self.base}/teams", lambda: driver.current_url)

    def open(self, path: str) -> None:
        """Go to a page, and mark it: the mark is lost when it is loaded again."""
        self.driver.get(self.base + path)
        self.driver.execute_script(MARK)

    @property
    def was_reloaded(self) -> bool:
        """Whether the page was loaded again since `open`."""
        return not self.driver.execute_script("return window.notReloaded === true")

    def text(self, selector: str) -> str:
        """Return the text of an element, "" if there is none."""
        try:
            return self.element(selector).text
        except (NoSuchElementException, StaleElementReferenceException):  # replaced in this very moment
            return ""
        except WebDriverException as error:
            if REPLACED in str(error):
                return ""
            raise

    def element(self, selector: str) -> WebElement:
        """The first element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def shows(self, selector: str, text: str) -> str:
        """The element's text, as soon as it contains `text`."""
        found = ""

        def look() -> bool:
            nonlocal found
            found = self.text(selector)
            return text in found

        until(look, lambda: f"{text!r} in {found!r}")
        return found

    def press(self, *keys: str) -> None:
        """Type keys into whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focus_on(self, wanted: str, *, most: int = 40) -> WebElement:
        """Press Tab until the focus is on an element with that text or name."""
        for _ in range(most):
            self.press(Keys.TAB)
            focused = self.driver.switch_to.active_element
            if wanted in (focused.text, focused.accessible_name):
                return focused
        raise AssertionError(f"{wanted!r} does not get the focus")

    def size(self, width: int, height: int = 900) -> None:
        """Give the window a size in CSS pixels."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._protocol("Emulation.setDeviceMetricsOverride", shape)

    def scheme(self, name: str) -> None:
        """Prefer light or dark."""
        self._protocol("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})

    def scripts(self, *, allowed: bool) -> None:
        """Run the pages' scripts, or none."""
        self._protocol("Emulation.setScriptExecutionDisabled", {"value": not allowed})

    def violations(self, rule: str = "") -> list[str]:
        """Return what axe-core finds wrong with the page, by all of its rules or by one of them."""
        axe = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text()
        self.driver.execute_script(axe)
        found = self.driver.execute_async_script(
            "const [rule, done] = arguments;"
            "axe.run(rule ? {runOnly: [rule]} : {}).then(done, e => done({failed: String(e)}))",
            rule,
        )
        return [
            f"{one['id']}: {node['html'][:200]} {node.get('failureSummary', '')}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    def problems(self) -> list[str]:
        """What the browser's console reports: refused scripts and styles, failed requests, exceptions."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def _protocol(self, command: str, arguments: dict[str, Any]) -> None:
        self.driver.execute_cdp_cmd(command, arguments)


def chromium() -> Iterator[webdriver.Chrome]:
    """A browser for several tests."""
    driver = start_chromium()
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        try:
            driver.quit()
        except WebDriverException:
            driver.service.stop()
