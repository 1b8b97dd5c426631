"""Measures the pause of training when it grows, shrinks, or loses a worker to kill -9.

Pause: the gap between the last step of the old size and the first of the new one, less the new size's median step, by
the clock of a worker that stays. For a crash the gap ends when the repeated step is applied. Last line: JSON with
step_ms, join_pause_ms, leave_pause_ms, crash_pause_ms, lost_steps (medians), and the largest of each; with `--peer`,
the same of a peer right after it, as peer_.... `..._switch_ms` is how long the loop itself stood still. On one machine
the pause of a leave is longer: the first step of the remaining workers shares cores and memory with the exit of the
leaving process, which takes 10 to 30 ms at 26 M on two cores; the effect disappears if the worker exits later.

`--sizes 8,4,8` measures these changes, as often as `--rounds` says, and nothing else; last line: each of them
("8->4": the median of its pauses), and the longest.

Usage: python benchmarks/resize.py [--mparams 26] [--rounds 3] [--steps 12] [--peer torchft|torchrun] [--sizes 8,4,8]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import resize_peers
import torch
from elastic_bench import Bench, Pause, Step, Task, pauses

if TYPE_CHECKING:
    from kfp_gpuquota.membership import AnnounceCommit


def main() -> None:
    """Grow, shrink and crash `--rounds` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mparams", type=float, default=26)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps at each size")
    parser.add_argument("--peer", choices=resize_peers.PEERS, help="measure it as well, in the same run")
    parser.add_argument("--sizes", help="through these sizes, such as 8,4,8")
    options = parser.parse_args()
    if options.peer:
        resize_peers.check_installed(options.peer)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo, {options.mparams:g} M parameters, AdamW")
    task = Task(mparams=options.mparams)
    if options.sizes:
        print(json.dumps(through(task, [int(size) for size in options.sizes.split(",")], options)))
        return
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), task, options.steps) as bench:
        bench.grow_and_shrink(options.rounds)
        planned = [received(pause) for pause in pauses(bench.steps("w0"))]
        crashes = [received(crash(bench, round_)) for round_ in range(options.rounds)]
        steps, commits = bench.steps("w0"), bench.commits
    result: dict[str, object] = {**summary(planned, crashes, steps), **switches(commits, len(planned))}
    if options.peer:
        result |= {"peer": options.peer, **measure_peer(options.peer, task, options.rounds, options.steps)}
    result["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result))


def through(task: Task, sizes: list[int], options: argparse.Namespace) -> dict[str, object]:
    """The first workers stay; others come and go."""
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), task, options.steps) as bench:
        wanted: list[str] = []
        started = 0
        for size in [sizes[0], *(size for _ in range(options.rounds) for size in sizes[1:])]:
            new = [f"w{started + i}" for i in range(size - len(wanted))]
            started += len(new)
            wanted = [*wanted[:size], *new]
            bench.target(*wanted)
            bench.start(*new)
            bench.wait_for_size(size)
        found = [received(pause) for pause in pauses(bench.steps("w0"))]
    changes: dict[str, list[float]] = {}
    for pause in found:
        changes.setdefault(f"{pause.from_size}->{pause.to_size}", []).append(pause.pause_ms)
    medians = {name: round(statistics.median(each), 1) for name, each in changes.items()}
    longest = round(max(pause.pause_ms for pause in found), 1)
    load = round(os.getloadavg()[0], 1)
    return {
        "mparams": task.mparams,
        **medians,
        "longest_ms": longest,
        "lost_steps": sum(p.lost_steps for p in found),
        "load": load,
    }


def measure_peer(peer: str, task: Task, rounds: int, steps: int) -> dict[str, float]:
    """The peer's figures."""
    with tempfile.TemporaryDirectory() as directory:
        planned, crashes = resize_peers.measure(peer, Path(directory), task, rounds, steps)
    for pause in planned + crashes:
        print(f"{peer}: {pause.from_size} -> {pause.to_size}: {pause.pause_ms:.1f} ms, lost {pause.lost_steps}")
    return {f"peer_{name}": value for name, value in summary(planned, crashes).items()}


def switches(commits: list[AnnounceCommit], count: int) -> dict[str, float]:
    """Of the first `count` planned changes, by the workers' own clocks."""
    whole = [commit for commit in commits if commit.complete][: count + 1]
    found: dict[str, list[float]] = {"join": [], "leave": []}
    for before, after in itertools.pairwise(whole):
        found["join" if len(after.members) > len(before.members) else "leave"].append(after.pause_ms)
    return {f"{kind}_switch_ms": round(statistics.median(each), 2) for kind, each in found.items() if each}


def received(pause: Pause) -> Pause:
    """Printed, too."""
    print(f"{pause.from_size} -> {pause.to_size}: {pause.pause_ms:.1f} ms, step {pause.step_ms:.1f} ms", flush=True)
    return pause


def crash(bench: Bench, round_: int) -> Pause:
    """Three workers, one of them killed; what it cost the first one."""
    others = [f"c{round_}a", f"c{round_}b"]
    bench.target("w0", *others)
    bench.start(*others)
    bench.wait_for_size(3)
    before = len(bench.steps("w0"))
    bench.kill(others[0])
    bench.wait_for_size(2)
    found = pauses(bench.steps("w0")[before - 5 :])
    bench.target("w0")
    bench.wait_for_size(1)
    return found[0]


def summary(planned: list[Pause], crashes: list[Pause], steps: list[Step] | None = None) -> dict[str, float]:
    """Medians and maxima, in ms; nothing of a kind that did not happen."""
    kinds = {
        "join": [p.pause_ms for p in planned if p.to_size > p.from_size],
        "leave": [p.pause_ms for p in planned if p.to_size < p.from_size],
        "crash": [p.pause_ms for p in crashes],
    }
    ends = [(a, b) for a, b in itertools.pairwise(steps or []) if a.size == b.size == 2]
    at_two = [(b.end - a.end) * 1e3 for a, b in ends] or [p.step_ms for p in planned if p.to_size == 2]
    result = {"step_ms": statistics.median(at_two)}
    result |= {f"{kind}_pause_ms": statistics.median(found) for kind, found in kinds.items() if found}
    result |= {f"{kind}_pause_max_ms": max(found) for kind, found in kinds.items() if found}
    result["lost_steps"] = sum(p.lost_steps for p in planned + crashes)
    return {name: round(value, 2) for name, value in result.items()}


if __name__ == "__main__":
    main()
