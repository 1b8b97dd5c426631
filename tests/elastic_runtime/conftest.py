"""Tests of the runtime play several processes of a job, one after the other, in their own."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_runtime.loop import trainings_of_process


class _Forgotten(dict[str, Any]):
    def setdefault(self, _directory: str, job: Any = None) -> Any:
        return job


@pytest.fixture(autouse=True)
def checkpoints_of_earlier_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a training continue from the checkpoints of an earlier one, as in a process of its own."""
    monkeypatch.setattr(trainings_of_process, "_directories", _Forgotten())
