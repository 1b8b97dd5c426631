"""The field's own cases, where their file is given by the environment variable GPUQUOTA_CONFORMANCE.

The file belongs to its publishers and is not part of this repository. Every `core` case must be right.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import conformance
import pytest

CASES = os.environ.get("GPUQUOTA_CONFORMANCE", "")

if CASES:
    cases = [case for case in json.loads(Path(CASES).read_text()) if case["tier"] == "core"]

    @pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])
    def test_a_core_case_is_right(case: conformance.Case) -> None:
        assert conformance.run(case) == []


def test_a_small_case_is_run_and_checked() -> None:
    assert conformance.run(small_case("Binding")) == []
    assert conformance.run(small_case("Pending")) == ["job-0: Binding@node0 is not Pending@"]


def small_case(expected: str) -> conformance.Case:
    limits = {"limit_gpus": -1, "limit_cpu": -1, "limit_memory": -1, "deserved_cpu": -1, "deserved_memory": -1}
    return {
        "kind": "unit",
        "actions": ["allocate"],
        "nodes": [
            {"name": "node0", "gpus": 1, "gpu_memory_mib": 100, "cpu": 10, "memory_bytes": 10**10, "max_pods": 110}
        ],
        "queues": [
            {"name": "q", "priority": 100, "deserved_gpus": 1, "over_quota_weight": 1, "creation_order": 0, **limits}
        ],
        "jobs": [
            {
                "name": "job",
                "queue": "q",
                "priority": 50,
                "preemptible": True,
                "min_available": 1,
                "table_order": 0,
                "age_minutes": 1,
                "age_rank": 0,
                "tasks": [{"name": "job-0", "state": "Pending", "gpu": 1}],
            }
        ],
        "expected": {"jobs": {"job": {"status": expected}}},
    }
