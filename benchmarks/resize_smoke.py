"""How long training stands still when a 0.5 M parameter model grows from one worker to two, and shrinks again.

Pause: the gap between the last step of the old size and the first of the new one, less the new size's median step, by
the clock of the worker that stays. Last line: JSON with leave_pause_ms, join_pause_ms, lost_steps.

Usage: python benchmarks/resize_smoke.py [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
from elastic_bench import Bench, Task, pauses


def main() -> None:
    """Grow and shrink `--rounds` times and print what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo, 0.5 M parameters, AdamW, {rounds} rounds")
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), Task(mparams=0.5)) as bench:
        bench.grow_and_shrink(rounds)
        found = pauses(bench.steps("w0"))
    joins = [p.pause_ms for p in found if p.to_size > p.from_size]
    leaves = [p.pause_ms for p in found if p.to_size < p.from_size]
    for pause in found:
        print(f"{pause.from_size} -> {pause.to_size}: {pause.pause_ms:.1f} ms, step {pause.step_ms:.1f} ms")
    result = {
        "join_pause_ms": round(statistics.median(joins), 2),
        "leave_pause_ms": round(statistics.median(leaves), 2),
        "join_pause_max_ms": round(max(joins), 2),
        "leave_pause_max_ms": round(max(leaves), 2),
        "lost_steps": sum(p.lost_steps for p in found),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
