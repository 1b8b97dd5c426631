"""Warns owners of jobs whose GPUs are unused, and suspends these jobs, as policies say: engine/unused_gpus.py decides.

It runs in the daemon. GPUs are always measured, for the charts of their use: this machine's, and on Ray those of the
workers, by their actors. A device that several jobs share is used by all of them when one uses it: what each did is not
measured.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.policy import idle_rule_of
from kfp_gpuquota.api.wire import EventKind
from kfp_gpuquota.cluster.local.workers.sharing import device_name
from kfp_gpuquota.engine.records import Intent, with_status
from kfp_gpuquota.engine.unused_gpus import Observed, UnusedGpus, fewest
from kfp_gpuquota.errors import StateFileError
from kfp_gpuquota.fractions.activity import busy

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.cluster.local.gpu_meter import GpuMeter
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.cluster.local.storage.store import Store
    from kfp_gpuquota.engine.decisions import Decisions
    from kfp_gpuquota.engine.records import JobRecord
    from kfp_gpuquota.engine.unused_gpus import Warned

INTERVAL_S: Final = 5.0
"""A driver keeps the samples of about 20 s."""

UNREPORTED_S: Final = 15.0
"""For how long a driver, or a worker elsewhere, may report nothing: it keeps its samples longer, so none is lost."""

log = logging.getLogger(__name__)


class UnusedJobs:
    """One per daemon; `store` has the policies, `meter` measures the devices."""

    def __init__(
        self,
        meter: GpuMeter,
        store: Store,
        state: ClusterState,
        decisions: Decisions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._meter, self._store, self._state = meter, store, state
        self._decisions, self._loop = decisions, loop
        self._unused = UnusedGpus(unmeasured_s=UNREPORTED_S if meter.lags else 0.0)
        self._next: asyncio.Handle = loop.call_soon(self._look)

    def close(self) -> None:
        """Measure no more."""
        self._next.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(INTERVAL_S, self._look)
        try:
            self._look_once()
        except StateFileError as error:
            log.error("jobs whose GPUs are unused are looked at again in %g s: %s", INTERVAL_S, error)

    def _look_once(self) -> None:
        used = busy(self._meter.measure())
        policies = [policy for policy in self._store.load_policies() if policy.idle is not None]
        observed = self._observed(policies, used) if policies else {}
        verdicts = self._unused.observe(observed, self._state.clock())
        for one in verdicts.warn:
            self._warn(one)
        for one in verdicts.suspend:
            self._suspend(one)
        self._suspend_for_others(verdicts.preemptible)
        for job in [job for job in self._state.jobs.values() if job.runs]:
            self._keep_true(job)

    def _observed(self, policies: Iterable[WorkloadPolicy], used: Mapping[str, bool]) -> dict[str, Observed]:
        """Return the running jobs to which a policy applies, with what their GPUs did since the last time."""
        jobs = (job for job in self._state.jobs.values() if job.runs)
        rules = ((job.uid, idle_rule_of(job.spec.project, job.spec.kind, policies)) for job in jobs)
        ruled = {uid: found for uid, found in rules if found is not None}
        return {uid: self._observed_job(uid, policy, used) for uid, policy in ruled.items()}

    def _observed_job(self, uid: str, policy: WorkloadPolicy, used: Mapping[str, bool]) -> Observed:
        """Return what a job's GPUs did. One that was resumed since the last time is counted from then."""
        started_at = self._state.jobs[uid].status.started_at or 0.0
        return Observed(self._uses(uid, used), policy.idle, policy.name, active_at=started_at)

    def _uses(self, uid: str, used: Mapping[str, bool]) -> bool | None:
        """Return whether the job's GPUs were used; None if one of them was not measured."""
        found = [used.get(name) for name in self._devices_of(uid)]
        return None if not found or None in found else any(found)

    def _devices_of(self, uid: str) -> list[str]:
        """Return the names of the job's devices; a node that is not there any more has devices that nobody measures."""
        names: list[str] = []
        for record in self._state.alive_of(uid):
            node = self._state.nodes.get(record.worker.node)
            devices = {} if node is None else {device.index: device for device in node.devices}
            held = [devices.get(index) for index in record.worker.devices]
            names += ["" if node is None or device is None else device_name(node, device) for device in held]
        return names

    def _warn(self, one: Warned) -> None:
        job, reason = self._state.jobs[one.uid], one.warning
        log.warning("job %s of project %s: %s", job.spec.name, job.spec.project, reason.message)
        with self._state.noting(one.uid) as recorder:
            recorder.note(job, EventKind.GPUS_UNUSED, reason=reason)

    def _keep_true(self, job: JobRecord) -> None:
        """Record the warning that holds as the job's reason, and that none does (also one of an earlier daemon)."""
        one = self._unused.warned.get(job.uid)
        wanted = None if one is None else one.warning
        if job.status.reason != wanted and (one is not None or job.status.gpus_unused):
            with self._state.noting(job.uid) as recorder:
                recorder.record(with_status(job, reason=wanted))

    def _suspend_for_others(self, preemptible: Iterable[Warned]) -> None:
        """Suspend the fewest of these jobs, the longest unused first, that make a waiting job start."""
        ones = [one for one in preemptible if self._state.jobs[one.uid].runs]
        if not ones or not self._state.scheduler.ledger.has_waiting:
            return
        needed, starts = fewest(ones, self._starts_without)
        for one in needed:
            self._suspend(one, needed_by=self._state.jobs[starts[0]].spec.project)

    def _starts_without(self, ones: Sequence[Warned]) -> tuple[str, ...]:
        """Return the waiting jobs that the next plan would start, and only if these jobs were not there."""
        events: list[scheduler.Event] = []
        for one in ones:
            events.append(scheduler.JobRemoved(one.uid))
            events += [scheduler.WorkerGone(record.worker.id) for record in self._state.alive_of(one.uid)]
        return scheduler.what_if(self._state.scheduler, events, self._state.clock()).starts

    def _suspend(self, one: Warned, needed_by: str = "") -> None:
        job = self._state.jobs[one.uid]
        self._unused.forget(one.uid)
        reason = one.suspension(needed_by)
        log.warning("job %s of project %s is suspended: %s", job.spec.name, job.spec.project, reason.message)
        self._decisions.stop(job, Intent.SUSPEND, reason)
