"""Attacks of `benchmarks/coordinator_attack.py`: memory stays bounded and no honest step is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import coordinator_attack
import pytest

if TYPE_CHECKING:
    from pathlib import Path

WORST = (
    "get_of_one_large_value_many_times", "waits_of_many_keys", "silent_connections", "slow_bodies", "refused_workers",
    "events_without_pause",
)  # fmt: skip


@pytest.mark.slow
def test_no_attack_ends_the_service_or_costs_an_honest_job_a_step(tmp_path: Path) -> None:
    found = coordinator_attack.measure(tmp_path, list(WORST), 1.0)
    assert not found["ended"]
    assert found["lost_steps"] == 0
    assert found["steps"] > 0
    assert found["peak_mib"] <= coordinator_attack.BARS["peak_mib"]
