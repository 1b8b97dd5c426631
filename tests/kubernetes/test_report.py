"""`gpuquota report` and `top --since` on Kubernetes, from samples written into the storage of a real Prometheus."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api.history import DeviceUse
from tests import forked, programs
from tests.kubernetes.conftest import skip_or_fail
from tests.polling import until
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

HOURS = 12
MINUTES = 60 * HOURS
HELD = {("vision", "guaranteed"): 2.0, ("vision", "borrowed"): 1.0, ("speech", "guaranteed"): 4.0}
"""GPUs of each project, all the time."""
IDLE = 0.5
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: 'http://127.0.0.1:9'}}]
users: [{name: a, user: {token: none}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
"""
HELD_BY = {
    ("vision", "eve", "H100"): 2.5,
    ("vision", "eve", "T4"): 0.25,
    ("vision", "", "H100"): 0.25,
    ("speech", "bob", ""): 4.0,
}
"""The same by user and type."""
UTILISATION = {
    'exported_namespace="vision",exported_pod="notebook",namespace="gpu-operator",pod="dcgm-1",gpu="0"': (0, 80),
    'exported_namespace="vision",exported_pod="train-0",namespace="gpu-operator",pod="dcgm-1",gpu="1"': (97, 97),
    'namespace="gpu-operator",pod="dcgm-1",gpu="2"': (0, 0),
    'namespace="speech",pod="train-0",gpu="0"': (0, 0),
}
"""In percent, in the first and in the second half of the time; the last one is scraped with `honorLabels`."""


CHARTED = {"n0": (50.0, 3000), "n1": (7.0, 500)}
"""What GPU 3 of a node does all the time: percent, MiB of 80,000; of n1's there are two MIG instances, each alike."""


def charted() -> Iterator[str]:
    """What dcgm-exporter says of GPUs on named nodes; each holder of a time slice of n0's has a sample."""
    gauges: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for node, (percent, mib) in CHARTED.items():
        for part in ('pod="a"', 'pod="b"') if node == "n0" else ('GPU_I_ID="1"', 'GPU_I_ID="2"'):
            labels = f'{{Hostname="{node}",gpu="3",UUID="GPU-{node}",modelName="NVIDIA A100",{part}}}'
            busy = (
                ("DCGM_FI_DEV_GPU_UTIL", percent) if node == "n0" else ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", percent / 100)
            )
            values = {busy[0]: busy[1], "DCGM_FI_DEV_FB_USED": mib, "DCGM_FI_DEV_FB_FREE": 80_000 - mib}
            for name, value in values.items():
                gauges.setdefault(name, {})[name + labels] = halves(value, value)
    for name, series in gauges.items():
        yield f"# TYPE {name} gauge"
        yield from samples(series)


def samples(series: Mapping[str, Iterable[tuple[int, float]]]) -> Iterator[str]:
    """OpenMetrics, of one metric's series: (minute, value)."""
    begin = time.time() - 60 * MINUTES
    for name, values in series.items():
        for minute, value in values:
            yield f"{name} {value} {begin + 60 * minute:.3f}"


def growing(per_s: float) -> list[tuple[int, float]]:
    return [(minute, 60 * minute * per_s) for minute in range(MINUTES + 1)]


def halves(first: float, second: float) -> list[tuple[int, float]]:
    return [(minute, first if 2 * minute < MINUTES else second) for minute in range(MINUTES + 1)]


def history() -> str:
    """The whole history, as text."""
    held = {
        f'gpuquota_gpu_seconds_total{{project="{project}",kind="{kind}"}}': growing(gpus)
        for (project, kind), gpus in HELD.items()
    }
    held_by = {
        f'gpuquota_user_gpu_seconds_total{{project="{project}",user="{user}",gpu_type="{gpu_type}"}}': growing(gpus)
        for (project, user, gpu_type), gpus in HELD_BY.items()
    }
    used = {f"DCGM_FI_DEV_GPU_UTIL{{{labels}}}": halves(*percents) for labels, percents in UTILISATION.items()}
    lines = [
        "# TYPE gpuquota_gpu_seconds counter",
        *samples(held),
        "# TYPE gpuquota_user_gpu_seconds counter",
        *samples(held_by),
        "# TYPE gpuquota_idle_gpu_seconds counter",
        *samples({"gpuquota_idle_gpu_seconds_total": growing(IDLE)}),
        "# TYPE DCGM_FI_DEV_GPU_UTIL gauge",
        *samples(used),
        "# EOF\n",
    ]
    return "\n".join(lines)


def run_prometheus(folder: Path, samples: str) -> Iterator[str]:
    """Yield the URL of a Prometheus with these samples."""
    server, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if server is None or promtool is None:
        skip_or_fail("no prometheus (Debian's package has it)")
    (folder / "samples").write_text(samples)
    (folder / "prometheus.yml").write_text("")
    data = folder / "data"
    if samples:
        made = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(folder / "samples"), str(data)]
        subprocess.run(made, check=True, capture_output=True)
    url = f"http://127.0.0.1:{(port := free_port())}"
    arguments = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={data}"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([server, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stderr=log) as process,
    ):
        try:
            until(lambda: process.poll() is not None or is_ready(url), "Prometheus")
            yield url
        finally:
            process.kill()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from run_prometheus(tmp_path_factory.mktemp("prometheus"), history())


def report(folder: Path, *words: str, command: tuple[str, ...] = ("report",)) -> tuple[int, str]:
    (kubeconfig := folder / "kubeconfig").write_text(KUBECONFIG)
    environment = {**os.environ, "HOME": str(folder), "GPUQUOTA_CONTEXT": ".", "KUBECONFIG": str(kubeconfig)}
    done = forked.run(programs.gpuquota, *command, *words, environment=environment)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_gpu_hours_by_project_and_kind_with_unused_ones_and_what_nobody_held(prometheus: str, tmp_path: Path) -> None:
    given = ("--since", f"{HOURS}h", "--prometheus", prometheus)
    code, shown = report(tmp_path, *given, "-o", "csv")
    assert code == 0, shown
    header, *rows = csv.reader(io.StringIO(shown))
    assert header == ["project", "guaranteed_gpu_hours", "borrowed_gpu_hours", "gpu_hours", "unused_gpu_hours"]
    figures = {name: tuple(map(float, row)) for name, *row in rows}
    assert list(figures) == ["speech", "vision", "(idle)"]
    assert figures["speech"] == pytest.approx((48, 0, 48, 12), rel=0.01)
    assert figures["vision"] == pytest.approx((24, 12, 36, 6), rel=0.01)
    assert figures["(idle)"] == pytest.approx((0, 0, 6, 0), rel=0.01)
    table = report(tmp_path, *given)[1]
    assert "GPU-HOURS" in table
    assert "UNUSED" in table
    assert json.loads(report(tmp_path, *given, "-o", "json")[1])[1]["borrowed"] == pytest.approx(12, rel=0.01)


def test_gpu_hours_by_user_and_type_and_what_they_cost(prometheus: str, tmp_path: Path) -> None:
    given = ("--since", f"{HOURS}h", "--prometheus", prometheus, "-o", "json")

    def rows(*words: str) -> list[dict[str, object]]:
        code, shown = report(tmp_path, *given, *words)
        assert code == 0, shown
        found: list[dict[str, object]] = json.loads(shown)
        return found

    def about(hours: float) -> object:
        return pytest.approx(hours * HOURS, rel=0.01)

    assert rows("--by", "user") == [
        {"project": "speech", "user": "bob", "gpu_hours": about(4)},
        {"project": "vision", "user": "eve", "gpu_hours": about(2.75)},
        {"project": "vision", "user": "", "gpu_hours": about(0.25)},
    ]
    prices = ("--price", "H100=4", "--price", "1")
    assert rows(*prices) == [
        {"project": "speech", "gpu_hours": about(4), "cost": about(4)},
        {"project": "vision", "gpu_hours": about(3), "cost": about(2.75 * 4 + 0.25)},
    ]
    assert rows("--by", "user", "--by", "gpu-type", "--price", "H100=4")[1:3] == [
        {"project": "vision", "user": "eve", "gpu_type": "H100", "gpu_hours": about(2.5), "cost": about(10)},
        {"project": "vision", "user": "", "gpu_type": "H100", "gpu_hours": about(0.25), "cost": about(1)},
    ]
    _, table = report(tmp_path, *given[:-2], "--by", "gpu-type", "--price", "H10O=4")
    assert "No GPU of type H10O was held; those that were held: H100, T4." in table
    assert "GPU TYPE" in table
    for words, message in (
        (("--price", "much"), "must be a price of a GPU-hour"),
        (("--by", "user", "--time-spent"), "leave out --by and --price"),
    ):
        code, shown = report(tmp_path, *given, *words)
        assert (code, message in shown) == (2, True), shown


def test_without_nvidias_exporter_nothing_is_said_of_use(tmp_path: Path) -> None:
    without = "\n".join(line for line in history().splitlines() if "DCGM" not in line) + "\n"
    for url in run_prometheus(tmp_path, without):
        given = ("--since", f"{HOURS}h", "--prometheus", url)
        assert "UNUSED" not in report(tmp_path, *given)[1]
        assert json.loads(report(tmp_path, *given, "-o", "json")[1])[0]["unused"] is None


def test_the_use_of_gpus_over_time_by_node_and_number(tmp_path: Path) -> None:
    top, hours = ("top", "--gpus"), 3
    for url in run_prometheus(tmp_path, "\n".join([*charted(), "# EOF\n"])):
        given = ("--since", f"{hours}h", "--prometheus", url)
        code, shown = report(tmp_path, *given, "-o", "json", command=top)
        assert code == 0, shown
        used = msgspec.json.decode(shown, type=tuple[DeviceUse, ...])
        assert [(one.node, one.device, one.model) for one in used] == [(node, 3, "NVIDIA A100") for node in CHARTED]
        for one, parts in zip(used, (1, 2), strict=True):
            percent, mib = CHARTED[one.node]
            assert {(point.percent, point.used_mib) for point in one.points} == {(percent, parts * mib)}
            assert one.memory_mib == parts * 80_000
            assert hours * 120 - 12 <= len(one.points) <= hours * 120
            assert one.points[-1].until <= time.time()
        table = report(tmp_path, *given, command=top)[1]
        assert "n1" in table, table
        assert "7 %" in table, table
        code, shown = report(tmp_path, "--since", "25h", "--prometheus", url, command=top)
        assert (code, "at most 1d" in shown) == (2, True), shown
    code, shown = report(tmp_path, "--since", "1h", command=top)
    assert code == 2
    assert "--prometheus URL or GPUQUOTA_PROMETHEUS" in shown


def test_a_mistake_is_named_with_what_to_do(prometheus: str, tmp_path: Path) -> None:
    for words, message in (
        ((), "--prometheus URL or GPUQUOTA_PROMETHEUS"),
        (("--prometheus", prometheus, "--since", "1y"), "for example 30d"),
        (("--prometheus", "localhost:9090"), "must be a URL such as http"),
        (("--prometheus", f"{prometheus}/grafana"), "404"),
    ):
        code, shown = report(tmp_path, *words)
        assert code == 2, shown
        assert message in shown
