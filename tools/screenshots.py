"""Pictures of the web page for the documentation: `make screenshots` writes docs/images/web-*.png.

A cluster of its own with teams, jobs and a real training that gives a GPU back and has it again. The usage of the hour
before is made up. Needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from kfp_gpuquota.api import JobSpec, Kind, Project, pipeline_labels
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop, start_with
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.cluster.local.workers.sharing import simulated_directory
from kfp_gpuquota.fractions.activity import SIMULATED_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.server.client import Client

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
PAGES: Final = {
    "teams": "/teams",
    "queue": "/queue",
    "pipelines": "/pipelines",
    "job": "/jobs/vision/digits?smooth=0.9",
    "nodes": "/nodes?color=project",
    "node": "/nodes/node-0",
    "timeline": "/timeline?price=NVIDIA-H100-80GB-HBM3%3D4.10,1.20",
    "stop": "/jobs/vision/digits/suspend",
    "quota": "/teams/vision",
}
NOT_LIVE: Final = {"stop", "quota"}
WIDTHS: Final = {"wide": 1440, "narrow": 375}
TALLEST: Final = {"wide": 1300, "narrow": 1500}
COLORS: Final = 96
LIMIT_S: Final = 120.0
PROJECTS: Final = (
    Project(name="research", guaranteed=6),
    Project(name="vision", guaranteed=3, limit=8, parent="research"),
    Project(name="language", guaranteed=3, parent="research"),
    Project(name="robotics", guaranteed=4, limit=6),
    Project(name="platform", guaranteed=2, priority=150),
)
HELD: Final = {
    ("language", "ada", "NVIDIA-H100-80GB-HBM3"): 3.1,
    ("robotics", "lin", "NVIDIA-A100-SXM4-40GB"): 2.6,
    ("vision", "kai", "NVIDIA-H100-80GB-HBM3"): 1.9,
    ("robotics", "kai", "NVIDIA-A100-SXM4-40GB"): 1.3,
}
"""GPU-hours by project, user and type."""
SLEEP: Final = ("sleep", "infinity")
RUNNING: Final = (
    ("finetune-7b", "language", 4, Kind.TRAIN),
    ("policy-net", "robotics", 3, Kind.TRAIN),
    ("notebook", "robotics", 1, Kind.BUILD),
    ("segment", "vision", 2, Kind.TRAIN),
)
STEPS: Final = {
    "digits": ("vision-nightly-0412", "train"),
    "segment": ("vision-nightly-0412", "segment"),
    "world-model": ("world-model-7", "train"),
    "finetune-7b": ("assistant-31", "finetune"),
}
"""Jobs that are steps of pipelines: their run and task."""
WAITING: Final = (
    ("grasp-sweep-1", "robotics", 4, Kind.TRAIN),
    ("grasp-sweep-2", "robotics", 2, Kind.TRAIN),
    ("world-model", "vision", 4, Kind.TRAIN),
)


def main() -> None:
    """Play the scene, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        home.create()
        _past(home)
        start_with(home, ClusterConfig(nodes=3, gpus_per_node=4, cpu_slots=True))
        client = cast("Client", connect({"GPUQUOTA_HOME": str(home.root)}))
        try:
            _use_gpus(home)
            _play(client)
            _take(client)
        finally:
            for job in client.list_jobs().jobs:
                client.delete_job(job.spec.project, job.spec.name)
            _until(lambda: not client.list_jobs().jobs)
            client.stop_cluster()
            await_stop(home)


def _past(home: Home) -> None:
    """Write an hour of usage into the state file."""
    store = Store(home.database)
    now = int(time.time())
    rows = []
    for i, project in enumerate(PROJECTS[1:], start=1):
        for at in range((now - 3600) // 30 * 30, now // 30 * 30, 30):
            wave = 1 + math.sin(at / 500 + 2 * i)
            held = min(project.limit or 8, round(project.guaranteed * wave))
            rows.append((30, at, project.name, 30.0, held * 30.0, 0.0, held * 30.0, project.guaranteed * 30.0))
    with store.transaction():
        store.add_usage(rows)
        store.add_held((30, now // 30 * 30, *holder, hours * 3600.0) for holder, hours in HELD.items())
    store.close()


def _play(client: Client) -> None:
    for project in PROJECTS:
        client.create_project(project)
    client.submit(
        JobSpec(
            name="digits",
            project="vision",
            command=("python", "examples/train_digits.py", "--epochs", "1000"),
            working_directory=str(ROOT),
            environment={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            gpus=1,
            min_gpus=1,
            max_gpus=2,
            cool_down_s=0.0,
            labels=_labels("digits"),
        )
    )
    _until(lambda: _step(client) > 100)
    for name, team, gpus, kind in RUNNING:
        _submit(client, name, team, gpus, kind)
    _until(lambda: client.get_job("vision", "segment").status.gpus == 2)
    _submit(client, "session", "platform", 1, Kind.BUILD)
    _until(lambda: client.get_job("vision", "digits").status.gpus == 1)
    step = _step(client)
    _until(lambda: _step(client) > step + 1500)
    client.delete_job("platform", "session")
    _until(lambda: client.get_job("vision", "digits").status.gpus == 2)
    for name, team, gpus, kind in WAITING:
        _submit(client, name, team, gpus, kind)
    step = _step(client)
    _until(lambda: _step(client) > step + 1500)


def _labels(job: str) -> dict[str, str]:
    run, task = STEPS.get(job, ("", ""))
    named = {pipeline_labels.RUN: run, pipeline_labels.TASK: task, pipeline_labels.NAME: run.rpartition("-")[0]}
    return named if run else {}


def _use_gpus(home: Home) -> None:
    """Let the simulated GPUs be in use."""
    for node in range(3):
        for device in range(4):
            directory = simulated_directory(home, f"node-{node}", device)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / SIMULATED_FILE).write_text(str(60 + 11 * (node + device)))


def _submit(client: Client, name: str, project: str, gpus: int, kind: Kind) -> None:
    labels = _labels(name)
    client.submit(
        JobSpec(name=name, project=project, command=SLEEP, gpus=gpus, kind=kind, grace_period_s=1, labels=labels)
    )


def _take(client: Client) -> None:
    link = client.open_page().url
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(option)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        driver.get(link)
        _until(lambda: driver.current_url.endswith("/teams"))
        for shape, width in WIDTHS.items():
            for name, path in PAGES.items():
                _resize(driver, width, 700)
                driver.get(link.partition("/enter")[0] + path)
                if name not in NOT_LIVE:
                    _until(lambda: "live" in driver.find_element("id", "connection").text)
                height = driver.execute_script("return document.documentElement.scrollHeight")
                _resize(driver, width, min(TALLEST[shape], height))
                _save(driver, IMAGES / f"web-{name}-{shape}.png")
    finally:
        driver.quit()


def _resize(driver: webdriver.Chrome, width: int, height: int) -> None:
    shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)


def _save(driver: webdriver.Chrome, path: Path) -> None:
    """Write the picture with few colors, which makes it a third as large."""
    driver.save_screenshot(str(path))
    Image.open(path).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB\n")


def _step(client: Client) -> int:
    progress = client.get_job("vision", "digits").status.progress
    return progress.step if progress else 0


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {LIMIT_S:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
