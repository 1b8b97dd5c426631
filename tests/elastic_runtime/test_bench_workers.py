"""The workers of a benchmark end with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import soaked
from tests.elastic_runtime.leftovers import processes_at
from tests.polling import until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import signal, sys
from pathlib import Path
from elastic_bench import Bench, Task, context
if __name__ == "__main__":
    context.set_forkserver_preload(["elastic_bench"])
    with Bench(Path(sys.argv[1]), Task(0.01)) as bench:
        bench.target("w0")
        bench.start("w0")
        bench.wait_for_size(1)
        bench.signal("w0", signal.SIGSTOP)
        print("stands", flush=True)
        signal.pause()
"""


@pytest.mark.slow
@soaked
def test_no_worker_of_a_benchmark_outlives_a_signal_to_its_process_group(tmp_path: Path) -> None:
    """As from `timeout`, of one that stands still: the others end when they see the benchmark's flag."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, str(program), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == b"stands\n"
        assert processes_at(tmp_path)
        os.killpg(bench.pid, signal.SIGTERM)
    until(lambda: not processes_at(tmp_path), lambda: f"the end of {processes_at(tmp_path)}")
