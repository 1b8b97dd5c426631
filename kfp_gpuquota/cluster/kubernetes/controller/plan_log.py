"""Logs a plan: one line for the plan, and one for each job that is stopped, resized or moved.

A job that starts is logged by its pods' writes only; otherwise a thousand pods would have two lines each.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.client.process.logging_setup import fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Reason

log = logging.getLogger(__name__)


def log_plan(plan: scheduler.Plan, took_s: float) -> None:
    """Log the plan, unless it is empty."""
    if plan.empty:
        return
    counts = {kind: len(getattr(plan, kind)) for kind in ("bind", "evict", "resize", "move")}
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    extra = fields(plan=counts, waiting=len(plan.waiting), took_ms=round(1000 * took_s, 1))
    log.info("planned in %.1f ms: %s; %d jobs wait", 1000 * took_s, shown, len(plan.waiting), extra=extra)
    for kind, job, reason in _decisions(plan):
        extra = fields(decision=kind, job=job, reason=reason.code.value, beneficiary=reason.beneficiary)
        log.info("%s %s: %s", kind, job, reason.message, extra=extra)


def _decisions(plan: scheduler.Plan) -> Iterator[tuple[str, str, Reason]]:
    yield from (("evict", evict.job, evict.reason) for evict in plan.evict)
    yield from (("resize", resize.job, resize.reason) for resize in plan.resize)
    yield from (("move", move.job, move.reason) for move in plan.move)
