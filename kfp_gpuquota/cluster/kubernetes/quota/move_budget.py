"""Reserves what moves that gather free GPUs cost, in the status of the QuotaPolicy, before they are carried out.

Invariant: no move is carried out whose cost, with that of the moves before it in its window, is more than what is
stored. A new leader counts what is stored as spent. So a controller that is killed at any time exceeds no budget; it
may leave a part of one unused, at most a sixteenth of the budget more than its moves cost. Rejected: to store the cost
with the promises of the moved jobs, in the status of their GpuQuotas, which is written beside the evictions and not
before them.
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import Built, StatusWriter
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import QuotaPolicyStatus, ReservedMoves
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import NAME
from kfp_gpuquota.scheduler import Defragmented, promises_after_starts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api.placement import Placement
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.scheduler import Plan

_PARTS: Final = 16


class MoveBudget:
    """What is reserved in the present window. `wake()` requests a plan after more was stored."""

    def __init__(self, writer: Writer, rules: CurrentRules, wake: Callable[[], None]) -> None:
        self._rules, self._wake = rules, wake
        self._stored = self._wanted = ReservedMoves()
        self._status = StatusWriter(writer, self._built)

    def recalled(self) -> Defragmented:
        """Return what an earlier leader has reserved, as spent; called after the QuotaPolicy was read."""
        self._stored = self._wanted = self._rules.reserved_moves
        return Defragmented(self._stored.at, self._stored.gpu_seconds)

    def admitted(self, plan: Plan, promises: Mapping[str, tuple[Placement, ...]]) -> Plan:
        """Return what of the plan may be carried out: without moves that gather GPUs until their cost is stored.

        `promises` are those in force.
        """
        done, rule = plan.defragmented, self._rules.rules.defragmentation
        if done is None or not plan.move or rule is None:
            return plan
        window = rule.open_at(done.at)
        stored = self._stored if window is not None and self._stored.at >= window.start else ReservedMoves()
        if done.lost_gpu_s <= stored.gpu_seconds:
            return plan
        budget = 60 * rule.budget_gpu_minutes
        part = budget / _PARTS
        self._wanted = ReservedMoves(done.at, min(budget, part * (floor(done.lost_gpu_s / part) + 1)))
        self._status.decided(NAME)
        plan = msgspec.structs.replace(plan, move=(), defragmented=None)
        return msgspec.structs.replace(plan, promises=promises_after_starts(promises, plan))

    def close(self) -> None:
        """Cancel what is not written yet."""
        self._status.close()

    def _built(self, name: str) -> Built | None:
        wanted = self._wanted
        if wanted == self._stored:
            return None
        body = {
            "apiVersion": labels.API_VERSION,
            "kind": "QuotaPolicy",
            "metadata": {"name": name},
            "status": msgspec.to_builtins(QuotaPolicyStatus(wanted)),
        }
        return Built(join(paths.QUOTA_POLICIES, name), name, body, wanted, lambda: self._written(wanted))

    def _written(self, reserved: ReservedMoves) -> None:
        self._stored = reserved
        self._wake()
