"""Effective training time under faults: the part of the wall time that counts, beside torchrun, torchft and Ray Train.

The same model trains on two workers on each side, one side after the other, through the same faults. In each minute:

    at 5 s   loss       a worker and all that belongs to it is killed (kill -9); its replacement starts at once
    at 20 s  eviction   a worker is asked to leave (SIGTERM), as for another job
    at 30 s  join       a worker is added
    at 40 s  stall      a worker is stopped (SIGSTOP); 15 s later it is killed, as an operator would, and replaced

`effective`: the applied steps, each counted once and as long as an undisturbed step of that side at that size, over the
wall time; `lost_s` splits the rest by the fault after which it was lost; `steady` was lost before the first one.
`wasted_steps` are steps that were computed again. `overhead` is the undisturbed step at two workers over that of
torchrun, plain DistributedDataParallel with a checkpoint every minute. Ray's TorchTrainer reports one every 20 steps;
its workers are raylets of one CPU, and an eviction is a drain. Last line: JSON.

Usage: python benchmarks/effective_time.py [--minutes 3] [--mparams 26] [--sides elastic,torchrun,torchft,ray]
                                           [--picture out/effective_time.png]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray_train
import resize_peers
import torch
from common import print_conditions, print_result
from elastic_bench import Bench, Step, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIDES = ("elastic", "torchrun", "torchft", "ray")
LOSS, EVICTION, JOIN, STALL = "loss", "eviction", "join", "stall"
SCRIPT = ((5.0, LOSS), (20.0, EVICTION), (30.0, JOIN), (40.0, STALL))
STALLED_S = 15.0
MINUTE_S = 60.0
CHECKPOINT_EVERY_S = 60.0
FIRST_STEPS = 20
"""Before the clock starts, both workers have made this many steps."""


class Side(Protocol):
    """Workers of one way of training; worker w0 stays through all faults, and its steps are those of the job."""

    def begin(self) -> None:
        """Start two workers, and return when they train together."""

    def start(self, worker: str) -> None:
        """Add a worker."""

    def kill(self, worker: str) -> None:
        """End it and all that belongs to it with SIGKILL."""

    def evict(self, worker: str) -> None:
        """Ask it to leave."""

    def pause(self, worker: str) -> None:
        """Stop its training process with SIGSTOP."""

    def steps(self) -> list[Step]:
        """Return what worker w0 has written."""


class Elastic:
    """Ours: the coordinator removes a worker from the job when it is evicted or stands still."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._wanted = bench, dict[str, None]()

    def begin(self) -> None:
        """Start two workers, and wait until they train together."""
        self._bench.target("w0", "w1")
        self._wanted = {"w0": None, "w1": None}
        self._bench.start("w0", "w1")
        self._bench.wait_for_size(2)

    def start(self, worker: str) -> None:
        """Add a worker."""
        self._wanted[worker] = None
        self._bench.target(*self._wanted)
        self._bench.start(worker)

    def kill(self, worker: str) -> None:
        """End it with SIGKILL."""
        self._wanted.pop(worker, None)
        self._bench.kill(worker)
        self._bench.target(*self._wanted)

    def evict(self, worker: str) -> None:
        """Ask it to leave."""
        del self._wanted[worker]
        self._bench.target(*self._wanted)

    def pause(self, worker: str) -> None:
        """Stop it with SIGSTOP."""
        self._bench.signal(worker, signal.SIGSTOP)

    def steps(self) -> list[Step]:
        """Return what worker w0 has written."""
        return self._bench.steps("w0")


class Peer:
    """torchrun, with an agent for each worker, or torchft, with a replica group for each."""

    def __init__(self, bench: resize_peers.PeerBench) -> None:
        self._bench = bench

    def begin(self) -> None:
        """Start two workers, and wait until they train together."""
        self._bench.start("w0")
        self._bench.wait_for_size(1)
        self._bench.start("w1")
        self._bench.wait_for_size(2)

    def start(self, worker: str) -> None:
        """Add a worker."""
        self._bench.start(worker)

    def kill(self, worker: str) -> None:
        """End it with SIGKILL."""
        self._bench.end(worker, signal.SIGKILL)

    def evict(self, worker: str) -> None:
        """Ask it to leave."""
        self._bench.end(worker, signal.SIGTERM)

    def pause(self, worker: str) -> None:
        """Stop it with SIGSTOP."""
        self._bench.pause(worker)

    def steps(self) -> list[Step]:
        """Return what worker w0 has written."""
        return self._bench.steps("w0")


class RayTrain:
    """TorchTrainer on a Ray cluster: a worker is a raylet, beside the head that w0 runs on."""

    def __init__(self, directory: Path) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415

        self._shape = {"num_cpus": 1, "object_store_memory": ray_train.STORE_BYTES, "include_dashboard": False}
        self._directory, self._nodes = directory, dict[str, Any]()
        self._cluster = Cluster(initialize_head=True, head_node_args=self._shape, shutdown_at_exit=False)

    def begin(self) -> None:
        """Start two workers, and wait until they train together."""
        import ray  # noqa: PLC0415

        self.start("w1")
        ray.init(self._cluster.address, log_to_driver=False)
        arguments = ("torch", "26m", str(self._directory), threading.Event())
        threading.Thread(target=ray_train.fit, args=arguments, daemon=True).start()
        ray_train.wait_for(self._directory, 2, FIRST_STEPS)

    def start(self, worker: str) -> None:
        """Add a worker."""
        self._nodes[worker] = self._cluster.add_node(**self._shape)

    def kill(self, worker: str) -> None:
        """End it with SIGKILL."""
        if (node := self._nodes.pop(worker, None)) is not None:
            self._cluster.remove_node(node, allow_graceful=False)

    def evict(self, worker: str) -> None:
        """Ask it to leave; the node goes when that is over."""
        node = self._nodes.pop(worker)
        ray_train.drain(self._cluster.address, node.node_id)
        threading.Timer(ray_train.DRAIN_S, self._cluster.remove_node, [node]).start()

    def pause(self, worker: str) -> None:
        """Stop what trains on the node with SIGSTOP."""
        import psutil  # type: ignore[import-untyped]  # noqa: PLC0415

        raylet = self._nodes[worker].all_processes["raylet"][0].process
        for child in psutil.Process(raylet.pid).children(recursive=True):
            if "Train" in " ".join(child.cmdline()):
                child.suspend()

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def steps(self) -> list[Step]:
        """Return what rank 0 has written."""
        return ray_train.steps_of(self._directory)


@dataclass
class Run:
    """What one side did: its steps, when the clock started and stopped, and when each fault came."""

    steps: list[Step]
    began: float
    ended: float
    faults: list[tuple[float, str]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """The measured time."""
        return self.ended - self.began

    def step_s(self, size: int) -> float:
        """Return the median of undisturbed steps at this size, those before the clock started included."""
        pairs = itertools.pairwise(self.steps)
        times = [b.end - a.end for a, b in pairs if a.size == b.size == size and b.step == a.step + 1]
        return statistics.median(times) if times else 0.0

    def counted(self) -> list[Step]:
        """Return the last computation of each step that was applied within the measured time."""
        return list({step.step: step for step in self.steps if self.began < step.end <= self.ended}.values())

    @property
    def wasted_steps(self) -> int:
        """The steps that were computed more than once, or whose result was discarded."""
        within = [step for step in self.steps if self.began < step.end <= self.ended]
        return len(within) - len({step.step for step in within})

    @property
    def effective(self) -> float:
        """The part of the measured time that counts."""
        return min(1.0, self._useful_s(self.counted()) / self.wall_s)

    def lost_s(self) -> dict[str, float]:
        """Return the seconds that do not count, by the last fault before them."""
        lost: Counter[str] = Counter()
        moments = [(self.began, "steady"), *self.faults, (self.ended, "")]
        counted = self.counted()
        for (begins, cause), (ends, _) in itertools.pairwise(moments):
            useful = self._useful_s(step for step in counted if begins < step.end <= ends)
            lost[cause] += ends - begins - useful  # type: ignore[assignment]
        return {cause: round(seconds, 2) for cause, seconds in lost.items()}

    def _useful_s(self, steps: Iterable[Step]) -> float:
        sizes = Counter(step.size for step in steps)
        return sum(count * self.step_s(size) for size, count in sizes.items())


def play(side: Side, minutes: int) -> Run:
    """Train through the script of faults, `minutes` times."""
    side.begin()
    wait(lambda: len(side.steps()) >= FIRST_STEPS, "the first steps")
    names = (f"w{number}" for number in itertools.count(2))
    present, began = "w1", time.monotonic()
    run = Run([], began, began + minutes * MINUTE_S)
    for minute in range(minutes):
        for at, fault in SCRIPT:
            sleep_until(began + minute * MINUTE_S + at)
            run.faults.append((time.monotonic(), fault))
            if fault == EVICTION:
                side.evict(present)
                continue
            if fault == STALL:
                side.pause(present)
                sleep_until(time.monotonic() + STALLED_S)
            if fault in {LOSS, STALL}:
                side.kill(present)
            present = next(names)
            side.start(present)
    sleep_until(run.ended)
    run.steps = side.steps()
    return run


def sleep_until(moment: float) -> None:
    """Wait; nothing is polled that would cost the measured processes time."""
    time.sleep(max(0.0, moment - time.monotonic()))


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Poll until it holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)


def measure(name: str, task: Task, minutes: int) -> Run:
    """Play one side in a directory of its own."""
    if name == "ray":
        return measured_apart(minutes)
    with tempfile.TemporaryDirectory() as directory:
        if name == "elastic":
            with Bench(Path(directory), task, FIRST_STEPS) as bench:
                return play(Elastic(bench), minutes)
        every = CHECKPOINT_EVERY_S if name == "torchrun" else 0.0
        with resize_peers.PeerBench(name, Path(directory), task, FIRST_STEPS, checkpoint_every_s=every) as peers:
            return play(Peer(peers), minutes)


def measured_apart(minutes: int) -> Run:
    """Play Ray's side in a process of its own: a trainer of Ray has no way to be stopped."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "run.json")
        command = [sys.executable, __file__, "--apart", str(result), "--minutes", str(minutes)]
        subprocess.run(command, check=True, timeout=600 + 90 * minutes)
        found = json.loads(result.read_text())
    steps = [Step(**step) for step in found.pop("steps")]
    return Run(steps, faults=[(at, fault) for at, fault in found.pop("faults")], **found)


def play_apart(result: Path, minutes: int) -> None:
    """Play Ray's side, and write the run."""
    import ray  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        side = RayTrain(Path(directory))
        try:
            result.write_text(json.dumps(asdict(play(side, minutes))))
        finally:
            ray.shutdown()
            side.close()
    os._exit(0)  # the trainer's thread has no end


def figures(run: Run, plain_s: float) -> dict[str, Any]:
    """Return the figures of one side; `plain_s` is an undisturbed step of plain DistributedDataParallel."""
    found: dict[str, Any] = {"effective": round(run.effective, 4), "wasted_steps": run.wasted_steps}
    if plain_s:
        found["overhead"] = round(run.step_s(2) / plain_s - 1, 4)
    return {**found, "steps": len(run.counted()), "lost_s": run.lost_s()}


def main() -> None:
    """Measure each side, and print and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=3)
    parser.add_argument("--mparams", type=float, default=26.0)
    parser.add_argument("--sides", default="elastic,torchrun")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--apart", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.apart:
        play_apart(given.apart, given.minutes)
        return
    sides = given.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        parser.error(f"--sides has {', '.join(sorted(unknown))}; known are {', '.join(SIDES)}")
    if "ray" in sides and given.mparams != ray_train.MPARAMS:
        parser.error(f"Ray's side has {ray_train.MPARAMS:g} M parameters: leave out --mparams, or ray")
    for name in sides:
        resize_peers.check_installed(name)
    print_conditions("effective training time", minutes=given.minutes, mparams=given.mparams, sides=sides)
    task = Task(given.mparams)
    runs = {name: measure(name, task, given.minutes) for name in sides}
    plain_s = runs["torchrun"].step_s(2) if "torchrun" in runs else 0.0
    results = {name: figures(run, plain_s) for name, run in runs.items()}
    for name, found in results.items():
        print(f"{name:>10}: {found}")
    if given.picture:
        draw(runs, given.picture)
    print_result(minutes=given.minutes, mparams=given.mparams, load=round(os.getloadavg()[0], 1), **results)


def draw(runs: dict[str, Run], path: Path) -> None:
    """Draw a bar of the measured time for each side: what counts, and what was lost after which fault."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    causes = ["steady", LOSS, EVICTION, JOIN, STALL]
    colors = ["#8a8a8a", "#c0392b", "#e67e22", "#f1c40f", "#8e44ad"]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.6 * len(runs)), layout="constrained")
    for row, run in enumerate(runs.values()):
        axes.barh(row, 100 * run.effective, color="#2e7d5b")
        axes.text(1, row, f"{run.effective:.1%}", va="center", color="white", weight="bold")
        left, lost = 100 * run.effective, run.lost_s()
        for cause, color in zip(causes, colors, strict=True):
            part = 100 * max(0.0, lost.get(cause, 0.0)) / run.wall_s
            axes.barh(row, part, left=left, color=color, label=cause if row == 0 else None)
            left += part
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the wall time: training that counts, and what was lost after each kind of fault")
    axes.legend(ncols=len(causes), loc="upper center", bbox_to_anchor=(0.5, 1.25), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
