"""The use of each GPU over time: bounded, means of intervals, on the page and in the command line."""

from __future__ import annotations

import json
import os
from threading import Event
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.history import GPU_USE_KEPT_S, GPU_USE_WIDTH_S, DeviceUse, UsePoint
from kfp_gpuquota.cli.display.gpus import use_table
from kfp_gpuquota.cluster.gpu_use import MOST_POINTS, GpuUseHistory
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.gpu_meter import Apart
from kfp_gpuquota.cluster.local.workers.sharing import simulated_directory
from kfp_gpuquota.fractions.activity import SIMULATED_FILE, GpuUse, SimulatedActivity
from kfp_gpuquota.fractions.devices import simulate
from kfp_gpuquota.fractions.processes import identify
from tests.cli.conftest import Cli
from tests.conftest import running_cluster
from tests.polling import until
from tests.web.conftest import visitor_of

if TYPE_CHECKING:
    from pathlib import Path

USES = st.builds(GpuUse, st.booleans(), st.floats(0, 100), st.none() | st.integers(0, 100_000))


def entry_of_this_process() -> str:
    """Return the name of the file with the memory of a process that has not exited."""
    found = identify(os.getpid())
    assert found is not None
    return f"{found.pid}-{found.start}"


LOOKS = st.lists(st.tuples(st.floats(1, 400), st.dictionaries(st.sampled_from("ab"), USES)), max_size=60)


@given(LOOKS)
def test_points_are_the_means_of_what_was_measured(looks: list[tuple[float, dict[str, GpuUse]]]) -> None:
    history, now, seen = GpuUseHistory(), 1e9, dict[tuple[str, float], list[GpuUse]]()
    for after_s, measured in looks:
        now += after_s
        history.add(measured, now)
        for name, use in measured.items():
            seen.setdefault((name, now // GPU_USE_WIDTH_S * GPU_USE_WIDTH_S), []).append(use)
    for name in "ab":
        uses = {at: found for (of, at), found in seen.items() if of == name}
        newest = max(uses, default=0.0)
        expected = [] if newest < now - GPU_USE_KEPT_S else sorted(uses)[-MOST_POINTS:]
        points = history.of(name)
        assert [point.at for point in points] == expected
        for point in points:
            percents = [use.percent for use in uses[point.at]]
            assert abs(point.percent - sum(percents) / len(percents)) < 0.1
            known = [use.used_mib for use in uses[point.at] if use.used_mib is not None]
            assert point.used_mib == max(known, default=None)
        since = now - 300
        assert history.of(name, since) == tuple(point for point in points if point.until > since)


def test_the_history_of_a_gpu_is_bounded_and_that_of_one_that_is_gone_is_forgotten() -> None:
    history = GpuUseHistory()
    for second in range(0, 5 * int(GPU_USE_KEPT_S), 10):
        history.add({"d": GpuUse(busy=True, percent=50.0)}, second)
    assert len(history.of("d")) == MOST_POINTS
    assert sum(len(values) for values in vars(history._rings["d"]).values()) == 4 * MOST_POINTS
    history.add({}, 7 * GPU_USE_KEPT_S)
    assert not history._rings


def test_a_clock_that_is_set_back_costs_the_points_of_the_time_to_come() -> None:
    """Else all that is measured until then is added to the newest point, for days if the clock was wrong by days."""
    history, width = GpuUseHistory(), GPU_USE_WIDTH_S
    for at, percent in ((10 * width, 10.0), (11 * width, 20.0), (99_999 * width, 30.0)):
        history.add({"d": GpuUse(busy=True, percent=percent)}, at)
    for _ in range(100):
        history.add({"d": GpuUse(busy=True, percent=50.0)}, 12 * width)
    history.add({"d": GpuUse(busy=True, percent=60.0)}, 13 * width)
    assert [(point.at / width, point.percent) for point in history.of("d")] == [(10, 10), (11, 20), (12, 50), (13, 60)]


def test_a_simulated_device_has_the_memory_of_its_entries(tmp_path: Path) -> None:
    simulate(tmp_path, 1024)
    (tmp_path / SIMULATED_FILE).write_text("35")
    for name, mib in ((entry_of_this_process(), "300"), (f"{os.getpid()}-1", "200"), ("strange", "9")):
        (tmp_path / "processes" / name).write_text(mib)
    assert SimulatedActivity({"d": tmp_path}).measure() == {"d": GpuUse(busy=True, percent=35.0, used_mib=300)}
    (tmp_path / "processes" / "19-1").write_text("2x")
    assert SimulatedActivity({"d": tmp_path}).measure()["d"].used_mib is None


def test_a_driver_that_does_not_answer_holds_up_nothing() -> None:
    answers = Event()

    class Driver:
        def measure(self) -> dict[str, GpuUse]:
            answers.wait(60)
            return {"d": GpuUse(busy=True, percent=35.0)}

    apart = Apart(Driver)
    assert [apart.measure() for _ in range(3)] == [{}, {}, {}]
    answers.set()
    assert until(apart.measure) == {"d": GpuUse(busy=True, percent=35.0)}


def test_a_table_has_the_mean_and_the_most_of_each_gpu() -> None:
    points = (UsePoint(0.0, 20.0, 1024), UsePoint(30.0, 60.0, 3072), UsePoint(60.0, 40.0))
    used = [DeviceUse(node="n", device=1, memory_mib=8192, points=points), DeviceUse(node="n", device=2)]
    text = use_table(used)
    assert [line.split() for line in text.splitlines()][1:] == [
        ["n", "1", "2", "40", "%", "60", "%", "2.0Gi", "3.0Gi", "8.0Gi"]
    ]
    assert use_table(used[1:]) == "no GPU was measured in this time"


def test_the_use_of_a_gpu_is_on_the_pages_of_its_node_and_its_job_and_in_the_command_line(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "home", ClusterConfig(gpus_per_node=1, gpu_memory_mib=1024)) as cluster:
        cluster.project("team-a", 1)
        cluster.submit("training")
        job = cluster.wait_for("training", lambda job: job.status.phase is Phase.RUNNING)
        (worker,) = job.status.workers
        directory = simulated_directory(cluster.home, worker.node, 0)
        simulate(directory, 1024)
        (directory / "processes" / entry_of_this_process()).write_text("256")
        (directory / SIMULATED_FILE).write_text("35")
        until(lambda: cluster.client.gpu_use(3600.0))
        (used,) = cluster.client.gpu_use(3600.0)
        assert (used.node, used.device, used.memory_mib) == (worker.node, 0, 1024)
        assert (used.points[-1].percent, used.points[-1].used_mib) == (35.0, 256)
        visitor = visitor_of(cluster)
        visitor.enter()
        for path, title in ((f"/nodes/{worker.node}", "GPU 0"), ("/jobs/team-a/training", f"{worker.node} GPU 0")):
            shown = visitor.get(path).text.partition('<section id="gpu-use"')[2]
            assert title in shown, path
            assert 'data-values="35 35' in shown
            assert 'data-values="25 25' in shown
        command_line = Cli(cluster)
        printed = json.loads(command_line("top --gpus --since 1h -o json"))
        assert printed[0]["points"][-1][1:] == [35.0, 256]
        assert "35 %" in command_line("top --gpus --since 1h")
