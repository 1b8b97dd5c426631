"""The labels of a job that runs a step of a Kubeflow pipeline."""

from __future__ import annotations

from typing import Final

RUN: Final = "pipeline-run"
"""The run's id, as KFP has it."""
NAME: Final = "pipeline-name"
"""The pipeline's name."""
TASK: Final = "pipeline-task"
"""The step's name in its run."""
