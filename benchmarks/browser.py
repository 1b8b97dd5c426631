"""Chromium for benchmarks of the web page: when something is drawn, and what was received for a page."""

from __future__ import annotations

import http
import statistics
import time

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

LOADS = 5
PAINTS = "return performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)"
SIZES = (
    "const all = [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')];"
    "const sum = (field) => all.reduce((n, e) => n + e[field], 0);"
    "return [sum('encodedBodySize'), sum('decodedBodySize')]"
)
WATCH = """
const [id, text, done] = arguments;
const seen = () => document.getElementById(id)?.outerHTML.includes(text);
const drawn = () => requestAnimationFrame(() => requestAnimationFrame(() => done(Date.now())));
if (seen()) drawn();
else {
  const observer = new MutationObserver(() => { if (seen()) { observer.disconnect(); drawn(); } });
  observer.observe(document.body, { childList: true, subtree: true });
}
"""


def chromium() -> webdriver.Chrome:
    """Start a headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(option)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    driver.set_script_timeout(60)
    return driver


def drawn_at(driver: webdriver.Chrome, element: str, text: str) -> float:
    """Return when an element with the text in its HTML was drawn, in seconds since the epoch."""
    found: float = driver.execute_async_script(WATCH, element, text)
    return found / 1e3


def painted(driver: webdriver.Chrome, url: str, queued: int | None = None) -> dict[str, float]:
    """Return how long a page takes to its first contentful paint, and how much is sent for it.

    With `queued` it has to be a queue with this number of rows.
    """
    took, sizes = [], []
    for _ in range(LOADS):
        driver.get("about:blank")
        driver.execute_cdp_cmd("Network.clearBrowserCache", {})
        driver.get(url)
        status = driver.execute_script("return performance.getEntriesByType('navigation')[0].responseStatus")
        assert status == http.HTTPStatus.OK, (url, status)
        if queued is not None:
            rows = driver.execute_script("return document.querySelectorAll('#jobs tr').length")
            assert rows == queued, rows
        while not (paints := driver.execute_script(PAINTS)):
            time.sleep(0.05)
        took.append(float(paints[0]))
        sizes.append(driver.execute_script(SIZES))
    return {
        "first_paint_ms": round(statistics.median(took), 1),
        "page_kib": round(max(size[0] for size in sizes) / 1024, 1),
        "page_plain_kib": round(max(size[1] for size in sizes) / 1024, 1),
    }
