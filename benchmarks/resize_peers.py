"""The same changes of size under torchft and torchrun, for `resize.py --peer`.

Workers are processes of this file, train what `elastic_bench` trains, and write down each step as its workers do.
torchft: a lighthouse with its own defaults, one replica group for each worker; SIGTERM ends a worker after its step.
torchrun: one agent for each worker, plain DistributedDataParallel, a checkpoint every 20 steps; a crash takes agent and
worker away at once, as the loss of a node does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from elastic_bench import Pause, Step, Task, build, parse_steps, pauses

PEERS = ("torchft", "torchrun")
HOW_TO_INSTALL = """torchft is not installed here; it needs packages that conflict with kfp's, so give it a folder:
  python -m pip install --no-deps --target out/peers torchft
  python -m pip install --target out/peers opentelemetry-exporter-otlp-proto-http
  PYTHONPATH=out/peers python benchmarks/resize.py --peer torchft"""
CHECKPOINT_EVERY = 20
TIMEOUT_S = 120
LIGHTHOUSE = "lighthouse"


def check_installed(peer: str) -> None:
    """SystemExit(2) with what to do where the peer is not there."""
    if peer == "torchft" and importlib.util.find_spec("torchft") is None:
        print(HOW_TO_INSTALL, file=sys.stderr)
        raise SystemExit(2)


def measure(peer: str, directory: Path, task: Task, rounds: int, steps: int) -> tuple[list[Pause], list[Pause]]:
    """(planned changes, crashes), as worker 0 felt them; no crashes where it did not live through one, or stood still.

    (torchft 0.2's DistributedDataParallel fails an assertion where a peer is lost while it waits for gradients.)
    """
    with PeerBench(peer, directory, task, steps) as bench:
        bench.start("w0")
        bench.wait_for_size(1)
        for round_ in range(1, rounds + 1):
            bench.start(f"w{round_}")
            bench.wait_for_size(2)
            bench.end(f"w{round_}", signal.SIGTERM)
            bench.wait_for_size(1)
        planned = felt(bench.steps("w0"))
        try:
            crashes = [bench.crash(round_) for round_ in range(rounds)]
        except (PeerEndedError, TimeoutError) as gave_up:
            print(f"{peer}: {gave_up}")
            crashes = []
    return planned, crashes


def felt(steps: list[Step]) -> list[Pause]:
    """As `pauses`, by the widest gap near the change: torchft heals a joiner in a step before it counts it."""
    changes = [i for i in range(1, len(steps)) if steps[i].size != steps[i - 1].size]
    found = []
    for pause, i in zip(pauses(steps), changes, strict=True):
        widest_s = max(steps[k].end - steps[k - 1].end for k in range(max(1, i - 3), i + 1))
        found.append(replace(pause, pause_ms=widest_s * 1e3 - pause.step_ms))
    return found


class PeerEndedError(Exception):
    """Worker 0 ended, though another one was lost."""


class PeerBench:
    """Workers of a peer, each in a session of its own."""

    def __init__(
        self, peer: str, directory: Path, task: Task, settle_steps: int, *, checkpoint_every_s: float = 0.0
    ) -> None:
        self._peer, self._directory, self._task, self._settle = peer, directory, task, settle_steps
        self._checkpoint_every_s = checkpoint_every_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lighthouse = ""
        self._endpoint = f"localhost:{_free_port()}"

    def start(self, worker: str) -> None:
        """One more."""
        body = [str(Path(__file__).resolve()), self._peer, str(self._task.mparams), str(self._directory), worker]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        environment["BENCH_CHECKPOINT_EVERY_S"] = str(self._checkpoint_every_s)
        command = [sys.executable, *body]
        if self._peer == "torchft":
            environment["TORCHFT_LIGHTHOUSE"] = self._lighthouse
        else:
            is_host = f"--rdzv-conf=is_host={int(worker == 'w0')},timeout=600,last_call_timeout=1"
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1"]
            command += ["--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}"]
            command += ["--rdzv-id=bench", is_host, "--monitor-interval=0.1", *body]
        with (self._directory / f"log-{worker}").open("wb") as log:
            self._processes[worker] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def end(self, worker: str, number: int) -> None:
        """Signal the worker; with SIGKILL all that belongs to it."""
        process = self._processes[worker]
        if number == signal.SIGKILL:
            _kill_tree(process.pid)
        else:
            process.send_signal(number)

    def pause(self, worker: str) -> None:
        """Stop what trains, the agent's child or the worker itself."""
        pid = self._processes[worker].pid
        for each in _children(pid) or [pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)

    def crash(self, round_: int) -> Pause:
        """Three workers, one of them lost; what it cost the first one."""
        others = [f"c{round_}a", f"c{round_}b"]
        for worker in others:
            self.start(worker)
        self.wait_for_size(3)
        before = len(self.steps("w0"))
        self.end(others[0], signal.SIGKILL)
        self.wait_for_size(2)
        found = felt(self.steps("w0")[before - 5 :])
        self.end(others[1], signal.SIGTERM)
        self.wait_for_size(1)
        return found[0]

    def wait_for_size(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        """Worker 0 has made some steps at this size."""
        end = time.monotonic() + timeout_s
        while True:
            steps = self.steps("w0")[-self._settle :]
            if len(steps) == self._settle and all(step.size == size for step in steps):
                return
            if self._processes["w0"].poll() is not None:
                last = (self._directory / "log-w0").read_text().strip().splitlines()[-1:]
                raise PeerEndedError(f"worker 0 ended with the one that was lost: {''.join(last)}")
            if time.monotonic() > end:
                raise TimeoutError(f"{self._peer}: size {size} not within {timeout_s:g} s\n{self._logs()}")
            time.sleep(0.05)

    def steps(self, worker: str) -> list[Step]:
        """What the worker has written so far."""
        return parse_steps(self._directory / f"steps-{worker}")

    def _logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted(self._directory.glob("log-*")))

    def __enter__(self) -> Self:
        if self._peer == "torchft":
            self.start(LIGHTHOUSE)
            address = self._directory / "address"
            while not address.exists():
                time.sleep(0.05)
            self._lighthouse = address.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            _kill_tree(process.pid)
            process.wait()


def _kill_tree(pid: int) -> None:
    """The process and its children, which torchrun gives sessions of their own."""
    for each in (pid, *_children(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# In the workers


def train_torchft(task: Task, log: Any, worker: str) -> None:
    """As torchft's own example does it."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]  # noqa: PLC0415

    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    inner, plain = build(task)

    def load(state: dict[str, Any]) -> None:
        inner.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": inner.state_dict(), "optimizer": plain.state_dict()},
        replica_id=worker,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    model, optimizer = DistributedDataParallel(manager, inner), Optimizer(manager, plain)
    size = 1
    while not received:
        x = torch.zeros(max(1, task.global_batch // max(1, size)), task.width)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        size = manager.num_participants()
        log.write(f"{manager.current_step()} {size} {time.monotonic()}\n")
    manager.shutdown(wait=False)
    os._exit(0)


def serve_lighthouse(directory: Path) -> None:
    """In a process of its own: it logs each step."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]  # noqa: PLC0415

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    (directory / "address.new").write_text(lighthouse.address())
    (directory / "address.new").rename(directory / "address")
    signal.pause()


def train_torchrun(task: Task, log: Any, directory: Path) -> None:
    """Plain DistributedDataParallel with a checkpoint now and then."""
    torch.distributed.init_process_group("gloo")
    inner, optimizer = build(task)
    step, saved = 0, directory / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    every_s, saved_at = float(os.environ["BENCH_CHECKPOINT_EVERY_S"]), time.monotonic()
    model, size = torch.nn.parallel.DistributedDataParallel(inner), torch.distributed.get_world_size()
    x = torch.zeros(max(1, task.global_batch // size), task.width)
    while True:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.write(f"{step} {size} {time.monotonic()}\n")
        due = step % CHECKPOINT_EVERY == 0 if not every_s else time.monotonic() >= saved_at + every_s
        if torch.distributed.get_rank() == 0 and due:
            saved_at = time.monotonic()
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)


def main() -> None:
    """A worker: PEER MPARAMS DIRECTORY WORKER."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("mparams", type=float)
    parser.add_argument("directory", type=Path)
    parser.add_argument("worker")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.worker == LIGHTHOUSE:
        serve_lighthouse(given.directory)
    log = (given.directory / f"steps-{given.worker}").open("a", buffering=1)
    if given.peer == "torchft":
        train_torchft(Task(given.mparams), log, given.worker)
    else:
        train_torchrun(Task(given.mparams), log, given.directory)


if __name__ == "__main__":
    main()
