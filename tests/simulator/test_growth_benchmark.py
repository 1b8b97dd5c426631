"""`benchmarks/growth.py` on generated workloads, and the measured trainings of its simulation."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING

import growth

from kfp_gpuquota.simulator import POLICIES, Pace, SimulationOptions, TraceJob, TraceNode, simulate

if TYPE_CHECKING:
    import pytest


class TwoPhases:
    """Does 1 unit of work a second on each worker, and twice as much after the first 100."""

    def pace(self, placement: tuple[int, ...], done: float) -> Pace:
        workers = sum(placement)
        return Pace(workers * (2.0 if done >= 100 else 1.0), 100.0 if done < 100 else 300.0, throughput=workers)


def test_a_measured_training_changes_its_pace_and_stops_for_each_change_of_size() -> None:
    options = SimulationOptions(clock=perf_counter, leave_s=0, cool_down_s=0, pause_s=30.0, period_s=60.0)
    jobs = [TraceJob("one", "a", 1.0, 300.0, 1, training=TwoPhases())]
    result = simulate([TraceNode("n", 1, 0, 0)], jobs, POLICIES["gpuquota"], options)
    # it starts at 60, trains from 90, and does the last 200 of its work in 100 s
    assert result.completion.max_s == 60 + 30 + 100 + 100 - 1.0
    jobs = [TraceJob("one", "a", 1.0, 300.0, 1, most=2, training=TwoPhases())]
    result = simulate([TraceNode("n", 2, 0, 0)], jobs, POLICIES["gpuquota"], options)
    assert (result.completion.max_s, result.resizes) == (60 + 30 + 50 + 50 - 1.0, 0)


def test_no_guarantee_is_violated_and_growth_where_it_pays_is_sooner_than_fixed_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["growth.py", "--workloads", "1", "--teams", "4", "--sides", "mean,fifo"])
    growth.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["violations"] == 0
    assert found["mean_jct_s"] < found["fifo_jct_s"]
