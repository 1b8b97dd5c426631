"""Ends jobs that have run for their maximum run time."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.engine import requests
from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.engine.decisions import Decisions

RETRY_S: Final = 2.0
"""Between attempts to record that a job has run too long."""

log = logging.getLogger(__name__)


class RunTimes:
    """A timer for each job that runs and has a maximum run time."""

    def __init__(self, state: ClusterState, decisions: Decisions) -> None:
        self._state, self._decisions = state, decisions
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, uid: str) -> None:
        """Set the timer of a job that has started; of one without a maximum do nothing."""
        job = self._state.jobs.get(uid)
        if timer := self._timers.pop(uid, None):
            timer.cancel()
        if job is not None and job.runs_until is not None and not job.over:
            delay_s = max(0.0, job.runs_until - self._state.clock())
            self._timers[uid] = asyncio.get_running_loop().call_later(delay_s, self._due, uid)

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _due(self, uid: str) -> None:
        """End the job, unless it has ended or returned to the queue, where no time counts."""
        self._timers.pop(uid, None)
        job = self._state.jobs.get(uid)
        if job is None or job.runs_until is None or job.over:
            return
        if job.runs_until > self._state.clock():
            self.watch(uid)
            return
        try:
            self._decisions.stop(job, Intent.FAIL, requests.ran_too_long(job))
        except StateFileError as error:
            log.error("job %s has run for its maximum run time, and is ended later: %s", job.spec.name, error)
            self._timers[uid] = asyncio.get_running_loop().call_later(RETRY_S, self._due, uid)
