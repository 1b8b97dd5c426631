"""Environment variables that a cluster sets for each worker (docs/contracts.md). A job's own values never reach it."""

from __future__ import annotations

from typing import Final

WORKER_VARIABLES: Final = (
    "ELASTIC_CA_FILE",
    "ELASTIC_CHECKPOINT_DIR",
    "ELASTIC_COORDINATOR",
    "ELASTIC_ERROR_FILE",
    "ELASTIC_MEMORY_DIR",
    "ELASTIC_REPORT_FILE",
    "ELASTIC_SIMULATED_DEVICES",
    "ELASTIC_TOKEN_FILE",
    "ELASTIC_WORKER_ID",
    "JOB_NAME",
    "JOB_UUID",
    "POD_INDEX",
    "RUNAI_NUM_OF_GPUS",
)
