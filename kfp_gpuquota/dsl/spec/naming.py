"""The name of a step's job: the same for every attempt of one step of one run, and unique to it."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Final

from kfp_gpuquota.api.validation import MAX_NAME_LENGTH

Json = dict[str, Any]
# Of the executor input only this artifact's URI differs between the attempts of a step: by the number at its end.
ATTEMPT_ARTIFACT: Final = "executor-logs"
_ATTEMPT: Final = re.compile(r"-\d+$")
_DIGEST_LENGTH: Final = 10
_NUMBER_LENGTH: Final = 4


def job_name(label: str, *, run_id: str, task: str, executor_input: Json) -> str:
    """Return `label` as a DNS label, followed by a digest of the run, the task and its input.

    `task` is the step's name in its pipeline, or its full path where the iterations of a loop repeat the name.
    """
    identity = json.dumps([run_id, task, _less_attempt(executor_input)], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:_DIGEST_LENGTH]
    label_length = MAX_NAME_LENGTH - _DIGEST_LENGTH - _NUMBER_LENGTH - 1
    return f"{_dns_label(label)[:label_length].rstrip('-') or 'step'}-{digest}"


def numbered(name: str, number: int) -> str:
    """Return the name of the `number`-th job of the step, counted from 1."""
    return name if number == 1 else f"{name}-{number}"


def label_value(text: str) -> str:
    """Return the text as a label value: at most 63 letters, digits, "-_.", with a letter or a digit at both ends."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:MAX_NAME_LENGTH].strip("-_.")


def _less_attempt(executor_input: Json) -> Json:
    outputs = executor_input.get("outputs", {})
    artifacts = dict(outputs.get("artifacts", {}))
    if logs := artifacts.pop(ATTEMPT_ARTIFACT, None):
        artifacts[ATTEMPT_ARTIFACT] = [_ATTEMPT.sub("", each.get("uri", "")) for each in logs.get("artifacts", [])]
    return {**executor_input, "outputs": {**outputs, "artifacts": artifacts}}


def _dns_label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
