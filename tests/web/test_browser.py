"""The page in a real Chromium: it stays live without being loaded again, and everybody can use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from kfp_gpuquota.api import Project, pipeline_labels
from kfp_gpuquota.cluster.local.workers.sharing import simulated_directory
from kfp_gpuquota.fractions.activity import SIMULATED_FILE
from kfp_gpuquota.fractions.devices import simulate
from tests.polling import until
from tests.web.browser import MARK, Browser, chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium import webdriver

    from tests.conftest import EmbeddedCluster

pytestmark = pytest.mark.xdist_group("chromium")

SCRIPT = str(Path(__file__).parents[1] / "elastic_runtime" / "paced_training.py")
PATHS = (
    "/teams",
    "/queue?what-if=1&project=team-a&gpus=1",
    "/pipelines",
    "/nodes?color=project",
    "/nodes/node-0",
    "/timeline",
    "/jobs/team-a/holder?compare=holder&scale=log",
    "/jobs/team-b/waits",
    "/queue?sort=-gpus&page=x&reason=fits",
    "/queue?like=team-a/holder",
    "/jobs/team-a/holder/delete",
    "/teams/team-a",
)
LOG = "/jobs/team-a/holder/log"
CURVE = "return document.querySelector('#figures .line')?.getAttribute('d') ?? ''"
REQUESTS = "return performance.getEntriesByType('resource').map(e => e.name.split('/').pop().split('?')[0])"


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    yield from chromium()


@pytest.fixture
def browser(driver: webdriver.Chrome, embedded_cluster: EmbeddedCluster) -> Iterator[Browser]:
    """Team-a holds both GPUs, a job of team-b waits."""
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 0, limit=1)
    labels = {pipeline_labels.RUN: "nightly-1", pipeline_labels.TASK: "train"}
    command = ("sh", "-c", "echo 'one <b>line</b>'; exec sleep infinity")
    embedded_cluster.submit("holder", *command, gpus=2, labels=labels)
    embedded_cluster.wait_for_phase("holder", "Running")
    embedded_cluster.submit("waits", project="team-b")
    opened = Browser(driver, embedded_cluster)
    opened.size(1440)
    yield opened
    opened.scheme("light")
    opened.scripts(allowed=True)
    driver.get("about:blank")


def test_a_waiting_jobs_sentence_changes_when_its_reason_does(
    browser: Browser, embedded_cluster: EmbeddedCluster
) -> None:
    browser.open("/queue")
    row = f"#job-{embedded_cluster.job('waits', 'team-b').uid}"
    first = browser.shows(row, "needs 1 GPU")
    embedded_cluster.client.set_project(Project(name="team-b", limit=0))
    until(lambda: browser.text(row) not in ("", first))
    assert "limit" in browser.text(row)
    assert not browser.was_reloaded
    assert set(browser.driver.execute_script(REQUESTS)) <= {"page.css", "page.js", "icon.svg", "queue"}
    assert not browser.problems()


def test_a_job_is_suspended_and_resumed_by_click(browser: Browser, embedded_cluster: EmbeddedCluster) -> None:
    browser.open("/jobs/team-a/holder")
    browser.element("#suspend").click()
    assert "It runs on 2 GPUs" in browser.shows(".losses", "to save a checkpoint")
    browser.element("#sure").click()
    until(lambda: browser.driver.current_url.endswith("/jobs/team-a/holder"))
    browser.driver.execute_script(MARK)
    browser.shows("#summary", "Suspended")
    assert embedded_cluster.job("holder").status.phase == "Suspended"
    browser.shows("#events", "worker gone")
    browser.element("#resume").click()
    until(lambda: embedded_cluster.job("holder").status.phase != "Suspended")
    assert not browser.was_reloaded
    assert not browser.problems()


def test_what_the_cluster_refuses_is_shown(browser: Browser) -> None:
    browser.open("/jobs/team-a/holder")
    browser.element("details summary").click()
    field = browser.element("input[name=max_gpus]")
    field.clear()
    field.send_keys("99999", Keys.ENTER)
    assert "max_gpus" in browser.shows("#notice", "99999")


def test_lists_are_sorted_by_click_and_stay_live_with_their_filters(
    browser: Browser, embedded_cluster: EmbeddedCluster
) -> None:
    browser.open("/queue?word=a&state=all")
    browser.element("th:nth-child(3) a").click()
    until(lambda: "sort=gpus" in browser.driver.current_url)
    assert browser.element("th:nth-child(3)").get_attribute("aria-sort") == "ascending"
    browser.driver.execute_script(MARK)
    embedded_cluster.submit("another", project="team-b")
    embedded_cluster.submit("not-shown-x", project="team-b")
    browser.shows("#jobs", "another")
    browser.shows("#counts", "2 jobs")
    assert not browser.was_reloaded
    assert not browser.problems()


def test_the_map_of_gpus_stays_live_and_leads_to_the_node(browser: Browser, embedded_cluster: EmbeddedCluster) -> None:
    browser.open("/nodes?color=project&group=none&state=used")
    tile = "[id='n-node-0']"
    assert browser.element(tile).accessible_name == "node-0: 2 of 2 in use"
    browser.element(tile).click()
    until(lambda: browser.driver.current_url.endswith("/nodes/node-0"))
    browser.driver.execute_script(MARK)
    browser.shows("#jobs-here", "holder")
    embedded_cluster.client.suspend_job("team-a", "holder")
    browser.shows("#jobs-here", "waits")
    assert not browser.was_reloaded
    browser.open("/nodes")
    browser.shows("#legend", "idle 1")
    embedded_cluster.submit("more")
    browser.shows("#legend", "idle 0")
    assert not browser.was_reloaded
    assert not browser.problems()


def test_a_charts_values_are_read_with_arrow_keys_and_the_pointer(browser: Browser) -> None:
    browser.open("/jobs/team-a/holder")
    browser.driver.execute_script("document.getElementById('size-chart').focus()")
    browser.press(Keys.END)
    assert browser.shows("#size-chart .reading", ": 2")
    browser.press(Keys.HOME)
    assert browser.shows("#size-chart .reading", "0s: 0")
    ActionChains(browser.driver).move_to_element(browser.element("#size-chart")).perform()
    assert browser.text("#size-chart .reading")
    assert not browser.problems()


def test_a_chart_that_is_drawn_again_keeps_the_values_that_are_read(browser: Browser) -> None:
    """Also if the focus is in it, which its old element loses."""
    browser.open("/jobs/team-a/holder")

    def reading() -> str:
        script = "return document.querySelector('#size-chart .reading:not([hidden])')?.textContent ?? ''"
        return str(browser.driver.execute_script(script))

    for read in ("keys", "pointer"):
        browser.driver.execute_script("document.getElementById('size-chart').focus()")
        browser.press(Keys.END)
        if read == "pointer":
            ActionChains(browser.driver).move_to_element(browser.element("#size-chart")).perform()
        browser.driver.execute_script("document.getElementById('size-chart').isOld = true")
        until(lambda: browser.driver.execute_script("return !document.getElementById('size-chart').isOld"))
        assert ": " in reading(), read
    ActionChains(browser.driver).move_to_element(browser.element("h1")).perform()
    browser.press(Keys.TAB)
    assert reading() == ""
    assert not browser.problems()


def test_a_browser_that_stores_nothing_shows_live_pages(browser: Browser, embedded_cluster: EmbeddedCluster) -> None:
    denied = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})"
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": denied})
    try:
        browser.open("/jobs/team-a/holder")
        assert not browser.element("#follow").is_displayed()
        embedded_cluster.client.suspend_job("team-a", "holder")
        browser.shows("#summary", "Suspended")
        assert not browser.was_reloaded
        assert not browser.problems()
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_the_colors_are_chosen_by_a_link_and_kept(browser: Browser) -> None:
    browser.open("/queue?state=all")
    shown = []
    for _ in range(3):
        browser.element(".theme").click()
        assert browser.driver.current_url.endswith("/queue?state=all")
        color = browser.element("body").value_of_css_property("background-color")
        shown.append((browser.element("html").get_attribute("data-theme"), color))
    assert [name for name, _ in shown] == ["light", "dark", "auto"]
    assert shown[0][1] == shown[2][1] != shown[1][1]


def test_everything_can_be_reached_by_keyboard(browser: Browser, embedded_cluster: EmbeddedCluster) -> None:
    browser.open("/teams")
    browser.focus_on("Skip to the content", most=1)
    browser.focus_on("Queue", most=6)
    browser.press(Keys.ENTER)
    until(lambda: browser.driver.current_url.endswith("/queue"))
    browser.focus_on("waits")
    browser.press(Keys.ENTER)
    until(lambda: browser.driver.current_url.endswith("/jobs/team-b/waits"))
    focused = browser.focus_on("Suspend")
    outline = focused.value_of_css_property("outline-style")
    assert outline == "solid"
    for action in ("suspend", "delete"):
        if action == "delete":
            browser.shows("#summary", "Suspended")
            browser.focus_on("Delete")
        browser.press(Keys.ENTER)
        until(lambda action=action: browser.driver.current_url.endswith(f"/waits/{action}"))  # type: ignore[misc]
        browser.focus_on(f"{action.capitalize()} waits")
        browser.press(Keys.ENTER)
        until(lambda action=action: not browser.driver.current_url.endswith(f"/{action}"))  # type: ignore[misc]
    until(lambda: browser.driver.current_url.endswith("/queue"))
    until(lambda: [job.spec.name for job in embedded_cluster.client.list_jobs().jobs] == ["holder"])


def test_without_scripts_everything_is_shown_and_can_be_done(
    browser: Browser, embedded_cluster: EmbeddedCluster
) -> None:
    browser.scripts(allowed=False)
    lists = ("borrows 1 GPU", "would wait", "nightly-1", "holder", "Jobs on this node", "GPU-hours")
    shown = (*lists, "GPUs held", "needs 1 GPU", "page is 'x'", "Filled in from", "It runs on 2 GPUs", "Drain")
    for path, text in zip(PATHS, shown, strict=True):
        browser.driver.get(browser.base + path)
        assert text in browser.text("main"), path
    browser.driver.get(browser.base + LOG)
    assert browser.text("#log") == "one <b>line</b>"
    browser.driver.get(browser.base + "/jobs/team-b/waits")
    assert not browser.element("#follow").is_displayed(), "it needs scripts"
    browser.element("#suspend").click()
    browser.shows("h1", "Suspend waits?")
    browser.element("#sure").click()
    embedded_cluster.wait_for_phase("waits", "Suspended", "team-b")
    until(lambda: browser.driver.current_url.endswith("/jobs/team-b/waits"))
    browser.driver.get(browser.base + "/queue?like=team-b/waits")
    browser.element("#submit").click()
    until(lambda: browser.driver.current_url.endswith("/jobs/team-b/waits-2"))
    browser.driver.get(browser.base + "/queue?state=all")
    for name in ("waits", "waits-2"):
        browser.element(f"input[value='team-b/{name}']").click()
    browser.element("#chosen .danger").click()
    browser.shows("h1", "Delete 2 jobs?")
    browser.element("#sure").click()
    until(lambda: [job.spec.name for job in embedded_cluster.client.list_jobs().jobs] == ["holder"])
    browser.driver.get(browser.base + "/teams/team-a")
    browser.element("button[value=HoldAndDrain]").click()
    browser.shows("main", "It is drained")
    assert embedded_cluster.client.get_project("team-a").project.stop_policy == "HoldAndDrain"


def test_ticks_in_the_queue_stay_while_it_changes_and_a_refused_form_keeps_its_fields(
    browser: Browser, embedded_cluster: EmbeddedCluster
) -> None:
    browser.open("/queue")
    box = "input[value='team-a/holder']"
    browser.element(box).click()
    embedded_cluster.submit("another")
    browser.shows("#jobs", "another")
    assert browser.element(box).is_selected()
    assert not browser.was_reloaded
    for name, text in (("name", "holder"), ("command", "sh -c 'sleep 1\nsleep 2'")):
        browser.element(f".what-if [name={name}]").send_keys(text)
    browser.element("#submit").click()
    assert "already has a job 'holder'" in browser.shows("#refusal", "holder")
    assert browser.element("[name=command]").get_attribute("value") == "sh -c 'sleep 1\nsleep 2'"
    assert [one for one in browser.problems() if "409" not in one] == []


def test_every_page_fits_is_legible_and_has_names_for_all_controls(browser: Browser) -> None:
    for path in (*PATHS, LOG):
        browser.scheme("light")
        browser.size(375)
        browser.open(path)
        for width in (375, 1440):
            browser.size(width)
            assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= width, (path, width)
        assert browser.violations() == [], path
        browser.scheme("dark")
        assert browser.violations("color-contrast") == [], (path, "dark")
    assert not browser.problems()


@pytest.mark.slow
def test_a_training_is_watched_live(
    driver: webdriver.Chrome, embedded_cluster: EmbeddedCluster, forked_python: tuple[str, ...]
) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 1)
    command = (*forked_python, SCRIPT, "100000")
    embedded_cluster.submit("train", *command, gpus=1, min_gpus=1, max_gpus=2, cool_down_s=0.0)
    browser = Browser(driver, embedded_cluster)
    browser.open("/jobs/team-a/train")
    browser.shows("#figures", "loss")
    browser.shows("#facts", "2 GPUs")
    before = driver.execute_script(CURVE)
    until(lambda: driver.execute_script(CURVE).count("L") > before.count("L") + 1)
    embedded_cluster.submit("notebook", project="team-b", kind="build")
    browser.shows("#size", "2 → 1")
    browser.shows("#size", "team-b")
    embedded_cluster.client.delete_job("team-b", "notebook")
    rows = browser.shows("#size", "1 → 2").splitlines()
    assert [row for row in rows if "→" in row]
    assert not browser.was_reloaded
    assert not browser.problems()
    assert [each.lost_steps for each in embedded_cluster.job("train").status.resizes] == [0, 0]


def test_a_followed_job_is_notified_of_also_while_nobody_looks(
    browser: Browser, embedded_cluster: EmbeddedCluster
) -> None:
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"origin": browser.base.rpartition("/")[0], "permissions": ["notifications"]}
    )
    browser.open("/jobs/team-b/waits")
    browser.element("#follow").click()
    until(lambda: browser.element("#follow").get_attribute("aria-pressed") == "true")
    assert browser.text("#follow") == "Do not notify me"
    browser.open("/queue?state=all")
    browser.driver.execute_script(
        "window.shown = [];"
        "window.Notification = class extends Notification {"
        " constructor(title, more) { super(title, more); this.onshow = () => shown.push([title, more.body]); } };"
        "Object.defineProperty(document, 'hidden', {value: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    embedded_cluster.client.delete_job("team-a", "holder")
    found: list[list[str]] = []

    def are(*titles: str) -> bool:
        found[:] = browser.driver.execute_script("return shown")
        return [title for title, _ in found] == list(titles)

    until(lambda: are("waits (team-b) started"), lambda: str(found))
    embedded_cluster.client.suspend_job("team-b", "waits")
    until(lambda: are("waits (team-b) started", "waits (team-b) was suspended"), lambda: str(found))
    embedded_cluster.submit("of-nobody")
    browser.shows("#jobs", "of-nobody")
    assert are("waits (team-b) started", "waits (team-b) was suspended")
    browser.open("/jobs/team-b/waits")
    browser.element("#follow").click()
    until(lambda: browser.text("#follow") == "Notify me")
    assert browser.driver.execute_script("return localStorage.getItem('gpuquota-followed')") == "{}"
    assert not browser.problems()


def test_the_use_of_gpus_is_drawn_and_its_values_are_read(browser: Browser, embedded_cluster: EmbeddedCluster) -> None:
    (worker,) = embedded_cluster.job("holder").status.workers
    for index in worker.devices:
        directory = simulated_directory(embedded_cluster.home, worker.node, index)
        simulate(directory, 1024)
        (directory / SIMULATED_FILE).write_text("35")
    browser.open("/jobs/team-a/holder")
    browser.shows("#gpu-use", "GPU 1")
    browser.driver.execute_script("document.getElementById('use-0').focus()")
    browser.press(Keys.END)
    assert browser.shows("#use-0 .reading", ": 35")
    browser.open(f"/nodes/{worker.node}")
    assert browser.shows("#gpu-use", "% of the time in use")
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        assert browser.violations() == []
    assert not browser.problems()
