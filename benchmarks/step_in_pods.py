"""What a routed step costs more than a plain one that waits at the gate for its GPU, on a real kubelet.

    python benchmarks/step_in_pods.py [--pairs 8]

Both steps run for a second in the pod that KFP's backend makes (tests/kfp_backend), on the same node, in turn. The last
line is JSON: overhead_s is the difference of the medians from the pod's creation to its end (bar: 2.0 s), tail_s the
median from the worker's end to that of the step's own process (bar: 0.5 s), launcher_mib the launcher's peak (bar: 60),
terminate_s from Terminate in KFP to the deletion of the workers' pods (bar: 2.0 s).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from common import print_conditions, print_result

sys.path.insert(0, str(Path(__file__).parents[1]))

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kfp_backend import shapes
from tests.kfp_backend.backend import Backend
from tests.kubernetes.conftest import address_of, install_crds
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.test_step_in_pods import ROLE, Steps, executor_input
from tools.devcluster import DevCluster, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = "import time, sys; time.sleep(1); print('worker-ended', time.time(), flush=True)"
LONG_RUNNING = "import time; print('as worker 0', flush=True); time.sleep(600)"
ENDED = re.compile(r"the step ended at ([\d.]+) with 0, at most (\d+) MiB")
WORKER_ENDED = re.compile(r"worker-ended ([\d.]+)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="measured pairs of steps (default 8)")
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder, system(Path(folder)) as controlled:
        steps = Steps(controlled, [sys.executable, "-c", WORK])
        plain, backend = plain_step(), Backend(controlled.cluster, steps.team, lambda pod: gated(steps.dressed(pod)))
        controlled.on_close.append(backend.close)
        seconds: dict[str, list[float]] = {"plain": [], "routed": []}
        tails, peaks = [], []
        for pair in range(pairs + 1):
            took = {
                "plain": timed(steps, backend, plain),
                "routed": timed(steps, steps.backend, shapes.Step("shout", steps.container, executor_input())),
            }
            if pair == 0:  # files in the page cache
                continue
            for which, (wall_s, _) in took.items():
                seconds[which].append(wall_s)
                print(f"{which:>6}: {wall_s:.2f} s", file=sys.stderr)
            log = took["routed"][1]
            end, worker_end = ENDED.search(log), WORKER_ENDED.search(log)
            assert end, log
            assert worker_end, log
            tails.append(float(end[1]) - float(worker_end[1]))
            peaks.append(int(end[2]))
        terminate_s = terminated(controlled)
    medians = {which: statistics.median(each) for which, each in seconds.items()}
    print_conditions("A step of 1 s in pods: routed against plain and gated", pairs=pairs, gpus=2, kubelet="real")
    print_result(
        overhead_s=round(medians["routed"] - medians["plain"], 2),
        tail_s=round(statistics.median(tails), 2),
        launcher_mib=max(peaks),
        terminate_s=round(terminate_s, 2),
        plain_s=round(medians["plain"], 2),
        routed_s=round(medians["routed"], 2),
    )


@contextlib.contextmanager
def system(folder: Path) -> Iterator[Controlled]:
    """A control plane, a node and a controller."""
    cluster = DevCluster.start(folder / "cluster", Options(kubelet=True, gpus=2))
    try:
        install_crds(cluster)
        for name in ("gpuquota-system", "gpuquota-reservations"):
            cluster.make_namespace(name)
        role = yaml.safe_load(ROLE.read_text())
        cluster.api.apply("/apis/rbac.authorization.k8s.io/v1/clusterroles/gpuquota-launcher", role)
        controlled = Controlled(cluster, folder, address=address_of(cluster))
        controlled.start()
        yield controlled
        controlled.close()
    finally:
        cluster.stop()


def plain_step() -> shapes.Step:
    """The same work in the step's own pod, which holds the GPU."""
    container: dict[str, Any] = {
        "image": "localhost/base:1",
        "command": [sys.executable, "-c", WORK],
        "resources": {"limits": {labels.GPU_RESOURCE: "1"}},
    }
    return shapes.Step("plain", container, executor_input())


def gated(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod as the webhook lets it in."""
    return {**pod, "spec": {**pod["spec"], "schedulingGates": [{"name": labels.QUOTA_GATE}]}}


def timed(steps: Steps, backend: Backend, step: shapes.Step) -> tuple[float, str]:
    """(seconds from the pod's creation to its end, its log)."""
    api, team = steps.api, steps.team
    run = backend.start("bench", step)
    path = backend.pod_path(run, step.name)
    while not api.exists(path):
        time.sleep(0.01)
    began = time.perf_counter()
    ended = api.until(path, lambda pod: pod["status"].get("phase") in {"Succeeded", "Failed"}, 120.0)
    wall_s = time.perf_counter() - began
    log = steps.controlled.cluster.container_log(team, ended["metadata"]["name"], "main")
    assert ended["status"]["phase"] == "Succeeded", log
    settled(steps)
    return wall_s, log


def settled(steps: Steps) -> None:
    """Return when no job of the team holds anything, and its GPU is free."""
    steps.controlled.wait(lambda: all(job["status"]["phase"] == "Succeeded" for job in steps.jobs().values()))


def terminated(controlled: Controlled) -> float:
    """Seconds from Terminate to the deletion of the worker's pod, before Argo has looked."""
    steps = Steps(controlled, [sys.executable, "-c", LONG_RUNNING])
    run = steps.run()
    steps.until_working(run)
    (name,) = steps.jobs()
    worker = f"/api/v1/namespaces/{steps.team}/pods/{name}-0"
    with steps.backend.away():
        began = time.perf_counter()
        steps.backend.terminate(run)
        steps.api.until(worker, lambda pod: "deletionTimestamp" in pod["metadata"])
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
